"""A loss that is far from those of earlier steps counts against the node that reported it, in any row."""

from collections.abc import Callable

import pytest

from node.run_state.actions import Announce, RecordCommit
from tests.support.machine_driver import Driver, of_kind
from tests.unit.node.run_state.test_machine_kept import hands_over, run_of
from wire.messages import FailureKind, HandedOver

ROWS = "abcdef"


def run_of_rows() -> Driver:
    """Three rows of two stages, whose losses of some steps are known."""
    return Driver(stages=2, groups=6, every=50, steps=90, follows=True).started(ROWS, 12)


@pytest.mark.parametrize("loss", [1e30, 1e3])
@pytest.mark.parametrize("liar", ["b", "d", "f"])
def test_who_reported_it_loses_its_stage(liar: str, loss: float) -> None:
    run = run_of_rows()
    assert not of_kind(run.all_vote({liar: loss}), RecordCommit)
    assert {*run.epoch.hosts} >= {*"bdf"} - {liar} and liar not in run.epoch.hosts
    run.restored(12)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)
    assert [note.about for note in of_kind(actions, Announce)] == [liar]


def test_a_loss_that_is_too_small_counts_against_its_node_too() -> None:
    run = Driver(stages=1, groups=6, every=50, steps=90, follows=True).started("ab", 12)
    run.all_vote({"a": 40.0, "b": 0.0})
    assert run.epoch.hosts == ("b",), "the loss is too large"
    run = Driver(stages=1, groups=6, every=50, steps=90, follows=True).started("ab")
    for _ in range(12):
        run.all_vote({"a": 12.0, "b": 12.0})
        run.all_applied()
    run.all_vote({"a": 2.0, "b": 0.0})
    assert run.epoch.hosts == ("a",)


def test_a_loss_of_a_node_that_is_gone_counts_against_nobody() -> None:
    run = run_of()
    run.steps(9)
    epoch, groups = run.epoch, run.epoch.groups_of(1)
    hands_over(run, "c")
    said = HandedOver(
        epoch=epoch.number,
        step=epoch.step,
        generation=epoch.generation,
        groups=groups,
        group_losses=dict.fromkeys(groups, 1e30),
    )
    run.machine.message("d", said, run.time)
    run.die("d")
    while run.epoch.waits:
        run.tick(1.0)
    assert groups == run.epoch.groups_of(1), "they are kept"
    assert not of_kind(run.all_vote(), RecordCommit)
    assert {*run.epoch.hosts} == {*"abcefg"}, "all who are left compute it again"
    run.restored(run.epoch.step)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit) and not of_kind(actions, Announce)


def once(run: Driver) -> None:
    run.failed(run.epoch.hosts[0], FailureKind.NON_FINITE)


def huge(run: Driver) -> None:
    for node in run.epoch.hosts:
        run.vote(node, norm=1e60 if run.epoch.stage_of(node) == 0 else 1.0)


@pytest.mark.parametrize("lie", [once, huge])
def test_sums_that_another_row_may_have_spoiled_are_no_strike(
    lie: Callable[[Driver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member could send such parts to one node until that is shut out."""
    run, struck = run_of_rows(), list[str]()
    monkeypatch.setattr(run.machine._quarantine, "strike", lambda node, why: struck.append(node))
    first = run.epoch.hosts[0]
    lie(run)
    assert first not in run.epoch.hosts
    run.restored(12)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit) and struck == []
    assert [note.about for note in of_kind(actions, Announce)] == [first], "it loses its stage"
