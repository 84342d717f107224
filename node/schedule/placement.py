"""Which layer units each chunk and stage holds, for any number of stages. This module imports no torch.

A chunk is a contiguous run of units. The first also holds "embed", the last also holds "head", and every
chunk holds at least one block.

If the head is on the first stage (`head_first`), it is a chunk of its own after all others. Then the first
chunk may be just the embedding, because its stage also computes the head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from node.config.schema import ModelSection, PipelineSection, RunConfig
from node.model.lora_shapes import trained_specs
from node.model.optimizers import most_state_bytes
from node.model.slices import sample_slices
from node.model.units import EMBED, HEAD, block_name, check_model, is_block, unit_cost
from node.schedule.floor import PipelineStep
from node.schedule.schedule import Kind, Order, Orders, Window, schedule
from wire.codecs.formats import FP32, codec_format
from wire.errors import ConfigError, nearest

HEADS = ("auto", "first", "last")
"""The values of `pipeline.head`."""
PLACEMENTS = ("order", "measured")
"""The values of `pipeline.placement`."""
EDGES = 0.04
"""With `pipeline.sequence_chunks` auto: the largest share of a step for fill and drain, without links."""
LEAST_SLICE, LEAST_TOKENS = 128, 512
"""With `auto`, slices have at least this many positions on average, and a microbatch's slices this many
tokens. With less, products and attention take longer per token."""


def unplaceable(pipeline: PipelineSection, head_is_first: bool) -> Iterator[str]:
    """The reasons why nodes cannot get their stages as `pipeline.placement` says."""
    if pipeline.placement not in PLACEMENTS:
        yield f"pipeline.placement {pipeline.placement!r} is unknown{nearest(pipeline.placement, PLACEMENTS)}"
    if not pipeline.measures_places:
        return
    if pipeline.chunks > 1 or head_is_first:
        yield (
            'pipeline.placement = "measured" plans a line of stages: set pipeline.chunks = 1, and for a tied '
            'model pipeline.head = "last"'
        )
    if pipeline.remembers:
        yield (
            f'pipeline.placement = "measured" moves boundaries, and {pipeline.forward_codec} remembers what '
            "crossed each: use a codec without a memory"
        )


def head_first(config: RunConfig, stages: int) -> bool:
    """Whether the head is on the first stage if `stages` nodes share the model.

    Only a tied model whose weights are trained benefits from it. `auto` compares bytes per step: those of one
    more boundary, with the run's codecs, and those of the tied weight's gradient in both directions.
    """
    if stages < 2 or not config.sums_tied_gradients:
        return False
    if config.pipeline.head != "auto":
        return config.pipeline.head == "first"
    boundary, exchange = head_bytes(config)
    return boundary <= exchange


def decided(config: RunConfig) -> RunConfig:
    """The config with `pipeline.head` and `pipeline.sequence_chunks` decided for its number of stages, so
    that a run keeps them whatever else changes."""
    pipeline = replace(config.pipeline, sequence_chunks=slices_of(config))
    if pipeline.stages > 1:
        first = head_first(config, pipeline.stages)
        pipeline = replace(pipeline, head="first" if first else "last")
    return replace(config, pipeline=pipeline)


@lru_cache(maxsize=64)
def slices_of(config: RunConfig) -> int:
    """The number of slices of each microbatch (`pipeline.sequence_chunks`).

    `auto` takes the fewest slices with which fill and drain are at most `EDGES` of a step's lower bound. It
    assumes stages of equal speed, links that cost nothing, and as many rows as the run file allows. If no
    number is enough, it takes as many slices as leave each of them long enough.
    """
    pipeline, samples = config.pipeline, config.training.microbatch
    if pipeline.sequence_chunks != "auto":
        return pipeline.sequence_chunks
    if pipeline.remembers or pipeline.stages < 2 or pipeline.chunks > 1:
        return 1
    length, stages = config.model.sequence, pipeline.stages
    most = max(1, min(length // LEAST_SLICE, samples * length // LEAST_TOKENS))
    own = config.microbatches // pipeline.groups * -(-pipeline.groups // pipeline.most_rows)

    def edges(slices: int) -> float:
        floor = PipelineStep(
            microbatches=own,
            forward=(1.0,) * stages,
            backward=(2.0,) * stages,
            slices=slices,
        ).floor()
        return 1 - own * floor.microbatch_seconds / floor.seconds

    return next((slices for slices in range(1, most) if edges(slices) <= EDGES), most)


def slice_ranges(config: RunConfig) -> tuple[range, ...]:
    """The positions of each slice of a sample, first to last."""
    return sample_slices(config.model, slices_of(config))


def longest_slice(config: RunConfig) -> int:
    """The positions of the longest slice. Memory is planned as if all passes had this many."""
    return max(map(len, slice_ranges(config)))


def held_passes(config: RunConfig, order: Order) -> int:
    """The most that a stage holds at once over its order, in passes of the longest slice."""
    return _peak(config, order, [1] * (1 + max(action.chunk for action in order)))


@lru_cache(maxsize=64)
def boundary_shapes(config: RunConfig) -> tuple[tuple[int, int, int], ...]:
    """The shapes of the tensor between two chunks, for each slice of a microbatch."""
    samples, hidden = config.training.microbatch, config.model.hidden
    return tuple((samples, len(own), hidden) for own in slice_ranges(config))


def boundary_bytes(config: RunConfig, codec: str) -> int:
    """The packed bytes of a microbatch between two chunks, all slices together."""
    return sum(codec_format(codec).packed_bytes(shape) for shape in boundary_shapes(config))


def head_bytes(config: RunConfig) -> tuple[int, int]:
    """The packed bytes per step, both directions together: of one more boundary, and of a tied weight's
    gradient."""
    model, pipeline = config.model, config.pipeline
    hidden = (config.training.microbatch, model.sequence, model.hidden)
    both = sum(codec_format(name).packed_bytes(hidden) for name in pipeline.first_codecs)
    return config.microbatches * both, 2 * FP32.packed_bytes((model.vocab, model.hidden))


def head_share(config: RunConfig, stages: int) -> float | None:
    """The share of the first stage's compute that the head takes there; None if the head is elsewhere."""
    if not head_first(config, stages):
        return None
    whole = sum(unit_cost(config.model, unit) for unit in stage_units(config, stages)[0])
    return unit_cost(config.model, HEAD) / whole


