"""How large a matrix's elements are, by row and by column: the `trellis` codec's estimate of their spread.

A scale is the logarithm of a mean magnitude, an integer in 16ths of an octave. An element's scale is its
row's plus its column's. Sums are of integers and exact in any order, and logarithms are found by comparison
with constants, so that every device finds the same scales.
"""

from decimal import Decimal
from functools import cache

import numpy as np
import torch

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
    if means.device.type == "cpu":
        # Torch's search would wake its threads, which then keep cores busy for a while.
        fractions, exponents = np.frexp(np.maximum(means.numpy(), 2.0**_NOTHING))
        parts = np.searchsorted(thresholds(means.device).numpy(), fractions * 2)
        return torch.from_numpy(((exponents - 1) * OCTAVE + parts).astype(np.int32))
    fraction, exponent = torch.frexp(means.clamp_min(2.0**_NOTHING))
    part = torch.searchsorted(thresholds(means.device), fraction * 2)
    return ((exponent - 1) * OCTAVE + part).int()


def scales(
    x: torch.Tensor, *, by_row: bool = True, by_column: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, int32 `[R]` and `[C]`, of the rows and the columns of fp32 `[R, C]`, below 2**14 in magnitude.

    Rows (or columns) that are not distinguished share one scale.
    """
    if by_row and by_column and x.device.type == "cpu":
        return of_sums(*trellis_left_loops.scales(x, logarithms()))
    return in_turn(x, by_row, by_column)


def in_turn(x: torch.Tensor, by_row: bool, by_column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales`, first of all rows, then of the columns."""
    rows, columns = x.shape
    sums = _row_sums(x)
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
        weight = roots(x.device)[torch.where(part > 0, OCTAVE - part, 0)] * _power_of_two(-down) * _WEIGHTED
        return of_sums(row - _PART_BITS * OCTAVE, _column_sums(x, weight.float()))
    return row - _PART_BITS * OCTAVE, column


def of_sums(row: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows' scales, and the columns' from the sums of their weighted parts, fp64 `[C]`."""
    return row, logarithm(sums / sums.new_full((1,), row.numel() * _WEIGHTED))


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The first of `scales`."""
    sums = _row_sums(x)
    return logarithm(sums / sums.new_full((1,), x.shape[1])) - _PART_BITS * OCTAVE


def _row_sums(x: torch.Tensor) -> torch.Tensor:
    """The sums of each row's magnitudes in parts, fp64 `[R]`."""
    return (
        trellis_matrix_loops.row_sums(x) if x.device.type == "cpu" else parts(x).sum(1, dtype=torch.float64)
    )


def _column_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sums of each column's magnitudes in parts times the rows' weights, fp32 `[R]`, rounded; fp64
    `[C]`."""
    if x.device.type == "cpu":
        return trellis_matrix_loops.column_sums(x, weight)
    return parts(x).mul_(weight.unsqueeze(1)).round_().sum(0, dtype=torch.float64)


def parts(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers, in units of 2**-9."""
    return x.abs().mul_(2.0**_PART_BITS).round_()


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in fp64, from int32."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


@cache
def logarithms() -> Logarithms:
    """The constants of the logarithms, for loops on a CPU."""
    device = torch.device("cpu")
    return Logarithms(
        2.0**_NOTHING,
        thresholds(device).numpy(),
        roots(device).numpy(),
        float(_WEIGHTED),
        _PART_BITS * OCTAVE,
    )


@cache
def roots(device: torch.device) -> torch.Tensor:
    """2**(j / 16) for j from 0 to 15, fp64."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt()
    return torch.tensor([float(root**j) for j in range(OCTAVE)], dtype=torch.float64, device=device)


@cache
def thresholds(device: torch.device) -> torch.Tensor:
    """2**((j + 1/2) / 16) for j from 0 to 15, fp64."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt().sqrt()
    halves = [float(root ** (2 * j + 1)) for j in range(OCTAVE)]
    return torch.tensor(halves, dtype=torch.float64, device=device)
