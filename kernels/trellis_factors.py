"""A low-rank prediction of a matrix: what the `trellis` codec subtracts before it quantizes.

Activations and their gradients at a stage's boundary lie near a space of few dimensions, above all early in
training. A matrix `[R, C]` is predicted by 2**(a_r + b_c + e) sum_k u_rk m_k v_ck, all integers, u and v of
few bits, m a multiplier for each k. The sums stay below 2**24, so they are exact in fp32 in any order, with
any matrix multiplication, and so is the scaling by powers of two.

The encoder finds a space (`Space`) by two rounds of subspace iteration from a fixed start, on a sample of
the rows, and then every row's coefficients in it. That is exact, too: matrices are rounded to integers before
they are multiplied in fp64, and what is no integer is computed element by element, or in numpy for the few
numbers that belong to a dimension. So every device finds the same factors.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import trellis_matrix_loops, trellis_space_loops
from kernels.trellis_matrix_loops import Prediction
from kernels.trellis_scales import OCTAVE, row_scales, scales

Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]

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
_MEAN_BITS = 5
_LARGEST = 255
_FACTOR = 63
_PRECISE = 1 << 17
# Of the numbers that make columns orthogonal. With 17 bits of a column and 6 of a rank, below fp64's 53.
_TURN = 1 << 20
_LARGEST_TURN = 1 << 29
# Elements that are widened to fp64 at once.
_AT_ONCE = 1 << 25


@dataclass(frozen=True, slots=True)
class Factors:
    """A prediction, on the device of what it predicts. u: int8 `[R, K]`, v: int8 `[C, K]`, both of `bits`
    bits with sign, symmetric."""

    bits: int
    u: torch.Tensor
    v: torch.Tensor
    multiplier: torch.Tensor  # [K], int32, 0 to MAX_MULTIPLIER
    row_exponent: torch.Tensor  # [R], int32, 0 to MAX_EXPONENT_STEP
    column_exponent: torch.Tensor  # [C]
    exponent: int

    @property
    def tops(self) -> torch.Tensor:
        """The largest row and column exponents and the sum of the multipliers, int32 `[3]`."""
        return torch.stack(
            (self.row_exponent.amax(), self.column_exponent.amax(), self.multiplier.sum(dtype=torch.int32))
        )

    @property
    def rank(self) -> int:
        return self.multiplier.numel()


@dataclass(frozen=True, slots=True)
class Space:
    """What a sample of a matrix's rows says of all of them."""

    v: torch.Tensor  # [C, K], fp64 of integers
    energy: torch.Tensor  # [K], of v's columns
    bits: int
    multiplier: Int32Array
    fine: int
    row_base: int
    column_exponent: torch.Tensor
    column_base: int


def most_multipliers(bits: int) -> int:
    """What multipliers may add up to, so that no sum can leave fp32's integers."""
    limit = (1 << (bits - 1)) - 1
    return ((1 << 24) - 1) // (limit * limit)


