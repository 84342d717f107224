"""How long a stage's parts and copies take on one card: what a memory plan weighs. Torch-free.

`node.stage.block_measure` measures them when a node joins. Without a measurement they follow from operations
at a speed that is typical, which keeps their order and ratio.
"""

from dataclasses import dataclass

from node.config.schema import ModelSection, RunConfig
from node.model.storage import kv_width
from node.model.units import block_name, unit_cost
from node.pipeline.device_memory import Devices

GPU_FLOPS, CPU_FLOPS = 100e12, 100e9
"""Assumed operations a second."""
COPY_RATE = 12e9
"""Assumed bytes a second between a GPU and page-locked memory, each way: PCIe 3 with 16 lanes."""


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds that one block's parts take for one microbatch, and a card's copies."""

    forward: float
    backward: float
    attention: float
    """The projections into attention: what recomputing queries, keys and values takes."""
    attention_output: float
    """Attention itself."""
    ffn_input: float
    """The projections into the feed-forward."""
    out_rate: float
    """Bytes a second from the device to host memory, beside compute,"""
    in_rate: float
    """and back."""

    def recomputing(self, kind: str) -> float:
        """What backward takes longer if it computes this kind again."""
        seconds: float = getattr(self, kind)
        return seconds


def assumed_times(config: RunConfig, devices: Devices) -> BlockTimes:
    """From operations, at a typical speed of such a card."""
    model = config.model
    tokens = config.training.microbatch * model.sequence / devices.count
    speed = CPU_FLOPS if devices.on_cpu else GPU_FLOPS
    forward = unit_cost(model, block_name(0)) * tokens / speed
    into_attention, attention, into_ffn = (flops * tokens / speed for flops in part_flops(model))
    return BlockTimes(
        forward=forward,
        backward=2 * forward,
        attention=into_attention,
        attention_output=attention,
        ffn_input=into_ffn,
        out_rate=COPY_RATE,
        in_rate=COPY_RATE,
    )


def part_flops(model: ModelSection) -> tuple[float, float, float]:
    """Operations a token of a block's projections into attention, of attention, and into the feed-forward."""
    wide = 2 if model.family == "llama" else 1
    return (
        2.0 * model.hidden * (model.q_width + 2 * kv_width(model)),
        2.0 * model.q_width * model.sequence,  # half of it is masked
        2.0 * wide * model.hidden * model.ffn,
    )
