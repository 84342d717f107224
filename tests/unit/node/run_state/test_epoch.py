"""One epoch by itself: the messages it accepts in each phase, and those it repeats."""

import math
from dataclasses import replace

import pytest

from node.run_state.actions import RecordCommit, RecordHeldOut, Send
from node.run_state.epoch import Assignment, Committed, Epoch, OnRecord, Phase, StepRules
from node.run_state.held_out import HeldOutPass, HeldOutSchedule
from node.run_state.votes import LEAST, Implausible, PastStep, RefusedVote, VoteHistory
from wire.messages import Begin, Placed, Restore, Validated, Vote
from wire.telemetry import Telemetry


def epoch(
    *,
    snapshot: int = 0,
    state: int = 0,
    committed: Committed | None = None,
    lineages: tuple[int, ...] | None = None,
    unlabelled: tuple[int, ...] = (),
) -> Epoch:
    record = OnRecord(
        newest_snapshot=snapshot,
        newest_state=state,
        committed=committed,
        lineages=lineages,
    )
    rules = StepRules(
        plan=lambda step, norm: (1.0, 0.1 * step),
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
        unlabelled=unlabelled,
    )
    return Epoch(4, Assignment(hosts=("a", "b"), addresses=("a:1", "b:1")), record, rules)


def placed(held: int, voted: bool = False, lineage: int = 0) -> Placed:
    return Placed(epoch=4, held_step=held, voted=voted, lineage=lineage)


def vote(step: int, norm: float = 1.0, unit: int = 0, loss: float | None = None) -> Vote:
    """Of stage 0, which holds unit 0, or of the last, which holds unit 1."""
    return Vote(epoch=4, step=step, norms={unit: norm}, loss=2.0 if unit and loss is None else loss)


def stepping(step: int = 3, unlabelled: tuple[int, ...] = ()) -> Epoch:
    one = epoch(state=step, unlabelled=unlabelled)
    one.placed("a", placed(step))
    one.placed("b", placed(step))
    one.ready("a")
    one.ready("b")
    one.begin()
    return one


@pytest.mark.parametrize("node", ["x", ""])
def test_strangers_are_not_counted(node: str) -> None:
    one = epoch()
    assert not one.placed(node, placed(0)) and one.ready(node) == []
    one = stepping()
    assert one.vote(node, vote(3, unit=int(node == "b"))) == [] and one.applied(node, 3) == []
    one.vote("a", vote(3))
    assert one.phase is Phase.STEPPING


@pytest.mark.parametrize("step", [2, 4])
def test_another_steps_applied_is_not_counted(step: int) -> None:
    one = stepping(3)
    one.vote("a", vote(3))
    one.vote("b", vote(3, unit=1))
    one.applied("a", 3)
    assert one.applied("b", step) == []
    assert one.phase is Phase.APPLYING


@pytest.mark.parametrize(
    ("first", "second", "lineages", "step", "lineage"),
    [
        (placed(3, lineage=2), placed(3, lineage=2), None, 3, 2),
        (placed(3, lineage=2), placed(3, lineage=2), (2, 3), 3, 2),
        # The same step, come to in other ways; one way that the run has left; a snapshot that is newer.
        (placed(3, lineage=2), placed(3, lineage=3), None, 1, 4),
        (placed(3, lineage=2), placed(3, lineage=2), (3,), 1, 4),
        (placed(0, lineage=2), placed(0, lineage=2), None, 1, 4),
    ],
)
def test_a_held_state_counts_if_all_came_to_it_together(
    first: Placed, second: Placed, lineages: tuple[int, ...] | None, step: int, lineage: int
) -> None:
    one = epoch(snapshot=1, state=3, lineages=lineages)
    one.placed("a", first)
    one.placed("b", second)
    assert one.outstanding("a") == [Restore(epoch=4, step=step, lineage=lineage)]
    assert (one.step, one.lineage) == (step, lineage)


@pytest.mark.parametrize(("made", "step"), [(2, 3), (None, 3), (1, 1)])
def test_a_commit_is_applied_to_gradients_of_its_own_lineage(made: int | None, step: int) -> None:
    committed = Committed(step=2, clip_coefficient=0.5, lr=0.25, lineage=made)
    one = epoch(snapshot=1, state=3, committed=committed)
    one.placed("a", placed(3, lineage=2))
    one.placed("b", placed(2, voted=True, lineage=2))
    assert one.step == step


@pytest.mark.parametrize(
    ("node", "wrong"),
    [
        ("a", vote(3, unit=1)),
        ("a", vote(3, loss=2.0)),
        ("a", Vote(epoch=4, step=3, norms={0: 1.0, 1: 1.0}, loss=None)),
        ("a", Vote(epoch=4, step=3, norms={}, loss=None)),
        ("b", vote(3, unit=1, loss=-1e300)),
        ("b", Vote(epoch=4, step=3, norms={1: 1.0}, loss=None)),
    ],
)
def test_a_vote_covers_only_the_voters_units(node: str, wrong: Vote) -> None:
    one = stepping()
    other = "b" if node == "a" else "a"
    one.vote(other, vote(3, unit="ab".index(other)))
    assert isinstance(one.vote(node, wrong), RefusedVote)
    assert one.phase is Phase.STEPPING, "it is not counted"
    assert one.ask_again(node) == [Send(node_id=node, message=Begin(epoch=4, step=3))]


