"""A member that hands in another state than the run's, in a world where nodes come and die at random.

Whatever it does, no layer of another state is stored or loaded (`tests/support/machine_world.py` asserts).
Either the run ends with the one right state and without the liar, or it ends by name.
`scripts/checks/attack.py` runs a hundred seeds.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.run_state.actions import (
    Announce,
    RecordCommit,
    RecordPlacement,
    RefuseSnapshot,
    SnapshotAgreed,
    SnapshotDropped,
    Stop,
)
from node.run_state.failures import MAX_STRIKES
from node.run_state.run_plan import Past, most_moved
from node.run_state.state_agreement import (
    MOST_DISPUTES,
    Dispute,
    Finding,
    Settled,
    StateAgreement,
    WrongState,
)
from node.run_state.votes import PastStep
from node.run_state.wrong_values import _Doubt
from tests.support.machine_driver import REGROUP, Driver, of_kind, placement_of, stop_of, unit_numbers
from tests.support.memory_pipeline import corpus
from tests.support.reference_trainer import ReferenceTrainer
from tests.support.run_harness import SMALL, TINY
from tests.support.state_attacks import STATE_LIES, attack_state
from wire.messages import StateHashes, UnitHash


@pytest.mark.parametrize("audits", [False, True])
@pytest.mark.parametrize("rows", [2, 3, 4])
@pytest.mark.parametrize("lie", STATE_LIES)
def test_no_state_but_the_runs_is_stored(lie: str, rows: int, *, audits: bool) -> None:
    seen = attack_state(lie, rows, audits=audits, seed=int(audits))
    assert seen.good, (lie, rows, audits, seen)


# ---- one holder of a layer: what the run has to compare it with


def alone(*, spare: str = "") -> Driver:
    """One row of two stages in step 4; the snapshot of step 2 is agreed on and stored."""
    run = Driver(stages=2, every=2, steps=20).started("ab", 1)
    run.join(spare)
    run.step()
    for node in "ab":
        agreed = run.holds(node, step=2)
    assert [set(one.alone) for one in of_kind(agreed, SnapshotAgreed)] == [{*range(6)}]
    run.stored(2)
    run.steps(1)
    run.step()
    assert run.epoch.step == 4
    return run


@pytest.mark.parametrize("weights,squares", [(0.0, 1.0), (0.1, 1.0), (100.0, 1.0), (1.0, 0.0), (1.0, 1e-13)])
def test_a_layer_far_from_the_snapshot_before_is_computed_again_by_a_spare(
    weights: float, squares: float
) -> None:
    run = alone(spare="x")
    run.holds("b", step=4)
    actions = run.holds("a", "bad", step=4, weights=weights, squares=squares)
    assert [one.step for one in of_kind(actions, SnapshotDropped)] == [4]
    assert placement_of(actions) == ("x", "b") and of_kind(actions, SnapshotAgreed) == []
    run.restored()
    assert run.epoch.step == 2
    run.steps(1)
    run.step()
    run.holds("b", step=4)
    actions = run.holds("x", step=4)
    assert [one.step for one in of_kind(actions, SnapshotAgreed)] == [4]
    assert run.machine.quarantined.keys() == {"a"} and "after step 4" in run.machine.quarantined["a"]


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_weights_may_move_as_far_as_the_optimizer_moves_them(rate: float) -> None:
    """From small initial weights, a few steps at a high rate take them far."""
    states = StateAgreement(unit_numbers, moved=lambda unit, first, last: 100 * rate * (last - first))
    for step, norm in ((4, 1.0), (8, 8.5), (12, 1.5)):
        states.expect(_grid(("a",), step=step))
        units = {unit: UnitHash(f"{step:064}", norm**2, 1.0, 1.0) for unit in range(6)}
        (found,) = states.take("a", StateHashes(epoch=1, step=step, units=units))
        assert isinstance(found, Dispute) is (not rate and step == 8)
    states.expect(_grid(("a",), step=16))
    units = {unit: UnitHash("a" * 64, 100.0, 1.0, 1.0) for unit in range(6)}
    (found,) = states.take("a", StateHashes(epoch=1, step=16, units=units))
    assert isinstance(found, Dispute)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw"},
        {"optimizer": "muon"},
        {"every": 2},
        {"every": 2, "outer_momentum": 0.9},
    ],
    ids=str,
)
def test_no_optimizer_moves_weights_further_than_is_allowed_of_a_lone_holder(
    settings: dict[str, Any],
) -> None:
    """From small initial weights at a high rate, which moves them farthest."""
    training = replace(SMALL.training, optimizer=settings.pop("optimizer", "adamw"), lr=0.02, warmup_steps=0)
    config = replace(
        SMALL,
        model=TINY,
        training=training,
        sync=replace(SMALL.sync, warmup=0, **settings),
        pipeline=replace(SMALL.pipeline, groups=2 if settings else 1),
    )
    trainer, moves = ReferenceTrainer(config, corpus(config)), []
    before = [_norm(layer) for layer in trainer.chunks[0].layers]
    trainer.train(5)
    for unit, (layer, norm) in enumerate(zip(trainer.chunks[0].layers, before, strict=True)):
        moves.append((_norm(layer) - norm) / most_moved(config, unit, 0, 5))
    assert 0.05 < max(moves) < 1.0


def _norm(layer: torch.nn.Module) -> float:
    return math.sqrt(sum(float(weight.detach().double().square().sum()) for weight in layer.parameters()))


def test_second_moments_follow_gradients_that_become_much_smaller() -> None:
    run = alone()
    run.holds("b", step=4)
    assert of_kind(run.holds("a", step=4, squares=(1 / 50) ** 4), SnapshotAgreed)


def test_a_layer_that_a_spare_computes_too_was_right() -> None:
    run = alone(spare="x")
    run.holds("b", step=4)
    run.holds("a", "grown", step=4, weights=100.0)
    run.restored()
    run.steps(1)
    run.step()
    run.holds("b", step=4)
    actions = run.holds("x", "grown", step=4, weights=100.0)
    assert [one.step for one in of_kind(actions, SnapshotAgreed)] == [4]
    assert run.machine.quarantined == {}


def test_a_layer_that_nobody_can_compare_is_not_saved_and_the_run_ends_by_name() -> None:
    run = alone()
    for step in range(4, 4 + 2 * MOST_DISPUTES + 1, 2):
        run.holds("b", step=step)
        actions = run.holds("a", "bad", step=step, weights=0.0)
        assert [one.step for one in of_kind(actions, SnapshotDropped)] == [step]
        if of_kind(actions, Stop):
            break
        run.steps(1, store=False)
        run.step()
    stop = stop_of(actions)
    assert stop.failed and "whether node a is right" in stop.reason and run.machine.newest_snapshot == 2


def test_a_snapshot_that_does_not_give_the_steps_on_record_is_set_aside() -> None:
    """Here the only holder of a layer saved another one, of the same norms."""
    run = alone(spare="x")
    for node in "ab":
        run.holds(node, step=4)
    run.stored(4)
    run.steps(1)
    run.die("a")
    run.tick(REGROUP)
    run.restored()
    assert run.epoch.hosts == ("x", "b") and run.epoch.step == 4
    run.vote("x")
    actions = run.vote("b", loss=5.5)
    assert [one.step for one in of_kind(actions, RefuseSnapshot)] == [4] and run.machine.epoch is None
    assert of_kind(run.tick(1.0), RecordPlacement) == [], "nothing begins before it is set aside"
    run.machine.snapshot_damaged(4, 2)
    run.tick(1.0)
    run.all_placed(4)  # nobody goes on from what was loaded
    assert run.epoch.step == 2
    run.all_ready()
    run.step()
    assert run.epoch.step == 3


def test_a_run_without_an_older_snapshot_ends() -> None:
    run = alone(spare="x")
    run.die("a")
    run.tick(REGROUP)
    run.restored()
    assert run.epoch.step == 2
    run.vote("x")
    run.vote("b", loss=5.5)
    stop = stop_of(run.machine.snapshot_damaged(2, 0))
    assert stop.failed and "not the run's state" in stop.reason


@pytest.mark.parametrize("lie", [{"loss": 5.5}, {"norm": 100.0}], ids=str)
def test_who_alone_says_that_a_snapshot_does_not_give_the_steps_on_record_is_checked(
    lie: dict[str, float],
) -> None:
    """Else one member could have all snapshots set aside, one after the other."""
    run = alone(spare="xy")
    run.die("a")
    run.tick(REGROUP)
    run.restored()
    assert run.epoch.hosts == ("x", "b") and run.epoch.step == 2
    run.vote("x")
    actions = run.vote("b", **lie)
    assert of_kind(actions, RefuseSnapshot) == [] and placement_of(actions) == ("x", "y")
    run.restored()
    assert run.epoch.step == 2
    actions = run.step()
    assert [note.about for note in of_kind(actions, Announce)] == ["b"]
    assert run.epoch.step == 3


def replaying(nodes: str) -> Driver:
    """Rows of two stages in step 4, which is on record; the newest snapshots are of steps 2 and 4."""
    known = PastStep(loss=2.0, grad_norm=1.0, seconds=1.0, norms={0: 1.0, 3: 1.0})
    past = Past(
        last_epoch=3, newest_snapshot=4, later={4: known, 5: known}, hosts=tuple(nodes), rows=len(nodes) // 2
    )
    run = Driver(stages=2, every=50, steps=90, groups=6, follows=True, past=past)
    run.join(nodes)
    run.restored()
    assert run.epoch.hosts == tuple(nodes) and run.epoch.step == 4
    return run


@pytest.mark.parametrize("loss", [0.5, 5.5])
@pytest.mark.parametrize("liar", ["b", "d", "f"])
def test_who_alone_has_another_loss_than_the_steps_on_record_is_left_out(liar: str, loss: float) -> None:
    run = replaying("abcdef")
    actions = run.all_vote({liar: loss})
    assert of_kind(actions, RefuseSnapshot) == of_kind(actions, RecordCommit) == []
    assert {*run.epoch.hosts} == {*"abcdef"} - {liar}
    run.restored(4)
    assert of_kind(run.all_vote({}), RecordCommit) and run.machine.quarantined == {}


def test_a_loss_that_all_rows_find_sets_the_snapshot_aside() -> None:
    run, refused = replaying("abcdef"), list[int]()
    for _ in range(5):
        actions = run.all_vote(dict.fromkeys("bdf", 5.5))
        refused += [one.step for one in of_kind(actions, RefuseSnapshot)]
        if refused:
            break
        run.restored(4)
    assert refused == [4]
    run.machine.snapshot_damaged(4, 2)
    run.tick(REGROUP + 1)
    run.all_placed(4)
    assert run.epoch.step == 2 and {*run.epoch.hosts} >= {*"ace"}


def test_the_hash_of_weights_that_go_ahead_is_agreed_on_with_the_whole_layers() -> None:
    states, found = StateAgreement(unit_numbers), list[Finding]()
    states.expect(_grid(("a", "b", "c")))
    for node, weights in (("a", "2"), ("b", "3"), ("c", "3")):
        units = {unit: UnitHash("1" * 64, 1.0, 1.0, 1.0, weights * 64) for unit in range(6)}
        found.extend(states.take(node, StateHashes(epoch=1, step=4, units=units)))
    settled, wrong = found
    assert isinstance(settled, Settled) and isinstance(wrong, WrongState)
    assert {word.weights_sha256 for word in settled.units.values()} == {"3" * 64}
    assert wrong.node_id == "a"


@pytest.mark.parametrize("said", ["1", "2"])
def test_who_stays_when_one_of_two_that_differ_goes_is_not_believed_alone(said: str) -> None:
    states = StateAgreement(unit_numbers)
    found: list[Finding] = []

    def says(*words: str) -> Finding:
        hosts = ("a", "b")[: len(words)]
        states.expect(_grid(hosts))
        for node, content in zip(hosts, words, strict=True):
            units = {unit: UnitHash(content * 64, 1.0, 1.0, 1.0) for unit in range(6)}
            found.extend(states.take(node, StateHashes(epoch=1, step=4, units=units)))
        return found[-1]

    assert says("1", "2") == Dispute(
        step=4, nodes=("a", "b"), what="the state of stage 0 after step 4 is not the same in all rows"
    )
    if said == "2":
        assert isinstance(says(said), Settled), "the other one has said the same"
        return
    alone = says(said)
    assert isinstance(alone, Dispute) and "since node a, node b differed" in alone.what


@pytest.mark.parametrize("weights_from", [4, 5])
def test_a_layer_of_weights_alone_is_compared_by_its_weights(weights_from: int) -> None:
    """Of the last step, where the run file says so; before it, moments never vanish."""
    states = StateAgreement(unit_numbers, weights_from)
    states.expect(_grid(("a",)))
    units = {unit: UnitHash("1" * 64, 1.0, 0.0, 0.0) for unit in range(6)}
    (found,) = states.take("a", StateHashes(epoch=1, step=4, units=units))
    assert isinstance(found, Settled if weights_from == 4 else Dispute)


# ---- newcomers


def _grid(hosts: tuple[str, ...], newcomers: str = "", number: int = 1, *, step: int = 4) -> SimpleNamespace:
    """The epoch of one stage and these rows."""
    return SimpleNamespace(
        step=step,
        number=number,
        stages=1,
        hosts=hosts,
        grid=hosts,
        kinds_of=dict.fromkeys(hosts, ""),
        newcomers=frozenset(newcomers),
        snapshot_nodes=hosts[:1],
        trained=frozenset(range(6)),
    )


def test_newcomers_never_outvote_who_held_the_state_before() -> None:
    """Three rows: two of newcomers that fetched what one node alone had saved."""
    run = Driver(stages=1, groups=4, every=2, steps=20)
    run.join("a")
    run.restored()
    run.steps(1)
    epoch = run.epoch
    states = StateAgreement(unit_numbers)
    states.expect(_grid(("a", "b", "c"), "bc", epoch.number))
    found: list[Finding] = []
    for node, content in (("a", "1"), ("b", "2"), ("c", "2")):
        units = {unit: UnitHash(content * 64, 1.0, 1.0, 1.0) for unit in range(6)}
        found = states.take(node, StateHashes(epoch=epoch.number, step=4, units=units))
    assert [type(one) for one in found] == [Dispute], "neither side is chosen"


def test_a_newcomer_whose_norms_differ_from_one_older_node_is_the_odd_one() -> None:
    doubt = _Doubt(step=4, stages=1)
    right, wrong = 1, 2
    doubt.results[0] = {"a": right, "b": wrong, "c": wrong}
    assert doubt.odd_results(newcomers={"b", "c"}) == ["b", "c"]
    assert doubt.odd_results(newcomers=()) == ["a"]
    doubt.results[0] = {"a": right, "b": wrong}
    assert doubt.odd_results(newcomers=()) == [] and doubt.odd_results(newcomers={"b"}) == ["b"]


def test_hashes_of_other_layers_are_refused() -> None:
    run = alone()
    units = {unit: UnitHash("1" * 64) for unit in range(6)}
    for _ in range(MAX_STRIKES):
        run.machine.message("a", StateHashes(epoch=run.epoch.number, step=4, units=units), run.time)
        if run.machine.quarantined:
            break
        run.holds("b", step=4)
    assert "not of the layers that it holds" in run.machine.quarantined["a"]


def test_who_is_gone_when_a_steps_lateness_is_judged_harms_nobody() -> None:
    seen = attack_state("stale", 3, audits=False, seed=12)
    assert seen.good and seen.lied, seen


def test_a_placement_that_the_same_event_ends_is_followed_by_another() -> None:
    seen = attack_state("norms-and-hashes", 4, audits=False, seed=14)
    assert seen.good and seen.lied, seen


def test_a_node_that_changes_its_seat_is_not_told_to_follow_another_stage() -> None:
    seen = attack_state("scaled", 4, audits=False, seed=97)
    assert seen.good and seen.ended and seen.named
