"""A low-rank prediction of a matrix: what the `trellis` codec subtracts before it quantizes.

Activations and their gradients at a stage's boundary lie near a space of few dimensions, above all early in
training. A matrix `[R, C]` is predicted by 2**(a_r + b_c + e) sum_k u_rk m_k v_ck, all integers, u and v of
few bits, m a multiplier for each k. The sums stay below 2**24, so they are exact in fp32 in any order, with
any matrix multiplication, and so is the scaling by powers of two.

The encoder finds the factors by two rounds of subspace iteration from a fixed start. That is exact, too:
matrices are rounded to integers before they are multiplied, and what is no integer is computed element by
element.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.trellis_scales import OCTAVE, scales

Float32Array = NDArray[np.float32]
Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]
_Float = TypeVar("_Float", np.float32, np.float64)

MAX_RANK = 64
MIN_FACTOR_BITS = 3
MAX_FACTOR_BITS = 6
MAX_MULTIPLIER = 255
# Octaves that rows and columns may differ by.
EXPONENT_BITS = 5
MAX_EXPONENT_STEP = (1 << EXPONENT_BITS) - 1
# Of the whole prediction.
MIN_EXPONENT, MAX_EXPONENT = -64, 64

# A whitened element of mean magnitude, and the largest.
_MEAN = 32
_LARGEST = 255
# Within fp32's integers: 1024 products of a whitened element and a factor.
_CHUNK = 1024
_FACTOR = 63
_PRECISE = 1 << 17


@dataclass(frozen=True, slots=True)
class Factors:
    """A prediction. u: int32 `[R, K]`, v: int32 `[C, K]`, both of `bits` bits with sign, symmetric."""

    bits: int
    u: Int32Array
    v: Int32Array
    multiplier: Int32Array  # [K], 0 to MAX_MULTIPLIER
    row_exponent: Int32Array  # [R], 0 to MAX_EXPONENT_STEP
    column_exponent: Int32Array  # [C]
    exponent: int

    @property
    def rank(self) -> int:
        return self.multiplier.size


def bounded(bits: int, multiplier: Int32Array) -> bool:
    """Whether no sum can leave fp32's integers."""
    limit = (1 << (bits - 1)) - 1
    return int(multiplier.sum()) * limit * limit < 1 << 24


def predict(factors: Factors) -> Float32Array:
    """The prediction, `[R, C]`."""
    scaled = (factors.u * factors.multiplier).astype(np.float64)
    # In fp64, because settings of torch may lower the precision of fp32 products.
    product: Float32Array = _matmul(scaled, factors.v.T.astype(np.float64)).astype(np.float32)
    product *= _powers(factors.row_exponent + np.int32(factors.exponent))[:, None]
    product *= _powers(factors.column_exponent)
    return product


