"""A low-rank prediction of a matrix: what the `trellis` codec subtracts before it quantizes.

Activations and their gradients at a stage's boundary lie near a space of few dimensions, most of all early in
training. The prediction of a matrix `[R, C]` is 2**(a_r + b_c + e) sum_k u_rk m_k v_ck. All are integers, u
and v of few bits, m a multiplier for each k. The sums stay below 2**24, so fp32 computes them exactly in any
order; scaling by powers of two is exact too.

The encoder finds a space (`Space`) by two rounds of subspace iteration from a fixed start on a sample of the
rows, and then every row's coefficients. Matrices are rounded to integers before they are multiplied in fp64,
so products are exact; the rest is computed element by element, or in numpy for the few numbers of each
dimension. So the loops here and `kernels.trellis.triton` find the same factors.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.trellis.loops import residuals as trellis_left_loops
from kernels.trellis.loops import spaces as loops
from kernels.trellis.loops.matrices import Prediction
from kernels.trellis.loops.residuals import Fit
from kernels.trellis.scales import OCTAVE, logarithms, of_sums, scales

Float64Array = NDArray[np.float64]
Int32Array = NDArray[np.int32]

MAX_RANK = 64
MIN_FACTOR_BITS = 3
MAX_FACTOR_BITS = 6
MAX_MULTIPLIER = 255
# Largest difference between the exponents of rows, or of columns, in octaves.
EXPONENT_BITS = 5
MAX_EXPONENT_STEP = (1 << EXPONENT_BITS) - 1
# Range of the whole prediction's exponent.
MIN_EXPONENT, MAX_EXPONENT = -64, 64

# log2 of a whitened element's mean magnitude, and the largest magnitude.
_MEAN_BITS = 5
_LARGEST = 255
_FACTOR = 63
_PRECISE = 1 << 17
# Largest integer in orthogonalization. With 17 bits of a column and 6 of a rank, sums stay below fp64's 53.
_TURN = 1 << 20
_LARGEST_TURN = 1 << 29


@dataclass(frozen=True, slots=True)
class Factors:
    """A prediction, on the device of its matrix.

    u is int8 `[R, K]` and v is int8 `[C, K]`. Both are symmetric with `bits` bits including the sign.
    """

    bits: int
    u: torch.Tensor
    v: torch.Tensor
    multiplier: torch.Tensor  # [K], int32, 0 to MAX_MULTIPLIER
    row_exponent: torch.Tensor  # [R], int32, 0 to MAX_EXPONENT_STEP
    column_exponent: torch.Tensor  # [C]
    exponent: int

    @property
    def tops(self) -> torch.Tensor:
        """Largest row exponent, largest column exponent and sum of the multipliers, int32 `[3]`."""
        return torch.stack(
            (self.row_exponent.amax(), self.column_exponent.amax(), self.multiplier.sum(dtype=torch.int32))
        )

    @property
    def rank(self) -> int:
        return self.multiplier.numel()


@dataclass(frozen=True, slots=True)
class Space:
    """A low-dimensional space, estimated from a sample of a matrix's rows."""

    v: torch.Tensor  # [C, K], fp64 of integers
    sent: torch.Tensor  # the same, int8
    energy: torch.Tensor  # [K], squared norms of v's columns
    bits: int
    multiplier: Int32Array
    fine: int
    row_base: int
    column_exponent: torch.Tensor
    column_base: int
    row_exponent: torch.Tensor
    """Exponents of the sample's rows, int32 `[S]`."""
    u: torch.Tensor
    """Coefficients of the sample's rows, int8 `[S, K]`."""

    @property
    def exponent(self) -> int:
        """The whole prediction's exponent."""
        return self.base - _MEAN_BITS + self.fine

    @property
    def base(self) -> int:
        """Sum of the bases of the row and the column exponents."""
        return self.row_base + self.column_base

    @property
    def sample(self) -> Factors:
        """The prediction of the sample's rows."""
        return self.factors(self.u, self.row_exponent)

    def factors(self, u: torch.Tensor, row_exponent: torch.Tensor) -> Factors:
        return Factors(
            self.bits,
            u,
            self.sent,
            torch.from_numpy(self.multiplier).to(u.device),
            row_exponent,
            self.column_exponent,
            self.exponent,
        )


@dataclass(frozen=True, slots=True)
class Left:
    """The residual of a matrix after its prediction is subtracted."""

    factors: Factors
    residual: torch.Tensor  # fp32 [R, C]
    row: torch.Tensor  # its scales, int32 [R]
    column: torch.Tensor  # [C]
    peak: torch.Tensor  # its largest magnitude, fp32 []


def most_multipliers(bits: int) -> int:
    """Largest sum of the multipliers with which every sum is an exact fp32 integer."""
    return ((1 << 24) - 1) // _limit(bits) ** 2


def prediction(factors: Factors) -> Prediction:
    """The prediction, not yet computed."""
    return Prediction(
        factors.u,
        factors.multiplier,
        factors.v,
        _powers(factors.row_exponent + factors.exponent),
        _powers(factors.column_exponent),
    )


