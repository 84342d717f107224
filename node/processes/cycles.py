"""Tunes Python's garbage collector for a coordinator of many members.

A full collection in a run of a thousand members takes a tenth of a second, in which no heartbeat is answered.
By default, one runs whenever the number of objects has grown by a quarter, which is every few steps. Hardly
any object of a step is in a reference cycle. So young objects are collected often, a few at a time, and all
objects rarely.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator

YOUNG = 20_000
"""New objects between two collections of the young generation, which take milliseconds."""
MIDDLE = 2
"""Collections of the young generation per collection of the middle one, which is three times as large."""
NEVER = 1 << 30
FULL_SECONDS = 600.0
"""The seconds between two full collections. Connections that end in between leave cycles until then."""


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Collect only young objects until the block ends."""
    before = gc.get_threshold()
    gc.collect()
    # Exclude existing modules and classes from collections.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def rare_full_collections(seconds: float = FULL_SECONDS) -> AsyncIterator[None]:
    """Like `short_collections`, with a full collection every `seconds`."""

    async def collect() -> None:
        while True:
            await asyncio.sleep(seconds)
            gc.collect()

    with short_collections():
        collecting = asyncio.create_task(collect())
        try:
            yield
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])
