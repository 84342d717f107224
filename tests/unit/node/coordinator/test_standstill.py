"""A coordinator that stood still (stopped, swapped out, on a paused machine) blames no node for it."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from node.coordinator import coordinator as module
from node.coordinator import disk as disk_module
from node.run_state.actions import Action, Released
from node.run_state.epoch import PLACING_SECONDS
from node.telemetry import events
from tests.support.machine_driver import (
    RECONNECT,
    REGROUP,
    SILENT,
    Driver,
    finishes,
    of_kind,
    placement_of,
    sent,
)
from tests.unit.node.coordinator.test_carried_out import CONFIG, SECONDS, scene
from tests.unit.node.run_state.test_machine_stragglers import wait
from wire.errors import DiskFullError
from wire.messages import Begin


def test_unread_heartbeats_make_nobody_dead() -> None:
    """Seats stay, nothing is rolled back; from then on nodes have the time that they have always had."""
    run = Driver().started("abc", 2)
    run.time += SILENT - 1
    run.machine.heard("a", run.time)
    run.machine.heard("b", run.time)
    still = 10 * SILENT
    run.time += still
    assert run.machine.tick(run.time, unseen=still) == []
    run.time += 0.5
    for node in "ab":
        run.machine.heard(node, run.time)
    assert run.machine.tick(run.time) == []
    run.time += 1
    actions = run.machine.tick(run.time)
    assert [released.node_id for released in of_kind(actions, Released)] == ["c"]


def test_a_node_heard_since_the_restart_gets_no_extra_time() -> None:
    run = Driver(stages=1).started("a")
    run.time += 10 * SILENT
    run.machine.heard("a", run.time)
    assert run.machine.tick(run.time, unseen=10 * SILENT) == []
    run.time += SILENT + 0.5
    assert of_kind(run.machine.tick(run.time), Released)


def test_a_lost_connection_has_its_moment_although_the_coordinator_stood_still() -> None:
    run = Driver().started("abc")
    run.machine.disconnected("b", run.time)
    run.time += 60
    assert run.machine.tick(run.time, unseen=60) == []
    assert sent(run.hello("b", epoch=1)) == [Begin(epoch=1, step=0)]
    run.machine.disconnected("b", run.time)
    assert of_kind(run.tick(RECONNECT + 0.5), Released)


def test_a_seat_is_kept_for_who_comes_back_although_the_coordinator_stood_still() -> None:
    run = Driver(stages=3, min_stages=2, every=2).started("abc", 2)
    run.die("b")
    for node in "ac":
        run.machine.heard(node, run.time + 600)
    run.time += 600
    assert run.machine.tick(run.time, unseen=600) == [], "b could not come back"
    assert run.tick(REGROUP - 2) == []
    assert placement_of(run.tick(2)) == ("a", "c")


def test_time_while_the_coordinator_was_suspended_does_not_count_against_nodes() -> None:
    run = Driver(stages=2)
    run.join("abc")
    run.placed("a")
    assert wait(run, PLACING_SECONDS - 10) == []
    run.time += 60
    assert run.machine.tick(run.time, unseen=60) == []
    assert wait(run, 9) == []
    actions = wait(run, 2)
    assert [released.node_id for released in of_kind(actions, Released)] == ["b"]
    run.placed("a")
    assert run.epoch.hosts == ("a", "c")
    assert wait(run, PLACING_SECONDS - 1) == []
    assert finishes(wait(run, 2)).keys() == {"c"}, "and it was no credit for the next epoch"


class Clock:
    """In place of `time`, for whoever does not sleep by it. Stands still but for `now`."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("stood_still", [True, False])
async def test_silence_counts_only_while_the_coordinator_listens(
    stood_still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, or on a paused machine, it has not read what its nodes went on saying."""
    clock, ticked = Clock(), asyncio.Event()
    monkeypatch.setattr(module, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(module, "time", clock)
    async with scene(tmp_path) as run:
        machine = run.coordinator._machine
        tick = machine.tick

        def told(now: float, *, unseen: float = 0.0) -> list[Action]:
            ticked.set()
            return tick(now, unseen=unseen)

        monkeypatch.setattr(machine, "tick", told)
        await run.peer("a").into_step()
        silent = CONFIG.coordinator.silent_seconds
        jump = silent + 100 if stood_still else module.STANDSTILL_SECONDS
        for _ in range(1 if stood_still else int(silent / jump) + 1):
            clock.now += jump
            for _ in range(3):  # the first may have been on its way
                ticked.clear()
                async with asyncio.timeout(SECONDS):
                    await ticked.wait()
        left = [event.reason for event in run.events if isinstance(event, events.NodeLeft)]
        assert len(left) == (not stood_still) and all(f"{silent:g} s" in reason for reason in left)


async def test_time_while_the_disk_is_full_does_not_count_against_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is paused: what its nodes say meanwhile is read, and layers are accepted, only afterwards."""
    clock, room = Clock(), threading.Event()
    monkeypatch.setattr(module, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(disk_module, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(module, "time", clock)

    def write() -> None:
        if not room.is_set():
            raise DiskFullError("disk full")

    async with scene(tmp_path) as run:
        machine = run.coordinator._machine
        await run.peer("a").into_step()
        disk = run.coordinator._disk
        writing = asyncio.create_task(disk.write(write))
        await disk.full()
        before, came = machine._unseen, run.coordinator._events
        for _ in range(100):
            clock.now += module.STANDSTILL_SECONDS / 2
            waiting = came.qsize()
            async with asyncio.timeout(SECONDS):
                # The first may have been on its way.
                while came.qsize() < waiting + 3:  # noqa: ASYNC110
                    await asyncio.sleep(0)
        room.set()
        await writing
        async with asyncio.timeout(SECONDS):
            while machine._unseen < before + 99 * module.STANDSTILL_SECONDS / 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not [event for event in run.events if isinstance(event, events.NodeLeft)]
