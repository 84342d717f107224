"""Cuts parameters and states into shards for T tensor-parallel ranks and joins them again.

`node.model.families.family.ParameterSpec` says which rank holds which slice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fp8.layout import blocks
from node.config.schema import RunConfig
from node.model.families.family import ParameterSpec
from node.model.lora_shapes import trained_specs
from node.model.tensor_rank import TensorRank
from node.model.units import parameter_specs
from wire.errors import RunError


def shard(unit: str, spec: ParameterSpec, whole: Tensor, index: int, ranks: int) -> Tensor:
    """The part of a parameter that rank `index` holds, or of a tensor with one value per element or per
    block.

    Args:
        whole: a tensor of shape `spec.shape`, [elements] or [blocks of 128].

    Raises:
        RunError: `whole` has none of these shapes, or ranks would share a block.
    """
    number = spec.pieces
    if number is None or ranks == 1:
        return whole
    elements = spec.elements
    if whole.shape == spec.shape:
        shape = spec.shard_shape(ranks)
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


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a parameter that is cut."""

    spec: ParameterSpec
    rank: TensorRank

    def whole(self, mine: Tensor) -> Tensor:
        """The whole tensor from this rank's part. All ranks must call it in the same order."""
        return self.rank.gather(mine.reshape(self.spec.pieces or 1, 1, -1)).reshape(self.spec.shape)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's shape."""
        return shard("", self.spec, whole, self.rank.index, self.rank.count)


def merge(spec: ParameterSpec, shards: Sequence[Tensor]) -> Tensor:
    """The whole tensor from the shards of all ranks: the inverse of `shard`."""
    number = spec.pieces
    if number is None:
        return shards[0]
    parts = [part.reshape(number, -1) for part in shards]
    whole = torch.stack(parts, dim=1)
    in_shape = shards[0].dim() == len(spec.shape) and whole.numel() == spec.elements
    return whole.reshape(spec.shape if in_shape else (-1,))


def shard_state(
    config: RunConfig, unit: str, state: Mapping[str, Tensor], index: int, ranks: int
) -> dict[str, Tensor]:
    """The part of a unit's whole state that rank `index` loads.

    Raises:
        RunError: as for `shard`.
    """
    specs = _specs(config, unit)
    return {
        key: shard(unit, specs[name], tensor, index, ranks) if (name := _parameter(key)) in specs else tensor
        for key, tensor in state.items()
    }


def merge_states(config: RunConfig, unit: str, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A unit's whole state from the states of all ranks. A replicated tensor is taken from rank 0."""
    specs = _specs(config, unit)
    return {
        key: merge(specs[name], [state[key] for state in states])
        if (name := _parameter(key)) in specs and specs[name].pieces is not None
        else tensor
        for key, tensor in states[0].items()
    }


def sharded_keys(config: RunConfig, unit: str, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the tensors in a unit's state that differ between ranks, sorted."""
    specs = _specs(config, unit)
    return tuple(
        sorted(key for key in state if (name := _parameter(key)) in specs and specs[name].pieces is not None)
    )


def _specs(config: RunConfig, unit: str) -> dict[str, ParameterSpec]:
    """The specs of trained and frozen parameters, by name."""
    model, lora = config.model, config.lora
    return {spec.name: spec for spec in (*parameter_specs(model, unit), *trained_specs(model, lora, unit))}


def _parameter(key: str) -> str:
    """The parameter that a tensor of a state belongs to; empty for the step count."""
    return key.partition(".")[2]