def fit(x: Float32Array, rank: int, bits: int) -> Factors:
    """Factors of rank `rank` for a matrix `[R, C]` below 2**13 in magnitude, not all zero."""
    row, column = scales(x)
    row_exponent, row_base = _exponents(row)
    column_exponent, column_base = _exponents(column)
    exponent = row_base + column_base - 5
    white = x * _powers(-row_exponent - np.int32(exponent))[:, None]
    white *= _powers(-column_exponent)
    np.rint(white, out=white)
    np.clip(white, -_LARGEST, _LARGEST, out=white)

    basis = _signs(x.shape[1], rank)
    for _ in range(2):
        image = _to_integers(_product(white, basis), _FACTOR, _FACTOR / 4)
        whole = _orthogonal(_product(white.T, image))
        basis = _to_integers(whole, _FACTOR, _FACTOR / 4)
    limit = (1 << (bits - 1)) - 1
    v = _to_integers(whole, limit, limit / 3.2)
    energy = (v.astype(np.float64) ** 2).sum(0)
    coefficients = _product(white, v) / np.maximum(energy, 1)
    # A coefficient of mean magnitude takes a quarter of the range.
    spread = np.rint(np.abs(coefficients) * 2.0**16).sum(0) * 2.0**-16 / x.shape[0]
    unit = spread * 4 / limit
    # The multipliers' own unit: the largest takes the top of what the bound allows.
    top = min(MAX_MULTIPLIER, (1 << 24) // (limit * limit * rank) - 1)
    fine = int(np.frexp(unit.max() / top)[1]) if unit.max() > 0 else 0
    multiplier = np.minimum(np.rint(np.ldexp(unit, -fine)), top).astype(np.int32)
    u = np.rint(coefficients / np.ldexp(np.maximum(multiplier, 1).astype(np.float64), fine))
    u = np.where(multiplier > 0, np.clip(u, -limit, limit), 0).astype(np.int32)
    return Factors(bits, u, v.astype(np.int32), multiplier, row_exponent, column_exponent, exponent + fine)


def _powers(exponents: Int32Array) -> Float32Array:
    """2**exponents."""
    found: Float32Array = np.ldexp(np.ones(exponents.shape, dtype=np.float32), exponents)
    return found


def _exponents(scale: Int32Array) -> tuple[Int32Array, int]:
    """Scales in whole octaves above the lowest, and the lowest, at most `MAX_EXPONENT_STEP` below the top."""
    octaves = (scale + OCTAVE // 2) // OCTAVE
    base = max(int(octaves.min()), int(octaves.max()) - MAX_EXPONENT_STEP)
    return np.maximum(octaves - base, 0).astype(np.int32), base


def _signs(rows: int, columns: int) -> Float32Array:
    """A fixed matrix of ones and minus ones without a pattern (a multiplicative hash of the position)."""
    position = np.arange(rows * columns, dtype=np.uint64) + np.uint64(1)
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    bits = (mixed >> np.uint64(63)).astype(np.float32)
    return (2 * bits - 1).reshape(rows, columns)


def _product(a: Float32Array, b: Float32Array) -> Float64Array:
    """a @ b of integers of at most 8 bits, exact: no sum of a chunk leaves fp32's integers."""
    total = np.zeros((a.shape[0], b.shape[1]))
    for start in range(0, a.shape[1], _CHUNK):
        total += _matmul(a[:, start : start + _CHUNK], b[start : start + _CHUNK])
    return total


def _matmul(a: NDArray[_Float], b: NDArray[_Float]) -> NDArray[_Float]:
    """a @ b by torch: numpy's threads are not those that a node limits, and wait for each other busily."""
    product: NDArray[_Float] = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    return product


def _to_integers(x: Float64Array, limit: int, of_mean: float) -> Float32Array:
    """Columns scaled so that their mean magnitude becomes about `of_mean`, rounded and clipped to `limit`."""
    largest = np.abs(x).max(0)
    parts = np.rint(x * np.where(largest > 0, _PRECISE / np.maximum(largest, 1e-300), 0))
    mean = np.abs(parts).sum(0) / x.shape[0]
    scaled = parts * np.where(mean > 0, of_mean / np.maximum(mean, 1e-300), 0)
    found: Float32Array = np.clip(np.rint(scaled), -limit, limit).astype(np.float32)
    return found


def _orthogonal(x: Float64Array) -> Float64Array:
    """Orthogonal columns that span the columns of x; zero where one depends on those before it."""
    largest = np.abs(x).max(0)
    q = np.rint(x * np.where(largest > 0, _PRECISE / np.maximum(largest, 1e-300), 0))
    gram = _matmul(q.T, q)  # integers below 2**53: exact in any order
    # Gram-Schmidt on the columns, with the inner products from the matrix of products.
    for k in range(q.shape[1]):
        pivot = gram[k, k]
        if pivot <= 2.0**-20 * _PRECISE**2:
            q[:, k] = 0
            gram[k] = gram[:, k] = 0
            continue
        share = gram[k, k + 1 :] / pivot
        q[:, k + 1 :] -= q[:, k : k + 1] * share
        gram[k + 1 :, k + 1 :] -= share[:, None] * gram[k, k + 1 :]
    return q
