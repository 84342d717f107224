"""The payload of a `trellis` tensor: what it holds, how it is written, and the checks when it is read.

Little endian; sections follow each other without gaps, each in whole bytes, zeros behind the last:

    prefix, 32 bytes (`_PREFIX`) | row classes | column classes |
    if there is a prediction: row exponents | column exponents | multipliers | u | v |
    planes of low bits | escaped values, int32 |
    words of each block, uint32 | states of each block's lanes, uint32 | words of each block, uint16

Classes and exponents take as many bits each as the largest needs. What a plane of low bits holds follows from
the classes. Multipliers take 8 bits, u and v as many as the prefix says, less by the smallest.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels import trellis
from kernels.trellis_factors import (
    EXPONENT_BITS,
    MAX_EXPONENT,
    MAX_FACTOR_BITS,
    MAX_RANK,
    MIN_EXPONENT,
    MIN_FACTOR_BITS,
    Factors,
    bounded,
)
from kernels.trellis_lanes import LOW
from kernels.trellis_tables import FAMILIES
from wire.errors import PackedMismatchError

PREFIX_BYTES = 32
# Row and column classes lie at most this far below the largest.
CLASS_BITS = 6
MAX_CLASS_STEP = (1 << CLASS_BITS) - 1

_ZEROS, _CODED = range(2)
# mode, family, step, row base, column base, bits of row and column classes, rank, bits of factors, bits of
# row and column exponents, exponent of the prediction, escaped values, bytes used
_PREFIX = struct.Struct("<BBHhhBBBBBBhII8x")
_MULTIPLIER_BITS = 8
# Classes that a base may start at, so that adding to them stays far from any integer's end.
_BASES = range(-4096, 4097)
# Beyond 2**14 times a normalised element nothing is predicted, and no sum may leave fp32's range.
MAX_PREDICTION_BITS = 100

Int32Array = NDArray[np.int32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Payload:
    """What is sent of a tensor that is not all zero."""

    family: int
    step_code: int
    row: Int32Array
    column: Int32Array
    factors: Factors | None
    low_bits: list[trellis.Bits]
    escapes: Int32Array
    blocks: list[trellis.Block]


def side_bytes(row: Int32Array, column: Int32Array, factors: Factors | None) -> int:
    """Bytes of everything that stands before the planes of low bits."""
    sizes = [(row.size, _width(row - row.min())), (column.size, _width(column - column.min()))]
    if factors is not None:
        sizes += [
            (row.size, _width(factors.row_exponent)),
            (column.size, _width(factors.column_exponent)),
            (factors.rank, _MULTIPLIER_BITS),
            (factors.u.size, factors.bits),
            (factors.v.size, factors.bits),
        ]
    return PREFIX_BYTES + sum(_packed_size(count, width) for count, width in sizes)


def predictable(factors: Factors) -> bool:
    """Whether the sums of a prediction, scaled, stay far from fp32's largest number."""
    top = int(factors.row_exponent.max()) + int(factors.column_exponent.max()) + factors.exponent
    return top + 24 <= MAX_PREDICTION_BITS and bounded(factors.bits, factors.multiplier)


def write(payload: Payload | None, size: int) -> Bytes:
    """The bytes, `[size]`; None for a tensor of zeros. The payload must fit: `used_bytes`."""
    out = np.zeros(size, dtype=np.uint8)
    if payload is None:
        out[:PREFIX_BYTES] = np.frombuffer(_PREFIX.pack(*(0,) * 14), dtype=np.uint8)
        return out
    factors = payload.factors
    row_base, column_base = int(payload.row.min()), int(payload.column.min())
    row, column = payload.row - row_base, payload.column - column_base
    sections = [_pack(row, _width(row)), _pack(column, _width(column))]
    if factors is not None:
        limit = (1 << (factors.bits - 1)) - 1
        sections += [
            _pack(factors.row_exponent, _width(factors.row_exponent)),
            _pack(factors.column_exponent, _width(factors.column_exponent)),
            _pack(factors.multiplier, _MULTIPLIER_BITS),
            _pack(factors.u + limit, factors.bits),
            _pack(factors.v + limit, factors.bits),
        ]
    sections += [np.packbits(plane, bitorder="little") for plane in payload.low_bits]
    sections.append(_bytes(payload.escapes, "<i4"))
    sections.append(_bytes(np.array([block.words.size for block in payload.blocks]), "<u4"))
    sections += [_bytes(block.states, "<u4") for block in payload.blocks]
    sections += [_bytes(block.words, "<u2") for block in payload.blocks]
    used = PREFIX_BYTES
    for section in sections:
        out[used : used + section.size] = section
        used += section.size
    prefix = _PREFIX.pack(
        _CODED,
        payload.family,
        payload.step_code,
        row_base,
        column_base,
        _width(row),
        _width(column),
        0 if factors is None else factors.rank,
        0 if factors is None else factors.bits,
        0 if factors is None else _width(factors.row_exponent),
        0 if factors is None else _width(factors.column_exponent),
        0 if factors is None else factors.exponent,
        payload.escapes.size,
        used,
    )
    out[:PREFIX_BYTES] = np.frombuffer(prefix, dtype=np.uint8)
    return out


