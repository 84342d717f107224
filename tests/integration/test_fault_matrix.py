"""Every fault of a node in every phase, in real processes: losses and weights keep their bits.

Faults of links and of the coordinator are in the files beside this one.
"""

import contextlib
from functools import partial
from pathlib import Path

import pytest

from node.telemetry.events import (
    Event,
    NodeJoined,
    NodeLeft,
    PlacementMade,
    Recovered,
    SnapshotStored,
    StepAborted,
)
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import KILLED, FaultRun, held, small, until_joined
from tests.support.faults import Fault, Kind, Phase
from tests.support.run_harness import Process

pytestmark = pytest.mark.timeout(240)

STEP = 3
SNAPSHOT = 2
"""The newest snapshot before `STEP`."""
IN_A_STEP = (
    Phase.FORWARD,
    Phase.SENDING,
    Phase.BACKWARD,
    Phase.VOTING,
    Phase.COMMIT_APPLY,
    Phase.APPLY,
)
LEFT = 130


def at(kind: Kind, phase: Phase, stage: int = 1, **more: int) -> Fault:
    """A fault of a stage at `STEP`, or at the snapshot before it."""
    step = SNAPSHOT if phase is Phase.SNAPSHOT else STEP
    return Fault(kind=kind, phase=phase, stage=stage, step=step, **more)


def _on_two_nodes(event: Event) -> bool:
    return isinstance(event, PlacementMade) and len(event.nodes) == 2


def exit_codes(nodes: list[Process]) -> list[int]:
    return sorted(node.wait_exit() for node in nodes)


# First and last stage have one neighbour, and are given what others are not: tokens, labels. In other phases
# they do as the stage between them, which dies in every phase where its node comes back by itself. A snapshot
# is left out while two are on their way, but never that of the last step.
KILLS = tuple(
    Fault(kind=Kind.KILL, phase=phase, stage=stage, step=step)
    for step, phase, stage in (
        (3, Phase.FORWARD, 0),
        (4, Phase.FORWARD, 2),
        (5, Phase.COMMIT_APPLY, 0),
        (6, Phase.COMMIT_APPLY, 2),
        (8, Phase.SNAPSHOT, 0),
        (9, Phase.VOTING, 1),
        (12, Phase.SNAPSHOT, 2),
    )
)


def test_spares_take_the_stages_of_killed_nodes(tmp_path: Path, prefork: Prefork) -> None:
    """One node after the other dies, in later and later steps. Each death is noticed by its connection, and a
    spare goes on from a snapshot."""
    count = 3 + len(KILLS)
    with FaultRun(tmp_path, small(steps=12), KILLS, gather=count, launch=prefork.popen) as run:
        run.start()
        nodes = [*run.add_nodes(3), *(run.add_spare() for _ in KILLS)]
        run.assert_ends_undisturbed(restart=False)
        assert exit_codes(nodes) == [KILLED] * len(KILLS) + [0] * 3
        placements, notices = run.all(PlacementMade), run.all(Recovered)
        assert len(placements) == count - 2 and len(notices) == len(KILLS)
        kept = {0, *(stored.step for stored in run.all(SnapshotStored))}
        for kill, before, after, notice in zip(KILLS, placements, placements[1:], notices, strict=False):
            (died,) = run.times(kill)
            _, left = run.after(died, NodeLeft)
            assert left.reason == "its connections closed", "its neighbours saw it, too"
            assert after.resume_step in kept and after.resume_step <= kill.step
            assert notice.text.startswith(f"back at step {after.resume_step} in ")
            assert "expected at most 10 s + " in notice.text
            changed = [stage for stage in range(3) if before.nodes[stage] != after.nodes[stage]]
            assert changed == [kill.stage] and left.node_id == before.nodes[kill.stage]


