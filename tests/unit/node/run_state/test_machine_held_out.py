"""The held-out loss is measured between two steps, and changes nothing else of the run."""

import math

from node.config.schema import DataSection, PipelineSection, RunConfig, TrainingSection
from node.run_state.actions import OpenSnapshot, RecordHeldOut, StepDone
from node.run_state.epoch import Phase
from node.run_state.failures import MAX_STRIKES
from node.run_state.held_out import HeldOutPass, held_out_passes
from node.run_state.run_plan import Past
from tests.support.machine_driver import Driver, of_kind, sent, stop_of
from wire.messages import Begin, TakeSnapshot, Validate

BOTH = (HeldOutPass(number=0, microbatches=3), HeldOutPass(number=1, microbatches=3))


def measuring(every: int = 2, *passes: HeldOutPass, past: Past | None = None) -> Driver:
    return Driver(stages=2, steps=6, every=100, past=past).validating(every, *passes)


def record_of(actions: list[object]) -> RecordHeldOut:
    (record,) = [action for action in actions if isinstance(action, RecordHeldOut)]
    return record


def test_every_pass_is_run_by_all_stages_before_the_next_step_begins() -> None:
    run = measuring(2, *BOTH).started("ab", 1)
    run.all_vote()
    actions = run.all_applied()
    first = Validate(epoch=1, step=2, number=0, microbatches=3)
    assert of_kind(actions, StepDone) and sent(actions) == [first, first]
    assert run.epoch.phase is Phase.VALIDATING
    assert run.validated("b", 4.0, number=0) == []
    assert run.validated("b", 9.0, number=1) == [], "not asked yet"
    second = Validate(epoch=1, step=2, number=1, microbatches=3)
    assert sent(run.validated("a", number=0)) == [second, second]
    assert run.validated("a", number=1) == []
    actions = run.validated("b", 3.0, number=1)
    assert actions[0] == RecordHeldOut(step=2, loss=4.0, uncompressed=3.0, samples=3, best=True)
    assert sent(actions, "a") == [TakeSnapshot(epoch=1, step=2), Begin(epoch=1, step=2)]
    run.steps(1)
    assert run.epoch.phase is Phase.STEPPING, "the next is not due"


def test_a_loss_that_cannot_be_is_refused_and_is_never_the_best() -> None:
    """Else no other state would be the best again, and with `keep_best` none would be kept."""
    run = measuring().started("ab", 1)
    run.steps(1)
    run.validated("a")
    for _ in range(MAX_STRIKES - 1):
        actions = run.validated("b", -5.0)
        assert of_kind(actions, RecordHeldOut) == [] and len(sent(actions, "b")) == 1, "it is asked again"
    assert record_of(run.validated("b", 3.0)).uncompressed == 3.0
    run.steps(2)
    assert run.epoch.phase is Phase.VALIDATING
    run.validated("b", -5.0)
    assert run.machine.quarantined.keys() == {"b"}


def test_batches_of_unlike_size_count_by_their_samples() -> None:
    passes = HeldOutPass(number=1, microbatches=3), HeldOutPass(number=3, microbatches=1)
    run = measuring(2, *passes).started("ab", 1)
    run.steps(1)
    run.all_validated(2.0, number=1)
    record = record_of(run.all_validated(4.0, number=3))
    assert (record.loss, record.uncompressed, record.samples) == (None, 2.5, 4)


def test_a_state_is_measured_once() -> None:
    run = measuring().started("ab", 1)
    run.steps(1)
    run.all_validated()
    run.failed("a")
    run.restored(2)
    assert run.epoch.phase is Phase.STEPPING and run.epoch.step == 2
    again = measuring(past=Past(validated=frozenset({2}))).started("ab", 2)
    assert again.epoch.phase is Phase.STEPPING


