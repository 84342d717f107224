"""`kernels.tah.loops.decode` gives the bits of `kernels.tah.reference.decode`, its reference, for any
sections."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common import bitplanes
from kernels.common.tiles import MAX_EXPONENT, MIN_EXPONENT, TILE, tiles_per_row
from kernels.tah import reference as tah
from kernels.tah.loops import decode as tah_loops_decode
from tests.support.cases import each
from tests.support.examples import examples
from tests.support.loops_cases import DTYPES, as_arrays, check_decode, filled

INFINITY = 0x7C00  # the bits of fp16's


def random_bits(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_halves(generator: torch.Generator, n: int, least: int, beyond: int) -> torch.Tensor:
    """fp16 of either sign whose magnitudes have bits from `least` to below `beyond`."""
    bits = torch.randint(least, beyond, (n,), dtype=torch.int16, generator=generator)
    signs = torch.randint(2, (n,), generator=generator) << 15
    return (bits | signs).to(torch.int16).view(torch.float16)


def random_sections(
    n: int, *, seed: int = 0, turned: float = 0.5, four: float = 0.8, largest: int = INFINITY
) -> tah.TahSections:
    """Anything that passes the checks of the codec; filling and pivots of tiles not turned, too."""
    generator = torch.Generator().manual_seed(seed)
    scales = random_halves(generator, n, 1, largest)
    is_turned = torch.rand(n, generator=generator) < turned
    flags = torch.rand(n, generator=generator) < four
    return tah.TahSections(
        torch.where(is_turned, -scales.abs(), scales.abs()),
        random_halves(generator, n, 0, largest),
        bitplanes.pack_flags(flags),
        bitplanes.pack_sextets(torch.randint(TILE, (n,), generator=generator)),
        random_bits(generator, torch.int64, tah.LOW_PLANES, n),
        random_bits(generator, torch.int64, int(flags.sum())),
    )


def check(
    sections: tah.TahSections, exponent: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Decoding gives the reference's values."""
    expected = torch.zeros(shape, dtype=dtype)
    tah.decode(sections, expected, exponent)
    check_decode(sections, expected, lambda out: tah_loops_decode.decode(as_arrays(sections), out, exponent))
    return expected


@each("dtype", DTYPES)
@each("width", [1, 7, 63, 64, 65, 127, 128, 200, 1000])
def test_any_width(width: int, dtype: torch.dtype) -> None:
    for seed, turned in enumerate((0.0, 0.1, 1.0)):
        sections = random_sections(15 * tiles_per_row(width), seed=width + seed, turned=turned)
        check(sections, 0, (3, 5, width), dtype)
        check(sections, 0, (15, width), dtype)


@each("tiles", range(1, 18))
def test_flags_and_pivots_that_end_within_a_byte(tiles: int) -> None:
    check(random_sections(tiles, seed=tiles, turned=1.0), 0, (tiles, TILE), torch.float32)


@each("pivot", range(TILE))
def test_every_pivot(pivot: int) -> None:
    """In each of the four places that a pivot may have among the bytes of the pivots."""
    sections = random_sections(7, seed=pivot, turned=1.0)
    pivots = bitplanes.pack_sextets(torch.full((7,), pivot))
    check(sections._replace(pivots=pivots), 0, (7, TILE), torch.float32)


@each("dtype", DTYPES)
@each("exponent", [*range(MIN_EXPONENT, MAX_EXPONENT + 1, 6), -127, -126, MAX_EXPONENT])
def test_any_exponent(exponent: int, dtype: torch.dtype) -> None:
    """Down to fp32's smallest numbers and beyond the largest of every dtype."""
    decoded = check(random_sections(200, seed=exponent + 200), exponent, (100, 100), dtype)
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    decoded = check(random_sections(500), MAX_EXPONENT, (500, TILE), dtype)
    assert decoded.max() == limit and decoded.min() == -limit


def test_rounding_to_a_half_at_ties_and_at_the_smallest() -> None:
    """Every fp16, and what lies one, two and three quarters of the way to the next."""
    halves = torch.arange(0, INFINITY, dtype=torch.int16).view(torch.float16)
    halves = halves[halves.float() < 2.0**15 / 3]
    sections = random_sections(len(halves), turned=0.0, four=1.0, largest=0x3C00)
    codes = torch.arange(TILE, dtype=torch.uint8).repeat(len(halves), 1) % 16
    planes = bitplanes.pack_planes(codes, 4)
    sections = sections._replace(scales=halves.clone(), low_planes=planes[:3], fourth_planes=planes[3])
    for place in (torch.zeros_like(halves), -halves, halves / 4):
        sections = sections._replace(scales=halves.clamp_min(2.0**-24), zero_points=place)
        for exponent in (0, -1, -2, -5, -9, -14, -20):
            check(sections, exponent, (len(halves), TILE), torch.float16)
            check(sections, exponent, (len(halves), TILE), torch.bfloat16)


def test_signs_of_zeros() -> None:
    """Codes of zero with zero-points of either zero; and what is too small for its dtype keeps its sign."""
    sections = random_sections(64)
    sections.low_planes.zero_()
    sections.fourth_planes.zero_()
    check(
        sections._replace(zero_points=torch.full((64,), -0.0, dtype=torch.float16)),
        5,
        (64, 64),
        torch.float32,
    )
    for dtype in DTYPES:
        decoded = check(random_sections(64), MIN_EXPONENT, (64, TILE), dtype)
        assert bool((decoded[decoded == 0].signbit()).any())


@pytest.mark.parametrize("four", [0.0, 1.0])
def test_all_tiles_of_the_same_bits(four: float) -> None:
    check(random_sections(50, four=four), 3, (50, TILE), torch.float32)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_bit_map_that_does_not_match_the_planes_is_refused(change: int) -> None:
    sections = random_sections(100)
    count = sections.fourth_planes.numel() + change
    out = filled(torch.float32, 0x55, 100, TILE)
    with pytest.raises(ValueError, match=f"{count - change} of 100 tiles with 4 bits, but there are {count}"):
        spoiled = sections._replace(fourth_planes=torch.zeros(count, dtype=torch.int64))
        tah_loops_decode.decode(as_arrays(spoiled), out, 0)
    assert bool((out.view(torch.uint8) == 0x55).all())


@pytest.mark.usefixtures("two_threads")
@each(("width", "dtype"), zip([64, 100, 200], DTYPES, strict=True))
def test_threads_do_not_interfere(width: int, dtype: torch.dtype) -> None:
    for rows in (683, 1366):
        sections = random_sections(3 * rows * tiles_per_row(width), seed=rows, turned=0.1)
        check(sections, 0, (3, rows, width), dtype)


@settings(max_examples=examples(100))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    exponent=st.integers(MIN_EXPONENT, MAX_EXPONENT),
    turned=st.floats(0, 1),
    four=st.floats(0, 1),
    largest=st.integers(2, INFINITY),
)
def test_any_sections(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    exponent: int,
    turned: float,
    four: float,
    largest: int,
) -> None:
    n = shape[0] * shape[1] * tiles_per_row(shape[2])
    check(random_sections(n, seed=seed, turned=turned, four=four, largest=largest), exponent, shape, dtype)