def predict(factors: Factors) -> torch.Tensor:
    """The prediction, fp32 `[R, C]`."""
    _, _, v, row_power, column_power = prediction(factors)
    u = factors.u.int() * factors.multiplier
    rows, columns = len(u), len(v)
    product = torch.empty(rows, columns, dtype=torch.float32, device=u.device)
    right = v.double().T
    step = max(1, _AT_ONCE // columns)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        # In fp64, because settings of torch may lower the precision of fp32 products.
        product[some] = u[some].double() @ right
    product.mul_(row_power.unsqueeze(1))
    return product.mul_(column_power)


def prediction(factors: Factors) -> Prediction:
    """The prediction, not yet computed."""
    return Prediction(
        factors.u,
        factors.multiplier,
        factors.v,
        _powers(factors.row_exponent + factors.exponent),
        _powers(factors.column_exponent),
    )


def residual(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    """What fp32 `[R, C]` is beside its prediction."""
    if x.device.type == "cpu":
        return trellis_matrix_loops.subtract(x, prediction(factors))
    return x - predict(factors)


def spaces(sample: torch.Tensor, rank: int, kinds: list[tuple[int, int]]) -> list[Space]:
    """A space of each of `kinds`, (rank at most `rank`, bits), for rows like those of fp32 `[S, C]`.

    The sample's elements lie below 2**13 in magnitude.
    """
    row, column = scales(sample)
    row_exponent, row_base = _exponents(row)
    column_exponent, column_base = _exponents(column)
    white = _whitened(sample, row_exponent, column_exponent, row_base + column_base)
    basis = signs(sample.shape[1], rank, sample.device)
    for _ in range(2):
        image = _to_integers(_product(white, basis), _FACTOR, _FACTOR / 4)
        whole = _orthogonal(_turned_product(white, image))
        basis = _to_integers(whole, _FACTOR, _FACTOR / 4)
    vs, energies, spreads = [], [], []
    for dimensions, bits in kinds:
        limit = (1 << (bits - 1)) - 1
        v = _to_integers(whole[:, :dimensions], limit, limit / 3.2)
        energy = (v * v).sum(0).clamp_min(1)
        vs.append(v)
        energies.append(energy)
        spreads.append((_product(white, v) / energy).abs().mul_(2.0**16).round_().sum(0))
    found = []
    all_spreads = torch.cat(spreads).cpu().numpy()
    for (dimensions, bits), v, energy in zip(kinds, vs, energies, strict=True):
        spread, all_spreads = all_spreads[:dimensions], all_spreads[dimensions:]
        multiplier, fine = _multipliers(spread * 2.0**-16 / sample.shape[0], bits)
        found.append(Space(v, energy, bits, multiplier, fine, row_base, column_exponent, column_base))
    return found


def fit(x: torch.Tensor, space: Space) -> Factors:
    """Factors in a space for all rows of a matrix `[R, C]`."""
    octaves = torch.div(row_scales(x) + OCTAVE // 2, OCTAVE, rounding_mode="floor")
    row_exponent = (octaves - space.row_base).clamp(0, MAX_EXPONENT_STEP)
    multiplier = torch.from_numpy(space.multiplier).to(x.device)
    return Factors(
        space.bits,
        _coefficients(x, space, row_exponent),
        space.v.to(torch.int8),
        multiplier,
        row_exponent,
        space.column_exponent,
        space.row_base + space.column_base - _MEAN_BITS + space.fine,
    )


def _coefficients(x: torch.Tensor, space: Space, row_exponent: torch.Tensor) -> torch.Tensor:
    """Of every row in the space's directions, int8 `[R, K]`."""
    base, limit = space.row_base + space.column_base, (1 << (space.bits - 1)) - 1
    unit = np.ldexp(np.maximum(space.multiplier, 1).astype(np.float64), space.fine)
    told = space.multiplier > 0
    if x.device.type == "cpu":
        powers = _whitening(row_exponent, space.column_exponent, base)
        divisors = space.energy, torch.from_numpy(unit)
        return trellis_space_loops.fit(x, *powers, _LARGEST, space.v, divisors, told, limit)
    units, chosen = torch.from_numpy(unit).to(x.device), torch.from_numpy(told).to(x.device)
    u = torch.empty(len(x), unit.size, dtype=torch.int8, device=x.device)
    step = max(1, _AT_ONCE // x.shape[1])
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        white = _whitened(x[some], row_exponent[some], space.column_exponent, base)
        found = (_product(white, space.v) / space.energy / units).round_().clamp_(-limit, limit)
        u[some] = torch.where(chosen, found, 0.0).to(torch.int8)
    return u


def _whitened(
    x: torch.Tensor, row_exponent: torch.Tensor, column_exponent: torch.Tensor, base: int
) -> torch.Tensor:
    """x with rows and columns of mean magnitude 2**_MEAN_BITS, in integers."""
    row_power, column_power = _whitening(row_exponent, column_exponent, base)
    if x.device.type == "cpu":
        return trellis_space_loops.whitened(x, row_power, column_power, _LARGEST)
    return (x * row_power.unsqueeze(1)).mul_(column_power).round_().clamp_(-_LARGEST, _LARGEST)


def _whitening(
    row_exponent: torch.Tensor, column_exponent: torch.Tensor, base: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows and columns are multiplied with, fp32."""
    return _powers(_MEAN_BITS - base - row_exponent), _powers(-column_exponent)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, fp64, of a whitened matrix in fp32 and integers up to `_FACTOR` in fp64; exact."""
    return trellis_space_loops.product(a, b) if a.device.type == "cpu" else a.double() @ b


def _turned_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a.T @ b of the same."""
    return trellis_space_loops.turned_product(a, b) if a.device.type == "cpu" else a.double().T @ b


def _multipliers(spread: Float64Array, bits: int) -> tuple[Int32Array, int]:
    """Multipliers of dimensions whose coefficients have a mean magnitude of `spread`, and their exponent."""
    limit = (1 << (bits - 1)) - 1
    # A coefficient of mean magnitude takes a quarter of the range.
    unit = spread * 4 / limit
    # The multipliers' own unit: the largest takes the top of what the bound allows.
    top = min(MAX_MULTIPLIER, (1 << 24) // (limit * limit * unit.size) - 1)
    fine = int(np.frexp(unit.max() / top)[1]) if unit.max() > 0 else 0
    return np.minimum(np.rint(np.ldexp(unit, -fine)), top).astype(np.int32), fine


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents in fp32, for int32 from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _exponents(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Scales in whole octaves above the lowest, and the lowest, at most `MAX_EXPONENT_STEP` below the top."""
    octaves = torch.div(scale + OCTAVE // 2, OCTAVE, rounding_mode="floor")
    low, high = (int(bound) for bound in torch.stack(torch.aminmax(octaves)).cpu())
    base = max(low, high - MAX_EXPONENT_STEP)
    return (octaves - base).clamp_min(0), base


@lru_cache(maxsize=16)
def signs(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """A fixed matrix of ones and minus ones without a pattern (a multiplicative hash of the position)."""
    position = np.arange(rows * columns, dtype=np.uint64) + np.uint64(1)
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    bits = (mixed >> np.uint64(63)).astype(np.float64)
    return torch.from_numpy((2 * bits - 1).reshape(rows, columns)).to(device)


def _to_integers(x: torch.Tensor, limit: int, of_mean: float) -> torch.Tensor:
    """Columns scaled so that their mean magnitude becomes about `of_mean`, rounded and clipped to `limit`."""
    if x.device.type == "cpu":
        return trellis_space_loops.to_integers(x, _PRECISE, limit, of_mean)
    parts = _to_parts(x)
    mean = parts.abs().sum(0) / x.new_full((1,), x.shape[0])
    factor = x.new_full((1,), of_mean) / mean.clamp_min(1e-300)
    return parts.mul_(torch.where(mean > 0, factor, 0.0)).round_().clamp_(-limit, limit)


def _to_parts(x: torch.Tensor) -> torch.Tensor:
    """Columns scaled so that their largest element becomes `_PRECISE`, rounded."""
    largest = x.abs().amax(0)
    factor = x.new_full((1,), _PRECISE) / largest.clamp_min(1e-300)
    return (x * torch.where(largest > 0, factor, 0.0)).round_()


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Orthogonal columns that span the columns of x; zero where one depends on those before it."""
    # Integers below 2**53: exact in any order.
    if x.device.type == "cpu":
        q = trellis_space_loops.to_parts(x, _PRECISE)
        gram = trellis_space_loops.gram(q)
    else:
        q = _to_parts(x)
        gram = (q.T @ q).cpu().numpy().copy()
    # Gram-Schmidt on the columns of products, and the columns of a unit matrix.
    turn = np.eye(q.shape[1])
    for k in range(q.shape[1]):
        pivot = gram[k, k]
        if pivot <= 2.0**-20 * _PRECISE**2:
            turn[:, k] = 0
            gram[k] = gram[:, k] = 0
            continue
        share = gram[k, k + 1 :] / pivot
        turn[:, k + 1 :] -= turn[:, k : k + 1] * share
        gram[k + 1 :, k + 1 :] -= share[:, None] * gram[k, k + 1 :]
    integers = np.clip(np.rint(turn * _TURN), -_LARGEST_TURN, _LARGEST_TURN)
    if x.device.type == "cpu":
        return trellis_space_loops.turned(q, integers)
    return q @ torch.from_numpy(integers).to(x.device)
