"""What each of T tensor-parallel ranks holds of a model, and whether a node's devices can share a run's sizes
at all: pure functions of shapes. Torch-free.

The family declares how each parameter is cut. A sharded one, laid flat, is [pieces, T, run]: rank t holds
[:, t]. One piece where a matrix is cut by outputs, its number of rows where it is cut by inputs, and three
for joined queries, keys and values, each of which is cut by heads. Moments in e4m3 are cut the same way, so a
run must be whole blocks. Everything else (embedding, head, norms, biases of row-parallel projections) is
replicated.
"""

from functools import lru_cache
from math import prod

from kernels.blockfloat.layout import BLOCK as PACKED_BLOCK
from kernels.blockfloat.layout import packed_bytes
from kernels.fp8.layout import BLOCK
from node.config.schema import LoraSection, ModelSection, RunConfig
from node.model.families.family import Cut
from node.model.families.known import family_of
from node.model.lora_shapes import WHOLE, frozen_form, trained_specs
from node.model.slices import sample_slices
from node.model.storage import PACKED
from node.model.units import block_name, is_block, parameter_specs
from wire.errors import RunError


def frozen_bytes(model: ModelSection, lora: LoraSection, unit: str, ranks: int = 1) -> int:
    """Bytes of a unit's frozen weights in the memory of each rank; 0 without LoRA."""
    # Blocks have the same shapes, and there may be thousands.
    return _frozen_bytes(model, lora, block_name(0) if is_block(unit) else unit, ranks) if lora.rank else 0


@lru_cache(maxsize=64)
def _frozen_bytes(model: ModelSection, lora: LoraSection, unit: str, ranks: int) -> int:
    total = 0
    for spec in parameter_specs(model, unit):
        shape = spec.shard_shape(ranks)
        form = frozen_form(lora, spec, in_block=is_block(unit))
        if form in (WHOLE, "bf16"):
            total += (4 if form == WHOLE else 2) * prod(shape)
        else:
            each = max(spec.experts, 1)
            total += each * packed_bytes((shape[0] // each, shape[1]), PACKED[form])
    return total


def check_sizes(config: RunConfig, ranks: int, tensor_parallel: int = 1) -> None:
    """Raise RunError if the run's microbatches or blocks cannot be shared so: one line, and what to do."""
    several_chunks = config.pipeline.chunks > 1 or config.sums_tied_gradients
    if ranks > 1 and config.pipeline.groups > 1 and (tensor_parallel > 1 or several_chunks):
        # A group's gradients are summed over all devices at once, when the stage's only chunk is done.
        raise RunError(
            f"{ranks} devices cannot share a stage of a run with gradient groups (pipeline.groups) and "
            "tensor parallelism, pipeline.chunks or a tied model: join with --gpus 1"
        )
    check_shards(config, tensor_parallel)
    rows, samples = ranks // tensor_parallel, config.training.microbatch
    if samples % rows == 0:
        return
    if tensor_parallel == 1:
        raise RunError(
            f"{ranks} devices cannot share microbatches of {samples} samples: join with a "
            "--gpus that divides training.microbatch"
        )
    raise RunError(
        f"{ranks} devices with --tensor-parallel {tensor_parallel} are {rows} rows, which cannot share "
        f"microbatches of {samples} samples: join with --gpus / --tensor-parallel that divides "
        "training.microbatch"
    )


def check_shards(config: RunConfig, ranks: int) -> None:
    """Raise RunError if `ranks` cannot share this run's blocks: one line, which names the size in the way."""
    model = config.model
    if ranks > 1 and model.qk_norm == "full":
        raise RunError(
            f"--tensor-parallel {ranks} cannot share model.qk_norm full, which spans all heads: join without"
        )
    sizes = {"heads": model.heads, "ffn": model.ffn, "sequence": model.sequence}
    sizes["kv_heads"] = family_of(model).kv_heads(model)
    for name, size in sizes.items():
        if size % ranks:
            raise RunError(
                f"--tensor-parallel {ranks} does not divide this run's model.{name} {size}: join with a "
                "--tensor-parallel that does"
            )
    # `auto` is decided when a run starts.
    slices = config.pipeline.sequence_chunks
    if slices != "auto" and any(len(own) % ranks for own in sample_slices(model, slices)):
        raise RunError(
            f"--tensor-parallel {ranks} does not divide each of the {slices} parts that samples are cut into "
            "(pipeline.sequence_chunks): join with a --tensor-parallel that does"
        )
    unit = block_name(0)
    if ranks > 1 and config.lora.rank:
        _check_frozen(config, ranks)
    if ranks == 1 or config.training.moments != "fp8":
        return
    for spec in trained_specs(model, config.lora, unit):
        number = spec.pieces
        if number is None or len(spec.shape) < 2:
            continue
        run = prod(spec.shape) // number // ranks
        if run % BLOCK:
            raise RunError(
                f"--tensor-parallel {ranks} cuts {spec.name} {list(spec.shape)} into runs of {run}, and this "
                f"run's moments in fp8 need multiples of {BLOCK}: join with a lower --tensor-parallel"
            )


def _check_frozen(config: RunConfig, ranks: int) -> None:
    """A rank packs its columns of a frozen matrix: only whole blocks are packed as in the whole matrix."""
    if config.lora.base in (WHOLE, "bf16"):
        return
    for spec in parameter_specs(config.model, block_name(0)):
        width = spec.shape[-1] // ranks
        if spec.cut is Cut.INPUTS and width % PACKED_BLOCK:
            raise RunError(
                f"--tensor-parallel {ranks} cuts rows of {spec.name} {list(spec.shape)} into {width}, and "
                f"lora.base {config.lora.base} needs multiples of {PACKED_BLOCK}: join with a lower one"
            )


def trained_parameters(
    model: ModelSection, lora: LoraSection, unit: str, ranks: int
) -> tuple[tuple[int, bool, bool], ...]:
    """One device's elements of each trained parameter, whether it is a matrix, and whether it is a shard."""
    # Blocks have the same shapes, and there may be thousands.
    return _trained_parameters(model, lora, block_name(0) if is_block(unit) else unit, ranks)


@lru_cache(maxsize=64)
def _trained_parameters(
    model: ModelSection, lora: LoraSection, unit: str, ranks: int
) -> tuple[tuple[int, bool, bool], ...]:
    return tuple(
        (
            prod(spec.shard_shape(ranks)),
            len(spec.shape) >= 2,
            ranks > 1 and spec.pieces is not None,
        )
        for spec in trained_specs(model, lora, unit)
    )
