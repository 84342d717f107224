"""Reads and checks a layer unit's snapshot file. Torch-free.

A file that a node cannot load would make every attempt to resume fail, while older snapshots are removed. So
the names, dtypes and shapes of tensors are compared with the run file, and tensors with impossible minima or
maxima are refused.
"""

import json
from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import prod
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from node.config.schema import RunConfig
from node.model.optimizers import (
    MOMENTS,
    OUTER_PREFIX,
    Layout,
    layout_problem,
    unit_layout,
)
from node.model.optimizers import PARAMETER_PREFIX as PARAMETER_PREFIX
from node.state.manifest import JoinedFile, LayerBytes, LayerSource, weights_line
from wire.errors import RunError
from wire.messages import UnitHash

FROZEN_PREFIX = "frozen."
"""The prefix of a checkpoint's weights that a stage with adapters gets in addition to its state."""
CACHE_PREFIX = "activation_cache."
"""The prefix of a sample cache's tensors in a unit's state."""
BFLOAT16 = "bfloat16"
"""The name of a dtype that numpy lacks. Arrays hold its bits as uint16."""
_SUMMED = 256
"""Squares that are summed in float32."""
_LEAST_SQUARE = 1e-30
"""Squares that are this large on average are not subnormal."""


def _letters(dtype: str) -> str:
    """The name of a dtype in files."""
    return dtype.upper().replace("UINT", "U").replace("INT", "I").replace("FLOAT", "F")


_DTYPES = (
    *("bool", "uint8", "int8", "int16", "uint16", "float16", BFLOAT16, "int32", "uint32"),
    *("float32", "float64", "int64", "uint64"),
)
"""The dtypes in the order of safetensors, the narrowest first."""
_NAMES = {_letters(dtype): dtype for dtype in _DTYPES if dtype != BFLOAT16}
"""The dtypes that numpy has, by their names in files."""
SLICE = 1 << 22
"""The elements of a tensor that are read at a time."""
MOST_HEAD_BYTES = 1 << 20
"""A layer's head is shorter."""
ALL, WEIGHTS = LASTS = ("all", "weights")
"""The values of `snapshots.last`."""
_CACHE = {f"{CACHE_PREFIX}{part}" for part in ("values", "samples", "since")}


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors in a unit's file, by name. They are views of `data` if this version could have written it,
    because to copy them would cost as much as to hash them.

    Raises:
        RunError: the data is not a safetensors file, or it is damaged.
    """
    if (views := _views(data)) is not None:
        return views
    try:
        return dict(load(data))
    except (SafetensorError, KeyError, ValueError, TypeError, OverflowError) as error:
        # A valid header may still name a dtype or a number of dimensions that numpy does not support.
        raise RunError(f"unit state of {len(data)} bytes cannot be read ({error})") from error


def _views(data: bytes) -> dict[str, np.ndarray] | None:
    """The tensors of a file whose head is exactly that of `LayerDigest`; None for any other file."""
    start = _head_bytes(data[:8])
    if start > MOST_HEAD_BYTES or (digest := _digest(data[:start])) is None or digest.bytes != len(data):
        return None
    tensors, at = {}, start
    for name, (dtype, shape) in digest.layout.items():
        tensors[name] = np.ndarray(shape, dtype, data, at)
        at += tensors[name].nbytes
    return tensors


def _head_bytes(first: bytes) -> int:
    """The bytes of a file's head, by its first eight bytes."""
    return 8 + int.from_bytes(first, "little")


