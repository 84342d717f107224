"""The `trellis` codec's arithmetic: prediction, trellis-coded quantization, range coding; on a CPU.

A tensor `[..., C]`, normalised by a power of two as in `kernels.common.tiles`, is a matrix of R rows. Its
low-rank prediction (`kernels.trellis.factors`) is subtracted. A trellis quantizes the residual with one step,
and a range coder codes the indices (`kernels.trellis.lanes`, on a GPU `kernels.trellis.triton.lanes`). The
coder's tables are static (`kernels.trellis.tables`); the scales of an element's row and column choose its
table (`kernels.trellis.scales`).

One step for the whole tensor gives every element the same noise, which minimizes the error at a given number
of bits; an outlier channel costs bits in its own column only. Indices too long for their class are escaped to
26 bits.

The decoded value is n * step (rounded to fp32) plus the prediction (rounded to fp32), minus the dither of
`kernels.trellis.loops.dither`, if there is one, times step (both rounded). Loops compute what is done per
element (`kernels.trellis.loops`), exactly or with one rounding per operation, and `kernels.trellis.triton`
has the same bits. Numpy computes the rest. Tensors on a GPU without these kernels are packed here, too.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.trellis.factors import Factors, prediction
from kernels.trellis.loops import dither
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
# The class of a mean magnitude of one step, in 16ths of an octave: class 12 has a standard deviation of one
# index (two steps) and a mean magnitude 0.7979 times that.
_CLASS_OF_MEAN = 4 * 12 + 5 - 16
# Padding for sums of scales below class 0 and above the highest; they cost as much as the nearest class.
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
    """The scales of a matrix's rows and columns (`kernels.trellis.scales`) on the host, and the elements'
    expected bits."""

    row: Int32Array
    column: Int32Array

    @staticmethod
    def of(row: Int32Array, column: Int32Array) -> "Scales":
        """Raise scales that are too far below the largest."""
        return Scales(
            np.maximum(row, row.max() - _MAX_SCALE_STEP), np.maximum(column, column.max() - _MAX_SCALE_STEP)
        )

    def classes(self, code: int) -> tuple[Int32Array, Int32Array]:
        """Row and column classes for a step; an element's is their sum, from 0 to `MAX_CLASS`."""
        offset = np.int32(_CLASS_OF_MEAN - sixteenths(code) + 2)
        return (self.row + offset) >> 2, (self.column + np.int32(2)) >> 2

    def class_bits(self, code: int) -> tuple[int, int]:
        """Bits of a row class and of a column class, counted from the smallest."""
        offset = _CLASS_OF_MEAN - sixteenths(code) + 2
        low, high, column_bits = self._bounds
        return (((high + offset) >> 2) - ((low + offset) >> 2)).bit_length(), column_bits

    def cost(self, code: int, family: int) -> float:
        """Expected bits of all elements, interpolated between steps a 16th of an octave apart."""
        exact = step_logarithm(code)
        below = exact >> _SIXTEENTH
        share = (exact - (below << _SIXTEENTH)) / (1 << _SIXTEENTH)
        return self._cost(below, family) * (1 - share) + self._cost(below + 1, family) * share

    def _cost(self, step: int, family: int) -> float:
        """Expected bits for a step given by its logarithm in 16ths of an octave."""
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
        """The smallest and the largest scale of a row, and the bits of a column class."""
        low, high = int(self.column.min()), int(self.column.max())
        span = ((high + 2) >> 2) - ((low + 2) >> 2)
        return int(self.row.min()), int(self.row.max()), span.bit_length()

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _counts(self) -> list[tuple[Int64Array, int]]:
        """Histograms of the sums of row and column class, each with the smallest sum.

        There is one for each of the four offsets within a class that a step can have. A convolution computes
        it without reading the elements.
        """
        low = self._bounds[0]
        column = (self.column + np.int32(2)) >> 2
        left = int(column.min())
        columns = np.bincount(column - left)
        rows = np.bincount(self.row - np.int32(low))
        histograms = []
        for phase in range(4):
            # Four scales form a class, which begins at a multiple of four.
            first, before = divmod(low + phase + 2, 4)
            scales = np.zeros((before + rows.size + 3) // 4 * 4, dtype=np.int64)
            scales[before : before + rows.size] = rows
            counts = np.convolve(scales.reshape(-1, 4).sum(1), columns)
            histograms.append((counts, first + left))
        return histograms


@cache
def _mean_costs(family: int) -> Int64Array:
    """Mean bits of an element by class, padded by `_BEYOND` classes below and twice as many above."""
    return np.pad(tables(family).mean_cost, (_BEYOND, 2 * _BEYOND), mode="edge")


def classes(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """The class of every element, uint8 `[R * C]`: its row's plus its column's, each below 2**13."""
    return trellis_matrix_loops.classes(row.short(), column.short(), MAX_CLASS).view(-1)


def gain(code: int) -> float:
    """The fp32 factor that turns elements into 64ths of a step."""
    return float(np.float32(64) / np.float32(step_of(code)))


def reconstruct(n: torch.Tensor, code: int, factors: Factors | None, salt: int | None = None) -> torch.Tensor:
    """The normalised tensor, fp32 `[E]`. Overwrites n, int32 `[E]`."""
    predicted = None if factors is None else prediction(factors)
    values = trellis_matrix_loops.reconstruct(n, step_of(code), predicted)
    return values if salt is None else dither.subtract(values, step_of(code), salt)
