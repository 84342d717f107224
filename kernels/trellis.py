"""The `trellis` codec's arithmetic: prediction, trellis-coded quantization, range coding. All in numpy.

A tensor `[..., C]`, normalised by a power of two as in `kernels.tiles`, is a matrix of R rows. Its low-rank
prediction (`kernels.trellis_factors`) is subtracted; what is left is quantized with one step for all of it by
a trellis (`kernels.trellis_path`), and the indices are coded (`kernels.trellis_lanes`) with static tables
(`kernels.trellis_tables`), chosen by the scales of the element's row and column (`kernels.trellis_scales`).

One step for the whole tensor gives every element the same noise, which is what least error at given bits asks
for; a massive outlier channel costs bits in its own column alone. Indices too long for their class are
escaped to 32 bits.

Elements fill a grid step by step, so that neighbours in memory are in neighbouring lanes. The search for a
path treats every lane as `CHAINS` lanes one below the other, to have more of them.

Decoded: n * step (rounded to fp32) plus the prediction (rounded to fp32). Every implementation gives the same
bits: see the modules.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels import trellis_lanes, trellis_path
from kernels.trellis_factors import Factors, predict
from kernels.trellis_tables import (
    COST_BITS,
    ESCAPE,
    MAX_CLASS,
    MIDDLE,
    SYMBOLS,
    bits_of_counts,
    reaches,
    split,
    tables,
)

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Bits = NDArray[np.bool_]
_Item = TypeVar("_Item", bound=np.generic)

# A block is coded by itself: as many elements, lanes, and at least this many elements a lane.
_BLOCK = 1 << 20
_LANES = 512
_LANE_ELEMENTS = 1152
CHAINS = 4
_CHAINED_STEPS = 512

# Steps are m * 2**e with 11 significant bits, counted from 2**-9 to 2**15.
STEP_CODES = 24 << 10
_SMALLEST_STEP = -9

# Row and column scales travel in quarters of an octave.
QUARTER = 4
# The class, in 16ths of an octave, of a mean magnitude of one step: class 12 has a standard deviation of one
# index, which is two steps, and a mean magnitude 0.7979 times that.
_CLASS_OF_MEAN = 4 * 12 + 5 - 16


@dataclass(frozen=True, slots=True)
class Grid:
    """How elements lie in blocks of `steps` x `lanes`; the last block is filled up."""

    blocks: int
    steps: int
    lanes: int

    @property
    def chain(self) -> int:
        """Steps after which the trellis starts afresh."""
        return self.steps // CHAINS if self.steps >= _CHAINED_STEPS else self.steps

    @property
    def block_elements(self) -> int:
        return self.steps * self.lanes


@dataclass(frozen=True, slots=True)
class Indices:
    """A quantized tensor, before it is coded; one entry a block."""

    symbols: list[Int32Array]  # [T, N]
    rows: list[Int32Array]  # [T, N], of the tables
    low_bits: list[Bits]  # a plane each, in the order of the elements that have it
    escapes: Int32Array
    cost: int  # of the symbols, in 2**-16 bits


@dataclass(frozen=True, slots=True)
class Block:
    states: Int32Array
    words: NDArray[np.uint16]


def grid(elements: int) -> Grid:
    """The grid of a tensor of so many elements."""
    blocks = -(-elements // _BLOCK)
    each = -(-elements // blocks)
    lanes = min(_LANES, max(1, each // _LANE_ELEMENTS))
    steps = -(-each // lanes)
    return Grid(blocks, -(-steps // CHAINS) * CHAINS if steps >= _CHAINED_STEPS else steps, lanes)


def step_of(code: int) -> np.float32:
    """The step, in units of the normalised tensor, that a code from 0 to `STEP_CODES` - 1 stands for."""
    return np.float32(math.ldexp(1024 + code % 1024, code // 1024 - 10 + _SMALLEST_STEP))


def step_logarithm(code: int) -> int:
    """log2 of a step in 2**-16, rounded."""
    whole = (code // 1024 + _SMALLEST_STEP) << COST_BITS
    return whole + (2 << COST_BITS) - int(bits_of_counts()[1024 + code % 1024])


def class_offset(step: int) -> int:
    """What a step (its logarithm in 16ths of an octave) adds to its elements' scales to make them classes."""
    return _CLASS_OF_MEAN - step


