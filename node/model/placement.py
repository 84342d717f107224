"""Which layers a stage holds, and how much memory that takes, for any number of stages. Torch-free.

Memory is estimated from shapes, before anything is allocated.
"""

from node.config.schema import RunConfig
from node.model.split import split_units
from node.model.units import is_block, unit_parameters
from node.stage.schedule import held_activations, schedule

BYTES_A_PARAMETER = 16
"""Weight, gradient and AdamW's two moments, all float32."""
VALUES_A_BLOCK = 17
"""Values of hidden size that a block keeps for backward, a token (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.1: 34 bytes in half precision, without the attention matrix, which is never stored)."""
FIXED_BYTES = 256 * 1024 * 1024
"""Interpreter, libraries and buffers in flight."""


def chunks_of(config: RunConfig, stages: int) -> int:
    """Chunks a stage when `stages` nodes share the model; a single stage has nothing to interleave with."""
    return config.pipeline.chunks if stages > 1 else 1


def chunk_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each global chunk when `stages` nodes share the model."""
    # A split that the user wrote holds for the number of stages that it was written for.
    split = config.pipeline.split if stages == config.pipeline.stages else ()
    return split_units(config.model, stages * chunks_of(config, stages), split)


def stage_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each stage when `stages` nodes share the model."""
    chunks = chunk_units(config, stages)
    return tuple(tuple(unit for chunk in chunks[stage::stages] for unit in chunk) for stage in range(stages))


def stage_bytes(config: RunConfig, stages: int) -> tuple[int, ...]:
    """Bytes that each stage needs, first stage first."""
    model, training, chunks = config.model, config.training, chunks_of(config, stages)
    tokens = training.microbatch * model.sequence
    orders = schedule(stages, chunks, config.microbatches, config.pipeline.window)
    needs: list[int] = []
    for units, order in zip(stage_units(config, stages), orders, strict=True):
        parameters = sum(unit_parameters(model, unit) for unit in units)
        blocks = sum(is_block(unit) for unit in units)
        held = held_activations(order) / chunks
        activations = held * blocks * tokens * model.hidden * VALUES_A_BLOCK * 4
        logits = 3 * tokens * model.vocab * 4 if "head" in units else 0
        needs.append(FIXED_BYTES + BYTES_A_PARAMETER * parameters + int(activations) + logits)
    return tuple(needs)
