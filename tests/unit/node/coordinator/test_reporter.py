"""The coordinator's step events: costs first, aborted steps, and the step that a dead coordinator owed."""

from dataclasses import replace

import pytest

from node.config.schema import (
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    SyncSection,
    TrainingSection,
)
from node.coordinator import reporter
from node.coordinator.reporter import Recovery, Reporter
from node.coordinator.store import StepRecord
from node.display.render import summary_lines
from node.model.optimizers import state_bytes
from node.processes.coordinator import _unreported
from node.run_state.actions import Aborted, AbortKind, RecordRestored
from node.schedule.placement import stage_units
from node.telemetry import events
from node.telemetry.costs import bits_per_element, mean_step
from node.telemetry.format import bytes_text
from tests.support.totals import EPOCH, totals
from wire.figures import FlowFigures
from wire.spec import Direction

CONFIG = RunConfig(run=RunSection(steps=9), model=ModelSection(layers=5), pipeline=PipelineSection(stages=2))
NODES = ("a", "b")
OWED = StepRecord(
    step=4,
    epoch=2,
    loss=3.5,
    grad_norm=1.5,
    lr=1e-3,
    clip=1.0,
    tokens=4096,
    seconds=2.0,
    committed_at=1.7e9,
)


class Told:
    def __init__(self, unreported: StepRecord | None = None, config: RunConfig = CONFIG) -> None:
        self.events: list[events.Event] = []
        self.reporter = Reporter(config, self.events.append, unreported)

    def restored(self, step: int, epoch: int = EPOCH) -> None:
        for stage, node in enumerate(NODES):
            self.reporter.accounting.report(node, totals(0, stage=stage, epoch=epoch))
        self.reporter.placed()
        self.reporter.restored(RecordRestored(epoch=epoch, step=step, nodes=NODES), {"a": 1e6})

    def committed(self, step: int) -> None:
        self.reporter.committed(replace(OWED, step=step, epoch=EPOCH, loss=2.5, grad_norm=1.0, lr=1e-3))

    def report(self, steps: float) -> None:
        for stage, node in enumerate(NODES):
            self.reporter.accounting.report(node, totals(steps, stage=stage))

    @property
    def kinds(self) -> list[str]:
        return [event.event for event in self.events]

    def steps(self) -> list[events.StepDone]:
        return [event for event in self.events if isinstance(event, events.StepDone)]


def test_a_step_is_reported_with_its_cost() -> None:
    told = Told()
    told.restored(0)
    told.committed(0)
    told.report(1)
    told.reporter.finish_step()
    assert told.kinds == ["placement", "step-costs", "step"]
    placement, costs, step = told.events
    assert isinstance(placement, events.PlacementMade) and sum(placement.blocks) == 5
    assert isinstance(costs, events.StepCosts) and [link.bytes for link in costs.links] == [1000, 1000]
    assert isinstance(step, events.StepDone) and step.idle == (0.25, 0.25) and step.bits_forward == 4.5


def test_short_steps_of_many_stages_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "OWN_COSTS", 1)
    told = Told()
    told.restored(0)
    for step in range(3):
        told.committed(step)
        told.report(step + 1)
        # What comes after the third is no step.
        assert (told.reporter.finish_step(goes_on=step < 2) is None) == (step < 2)
    first, second, third = told.steps()
    assert first.idle == first.up_mbit == second.down_mbit == ()
    assert (first.bits_forward, third.bits_forward, third.idle) == (0.0, 4.5, (0.25, 0.25))
    (costs,) = (event for event in told.events if isinstance(event, events.StepCosts))
    assert (costs.step, costs.steps) == (3, 3)
    assert costs.seconds == pytest.approx(first.seconds + second.seconds + third.seconds)
    assert [link.bytes for link in costs.links] == [3000, 3000]
    mean = mean_step(costs)
    assert (mean.steps, mean.seconds) == (1, costs.seconds / 3)
    assert [(link.bytes, link.flows[0].elements) for link in mean.links] == [(1000, 1600)] * 2
    assert [stage.seconds["forward"] for stage in mean.stages] == [1.0, 1.0]
    monkeypatch.setattr(reporter, "COSTS_PAUSE", 0.0)
    monkeypatch.setattr(reporter, "COSTS_PAUSE_A_STAGE", 0.0)
    told.committed(3)
    told.report(4)
    alone = told.reporter.finish_step(goes_on=True)
    assert alone is not None and (alone.steps, alone.links[0].bytes) == (1, 1000)


