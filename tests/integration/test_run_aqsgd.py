"""`aqsgd-b` in real processes: the sample caches of both ends survive kills and stops, bit for bit."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.telemetry.events import PlacementMade, RunFinished, StepAborted
from tests.support.fault_prefork import Prefork
from tests.support.memory_pipeline import TEXT, MemoryPipeline, corpus
from tests.support.run_harness import SMALL, Expected, Run, Still

# 40 samples, so that a pass ends in step 5.
CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=16, snapshot_every=4),
    model=replace(SMALL.model, sequence=24, layers=3),
    data=replace(SMALL.data, shift=False),
    pipeline=replace(SMALL.pipeline, stages=3, window=1, forward_codec="aqsgd-3", backward_codec="fixed-8"),
)
SHORT = TEXT[: 24 * 45 + 1]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Computed by stages joined by memory; `test_executor_aqsgd.py` compares those with a simulation."""
    with MemoryPipeline(CONFIG, corpus(CONFIG, SHORT)) as stages:
        steps = stages.train(CONFIG.run.steps)
        return Expected(
            {number: step.loss for number, step in enumerate(steps, start=1)}, stages.weights_sha256()
        )


def test_a_replacement_remembers_what_the_dead_node_did(
    prefork: Prefork, tmp_path: Path, expected: Expected
) -> None:
    """kill -9 of the middle stage in the second pass; another machine takes it, and its memory."""
    with Run(tmp_path, CONFIG, text=SHORT, launch=prefork.popen, still=Still(stage=1, steps=11)) as run:
        coordinator = run.start()
        run.add_nodes(3)
        run.wait_still().kill()
        create = run.command("token", "create", str(run.run_dir))
        assert create.wait_exit() == 0
        run.add_node(create.lines[0].removeprefix("thinwire join "))
        assert coordinator.wait_exit() == 0
        assert coordinator.all(StepAborted)
        # A snapshot is stored beside the steps: that of step 8 may not have been whole.
        assert coordinator.all(PlacementMade)[-1].resume_step in (4, 8)
        run.assert_quiet()
        assert run.losses == expected.losses
        assert run.weights_sha256 == expected.weights_sha256


def test_stop_and_resume_remember(prefork: Prefork, tmp_path: Path, expected: Expected) -> None:
    with Run(tmp_path, CONFIG, text=SHORT, launch=prefork.popen, still=Still(stage=0, steps=7)) as run:
        first = run.start()
        run.add_nodes(3)
        still = run.wait_still()
        first.interrupt()
        still.go_on()
        assert first.wait_exit() == 130
        run.assert_quiet()
        second = run.resume()
        run.add_nodes(3)
        assert second.wait_exit() == 0
        run.assert_quiet()
        assert run.losses == expected.losses
        assert run.weights_sha256 == expected.weights_sha256
        summary = second.all(RunFinished)[-1].summary
        assert summary is not None and summary.bits_forward < 16 / 2, "no second uncompressed pass"
