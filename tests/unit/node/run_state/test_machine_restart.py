"""A coordinator that has died and goes on from its database: whom it waits for, and from which state."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from node.run_state.actions import Action, OpenSnapshot, RecordPlacement
from node.run_state.epoch import Committed, Phase
from node.run_state.run_plan import Past
from node.tuning.decisions import StepHistory
from tests.support.machine_driver import (
    REGROUP,
    Driver,
    of_kind,
    placement_of,
    restore_of,
    sent,
    stop_of,
)
from wire.messages import Abort


def past(*, step: int | None, snapshot: int = 0, hosts: str = "ab") -> Past:
    committed = None if step is None else Committed(step=step, clip_coefficient=0.25, lr=0.125)
    return Past(last_epoch=7, newest_snapshot=snapshot, committed=committed, hosts=tuple(hosts))


def test_a_restarted_coordinator_waits_for_nodes_that_had_a_stage() -> None:
    run = Driver(stages=2, past=past(step=5, snapshot=4))
    run.join("xyz")
    actions = run.hello("b", epoch=7)
    assert sent(actions, "b") == [Abort(epoch=7, reason="that epoch is over")]
    assert of_kind(actions, RecordPlacement) == []
    assert run.tick(REGROUP - 0.5) == []
    assert placement_of(run.hello("a", epoch=7)) == ("a", "b")
    assert run.epoch.number == 8


def test_a_restarted_coordinator_reassigns_stages_of_absent_nodes() -> None:
    run = Driver(stages=2, past=past(step=5, snapshot=4))
    run.join("xb")
    assert placement_of(run.tick(REGROUP)) == ("x", "b")


def test_a_coordinator_that_died_after_the_last_snapshot_is_done() -> None:
    run = Driver(stages=2, steps=6, past=past(step=5, snapshot=6))
    run.join("ab")
    assert stop_of(run.restored(6)).reason == "all steps are done"


def test_no_step_begins_with_a_split_that_is_not_its_own() -> None:
    """The request to continue the run with the next split takes a moment, and steps may be shorter."""
    splits = StepHistory(((0, (3, 2)), (5, (3, 2)), (6, (4, 1))))
    run = Driver(stages=2, every=20, past=replace(past(step=8, snapshot=4), splits=splits))
    run.join("ab")
    run.restored(4)
    run.steps(1)
    assert (run.epoch.phase, run.epoch.step) == (Phase.STEPPING, 5)
    actions = run.step()
    assert [opened.step for opened in of_kind(actions, OpenSnapshot)] == [6]
    assert run.stored(6) == [] and run.tick(1.0) == []
    assert stop_of(run.stop()).reason


def test_a_single_stage_row_goes_on_alone() -> None:
    run = Driver(stages=2, min_stages=1, past=past(step=5, snapshot=4, hosts="a"))
    assert placement_of(run.hello("a", epoch=7)) == ("a",)


@pytest.mark.parametrize(
    ("stages", "held", "stay", "begins"),
    [
        (1, {"a": (8, 3), "b": (8, 3), "c": (8, 9)}, "ab", (8, 3)),
        (2, {"a": (8, 3), "b": (8, 3), "c": (8, 3), "d": (8, 3), "e": (8, 9), "f": (8, 9)}, "abcd", (8, 3)),
        (2, {"a": (8, 3), "b": (8, 3), "c": (8, 3), "d": (8, 3), "e": (8, 3), "f": (8, 9)}, "abcde", (8, 3)),
        (1, {"a": (8, 3), "b": (8, 9)}, "ab", (4, 8)),  # no majority says which of them lies
        (1, {"a": (8, 3), "b": (8, 3), "c": (7, 3)}, "ab", (8, 3)),
        (1, {"a": (8, 3), "b": (6, 2)}, "a", (8, 3)),
        (1, {"a": (-1, 0), "b": (-1, 0), "c": (8, 3)}, "c", (8, 3)),
    ],
)
def test_who_names_another_lineage_does_not_go_on_without_the_others(
    stages: int, held: Mapping[str, tuple[int, int]], stay: str, begins: tuple[int, int]
) -> None:
    """Which lineages the run has had is not on record, so any counts."""
    rows = len(held) // stages
    before = replace(past(step=7, snapshot=4, hosts="".join(held)), rows=rows)
    run = Driver(stages=stages, groups=rows, follows=True, past=before)
    run.join("".join(held))
    actions: list[Action] = []
    for _ in range(2):  # the second time without those that the others leave behind
        for node in run.epoch.hosts if run.epoch.phase is Phase.PLACING else ():
            step, lineage = held[node]
            actions = run.placed(node, step, lineage=lineage)
    restore = restore_of(actions)
    assert run.epoch.hosts == tuple(stay)
    assert (restore.step, restore.lineage) == begins
