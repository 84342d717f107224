"""Stochastic rounding of sums in e4m3: right on average, a function of its salt, and no standstill."""

import math

import pytest
import torch
from torch import Tensor

from kernels.common.random_bits import mixed, random_bits
from kernels.fp8.ops import accumulate_gradient
from kernels.fp8.reference import (
    BLOCK,
    LARGEST,
    NON_FINITE,
    ROUNDED_BITS,
    SMALLEST_EXPONENT,
    Draw,
    Fp8Gradient,
    pack_gradient,
    unpack_gradient,
)
from tests.support import fp8_cases as cases
from tests.support.cases import each

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 1000)


def draw(salt: int = 1, parameter: int = 2) -> Draw:
    return Draw(torch.tensor([salt]), parameter)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def packed(values: Tensor, noise: int | None = None) -> Fp8Gradient:
    """By the same noise for every element."""
    into = Fp8Gradient.zeros(values.numel(), CPU)
    pack_gradient(values, into, None if noise is None else torch.full(values.shape, noise, dtype=torch.int32))
    return into


def codes_of(values: Tensor, noise: int) -> list[int]:
    return packed(values, noise).codes.tolist()


@each("scale", [1e-40, 1e-5, 1.0, 1e30])
@each("count", SIZES)
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_gives_the_references_bits(count: int, scale: float, dtype: torch.dtype) -> None:
    cases.check_accumulation(accumulate_gradient, CPU, count, scale, dtype, stochastic=True)


def test_extremes_and_salts() -> None:
    cases.check_extremes(accumulate_gradient, CPU)
    cases.check_replays(accumulate_gradient, CPU)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_marked_only_in_their_block(bad: float) -> None:
    cases.check_not_finite(accumulate_gradient, CPU, bad, stochastic=True)
    values = normal(300)
    values[130] = bad
    gradient = Fp8Gradient.zeros(300, CPU)
    for _ in range(2):
        accumulate_gradient(gradient, values, draw())
        assert (gradient.exponents == NON_FINITE).tolist() == [False, True, False]
        found = unpack_gradient(gradient)
        assert bool(found[128:256].isnan().all()) and bool(found[:128].isfinite().all())


