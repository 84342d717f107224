"""The newest view of a run for any number of readers on one event loop, and patches between views.

Nothing is queued per reader. A slow reader skips views and gets the difference between the one it has and the
newest, so readers cost a coordinator no memory.

A view of a thousand nodes takes a quarter of a second to make. So it is made in slices, between which the
event loop does other work. It shows the run as it was when the first slice began. Readers that come meanwhile
wait for the same view.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from node.telemetry.events import Event, finite
from node.view.run_view import RunView
from node.view.slices import SLICE, Slices, ends_slice, in_turns, whole
from node.view.view_builder import RunViewBuilder

Result = TypeVar("Result")
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
        self._making: tuple[int, Slices[RunView]] | None = None
        """The view that is being made, for all who want one."""
        self._of_plain_values = asyncio.Lock()
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
        self._builder, self._since_start, self._making = past, None, None
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
        return whole(self.views())

    def views(self) -> Slices[RunView]:
        """The same in slices."""
        _, view = yield from self._newest()
        return view

    def newest(self) -> tuple[int, Fields]:
        """A version, which grows with every event, and the view as plain values.

        Made once for all readers and at a bounded rate, so it may lack the last moment's events, unless the
        feed is closed.
        """
        return whole(self._plain_values())

    async def view_in_turns(self) -> RunView:
        """As `view`, with turns of the event loop in between."""
        return await in_turns(self.views())

    async def newest_in_turns(self) -> tuple[int, Fields]:
        """As `newest`, with turns of the event loop in between."""
        # One after another: those behind the first find what it made.
        async with self._of_plain_values:
            return await in_turns(self._plain_values())

    async def newer(self, version: int) -> None:
        """Wait for an event after `version`, or until the feed is closed."""
        while self._version <= version and not self.closed:
            await self._changed.wait()

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the feed is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _newest(self) -> Slices[tuple[int, RunView]]:
        while True:
            if self._making is None:
                began = self._clock()
                due = self.closed or began >= self._next_at
                if self._made is not None and not (due and self._made[0] != self._version):
                    return self._made
                self._next_at = began
                self._making = self._version, self._timed(self._builder.slices())
            version, making = self._making
            try:
                next(making)
            except StopIteration as end:
                self._made, self._making, self._fields = (version, end.value), None, None
            except BaseException:  # whatever it is: a generator that raised has no further slices
                self._making = None
                raise
            else:
                yield

    def _plain_values(self) -> Slices[tuple[int, Fields]]:
        version, view = made = yield from self._newest()
        found = self._fields
        if found is None:
            found = yield from self._timed(_fields_of(view))
            if self._made is made:
                self._fields = found
        return version, found

    def _timed(self, work: Slices[Result]) -> Slices[Result]:
        """Work, and what its slices took."""
        spent = 0.0
        while True:
            began = self._clock()
            try:
                next(work)
            except StopIteration as end:
                self._took(began - spent)
                result: Result = end.value
                return result
            spent += self._clock() - began
            yield

    def _took(self, began: float) -> None:
        """What made a view has ended; the next one comes so much later."""
        ended = self._clock()
        self._next_at = max(self._next_at, began) + (1 + PAUSE_FACTOR) * (ended - began)

    def _wake(self) -> None:
        """Wake those who wait now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _fields_of(view: RunView) -> Slices[dict[str, Any]]:
    """As `RunView.to_fields`."""
    found: dict[str, Any] = {}
    for name in (one.name for one in fields(view)):
        value = getattr(view, name)
        if not isinstance(value, tuple):
            found[name] = finite(value)
            continue
        found[name] = []
        for number, item in enumerate(value):
            found[name].append(finite(item))
            if ends_slice(number):
                yield
    return found


def json_of(value: Any) -> Slices[str]:
    """Plain values as JSON without spaces."""
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            written = yield from json_of(item)
            items.append(f"{_dumps(key)}:{written}")
        return f"{{{','.join(items)}}}"
    if not isinstance(value, list) or len(value) <= SLICE:
        return _dumps(value)
    slices = []
    for first in range(0, len(value), SLICE):
        slices.append(_dumps(value[first : first + SLICE])[1:-1])
        yield
    return f"[{','.join(slices)}]"


_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


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
