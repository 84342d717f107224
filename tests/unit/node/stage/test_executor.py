"""Stages joined by memory give the unsplit trainer's losses and weights, bit for bit, on every split."""

from dataclasses import replace
from functools import cache
from math import inf

import pytest
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, RunSection, TrainingSection
from node.schedule.placement import split_units
from node.stage.inbox import Inbox
from tests.support.memory_pipeline import MemoryIO, MemoryPipeline, reference_run, trained
from tests.support.reference_trainer import Step
from wire.spec import Direction, TensorKey

STEPS = 8
TRAINED = 3
"""Steps that equality is shown for: warm-up's two, and one after it; they begin, commit and end alike."""

CONFIG = RunConfig(
    run=RunSection(steps=STEPS, seed=7),
    model=ModelSection(hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=12, microbatch=2, lr=1e-2, warmup_steps=2),
    pipeline=PipelineSection(stages=1, forward_codec="fp32", backward_codec="fp32"),
)

PLACEMENTS = [
    (5, PipelineSection(stages=1)),
    (5, PipelineSection(stages=2, split=(4, 1))),
    (5, PipelineSection(stages=3, window=1)),
    (5, PipelineSection(stages=3, window=4, split=(1, 3, 1))),
    (5, PipelineSection(stages=5, window=2)),
    (6, PipelineSection(stages=2, chunks=2, split=(1, 3, 1, 1))),
    (6, PipelineSection(stages=3, chunks=2, window=1)),
    (10, PipelineSection(stages=5, chunks=2)),
]
"""(Blocks of the model, pipeline.)"""


def model(layers: int, family: str, tied: bool) -> RunConfig:
    return replace(CONFIG, model=replace(CONFIG.model, layers=layers, family=family, tied=tied))


WHOLE = [("llama", False, "auto"), ("llama", True, "first"), ("llama", True, "last"), ("gpt2", True, "first")]
"""(Family, tied, the head's place.)"""


def placed(config: RunConfig, pipeline: PipelineSection, codecs: tuple[str, str]) -> RunConfig:
    forward, backward = codecs
    return replace(config, pipeline=replace(pipeline, forward_codec=forward, backward_codec=backward))


def name(value: object) -> str:
    """Of a parameter, for a test's id."""
    if not isinstance(value, PipelineSection):
        return str(value)
    split = "-split" + ".".join(map(str, value.split)) if value.split else ""
    return f"{value.stages}x{value.chunks}-window{value.window}{split}"


@cache
def unsplit(layers: int, family: str, tied: bool) -> tuple[list[Step], str]:
    return reference_run(model(layers, family, tied), TRAINED)


def test_the_reference_learns() -> None:
    """Equality with a trainer that stands still would show nothing."""
    steps, _ = reference_run(model(5, "llama", False), STEPS)
    assert steps[:TRAINED] == unsplit(5, "llama", False)[0]
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert len({step.loss for step in steps}) == STEPS


@pytest.mark.parametrize(
    ("layers", "pipeline", "family", "tied", "head"),
    [
        # Each of the four with two placements, the second of them interleaved.
        (*placement, *WHOLE[number % 4])
        for number, placement in enumerate(PLACEMENTS)
    ],
    ids=name,
)
def test_every_split_and_schedule_is_the_unsplit_model(
    layers: int, pipeline: PipelineSection, family: str, tied: bool, head: str
) -> None:
    config = placed(model(layers, family, tied), replace(pipeline, head=head), ("fp32", "fp32"))
    assert trained(config, TRAINED) == unsplit(layers, family, tied)


def test_a_run_in_float16_skips_and_takes_the_steps_of_the_unsplit_model() -> None:
    config = model(4, "llama", True)
    training = replace(config.training, precision="float16", loss_scale=2.0**20, loss_scale_steps=2)
    config = placed(replace(config, training=training), PipelineSection(stages=3), ("fp32", "fp32"))
    expected = reference_run(config, STEPS)
    norms = [step.grad_norm for step in expected[0]]
    assert inf in norms and min(norms) < inf, "some are skipped, and some are not"
    assert trained(config, STEPS) == expected


@pytest.mark.parametrize(
    ("codecs", "pipeline"),
    [
        (("tah", "fixed-8"), PipelineSection(stages=2, chunks=2)),
        (("bf16", "fixed-4"), PipelineSection(stages=2, chunks=2)),
        (("fixed-3", "fp16"), PipelineSection(stages=3)),
    ],
    ids=name,
)
def test_codecs_are_deterministic_and_sit_where_the_reference_has_them(
    codecs: tuple[str, str], pipeline: PipelineSection
) -> None:
    config = placed(model(4, "llama", False), pipeline, codecs)
    groups = split_units(config.model, pipeline.stages * pipeline.chunks)
    expected = reference_run(config, TRAINED, groups)
    assert expected[0] != unsplit(4, "llama", False)[0]
    assert trained(config, TRAINED) == expected


class LateInbox(Inbox):
    """Over one step, every activation comes once the stage has sent the gradient of the microbatch before.

    Not once it has got that gradient: however fast others are, the stage's next turn is then the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, tuple[TensorKey, bytearray]] = {}
        self._sent: set[int] = {-1}

    def put(self, key: TensorKey, buffer: bytearray) -> None:
        with self._arrived:
            if key.direction is Direction.ACTIVATION and key.microbatch - 1 not in self._sent:
                self._late[key.microbatch] = key, buffer
            else:
                super().put(key, buffer)

    def gradient_sent(self, microbatch: int) -> None:
        with self._arrived:
            self._sent.add(microbatch)
            if (late := self._late.pop(microbatch + 1, None)) is not None:
                super().put(*late)


class LateIO(MemoryIO):
    """Of the stage whose inbox is late."""

    def __init__(self, inner: MemoryIO, inbox: LateInbox) -> None:
        vars(self).update(vars(inner))
        self._inbox = inbox

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        super().send(key, packed, elements)
        if key.direction is Direction.GRADIENT:
            self._inbox.gradient_sent(key.microbatch)


def test_gradients_that_overtake_late_forwards_change_no_bit() -> None:
    """With caches of samples too, which both directions read."""
    config = placed(model(4, "llama", False), PipelineSection(stages=4, window=1), ("aqsgd-4", "fixed-8"))
    config = replace(config, data=replace(config.data, shift=False))

    def run(late: bool) -> tuple[list[Step], str, list[Direction]]:
        with MemoryPipeline(config) as stages:
            steps = []
            for _ in range(TRAINED):
                if late:
                    inbox = LateInbox()
                    stages.inboxes[1], stages.ios[1] = inbox, LateIO(stages.ios[1], inbox)
                steps += stages.train(1)
            return steps, stages.weights_sha256(), [key.direction for key, _ in stages.ios[1].sent]

    steps, weights, _ = run(False)
    late_steps, late_weights, sent = run(True)
    assert (late_steps, late_weights) == (steps, weights)
    assert sent[: 2 * config.microbatches] == [Direction.ACTIVATION, Direction.GRADIENT] * config.microbatches
