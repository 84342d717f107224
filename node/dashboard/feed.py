"""Provides the newest view of a run to any number of readers on one event loop, and patches between views.

Nothing is queued per reader. A slow reader skips views and gets the difference between its view and the
newest, so readers cost the coordinator no memory.

A view of a thousand nodes takes a quarter of a second to build. So it is built on a thread, and shows the run
as it was when that began. Readers that arrive meanwhile wait for the same view.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, TypeVar

from node.telemetry.events import Event
from node.view.run_view import RunView
from node.view.view_builder import RunViewBuilder

Made = TypeVar("Made")
PAUSE_FACTOR = 19
"""The pause after a view, as a multiple of the time to build it, so that views take 1/20 of a core."""
COLUMNS = ("steps", "times", "values")
"""The columns of a `node.view.run_view.Curve`, which have equal lengths."""

Fields = Mapping[str, Any]
"""A view as `RunView.to_fields` returns it."""


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
            builder: builds views. It may already have applied earlier events.
            clock: returns monotonic seconds.
            past_comes: whether `put_before` will add the past later.
        """
        self._builder = builder
        self._since_start: list[tuple[Event, float]] | None = [] if past_comes else None
        self._clock = clock
        self._version = 0
        self._made: tuple[int, RunView] | None = None
        self._fields: dict[str, Any] | None = None
        """The fields of the newest view, built on demand because they take longer than the view."""
        self._making = asyncio.Lock()
        """Lets one reader build a view that the waiting readers share."""
        self._next_at = 0.0
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()

    def apply(self, event: Event, at: float) -> None:
        """Apply an event that happened at Unix time `at`."""
        self._builder.apply(event, at)
        if self._since_start is not None:
            self._since_start.append((event, at))
        self._version += 1
        self._wake()

    def put_before(self, past: RunViewBuilder) -> None:
        """Replace the builder with `past`, which has earlier events, and apply the later events to it."""
        for event, at in self._since_start or ():
            past.apply(event, at)
        self._builder, self._since_start = past, None
        self._version += 1
        self._wake()

    def close(self) -> None:
        """Give readers the newest view and release them, because the process ends."""
        self._closing.set()
        self._wake()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    async def view(self) -> RunView:
        """The newest view, subject to the same rate limit as `newest`."""
        async with self._making:
            return (await self._newest())[1]

    async def newest(self) -> tuple[int, Fields]:
        """A version, which grows with every event, and the view as plain values.

        It is built once for all readers and at a limited rate. So it may lack the newest events, unless the
        feed is closed.
        """
        async with self._making:
            version, view = await self._newest()
            if (known := self._fields) is not None:
                return version, known
            fields: dict[str, Any] = await self._on_thread(view.to_fields)
            self._fields = fields
            return version, fields

    async def newer(self, version: int) -> None:
        """Wait for an event after `version`, or until the feed is closed."""
        while self._version <= version and not self.closed:
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the feed is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _newest(self) -> tuple[int, RunView]:
        newest, now = self._made, self._clock()
        if newest is None or (newest[0] != self._version and (self.closed or now >= self._next_at)):
            version, self._next_at = self._version, now
            # A copy does not change while events arrive.
            view = await self._on_thread(copy(self._builder).view)
            self._made = newest = version, view
            self._fields = None
        return newest

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        """Call `make` on a thread. Its duration delays the next view (`PAUSE_FACTOR`)."""
        began = self._clock()
        result = await asyncio.to_thread(make)
        ended = self._clock()
        self._next_at = max(self._next_at, began) + (1 + PAUSE_FACTOR) * (ended - began)
        return result

    def _wake(self) -> None:
        """Wake the current waiters. Later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def json_of(value: Any) -> str:
    """Plain values as JSON without spaces."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


# ---- patches: the fields that differ, and only the new points of a curve that grew. See page/stream.js.


def make_patch(before: Fields, after: Fields) -> dict[str, Any]:
    """The patch that turns `before` into `after`; empty if they are equal."""
    return {
        name: _curve_patch(before[name], value) if name in before and _is_curve(value) else value
        for name, value in after.items()
        if name not in before or before[name] != value
    }


def _is_curve(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"stride", *COLUMNS}


def _curve_patch(before: Fields, after: Fields) -> dict[str, Any]:
    """The number of equal first points, and the points after them; the whole curve if its stride changed."""
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
