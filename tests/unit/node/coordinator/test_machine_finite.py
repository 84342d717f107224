"""Steps that are not finite: never committed, tried again uncompressed, and then the right last line."""

import math

import pytest

from node.coordinator.actions import Aborted, AbortKind, Action, Announce, RecordCommit
from tests.support.machine_driver import (
    Driver,
    of_kind,
    restore_of,
    stop_of,
)
from wire.messages import FailureKind


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_tried_again_uncompressed(norm: float) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    run.vote("b")
    actions = run.vote("a", norm=norm)
    assert of_kind(actions, RecordCommit) == []
    what = "the gradient of layer unit 0 at stage 0 is not finite"
    assert of_kind(actions, Announce) == [
        Announce(text=f"step 4 is not committed: {what}; running it again with uncompressed links")
    ]
    assert [(aborted.kind, aborted.reason) for aborted in of_kind(actions, Aborted)] == [
        (AbortKind.NOT_FINITE, what)
    ]
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
    "sum": "the global gradient norm at stage 1",
    "tensor": "the activation to be sent over boundary 0 at stage 0",
}


@pytest.mark.parametrize("how", HOW)
def test_not_finite_uncompressed_either_is_divergence(how: str) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, how)
    run.restored(3)
    assert run.epoch.uncompressed
    end = stop_of(not_finite(run, how))
    assert end.failed
    assert end.reason == (
        f"step 4 was not committed: {HOW[how]} is not finite, with uncompressed links too, so the run "
        "diverges; the snapshot of step 2 is intact: lower training.lr, then resume"
    )


@pytest.mark.parametrize("how", HOW)
def test_finite_uncompressed_is_the_codecs_fault(how: str) -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, how)
    run.restored(3)
    run.vote("a")
    actions = run.vote("b")
    assert of_kind(actions, RecordCommit) == [], "an uncompressed step is never committed"
    end = stop_of(actions)
    assert end.failed
    assert end.reason == (
        f"step 4 was not committed: {HOW[how]} is not finite; with uncompressed links it is finite, so the "
        "codecs are the cause; the snapshot of step 2 is intact: use wider codecs in [pipeline], then resume"
    )


def test_a_run_without_a_snapshot_claims_none() -> None:
    run = Driver(stages=1).started("a", 1)
    run.vote("a", norm=math.nan)
    run.restored(1)
    assert "no snapshot is complete yet: lower" in stop_of(run.vote("a", norm=math.nan)).reason


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


def test_an_uncompressed_epoch_that_fails_otherwise_is_tried_again() -> None:
    run = Driver(stages=2, every=2).started("ab", 3)
    not_finite(run, "norm")
    run.restored(3)
    run.failed("b")
    run.restored(3)
    assert run.epoch.uncompressed


@pytest.mark.parametrize("norm", [-1.0, -1e-300])
def test_a_squared_norm_below_zero_does_not_pass(norm: float) -> None:
    run = Driver(stages=1).started("a")
    assert of_kind(run.vote("a", norm=norm), RecordCommit) == []
