"""Steps that are not finite: never committed, tried again uncompressed, and then the right last line."""

import math

import pytest

from node.config.schema import TrainingSection
from node.run_state.actions import (
    Aborted,
    AbortKind,
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    Stop,
)
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_STRIKES
from node.run_state.run_plan import Past
from node.run_state.wrong_values import LONE_OVERFLOWS
from node.training.loss_scale import LEAST, loss_scales
from tests.support.machine_driver import (
    Driver,
    begins,
    finishes,
    follows,
    of_kind,
    placement_of,
    restore_of,
    sent,
    step_plan,
    stop_of,
)
from wire.messages import Commit, FailureKind


def saved(run: Driver, step: int) -> Stop:
    """The stages upload their state, and the run ends."""
    run.all_placed(step)
    return stop_of(run.stored(step))


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_with_a_non_finite_gradient_runs_again_uncompressed(norm: float) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    run.vote("b")
    actions = run.vote("a", norm=norm)
    assert of_kind(actions, RecordCommit) == []
    assert "uncompressed" in of_kind(actions, Announce)[0].text
    (aborted,) = of_kind(actions, Aborted)
    assert aborted.kind is AbortKind.NOT_FINITE and HOW["norm"] in aborted.reason
    restore = restore_of(run.all_placed(3))
    assert (restore.step, restore.uncompressed) == (3, True)


def not_finite(run: Driver, how: str) -> list[Action]:
    match how:
        case "loss":
            return run.vote("b", loss=math.inf)
        case "norm":
            return run.vote("a", norm=math.nan)
        case "sum":
            run.vote("a", norm=1.7e308)
            return run.vote("b", norm=1.7e308)
        case _:
            return run.failed("a", FailureKind.NON_FINITE, why="the activation to be sent over boundary 0")


HOW = {
    "loss": "the loss at stage 1",
    "norm": "the gradient of layer unit 0 at stage 0",
    "sum": "the global gradient norm at stage 0",
    "tensor": "the activation to be sent over boundary 0 at stage 0",
}


@pytest.mark.parametrize(
    ("diverges", "advice"), [(True, "training.lr"), (False, "wider codecs in [pipeline]")]
)
@pytest.mark.parametrize("how", HOW)
def test_what_is_finite_uncompressed_is_the_codecs_fault_and_else_the_run_diverges(
    how: str, diverges: bool, advice: str
) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, how)
    run.restored(3)
    assert run.epoch.uncompressed
    actions = not_finite(run, how) if diverges else run.all_vote()
    assert of_kind(actions, RecordCommit) == [], "an uncompressed step is never committed"
    end = saved(run, 3)
    assert end.failed and HOW[how] in end.reason
    assert "the snapshot of step 3 is intact" in end.reason and advice in end.reason


# ---- in float16: first the factor of the loss


def in_float16(factor: float) -> Past:
    training = TrainingSection(precision="float16", loss_scale=factor, loss_scale_steps=100)
    return Past(scales=loss_scales(training))


def factor_of(actions: list[Action]) -> float:
    (begin,) = begins(actions, "a")
    return begin.loss_scale


def test_a_step_that_overflows_is_committed_as_skipped_by_all() -> None:
    run = Driver(stages=2, past=in_float16(8.0))
    run.join("ab")
    assert factor_of(run.restored()) == 8.0
    assert run.vote("a", norm=math.inf) == []
    actions = run.vote("b", norm=64.0)
    (record,) = of_kind(actions, RecordCommit)
    assert (record.clip_coefficient, record.grad_norm, record.loss, record.norms) == (0.0, math.inf, 2.0, {})
    assert [one.text for one in of_kind(actions, Announce)] == [
        "step 1 is skipped: gradients overflow; the loss's factor is 4 from now on"
    ]
    told = [message for node in "ab" for message in sent(actions, node)]
    assert [(one.step, one.clip_coefficient) for one in told if isinstance(one, Commit)] == [(0, 0.0)] * 2
    assert factor_of(run.all_applied()) == 4.0
    run.vote("a", norm=16.0)
    (record,) = of_kind(run.vote("b", norm=0.0), RecordCommit)
    assert (record.grad_norm, record.norms[0]) == (1.0, 1.0), "norms are of the loss's own gradients"
    assert record.clip_coefficient == step_plan(1, 1.0)[0] / 4.0


def test_a_replay_has_the_factors_of_the_first_time() -> None:
    run = Driver(stages=2, every=100, past=in_float16(8.0)).started("ab")
    for norm in (math.inf, 1.0, 1.0):
        run.vote("a", norm=norm)
        run.vote("b", norm=0.0)
        run.all_applied()
    run.die("b")
    run.join("b")
    began = run.restored()
    assert (run.epoch.step, factor_of(began)) == (0, 8.0)
    run.vote("a", norm=math.inf)
    run.vote("b", norm=0.0)
    assert factor_of(run.all_applied()) == 4.0


