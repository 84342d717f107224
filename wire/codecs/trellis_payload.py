"""The payload of a `trellis` tensor: layout, writing, and reading with all checks.

Little endian. Sections of whole bytes follow each other without gaps; zeros follow the last one:

    prefix, 32 bytes (`_PREFIX`) | row classes | column classes |
    with a prediction: row exponents | column exponents | multipliers | u | v |
    zeros up to a multiple of 4 bytes |
    words of each group, uint32 | states of each group's lanes, uint32 | words of each group, uint16

Each class or exponent takes as many bits as the largest needs. Multipliers take 8 bits. Elements of u and v
take as many bits as the prefix says, and are stored as the difference from the smallest possible value.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import ops as trellis_ops
from kernels.trellis import reference as trellis
from kernels.trellis.code import LOW, Coded
from kernels.trellis.factors import (
    EXPONENT_BITS,
    MAX_EXPONENT,
    MAX_FACTOR_BITS,
    MAX_RANK,
    MIN_EXPONENT,
    MIN_FACTOR_BITS,
    Factors,
    most_multipliers,
)
from kernels.trellis.grid import Grid, grid
from kernels.trellis.loops import matrices as trellis_matrix_loops
from kernels.trellis.reference import CLASS_BITS
from kernels.trellis.tables import FAMILIES, MAX_CLASS
from wire.errors import PackedMismatchError

PREFIX_BYTES = 32

_ZEROS, _CODED = range(2)
# mode, family, step, row base, column base, bits of row and column classes, rank, bits of factors, bits of
# row and column exponents, exponent of the prediction, bytes used
_PREFIX = struct.Struct("<BBHhhBBBBBBhI12x")
_MULTIPLIER_BITS = 8
# Bases of classes are small enough that sums never overflow.
_BASES = range(-4096, 4097)
# A prediction stays below 2**14 times a normalised element, so no sum leaves fp32's range.
MAX_PREDICTION_BITS = 100

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Widths:
    """Bits per integer in each section; 0 in a prediction's sections if there is none (rank 0)."""

    row: int
    column: int
    rank: int = 0
    factor: int = 0
    row_exponent: int = 0
    column_exponent: int = 0

    def side_bytes(self, rows: int, columns: int) -> int:
        """Bytes before the groups, for a matrix of `rows` x `columns`."""
        sections = [
            rows * self.row,
            columns * self.column,
            rows * self.row_exponent,
            columns * self.column_exponent,
            self.rank * _MULTIPLIER_BITS,
            rows * self.rank * self.factor,
            columns * self.rank * self.factor,
        ]
        return PREFIX_BYTES + -(-sum(-(-bits // 8) for bits in sections) // 4) * 4


@dataclass(frozen=True, slots=True)
class Payload:
    """Everything sent for a tensor that is not all zero, except the code words."""

    family: int
    """Counted from `first_family`."""
    step_code: int
    row: Int32Array
    column: Int32Array
    factors: Factors | None
    widths: Widths

    @property
    def side_bytes(self) -> int:
        return self.widths.side_bytes(self.row.size, self.column.size)


def predictable(row: int, column: int, exponent: int) -> bool:
    """Whether a prediction with these maximal exponents stays far below the largest fp32 number."""
    return exponent in range(MIN_EXPONENT, MAX_EXPONENT + 1) and (
        row + column + exponent + 24 <= MAX_PREDICTION_BITS
    )


def group_bytes(where: Grid, words: int) -> int:
    """Bytes of all groups, which together have `words` code words."""
    return where.groups * (4 + 4 * where.lanes) + 2 * words


def write(payload: Payload, coded: Coded, where: Grid, words: int, out: torch.Tensor) -> None:
    """Fill `out`, uint8 `[n]` on the CPU and large enough. `words` must be the sum of `coded.counts`."""
    factors, widths = payload.factors, payload.widths
    bases = int(payload.row.min()), int(payload.column.min())
    start = payload.side_bytes
    used = start + group_bytes(where, words)
    prefix = _PREFIX.pack(
        _CODED,
        payload.family,
        payload.step_code,
        *bases,
        widths.row,
        widths.column,
        widths.rank,
        widths.factor,
        widths.row_exponent,
        widths.column_exponent,
        0 if factors is None else factors.exponent,
        used,
    )
    sides = [
        (torch.from_numpy(side), -base, bits)
        for side, base, bits in zip(
            (payload.row, payload.column), bases, (widths.row, widths.column), strict=True
        )
    ]
    if factors is not None:
        limit = (1 << (factors.bits - 1)) - 1
        sides += [
            (factors.row_exponent, 0, widths.row_exponent),
            (factors.column_exponent, 0, widths.column_exponent),
            (factors.multiplier, 0, _MULTIPLIER_BITS),
            (factors.u, limit, factors.bits),
            (factors.v, limit, factors.bits),
        ]
    out[:PREFIX_BYTES].copy_(torch.frombuffer(bytearray(prefix), dtype=torch.uint8))
    place = PREFIX_BYTES
    for values, more, bits in sides:
        size = -(-values.numel() * bits // 8)
        if bits:
            trellis_matrix_loops.pack(values, more, bits, out[place : place + size])
        place += size
    out[place:start].zero_()
    states = start + 4 * where.groups
    out[start:states].view(torch.int32).copy_(coded.counts)
    first = states + 4 * where.groups * where.lanes
    out[states:first].view(torch.int32).copy_(coded.states.view(-1))
    trellis_lanes.join(coded, out[first:used].view(torch.int16))
    out[used:].zero_()


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded payload: multiples of a step, and an optional prediction to add."""

    n: torch.Tensor  # int32 [R * C]
    step_code: int
    factors: Factors | None


def read(data: torch.Tensor, rows: int, columns: int, first_family: int = 0) -> Decoded | None:
    """Decode the payload of `rows` x `columns` elements. Its family of tables counts from `first_family`.

    Returns None for a tensor of zeros. Raises `PackedMismatchError` for anything that `write` does not
    write. Allocates only what the shape and the buffer need. On a GPU the host waits twice: for the prefix,
    and for the results of all checks.
    """
    prefix = data[:PREFIX_BYTES].cpu().numpy().tobytes()
    (
        mode,
        family,
        step_code,
        row_base,
        column_base,
        row_bits,
        column_bits,
        rank,
        factor_bits,
        row_exponent_bits,
        column_exponent_bits,
        exponent,
        used,
    ) = fields = _PREFIX.unpack(prefix)
    if mode == _ZEROS:
        _check(not data.any(), "a payload of zeros that has other bytes")
        return None
    _check(mode == _CODED and family < FAMILIES and _PREFIX.pack(*fields) == prefix, "an unknown prefix")
    _check(step_code < trellis.STEP_CODES, "a step out of range")
    _check(row_base in _BASES and column_base in _BASES, "a class out of range")
    _check(max(row_bits, column_bits) <= CLASS_BITS, "classes too far apart")
    if rank:
        _check(
            rank <= MAX_RANK
            and MIN_FACTOR_BITS <= factor_bits <= MAX_FACTOR_BITS
            and max(row_exponent_bits, column_exponent_bits) <= EXPONENT_BITS
            and MIN_EXPONENT <= exponent <= MAX_EXPONENT,
            "a prediction out of range",
        )
    else:
        _check(not any(fields[8:12]), "fields of a prediction, but none")
    widths = Widths(row_bits, column_bits, rank, factor_bits, row_exponent_bits, column_exponent_bits)
    where = grid(rows * columns)
    start = widths.side_bytes(rows, columns)
    first = start + group_bytes(where, 0)
    _check(first <= used <= data.numel() and used % 2 == 0, "a wrong length")
    reader = _Reader(data)
    reader.require((data[used:] == 0).all(), "bytes after its end")
    row = reader.integers(rows, row_bits) + row_base
    column = reader.integers(columns, column_bits) + column_base
    factors = None
    if rank:
        row_exponent = reader.integers(rows, row_exponent_bits)
        column_exponent = reader.integers(columns, column_exponent_bits)
        multiplier = reader.integers(rank, _MULTIPLIER_BITS)
        limit = (1 << (factor_bits - 1)) - 1
        u = reader.integers(rows * rank, factor_bits, limit, torch.int8).view(rows, rank)
        v = reader.integers(columns * rank, factor_bits, limit, torch.int8).view(columns, rank)
        factors = Factors(factor_bits, u, v, multiplier, row_exponent, column_exponent, exponent)
        tops = factors.tops
        right = (tops[0] + tops[1] + exponent + 24 <= MAX_PREDICTION_BITS) & (
            tops[2] <= most_multipliers(factor_bits)
        )
        reader.require(right & (_most(u) <= limit) & (_most(v) <= limit), "a prediction out of range")
    reader.require((data[reader.position : start] == 0).all(), "bytes between its sections")
    counts = data[start : start + 4 * where.groups].view(torch.int32).long() & 0xFFFFFFFF
    states = data[start + 4 * where.groups : first].view(torch.int32).view(where.groups, where.lanes)
    reader.require(states.amin() >= LOW, "a state out of range")
    reader.require(counts.sum() * 2 == used - first, "a wrong length")
    if data.device.type == "cpu":
        reader.settle()
    number = trellis_ops.classes(row, column)
    words, family = data[first:used].view(torch.int16), first_family + family
    n, whole = trellis_ops.decode(states, counts, words, number, where, family)
    reader.require(whole, "a wrong code")
    reader.settle()
    return Decoded(n, step_code, factors)


@dataclass(frozen=True, slots=True)
class Plain:
    """What the host reads of a row's payload without a prediction and without column classes."""

    number: int
    """The class of all elements."""
    family: int
    step_code: int
    counts: NDArray[np.int64]


def read_plain(data: NDArray[np.uint8], where: Grid) -> Plain | None:
    """The host's part of `read` for the payload of a row; None if it is of another kind or wrong."""
    prefix = data[:PREFIX_BYTES].tobytes()
    fields = _PREFIX.unpack(prefix)
    mode, family, step_code, row_base, column_base, *others, used = fields
    if (
        mode != _CODED
        or family >= FAMILIES
        or any(others)
        or _PREFIX.pack(*fields) != prefix
        or step_code >= trellis.STEP_CODES
        or row_base not in _BASES
        or column_base not in _BASES
    ):
        return None
    states = PREFIX_BYTES + 4 * where.groups
    first = PREFIX_BYTES + group_bytes(where, 0)
    if not first <= used <= data.size or used % 2 or data[used:].any():
        return None
    counts = data[PREFIX_BYTES:states].view("<u4").astype(np.int64)
    if int(counts.sum()) * 2 != used - first or int(data[states:first].view("<i4").min()) < LOW:
        return None
    number = min(max(row_base + column_base, 0), MAX_CLASS)
    return Plain(number, family, step_code, counts)


class _Reader:
    """Reads sections one after another from a large enough buffer, and collects checks."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self.position = PREFIX_BYTES
        self._checks: list[tuple[torch.Tensor, str]] = []

    def require(self, right: torch.Tensor, what: str) -> None:
        """Add a check, bool `[]`, for `settle` to evaluate."""
        self._checks.append((right, what))

    def settle(self) -> None:
        """Evaluate the collected checks. Raises `PackedMismatchError` for the first that fails."""
        for right, (_, what) in zip(
            torch.stack([check[0] for check in self._checks]).tolist(), self._checks, strict=True
        ):
            _check(right, what)
        self._checks.clear()

    def integers(
        self, count: int, bits: int, less: int = 0, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        """`count` integers of `bits` bits, with `less` subtracted from each."""
        size = -(-count * bits // 8)
        packed = self._data[self.position : self.position + size]
        self.position += size
        if bits == 0:
            return torch.zeros(count, dtype=dtype, device=packed.device)
        behind = "bits after the end of a section"
        if packed.device.type == "cpu":
            values, clear = trellis_matrix_loops.unpacked(packed, count, less, bits, dtype)
            self.require(torch.tensor(clear), behind)
            return values
        # Eight integers of `bits` bits take `bits` bytes.
        octets = F.pad(packed, (0, -size % bits)).view(-1, bits).long()
        words = (octets << _places(bits, 8, packed.device)).sum(1)
        values = words.unsqueeze(1) >> _places(8, bits, packed.device) & ((1 << bits) - 1)
        values = values.view(-1)
        self.require((values[count:] == 0).all(), behind)
        return (values[:count] - less).to(dtype)


def _most(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values.numpy().max()) if values.device.type == "cpu" else values.amax()


def _check(right: bool | torch.Tensor, what: str) -> None:
    if not right:
        raise PackedMismatchError(f"a packed trellis tensor has {what}: refused")


def _places(count: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * step, step, device=device)
