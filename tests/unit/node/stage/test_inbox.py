"""Where tensors wait for the compute thread: any order, waits that end, nothing left behind."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from node.config.schema import ModelSection, RunConfig, RunSection, TrainingSection
from node.model.labels import MOST_STEPS_AT_ONCE, BatchPart, steps_at_once, to_bytes
from node.schedule.routing import neighbours, source_stage, target_stage
from node.stage.coordinator_client import Batches, CoordinatorClient
from node.stage.inbox import Inbox, LinksIO, NeighbourStuckError, StepInterrupted
from wire.errors import LinkError, LinkLostError, ProtocolViolationError
from wire.messages import AwaitedSums
from wire.spec import Direction, TensorKey

SECONDS = 20.0


def key(microbatch: int, direction: Direction = Direction.ACTIVATION, boundary: int = 0) -> TensorKey:
    return TensorKey(1, 0, microbatch, boundary, direction)


def in_thread(work: Callable[[], bytearray]) -> "Future[bytearray]":
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(work)
    finally:
        pool.shutdown(wait=False)


def test_tensors_of_earlier_steps_are_dropped_and_links_hear_of_those_that_they_hold() -> None:
    inbox = Inbox()
    for microbatch in range(3):
        inbox.put(key(microbatch), bytearray([microbatch]))
    inbox.put(key(0, Direction.SYNC_SHARE), bytearray([9]), 1)  # of another row, which was copied
    inbox.take(key(1))
    assert inbox.forget_before(0) == []
    assert sorted(inbox.forget_before(1)) == [key(0), key(2)]
    assert not inbox.holds(key(0)) and inbox.forget_before(1) == []


def test_tensors_are_taken_in_any_order_and_once() -> None:
    inbox = Inbox()
    for microbatch in range(3):
        inbox.put(key(microbatch), bytearray([microbatch]))
    for microbatch in (2, 0, 1):
        assert inbox.holds(key(microbatch))
        assert inbox.take(key(microbatch)) == bytearray([microbatch])
        assert not inbox.holds(key(microbatch))
    with pytest.raises(LinkLostError):
        inbox.take(key(0), timeout=0.0)


def test_a_wait_ends_when_the_tensor_comes_and_not_before() -> None:
    inbox = Inbox()
    taken = in_thread(lambda: inbox.take(key(1), SECONDS))
    inbox.put(key(0), bytearray(b"another"))
    inbox.put(key(1, Direction.GRADIENT), bytearray(b"the other way"))
    assert not taken.done()
    inbox.put(key(1), bytearray(b"it"))
    assert taken.result(SECONDS) == b"it"


def test_a_silent_neighbour_is_named_with_the_missing_tensor() -> None:
    with pytest.raises(LinkLostError) as stuck:
        Inbox().take(key(3, Direction.GRADIENT, boundary=2), timeout=0.0)
    assert "gradient of microbatch 3 " in str(stuck.value) and "boundary 2 " in str(stuck.value)


def test_a_row_is_named_whose_gradients_are_awaited() -> None:
    inbox, share, total = Inbox(), key(0, Direction.SYNC_SHARE), key(0, Direction.SYNC_SUM)
    waits = [
        in_thread(partial(inbox.take, total, SECONDS, 2)),
        in_thread(partial(inbox.take, share, SECONDS, 1)),
    ]
    while inbox.awaited != AwaitedSums(1, is_total=False):
        assert not any(wait.done() for wait in waits)
    inbox.put(share, bytearray(b"share"), 1)
    assert waits[1].result(SECONDS) == b"share"
    assert inbox.awaited == AwaitedSums(2, is_total=True)
    inbox.interrupt("over")
    with pytest.raises(StepInterrupted):
        waits[0].result(SECONDS)
    assert inbox.awaited is None
    inbox.reset()
    with pytest.raises(NeighbourStuckError) as stuck:
        inbox.take(total, timeout=0.0, row=2)
    assert stuck.value.row == 2


def test_a_neighbour_that_acknowledges_nothing_is_named() -> None:
    class Full:
        def send(self, *_tensor: object) -> None:
            raise LinkError("the outbox is full")

        def after_delivery(self, call: Callable[[], None]) -> None:
            call()

    links: Any = {0: Full()}
    for row in (None, 2):
        inbox = Inbox()
        io = LinksIO(stages=2, links=links, rows={2: links[0]}, inbox=inbox, over=lambda: False)
        if row is None:
            io.send(key(0, Direction.GRADIENT), torch.zeros(8, dtype=torch.uint8), 8)
        else:
            io.send_to_row(row, key(0, Direction.SYNC_SHARE), torch.zeros(8, dtype=torch.uint8), 8)
        with pytest.raises(StepInterrupted) as stop:
            inbox.check()
        stuck = stop.value.cause
        assert isinstance(stuck, NeighbourStuckError)
        assert (stuck.row, stuck.stage) == ((-1, 0) if row is None else (2, -1))


def test_a_neighbour_is_asked_for_a_tensor_that_does_not_come() -> None:
    made: list[object] = []
    asked = threading.Event()

    class Link:
        def want(self, key: TensorKey | None) -> None:
            made.append(("want", key))
            asked.set()

        def release(self, key: TensorKey) -> None:
            made.append(("release", key))

    inbox = Inbox()
    io = LinksIO(stages=2, links=cast(Any, {0: Link()}), inbox=inbox, over=lambda: False)
    inbox.put(key(3), bytearray(1))
    io.wait_any([key(3)])
    assert made == [], "what is here is not asked for"
    io.take(key(3))
    io.release(key(3))
    assert made == [("release", key(3))]
    waiting = threading.Thread(target=io.wait_any, args=([key(4)],))
    waiting.start()
    assert asked.wait(SECONDS) and made[-1] == ("want", key(4))
    inbox.put(key(4), bytearray(1))
    waiting.join(SECONDS)
    assert made[-1] == ("want", None)


def test_sums_go_to_other_rows_once_neighbours_have_what_was_queued_before() -> None:
    class Link:
        def __init__(self) -> None:
            self.sent: list[TensorKey] = []
            self.calls: list[Callable[[], None]] = []

        def send(self, key: TensorKey, payload: memoryview, elements: int = 0) -> None:
            self.sent.append(key)

        def after_delivery(self, call: Callable[[], None]) -> None:
            self.calls.append(call)

    up, down, row = Link(), Link(), Link()
    io = LinksIO(
        stages=3,
        links=cast(Any, {0: up, 2: down}),
        rows=cast(Any, {1: row}),
        inbox=Inbox(),
        over=lambda: False,
    )
    gradient, packed = key(3, Direction.GRADIENT), torch.zeros(8, dtype=torch.uint8)
    sums = [key(2, Direction.SYNC_SHARE), key(3, Direction.SYNC_SHARE)]
    io.send(gradient, packed, 8)
    for one in sums:
        io.send_to_row(1, one, packed, 8)
    assert up.sent == [gradient] and row.sent == down.calls == []
    for call in up.calls:
        call()
    assert row.sent == [] and len(down.calls) == 2
    for call in down.calls:
        call()
    assert row.sent == sums


def test_an_interruption_ends_every_wait_at_once() -> None:
    inbox = Inbox()
    waits = [in_thread(partial(inbox.take, key(microbatch), SECONDS)) for microbatch in range(3)]
    inbox.interrupt("the epoch is over")
    for wait in waits:
        with pytest.raises(StepInterrupted, match="the epoch is over"):
            wait.result(SECONDS)


def test_the_first_reason_wins_and_stays_until_reset() -> None:
    inbox, cause = Inbox(), LinkLostError("gone")
    inbox.check()
    inbox.put(key(0), bytearray(b"x"))
    inbox.interrupt("first", cause)
    inbox.interrupt("second")
    for _ in range(2):
        with pytest.raises(StepInterrupted, match="first") as stopped:
            inbox.take(key(0))  # even what is there belongs to a step that is over
        assert stopped.value.cause is cause
        with pytest.raises(StepInterrupted, match="first"):
            inbox.check()
    inbox.reset()
    inbox.check()
    assert not inbox.holds(key(0)), "tensors of the epoch before are forgotten"


def test_no_tensor_is_lost_between_threads() -> None:
    inbox = Inbox()
    count = 2000

    def put() -> None:
        for number in range(count):
            inbox.put(key(number ^ 1), bytearray(number.to_bytes(4, "big")))

    putter = threading.Thread(target=put)
    putter.start()
    taken = [inbox.take(key(number), SECONDS) for number in range(count)]
    putter.join(SECONDS)
    assert taken == [bytearray((number ^ 1).to_bytes(4, "big")) for number in range(count)]


# ---- who sends what to whom


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_boundarys_tensors_pass_between_linked_stages(stages: int, chunks: int) -> None:
    for boundary in range(stages * chunks - 1):
        forth = key(0, Direction.ACTIVATION, boundary)
        back = key(0, Direction.GRADIENT, boundary)
        sender, receiver = boundary % stages, (boundary + 1) % stages
        assert (source_stage(forth, stages), target_stage(forth, stages)) == (sender, receiver)
        assert (source_stage(back, stages), target_stage(back, stages)) == (receiver, sender)
        if stages > 1:
            assert receiver in neighbours(sender, stages, chunks, tied=False)
            assert sender in neighbours(receiver, stages, chunks, tied=False)


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_tied_gradients_pass_between_the_ends(stages: int) -> None:
    share, total = key(0, Direction.TIED_SHARE), key(0, Direction.TIED_SUM)
    last = stages - 1
    assert (source_stage(share, stages), target_stage(share, stages)) == (last, 0)
    assert (source_stage(total, stages), target_stage(total, stages)) == (0, last)
    assert last in neighbours(0, stages, 1, tied=True)
    assert 0 in neighbours(last, stages, 1, tied=True)


def test_neighbours() -> None:
    assert [neighbours(stage, 4, 1, tied=False) for stage in range(4)] == [(1,), (0, 2), (1, 3), (2,)]
    ring = [(1, 3), (0, 2), (1, 3), (0, 2)]
    assert [neighbours(stage, 4, 2, tied=False) for stage in range(4)] == ring
    assert [neighbours(stage, 4, 1, tied=True) for stage in range(4)] == ring
    assert [neighbours(stage, 2, 2, tied=True) for stage in range(2)] == [(1,), (0,)]
    assert neighbours(0, 1, 3, tied=True) == ()


# ---- batches of tokens: fetched before their step, small ones of several steps at a time, whatever happens


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