def quarters(scale: Int32Array, offset: int, limit: int) -> Int32Array:
    """Scales in 16ths of an octave, plus an offset, in quarters; at most `limit` below the largest."""
    rounded = (scale + np.int32(offset + 2)) >> 2
    found: Int32Array = np.maximum(rounded, rounded.max() - np.int32(limit))
    return found


def classes(row: Int32Array, column: Int32Array) -> Int32Array:
    """The class of every element, `[R * C]`."""
    number: Int32Array = np.clip(row[:, None] + column, 0, MAX_CLASS)
    return number.reshape(-1)


def class_counts(row: Int32Array, column: Int32Array) -> Int64Array:
    """How many elements have each class, without looking at them."""
    counts = np.convolve(np.bincount(row - row.min()), np.bincount(column - column.min()))
    number = np.clip(np.arange(counts.size) + int(row.min() + column.min()), 0, MAX_CLASS)
    found = np.zeros(MAX_CLASS + 1, dtype=np.int64)
    np.add.at(found, number, counts)
    return found


def sampled_cost(residual: Float32Array, number: Int32Array, step: np.float32, family: int) -> int:
    """About what elements cost, in 2**-16 bits: as `quantize` would say, without searching for a path."""
    table, shift = split(number)
    index = np.rint(residual.ravel() / (np.float32(2) * step)).astype(np.int32) >> shift
    reached = np.abs(index) < reaches()[table]
    symbols = np.where(reached, index + MIDDLE, ESCAPE)
    cost = tables(family).cost.ravel().take(2 * table * SYMBOLS + symbols)
    return int(cost.sum(dtype=np.int64)) + (int(shift.sum(dtype=np.int64)) << COST_BITS)


def quantize(
    residual: Float32Array, number: Int32Array, step: np.float32, where: Grid, family: int
) -> Indices:
    """Indices of a residual `[E]` whose elements have the classes `number`, `[E]`."""
    chosen = tables(family)
    symbols: list[Int32Array] = []
    rows: list[Int32Array] = []
    escapes: list[Int32Array] = []
    planes: list[list[Bits]] = []
    cost = 0
    gain = np.float32(1 << trellis_path.FRACTION_BITS) / step
    for block, part in _parts(number, where):
        values = np.zeros(where.block_elements, dtype=np.int32)
        elements = residual[block]
        values[: elements.size] = np.rint(elements * gain)
        escaped: Bits | None = np.abs(values) > _limits().take(part)
        if escaped is not None and not escaped.any():
            escaped = None
        n, quantizer = trellis_path.choose(
            _chained(values, where), None if escaped is None else _chained(escaped, where)
        )
        n, quantizer = _unchained(n, where), _unchained(quantizer, where)
        table, shift = _table_and_shift(part)
        index = (n - quantizer) >> 1
        if escaped is not None:
            escapes.append(n[escaped])
            index[escaped] = 0
        planes.append([])
        if shift is not None:
            planes[-1] = [(index[shift > bit] >> bit & 1).astype(np.bool_) for bit in range(shift.max())]
            index >>= shift
        index += MIDDLE
        if escaped is not None:
            index[escaped] = ESCAPE
        row = 2 * table + quantizer
        cost += int(chosen.cost.ravel().take(row * np.int32(SYMBOLS) + index).sum(dtype=np.int64))
        symbols.append(index.reshape(where.steps, where.lanes))
        rows.append(row.reshape(where.steps, where.lanes))
    return Indices(
        symbols,
        rows,
        [plane for of_block in planes for plane in of_block],
        np.concatenate(escapes) if escapes else np.zeros(0, dtype=np.int32),
        cost,
    )


def code(indices: Indices, family: int) -> list[Block]:
    """Code every block."""
    chosen = tables(family)
    pairs = zip(indices.symbols, indices.rows, strict=True)
    return [Block(*trellis_lanes.encode(symbols, rows, chosen)) for symbols, rows in pairs]


