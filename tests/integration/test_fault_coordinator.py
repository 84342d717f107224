"""Faults of the coordinator in every phase, in real processes: nothing acknowledged is lost.

It is started again with `thinwire resume` at the same ports, from its database; nodes ride out the outage.
"""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from node.stage.coordinator_client import CoordinatorClient
from node.state.snapshot import list_snapshots
from node.telemetry.events import DiskRoom, NodeJoined, NodeLeft, PlacementMade, StepAborted
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import KILLED, FaultRun, held, small
from tests.support.faults import Fault, Kind, Phase
from tests.support.pki import hello
from tests.support.terminal import assert_never_silent
from wire.errors import NotYetError
from wire.identity.credentials import NodeIdentity
from wire.messages import CoordinatorMessage

pytestmark = pytest.mark.timeout(240)

STEP = 3
SNAPSHOT = 2
FAILED = 1
UNITS = 5
"""Files of a snapshot beside its manifest."""
LEFT = 130


def killed(phase: Phase, *, step: int = STEP, skip: int = 0) -> Fault:
    return Fault(kind=Kind.COORDINATOR_KILL, phase=phase, step=step, skip=skip)


def test_a_killed_coordinator_finds_its_nodes_again(tmp_path: Path, prefork: Prefork) -> None:
    """Every stage is where it was: no step that was recorded is done again, none is lost."""
    # Between two batches, votes or answers of one step: some nodes have it, some do not.
    kills = (
        killed(Phase.FORWARD, step=3, skip=1),
        killed(Phase.VOTING, step=4),
        killed(Phase.VOTING, step=5, skip=2),
        killed(Phase.COMMIT_APPLY, step=6),
        killed(Phase.APPLY, step=7),
        killed(Phase.APPLY, step=8, skip=2),
    )
    with FaultRun(tmp_path, small(steps=5 + len(kills)), kills, launch=prefork.popen) as run:
        run.start()
        nodes = run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert [coordinator.exit_code for coordinator in run.coordinators] == [KILLED] * len(kills) + [0]
        assert [node.exit_code for node in nodes] == [0, 0, 0]
        placements = run.all(PlacementMade)
        assert len(placements) == len(kills) + 1
        for before, after in pairwise(placements):
            assert after.nodes == before.nodes
            recorded = [record.step for record in run.records if record.epoch <= before.epoch]
            # Small batches come several steps at a time, so the kill may come before a step is recorded.
            assert after.resume_step == max(recorded, default=-1) + 1


def test_a_coordinator_killed_while_it_admits_a_node(tmp_path: Path, prefork: Prefork) -> None:
    """The token's use was recorded but the certificate not sent: asking again takes no second use."""
    kill = killed(Phase.ENROLMENT, step=-1, skip=1)
    with FaultRun(tmp_path, small(), [kill], launch=prefork.popen) as run:
        run.start()
        token = run.coordinators[0].token
        run.add_nodes(3)
        assert run.tend(until=lambda event: isinstance(event, PlacementMade)) is None
        run.assert_all_happened()
        assert len({joined.node_id for joined in run.all(NodeJoined)}) == 3
        assert run.tend() == 0
        run.assert_undisturbed()
        assert token != run.coordinators[1].token


