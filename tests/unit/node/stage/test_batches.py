"""Batches of tokens: fetched before their step, small ones of several steps at a time, whatever happens."""

import asyncio
from typing import cast

import numpy as np
import pytest

from node.config.schema import ModelSection, RunConfig, RunSection, TrainingSection
from node.model.labels import MOST_STEPS_AT_ONCE, BatchPart, steps_at_once, to_bytes
from node.stage.coordinator_client import Batches, CoordinatorClient
from wire.errors import ProtocolViolationError

INPUTS = BatchPart.INPUTS
STEPS = 40
CONFIG = RunConfig(
    run=RunSection(steps=STEPS),
    model=ModelSection(vocab=256, sequence=8),
    training=TrainingSection(global_batch=4, microbatch=1),
)


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, (4, 8))


class Coordinator:
    """Answers as the coordinator does. `broken`: calls from this step on fail."""

    def __init__(self) -> None:
        self.asked: list[range] = []
        self.broken = STEPS
        self.gate = asyncio.Event()
        self.gate.set()
        self.waits = asyncio.Event()
        """Set once a call finds the gate closed."""

    async def batch(
        self,
        step: int,
        *,
        part: BatchPart,
        size: int,
        held_out: bool = False,
        groups: tuple[int, ...] = (),
        steps: int = 1,
    ) -> bytes:
        wanted = range(step, step + steps)
        self.asked.append(wanted)
        if not self.gate.is_set():
            self.waits.set()
            await self.gate.wait()
        if wanted[-1] >= self.broken:
            raise ProtocolViolationError("no")
        data = b"".join(to_bytes(part, batch(one)) for one in wanted)
        assert len(data) == size
        return data


async def test_a_call_fetches_several_steps_and_each_is_the_same() -> None:
    coordinator = Coordinator()
    async with asyncio.TaskGroup() as group:
        batches = Batches(CONFIG, cast(CoordinatorClient, coordinator), group)
        for step in range(STEPS):
            assert np.array_equal(await batches.get(step, INPUTS), batch(step))
    assert coordinator.asked == [range(1), range(1, 17), range(17, 33), range(33, STEPS)]


async def test_after_a_rollback_batches_are_those_of_their_steps() -> None:
    coordinator = Coordinator()
    async with asyncio.TaskGroup() as group:
        batches = Batches(CONFIG, cast(CoordinatorClient, coordinator), group)
        for step in (0, 1, 18, 19, 3, 4, 5, 18, 39, 38):
            assert np.array_equal(await batches.get(step, INPUTS), batch(step))


async def test_what_did_not_come_in_time_is_asked_for_again_and_the_error_shows() -> None:
    coordinator = Coordinator()
    coordinator.broken = 5
    async with asyncio.TaskGroup() as group:
        batches = Batches(CONFIG, cast(CoordinatorClient, coordinator), group)
        for step in range(5):
            assert np.array_equal(await batches.get(step, INPUTS), batch(step))
        with pytest.raises(ProtocolViolationError):
            await batches.get(5, INPUTS)


async def test_an_epoch_that_ends_while_a_batch_is_on_its_way_spoils_it_for_nobody() -> None:
    coordinator = Coordinator()
    async with asyncio.TaskGroup() as group:
        batches = Batches(CONFIG, cast(CoordinatorClient, coordinator), group)
        await batches.get(0, INPUTS)
        coordinator.gate.clear()
        waiting = asyncio.create_task(batches.get(1, INPUTS))
        await coordinator.waits.wait()
        waiting.cancel()
        await asyncio.wait([waiting])
        coordinator.gate.set()
        assert np.array_equal(await batches.get(1, INPUTS), batch(1))
    assert coordinator.asked == [range(1), range(1, 1 + MOST_STEPS_AT_ONCE)]


async def test_what_an_earlier_coordinator_sent_is_forgotten() -> None:
    coordinator = Coordinator()
    async with asyncio.TaskGroup() as group:
        batches = Batches(CONFIG, cast(CoordinatorClient, coordinator), group)
        await batches.get(0, INPUTS)
        await batches.get(1, INPUTS)
        batches.forget()
        assert np.array_equal(await batches.get(2, INPUTS), batch(2))
    assert coordinator.asked == [range(1), range(1, 17), range(2, 3), range(3, 19)]


def test_large_batches_are_fetched_one_at_a_time() -> None:
    assert steps_at_once(INPUTS, 4, 8) == MOST_STEPS_AT_ONCE
    assert steps_at_once(INPUTS, 64, 128) == 2
    assert steps_at_once(INPUTS, 4096, 4096) == 1
    assert steps_at_once(BatchPart.DOCUMENTS, 64, 128) == MOST_STEPS_AT_ONCE