def test_costs_that_are_not_summed_up_yet_come_with_the_step_that_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporter, "OWN_COSTS", 1)
    told = Told()
    told.restored(0)
    told.committed(0)
    told.report(1)
    told.reporter.finish_step(goes_on=True)
    told.report(1.5)
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=1, kind=AbortKind.LOST, reason="node b is gone"))
    costs = told.events[2]
    assert isinstance(costs, events.StepCosts) and costs.aborted
    assert (costs.step, costs.steps, costs.links[0].bytes) == (2, 2, 1500)


def test_sums_of_a_round_are_counted_under_their_own_codec_and_once() -> None:
    """Though exact steps came before it in the epoch, whose bytes are in the same totals."""
    config = replace(
        CONFIG,
        pipeline=replace(CONFIG.pipeline, groups=2, sync_codec="fixed-8"),
        sync=SyncSection(every=2, warmup=1, codec="fixed-4"),
    )
    told = Told(config=config)
    told.restored(0)
    for step, codec in enumerate(("fixed-8", "fixed-4")):
        told.committed(step)
        for stage, node in enumerate(NODES):
            told.reporter.accounting.report(node, totals(step + 1, stage=stage, codec=codec))
        told.reporter.finish_step()
    costs = [event for event in told.events if isinstance(event, events.StepCosts)]
    flows = [[(flow.codec, flow.bytes) for link in cost.links for flow in link.flows] for cost in costs]
    assert flows == [[("fixed-8", 900)] * 2, [("fixed-4", 900)] * 2]


def test_an_aborted_step_is_reported_with_its_cost() -> None:
    told = Told()
    told.restored(0)
    told.report(0.5)
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.LOST, reason="node b is gone"))
    told.restored(0, EPOCH + 1)
    assert told.kinds == ["placement", "step-costs", "step-aborted", "placement", "recovered"]
    costs = told.events[1]
    assert isinstance(costs, events.StepCosts) and costs.aborted and costs.links[0].bytes == 500
    assert told.events[2] == events.StepAborted(epoch=EPOCH, step=1, kind="lost", reason="node b is gone")


def test_a_planned_change_of_placement_is_no_recovery() -> None:
    told = Told()
    told.restored(0)
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.PLACEMENT, reason="it changes"))
    told.restored(0, EPOCH + 1)
    assert type(told.events[-1]) is events.Notice
    assert told.events[-1].text.startswith("placement changed at step 0 in ")
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.PLACEMENT, reason="it changes"))
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.LOST, reason="node b is gone"))
    told.restored(0, EPOCH + 2)
    assert isinstance(told.events[-1], events.Recovered), "a node was lost on the way"


@pytest.mark.parametrize("moments", ["float32", "fp8"])
def test_a_recovery_is_measured_by_the_state_that_travels(moments: str) -> None:
    config = replace(CONFIG, training=TrainingSection(moments=moments))
    told = Told(config=config)
    told.restored(0)
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.LOST, reason="node b is gone"))
    told.restored(0, EPOCH + 1)
    stages = [sum(state_bytes(config, unit) for unit in units) for units in stage_units(config, 2)]
    recovered = told.events[-1]
    assert isinstance(recovered, events.Recovered)
    assert f" + {bytes_text(max(stages))} of state / 1 MB/s" in recovered.text


def test_a_step_committed_before_the_abort_is_reported_when_done() -> None:
    told = Told()
    told.restored(0)
    told.committed(0)
    told.report(1)
    told.reporter.interrupted(Aborted(epoch=EPOCH, step=0, kind=AbortKind.LOST, reason="node b is gone"))
    told.restored(1, EPOCH + 1)
    assert told.kinds == ["placement", "step-aborted", "step-costs", "step", "placement", "recovered"]
    assert told.steps()[0].up_mbit[0] > 0, "what it cost is not lost"


def test_a_step_committed_by_a_dead_coordinator_is_reported_from_the_database() -> None:
    told = Told(OWED)
    told.restored(5)
    (step,) = told.steps()
    assert (step.step, step.loss, step.grad_norm, step.seconds) == (5, 3.5, 1.5, 2.0)
    told.committed(5)
    told.reporter.finish_step()
    assert [step.step for step in told.steps()] == [5, 6]


def test_it_is_not_reported_if_it_runs_again() -> None:
    told = Told(OWED)
    told.restored(3)
    assert told.steps() == []


