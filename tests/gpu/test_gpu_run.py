"""Whole runs on one GPU: a coordinator and four nodes as processes, whose stages share it."""

from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection, Window
from node.telemetry.events import StepAborted
from tests.support.run_harness import SMALL, Run

STAGES = 4
CONFIG = replace(
    SMALL,
    run=RunSection(name="gpu", seed=3, steps=6, snapshot_every=6),
    model=ModelSection(layers=STAGES, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=256, sequence=128),
    training=TrainingSection(global_batch=8, microbatch=1, warmup_steps=2, precision="bfloat16"),
    coordinator=replace(SMALL.coordinator, silent_seconds=60.0),
)


def losses(
    directory: Path, codecs: tuple[str, str], window: Window, config: RunConfig = CONFIG
) -> dict[int, float]:
    """The losses by step of a run that ends by itself; stderr has only log lines."""
    pipeline = PipelineSection(
        stages=STAGES, window=window, forward_codec=codecs[0], backward_codec=codecs[1]
    )
    with Run(directory, replace(config, pipeline=pipeline)) as run:
        coordinator = run.start()
        for number in range(STAGES):
            run.command(
                *("join", coordinator.token, "--listen", "127.0.0.1:0", "--device", "cuda:0"),
                *("--threads", "1", "--state-dir", str(run.state_dir(number)), "--json", "--wait", "0"),
                name="node",
            )
        run.assert_quiet()
        assert coordinator.all(StepAborted) == []
        return run.losses


@pytest.mark.parametrize("codecs", [("tah", "fixed-8"), ("bf16", "bf16")], ids=str)
def test_the_window_and_the_run_change_no_bit(tmp_path: Path, codecs: tuple[str, str]) -> None:
    """The order of transfers beside compute varies between runs; the losses are the same."""
    narrow = losses(tmp_path / "narrow", codecs, 0)
    assert len(narrow) == CONFIG.run.steps
    assert narrow[CONFIG.run.steps] < narrow[1]
    assert losses(tmp_path / "wide", codecs, 3) == narrow
    assert losses(tmp_path / "auto", codecs, "auto") == narrow


def test_a_run_in_float16_follows_one_in_bfloat16(tmp_path: Path) -> None:
    """For cards without bfloat16. With this factor nothing overflows, so no step is skipped."""
    found = []
    for precision in ("float16", "bfloat16"):
        training = replace(CONFIG.training, precision=precision, loss_scale=1024.0)
        config = replace(CONFIG, run=replace(CONFIG.run, steps=20, snapshot_every=20), training=training)
        found.append(losses(tmp_path / precision, ("tah", "fixed-8"), "auto", config))
    half, brain = found
    assert list(half) == list(brain) == list(range(1, 21))
    assert half == pytest.approx(brain, rel=2e-2) and half[20] < 0.9 * half[1]
