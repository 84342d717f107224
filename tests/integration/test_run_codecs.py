"""A run that plans its codecs: they change in the run, and what a lost node makes run again has the same."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.decisions import recorded_codecs
from node.coordinator.store import Store
from node.pipeline.codec_plan import WATCHED, CodecPlan
from node.telemetry.events import CodecsPlanned, Notice, PlacementMade, StepCosts
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, TINY, Run, Still

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=20, snapshot_every=4),
    model=replace(TINY, hidden=64, sequence=64),
    pipeline=replace(SMALL.pipeline, stages=2, forward_codec="auto", backward_codec="auto", min_bits=3.0),
    coordinator=replace(SMALL.coordinator, regroup_seconds=0.5),
)

pytestmark = pytest.mark.timeout(240)


def test_steps_that_run_again_have_the_codecs_that_they_first_had(prefork: Prefork, tmp_path: Path) -> None:
    """On loopback every tensor hides behind compute, so that the first change, to more bits, comes as soon as
    may be. A node dies after it, and the run goes back to a snapshot from before."""
    still = Still(stage=1, steps=WATCHED + 3)
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=still) as run:
        coordinator = run.start()
        run.add_nodes(2)
        run.wait_still().kill()
        run.add_node(run.new_token())
        assert coordinator.wait_exit() == 0
        planned = coordinator.all(CodecsPlanned)
        with Store.open(run.run_dir) as store:
            history = recorded_codecs(store)
        assert [one.step for one in planned] == [step for step, _ in history.changes]
        assert [CodecPlan(activations=one.activations, gradients=one.gradients) for one in planned] == [
            plan for _, plan in history.changes
        ]
        first, second = history.changes[:2]
        assert first == (0, CodecPlan(activations=("trellis-4.41",), gradients=("dither-4.41",)))
        assert second[1] == CodecPlan(activations=("trellis-6",), gradients=("dither-6",))
        # The run went back to before the change, and through it again, with an epoch for each plan.
        resumed = [placed.resume_step for placed in coordinator.all(PlacementMade)]
        change = second[0]
        assert resumed[0] == 0 and change in resumed
        back = min(step for step in resumed[1:])
        if back < change:
            assert resumed.count(change) >= 2
        # Nothing that ran again gave another loss, and each step's flows name its codecs.
        assert not [one for one in coordinator.all(Notice) if "gave another loss" in one.text]
        for costs in coordinator.all(StepCosts):
            plan = history.at(costs.step - 1)
            assert plan is not None
            flows = {
                (flow.direction, flow.codec) for link in costs.links for flow in link.flows if flow.bytes
            }
            if not costs.aborted:
                assert flows == {("activation", plan.activations[0]), ("gradient", plan.gradients[0])}
