"""The newest view of a run, for any number of readers on one event loop.

Nothing is queued for a reader: whoever is slow misses what lies between, and gets the difference between what
it has and what is newest. So readers cost a coordinator no memory, however slow their networks are.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from node.analysis.run_view import RunView
from node.analysis.view import RunViewBuilder
from node.telemetry.events import Event

TIMES_AS_LONG = 19
"""Between two views passes so many times what making one takes: a twentieth of a core goes into views."""


class Feed:
    """Counts events into a view. All of it runs on one event loop."""

    def __init__(
        self,
        builder: RunViewBuilder,
        clock: Callable[[], float] = time.perf_counter,
        *,
        past_comes: bool = False,
    ) -> None:
        """
        Args:
            builder: may have seen a run's past already.
            clock: gives seconds and never goes back.
            past_comes: `put_before` brings it later.
        """
        self._builder = builder
        self._meanwhile: list[tuple[Event, float]] | None = [] if past_comes else None
        self._clock = clock
        self._version = 0
        self._made: tuple[int, RunView, dict[str, Any]] | None = None
        self._make_again = 0.0
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()

    def apply(self, event: Event, at: float) -> None:
        """Count an event of the Unix time `at`."""
        self._builder.apply(event, at)
        if self._meanwhile is not None:
            self._meanwhile.append((event, at))
        self._version += 1
        self._wake()

    def put_before(self, past: RunViewBuilder) -> None:
        """`past` has seen what happened before all that was counted here."""
        for event, at in self._meanwhile or ():
            past.apply(event, at)
        self._builder, self._meanwhile = past, None
        self._version += 1
        self._wake()

    def close(self) -> None:
        """The run's process ends: readers get what is newest and are let go."""
        self._closing.set()
        self._wake()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def view(self) -> RunView:
        """As `newest`."""
        return self._newest()[1]

    def newest(self) -> tuple[int, Mapping[str, Any]]:
        """The view as plain values, and its version, which grows with every event.

        Made once for all readers, however many there are and however often they ask; so it may lack what
        happened in the last moment, unless the feed is closed.
        """
        version, _, fields = self._newest()
        return version, fields

    async def newer(self, version: int) -> None:
        """Wait until something happened after `version`, or the feed is closed."""
        while self._version <= version and not self.closed:
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the feed is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _newest(self) -> tuple[int, RunView, dict[str, Any]]:
        began = self._clock()
        due = self.closed or began >= self._make_again
        if self._made is None or (due and self._made[0] != self._version):
            view = self._builder.view()
            self._made = self._version, view, _plain(view)
            ended = self._clock()
            self._make_again = ended + TIMES_AS_LONG * (ended - began)
        return self._made

    def _wake(self) -> None:
        """Let go whoever waits now; who waits later waits for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _plain(view: RunView) -> dict[str, Any]:
    """With lists where the view has tuples, as a reader of its JSON sees it."""
    return {name: _lists(value) for name, value in view.to_fields().items()}


def _lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
