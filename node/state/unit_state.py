"""Reads and checks a layer unit's snapshot file. Torch-free.

A file that a node cannot load would end every attempt to resume, and older snapshots are pruned meanwhile. So
tensors are compared with the run file by name, dtype and shape, and impossible numbers are refused by their
largest and smallest element.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from node.config.schema import RunConfig
from node.model.optimizers import (
    MOMENTS,
    OUTER_PREFIX,
    Layout,
    layout_problem,
    unit_layout,
)
from node.model.optimizers import PARAMETER_PREFIX as PARAMETER_PREFIX
from wire.errors import RunError
from wire.messages import UnitHash

FROZEN_PREFIX = "frozen."
"""Begins the names of a checkpoint's weights that a stage with adapters is given beside its state."""
CACHE_PREFIX = "activation_cache."
"""Begins the names of a sample cache's tensors in a unit's state."""
_DTYPES = ("uint8", "int16", "float32", "int64")
"""Of states, in the order in which safetensors has them."""
_CACHE = {f"{CACHE_PREFIX}{part}" for part in ("values", "samples", "since")}


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors in a unit's file, by name.

    Raises:
        RunError: not a safetensors file, or a damaged one.
    """
    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        # A header may be sound and still name what numpy has not: a dtype, a shape of a hundred dimensions.
        raise RunError(f"unit state of {len(data)} bytes cannot be read ({error})") from error


def parameters_of(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights among a unit's tensors, by name without prefix."""
    return {
        name.removeprefix(PARAMETER_PREFIX): array
        for name, array in tensors.items()
        if name.startswith(PARAMETER_PREFIX)
    }


def unit_hash(tensors: Mapping[str, np.ndarray], data: bytes | None = None) -> UnitHash:
    """What a unit's file is, which need not be made for it. `data`: the file, if it is there."""
    pieces = [data] if data is not None else _pieces(tensors) if _is_known_layout() else [save({**tensors})]
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    sums = {"weights": 0.0, "moments": 0.0, "squares": 0.0}
    for name, array in sorted(tensors.items()):
        kind = "weights" if name.startswith(PARAMETER_PREFIX) else ""
        if (moment := MOMENTS.get(_moment_part(name)[0])) is not None:
            kind = "squares" if moment.is_never_negative else "moments"
        if kind and array.dtype == np.float32:
            sums[kind] += _sum_of_squares(array)
    return UnitHash(digest.hexdigest(), **sums)


def _pieces(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The bytes of the tensors' safetensors file, without a copy of them."""
    # The widest elements come first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-_DTYPES.index(tensors[name].dtype.name), name))
    header, at = {}, 0
    for name in names:
        array = tensors[name]
        dtype = array.dtype.name.upper().replace("UINT", "U").replace("INT", "I").replace("FLOAT", "F")
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


@cache
def _is_known_layout() -> bool:
    """Whether this version of safetensors lays out files as `_pieces` does."""
    sample = {f"{dtype}.{n}": np.ones((n, 3), dtype) for dtype in _DTYPES for n in (2, 1)}
    return b"".join(_pieces(sample)) == save(sample)


def _sum_of_squares(array: np.ndarray) -> float:
    flat = array.reshape(-1)
    # Not `dot`, which wakes threads and needs a copy.
    return float(np.einsum("i,i->", flat, flat, dtype=np.float64))


def weights_file(weights: Mapping[str, np.ndarray]) -> bytes:
    """A unit's float32 weights alone as a file, under their names in a state."""
    return save({f"{PARAMETER_PREFIX}{name}": array for name, array in sorted(weights.items())})


def check_state(config: RunConfig, windows: int, unit: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Check that nodes can go on from a unit's tensors.

    Args:
        windows: samples of one pass over the text.

    Raises:
        RunError: they cannot; the message says why.
    """
    # All or none: states from before the first round have none.
    expected = unit_layout(config, unit, outer=any(name.startswith(OUTER_PREFIX) for name in tensors))
    if config.pipeline.remembers and not _CACHE.isdisjoint(tensors):
        # All or none: only the unit before a boundary carries its sample cache.
        expected |= _cache_layout(config, tensors)
    found = {name: (array.dtype.name, array.shape) for name, array in tensors.items()}
    if problem := layout_problem(expected, found):
        raise RunError(problem)
    for name, array in tensors.items():
        if array.size and not _possible(name, array, windows):
            raise RunError(f"{name} holds numbers that no step leaves behind")


def _cache_layout(config: RunConfig, tensors: Mapping[str, np.ndarray]) -> Layout:
    """Of any number of samples."""
    values, samples, since = (f"{CACHE_PREFIX}{part}" for part in ("values", "samples", "since"))
    count = tensors[samples].size if samples in tensors else 0
    return {
        values: ("int16", (count, config.model.sequence, config.model.hidden)),
        samples: ("int64", (count,)),
        since: ("int64", ()),
    }


def _moment_part(name: str) -> tuple[str, str]:
    """The moment that a tensor of a state is of, and the suffix of the part that it is."""
    kind = name.partition(".")[0]
    suffix = next((suffix for suffix in ("_scale", "_power") if kind.endswith(suffix)), "")
    return kind.removesuffix(suffix), suffix


def _possible(name: str, array: np.ndarray, windows: int) -> bool:
    moment, part = _moment_part(name)
    never_negative = part == "_scale" or (moment in MOMENTS and MOMENTS[moment].is_never_negative)
    if array.dtype == np.float32:
        least, most = float(array.min()), float(array.max())  # a NaN is both
        return bool(np.isfinite((least, most)).all()) and (least >= 0 or not never_negative)
    if moment in MOMENTS and part == "_power":  # by which is divided
        return int(array.min()) > 0
    if moment in MOMENTS:  # e4m3 has a NaN of either sign, the codes 127 and 255
        most = 0x7F if never_negative else 0xFF
        return int(array.max()) < most and int(array.view(np.int8).max()) < 0x7F
    match name.removeprefix(CACHE_PREFIX):
        case "values":  # bf16: as integers, what is not finite is the largest of its sign
            return int(array.max()) < 0x7F80 and int(array.view(np.uint16).max()) < 0xFF80
        case "samples":
            return bool((np.diff(array) > 0).all()) and array[0] >= 0 and array[-1] < windows
        case _:  # steps
            return int(array) >= 0