def test_a_coordinator_killed_while_a_replacement_fetches_its_state(tmp_path: Path, prefork: Prefork) -> None:
    node = Fault(kind=Kind.KILL, phase=Phase.VOTING, stage=1, step=STEP)
    faults = [node, killed(Phase.STATE_FETCH, step=SNAPSHOT)]
    with FaultRun(tmp_path, small(), faults, snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        assert run.tend(until=lambda event: isinstance(event, NodeLeft), restart=False) is None
        run.add_spare()  # has no layer on its own disk
        run.assert_ends_undisturbed()


def test_a_coordinator_killed_while_a_node_leaves(tmp_path: Path, prefork: Prefork) -> None:
    """The node repeats that it wants to leave."""
    leave = Fault(kind=Kind.LEAVE, phase=Phase.FORWARD, stage=1, step=STEP)
    with FaultRun(
        tmp_path, small(), [leave, killed(Phase.DRAIN, step=-1)], gather=4, launch=prefork.popen
    ) as run:
        run.start()
        nodes = [*run.add_nodes(3), run.add_spare()]
        run.assert_ends_undisturbed(codes=(0, LEFT))
        assert sorted(node.wait_exit() for node in nodes) == [0, 0, 0, LEFT]


def test_coordinator_and_node_killed_in_the_same_step(tmp_path: Path, prefork: Prefork) -> None:
    """The commit is recorded, and a node that voted for it is gone."""
    node = Fault(kind=Kind.KILL, phase=Phase.VOTING, stage=2, step=STEP - 1)
    kills = [node, killed(Phase.COMMIT_APPLY), Fault(kind=Kind.KILL, phase=Phase.STATE_FETCH, stage=0)]
    with FaultRun(tmp_path, small(), kills, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        assert run.tend() == 0
        assert run.times(kills[0]) and run.times(kills[1])
        run.assert_undisturbed()


def test_a_snapshot_torn_in_the_middle_of_a_write(tmp_path: Path, prefork: Prefork) -> None:
    """kill -9 between writing a temporary file and renaming it, a layer on the way and the last
    snapshot's manifest. The partial file is never used."""
    torn = [
        Fault(kind=Kind.TORN_WRITE, phase=Phase.SNAPSHOT, step=step, skip=skip)
        for step, skip in ((SNAPSHOT, 0), (6, UNITS))
    ]
    with FaultRun(tmp_path, small(), torn, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert [coordinator.exit_code for coordinator in run.coordinators] == [KILLED, KILLED, 0]
        assert list((run.run_dir / "snapshots").rglob(".*.tmp")) == []
        assert list_snapshots(run.run_dir / "snapshots")[-1] == 6


async def test_nodes_wait_while_a_resumed_coordinator_reads(tmp_path: Path, prefork: Prefork) -> None:
    """Reading may take long: here until the test lets go."""
    kill, hold = killed(Phase.VOTING), Fault(kind=Kind.HOLD, phase=Phase.RESUMING)
    with FaultRun(tmp_path, small(), [kill, hold], snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        nodes = run.add_nodes(3)
        assert run.tend(restart=False) == KILLED
        with held(run, hold):
            run.resume()
            while not run.times(hold):  # noqa: ASYNC110  another process's event
                await asyncio.sleep(0.02)
            identity = NodeIdentity.load(run.state_dirs[nodes[0]])
            assert identity is not None
            client = CoordinatorClient(f"127.0.0.1:{run.plan.control_port}", lambda: identity, 0.0)
            with pytest.raises(NotYetError, match="snapshot"):
                await client.session(hello("127.0.0.1:1"), asyncio.Queue(), _no_message, _never)
        assert run.tend() == 0
        run.assert_undisturbed()
        assert [node.exit_code for node in nodes] == [0, 0, 0]
        before, after = run.all(PlacementMade)
        assert after.nodes == before.nodes


async def _no_message(message: CoordinatorMessage) -> None:
    raise AssertionError(f"it said {message}")


def _never() -> None:
    raise AssertionError("it answered")


def test_a_full_disk_pauses_the_run_and_costs_no_step(tmp_path: Path, prefork: Prefork) -> None:
    full = Fault(kind=Kind.DISK_FULL, phase=Phase.SNAPSHOT, step=4, skip=1)
    with FaultRun(tmp_path, small(), [full], snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        nodes = run.add_nodes(3)
        assert run.tend() == 0
        run.assert_all_happened()
        paused, goes_on = (told.text for told in run.all(DiskRoom))
        assert paused.startswith("paused: ") and "disk full" in paused
        assert "has space again" in goes_on
        assert_never_silent(*run.coordinators)
        assert [node.wait_exit() for node in nodes] == [0] * 3
        assert run.all(StepAborted) == run.all(NodeLeft) == []
        run.assert_undisturbed()