def split_units(
    model: ModelSection, chunks: int, split: tuple[int, ...] = (), *, head_with: int = 0
) -> tuple[tuple[str, ...], ...]:
    """The units of each chunk, in pipeline order.

    Args:
        chunks: stages times chunks per stage.
        split: the number of blocks of each chunk. If empty, the cost of the costliest chunk is minimized.
        head_with: the number of stages, if the first also computes the head as one more chunk; 0 if the last
            chunk holds the head.

    Raises:
        ConfigError: there are more chunks than blocks, or the split does not fit.
    """
    check_model(model)
    if chunks < 1:
        raise ConfigError(f"[pipeline] asks for {chunks} chunks; it must be at least 1")
    if chunks > model.layers:
        raise ConfigError(
            f"[pipeline] asks for {chunks} chunks (stages x chunks) but [model] layers is {model.layers}; "
            "each chunk needs a block: lower stages or chunks, or raise layers"
        )
    counts = split or (
        _split_with_head(model, chunks, head_with) if head_with else _even_split(model, chunks)
    )
    if len(counts) != chunks:
        raise ConfigError(
            f"[pipeline] split has {len(counts)} numbers; stages x chunks needs {chunks}, one for each chunk"
        )
    if min(counts[1:], default=1) < 1 or counts[0] < (0 if head_with else 1):
        raise ConfigError(f"[pipeline] split holds {min(counts)}; each chunk needs at least one block")
    if sum(counts) != model.layers:
        raise ConfigError(
            f"[pipeline] split sums to {sum(counts)} blocks but [model] layers is {model.layers}; "
            "make them equal"
        )

    names = [block_name(index) for index in range(model.layers)]
    first = 0
    runs: list[tuple[str, ...]] = []
    for chunk, count in enumerate(counts):
        embed = (EMBED,) if chunk == 0 else ()
        head = (HEAD,) if chunk == chunks - 1 and not head_with else ()
        runs.append((*embed, *names[first : first + count], *head))
        first += count
    return (*runs, (HEAD,)) if head_with else tuple(runs)


def _even_split(model: ModelSection, chunks: int) -> tuple[int, ...]:
    """The blocks of each chunk. Each block goes to the cheapest chunk so far; among equals to the latest,
    because earlier stages hold more microbatches. This is optimal, because all blocks cost the same."""
    block = unit_cost(model, block_name(0))
    fixed = [0.0] * chunks
    fixed[0] += unit_cost(model, EMBED)
    fixed[-1] += unit_cost(model, HEAD)
    counts = [1] * chunks
    for _ in range(model.layers - chunks):
        cheapest = min(range(chunks), key=lambda chunk: (fixed[chunk] + counts[chunk] * block, -chunk))
        counts[cheapest] += 1
    return tuple(counts)


def _split_with_head(model: ModelSection, chunks: int, stages: int) -> tuple[int, ...]:
    """As `_even_split`, but with the head on the first stage, and minimizing the cost of the costliest stage.

    The first chunk starts without a block. Among a stage's chunks the next block goes to the smallest.
    """
    block = unit_cost(model, block_name(0))
    costs = [0.0] * stages
    costs[0] = unit_cost(model, EMBED) + unit_cost(model, HEAD)
    counts = [0] + [1] * (chunks - 1)
    for chunk, count in enumerate(counts):
        costs[chunk % stages] += count * block
    for _ in range(model.layers - sum(counts)):
        cheapest = min(range(chunks), key=lambda chunk: (costs[chunk % stages], counts[chunk], -chunk))
        counts[cheapest] += 1
        costs[cheapest % stages] += block
    return tuple(counts)


