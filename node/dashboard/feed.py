"""The newest view of a run for any number of readers on one event loop, and patches between views.

Nothing is queued per reader. A slow reader skips views and gets the difference between the one it has and the
newest, so readers cost a coordinator no memory.

A view of a thousand nodes takes a quarter of a second to make. So it is made on a thread, beside the event
loop. It shows the run as it was when that began. Readers that come meanwhile wait for the same view.
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
"""Pause between two views, in times that it takes to make one: views take 1/20 of a core."""
COLUMNS = ("steps", "times", "values")
"""Columns of a `node.view.run_view.Curve`, equally long."""

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
        self._making = asyncio.Lock()
        """One reader makes a view; those behind it find what it made."""
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

    async def view(self) -> RunView:
        """As `newest`, not as plain values."""
        async with self._making:
            return (await self._newest())[1]

    async def newest(self) -> tuple[int, Fields]:
        """A version, which grows with every event, and the view as plain values.

        Made once for all readers and at a bounded rate, so it may lack the last moment's events, unless the
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
        """Wait for so long, or until the feed is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _newest(self) -> tuple[int, RunView]:
        newest, now = self._made, self._clock()
        if newest is None or (newest[0] != self._version and (self.closed or now >= self._next_at)):
            version, self._next_at = self._version, now
            # A copy stays as it is while events come.
            view = await self._on_thread(copy(self._builder).view)
            self._made = newest = version, view
            self._fields = None
        return newest

    async def _on_thread(self, make: Callable[[], Made]) -> Made:
        """What `make` gives. The next view comes so much later as it took."""
        began = self._clock()
        found = await asyncio.to_thread(make)
        ended = self._clock()
        self._next_at = max(self._next_at, began) + (1 + PAUSE_FACTOR) * (ended - began)
        return found

    def _wake(self) -> None:
        """Wake those who wait now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def json_of(value: Any) -> str:
    """Plain values as JSON without spaces."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


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