FAR = " is far from those of the newest steps"


@pytest.mark.parametrize(
    ("norm", "loss", "what"),
    [
        (9.0, 2.1, None),
        (9e4, 2.1, None),
        (9e6, 2.1, ("a", "the gradient of layer unit 0 at stage 0")),
        (9.0, 40.0, ("b", "the loss of 40 at stage 1")),
    ],
)
def test_the_steps_on_record_say_what_is_plausible_after_a_restart(
    norm: float, loss: float, what: tuple[str, str] | None
) -> None:
    past = [PastStep(loss=2.0, grad_norm=3.0, seconds=1.0)] * LEAST
    history = VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})], past)
    votes = [
        Vote(epoch=1, step=20, norms={0: norm}, loss=None),
        Vote(epoch=1, step=20, norms={1: norm}, loss=loss),
    ]
    found = history.implausible("ab", votes)
    far = None if found is None else (found.node_id, found.what.removesuffix(FAR))
    assert far == what


def test_norms_of_units_on_record_say_more_after_a_restart_than_those_of_the_whole_model() -> None:
    past = PastStep(loss=2.0, grad_norm=3.0, seconds=1.0)
    with_units = replace(past, norms={0: 1e-6, 1: 9.0})
    jump = [
        Vote(epoch=1, step=20, norms={0: 9.0}, loss=None),
        Vote(epoch=1, step=20, norms={1: 9.0}, loss=2.0),
    ]
    found = []
    for one in (past, with_units):
        history = VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})], [one] * LEAST)
        found.append(history.implausible("ab", jump))
    assert found == [None, Implausible("a", f"the gradient of layer unit 0 at stage 0{FAR}")]


def test_norms_of_gradients_say_nothing_of_how_a_round_changes_weights() -> None:
    history = VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})], rounds_from=LEAST)

    def plausible(step: int, norm: float) -> bool:
        history.begins(step)
        norms = [{0: norm}, {1: norm}]
        votes = [Vote(epoch=1, step=step, norms=one, loss=None) for one in norms]
        found = history.implausible("ab", votes) is None
        if found:
            history.committed(step, norms[0] | norms[1], 2.0, confirmed=False)
        return found

    assert all(plausible(step, 1e-3) for step in range(LEAST))
    assert all(plausible(step, 1e3) for step in range(LEAST, 2 * LEAST))
    assert not plausible(2 * LEAST, 1e9), "among rounds it is still found"


def test_a_step_without_labels_has_no_loss() -> None:
    """And it says nothing of what the losses of other steps may be."""
    one = stepping(step=3, unlabelled=(3,))
    one.vote("a", vote(3))
    outcome = one.vote("b", vote(3, unit=1, loss=0.0))
    assert isinstance(outcome, list)
    commit = outcome[0]
    assert isinstance(commit, RecordCommit) and math.isnan(commit.loss) and commit.grad_norm > 0


@pytest.mark.parametrize(("weight", "loss"), [(0.0, math.nan), (2.0, 6.0)])
def test_held_out_samples_without_labels_have_no_loss(weight: float, loss: float) -> None:
    one = stepping(step=3)
    one.pause()
    one.validate([HeldOutPass(number=1, microbatches=2)], microbatch=4, label_weight=weight)
    done = Validated(epoch=4, step=3, number=1, loss=None, telemetry=Telemetry())
    one.validated("a", done)
    (record,) = one.validated("b", replace(done, loss=3.0))
    assert isinstance(record, RecordHeldOut)
    assert record.uncompressed == pytest.approx(loss, nan_ok=True)
    assert HeldOutSchedule((), math.inf).record(3, record.uncompressed) is (weight > 0)


def test_rows_with_the_same_work_get_one_message() -> None:
    rules = StepRules(
        plan=lambda step, norm: (1.0, 0.1),
        neighbours=lambda stage, _stages: {1 - stage},
        history=VoteHistory(lambda _stages: [frozenset({0}), frozenset({1})]),
    )
    hosts = ("a", "b", "c", "d")
    grid = Epoch(
        4, Assignment(hosts=hosts, addresses=hosts, groups=((0,), (1,))), OnRecord(), rules, windows=(2, 2)
    )
    for node in hosts:
        grid.placed(node, placed(0))
    for node in hosts:
        grid.ready(node)
    sent = [action.message for action in grid.begin() if isinstance(action, Send)]
    assert [isinstance(message, Begin) and message.link_windows for message in sent] == [(2,)] * 4
    assert all(message is sent[0] for message in sent)
