"""What each of T tensor-parallel ranks holds of a model, as pure functions: slices of parameters and states.

A sharded parameter, laid flat, is [pieces, T, run]: rank t holds [:, t]. One piece where a matrix is cut by
outputs, its number of rows where it is cut by inputs, and three for GPT-2's joined queries, keys and values,
each of which is cut by heads. Moments in e4m3 are cut the same way, so a run must be whole blocks. Everything
else (embedding, head, norms, biases of row-parallel projections) is replicated.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from kernels.fp8 import BLOCK, blocks
from node.config.schema import ModelSection, RunConfig
from node.model.units import ParameterSpec, block_name, is_block, parameter_specs
from wire.errors import RunError

_COLUMN = {"query", "key", "value", "qkv_projection", "gate", "up"}
"""Projections that are cut by outputs, weight and bias alike."""
_ROW = {"attention_output", "down"}
"""Projections whose weight is cut by inputs."""


def pieces(unit: str, spec: ParameterSpec) -> int | None:
    """How many equal pieces of a parameter are each shared between all ranks; None if it is replicated."""
    if not is_block(unit):
        return None
    layer, kind = spec.name.rsplit(".", 1)
    if layer in _COLUMN:
        return 3 if layer == "qkv_projection" else 1
    if layer in _ROW and kind == "weight":
        return spec.shape[0]
    return None


def shard_shape(unit: str, spec: ParameterSpec, ranks: int) -> tuple[int, ...]:
    """The shape of what one rank holds."""
    if pieces(unit, spec) is None:
        return spec.shape
    layer = spec.name.rsplit(".", 1)[0]
    if layer in _ROW:
        return (spec.shape[0], spec.shape[1] // ranks)
    return (spec.shape[0] // ranks, *spec.shape[1:])


def shard(unit: str, spec: ParameterSpec, whole: Tensor, index: int, ranks: int) -> Tensor:
    """What rank `index` holds of a parameter, or of a tensor that describes it element- or blockwise.

    Args:
        whole: of `spec.shape`, [elements] or [blocks of 128].

    Raises:
        RunError: of none of these shapes, or ranks would share a block.
    """
    number = pieces(unit, spec)
    if number is None or ranks == 1:
        return whole
    elements = spec.elements
    if whole.shape == spec.shape:
        shape = shard_shape(unit, spec, ranks)
    elif whole.shape in ((elements,), (blocks(elements),)):
        shape = (whole.numel() // ranks,)
    else:
        raise RunError(
            f"unit {unit}: a tensor of {spec.name} has the shape {list(whole.shape)}, expected "
            f"{list(spec.shape)}, [{elements}] or [{blocks(elements)}]; the snapshot is of another model"
        )
    if whole.numel() % (number * ranks):
        raise RunError(f"unit {unit}: {list(whole.shape)} of {spec.name} cannot be cut for {ranks} ranks")
    return whole.reshape(number, ranks, -1)[:, index].reshape(shape)


def merge(unit: str, spec: ParameterSpec, shards: Sequence[Tensor]) -> Tensor:
    """The tensor of which every rank holds one of `shards`: the inverse of `shard`."""
    number = pieces(unit, spec)
    if number is None:
        return shards[0]
    parts = [part.reshape(number, -1) for part in shards]
    whole = torch.stack(parts, dim=1)
    in_shape = shards[0].dim() == len(spec.shape) and whole.numel() == spec.elements
    return whole.reshape(spec.shape if in_shape else (-1,))


def shard_state(
    model: ModelSection, unit: str, state: Mapping[str, Tensor], index: int, ranks: int
) -> dict[str, Tensor]:
    """What rank `index` loads of a unit's whole state. Raises RunError as `shard`."""
    specs = {spec.name: spec for spec in parameter_specs(model, unit)}
    return {
        key: shard(unit, specs[name], tensor, index, ranks) if (name := _parameter(key)) in specs else tensor
        for key, tensor in state.items()
    }


def merge_states(model: ModelSection, unit: str, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A unit's whole state from those of all ranks; a replicated tensor is taken from rank 0."""
    specs = {spec.name: spec for spec in parameter_specs(model, unit)}
    return {
        key: merge(unit, specs[name], [state[key] for state in states])
        if (name := _parameter(key)) in specs and pieces(unit, specs[name]) is not None
        else tensor
        for key, tensor in states[0].items()
    }


def sharded_keys(model: ModelSection, unit: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the tensors in a unit's state that differ from rank to rank, sorted."""
    specs = {spec.name: spec for spec in parameter_specs(model, unit)}
    return tuple(
        sorted(
            key
            for key in state
            if (name := _parameter(key)) in specs and pieces(unit, specs[name]) is not None
        )
    )


def _parameter(key: str) -> str:
    """The parameter that a tensor of a state belongs to; not one for the step."""
    return key.partition(".")[2]


def check_shards(config: RunConfig, ranks: int) -> None:
    """Raise RunError if `ranks` cannot share this run's blocks: one line, which names the size in the way."""
    model = config.model
    sizes = {"heads": model.heads, "ffn": model.ffn, "sequence": model.sequence}
    if model.family == "llama":
        sizes["kv_heads"] = model.kv_heads
    for name, size in sizes.items():
        if size % ranks:
            raise RunError(
                f"--tensor-parallel {ranks} does not divide this run's model.{name} {size}: join with a "
                "--tensor-parallel that does"
            )
    if ranks == 1 or config.training.moments != "fp8":
        return
    unit = block_name(0)
    for spec in parameter_specs(model, unit):
        number = pieces(unit, spec)
        if number is None or len(spec.shape) < 2:
            continue
        run = prod(spec.shape) // number // ranks
        if run % BLOCK:
            raise RunError(
                f"--tensor-parallel {ranks} cuts {spec.name} {list(spec.shape)} into runs of {run}, and this "
                f"run's moments in fp8 need multiples of {BLOCK}: join with a lower --tensor-parallel"
            )
