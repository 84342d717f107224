"""When Python looks for cycles in a coordinator's memory.

A look at all objects of a run of a thousand members takes a tenth of a second, in which no heartbeat is
answered, and Python takes one whenever a quarter more have come: every few steps. Nearly nothing that a step
makes is in a cycle. So young objects are looked at often and a few at a time, and all of them rarely.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator

YOUNG = 20_000
"""New objects before the young are looked at: milliseconds."""
MIDDLE = 2
"""Looks at the young before those that outlived one are looked at: three times as many."""
NEVER = 1 << 30
FULL_SECONDS = 600.0
"""Between two looks at all. Meanwhile connections that end leave what is in their cycles."""


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """No collection but those of young objects, until the end."""
    before = gc.get_threshold()
    gc.collect()
    # What is there now stays: modules and classes.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.asynccontextmanager
async def rare_full_collections(seconds: float = FULL_SECONDS) -> AsyncIterator[None]:
    """The same, with a full collection after so many seconds, again and again."""

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
