"""How large a matrix's elements are, by row and by column: what the `trellis` codec takes for their spread.

A scale is the logarithm of a mean magnitude, an integer in 16ths of an octave; an element's is its row's plus
its column's. Sums are of integers, exact in any order, and logarithms compare with constants, so that every
implementation finds the same scales.
"""

from decimal import Decimal
from functools import cache

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]

OCTAVE = 16
# Elements count in these parts; normalised ones lie below 2**14, so that the integers are exact in fp32.
_PART_BITS = 9
# Parts of an element that has its row's mean magnitude.
_WEIGHTED = 1 << 16
# The logarithm of a mean of zero.
_NOTHING = -20


def logarithm(means: Float64Array) -> Int32Array:
    """log2 of positive numbers in 16ths, rounded to the nearest; zero counts as 2**-20."""
    fraction, exponent = np.frexp(np.maximum(means, 2.0**_NOTHING))
    return ((exponent - 1) * OCTAVE + np.searchsorted(_thresholds(), 2 * fraction)).astype(np.int32)


def scales(x: Float32Array, *, by_row: bool = True, by_column: bool = True) -> tuple[Int32Array, Int32Array]:
    """Scales of the rows and the columns of a matrix `[R, C]`, below 2**14 in magnitude.

    Rows or columns that are not told apart all get one scale.
    """
    rows, columns = x.shape
    magnitude = np.abs(x)
    magnitude *= np.float32(2.0**_PART_BITS)
    np.rint(magnitude, out=magnitude)
    sums = magnitude.sum(1, dtype=np.float64)
    row = logarithm(sums / columns if by_row else np.full(rows, sums.sum() / x.size))
    column = np.zeros(columns, dtype=np.int32)
    if by_column:
        weight = np.ldexp(_roots()[-row % OCTAVE], -(row // OCTAVE) - (row % OCTAVE > 0)) * _WEIGHTED
        magnitude *= weight[:, None].astype(np.float32)
        np.rint(magnitude, out=magnitude)
        column = logarithm(magnitude.sum(0, dtype=np.float64) / (rows * _WEIGHTED))
    return row - _PART_BITS * OCTAVE, column


@cache
def _roots() -> Float64Array:
    """2**(j / 16)."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt()
    return np.array([float(root**j) for j in range(OCTAVE)])


@cache
def _thresholds() -> Float64Array:
    """2**((j + 1/2) / 16)."""
    root = Decimal(2).sqrt().sqrt().sqrt().sqrt().sqrt()
    return np.array([float(root ** (2 * j + 1)) for j in range(OCTAVE)])
