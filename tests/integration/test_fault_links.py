"""Faults of links and of numbers, in real processes: damaged tensors are never used, steps with non-finite
values never committed."""

from pathlib import Path

import pytest

from node.state.snapshot import list_snapshots
from node.telemetry.events import NodeJoined, NodeLeft, Notice, PlacementMade, RunFinished, StepAborted
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, held, small
from tests.support.faults import Fault, Kind, Phase

pytestmark = pytest.mark.timeout(240)

FAILED = 1
FRAMES = (Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.TRUNCATE, Kind.STALL, Kind.DELAY)
PACKED = ("tah", "fixed-8")


def test_frames_damaged_in_every_way_cost_no_step(tmp_path: Path, prefork: Prefork) -> None:
    """Each kind on every link in both directions: frames are sent again or awaited; no step is repeated."""
    points = [(kind, stage) for kind in FRAMES for stage in range(3)]
    faults = [
        Fault(
            kind=kind,
            phase=Phase.SENDING,
            stage=stage,
            step=step,
            skip=1,
            count=3 if kind is Kind.DELAY else 1,
            seconds={Kind.STALL: 1.0, Kind.DELAY: 0.05}.get(kind, 0.0),
        )
        for step, (kind, stage) in enumerate(points)
    ]
    config = small(steps=len(faults), snapshot_every=100, codecs=PACKED)
    with FaultRun(tmp_path, config, faults, launch=prefork.popen) as run:
        run.start()
        run.add_nodes(3)
        run.assert_ends_undisturbed()
        assert run.all(StepAborted) == []
        assert run.all(NodeLeft) == []


def test_a_peer_that_sends_nonsense_gives_up_its_stage(tmp_path: Path, prefork: Prefork) -> None:
    """Well-formed frames that no correct peer sends: one of the two nodes is faulty, so one is replaced."""
    nonsense = Fault(kind=Kind.NONSENSE, phase=Phase.SENDING, stage=1, step=2)
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=1)
    with FaultRun(tmp_path, small(), [nonsense, hold], launch=prefork.popen) as run:
        with held(run, hold):
            run.start()
            run.add_nodes(3)
            run.add_spare()
            run.tend(until=lambda _: len(run.all(NodeJoined)) == 4)
        run.assert_ends_undisturbed()
        first, *_, last = (placement.nodes for placement in run.all(PlacementMade))
        assert last[1] != first[1] and (last[0], last[2]) == (first[0], first[2])
        (note,) = [notice.text for notice in run.all(Notice) if "a spare takes stage 1" in notice.text]
        assert "another session" in note


@pytest.mark.parametrize(
    ("phase", "tensor", "count", "verdict"),
    [
        (Phase.FORWARD, "activation to be sent over boundary 1", 1, "codecs"),
        (Phase.BACKWARD, "the gradient of layer", 2, "uncompressed"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_in_one_line(
    phase: Phase, tensor: str, count: int, verdict: str, tmp_path: Path, prefork: Prefork
) -> None:
    """Tried again without compression, then stopped; resumed from the snapshot, it ends undisturbed."""
    config = small(codecs=PACKED)
    # Packing fails beside the compute thread, so only the step's last forward affects no later work.
    skip = config.microbatches - 1 if phase is Phase.FORWARD else 0
    nan = Fault(kind=Kind.NAN, phase=phase, stage=1, step=3, skip=skip, count=count)
    with FaultRun(tmp_path, config, [nan], snapshot_first=True, launch=prefork.popen) as run:
        run.start()
        first = run.add_nodes(3)
        assert run.tend() == FAILED
        run.assert_all_happened()
        (finished,) = run.all(RunFinished)
        assert finished.failed
        assert finished.reason.startswith("step 4 was not committed: ")
        assert f"{tensor}" in finished.reason and "at stage 1" in finished.reason
        assert verdict in finished.reason and "snapshot of step 3" in finished.reason
        assert "\n" not in finished.reason
        notice, *_ = run.all(Notice)
        assert "uncompressed" in notice.text
        assert max(record.step for record in run.records) == 2
        assert list_snapshots(run.run_dir / "snapshots") == (2, 3)
        assert [node.wait_exit() for node in first] == [FAILED] * 3
        run.resume()
        for node in first:
            run.add_node(state_dir=run.state_dirs[node])
        assert run.tend() == 0
        run.assert_undisturbed(codes=(0, FAILED))
