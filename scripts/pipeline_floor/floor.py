"""The pipeline of the experiment: its stages' times, its tensors' bytes, and the floor of a step."""

from argparse import Namespace

import torch

from node.pipeline.floor import LinkRate, step_floor
from node.telemetry import events
from wire.codecs.registry import codec
from wire.frames import HEADER_BYTES, PAYLOAD_BYTES
from wire.spec import TensorSpec

STAGES = 4
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040


def tensor_bytes(name: str) -> int:
    """A packed boundary tensor of one microbatch in its frames."""
    size = codec(name).packed_bytes(TensorSpec(torch.float32, (1, 1024, 512)))
    return size + HEADER_BYTES * -(-size // PAYLOAD_BYTES)


def floor(
    arguments: Namespace,
    round_trip: float,
    rate: float,
    costs: events.StepCosts | None = None,
) -> float:
    """Seconds of a step, nothing faster being possible; with the compute times of `costs` if given."""
    forward, backward = [FORWARD_SECONDS] * STAGES, [BACKWARD_SECONDS] * STAGES
    if costs is not None:
        forward = [stage.seconds["forward"] / arguments.microbatches for stage in costs.stages]
        backward = [stage.seconds["backward"] / arguments.microbatches for stage in costs.stages]
    frames = tensor_bytes(arguments.codec)
    link = LinkRate(up=rate * 1e6 / 8, down=rate * 1e6 / 8, latency=round_trip / 2e3)
    return step_floor(
        microbatches=arguments.microbatches,
        forward=forward,
        backward=backward,
        activation_bytes=frames,
        gradient_bytes=frames,
        links=[link] * (STAGES - 1),
    ).seconds