def test_an_interrupted_measurement_starts_again() -> None:
    run = measuring(2, *BOTH).started("ab", 1)
    run.steps(1)
    run.all_validated(number=0)
    run.failed("b")
    actions = run.restored(2)
    assert sent(actions, "a") == [Validate(epoch=2, step=2, number=0, microbatches=3)]
    run.all_validated(5.0, number=0)
    record = record_of(run.all_validated(6.0))
    assert (record.loss, record.uncompressed) == (5.0, 6.0)


def test_a_node_that_reconnects_hears_of_the_pass_again() -> None:
    run = measuring().started("ab", 1)
    run.steps(1)
    run.machine.disconnected("a", run.time)
    assert sent(run.hello("a", epoch=1)) == [Validate(epoch=1, step=2, number=1, microbatches=2)]


def test_the_best_state_is_saved_and_a_worse_one_is_not() -> None:
    run = measuring(2, past=Past(best=3.0)).started("ab", 1)
    saved = []
    for loss in (3.5, 2.5, 2.6):
        run.steps(1)
        actions = run.all_validated(loss)
        saved += [(record_of(actions).best, bool(of_kind(actions, OpenSnapshot)))]
        if run.epoch.step < 6:
            run.steps(1)
    assert saved == [(False, False), (True, True), (False, True)], "the last state is saved in any case"


def test_over_a_slow_line_the_next_due_snapshot_is_measured_in_place_of_a_best_one() -> None:
    run = Driver(stages=2, steps=12, every=5).validating(2).started("ab", 1)
    run.steps(1)
    assert of_kind(run.all_validated(3.0), OpenSnapshot) == [OpenSnapshot(step=2)]
    run.time += 6.0  # it is still on its way
    run.steps(2)
    actions = run.all_validated(2.0)
    assert record_of(actions).best and not of_kind(actions, OpenSnapshot)
    run.steps(1)
    assert run.epoch.phase is Phase.VALIDATING and run.epoch.step == 5, "a due one, between measurements"
    actions = run.all_validated(1.5)
    assert record_of(actions).step == 5 and record_of(actions).best
    assert not of_kind(actions, OpenSnapshot), "it is being taken"
    run.steps(1)
    run.all_validated(1.9)
    run.steps(2)
    run.all_validated(1.9)
    run.steps(2)
    assert run.epoch.step == 10
    assert record_of(run.all_validated(1.8)).step == 10


def test_a_loss_that_is_not_a_number_is_recorded_and_never_the_best() -> None:
    run = measuring().started("ab", 1)
    run.steps(1)
    record = record_of(run.all_validated(math.nan))
    assert math.isnan(record.uncompressed) and not record.best


def test_the_last_state_is_measured_before_the_run_ends() -> None:
    run = measuring(4).started("ab", 3)
    run.steps(1)
    run.all_validated()
    run.steps(2, store=False)
    assert run.epoch.phase is Phase.VALIDATING and run.epoch.step == 6
    assert of_kind(run.all_validated(), OpenSnapshot) == [OpenSnapshot(step=6)]
    assert stop_of(run.stored(6)).reason == "all steps are done"


def test_only_the_last_stage_says_losses() -> None:
    run = measuring().started("ab", 1)
    run.steps(1)
    (a, b) = run.epoch.hosts
    from_first = run.validated(a)
    assert from_first == []
    assert record_of(run.validated(b, 2.25)).uncompressed == 2.25


def config(forward: str, samples: int) -> RunConfig:
    return RunConfig(
        data=DataSection(valid_every=1, valid_samples=samples),
        training=TrainingSection(global_batch=8, microbatch=2),
        pipeline=PipelineSection(forward_codec=forward),
    )


def test_passes_of_a_run_file() -> None:
    assert [(one.number, one.microbatches) for one in held_out_passes(config("tah", 13), 12)] == [
        (0, 4),
        (1, 4),
        (2, 2),
        (3, 2),
    ]
    for codec in ("fp32", "aqsgd-4"):
        assert [one.number for one in held_out_passes(config(codec, 16), 16)] == [1, 3]
    assert held_out_passes(config("tah", 13), 0) == ()
    assert config("tah", 13).validation_passes == 4
