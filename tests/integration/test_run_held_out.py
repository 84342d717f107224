"""The held-out loss in runs of real processes: it changes no bit, survives kills, and equals `eval`'s."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.main import main
from node.config.schema import LoraSection, RunConfig
from node.coordinator.store import Store
from node.schedule.placement import chunk_units
from node.telemetry.events import HeldOutLoss, SeatLost, StepAborted
from node.telemetry.history import read_history
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import KILLED, FaultRun, held, small, until_joined
from tests.support.faults import Fault, Kind, Phase
from tests.support.memory_pipeline import reference_run
from tests.support.run_harness import Run

pytestmark = pytest.mark.timeout(240)


def measured(config: RunConfig, every: int = 2, samples: int = 12) -> RunConfig:
    """Batches of unlike size, more than one."""
    data = replace(config.data, valid_every=every, valid_samples=samples)
    return replace(config, data=data)


def evaluated(run: Run, step: int, capsys: pytest.CaptureFixture[str]) -> float:
    assert main(["eval", str(run.run_dir), "--step", str(step), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["samples"]) == (step, 12)
    loss: float = said["loss"]
    return loss


def test_a_run_that_is_measured_has_the_bits_of_one_that_is_not(
    prefork: Prefork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of adapters with dropout, in a pipeline that comes by each stage twice, with a tied head at its end."""
    config = measured(small(codecs=("tah", "fixed-8")))
    stages = 2
    pipeline = replace(config.pipeline, stages=stages, chunks=2, head="last")
    config = replace(
        config,
        model=replace(config.model, layers=4, tied=True),
        lora=LoraSection(rank=2, dropout=0.2),
        pipeline=pipeline,
    )
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_nodes(stages)
        assert coordinator.wait_exit() == 0
        run.assert_quiet()
        told = coordinator.all(HeldOutLoss)
        assert [one.step for one in told] == [2, 4, 6]
        for one in told:
            assert one.samples == 12 and one.loss is not None
            assert one.loss != one.uncompressed, "as trained is with the codec"
            assert one.loss == pytest.approx(one.uncompressed, rel=0.05)
            assert one.uncompressed == pytest.approx(evaluated(run, one.step, capsys), abs=1e-5)
        in_history = [entry.event for entry in read_history(run.run_dir)]
        assert [event for event in in_history if isinstance(event, HeldOutLoss)] == told
        best = min(told, key=lambda one: one.uncompressed)
        assert evaluated(run, best.step, capsys) == pytest.approx(best.uncompressed, abs=1e-5)
        # The unsplit model measures nothing.
        steps, weights = reference_run(config, config.run.steps, chunk_units(config, stages))
        assert run.losses == {number: step.loss for number, step in enumerate(steps, start=1)}
        assert run.weights_sha256 == weights


def test_a_node_killed_while_the_loss_is_measured_changes_nothing(prefork: Prefork, tmp_path: Path) -> None:
    config = measured(small())
    kill = Fault(kind=Kind.KILL, phase=Phase.VALIDATION, stage=2, step=4, skip=1)
    with FaultRun(tmp_path, config, [kill], gather=4, launch=prefork.popen) as run:
        run.start()
        nodes = [*run.add_nodes(3), run.add_spare()]
        assert run.tend(restart=False) == 0
        assert sorted(node.wait_exit() for node in nodes) == [KILLED, 0, 0, 0]
        run.assert_all_happened()
        run.assert_undisturbed()
        told = run.all(HeldOutLoss)
        assert [one.step for one in told if one.step != 2] == [4, 6]
        assert all(one.loss == one.uncompressed for one in told), "the codec is fp32"
        with Store.open(run.run_dir) as store:
            assert [*store.held_out()] == [2, 4, 6]


def test_a_row_that_loses_a_node_while_it_measures_goes_on(prefork: Prefork, tmp_path: Path) -> None:
    """Another row measures. Its other node stops measuring, and votes in the next step."""
    hold = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=0)
    kill = Fault(kind=Kind.KILL, phase=Phase.VALIDATION, stage=0, step=4, skip=1)
    pipeline = replace(small().pipeline, stages=2, groups=4, window=0, replicas="auto")
    config = measured(replace(small(), pipeline=pipeline))
    with FaultRun(tmp_path, config, [hold, kill], launch=prefork.popen) as run:
        with held(run, hold):
            run.start()
            run.add_nodes(4)
            assert run.tend(until=until_joined(4)) is None
        assert run.tend(restart=False) == 0
        run.assert_all_happened()
        run.assert_undisturbed()
        assert not [aborted for aborted in run.all(StepAborted) if not aborted.is_planned]
        assert [one.step for one in run.all(HeldOutLoss)] == [2, 4, 6]
        assert [lost.stage for lost in run.all(SeatLost)] == [0], "nobody was replaced"


def test_the_best_state_is_kept_and_sampled(
    prefork: Prefork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = measured(small(steps=6, snapshot_every=100))
    config = replace(
        config,
        run=replace(config.run, keep_snapshots=1),
        training=replace(config.training, lr=0.3, warmup_steps=6, min_lr_ratio=1.0),
    )
    with Run(tmp_path, config, launch=prefork.popen) as run:
        coordinator = run.start()
        run.add_nodes(3)
        assert coordinator.wait_exit() == 0
        told = coordinator.all(HeldOutLoss)
        best = min(told, key=lambda one: one.uncompressed)
        assert best.step < 6, "this learning rate ruins what was learned"
        assert [one.step for one in told if one.best][-1] == best.step
        kept = sorted(int(path.parent.name[5:]) for path in run.run_dir.glob("snapshots/*/manifest.json"))
        assert kept == [best.step, 6]
        texts = []
        for seed in ("1", "1", "2"):
            command = ["sample", str(run.run_dir), "def ", "--step", "best", "--tokens", "20", "--seed", seed]
            assert main(command) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != texts[2]
        assert all(text.startswith("def ") and len(text) > 10 for text in texts)
