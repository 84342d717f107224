"""Members that lie, in real processes with two spares: the run ends with the bits of an undisturbed one."""

import fcntl
from pathlib import Path

import pytest

from node.faults import Fault, Kind, Phase
from node.telemetry.events import NodeJoined, Notice
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, small

pytestmark = pytest.mark.timeout(300)

FAILED = 1
ALWAYS = 1_000_000
STAGES = 3


def one_liar(directory: Path, prefork: Prefork, kind: Kind, *, stage: int = 1, skip: int = 1) -> list[str]:
    """A run with one liar, in `stage`, after `skip` votes or layers; gives what its operator was told."""
    phase = Phase.SNAPSHOT if kind is Kind.KEEP_LAYERS else Phase.VOTING
    lie = Fault(kind=kind, phase=phase, stage=stage, skip=skip, count=ALWAYS, same_process=True)
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=1)
    with FaultRun(directory, small(steps=8), [lie, hold], launch=prefork.popen) as run:
        # The second step begins when the spares are there.
        with run.plan.gate(hold).open("a") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            run.start()
            run.add_nodes(STAGES)
            run.add_spare()
            run.add_spare()
            run.tend(until=lambda _: len(run.all(NodeJoined)) == STAGES + 2)
        assert run.tend() == 0
        assert run.times(lie), "it did lie"
        # Who is shut out or replaced ends as one that failed.
        run.assert_undisturbed(codes=(0, FAILED))
        return [notice.text for notice in run.all(Notice)]


@pytest.mark.parametrize("kind", [Kind.VOTE_NAN, Kind.CLAIM_NOT_FINITE])
def test_a_stage_that_is_never_finite_is_computed_on_a_spare(
    kind: Kind, tmp_path: Path, prefork: Prefork
) -> None:
    told = one_liar(tmp_path, prefork, kind)
    assert any("is not finite; a spare computes stage 1 again, in place of node" in line for line in told)
    assert any("what it gave for stage 1 in step 2 was wrong, as another node found" in line for line in told)


def test_a_norm_out_of_all_proportion_does_not_count(tmp_path: Path, prefork: Prefork) -> None:
    told = one_liar(tmp_path, prefork, Kind.VOTE_HUGE)
    assert any("is far from those of the newest steps; a spare computes stage 1" in line for line in told)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind.VOTE_NEGATIVE, "a squared norm"),
        (Kind.VOTE_FOREIGN, "its vote names layer units"),
        (Kind.FLOOD_HEARTBEATS, "heartbeat"),
        (Kind.FLOOD_SPANS, "spans"),
    ],
)
def test_messages_that_no_correct_node_sends_shut_their_sender_out(
    kind: Kind, why: str, tmp_path: Path, prefork: Prefork
) -> None:
    told = one_liar(tmp_path, prefork, kind)
    (line,) = [line for line in told if "is shut out" in line]
    assert why in line


def test_complaints_part_the_two_and_then_their_author_gives_up_its_stage(
    tmp_path: Path, prefork: Prefork
) -> None:
    told = one_liar(tmp_path, prefork, Kind.COMPLAIN)
    assert [line for line in told if "nonsense came: a spare takes stage" in line]
    assert not [line for line in told if "is shut out" in line]


def test_a_withheld_vote_is_waited_for_as_long_as_steps_take(tmp_path: Path, prefork: Prefork) -> None:
    told = one_liar(tmp_path, prefork, Kind.VOTE_WITHHELD, skip=3)
    assert any("waits for node" in line and "(stage 1)" in line for line in told)
    assert any("is replaced: it did not end step" in line for line in told)


def test_layers_that_are_never_handed_in_are_computed_by_another_node(
    tmp_path: Path, prefork: Prefork
) -> None:
    told = one_liar(tmp_path, prefork, Kind.KEEP_LAYERS)
    assert any("is replaced: it did not hand in its layers of step" in line for line in told)
