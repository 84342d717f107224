"""A node gives way to others on its GPU, between microbatches and never for long; the meter is fake."""

from collections.abc import Callable

import pytest
import torch

from node.config.join_options import JoinOptions
from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.processes.node import _other_use
from node.stage.give_way import MOST_SECONDS, SLOWEST, GiveWay, OtherUse, others_percent
from tests.support.memory_pipeline import MemoryPipeline
from wire.errors import UserError

TABLE = """
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1234     C     95     40      -      -      -      -    python
    0       2100     G      3      1      -      -      -      -    Xorg
    0       4000   C+G     61     12      -      -      -      -    a game
    0       4001     G      -      -      -      -      -      -    a browser
"""
CONFIG = RunConfig(
    run=RunSection(steps=4, seed=3),
    model=ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=256, sequence=8),
    training=TrainingSection(global_batch=4, microbatch=1, warmup_steps=0),
    pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32"),
)


class Time:
    """Passes where somebody waits or works."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def paused(worked: float, use: Callable[[float], float]) -> float:
    """Seconds of a pause after so much work; `use` by the time since its begin."""
    time = Time()
    gives = GiveWay(lambda: use(time.now - 100.0 - worked), 25.0, clock=time.clock, wait=time.wait)
    time.now += worked
    gives.pause(lambda: None)
    return time.now - 100.0 - worked


def test_a_pause_ends_with_the_others_use_or_when_it_has_been_long_enough() -> None:
    assert paused(1.0, lambda since: 24.9) == 0.0
    assert paused(1.0, lambda since: 80.0 if since < 2.0 else 0.0) == pytest.approx(2.0, abs=0.2)
    assert paused(1.0, lambda since: 80.0) == pytest.approx(SLOWEST, abs=0.2)
    assert paused(1e3, lambda since: 80.0) == pytest.approx(MOST_SECONDS, abs=0.2)


def test_an_interrupted_step_does_not_wait() -> None:
    time = Time()
    gives = GiveWay(lambda: 80.0, 25.0, clock=time.clock, wait=time.wait)
    time.now += 1.0

    def interrupted() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        gives.pause(interrupted)
    assert time.now == 101.0


def test_others_are_the_processes_that_this_program_did_not_start() -> None:
    assert others_percent(TABLE, {1234}) == 64.0
    assert others_percent(TABLE, {1234, 4000}) == 3.0
    assert OtherUse("GPU-1", lambda gpu: TABLE)() == 159.0
    for table in ("", "pmon is not supported on this device", "# gpu pid\n 0 1"):
        with pytest.raises(UserError, match="--yield-gpu"):
            others_percent(table, ())


def test_a_stage_pauses_once_a_pass_and_computes_the_same() -> None:
    """A slow node, as the run sees it: what a pause takes counts as work."""
    with MemoryPipeline(CONFIG) as stages:
        losses, weights = [step.loss for step in stages.train(2)], stages.weights_sha256()
    pauses = list[float]()

    def use() -> float:
        pauses.append(1.0)
        return 0.0

    with MemoryPipeline(CONFIG) as stages:
        stages.executors[0].give_way = GiveWay(use, 25.0)
        assert [step.loss for step in stages.train(2)] == losses
        assert stages.weights_sha256() == weights
    passes = 2 * 2 * CONFIG.training.global_batch
    assert len(pauses) == passes


def test_what_nobody_can_read_is_said_before_the_join(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, asked = torch.device("cpu"), JoinOptions(yield_gpu=25.0)
    assert _other_use(cpu, JoinOptions()) is None
    with pytest.raises(UserError, match="this node computes on cpu"):
        _other_use(cpu, asked)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="does not run here"):
        OtherUse("GPU-1")
