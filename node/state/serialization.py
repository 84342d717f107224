"""Converts a layer unit's state to and from safetensors, which nodes exchange and snapshots store."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from node.state.snapshot import read_unit
from node.state.unit_state import CACHE_PREFIX as CACHE_PREFIX
from node.state.unit_state import FROZEN_PREFIX, PARAMETER_PREFIX, unit_pieces
from wire.errors import RunError


def serialize_unit(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a unit's state, which do not depend on the order of the tensors.

    Args:
        tensors: CPU tensors by name, as `StageOptimizer.unit_state` returns them.
    """
    return b"".join(unit_pieces({name: tensor.numpy() for name, tensor in tensors.items()}))


def deserialize_unit(data: bytes) -> dict[str, Tensor]:
    """CPU tensors by name. Sizes are checked before anything is allocated, and no code is executed.

    Raises:
        RunError: the data is not a safetensors file, or it is damaged.
    """
    try:
        return load(data)
    except (SafetensorError, KeyError) as error:
        # KeyError: this version of torch lacks the dtype.
        raise RunError(f"unit state of {len(data)} bytes cannot be read ({error}); fetch it again") from error


def without_cache(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A unit's weights and optimizer state, without the sample cache after it."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(CACHE_PREFIX)}


def cache_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sample cache after a unit, if its state has one."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(CACHE_PREFIX)}


def as_frozen(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A unit's weights under the names of frozen weights."""
    return {f"{FROZEN_PREFIX}{name.removeprefix(PARAMETER_PREFIX)}": value for name, value in weights.items()}


def load_unit(directory: Path, unit: str) -> dict[str, Tensor]:
    """A unit's weights and optimizer state from a complete snapshot, after checking the file's SHA-256.

    Raises:
        RunError: see `node.state.snapshot.read_unit`.
    """
    return without_cache(deserialize_unit(read_unit(directory, unit)))