def test_at_the_least_factor_the_cause_is_looked_for() -> None:
    run = Driver(stages=2, past=in_float16(2.0)).started("ab")
    run.vote("a", norm=math.inf)
    run.vote("b", norm=0.0)
    assert factor_of(run.all_applied()) == LEAST
    actions = run.vote("a", norm=math.inf)
    assert [(one.kind, one.step) for one in of_kind(actions, Aborted)] == [(AbortKind.NOT_FINITE, 1)]


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    run = Driver(stages=2, past=in_float16(8.0)).started("ab")
    assert [one.kind for one in of_kind(run.vote("b", loss=math.inf), Aborted)] == [AbortKind.NOT_FINITE]


def overflowing(rows: int) -> Driver:
    """Gradients overflow in each step at the first node, as it alone says, until it has no stage any more."""
    past = in_float16(2.0**16)
    run = Driver(stages=2, every=1, groups=rows, past=past, steps=400, follows=rows > 1)
    run.started("abcd"[: 2 * rows])
    run.join("" if rows > 1 else "xy")
    while run.epoch.has("a"):
        assert run.epoch.step <= LONE_OVERFLOWS
        overflow(run, "a")
    assert run.epoch.step == LONE_OVERFLOWS
    return run


def overflow(run: Driver, where: str) -> list[Action]:
    """The step ends. Gradients overflow at one node."""
    actions = [
        action for node in run.epoch.hosts for action in run.vote(node, math.inf if node == where else 1.0)
    ]
    if run.machine.epoch is not None and run.epoch.has(where):
        for asked in of_kind(run.all_applied(), OpenSnapshot):
            run.stored(asked.step)
    return actions


@pytest.mark.parametrize("rows", [1, 2])
def test_an_overflow_that_one_node_alone_finds_again_and_again_is_checked(rows: int) -> None:
    run = overflowing(rows)
    (factor,) = {begin.loss_scale for begin in begins(run.restored(LONE_OVERFLOWS))}
    assert factor == 2.0 ** (16 - LONE_OVERFLOWS)
    actions = run.all_vote()
    (record,) = of_kind(actions, RecordCommit)
    assert (record.step, record.grad_norm) == (LONE_OVERFLOWS, pytest.approx(math.sqrt(2) / factor))
    assert [one.about for one in of_kind(actions, Announce) if one.about] == ["a"]
    assert run.machine.quarantined == {}, "what its neighbours sent may have been wrong"
    run.steps(1)
    assert not run.epoch.has("a")


def test_an_overflow_that_another_node_finds_too_is_skipped_and_nobody_is_blamed() -> None:
    run = overflowing(2)
    run.restored(LONE_OVERFLOWS)
    actions = overflow(run, "c")
    (record,) = of_kind(actions, RecordCommit)
    assert (record.step, record.clip_coefficient) == (LONE_OVERFLOWS, 0.0)
    assert [one.about for one in of_kind(actions, Announce) if one.about] == []
    told: list[Action] = []
    for _ in range(3):
        told += run.step()
        told += run.stored(run.epoch.step)
    assert {*follows(told)} == {"a"}, "it may enter again"


def test_an_overflow_that_nobody_can_check_is_skipped() -> None:
    run = Driver(stages=2, past=in_float16(2.0**16)).started("ab")
    for step in range(2 * LONE_OVERFLOWS):
        (record,) = of_kind(overflow(run, "a"), RecordCommit)
        assert (record.step, record.clip_coefficient) == (step, 0.0)


# ---- with spares: first the node, then the codecs, then divergence


@pytest.mark.parametrize("how", ["loss", "norm", "tensor"])
def test_the_same_step_runs_again_on_a_spare_and_the_first_node_was_wrong(how: str) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    run.join("xy")
    actions = not_finite(run, how)
    culprit = "b" if how == "loss" else "a"
    stage = "ab".index(culprit)
    assert run.epoch.hosts == (("a", "x") if culprit == "b" else ("x", "b"))
    (note,) = of_kind(actions, Announce)
    assert HOW[how] in note.text and f"in place of node {culprit}" in note.text
    run.restored()
    assert run.epoch.step == 2 and not run.epoch.uncompressed, "the spare has what is on disk"
    run.steps(1)
    actions = run.all_vote()
    assert of_kind(actions, RecordCommit)[0].step == 3
    (note,) = of_kind(actions, Announce)
    assert note.about == culprit and f"stage {stage} in step 4 was wrong" in note.text
    assert run.machine.quarantined == {}, "what its neighbours sent may have been wrong"


def test_a_node_that_is_wrong_repeatedly_is_quarantined() -> None:
    run = Driver(stages=2, every=1, steps=20).started("ab", 1)
    run.hello("x")
    for _ in range(MAX_STRIKES - 1):
        run.vote("a", norm=math.nan)
        assert run.epoch.hosts == ("x", "b")
        run.restored(run.epoch.step)
        run.steps(1)
        assert placement_of(run.die("x")) == ("a", "b"), "nobody else is left"
        run.restored(run.epoch.step)
        run.hello("x", again=True)
    run.vote("a", norm=math.nan)
    run.restored(run.epoch.step)
    actions = run.all_vote()
    assert [note.about for note in of_kind(actions, Announce)] == ["a"]
    assert "the last of 3 such faults" in run.machine.quarantined["a"]


