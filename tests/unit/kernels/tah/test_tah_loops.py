"""`kernels.tah.loops.encode` gives the bits of `kernels.tah.reference`, its reference, for any tensor."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common.tiles import NON_FINITE, TILE, tiles_per_row
from kernels.tah import reference as tah
from kernels.tah.loops import encode as tah_loops
from tests.support.cases import each
from tests.support.examples import examples
from tests.support.loops_cases import DTYPES, as_arrays, filled, random_bits

MAX_FLOAT = torch.finfo(torch.float32).max


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Tiles of which every third or so has an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.005, x * 30, x)


def sections(n: int, fourth: int, filling: int) -> tah.TahSections:
    return tah.TahSections(
        filled(torch.float16, filling, n),
        filled(torch.float16, filling, n),
        filled(torch.uint8, filling, -(-n // 8)),
        filled(torch.uint8, filling, -(-n * 6 // 8)),
        filled(torch.int64, filling, tah.LOW_PLANES, n),
        filled(torch.int64, filling, fourth),
    )


def check(x: torch.Tensor, *, samples: int = 1, four_bit: int | None = None) -> None:
    tiles = x[..., 0].numel() * tiles_per_row(x.shape[-1]) // samples
    four_bit = round(0.8 * tiles) if four_bit is None else four_bit
    expected, found = (sections(tiles * samples, samples * four_bit, filling) for filling in (0x55, 0xAA))
    before = x.clone()
    exponent = tah.encode(x, expected, samples=samples, four_bit=four_bit)
    assert tah_loops.encode(x, as_arrays(found), samples=samples, four_bit=four_bit).equal(exponent)
    for name, one, other in zip(tah.TahSections._fields, expected, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    assert torch.equal(x, before)


@each("dtype", DTYPES)
@each("width", [1, 7, 63, 64, 65, 127, 128, 200, 1000])
def test_any_width(width: int, dtype: torch.dtype) -> None:
    check(normal(3, 5, width, seed=width).to(dtype), samples=3)
    check(normal(11, width, seed=width).to(dtype))


@each("rows", range(1, 18))
def test_flags_and_pivots_that_end_within_a_byte(rows: int) -> None:
    x = normal(rows, TILE)
    x[:, 33] = 100.0
    check(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100])
def test_numbers_of_any_exponent(width: int, dtype: torch.dtype) -> None:
    check(random_bits(dtype, 500, width))
    # Without infinities' neighbours, smaller ones are not all zero to fp16.
    x = random_bits(dtype, 500, width, seed=1)
    check(torch.where(x.abs() < 1, x, x.sign()))
    check(torch.where(x.abs() < 1e-4, x, 0))


@each("largest", [2.0**-149, 2.0**-140, 1e-38, 2.0**-100, 1e-20, 1.0, 1e20, 2.0**126, MAX_FLOAT])
def test_tensors_of_any_size(largest: float) -> None:
    x = normal(40, 100)
    x = (x / x.abs().max()).double() * largest
    check(x.float())
    check((x * torch.logspace(-20, 0, 40, dtype=torch.float64)[:, None]).float())


def test_zeros() -> None:
    check(torch.zeros(9, 100))
    check(-torch.zeros(9, 100))
    x = torch.zeros(9, 100)
    x[4, 70] = -3.0
    check(x)
    check(torch.where(normal(9, 100) < 0, x, -x))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_scales_and_zero_points_beside_every_half(sign: float, spread: float) -> None:
    """Tiles whose least element or range is an fp16, or fp32's next number to one."""
    halves = torch.arange(0, 0x6C00, 7, dtype=torch.int16).view(torch.float16).float()
    bits = halves.view(torch.int32)
    values = torch.cat([(bits + step).clamp_min(0).view(torch.float32) for step in (-1, 0, 1)]) * sign
    x = values[:, None].repeat(1, TILE)
    x[:, ::2] -= values[:, None] * spread
    x[0] = 4096.0  # makes the tensor's exponent 0
    x[values.abs() > 4096.0] = 0
    check(x)
    check(x * 15, four_bit=len(x))
    check(x * 7, four_bit=0)


@each("second", [2047.9998, 2048.0, 2048.0002, 0.0])
def test_outliers_and_near_outliers(second: float) -> None:
    x = normal(64, TILE).clamp(-1, 1)
    x.fill_diagonal_(-4096.0)
    x[:, 40] = second
    check(x)
    check(torch.cat((x, x[:, :17]), 1))


@each("share", [0.0, 0.1, 0.5, 0.99, 1.0])
@each("kinds", [1, 2, 5, 300])
def test_the_choice_among_equals(share: float, kinds: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = normal(kinds, TILE)[torch.randint(kinds, (900,), generator=generator)].view(3, 300, TILE)
    check(x, samples=3, four_bit=int(share * 300))


def test_the_choice_among_entropies_that_hardly_differ() -> None:
    """Many ranks in one bucket of the search's first pass."""
    x = 1.0 + torch.arange(2000, dtype=torch.float32)[:, None] * torch.linspace(0, 1e-4, TILE)
    check(x)
    check(x.flip(0), four_bit=777)


def test_ranks_and_outliers_are_the_references() -> None:
    """Ranks are not in the packed bytes, only what is chosen by them."""
    every_magnitude = torch.arange(2.0**14).view(-1, TILE)
    every_magnitude[:, 17] = 2.0**14 - 0.25
    y = torch.cat(
        (every_magnitude, normal(3000, TILE), normal(500, TILE) ** 3, random_bits(torch.float32, 500, TILE))
    )
    n = len(y)
    low, high = np.empty(n, dtype=np.float32), np.empty(n, dtype=np.float32)
    outlier, rank = np.empty(n, dtype=np.bool_), np.empty(n, dtype=np.int32)
    one = np.float32(1)
    words = y.view(-1).numpy().view(np.uint32)
    tah_loops._measure(words, TILE, 0, n, one, one, low, high, outlier, rank)
    least, largest = y.amin(1), y.amax(1)
    assert torch.equal(torch.from_numpy(low), least) and torch.equal(torch.from_numpy(high), largest)
    single, bits = tah._outliers_and_entropy(y, least, largest)
    assert torch.equal(torch.from_numpy(rank), bits)
    assert torch.equal(torch.from_numpy(outlier), single)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_reported(bad: float) -> None:
    x = normal(10, 100)
    x[3, 99] = bad
    exponent = tah_loops.encode(x, as_arrays(sections(20, 16, 0)), samples=1, four_bit=16)
    assert exponent.item() == NON_FINITE


def test_memory_layout_does_not_matter() -> None:
    check(normal(100, 70).t())
    check(normal(4, 30, 200)[:, ::2, 3:150], samples=4)
    check(normal(4, 30, 128)[1:, 1:], samples=3)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("width", [64, 100, 200])
def test_threads_do_not_interfere(width: int) -> None:
    for rows in (683, 1366):
        check(normal(3, rows, width), samples=3)


@settings(max_examples=examples(60))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    power=st.integers(-150, 127),
    share=st.floats(0, 1),
    raw=st.booleans(),
)
def test_any_tensor(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int, power: int, share: float, raw: bool
) -> None:
    x = random_bits(dtype, *shape, seed=seed) if raw else normal(*shape, seed=seed).to(dtype)
    x = (x.double() * 2.0**power).to(dtype) if not raw else x
    tiles = shape[1] * tiles_per_row(shape[2])
    check(x.nan_to_num(1.0, 2.0, 3.0), samples=shape[0], four_bit=int(share * tiles))