def used_bytes(payload: Payload) -> int:
    """Bytes that `write` fills."""
    return (
        side_bytes(payload.row, payload.column, payload.factors)
        + sum(-(-plane.size // 8) for plane in payload.low_bits)
        + 4 * payload.escapes.size
        + sum(4 + 4 * block.states.size + 2 * block.words.size for block in payload.blocks)
    )


def read(data: Bytes, rows: int, columns: int) -> tuple[Payload, Int32Array] | None:
    """Parse the payload of `rows` x `columns` elements; also their classes. None for a tensor of zeros.

    `PackedMismatchError` for what `write` does not write. Nothing is allocated beyond what the shape and the
    buffer account for.
    """
    prefix = data[:PREFIX_BYTES].tobytes()
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
        escapes,
        used,
    ) = fields = _PREFIX.unpack(prefix)
    if mode == _ZEROS:
        _check(not data.any(), "zeros with something in them")
        return None
    _check(mode == _CODED and family < FAMILIES and _PREFIX.pack(*fields) == prefix, "an unknown prefix")
    _check(step_code < trellis.STEP_CODES, "a step out of range")
    _check(row_base in _BASES and column_base in _BASES, "a class out of range")
    _check(max(row_bits, column_bits) <= CLASS_BITS, "classes too far apart")
    _check(PREFIX_BYTES <= used <= data.size, "a wrong length")
    _check(not data[used:].any(), "something behind its end")
    reader = _Reader(data[:used])
    row = reader.integers(rows, row_bits) + np.int32(row_base)
    column = reader.integers(columns, column_bits) + np.int32(column_base)
    factors = None
    if rank:
        _check(
            rank <= MAX_RANK
            and MIN_FACTOR_BITS <= factor_bits <= MAX_FACTOR_BITS
            and max(row_exponent_bits, column_exponent_bits) <= EXPONENT_BITS
            and MIN_EXPONENT <= exponent <= MAX_EXPONENT,
            "a prediction out of range",
        )
        row_exponent = reader.integers(rows, row_exponent_bits)
        column_exponent = reader.integers(columns, column_exponent_bits)
        multiplier = reader.integers(rank, _MULTIPLIER_BITS)
        limit = np.int32((1 << (factor_bits - 1)) - 1)
        u = reader.integers(rows * rank, factor_bits).reshape(rows, rank) - limit
        v = reader.integers(columns * rank, factor_bits).reshape(columns, rank) - limit
        factors = Factors(factor_bits, u, v, multiplier, row_exponent, column_exponent, exponent)
        _check(max(u.max(), v.max()) <= limit and predictable(factors), "a prediction out of range")
    else:
        _check(not any(fields[8:12]), "parts of a prediction that it does not have")
    number = trellis.classes(row, column)
    where = trellis.grid(number.size)
    low_bits = [reader.bits(count) for count in trellis.plane_sizes(number, where)]
    escaped = reader.array("<i4", escapes).astype(np.int32)
    words = reader.array("<u4", where.blocks).astype(np.int64).tolist()
    states = [reader.array("<u4", where.lanes).astype(np.int64) for _ in range(where.blocks)]
    _check(all(state.min() >= LOW and state.max() < 1 << 31 for state in states), "a state out of range")
    blocks = [
        trellis.Block(state.astype(np.int32), reader.array("<u2", count).astype(np.uint16))
        for state, count in zip(states, words, strict=True)
    ]
    _check(reader.left == 0, "a wrong length")
    return Payload(family, step_code, row, column, factors, low_bits, escaped, blocks), number


class _Reader:
    """Takes sections off the front of a buffer; never beyond its end."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = PREFIX_BYTES

    @property
    def left(self) -> int:
        return self._data.size - self._position

    def integers(self, count: int, width: int) -> Int32Array:
        """`count` integers of `width` bits, from 0 up."""
        flags = self._flags(count * width).reshape(count, width)
        weighted = flags.astype(np.int32) << np.arange(width, dtype=np.int32)
        values: Int32Array = weighted.sum(1, dtype=np.int32)
        return values

    def bits(self, count: int) -> trellis.Bits:
        return self._flags(count).astype(np.bool_)

    def array(self, dtype: str, count: int) -> NDArray[np.generic]:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize).tobytes(), dtype=dtype)

    def _flags(self, count: int) -> Bytes:
        packed = self._take(-(-count // 8))
        flags = np.unpackbits(packed, bitorder="little")
        _check(not flags[count:].any(), "something behind the end of a section")
        return flags[:count]

    def _take(self, size: int) -> Bytes:
        _check(size <= self.left, "a section beyond its end")
        self._position += size
        return self._data[self._position - size : self._position]


def _check(right: bool, what: str) -> None:
    if not right:
        raise PackedMismatchError(f"a packed trellis tensor has {what}: refused")


def _width(values: Int32Array) -> int:
    return int(values.max()).bit_length()


def _packed_size(count: int, width: int) -> int:
    return -(-count * width // 8)


def _pack(values: Int32Array, width: int) -> Bytes:
    """Integers from 0 up as `width` bits each, lowest first."""
    bits = values.reshape(-1, 1) >> np.arange(width, dtype=np.int32) & 1
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def _bytes(values: NDArray[np.generic], dtype: str) -> Bytes:
    return np.frombuffer(values.astype(dtype).tobytes(), dtype=np.uint8)
