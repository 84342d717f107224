"""The residual of a prediction, and its row and column scales, for the `trellis` codec on a CPU.

`kernels.trellis.factors` and `kernels.trellis.scales` compute the same with torch; here one loop over the
rows does it.

A row's scale, and so its weight in the columns' sums, depends on the row alone. So no row is read again after
it has left the caches, and a sample's residual is not stored.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import compiled, exact, float_of, inlined, run
from kernels.trellis.loops.matrices import (
    PART,
    PRODUCTS,
    ROWS,
    Prediction,
    blocks,
    operands,
    ranges,
    subtract,
    sum_of_parts,
)
from kernels.trellis.loops.spaces import across, factor, multiply, whiten

Float64Array = NDArray[np.float64]

_FRACTION_BITS = np.int64(52)
_FRACTION = np.int64((1 << 52) - 1)
_BIAS = np.int64(1023)
_MAGNITUDE = np.int32(0x7FFFFFFF)


class Logarithms(NamedTuple):
    """Constants of the scales (`kernels.trellis.scales`)."""

    least: float
    """Lower limit of means."""
    thresholds: Float64Array
    """The fractions, from 1 to 2, at which the logarithm in 16ths changes."""
    roots: Float64Array
    """2**(j / 16)."""
    weighted: float
    """Weighted mean magnitude of every row."""
    lower: int
    """Subtracted from a row's logarithm, because its elements are counted in parts."""


class Fit(NamedTuple):
    """Constants to whiten rows, find their coefficients and predict them (`kernels.trellis.factors`)."""

    row_base: int
    """The octave of row exponent 0."""
    most_exponent: int
    white_bits: int
    """A whitened row is the row times 2**(white_bits - its exponent) and `white_columns`, rounded and
    clipped."""
    white_columns: NDArray[np.float32]
    """`[C]`. Factors of the columns in a whitened row."""
    white_limit: np.float32
    """The largest magnitude in a whitened row."""
    energy: Float64Array
    """`[K]`. A coefficient is the product with a direction over `energy` and `unit`, rounded and clipped."""
    unit: Float64Array
    """`[K]`. The step of each coefficient."""
    limit: float
    """The largest magnitude of a coefficient."""
    used: NDArray[np.bool_]
    """`[K]`. Whether a direction is used; the coefficients of others are zero."""
    multiplier: NDArray[np.float32]
    """`[K]`, the dimensions' multipliers in the prediction."""
    exponent: int
    """A row's prediction is scaled by 2**(exponent + its own exponent) and by `columns`."""
    columns: NDArray[np.float32]
    """`[C]`. Factors of the columns in a prediction."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Factors of all rows, and the residual."""

    u: torch.Tensor  # int8 [R, K]
    row_exponent: torch.Tensor  # int32 [R]
    left: torch.Tensor  # fp32 [R, C]
    row: torch.Tensor  # int32 [R]
    column_sums: torch.Tensor  # fp64 [C]
    peak: torch.Tensor  # fp32 []


@inlined
def _logarithm(mean, logarithms):
    bits = np.float64(max(mean, logarithms.least)).view(np.int64)
    fraction = np.int64(bits & _FRACTION | _BIAS << _FRACTION_BITS).view(np.float64)
    part = 0
    for threshold in logarithms.thresholds:
        part += fraction > threshold
    return ((bits >> _FRACTION_BITS) - _BIAS) * logarithms.roots.size + part


@inlined
def _weight(row, logarithms):
    """2**(-row / 16) as a power of two times a root of two."""
    count = logarithms.roots.size
    octave = row // count
    part = row - octave * count
    power = np.int64(_BIAS - octave - (part > 0) << _FRACTION_BITS).view(np.float64)
    return np.float32(logarithms.roots[count - part if part > 0 else 0] * power * logarithms.weighted)


@exact
def _add_parts(a, b, by_a, by_b, sums):
    """Add two rows' weighted parts to the columns' sums."""
    for c in range(sums.size):
        one = np.rint(np.rint(np.abs(a[c]) * PART) * by_a)
        sums[c] += np.float64(one) + np.float64(np.rint(np.rint(np.abs(b[c]) * PART) * by_b))


@compiled
def _tell(x, logarithms, row, sums):
    """The scales of some rows; adds their parts to the columns' sums."""
    before, weight_before = 0, np.float32(0)
    for r in range(x.shape[0]):
        own = _logarithm(sum_of_parts(x[r]) / x.shape[1], logarithms)
        row[r] = own - logarithms.lower
        weight = _weight(own, logarithms)
        if r & 1:
            _add_parts(x[before], x[r], weight_before, weight, sums)
        elif r + 1 == x.shape[0]:
            _add_parts(x[r], x[r], weight, np.float32(0), sums)
        before, weight_before = r, weight


@compiled
def _tell_all(x, logarithms, first, last, row, sums):
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        _tell(x[start:stop], logarithms, row[start:stop], sums)


