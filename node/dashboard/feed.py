"""The newest view of a run for any number of readers on one event loop, and patches between views.

Nothing is queued per reader. A slow reader skips views and gets the difference between the one it has and the
newest, so readers cost a coordinator no memory.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from node.analysis.run_view import RunView
from node.analysis.view_builder import RunViewBuilder
from node.telemetry.events import Event

PAUSE_FACTOR = 19
"""Pause between two views, in times that it takes to make one: views take 1/20 of a core."""
COLUMNS = ("steps", "times", "values")
"""Columns of a `node.analysis.run_view.Curve`, equally long."""

Fields = Mapping[str, Any]
"""A view as `RunView.to_fields` gives it."""


class Feed:
    """Applies events to a view. Belongs to one event loop."""

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
            clock: monotonic seconds.
            past_comes: `put_before` brings the past later.
        """
        self._builder = builder
        self._since_start: list[tuple[Event, float]] | None = [] if past_comes else None
        self._clock = clock
        self._version = 0
        self._made: tuple[int, RunView] | None = None
        self._fields: dict[str, Any] | None = None
        """Of the view that is made, once somebody reads them: they take longer than it."""
        self._next_at = 0.0
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()

    def apply(self, event: Event, at: float) -> None:
        """Apply an event of Unix time `at`."""
        self._builder.apply(event, at)
        if self._since_start is not None:
            self._since_start.append((event, at))
        self._version += 1
        self._wake()

    def put_before(self, past: RunViewBuilder) -> None:
        """Replace the builder by `past`, which has seen earlier events, and apply later ones to it."""
        for event, at in self._since_start or ():
            past.apply(event, at)
        self._builder, self._since_start = past, None
        self._version += 1
        self._wake()

    def close(self) -> None:
        """The process ends: readers get the newest view and are released."""
        self._closing.set()
        self._wake()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def view(self) -> RunView:
        """As `newest`, not as plain values."""
        return self._newest()[1]

    def newest(self) -> tuple[int, Fields]:
        """A version, which grows with every event, and the view as plain values.

        Made once for all readers and at a bounded rate, so it may lack the last moment's events, unless the
        feed is closed.
        """
        version, view = self._newest()
        if (fields := self._fields) is None:
            began = self._clock()
            fields = {name: _lists(value) for name, value in view.to_fields().items()}
            self._fields = fields
            self._took(began)
        return version, fields

    async def newer(self, version: int) -> None:
        """Wait for an event after `version`, or until the feed is closed."""
        while self._version <= version and not self.closed:
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the feed is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _newest(self) -> tuple[int, RunView]:
        began = self._clock()
        due = self.closed or began >= self._next_at
        if self._made is None or (due and self._made[0] != self._version):
            self._made = self._version, self._builder.view()
            self._fields = None
            self._next_at = began
            self._took(began)
        return self._made

    def _took(self, began: float) -> None:
        """What made a view has ended; the next one comes so much later."""
        ended = self._clock()
        self._next_at = max(self._next_at, began) + (1 + PAUSE_FACTOR) * (ended - began)

    def _wake(self) -> None:
        """Wake those who wait now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _lists(value: Any) -> Any:
    """`value` with lists in place of tuples, as readers of its JSON see it."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (list, tuple)) else value


# ---- patches: the fields that differ; of a curve that grew at its end, the new points. As page/stream.js.


def make_patch(before: Fields, after: Fields) -> dict[str, Any]:
    """The patch that makes `after` out of `before`; empty when they are equal."""
    return {
        name: _curve_patch(before[name], value) if name in before and _is_curve(value) else value
        for name, value in after.items()
        if name not in before or before[name] != value
    }


def apply_patch(before: Fields, patch: Fields) -> dict[str, Any]:
    """The view after `patch`; the inverse of `make_patch`."""
    after = dict(before)
    for name, value in patch.items():
        if isinstance(value, dict) and "keep" in value:
            keep = value["keep"]
            old = before[name]
            value = {"stride": old["stride"], **{c: [*old[c][:keep], *value[c]] for c in COLUMNS}}
        after[name] = value
    return after


def _is_curve(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"stride", *COLUMNS}


def _curve_patch(before: Fields, after: Fields) -> dict[str, Any]:
    """The number of equal points at the start and the points after them; the whole curve after a merge."""
    if before["stride"] != after["stride"]:
        return dict(after)
    pairs = zip(
        zip(*(before[c] for c in COLUMNS), strict=True),
        zip(*(after[c] for c in COLUMNS), strict=True),
        strict=False,
    )
    keep = 0
    for old, new in pairs:
        if old != new:
            break
        keep += 1
    return {"keep": keep, **{c: list(after[c][keep:]) for c in COLUMNS}}
