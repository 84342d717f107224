"""A coordinator looks for cycles among young objects alone, and among all of them at set times."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from node.processes.cycles import MIDDLE, NEVER, YOUNG, rare_full_collections, short_collections

pytestmark = pytest.mark.usefixtures("frozen_again")


class Cycle:
    def __init__(self) -> None:
        self.own = self


def old_cycle(gone: Callable[[], object]) -> None:
    """One that nothing refers to, among the oldest objects."""
    cycle = Cycle()
    gc.collect(1)
    weakref.finalize(cycle, gone)


def test_old_objects_are_not_looked_at_by_themselves() -> None:
    before = gc.get_threshold()
    with short_collections():
        assert gc.get_threshold() == (YOUNG, MIDDLE, NEVER)
        assert gc.get_freeze_count() > 0, "collections skip what was there before"
        gone: list[bool] = []
        old_cycle(lambda: gone.append(True))
        kept = [[number] for number in range(10 * YOUNG)]
        assert not gone and len(kept) == 10 * YOUNG
        gc.collect()
        assert gone
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


async def test_all_are_looked_at_again_and_again() -> None:
    async with rare_full_collections(seconds=0.01), asyncio.timeout(60):
        for _ in range(2):
            gone = asyncio.Event()
            old_cycle(gone.set)
            await gone.wait()