def _digest(head: bytes, reports: int | None = None) -> "LayerDigest | None":
    """The digest that has exactly this head; None if no layout has it."""
    try:
        header = json.loads(head[8:])
        layout = {name: (_NAMES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
        sizes = [size for _, shape in layout.values() for size in shape]
        if not all(type(size) is int and size >= 0 for size in sizes):
            return None
        digest = LayerDigest(layout, reports=reports)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None
    return digest if digest.head == head else None


def without_head(file: LayerSource) -> LayerSource:
    """The bytes of a unit's tensors. Raises RunError."""
    return JoinedFile([(file, _head_bytes(file.read(0, 8)), file.size)], "")


def parameters_of(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights among a unit's tensors, by name without the prefix."""
    return {
        name.removeprefix(PARAMETER_PREFIX): array
        for name, array in tensors.items()
        if name.startswith(PARAMETER_PREFIX)
    }


def file_head(layout: Layout, **metadata: str) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file with these tensors in this order, where each tensor begins after the
    head, and the bytes of all tensors."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, at = dict[str, int](), 0
    for name, (dtype, shape) in layout.items():
        starts[name] = at
        size = (2 if dtype == BFLOAT16 else np.dtype(dtype).itemsize) * prod(shape)
        header[name] = {"dtype": _letters(dtype), "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts, at


class LayerDigest:
    """Describes and hashes a unit's file in one pass over its tensors, which need not be in memory together.

    The file has the safetensors format: `head`, then the bytes of each tensor in `order`.
    """

    def __init__(self, layout: Layout, *, reports: int | None = None, weights_first: bool = False) -> None:
        """
        Args:
            reports: the number of samples in one pass over the text, if the file is for a report that a run
                can resume from. The weights are then hashed separately, and impossible numbers raise
                RunError.
            weights_first: whether to hash a file with only the weights, too.
        """
        # The widest dtypes come first, so that all tensors are aligned.
        self.order = sorted(layout, key=lambda name: (-_DTYPES.index(layout[name][0]), name))
        self.layout = {name: layout[name] for name in self.order}
        """dtype and shape by name, in `order`."""
        self.head, self.starts, size = file_head(self.layout)
        self.bytes = len(self.head) + size
        """The file's size in bytes."""
        self._reports = reports
        self._file, self._weights = sha256(self.head), sha256()
        self._sums = {"weights": 0.0, "moments": 0.0, "squares": 0.0}
        self._named = ""
        weights = {name: layout[name] for name in self.order if name.startswith(PARAMETER_PREFIX)}
        self.weights = LayerDigest(weights) if weights_first and weights else None
        """The digest of the file with only the weights."""
        self.weights_at = len(self.head) + min((self.starts[name] for name in weights), default=0)
        """The offset of the weights, which are contiguous."""

    def add(self, name: str, array: np.ndarray) -> memoryview:
        """Add the next slice of a tensor, in its dtype. Add every tensor, in `order`. Returns the slice's
        bytes, without a copy if `array` is contiguous."""
        if self._reports is not None:
            _check_numbers(name, array, self._reports)
        piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.update(piece)
        if self.weights is not None and name.startswith(PARAMETER_PREFIX):
            self.weights._file.update(piece)
        if self._reports is not None and name.startswith(PARAMETER_PREFIX):
            if name != self._named:
                dtype, shape = self.layout[name]
                parameter = name.removeprefix(PARAMETER_PREFIX)
                self._weights.update(weights_line(parameter, np.dtype(dtype), shape))
            self._weights.update(piece)
        self._named = name
        if (kind := _summed(name, array)) is not None:
            self._sums[kind] += _sum_of_squares(array)
        return piece

    @property
    def hash(self) -> UnitHash:
        """The hash, after everything was added."""
        sums = self._sums
        weights = "" if self.weights is None else self.weights._file.hexdigest()
        return UnitHash(self._file.hexdigest(), sums["weights"], sums["moments"], sums["squares"], weights)

    @property
    def weights_sha256(self) -> str:
        """The hash of the unit's parameters, as in a manifest."""
        assert self._reports is not None, "`reports` was given"
        return self._weights.hexdigest()


def layout_of(tensors: Mapping[str, np.ndarray]) -> Layout:
    return {name: (array.dtype.name, array.shape) for name, array in tensors.items()}


def unit_pieces(tensors: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """The bytes of the tensors' file, without a copy of contiguous tensors."""
    digest = LayerDigest(layout_of(tensors))
    yield digest.head
    for name in digest.order:
        yield np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data


def _summed(name: str, array: np.ndarray) -> str | None:
    """The sum to which a tensor belongs, or None."""
    if array.dtype != np.float32:
        return None
    if name.startswith(PARAMETER_PREFIX):
        return "weights"
    if (moment := MOMENTS.get(_moment_part(name)[0])) is not None:
        return "squares" if moment.is_never_negative else "moments"
    return None


def _sum_of_squares(array: np.ndarray) -> float:
    flat = array.reshape(-1)
    whole = flat.size // _SUMMED * _SUMMED
    rows, rest = flat[:whole].reshape(-1, _SUMMED), flat[whole:]
    # Short sums in float32 are four times as fast. `dot` would wake threads.
    total = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64))
    if not whole * _LEAST_SQUARE < total < np.inf:  # else squares may not be float32 numbers
        rest, total = flat, 0.0
    return total + float(np.einsum("i,i->", rest, rest, dtype=np.float64))


def weights_file(weights: Mapping[str, np.ndarray]) -> bytes:
    """A file of only a unit's weights, under their names in a state. A tensor is in bfloat16, at half the
    bytes, if that represents every value exactly, as for most checkpoints.

    `weights` are float32, or the bits of bfloat16.
    """
    layout, arrays = {}, {}
    for name, array in weights.items():
        key = f"{PARAMETER_PREFIX}{name}"
        arrays[key], layout[key] = array, ("float32", array.shape)
        if array.dtype == np.float32:
            halves = np.ascontiguousarray(array).reshape(-1).view("<u2")
            if halves[::2].any():
                continue
            arrays[key] = halves[1::2]
        layout[key] = BFLOAT16, array.shape
    digest = LayerDigest(layout)
    pieces = (np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8).data for key in digest.order)
    return b"".join([digest.head, *pieces])


def has_weights_alone(config: RunConfig, step: int) -> bool:
    """Whether the snapshot of `step` has no optimizer state."""
    return config.snapshots.last == WEIGHTS and step >= config.run.steps


def has_weights_first(config: RunConfig, step: int) -> bool:
    """Whether nodes upload the weights of `step` before the optimizer's state, because the model is done.

    Not for adapters: their state is small, and frozen layers have none.
    """
    return config.snapshots.last == ALL and step >= config.run.steps and config.lora.rank == 0


def checked_digest(
    config: RunConfig, windows: int, unit: str, file: LayerBytes, *, weights_alone: bool = False
) -> "LayerDigest":
    """Check that a run can resume from a unit's file, and hash it, in one pass that holds a slice of a tensor
    at a time.

    Args:
        windows: the number of samples in one pass over the text.
        weights_alone: whether there is no optimizer state.

    Raises:
        RunError: it cannot, or no node writes such a file. The message says why.
    """
    head = file.read(0, min(_head_bytes(file.read(0, 8)), MOST_HEAD_BYTES))
    if (digest := _digest(head, windows)) is None or digest.bytes != file.size:
        raise RunError(f"unit state of {file.size} bytes cannot be read: no node writes such a head")
    _check_layout(config, unit, digest.layout, weights_alone)
    for name, (kind, shape) in digest.layout.items():
        dtype, start = np.dtype(kind), len(head) + digest.starts[name]
        for first, count in slices(name, prod(shape), SLICE):
            data = file.read(start + first * dtype.itemsize, count * dtype.itemsize)
            digest.add(name, np.ndarray(count, dtype, data))
    return digest


def slices(name: str, elements: int, most: int) -> Iterator[tuple[int, int]]:
    """First element and number of elements of the parts in which a state's tensor is read."""
    # A cache's samples are checked together.
    size = elements if name.startswith(CACHE_PREFIX) else most
    for first in range(0, max(1, elements), max(1, size)):
        yield first, min(size, elements - first)


def _check_layout(config: RunConfig, unit: str, layout: Layout, weights_alone: bool) -> None:
    # All or none, because states from before the first round have none.
    expected = unit_layout(config, unit, outer=any(name.startswith(OUTER_PREFIX) for name in layout))
    if config.pipeline.remembers and not _CACHE.isdisjoint(layout):
        # All or none, because only the unit before a boundary has its sample cache.
        expected |= _cache_layout(config, layout)
    if weights_alone:
        expected = {name: part for name, part in expected.items() if name.startswith(PARAMETER_PREFIX)}
    if problem := layout_problem(expected, layout):
        raise RunError(problem)


def _check_numbers(name: str, array: np.ndarray, windows: int) -> None:
    if array.size and not _possible(name, array, windows):
        raise RunError(f"{name} has values that no step produces")


def _cache_layout(config: RunConfig, layout: Layout) -> Layout:
    """The layout of a sample cache, for any number of samples."""
    values, samples, since = (f"{CACHE_PREFIX}{part}" for part in ("values", "samples", "since"))
    count = prod(layout[samples][1]) if samples in layout else 0
    return {
        values: ("int16", (count, config.model.sequence, config.model.hidden)),
        samples: ("int64", (count,)),
        since: ("int64", ()),
    }


def _moment_part(name: str) -> tuple[str, str]:
    """The moment to which a tensor of a state belongs, and the suffix that says which part it is."""
    kind = name.partition(".")[0]
    suffix = next((suffix for suffix in ("_scale", "_power") if kind.endswith(suffix)), "")
    return kind.removesuffix(suffix), suffix


def _possible(name: str, array: np.ndarray, windows: int) -> bool:
    moment, part = _moment_part(name)
    never_negative = part == "_scale" or (moment in MOMENTS and MOMENTS[moment].is_never_negative)
    if array.dtype == np.float32:
        least, most = float(array.min()), float(array.max())  # a NaN is both
        return bool(np.isfinite((least, most)).all()) and (least >= 0 or not never_negative)
    if moment in MOMENTS and part == "_power":  # a divisor
        return int(array.min()) > 0
    if moment in MOMENTS:  # NaNs of e4m3 are the codes 127 and 255
        most = 0x7F if never_negative else 0xFF
        return int(array.max()) < most and int(array.view(np.int8).max()) < 0x7F
    match name.removeprefix(CACHE_PREFIX):
        case "values":  # in bf16, as integers, non-finite values are the largest of their sign
            return int(array.max()) < 0x7F80 and int(array.view(np.uint16).max()) < 0xFF80
        case "samples":
            return bool((np.diff(array) > 0).all()) and array[0] >= 0 and array[-1] < windows
        case _:  # steps
            return int(array.min()) >= 0