@compiled
def _tell_left(x, u, v, row_power, column_power, logarithms, first, last, row, sums):
    left = np.empty((ROWS, x.shape[1]), dtype=np.float32)
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        some = left[: stop - start]
        subtract(x[start:stop], u[start:stop], v, row_power[start:stop], column_power, some)
        _tell(some, logarithms, row[start:stop], sums)


@inlined
def _power(exponent):
    return float_of((np.int32(exponent) + 127) << 23)


@compiled
def _peak(x):
    largest = np.int32(0)
    for r in range(x.shape[0]):
        bits = x[r].view(np.int32)
        for c in range(bits.size):
            largest = max(largest, np.int32(bits[c] & _MAGNITUDE))
    return largest


@compiled
def _fit(x, fit, v, near, logarithms, first, last, found, sums):
    """Fill `found` for the rows from `first` to `last`, and add to the columns' sums. Returns the bits of the
    residual's largest magnitude."""
    u, row_exponent, left, row = found
    rank, depth, count = u.shape[1], v.shape[0], logarithms.roots.size
    white = np.empty((ROWS, x.shape[1]), dtype=np.float32)
    products = np.empty((ROWS, rank), dtype=np.float64)
    factors = np.zeros((ROWS, depth), dtype=np.float32)
    power = np.empty(ROWS, dtype=np.float32)
    largest = np.int32(0)
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        size = stop - start
        for r in range(size):
            own = _logarithm(sum_of_parts(x[start + r]) / x.shape[1], logarithms) - logarithms.lower
            octave = (own + count // 2) // count
            exponent = min(max(octave - fit.row_base, 0), fit.most_exponent)
            row_exponent[start + r] = exponent
            power[r] = _power(exponent + fit.exponent)
            by = _power(fit.white_bits - exponent)
            whiten(x[start + r], by, fit.white_columns, fit.white_limit, white[r])
        multiply(white[:size], v, products)
        for r in range(size):
            for k in range(rank):
                value = factor(products[r, k], fit.energy[k], fit.unit[k], fit.limit) if fit.used[k] else 0.0
                u[start + r, k] = np.int8(value)
                factors[r, k] = np.float32(value) * fit.multiplier[k]
        some = left[start:stop]
        subtract(x[start:stop], factors[:size], near, power, fit.columns, some)
        _tell(some, logarithms, row[start:stop], sums)
        largest = max(largest, _peak(some))
    return largest


def scales(x: torch.Tensor, logarithms: Logarithms) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of the rows of fp32 `[R, C]`, int32 `[R]`, and the sums of its columns, fp64 `[C]`."""
    values = x.contiguous().numpy()
    row, column_sums = np.empty(len(values), dtype=np.int32), _Sums(values.shape[1])
    run(
        lambda first, last: _tell_all(values, logarithms, first, last, row, column_sums.next()),
        ranges(*x.shape),
    )
    return torch.from_numpy(row), column_sums.total()


def left_scales(
    x: torch.Tensor, prediction: Prediction, logarithms: Logarithms
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `scales`, of the residual of x after a prediction."""
    values, factors = x.contiguous().numpy(), operands(prediction)
    row, column_sums = np.empty(len(values), dtype=np.int32), _Sums(values.shape[1])
    run(
        lambda first, last: _tell_left(values, *factors, logarithms, first, last, row, column_sums.next()),
        ranges(len(values), values.shape[1], PRODUCTS),
    )
    return torch.from_numpy(row), column_sums.total()


def fitted(x: torch.Tensor, fit: Fit, v: torch.Tensor, logarithms: Logarithms) -> Fitted:
    """Factors for the rows of fp32 `[R, C]` along the directions v, integers in fp64 `[C, K]`."""
    values, (rows, columns) = x.contiguous().numpy(), x.shape
    directions, near = across(v), blocks(v)
    u, row_exponent = np.empty((rows, v.shape[1]), dtype=np.int8), np.empty(rows, dtype=np.int32)
    left, row = np.empty_like(values), np.empty(rows, dtype=np.int32)
    sums, peaks = _Sums(columns), []

    def work(first: int, last: int) -> None:
        outputs = u, row_exponent, left, row
        peaks.append(_fit(values, fit, directions, near, logarithms, first, last, outputs, sums.next()))

    run(work, ranges(rows, columns, 2 * PRODUCTS))
    peak = np.int32(max(peaks)).view(np.float32)
    return Fitted(
        torch.from_numpy(u),
        torch.from_numpy(row_exponent),
        torch.from_numpy(left),
        torch.from_numpy(row),
        sums.total(),
        torch.tensor(peak),
    )


class _Sums:
    """Column sums, one buffer for each range."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._parts: list[Float64Array] = []

    def next(self) -> Float64Array:
        self._parts.append(np.zeros(self._columns))
        return self._parts[-1]

    def total(self) -> torch.Tensor:
        return torch.from_numpy(np.sum(self._parts, axis=0))
