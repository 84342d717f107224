"""Exponents, powers of two, fp16 rounding and tiles."""

import math

import pytest
import torch

from kernels.common import tiles
from tests.support.cases import each


@each("value", [2.0**-149, 1e-40, 2.0**-126, 1e-6, 1.0, 1.9999, 2.0, 65504.0, 3.4e38])
@each("sign", [1.0, -1.0])
def test_exponent_brings_the_largest_element_near_two_to_the_13(value: float, sign: float) -> None:
    exponent = int(tiles.tensor_exponent(torch.tensor([0.0, sign * value, value / 2])))
    exact = torch.tensor(value, dtype=torch.float32).item()
    assert 2**12 <= math.ldexp(exact, -exponent) < 2**13
    assert tiles.MIN_EXPONENT <= exponent <= tiles.MAX_EXPONENT


def test_the_range_of_exponents_is_tight() -> None:
    assert tiles.tensor_exponent(torch.tensor([2.0**-149])) == tiles.MIN_EXPONENT
    assert tiles.tensor_exponent(torch.tensor([torch.finfo(torch.float32).max])) == tiles.MAX_EXPONENT
    assert tiles.tensor_exponent(torch.zeros(3)) == -tiles.NORMAL_BITS


@each("exponent", range(-161, 162))
def test_powers_of_two_are_exact(exponent: int) -> None:
    factors = [f.double().item() for f in tiles.powers_of_two(torch.tensor(exponent, dtype=torch.int32))]
    assert math.prod(factors) == 2.0**exponent
    assert all(2.0**-126 <= factor <= 2.0**126 for factor in factors)
    # The factor nearer to one comes first: a subnormal result is then rounded only once.
    assert abs(math.log2(factors[0])) <= abs(math.log2(factors[-1]))


def test_fp16_rounding_up_and_down_is_that_of_all_fp16_numbers() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    halves = bits.view(torch.float16)
    numbers = halves[halves.isfinite()].float().sort().values
    numbers = numbers[numbers.diff(append=torch.tensor([torch.inf])) > 0]  # one zero
    between = (numbers[:-1] + numbers[1:]) / 2
    for x in (numbers, between, between * (1 + 2.0**-20), between * (1 - 2.0**-20)):
        up = numbers[torch.searchsorted(numbers, x)]
        down = numbers[torch.searchsorted(numbers, x, right=True) - 1]
        assert torch.equal(tiles.ceil_to_half(x).float(), up)
        assert torch.equal(tiles.floor_to_half(x).float(), down)


def test_fp16_rounding_of_what_is_below_fp16() -> None:
    x = torch.tensor([2.0**-140, -(2.0**-140), 2.0**-60, -(2.0**-60), 0.0, -0.0])
    assert tiles.ceil_to_half(x).tolist() == [2.0**-24, 0.0, 2.0**-24, 0.0, 0.0, 0.0]
    down = tiles.floor_to_half(x)
    assert down.tolist() == [0.0, 0.0, 0.0, -(2.0**-24), 0.0, 0.0]
    # Zero has one form in packed bytes.
    assert not down[down == 0].signbit().any()


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_tiles_are_cut_along_the_last_dimension(width: int) -> None:
    x = torch.arange(1, 3 * width + 1).view(3, width)
    cut = tiles.tile_rows(x).view(3, tiles.tiles_per_row(width) * 64)
    assert torch.equal(cut[:, :width], x)
    assert (cut[:, width:] == 0).all()
    last = tiles.short_tiles(torch.arange(3 * tiles.tiles_per_row(width)), width)
    assert last.tolist() == [tiles.tiles_per_row(width) * (row + 1) - 1 for row in range(3)]
