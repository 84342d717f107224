"""Which layers a stage holds, and how much memory that takes, for any number of stages. Torch-free.

Memory is estimated from shapes, before anything is allocated.
"""

from collections.abc import Sequence
from dataclasses import replace

from node.config.schema import RunConfig
from node.model.split import split_units
from node.model.storage import Storage, stage_storage, stored_bytes
from node.model.units import is_block, unit_parameters
from node.stage.schedule import Kind, Order, held_activations, schedule
from wire.errors import ConfigError

BYTES_A_PARAMETER = 16
"""Weight, gradient and AdamW's two moments, all float32."""
VALUES_A_BLOCK = 17
"""Values of hidden size that a block keeps for backward, a token (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.1: 34 bytes in half precision, without the attention matrix, which is never stored)."""
REMEMBERED_BYTES = 2
"""Of an activation's element, in bf16, where the forward codec has a memory."""
FIXED_BYTES = 256 * 1024 * 1024
"""Interpreter, libraries and buffers in flight."""
MEMORY_SHARE = 0.8
"""Of a node's memory that a wider window may fill, as the estimate counts it."""


def chunks_of(config: RunConfig, stages: int) -> int:
    """Chunks a stage when `stages` nodes share the model; a single stage has nothing to interleave with."""
    return config.pipeline.chunks if stages > 1 else 1


def chunk_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each global chunk when `stages` nodes share the model."""
    # A split that the user wrote holds for the number of stages that it was written for.
    split = config.pipeline.split if stages == config.pipeline.stages else ()
    return split_units(config.model, stages * chunks_of(config, stages), split)


def stage_storages(config: RunConfig, stages: int) -> tuple[Storage, ...]:
    """How each stage's blocks keep activations, first stage first.

    A function of the run file and the number of stages alone: it decides a run's bits.
    """
    loads = _held_blocks(config, stages) if config.storage.bits_by_stage else (1,) * stages
    return stage_storage(config.storage, loads)


def _held_blocks(config: RunConfig, stages: int) -> tuple[int, ...]:
    """The most block activations that each stage holds at once, over its order in the schedule."""
    counts = [sum(map(is_block, units)) for units in chunk_units(config, stages)]
    orders = schedule(stages, chunks_of(config, stages), config.microbatches, config.pipeline.first_window)
    return tuple(_peak_blocks(order, counts[stage::stages]) for stage, order in enumerate(orders))


def _peak_blocks(order: Order, counts: Sequence[int]) -> int:
    held = peak = 0
    for action in order:
        held += counts[action.chunk] if action.kind is Kind.FORWARD else -counts[action.chunk]
        peak = max(peak, held)
    return peak


def stage_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each stage when `stages` nodes share the model."""
    chunks = chunk_units(config, stages)
    return tuple(tuple(unit for chunk in chunks[stage::stages] for unit in chunk) for stage in range(stages))


def boundary_cache_bytes(config: RunConfig, windows: int) -> int:
    """The most that one end of a boundary remembers, in bytes; 0 unless the forward codec has a memory.

    Args:
        windows: samples of one pass over the text.
    """
    if not config.pipeline.remembers:
        return 0
    model = config.model
    # Values, the number of each sample, and its checksum.
    return windows * (REMEMBERED_BYTES * model.sequence * model.hidden + 8 + 4)


def stage_cache_bytes(config: RunConfig, stages: int, windows: int) -> tuple[int, ...]:
    """The most that each stage remembers at all its boundaries, in bytes, first stage first."""
    chunks = stages * chunks_of(config, stages)
    ends = [0] * stages
    for boundary in range(chunks - 1):
        ends[boundary % stages] += 1
        ends[(boundary + 1) % stages] += 1
    one = boundary_cache_bytes(config, windows)
    return tuple(count * one for count in ends)


def check_cache(config: RunConfig, windows: int) -> None:
    """Raises ConfigError if a stage may come to remember more than `pipeline.cache_gb`."""
    pipeline, model = config.pipeline, config.model
    for stages in range(pipeline.min_stages or pipeline.stages, pipeline.stages + 1):
        most = max(stage_cache_bytes(config, stages, windows))
        if most > pipeline.cache_gb * 1e9:
            raise ConfigError(
                f"pipeline.forward_codec {pipeline.forward_codec} would keep {most / 1e9:.3g} GB of "
                f"activations at one of {stages} stages ({windows} samples of {model.sequence} x "
                f"{model.hidden}), and pipeline.cache_gb allows {pipeline.cache_gb:g}: raise it, use "
                "less text, or a codec without a memory"
            )


def stage_bytes(config: RunConfig, stages: int, windows: int = 0) -> tuple[int, ...]:
    """Bytes that each stage needs, first stage first; `windows` counts for a codec with a memory."""
    model, training, chunks = config.model, config.training, chunks_of(config, stages)
    tokens = training.microbatch * model.sequence
    orders = schedule(stages, chunks, config.microbatches, config.pipeline.first_window)
    # What a step teaches waits beside what is remembered; a snapshot's copy comes on top.
    caches = [
        cache + cache // max(windows, 1) * min(training.global_batch, windows)
        for cache in stage_cache_bytes(config, stages, windows)
    ]
    needs: list[int] = []
    storages, held_blocks = stage_storages(config, stages), _held_blocks(config, stages)
    for stage, (units, order, cache) in enumerate(
        zip(stage_units(config, stages), orders, caches, strict=True)
    ):
        parameters = sum(unit_parameters(model, unit) for unit in units)
        blocks = sum(is_block(unit) for unit in units)
        # A block whose activations autograd keeps; else one that is at work, and what is kept of the others.
        working = tokens * model.hidden * VALUES_A_BLOCK * 4
        if storages[stage].is_off:
            activations = held_activations(order) / chunks * blocks * working
        else:
            kept = stored_bytes(model, training, storages[stage]).total
            # A chunk's input and output stay beside it, in float32.
            ends = held_activations(order) * 2 * 4 * tokens * model.hidden
            activations = held_blocks[stage] * kept + ends + working
        logits = 3 * tokens * model.vocab * 4 if "head" in units else 0
        needs.append(FIXED_BYTES + BYTES_A_PARAMETER * parameters + int(activations) + logits + cache)
    return tuple(needs)


def most_held(
    config: RunConfig, stages: int, memory_bytes: Sequence[int], windows: int = 0
) -> tuple[int, ...]:
    """Chunk activations that each stage has memory for; at least those that window 0 holds.

    Args:
        memory_bytes: of each stage's node; 0 where it is not known, which leaves nothing beyond window 0.
        windows: as for `stage_bytes`.
    """
    # The estimate is linear in what is held, so two windows tell what one activation takes.
    chunks = chunks_of(config, stages)
    held, needs = [], []
    for window in (0, max(1, config.microbatches)):
        changed = replace(config, pipeline=replace(config.pipeline, window=window))
        orders = schedule(stages, chunks, config.microbatches, window)
        held.append([held_activations(order) for order in orders])
        needs.append(stage_bytes(changed, stages, windows))
    most: list[int] = []
    for narrow, wide, least, large, memory in zip(*held, *needs, memory_bytes, strict=True):
        spare = MEMORY_SHARE * memory - least
        if config.pipeline.window_gb > 0:
            spare = min(spare, config.pipeline.window_gb * 1e9)
        one = (large - least) / max(1, wide - narrow)
        most.append(wide if one == 0 else narrow + max(0, int(spare // one)))
    return tuple(most)
