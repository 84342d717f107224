"""The shapes that each of T tensor-parallel ranks holds, and whether a node's devices can share a run's
sizes. All functions are pure, and the module imports no torch.

The family declares how each parameter is cut. A cut parameter, seen as a flat tensor, has the shape [pieces,
T, run], and rank t holds [:, t]. A matrix that is cut by outputs is one piece. One that is cut by inputs has
as many pieces as rows. Joined queries, keys and values are three pieces, each cut by heads. Moments in e4m3
are cut the same way, so a run must consist of whole blocks. Everything else (embedding, head, norms, biases
of row-parallel projections) is replicated.
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
    # All blocks have the same shapes, and there may be thousands of them.
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
    """Check that a node's devices can share the run's microbatches and blocks.

    Raises:
        RunError: they cannot. The message is one line and says what to do.
    """
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
    """Check that `ranks` tensor-parallel ranks can share the run's blocks.

    Raises:
        RunError: they cannot. The message is one line and names the size that cannot be divided.
    """
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
    # `auto` is decided only when a run starts.
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
    """Check the columns of frozen matrices. A rank packs its own columns, which gives the same blocks as the
    whole matrix only if the rank has whole blocks."""
    if config.lora.base in (WHOLE, "bf16"):
        return
    for spec in parameter_specs(config.model, block_name(0)):
        width = spec.shape[-1] // ranks
        if spec.cut is Cut.INPUTS and width % PACKED_BLOCK:
            raise RunError(
                f"--tensor-parallel {ranks} cuts rows of {spec.name} {list(spec.shape)} into {width}, and "
                f"lora.base {config.lora.base} needs multiples of {PACKED_BLOCK}: "
                "lower --tensor-parallel"
            )


def trained_parameters(
    model: ModelSection, lora: LoraSection, unit: str, ranks: int
) -> tuple[tuple[int, bool, bool], ...]:
    """For each trained parameter: one device's number of elements, whether it is a matrix, and whether it is
    a shard."""
    # All blocks have the same shapes, and there may be thousands of them.
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