def neighbours(value: float) -> tuple[float, float, float]:
    """The e4m3 numbers that a positive value lies between, by search, and how far it is on its way up."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    low = max(x for x in table if x <= value)
    high = min((x for x in table if x > value), default=low)
    return low, high, 0.0 if high == low else (value - low) / (high - low)


def test_up_and_down_are_as_often_as_the_distances_say() -> None:
    """Exactly: of all 2**20 values of the noise so many round up as the rest is long."""
    whole = 1 << ROUNDED_BITS
    # The first element fixes the scale at 1.
    for value in (1.0, 1.03125, 3.3, 0.0009, 0.0156, 0.01563, 447.9, 13.0, 2.0**-9 / 3, 2.0**-20):
        low, high, way = neighbours(float(torch.tensor(value)))
        pair = torch.tensor([LARGEST, value])
        first_up = whole - round(way * whole)
        for noise in {0, max(0, first_up - 2), min(whole - 1, first_up + 1), whole - 1}:
            for sign in (1.0, -1.0):
                found = float(unpack_gradient(packed(pair * sign, noise))[1])
                assert found == sign * (high if noise >= first_up else low), (value, noise)


@pytest.mark.parametrize("noise", [0, (1 << ROUNDED_BITS) - 1])
def test_representable_values_keep_their_code_for_any_random_bits(noise: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn).float()
    for block in values.split(100):
        with_largest = torch.cat([block, torch.tensor([LARGEST])])
        assert codes_of(with_largest, noise) == packed(with_largest).codes.tolist()
    assert codes_of(torch.tensor([LARGEST, -LARGEST]), noise) == [0x7E, 0xFE]
    # A block of nothing stays one, signs included.
    zeros = packed(torch.tensor([0.0, -0.0]), noise)
    assert zeros.codes.tolist() == [0, 0x80] and zeros.exponents.tolist() == [SMALLEST_EXPONENT]


def test_nothing_leaves_the_range_of_its_block() -> None:
    """Whatever is drawn, what is below the largest code becomes no more than it."""
    values = torch.tensor([447.99997, -447.99997, 225.0, 2.0**-126])
    assert codes_of(values, (1 << ROUNDED_BITS) - 1)[:2] == [0x7E, 0xFE]


def test_a_sum_is_right_on_average() -> None:
    """Over 400 salts, within some standard deviations of the mean, known from the step of a code."""
    count, salts = 1024, 400
    start, addend = normal(count), normal(count, 1) / 50
    before = packed(start)
    total = torch.zeros(count, dtype=torch.float64)
    for salt in range(salts):
        gradient = Fp8Gradient(before.codes.clone(), before.exponents.clone())
        accumulate_gradient(gradient, addend, draw(salt))
        total += unpack_gradient(gradient)
    truth = (unpack_gradient(before) + addend).double()
    error = total / salts - truth
    # A code's step is at most an eighth of its value, or of the smallest normal code's; half of it, the most
    # that a draw deviates.
    floor = 2.0**-6 * torch.exp2(before.exponents.double()).repeat_interleave(BLOCK)
    deviation = torch.maximum(truth.abs(), floor) / 16 / math.sqrt(salts)
    assert bool((error.abs() <= 4.5 * deviation).all())
    # And over all elements together.
    assert abs(float(error.sum())) <= 4 * float(deviation.square().sum().sqrt())


def projections(microbatches: int, stochastic: bool) -> float:
    """Of the sum in e4m3 onto the one in fp32, for gradients that share a mean of their own noise's size."""
    count = 1 << 15
    mean = normal(count)
    exact, gradient = torch.zeros(count), Fp8Gradient.zeros(count, CPU)
    for microbatch in range(microbatches):
        addend = (mean + normal(count, microbatch + 1)) / microbatches
        exact += addend
        accumulate_gradient(gradient, addend, draw(mixed(microbatch)) if stochastic else None)
    return float(unpack_gradient(gradient) @ exact / (exact @ exact))


@pytest.mark.parametrize("microbatches", [64, 256])
def test_sums_of_many_microbatches_keep_growing(microbatches: int) -> None:
    assert abs(projections(microbatches, stochastic=True) - 1) < 0.01
    # What it is there for.
    assert projections(microbatches, stochastic=False) < 0.95


def test_the_same_salt_draws_the_same_and_others_do_not() -> None:
    def after(salt: int, parameter: int) -> bytes:
        gradient = Fp8Gradient.zeros(1000, CPU)
        for seed in range(2):
            accumulate_gradient(gradient, normal(1000, seed), draw(salt, parameter))
        return bytes(gradient.codes.numpy())

    assert after(1, 2) == after(1, 2)
    assert len({after(1, 2), after(3, 2), after(1, 3), after(2, 1 << 31)}) == 4


@each("salt", [0, 1, 0xDEADBEEF, 0xFFFFFFFF])
@each("first", [0, 5, 2**31 - 20, 2**32 - 40])
def test_bits_are_the_hash_of_their_place(salt: int, first: int) -> None:
    places = range(first, first + 37)
    expected = torch.tensor([mixed((place & 0xFFFFFFFF) ^ salt) for place in places])
    for bits in (16, ROUNDED_BITS, 31):
        found = random_bits(37, salt, CPU, bits=bits, first=first)
        assert found.tolist() == (expected & ((1 << bits) - 1)).tolist()


def test_numbers_stay_what_they_are() -> None:
    """A change here makes old runs unrepeatable."""
    assert random_bits(3, 7, CPU).tolist() == GOLDEN
    gradient = Fp8Gradient.zeros(4, CPU)
    accumulate_gradient(gradient, torch.tensor([1.0, 0.3, -0.7, 0.01]), draw(5, 6))
    accumulate_gradient(gradient, torch.tensor([0.01, 0.01, 0.01, 0.01]), draw(6, 6))
    assert gradient.codes.tolist() == CODES
    assert Draw(torch.tensor([5]), 6).salt == mixed(3)


GOLDEN = [41446, 54203, 54590]
CODES = [120, 106, 243, 74]
