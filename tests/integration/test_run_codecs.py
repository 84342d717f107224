"""A run that plans its codecs follows what is on record: also when a lost node makes steps run again."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.decisions import record_plan, recorded_codecs
from node.coordinator.store import Store
from node.run_state.actions import RecordPlan
from node.telemetry.events import CodecsPlanned, Notice, PlacementMade, StepCosts
from node.tuning.codec_plan import CodecPlan
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun
from tests.support.run_harness import SMALL, TINY, Still

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=13),
    model=TINY,
    pipeline=replace(SMALL.pipeline, stages=2, forward_codec="auto", backward_codec="auto", min_bits=3.0),
    coordinator=replace(SMALL.coordinator, regroup_seconds=0.5),
)
FIRST = CodecPlan(activations=("trellis-4.41",), gradients=("dither-4.41",))
LATER = CodecPlan(activations=("trellis-6",), gradients=("dither-3.5",))

pytestmark = pytest.mark.timeout(300)


def test_steps_that_run_again_have_the_codecs_on_record(prefork: Prefork, tmp_path: Path) -> None:
    """The record says that codecs change some steps after the run goes on. A node dies after the change, and
    the run goes back to before it, and through it again."""
    early, still = Still(stage=1, steps=1), Still(stage=1, steps=10)
    with FaultRun(tmp_path, CONFIG, [early.fault, still.fault], launch=prefork.popen) as run:
        first = run.start()
        nodes = run.add_nodes(2)
        frozen = run.wait_frozen()
        first.interrupt()
        frozen.go_on()
        assert first.wait_exit() == 130
        for node in nodes:
            node.wait_exit()
        (stopped,) = run.snapshots
        change = stopped + 3
        assert change < still.steps
        with Store.open(run.run_dir) as store:
            assert recorded_codecs(store).changes == ((0, FIRST),)
            record_plan(store, RecordPlan(step=change, plan=LATER))

        second = run.resume("coordinator.regroup_seconds=0.5")
        run.add_nodes(2)
        run.wait_frozen().kill()
        run.add_node(run.new_token())
        assert second.wait_exit() == 0
        with Store.open(run.run_dir) as store:
            history = recorded_codecs(store)
        assert history.changes[:2] == ((0, FIRST), (change, LATER))
        # Twice before the change and twice at it, each time in an epoch of its own.
        resumed = [placed.resume_step for placed in second.all(PlacementMade)]
        assert resumed[:4] == [stopped, change, stopped, change]
        assert [one.step for one in second.all(CodecsPlanned)] == [step for step, _ in history.changes[2:]]
        # Each step's frames were of its plan, and no step that ran again gave another loss.
        steps = [costs for costs in second.all(StepCosts) if not costs.aborted]
        assert {costs.step for costs in steps} >= set(range(stopped + 1, CONFIG.run.steps + 1))
        for costs in steps:
            plan = history.at(costs.step - 1)
            assert plan is not None
            flows = {(flow.kind, flow.codec) for link in costs.links for flow in link.flows if flow.bytes}
            assert flows == {("activation", plan.activations[0]), ("gradient", plan.gradients[0])}
        assert not [one for one in second.all(Notice) if "with a different loss" in one.text]
