"""Faults as data: read from the environment, each as often in a run as it says, nothing without a plan."""

import errno
import fcntl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from node.telemetry import points
from node.telemetry.points import At, Phase
from tests.support import faults
from tests.support.faults import VARIABLE, Fault, Kind, Plan, fired_at
from wire.errors import UserError
from wire.frames import Frame, parse_frame
from wire.frames import pack_frame as packed
from wire.spec import Direction, TensorKey

TAG = 7


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test plans its own faults; afterwards this process knows none."""
    yield
    monkeypatch.delenv(VARIABLE, raising=False)
    faults.install()


def arm(monkeypatch: pytest.MonkeyPatch, directory: Path, *planned: Fault) -> Plan:
    plan = Plan(directory=str(directory), faults=planned)
    monkeypatch.setenv(VARIABLE, plan.to_json())
    faults.install()
    return plan


def write_snapshot_file(step: int) -> None:
    points.reach(Phase.SNAPSHOT, at=At.WRITE, step=step)


def frame(step: int, sequence: int = 0) -> bytes:
    key = TensorKey(1, step, 0, 0, Direction.ACTIVATION)
    return packed(Frame(99, sequence, key, 8, 0, bytes(range(8))), TAG)


def test_a_plan_reads_itself_back() -> None:
    fault = Fault(kind=Kind.STALL, phase=Phase.SENDING, stage=2, step=5, skip=1, count=3, seconds=0.5)
    plan = Plan(directory="d", faults=(fault,), control_port=7701)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"faults": [{"kind": "explode"}]}', '{"faults": 3}'])
def test_an_invalid_plan_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UserError, match=f"{VARIABLE} is no plan of faults"):
        faults.install()


def test_nothing_happens_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    faults.install()
    points.reach(Phase.FORWARD, stage=0, step=0)
    assert points.hook is None and points.frame_filter is None


def test_a_fault_happens_once_in_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full = Fault(kind=Kind.DISK_FULL, phase=Phase.SNAPSHOT, step=4, skip=1)
    plan = arm(monkeypatch, tmp_path, full)
    write_snapshot_file(3)
    write_snapshot_file(4)
    assert plan.markers(full) == []
    with pytest.raises(OSError) as failure:
        write_snapshot_file(4)
    assert failure.value.errno == errno.ENOSPC
    (marker,) = plan.markers(full)
    assert fired_at(marker) > 0
    faults.install()  # another process
    for _ in range(3):
        write_snapshot_file(4)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_tensor_is_spoiled_as_often_as_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arm(monkeypatch, tmp_path, Fault(kind=Kind.NAN, phase=Phase.BACKWARD, stage=1, step=2, count=2))
    spoiled = []
    for stage in (0, 1, 1, 1):
        tensor = torch.zeros(2)
        points.reach(Phase.BACKWARD, at=At.TENSOR, stage=stage, step=2, tensor=tensor)
        spoiled.append(bool(tensor.isnan().all()))
    assert spoiled == [False, True, True, False]


@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.TRUNCATE, Kind.DUPLICATE, Kind.REORDER, Kind.NONSENSE])
async def test_frames_are_damaged_as_planned(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arm(monkeypatch, tmp_path, Fault(kind=kind, phase=Phase.SENDING, stage=1, step=2))
    filter_ = points.frame_filter
    assert filter_ is not None
    other, first, second = frame(1), frame(2), frame(2, 1)
    assert filter_(other, 1, 2) == [other]
    written = [*filter_(first, 1, 2), *filter_(second, 1, 2)]
    match kind:
        case Kind.DUPLICATE:
            assert written == [first, first, second]
        case Kind.REORDER:
            assert written == [second, first]
        case Kind.TRUNCATE:
            assert written == [first[: len(first) // 2], second]
        case Kind.CORRUPT:
            assert sum((a ^ b).bit_count() for a, b in zip(written[0], first, strict=True)) == 1
        case _:
            assert parse_frame(written[0], TAG).session != 99
            assert written[1] == second


def test_held_threads_continue_when_the_gate_opens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fault = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=2)
    plan = arm(monkeypatch, tmp_path, fault)
    with ThreadPoolExecutor(1) as thread:
        with plan.gate(fault).open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            held = thread.submit(points.reach, Phase.FORWARD, stage=0, step=2)
            with pytest.raises(TimeoutError):
                held.result(timeout=0.1)
            assert len(plan.markers(fault)) == 1
        held.result(timeout=30)
    points.reach(Phase.FORWARD, stage=0, step=2)