def test_a_node_killed_in_every_phase_comes_back_each_time(tmp_path: Path, prefork: Prefork) -> None:
    """No spare: the same identity is started again, after being killed while it fetched its state as well."""
    kills = [
        Fault(kind=Kind.KILL, phase=phase, stage=1, step=step, skip=phase is Phase.BACKWARD)
        for step, phase in enumerate(IN_A_STEP, start=2)
    ]
    fetching = Fault(kind=Kind.KILL, phase=Phase.STATE_FETCH, stage=1, step=SNAPSHOT)
    enrolling = Fault(kind=Kind.KILL, phase=Phase.ENROLMENT)
    faults = [enrolling, *kills, fetching]
    with FaultRun(tmp_path, small(steps=10), faults, snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        # A token for three nodes admitted all of them: the one that lost its certificate had kept its key.
        assert len({joined.node_id for joined in run.all(NodeJoined)}) == 3
        assert exit_codes(run.nodes) == [KILLED] * (len(kills) + 2) + [0, 0, 0]


def test_a_node_that_leaves_loses_nothing_and_may_die_as_it_does(tmp_path: Path, prefork: Prefork) -> None:
    """Ctrl-C: the step ends, its state is saved, the spare goes on with the next step. Another node leaves
    later, and is killed while its state is saved."""
    leaves = at(Kind.LEAVE, Phase.VOTING), Fault(kind=Kind.LEAVE, phase=Phase.FORWARD, stage=2, step=6)
    kill = Fault(kind=Kind.KILL, phase=Phase.DRAIN, stage=2)
    with FaultRun(tmp_path, small(steps=9), [*leaves, kill], gather=5, launch=prefork.popen) as run:
        run.start()
        nodes = [*run.add_nodes(3), run.add_spare(), run.add_spare()]
        run.assert_ends_undisturbed(restart=False, codes=(0, LEFT))
        assert exit_codes(nodes) == [KILLED, 0, 0, 0, LEFT]
        first, second, *_ = (placement.resume_step for placement in run.all(PlacementMade))
        assert first == 0 and second > STEP, "the state of the step was kept"


def test_frozen_nodes_are_replaced_and_come_back_late(tmp_path: Path, prefork: Prefork) -> None:
    """SIGSTOP: the silence is noticed, the spare takes over; the late node waits in the lobby, and is the
    spare for the next one that freezes."""
    stops = [
        Fault(kind=Kind.STOP, phase=phase, stage=1, step=step)
        for phase, step in ((Phase.FORWARD, 3), (Phase.COMMIT_APPLY, 4), (Phase.SNAPSHOT, 6))
    ]
    # Each later step stands still until the late node is back: it is the spare there.
    holds = [Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=stop.step + 1) for stop in stops]
    with FaultRun(tmp_path, small(steps=8), [*stops, *holds], gather=4, launch=prefork.popen) as run:
        with contextlib.ExitStack() as every:
            gates = [every.enter_context(contextlib.ExitStack()) for _ in holds]
            for gate, hold in zip(gates, holds, strict=True):
                gate.enter_context(held(run, hold))
            run.start()
            nodes = [*run.add_nodes(3), run.add_spare()]
            for number, gate in enumerate(gates, 1):
                assert run.tend(until=partial(_late_one_is_back, run, number)) is None
                gate.close()
        run.assert_ends_undisturbed()
        assert exit_codes(nodes) == [0, 0, 0, 0]
        placements = run.all(PlacementMade)
        assert len(placements) == len(run.all(NodeLeft)) + 1 == len(stops) + 1
        for stop, before, after in zip(stops, placements, placements[1:], strict=False):
            (frozen,) = run.times(stop)
            _, left = run.after(frozen, NodeLeft)
            assert left.reason.startswith("it and its links have been silent for ")
            assert before.nodes[1] == left.node_id not in after.nodes
            late = next(node for node in nodes if run.node_id(nodes.index(node)) == left.node_id)
            assert any(f"epoch {before.epoch} is over" in line for line in late.lines)


def _late_one_is_back(run: FaultRun, number: int, event: Event) -> bool:
    """The `number`-th node that left has joined again."""
    left = run.all(NodeLeft)
    return isinstance(event, NodeJoined) and len(left) == number and event.node_id == left[-1].node_id


def test_a_node_that_froze_while_it_enrolled_waits_in_the_lobby(tmp_path: Path, prefork: Prefork) -> None:
    stop = Fault(kind=Kind.STOP, phase=Phase.ENROLMENT)
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=3)
    with FaultRun(tmp_path, small(), [stop, hold], launch=prefork.popen) as run:
        with held(run, hold):
            run.start()
            nodes = [*run.add_nodes(3), run.add_spare()]
            assert run.tend(until=lambda event: isinstance(event, PlacementMade)) is None
            late = next(node for node in nodes if run.node_id(nodes.index(node)) is None)
            late.wait_frozen()
            late.go_on()
            assert run.tend(until=until_joined(1)) is None
        run.assert_ends_undisturbed()
        (placement,) = run.all(PlacementMade)
        joined = run.all(NodeJoined)[-1].node_id
        assert joined == run.node_id(nodes.index(late)) not in placement.nodes


def test_connections_cut_in_every_phase_come_back(tmp_path: Path, prefork: Prefork) -> None:
    """A lost connection to a neighbour or to the coordinator costs no step."""
    points = [(phase, stage) for phase in IN_A_STEP for stage in range(3)]
    cuts = []
    for number, kind in enumerate((Kind.CUT, Kind.CUT_CONTROL)):
        for step, (phase, stage) in enumerate(points, 22 * number):
            cuts.append(Fault(kind=kind, phase=phase, stage=stage, step=step))
        for stage in range(3):
            cuts.append(Fault(kind=kind, phase=Phase.SNAPSHOT, stage=stage, step=20 + 20 * number))
    config = small(steps=42, snapshot_every=20)
    with FaultRun(tmp_path, config, cuts, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert run.all(StepAborted) == []
        assert run.all(NodeLeft) == []


def test_connections_cut_while_state_is_fetched(tmp_path: Path, prefork: Prefork) -> None:
    kill = at(Kind.KILL, Phase.VOTING)
    cuts = [
        Fault(kind=kind, phase=Phase.STATE_FETCH, stage=1, step=SNAPSHOT)
        for kind in (Kind.CUT, Kind.CUT_CONTROL)
    ]
    with FaultRun(tmp_path, small(), [kill, *cuts], snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        assert run.tend(until=lambda event: isinstance(event, NodeLeft), restart=False) is None
        run.add_spare()  # has no layer on its own disk
        run.assert_ends_undisturbed()


def test_the_model_moves_to_fewer_nodes_and_back(tmp_path: Path, prefork: Prefork) -> None:
    """No spare and `min_stages`: two nodes go on with three stages' layers, until a third is there again."""
    kill = Fault(kind=Kind.KILL, phase=Phase.BACKWARD, stage=1, step=11)
    # The two stand still on their way, until the third is there: they might be done by then.
    still = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=16)
    config = small(steps=30, snapshot_every=10, min_stages=2)
    with FaultRun(tmp_path, config, [kill, still], launch=prefork.popen) as run:
        with held(run, still):
            run.start()
            run.add_nodes(3)
            assert run.tend(until=_on_two_nodes, restart=False) is None
            run.add_spare()
            assert run.tend(until=until_joined(1), restart=False) is None
        assert run.tend(restart=False) == 0
        run.assert_undisturbed()
        assert [len(placement.nodes) for placement in run.all(PlacementMade)] == [3, 2, 3]
