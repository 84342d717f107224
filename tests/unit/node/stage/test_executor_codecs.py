"""Codecs that the coordinator plans, at a stage: those that the run file allows, each at its boundary."""

from dataclasses import replace

import pytest
import torch

from node.config.schema import PipelineSection, RunConfig, TrainingSection
from node.stage.executor import StageExecutor
from node.stage.stage_model import StageModel
from node.telemetry.clock import StageClock
from tests.support.run_harness import TINY
from wire.codecs.formats import codec_format
from wire.errors import ProtocolViolationError
from wire.spec import Direction, TensorKey

CPU = torch.device("cpu")
CONFIG = RunConfig(
    model=TINY,
    training=TrainingSection(global_batch=4, microbatch=2),
    pipeline=PipelineSection(stages=3, forward_codec="auto", backward_codec="auto", min_bits=3.0),
)
SHAPE = (2, TINY.sequence, TINY.hidden)


def stage(config: RunConfig = CONFIG) -> StageExecutor:
    """The one in the middle."""
    executor = StageExecutor(config, CPU, StageClock(), StageModel(config, CPU))
    executor.place(1, 3)
    return executor


def test_each_boundary_has_its_own_codec() -> None:
    executor = stage()
    executor.use_codecs(("trellis-3", "trellis-6"), ("dither-4", "dither-8"))
    received = TensorKey(1, 0, 0, 0, Direction.ACTIVATION), TensorKey(1, 0, 0, 1, Direction.GRADIENT)
    sizes = [executor.expected_bytes(key) for key in received]
    assert sizes == [codec_format(name).packed_bytes(SHAPE) for name in ("trellis-3", "dither-8")]
    assert executor.codec_name(Direction.ACTIVATION) == "trellis-6"
    assert executor.codec_name(Direction.GRADIENT) == "dither-4"
    # A placement forgets them.
    executor.place(1, 3)
    assert executor.codec_name(Direction.ACTIVATION) == "trellis-4.41"


@pytest.mark.parametrize(
    ("activations", "gradients", "why"),
    [
        ((), (), "expected 2 of each"),
        (("trellis-4",) * 3, ("dither-4",) * 3, "expected 2 of each"),
        (("trellis-2.5", "trellis-4"), ("dither-4",) * 2, "allows only"),
        (("fp32", "trellis-4"), ("dither-4",) * 2, "allows only"),
        (("trellis-4",) * 2, ("dither-4", "no such codec"), "allows only"),
    ],
)
def test_what_the_run_file_does_not_allow_is_refused(
    activations: tuple[str, ...], gradients: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ProtocolViolationError, match=why):
        stage().use_codecs(activations, gradients)


def test_a_run_with_set_codecs_takes_no_plan() -> None:
    fixed = replace(CONFIG, pipeline=PipelineSection(stages=3))
    stage(fixed).use_codecs((), ())
    with pytest.raises(ProtocolViolationError, match="expected 0 of each"):
        stage(fixed).use_codecs(("trellis-4",) * 2, ("dither-4",) * 2)