def test_only_an_unreported_step_is_reported_later() -> None:
    assert _unreported(None, 0) is None
    assert _unreported(OWED, 4) is OWED
    assert _unreported(OWED, 5) is None, "its event is in the history"
    assert _unreported(replace(OWED, step=0), 0) is not None


def test_the_summary_adds_up() -> None:
    told = Told()
    told.restored(0)
    for step in range(3):
        told.committed(step)
        told.report(step + 1)
        told.reporter.finish_step()
    told.reporter.snapshot_stored(3, 77, "snapshots/step-3", "ab")
    told.reporter.snapshot_stored(2, 77, "the state directories of its nodes", "cd")  # complete later
    told.reporter.finished("all done", failed=False)
    last = told.events[-1]
    assert isinstance(last, events.RunFinished) and last.summary is not None
    assert (last.summary.steps, last.summary.link_bytes) == (3, 6000)
    assert last.summary.weights_sha256 == "ab" and last.summary.snapshot_path == "snapshots/step-3"
    assert [sum(stage.seconds.values()) for stage in last.summary.stages] == [6.0, 6.0]


def test_a_run_in_which_nothing_happened_has_no_summary() -> None:
    told = Told()
    told.reporter.finished("stopped", failed=False)
    assert told.events == [events.RunFinished(reason="stopped", failed=False)]


def test_the_summary_counts_a_step_once_and_says_from_where_it_counts() -> None:
    told = Told()
    told.restored(4)
    for count, step in enumerate((4, 5, 4, 5, 6)):
        told.committed(step)
        told.report(count + 1)
        told.reporter.finish_step()
    told.reporter.finished("all done", failed=False)
    last = told.events[-1]
    assert isinstance(last, events.RunFinished) and last.summary is not None
    summary = last.summary
    assert (summary.steps, summary.since, summary.again, summary.link_bytes) == (3, 4, 2, 10_000)
    assert summary.tokens == 3 * CONFIG.tokens_per_step
    assert summary.machines == ("a (3 steps)", "b (3 steps)")
    assert "3 since step 4, 2 of them again" in summary_lines(summary)[0]


def test_only_who_was_there_is_thanked_for_a_step() -> None:
    """One row of several loses its node after the first step, and the others go on."""
    told = Told()
    told.restored(0)
    for step in range(3):
        told.committed(step)
        told.reporter.finish_step()
        told.reporter.accounting.forget("b")
    told.reporter.finished("all done", failed=False)
    last = told.events[-1]
    assert isinstance(last, events.RunFinished) and last.summary is not None
    assert last.summary.machines == ("a (3 steps)", "b (1 step)")


def test_what_held_out_samples_send_counts_apart() -> None:
    """Whenever a node reports it: with the step before, or with the measurement."""
    told = Told()
    told.restored(0)
    told.committed(0)
    for stage, node in enumerate(NODES):
        report = totals(1, stage=stage)
        held_out = FlowFigures(direction=Direction.HELD_OUT, codec="tah", bytes=700, elements=175)
        links = tuple(
            replace(one, bytes=one.bytes + 700, flows=(*one.flows, held_out)) for one in report.links
        )
        told.reporter.accounting.report(node, replace(report, links=links))
    costs = told.reporter.finish_step()
    assert costs is not None and {link.bytes for link in costs.links} == {1000}
    assert "held_out" not in {flow.kind for link in costs.links for flow in link.flows}
    told.reporter.finished("all done", failed=False)
    last = told.events[-1]
    assert isinstance(last, events.RunFinished) and last.summary is not None
    assert (last.summary.link_bytes, last.summary.held_out_bytes) == (2000, 1400)
    assert last.summary.bits_forward == told.steps()[0].bits_forward == bits_per_element(costs, "activation")


def test_an_interruption_is_reported_once_and_counts_from_the_first() -> None:
    recovery = Recovery()
    recovery.placed(1.0)
    assert recovery.over(step=0, now=2.0, state_bytes=1000, rate=1e6) is None
    for at in (5.0, 7.0):
        recovery.interrupted(at)
        recovery.placed(at + 1.0)
    told = recovery.over(step=2, now=11.0, state_bytes=60_000_000, rate=2_000_000.0)
    assert told is not None and (told.step, told.seconds) == (2, 6.0)
    # The last placement was at 8; ten seconds, and the state at the rate of the slowest line.
    assert " 3 s " in told.text and told.text.endswith("= 40 s")
    assert recovery.over(step=2, now=12.0, state_bytes=500, rate=0.0) is None
