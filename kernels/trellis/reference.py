"""The `trellis` codec's arithmetic: prediction, trellis-coded quantization, range coding; on any device.

A tensor `[..., C]`, normalised by a power of two as in `kernels.common.tiles`, is a matrix of R rows. Its
low-rank prediction (`kernels.trellis.factors`) is subtracted; what is left is quantized with one step for all
of it by a trellis, and the indices are coded, both by `kernels.trellis.lanes` or on a GPU by
`kernels.trellis.triton.lanes`, with static tables (`kernels.trellis.tables`), chosen by the scales of the
element's row and column (`kernels.trellis.scales`).

One step for the whole tensor gives every element the same noise, which is what least error at given bits asks
for; a massive outlier channel costs bits in its own column alone. Indices too long for their class are
escaped to 26 bits.

Decoded: n * step (rounded to fp32) plus the prediction (rounded to fp32). What belongs to an element is
computed by torch or, on a CPU, by loops (`kernels.trellis.loops.matrices`), one rounding an operation or
exactly, so that every device gives the same bits; what is small enough to be looked at, by numpy on the host.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common import tiles
from kernels.trellis import factors as trellis_factors
from kernels.trellis.factors import Factors, predict
from kernels.trellis.loops import matrices as trellis_matrix_loops
from kernels.trellis.tables import COST_BITS, MAX_CLASS, bits_of_counts, tables

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

# Steps are m * 2**e with 11 significant bits, counted from 2**-9 to 2**15.
STEP_CODES = 24 << 10
_SMALLEST_STEP = -9

# Row and column classes lie at most this far below the largest.
CLASS_BITS = 6
MAX_CLASS_STEP = (1 << CLASS_BITS) - 1
# The same in 16ths of an octave, of which four make a class.
_MAX_SCALE_STEP = 4 * MAX_CLASS_STEP
# The class, in 16ths of an octave, of a mean magnitude of one step: class 12 has a standard deviation of one
# index, which is two steps, and a mean magnitude 0.7979 times that.
_CLASS_OF_MEAN = 4 * 12 + 5 - 16
# Classes below 0, and above the highest, that a sum of scales may give: whatever lies beyond costs the same.
_BEYOND = 1 << 10
# From 2**-16 octaves to 16ths.
_SIXTEENTH = COST_BITS - 4


def step_of(code: int) -> float:
    """The step, in units of the normalised tensor, that a code from 0 to `STEP_CODES` - 1 stands for."""
    return math.ldexp(1024 + code % 1024, code // 1024 - 10 + _SMALLEST_STEP)


def step_logarithm(code: int) -> int:
    """log2 of a step in 2**-16, rounded."""
    whole = (code // 1024 + _SMALLEST_STEP) << COST_BITS
    return whole + (2 << COST_BITS) - _step_bits()[code % 1024]


@cache
def _step_bits() -> list[int]:
    return [int(bits) for bits in bits_of_counts()[1024:2048]]


def sixteenths(code: int) -> int:
    """The logarithm of a code's step in 16ths of an octave, rounded."""
    return (step_logarithm(code) + (1 << _SIXTEENTH >> 1)) >> _SIXTEENTH


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix's rows and columns (`kernels.trellis.scales`), on the host, and what elements
    are expected to cost by them."""

    row: Int32Array
    column: Int32Array

    @staticmethod
    def of(row: Int32Array, column: Int32Array) -> "Scales":
        """The scales, with those too far below the largest raised."""
        return Scales(
            np.maximum(row, row.max() - _MAX_SCALE_STEP), np.maximum(column, column.max() - _MAX_SCALE_STEP)
        )

    def classes(self, code: int) -> tuple[Int32Array, Int32Array]:
        """Row and column classes for a step; an element's is their sum, from 0 to `MAX_CLASS`."""
        offset = np.int32(_CLASS_OF_MEAN - sixteenths(code) + 2)
        return (self.row + offset) >> 2, (self.column + np.int32(2)) >> 2

    def class_bits(self, code: int) -> tuple[int, int]:
        """Bits that row and column classes take, counted from the least."""
        offset = _CLASS_OF_MEAN - sixteenths(code) + 2
        low, high, column_bits = self._bounds
        return (((high + offset) >> 2) - ((low + offset) >> 2)).bit_length(), column_bits

    def cost(self, code: int, family: int) -> float:
        """Bits of all elements by their classes. Between 16ths of an octave they change with the step."""
        exact = step_logarithm(code)
        below = exact >> _SIXTEENTH
        share = (exact - (below << _SIXTEENTH)) / (1 << _SIXTEENTH)
        return self._cost(below, family) * (1 - share) + self._cost(below + 1, family) * share

    def _cost(self, step: int, family: int) -> float:
        """The same for a step given by its logarithm in 16ths."""
        known = self._known.get((step, family))
        if known is None:
            whole, phase = divmod(_CLASS_OF_MEAN - step, 4)
            counts, least = self._counts[phase]
            first = min(max(least + whole + _BEYOND, 0), 2 * _BEYOND)
            known = int(counts @ _mean_costs(family)[first : first + counts.size]) / (1 << COST_BITS)
            self._known[step, family] = known
        return known

    @cached_property
    def _bounds(self) -> tuple[int, int, int]:
        """The least and the largest of the rows' scales, and the bits of columns' classes."""
        low, high = int(self.column.min()), int(self.column.max())
        span = ((high + 2) >> 2) - ((low + 2) >> 2)
        return int(self.row.min()), int(self.row.max()), span.bit_length()

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _counts(self) -> list[tuple[Int64Array, int]]:
        """How many elements have each sum of a row's and a column's class, without looking at them, and the
        least; for each part of a class that a step may add."""
        low = self._bounds[0]
        column = (self.column + np.int32(2)) >> 2
        left = int(column.min())
        columns = np.bincount(column - left)
        rows = np.bincount(self.row - np.int32(low))
        found = []
        for phase in range(4):
            # Four scales to a class, which begins with a multiple of four.
            first, before = divmod(low + phase + 2, 4)
            scales = np.zeros((before + rows.size + 3) // 4 * 4, dtype=np.int64)
            scales[before : before + rows.size] = rows
            counts = np.convolve(scales.reshape(-1, 4).sum(1), columns)
            found.append((counts, first + left))
        return found


@cache
def _mean_costs(family: int) -> Int64Array:
    """What an element costs whose class is the place less `_BEYOND`, before it is clipped to the classes."""
    return np.pad(tables(family).mean_cost, (_BEYOND, 2 * _BEYOND), mode="edge")


def normalised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent of `kernels.common.tiles.tensor_exponent`, on the host, and x over that power of two,
    fp32.

    If x is not finite, the scaled tensor is meaningless.
    """
    if x.device.type == "cpu":
        return trellis_matrix_loops.normalised(x)
    exponent = tiles.tensor_exponent(x).cpu()
    return exponent, tiles.normalised(x, tiles.powers_of_two(-exponent))


def peak(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of fp32 numbers."""
    return trellis_matrix_loops.peak(x) if x.device.type == "cpu" else x.abs().amax()


def classes(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The class of every element, uint8 `[R * C]`, of its row's and its column's, within 2**13 each."""
    row, column = row.short(), column.short()
    if row.device.type == "cpu":
        return trellis_matrix_loops.classes(row, column, MAX_CLASS).view(-1)
    return (row.unsqueeze(1) + column).clamp_(0, MAX_CLASS).to(torch.uint8).view(-1)


def gain(code: int) -> float:
    """The factor that turns elements into 64ths of a step, an fp32 number."""
    return float(np.float32(64) / np.float32(step_of(code)))


def reconstruct(n: torch.Tensor, code: int, factors: Factors | None) -> torch.Tensor:
    """The normalised tensor, fp32 `[E]`. Overwrites n, int32 `[E]`."""
    if n.device.type == "cpu":
        prediction = None if factors is None else trellis_factors.prediction(factors)
        return trellis_matrix_loops.reconstruct(n, step_of(code), prediction)
    values = n.float().mul_(step_of(code))
    if factors is not None:
        values.add_(predict(factors).view(-1))
    return values


def restore(values: torch.Tensor, exponent: int, out: torch.Tensor) -> None:
    """Fill `out` with fp32 `[E]` times 2**exponent, within its dtype's finite range."""
    if out.device.type == "cpu":
        trellis_matrix_loops.restore(values, exponent, out)
        return
    y = tiles.multiply_all(values, tiles.powers_of_two(torch.tensor(exponent, dtype=torch.int32)))
    limit = torch.finfo(out.dtype).max
    out.copy_(y.clamp_(-limit, limit).view(out.shape))
