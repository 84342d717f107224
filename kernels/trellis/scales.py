"""How large a matrix's elements are, by row and by column: the `trellis` codec's estimate of their spread.

A scale is the logarithm of a mean magnitude, an integer in 16ths of an octave. An element's scale is its
row's plus its column's. Sums are of integers and exact in any order, and logarithms are found by comparison
with constants, so that every device finds the same scales.
"""

from decimal import Decimal
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.trellis.loops import matrices as trellis_matrix_loops
from kernels.trellis.loops import residuals as trellis_left_loops
from kernels.trellis.loops.residuals import Logarithms

OCTAVE = 16
# Elements are counted in units of 2**-9. Normalised ones lie below 2**14, so the integers are exact in fp32.
_PART_BITS = 9
# The weighted size, in units, of an element that has its row's mean magnitude.
_WEIGHTED = 1 << 16
# The logarithm of a mean of zero.
_NOTHING = -20


def logarithm(means: torch.Tensor) -> torch.Tensor:
    """log2 of positive numbers (fp64 `[n]`) in 16ths, rounded, int32; zero counts as 2**-20."""
    # Torch's search would wake its threads, which then keep cores busy for a while.
    fractions, exponents = np.frexp(np.maximum(means.numpy(), 2.0**_NOTHING))
    parts = np.searchsorted(thresholds(), fractions * 2)
    return torch.from_numpy(((exponents - 1) * OCTAVE + parts).astype(np.int32))


def scales(
    x: torch.Tensor, *, by_row: bool = True, by_column: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, int32 `[R]` and `[C]`, of the rows and the columns of fp32 `[R, C]`, below 2**14 in magnitude.

    Rows (or columns) that are not distinguished share one scale.
    """
    if by_row and by_column:
        return of_sums(*trellis_left_loops.scales(x, logarithms()))
    return in_turn(x, by_row, by_column)


def in_turn(x: torch.Tensor, by_row: bool, by_column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales`, first of all rows, then of the columns."""
    rows, columns = x.shape
    sums = trellis_matrix_loops.row_sums(x)
    if by_row:
        row = logarithm(sums / sums.new_full((1,), columns))
    else:
        row = logarithm(sums.sum().view(1) / sums.new_full((1,), rows * columns)).expand(rows)
    column = row.new_zeros(columns)
    if by_column:
        octave = torch.div(row, OCTAVE, rounding_mode="floor")
        part = row - octave * OCTAVE
        # 2**(-row / 16): the power of two below, times a root of two.
        down = octave + (part > 0)
        root = torch.from_numpy(roots())[torch.where(part > 0, OCTAVE - part, 0)]
        weight = root * _power_of_two(-down) * _WEIGHTED
        return of_sums(row - _PART_BITS * OCTAVE, trellis_matrix_loops.column_sums(x, weight.float()))
    return row - _PART_BITS * OCTAVE, column


def of_sums(row: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' scales, and the columns' from the sums of their weighted parts, fp64 `[C]`."""
    return row, logarithm(sums / sums.new_full((1,), row.numel() * _WEIGHTED))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in fp64, from int32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


@cache
def logarithms() -> Logarithms:
    return Logarithms(2.0**_NOTHING, thresholds(), roots(), float(_WEIGHTED), _PART_BITS * OCTAVE)


@cache
def roots() -> NDArray[np.float64]:
    """2**(j / 16) for j from 0 to 15."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt()
    return np.array([float(root**j) for j in range(OCTAVE)])


@cache
def thresholds() -> NDArray[np.float64]:
    """2**((j + 1/2) / 16) for j from 0 to 15."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt().sqrt()
    return np.array([float(root ** (2 * j + 1)) for j in range(OCTAVE)])