def left_scales(x: torch.Tensor, factors: Factors) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.trellis.scales.scales` of the residual of fp32 `[R, C]`."""
    return of_sums(*trellis_left_loops.left_scales(x, prediction(factors), logarithms()))


def spaces(
    sample: torch.Tensor,
    rank: int,
    kinds: list[tuple[int, int]],
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Space]:
    """A space for each of `kinds`, (rank at most `rank`, bits), from the sample rows fp32 `[S, C]`.

    Magnitudes in the sample are below 2**13; `known` are its scales if they were already computed.
    """
    row, column = scales(sample) if known is None else known
    row_exponent, row_base = _exponents(row)
    column_exponent, column_base = _exponents(column)
    row_power = _powers(_MEAN_BITS - row_base - column_base - row_exponent)
    white, turned = loops.whitened(sample, row_power, _powers(-column_exponent), _LARGEST)
    basis = signs(sample.shape[1], rank)
    for _ in range(2):
        image = _to_integers(loops.product(white, basis), _FACTOR, _FACTOR / 4)
        whole = _orthogonal(loops.product(turned, image))
        basis = _to_integers(whole, _FACTOR, _FACTOR / 4)
    # A dimension does not depend on later ones, so kinds with the same bits share one product.
    images: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for bits in {bits for _, bits in kinds}:
        limit = _limit(bits)
        most = max(dimensions for dimensions, others in kinds if others == bits)
        v = _to_integers(_first(whole, most), limit, limit / 3.2)
        images[bits] = v, loops.product(white, v)
    spaces = []
    for dimensions, bits in kinds:
        v, image = _first(images[bits][0], dimensions), images[bits][1]
        # Numpy, because torch would wake its threads, which then spin for a while.
        energy = torch.from_numpy(np.maximum(np.square(v.numpy()).sum(0), 1))
        spread = loops.spread(image, energy).numpy()
        multiplier, fine = _multipliers(spread * 2.0**-16 / sample.shape[0], bits)
        u = loops.factors(image, energy, _unit(multiplier, fine), multiplier > 0, _limit(bits))
        sent = torch.from_numpy(v.numpy().astype(np.int8))
        model = bits, multiplier, fine, row_base, column_exponent, column_base
        spaces.append(Space(v, sent, energy, *model, row_exponent, u))
    return spaces


def fitted(x: torch.Tensor, space: Space) -> Left:
    """The residual of fp32 `[R, C]` after a prediction in a space."""
    fit = Fit(
        row_base=space.row_base,
        most_exponent=MAX_EXPONENT_STEP,
        white_bits=_MEAN_BITS - space.base,
        white_columns=_powers(-space.column_exponent).numpy(),
        white_limit=np.float32(_LARGEST),
        energy=space.energy.numpy(),
        unit=_unit(space.multiplier, space.fine),
        limit=float(_limit(space.bits)),
        used=space.multiplier > 0,
        multiplier=space.multiplier.astype(np.float32),
        exponent=space.exponent,
        columns=_powers(space.column_exponent).numpy(),
    )
    result = trellis_left_loops.fitted(x, fit, space.v, logarithms())
    scaled = of_sums(result.row, result.column_sums)
    return Left(space.factors(result.u, result.row_exponent), result.left, *scaled, result.peak)


def _first(x: torch.Tensor, columns: int) -> torch.Tensor:
    """The first columns, contiguous."""
    return torch.from_numpy(np.ascontiguousarray(x.numpy()[:, :columns]))


def _unit(multiplier: Int32Array, fine: int) -> Float64Array:
    """Units of the coefficients, `[K]`."""
    return np.ldexp(np.maximum(multiplier, 1).astype(np.float64), fine)


def _limit(bits: int) -> int:
    """The largest magnitude of a factor."""
    return (1 << (bits - 1)) - 1


def _multipliers(spread: Float64Array, bits: int) -> tuple[Int32Array, int]:
    """Multipliers for dimensions whose coefficients have mean magnitude `spread`, and their exponent."""
    limit = _limit(bits)
    # A coefficient of mean magnitude gets a quarter of the range.
    unit = spread * 4 / limit
    # Choose the multipliers' unit so that the largest is the largest that the bound allows.
    top = min(MAX_MULTIPLIER, (1 << 24) // (limit * limit * unit.size) - 1)
    fine = int(np.frexp(unit.max() / top)[1]) if unit.max() > 0 else 0
    return np.minimum(np.rint(np.ldexp(unit, -fine)), top).astype(np.int32), fine


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2**exponents in fp32, for int32 exponents from -126 to 127."""
    return ((exponents + 127) << 23).view(torch.float32)


def _exponents(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Exponents of scales in whole octaves above a base, and the base: the lowest scale, but at most
    `MAX_EXPONENT_STEP` below the highest."""
    octaves = torch.div(scale + OCTAVE // 2, OCTAVE, rounding_mode="floor")
    low, high = (int(bound) for bound in torch.aminmax(octaves))
    base = max(low, high - MAX_EXPONENT_STEP)
    return (octaves - base).clamp_min(0), base


@lru_cache(maxsize=16)
def signs(rows: int, columns: int) -> torch.Tensor:
    """A fixed pseudo-random matrix of ones and minus ones (a multiplicative hash of the position), fp64."""
    position = np.arange(rows * columns, dtype=np.uint64) + np.uint64(1)
    mixed = position * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    bits = (mixed >> np.uint64(63)).astype(np.float64)
    return torch.from_numpy((2 * bits - 1).reshape(rows, columns))


def _to_integers(x: torch.Tensor, limit: int, of_mean: float) -> torch.Tensor:
    """Columns scaled to a mean magnitude of about `of_mean`, rounded and clipped to `limit`."""
    return loops.to_integers(x, _PRECISE, limit, of_mean)


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Orthogonal columns that span the columns of x; a column that depends on earlier ones becomes zero."""
    # Integers below 2**53: exact in any order.
    q = loops.to_parts(x, _PRECISE)
    turn = loops.gram_schmidt(loops.gram(q), 2.0**-20 * _PRECISE**2)
    return loops.turned(q, np.clip(np.rint(turn * _TURN), -_LARGEST_TURN, _LARGEST_TURN))