def plane_sizes(number: Int32Array, where: Grid) -> list[int]:
    """Elements in each plane of low bits, block by block."""
    sizes: list[int] = []
    for _, part in _parts(number, where):
        _, shift = _table_and_shift(part)
        if shift is not None:
            counts = np.bincount(shift)
            sizes += [int(counts[bit + 1 :].sum()) for bit in range(counts.size - 1)]
    return sizes


def decode(
    blocks: list[Block],
    number: Int32Array,
    low_bits: list[Bits],
    escapes: Int32Array,
    where: Grid,
    family: int,
) -> Int32Array:
    """The multiples n of a step, `[E]`. `kernels.trellis_lanes.StreamError` for what no encoder makes."""
    out = np.empty(number.size, dtype=np.int32)
    chosen = tables(family)
    planes = iter(low_bits)
    used = 0
    for (block, part), coded in zip(_parts(number, where), blocks, strict=True):
        table, shift = _table_and_shift(part)
        low, marked = None, None
        if shift is not None:
            low = np.zeros(where.block_elements, dtype=np.int32)
            for bit in range(int(shift.max())):
                low[shift > bit] |= next(planes).astype(np.int32) << bit
            marked = np.where(shift > 0, low, -1).reshape(where.steps, where.lanes)
        symbols, quantizer = trellis_lanes.decode(
            coded.states,
            coded.words,
            table.reshape(where.steps, where.lanes),
            marked,
            chosen,
            where.chain,
        )
        n = symbols.reshape(-1)
        escaped = (n == ESCAPE).nonzero()[0]
        n -= MIDDLE
        if shift is not None and low is not None:
            n <<= shift
            n += low
        n <<= 1
        n += quantizer.reshape(-1)
        if escaped.size:
            taken = escapes[used : used + escaped.size]
            if taken.size < escaped.size:
                raise trellis_lanes.StreamError("fewer escaped elements than their marks")
            n[escaped] = taken
            used += escaped.size
        out[block] = n[: out[block].size]
    if used != escapes.size:
        raise trellis_lanes.StreamError("more escaped elements than their marks")
    return out


def reconstruct(n: Int32Array, step: np.float32, factors: Factors | None) -> Float32Array:
    """The normalised tensor, `[E]`."""
    values = n.astype(np.float32)
    values *= step
    if factors is not None:
        values += predict(factors).reshape(-1)
    return values


def _parts(number: Int32Array, where: Grid) -> list[tuple[slice, Int32Array]]:
    """Each block's range of elements, and their classes filled up to the grid with class 0."""
    size = where.block_elements
    found = []
    for index in range(where.blocks):
        block = slice(index * size, (index + 1) * size)
        part = number[block]
        if part.size < size:
            part = np.concatenate((part, np.zeros(size - part.size, dtype=np.int32)))
        found.append((block, part))
    return found


def _table_and_shift(part: Int32Array) -> tuple[Int32Array, Int32Array | None]:
    """As `split`; None if no element has a shift."""
    table, shift = _split_of_class()
    shifts = shift.take(part)
    return (table.take(part), shifts) if shifts.any() else (part, None)


@cache
def _split_of_class() -> tuple[Int32Array, Int32Array]:
    return split(np.arange(MAX_CLASS + 1, dtype=np.int32))


@cache
def _limits() -> Int32Array:
    """The largest value, in 64ths of a step, that a class codes on any path."""
    table, shift = _split_of_class()
    largest = ((reaches()[table].astype(np.int64) << shift) * 2 - 4) << trellis_path.FRACTION_BITS
    found: Int32Array = np.minimum(largest, (1 << 31) - 1).astype(np.int32)
    return found


def _chained(x: NDArray[_Item], where: Grid) -> NDArray[_Item]:
    """A block with its lanes cut into chains, side by side: `[chain, chains]`."""
    cut = x.reshape(-1, where.chain, where.lanes).swapaxes(0, 1)
    return cut.reshape(where.chain, -1)


def _unchained(x: NDArray[_Item], where: Grid) -> NDArray[_Item]:
    """Inverse of `_chained`, flat."""
    return x.reshape(where.chain, -1, where.lanes).swapaxes(0, 1).reshape(-1)