def test_a_value_that_is_not_finite_on_other_nodes_too_is_no_nodes_fault() -> None:
    run = Driver(stages=3, every=3).started("abc", 3)
    run.join("xy")
    hosts = []
    for _ in range(3):
        run.vote(run.epoch.hosts[1], norm=math.nan)
        hosts.append(run.epoch.hosts)
        run.restored(3)
    assert hosts == [("a", "x", "c"), ("b", "x", "c"), ("b", "x", "a")], "then those that send to it"
    actions = run.vote("x", norm=math.nan)
    assert "running it again with uncompressed links" in of_kind(actions, Announce)[0].text
    run.restored(3)
    assert run.epoch.uncompressed
    assert run.machine.quarantined == {}


# ---- values that are finite and not plausible


@pytest.mark.parametrize("steps", [0, 12])
def test_a_norm_far_from_others_is_computed_again_on_a_spare(steps: int) -> None:
    run = Driver(stages=2, every=1, steps=30).started("ab", steps)
    run.join("xy")
    run.vote("b")
    actions = run.vote("a", norm=1e60)
    assert of_kind(actions, RecordCommit) == []
    assert run.epoch.hosts == ("x", "b")
    run.restored(steps)
    (record,) = of_kind(run.all_vote(), RecordCommit)
    assert record.grad_norm == pytest.approx(math.sqrt(2))


def test_a_norm_that_another_node_confirms_counts_and_nobody_is_blamed() -> None:
    run = Driver(stages=2, every=1, steps=30).started("ab", 12)
    run.join("xy")
    for _ in range(2):
        run.vote("b")
        actions = run.vote(run.epoch.hosts[0], norm=1e60)
        if run.epoch.phase is not Phase.APPLYING:
            run.restored(12)
    assert of_kind(actions, RecordCommit)[0].grad_norm == pytest.approx(1e30)
    assert not any("wrong" in note.text for note in of_kind(actions, Announce))


def test_without_a_spare_a_norm_that_is_not_plausible_counts() -> None:
    run = Driver(stages=2, every=1, steps=30).started("ab", 12)
    run.vote("b")
    assert of_kind(run.vote("a", norm=1e60), RecordCommit)


def test_a_loss_far_from_others_is_computed_again_on_a_spare() -> None:
    run = Driver(stages=2, every=1, steps=30).started("ab", 12)
    run.join("xy")
    run.vote("a")
    assert of_kind(run.vote("b", loss=1e6), RecordCommit) == []
    assert run.epoch.hosts == ("a", "x")


def test_an_impossible_loss_is_refused() -> None:
    run = Driver(stages=2).started("ab")
    for _ in range(2):
        actions = run.vote("b", loss=-1e300)
        assert of_kind(actions, Announce)[0].text.endswith("was refused: it voted with a loss below 0")
    assert finishes(run.vote("b", loss=-1e300)).keys() == {"b"}


def test_an_epoch_that_must_replay_first_keeps_the_codecs_until_the_step() -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, "norm")
    run.hello("x")
    run.die("a")
    run.restored()
    assert run.epoch.step == 2 and not run.epoch.uncompressed
    run.steps(1)
    not_finite_again = run.vote("x", norm=math.nan)
    assert of_kind(not_finite_again, Announce)
    run.restored(3)
    assert run.epoch.uncompressed


def test_a_suspect_step_that_turns_out_finite_is_suspect_no_more() -> None:
    """A machine's memory failed; it died, and the replay on another is finite: nothing is held against it."""
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, "norm")
    run.hello("x")
    run.die("a")
    run.restored()
    run.steps(2, store=False)
    run.failed("x")
    run.restored(3)
    assert run.epoch.step == 3 and not run.epoch.uncompressed


@pytest.mark.parametrize("norm", [-1.0, -1e-300])
def test_a_squared_norm_below_zero_does_not_pass(norm: float) -> None:
    run = Driver(stages=1).started("a")
    assert of_kind(run.vote("a", norm=norm), RecordCommit) == []


@pytest.mark.parametrize("dies", [True, False])
def test_codecs_are_not_blamed_if_the_node_that_reported_the_step_can_be_left_out(dies: bool) -> None:
    """It reported it when no spare was here. The step runs again with the codecs, and on other nodes."""
    run = Driver(stages=2, every=3).started("ab", 3)
    run.failed("a", FailureKind.NON_FINITE, why="a gradient")
    run.hello("c")
    if dies:
        run.die("a")
        assert run.epoch.hosts == ("c", "b")
    run.restored(3)
    assert run.epoch.uncompressed
    actions = run.all_vote()
    assert of_kind(actions, Stop) == []
    assert placement_of(actions) == ("c", "b")
    run.restored(3)
    assert not run.epoch.uncompressed
    run.steps(1)
    assert run.epoch.step == 4