REMEMBERED_BYTES = 2
"""The bytes per element of a sample cache, which is in bf16."""


def chunks_of(config: RunConfig, stages: int) -> int:
    """The chunks per stage if `stages` nodes share the model. A single stage has one chunk."""
    return config.pipeline.chunks if stages > 1 else 1


@lru_cache(maxsize=64)
def chunk_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each global chunk if `stages` nodes share the model. Chunk j is on stage j mod
    `stages`."""
    # The run file's split holds only for the number of stages for which it was written.
    split = config.pipeline.split if stages == config.pipeline.stages else ()
    head_with = stages if head_first(config, stages) else 0
    return split_units(config.model, stages * chunks_of(config, stages), split, head_with=head_with)


def stage_orders(
    config: RunConfig, stages: int, window: Window | None = None, microbatches: int = 0
) -> Orders:
    """The order of every stage. `window` defaults to the run file's, `microbatches` to all of a step."""
    width = config.pipeline.first_window if window is None else window
    chunks = chunks_of(config, stages)
    count = microbatches or config.microbatches
    first = head_first(config, stages)
    return schedule(stages, chunks, count, width, head_first=first, slices=slices_of(config))


def boundaries(config: RunConfig, stages: int) -> int:
    """The number of boundaries between chunks, including those within a stage."""
    return len(chunk_units(config, stages)) - 1


def hops(config: RunConfig, stages: int) -> int:
    """The number of links on a microbatch's way through the stages, including the one to the head."""
    return stages - 1 + head_first(config, stages)


@lru_cache(maxsize=64)
def held_blocks(config: RunConfig, stages: int, *, apart: bool = False) -> tuple[int, ...]:
    """The most block activations that each stage holds at once over its order in the schedule. If
    microbatches are cut, activations are those of the longest slice.

    Args:
        apart: chunks do not reuse each other's memory, so their peaks are added.
    """
    counts = [sum(map(is_block, units)) for units in chunk_units(config, stages)]
    held = []
    for stage, order in enumerate(stage_orders(config, stages)):
        own = counts[stage::stages]
        parts = [of_chunk(order, chunk) for chunk in range(len(own))] if apart else [order]
        held.append(sum(_peak(config, part, own) for part in parts))
    return tuple(held)


def of_chunk(order: Order, chunk: int) -> Order:
    """A stage's actions on one of its chunks, in order."""
    return tuple(action for action in order if action.chunk == chunk)


def _peak(config: RunConfig, order: Order, counts: Sequence[int]) -> int:
    """The most that is held at once, in passes of the longest slice, if each chunk holds `counts` of
    something."""
    lengths, longest = [len(own) for own in slice_ranges(config)], longest_slice(config)
    held = peak = 0
    for action in order:
        size = counts[action.chunk] * lengths[action.slice]
        held += size if action.kind is Kind.FORWARD else -size
        peak = max(peak, held)
    return -(-peak // longest)


def stage_units(config: RunConfig, stages: int) -> tuple[tuple[str, ...], ...]:
    """The layer units of each stage if `stages` nodes share the model."""
    chunks = chunk_units(config, stages)
    return tuple(tuple(unit for chunk in chunks[stage::stages] for unit in chunk) for stage in range(stages))


def block_counts(config: RunConfig, stages: int) -> tuple[int, ...]:
    """The number of blocks of each stage if `stages` nodes share the model."""
    return tuple(sum(map(is_block, units)) for units in stage_units(config, stages))


def boundary_cache_bytes(config: RunConfig, windows: int) -> int:
    """The largest sample cache of one end of a boundary, in bytes; 0 unless the forward codec has one.

    Args:
        windows: the samples of one pass over the text.
    """
    if not config.pipeline.remembers:
        return 0
    model = config.model
    # The values, the number of each sample, and its checksum.
    return windows * (REMEMBERED_BYTES * model.sequence * model.hidden + 8 + 4)


def most_layer_bytes(config: RunConfig, unit: str, windows: int) -> int:
    """The largest possible size of a unit's snapshot file in bytes, including its boundary's sample cache.

    Args:
        windows: the samples of one pass over the text.
    """
    trained = trained_specs(config.model, config.lora, unit)
    return most_state_bytes(trained) + boundary_cache_bytes(config, windows)


def stage_cache_bytes(config: RunConfig, stages: int, windows: int) -> tuple[int, ...]:
    """The largest sample caches of each stage in bytes, first stage first."""
    ends = [0] * stages
    for boundary in range(boundaries(config, stages)):
        ends[boundary % stages] += 1
        ends[(boundary + 1) % stages] += 1
    per_end = boundary_cache_bytes(config, windows)
    return tuple(count * per_end for count in ends)


def check_cache(config: RunConfig, windows: int) -> None:
    """Check that no stage's sample caches may exceed `pipeline.cache_gb`.

    Raises:
        ConfigError: a stage's caches may exceed it.
    """
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
