"""Compiled loops of `fixed-b` and `tah` give the bits of their references, both ways and for any tensor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kernels.common import bitplanes
from kernels.common.tiles import MAX_EXPONENT, MIN_EXPONENT, NON_FINITE, TILE, tiles_per_row
from kernels.fixed import loops as fixed_loops
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from kernels.tah.loops import decode as tah_loops_decode
from kernels.tah.loops import encode as tah_loops
from tests.support.cases import each
from tests.support.examples import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = range(2, 11)
MAX_FLOAT = torch.finfo(torch.float32).max
INFINITY = 0x7C00  # the bits of fp16's
GUARD = 1000

Sections = fixed.FixedSections | tah.TahSections


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Tiles of which every third or so has an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.005, x * 30, x)


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Finite numbers of any exponent."""
    return random_words(torch.Generator().manual_seed(seed), dtype, *shape).nan_to_num(1.0, 2.0, 3.0)


def random_words(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_halves(generator: torch.Generator, n: int, least: int, beyond: int) -> Tensor:
    """fp16 of either sign whose magnitudes have bits from `least` to below `beyond`."""
    bits = torch.randint(least, beyond, (n,), dtype=torch.int16, generator=generator)
    signs = torch.randint(2, (n,), generator=generator) << 15
    return (bits | signs).to(torch.int16).view(torch.float16)


def filled(dtype: torch.dtype, filling: int, *shape: int) -> Tensor:
    """Memory of which every byte is `filling`."""
    return torch.full((*shape, dtype.itemsize), filling, dtype=torch.uint8).view(dtype).view(shape)


def as_arrays(sections: Sections) -> list[NDArray[Any]]:
    """Sections as arrays, those of fp16 as int16, as a codec's layout gives them to the loops."""
    return [(part.view(torch.int16) if part.dtype == torch.float16 else part).numpy() for part in sections]


class Fixed:
    """`fixed-b`, its reference and its loops."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def room(self, tiles: int, filling: int) -> fixed.FixedSections:
        planes = filled(torch.int64, filling, self.bits, tiles)
        return fixed.FixedSections(filled(torch.float16, filling, tiles), planes)

    def random(self, tiles: int, *, seed: int = 0, largest: int = INFINITY) -> fixed.FixedSections:
        """Anything that passes the checks of the codec; filling, too."""
        generator = torch.Generator().manual_seed(seed)
        planes = random_words(generator, torch.int64, self.bits, tiles)
        beyond = planes[0].clone()
        for plane in planes[1:]:
            beyond &= plane
        planes[self.bits - 1] &= ~beyond
        scales = torch.randint(1, largest, (tiles,), dtype=torch.int16, generator=generator)
        return fixed.FixedSections(scales.view(torch.float16), planes)

    def encoders(self, tiles: int) -> list[Callable[[Tensor, Any], Tensor]]:
        return [fixed.encode, fixed_loops.encode]

    def decoders(self) -> list[Callable[[Any, Tensor, int], object]]:
        return [fixed.decode, self._decode]

    def _decode(self, sections: fixed.FixedSections, out: Tensor, exponent: int) -> None:
        assert fixed_loops.decode(sections, out, exponent)


class Tah:
    """`tah`, its reference and its loops, for tensors of so many samples with so many tiles of four bits."""

    def __init__(self, samples: int = 1, four_bit: int | None = None) -> None:
        self.samples, self._four_bit = samples, four_bit

    def four_bit(self, tiles: int) -> int:
        """Of each sample, where all of them have `tiles`."""
        return round(0.8 * (tiles // self.samples)) if self._four_bit is None else self._four_bit

    def room(self, tiles: int, filling: int) -> tah.TahSections:
        return tah.TahSections(
            filled(torch.float16, filling, tiles),
            filled(torch.float16, filling, tiles),
            filled(torch.uint8, filling, -(-tiles // 8)),
            filled(torch.uint8, filling, -(-tiles * 6 // 8)),
            filled(torch.int64, filling, tah.LOW_PLANES, tiles),
            filled(torch.int64, filling, self.samples * self.four_bit(tiles)),
        )

    def random(
        self, tiles: int, *, seed: int = 0, turned: float = 0.5, four: float = 0.8, largest: int = INFINITY
    ) -> tah.TahSections:
        """Anything that passes the checks of the codec; filling and pivots of tiles not turned, too."""
        generator = torch.Generator().manual_seed(seed)
        scales = random_halves(generator, tiles, 1, largest)
        is_turned = torch.rand(tiles, generator=generator) < turned
        flags = torch.rand(tiles, generator=generator) < four
        return tah.TahSections(
            torch.where(is_turned, -scales.abs(), scales.abs()),
            random_halves(generator, tiles, 0, largest),
            bitplanes.pack_flags(flags),
            bitplanes.pack_sextets(torch.randint(TILE, (tiles,), generator=generator)),
            random_words(generator, torch.int64, tah.LOW_PLANES, tiles),
            random_words(generator, torch.int64, int(flags.sum())),
        )

    def encoders(self, tiles: int) -> list[Callable[[Tensor, Any], Tensor]]:
        how = {"samples": self.samples, "four_bit": self.four_bit(tiles)}
        return [
            lambda x, sections: tah.encode(x, sections, **how),
            lambda x, sections: tah_loops.encode(x, as_arrays(sections), **how),
        ]

    def decoders(self) -> list[Callable[[Any, Tensor, int], object]]:
        def decode(sections: tah.TahSections, out: Tensor, exponent: int) -> None:
            tah_loops_decode.decode(as_arrays(sections), out, exponent)

        return [tah.decode, decode]


TAH, SAMPLES = Tah(), Tah(samples=3)
CODECS = {"tah": TAH, "tah of three samples": SAMPLES} | {f"fixed-{bits}": Fixed(bits) for bits in BITS}
FEW = {name: CODECS[name] for name in ("tah", "fixed-2", "fixed-8", "fixed-9")}


def check(codec: Fixed | Tah, x: Tensor) -> None:
    """Both ways."""
    tiles = x[..., 0].numel() * tiles_per_row(x.shape[-1])
    before, rooms = x.clone(), [codec.room(tiles, filling) for filling in (0x55, 0xAA)]
    expected, found = map(lambda encode, room: encode(x, room), codec.encoders(tiles), rooms)
    assert found.equal(expected) and torch.equal(x, before)
    if expected == NON_FINITE:
        return
    for name, *both in zip(rooms[0]._fields, *rooms, strict=True):
        assert torch.equal(*(one.view(torch.uint8) for one in both)), name
    check_decode(codec, rooms[1], int(expected), tuple(x.shape), x.dtype)


def check_decode(
    codec: Fixed | Tah, packed: Sections, exponent: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Loops give the reference's values whatever their buffer held, and write nothing outside of it."""
    reference, decode = codec.decoders()
    expected = torch.zeros(shape, dtype=dtype)
    reference(packed, expected, exponent)
    elements, before = expected.numel(), [part.clone() for part in packed]
    for filling in (0xFF, 0x55):
        memory = filled(dtype, filling, elements + 2 * GUARD)
        out = memory[GUARD : GUARD + elements].view(shape)
        decode(packed, out, exponent)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        for guard in (memory[:GUARD], memory[-GUARD:]):
            assert bool((guard.view(torch.uint8) == filling).all())
    for part, copy in zip(packed, before, strict=True):
        assert torch.equal(part.view(torch.uint8), copy.view(torch.uint8))
    return expected


@each("dtype", DTYPES)
@each("name", CODECS)
@each("width", [1, 7, 63, 64, 65, 127, 128, 200, 1000])
def test_any_width(width: int, name: str, dtype: torch.dtype) -> None:
    check(CODECS[name], normal(3, 5, width, seed=width).to(dtype))


@each("dtype", DTYPES)
@each("name", CODECS)
def test_numbers_of_any_exponent(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    for width in (64, 100):
        check(codec, random_bits(dtype, 201, width))
        # Without infinities' neighbours, smaller ones are not all zero to fp16.
        x = random_bits(dtype, 201, width, seed=1)
        check(codec, torch.where(x.abs() < 1, x, x.sign()))
        check(codec, torch.where(x.abs() < 1e-4, x, 0))


@each("name", FEW)
@each("largest", [2.0**-149, 2.0**-140, 1e-38, 2.0**-100, 1e-20, 1.0, 1e20, 2.0**126, MAX_FLOAT])
def test_tensors_of_any_size(largest: float, name: str) -> None:
    x = normal(40, 100)
    x = (x / x.abs().max()).double() * largest
    check(FEW[name], x.float())
    check(FEW[name], (x * torch.logspace(-20, 0, 40, dtype=torch.float64)[:, None]).float())


@each("name", CODECS)
def test_zeros(name: str) -> None:
    x = torch.zeros(9, 100)
    x[4, 70] = -3.0
    for zeros in (torch.zeros(9, 100), -torch.zeros(9, 100), x, torch.where(normal(9, 100) < 0, x, -x)):
        check(CODECS[name], zeros)


@each("name", FEW)
@each("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_reported(bad: float, name: str) -> None:
    x = normal(10, 100)
    x[3, 99] = bad
    for encode in FEW[name].encoders(20):
        assert encode(x, FEW[name].room(20, 0)).item() == NON_FINITE


@each("name", FEW)
def test_memory_layout_does_not_matter(name: str) -> None:
    check(FEW[name], normal(100, 70).t())
    check(FEW[name], normal(4, 30, 200)[:, ::2, 3:150])
    check(FEW[name], normal(4, 30, 128)[1:, 1:])


@pytest.mark.usefixtures("two_threads")
@each("codec", [SAMPLES, Fixed(6)])
@each(("width", "dtype"), zip([64, 100, 200], DTYPES, strict=True))
def test_threads_do_not_interfere(width: int, dtype: torch.dtype, codec: Fixed | Tah) -> None:
    for rows in (683, 1366):
        check(codec, normal(3, rows, width).to(dtype))
        packed = codec.random(3 * rows * tiles_per_row(width), seed=rows)
        check_decode(codec, packed, 0, (3, rows, width), dtype)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140))
SEEDS = st.integers(0, 2**31)


@settings(max_examples=examples(160))
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
    bits=st.sampled_from([None, *BITS]),
    power=st.integers(-150, 127),
    share=st.floats(0, 1),
    raw=st.booleans(),
)
def test_any_tensor(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    bits: int | None,
    power: int,
    share: float,
    raw: bool,
) -> None:
    four_bit = int(share * shape[1] * tiles_per_row(shape[2]))
    codec = Tah(shape[0], four_bit) if bits is None else Fixed(bits)
    x = random_bits(dtype, *shape, seed=seed) if raw else normal(*shape, seed=seed).to(dtype)
    x = (x.double() * 2.0**power).to(dtype) if not raw else x
    check(codec, x.nan_to_num(1.0, 2.0, 3.0))


@settings(max_examples=examples(200))
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    seed=SEEDS,
    bits=st.sampled_from([None, *BITS]),
    exponent=st.integers(MIN_EXPONENT, MAX_EXPONENT),
    turned=st.floats(0, 1),
    four=st.floats(0, 1),
    largest=st.integers(2, INFINITY),
)
def test_any_sections(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    bits: int | None,
    exponent: int,
    turned: float,
    four: float,
    largest: int,
) -> None:
    n = shape[0] * shape[1] * tiles_per_row(shape[2])
    codec = TAH if bits is None else Fixed(bits)
    how = {"turned": turned, "four": four} if bits is None else {}
    check_decode(codec, codec.random(n, seed=seed, largest=largest, **how), exponent, shape, dtype)


@each("dtype", DTYPES)
@each("exponent", [*range(MIN_EXPONENT, MAX_EXPONENT + 1, 6), -127, -126, MAX_EXPONENT])
def test_any_exponent(exponent: int, dtype: torch.dtype) -> None:
    """Down to fp32's smallest numbers and beyond the largest of every dtype."""
    for codec in (TAH, Fixed(2), Fixed(5), Fixed(8), Fixed(10)):
        packed = codec.random(200, seed=exponent + 200)
        decoded = check_decode(codec, packed, exponent, (100, 100), dtype)
        assert bool(decoded.isfinite().all())
        if exponent == MAX_EXPONENT and codec is TAH:
            limit = torch.finfo(dtype).max
            assert decoded.max() == limit and decoded.min() == -limit, "what is too large"
        if exponent == MIN_EXPONENT and codec is TAH:
            assert bool(decoded[decoded == 0].signbit().any()), "what is too small keeps its sign"


# ---- `fixed-b` alone


@each("bits", BITS)
def test_scales_beside_every_half(bits: int) -> None:
    """Tiles whose largest element over L is an fp16, or fp32's next number to one."""
    values = beside_halves(2 ** (bits - 1) - 1)
    x = values[:, None] * torch.linspace(-1, 1, TILE)
    x[0] = 4096.0  # makes the tensor's exponent 0
    check(Fixed(bits), x)


def beside_halves(factor: int) -> Tensor:
    """Below 4096, multiples of fp16 numbers, and fp32's next numbers to them."""
    halves = torch.arange(0, 0x6C00, 7, dtype=torch.int16).view(torch.float16).float() * factor
    words = halves[halves < 4096].view(torch.int32)
    return torch.cat([(words + step).clamp_min(0).view(torch.float32) for step in (-1, 0, 1)])


@each("bits", BITS)
def test_codes_at_ties(bits: int) -> None:
    limit = 2 ** (bits - 1) - 1
    x = torch.arange(-limit, limit + 0.25, 0.25).repeat(3)
    x = torch.cat((x, torch.zeros(-len(x) % (TILE - 1)))).view(-1, TILE - 1)
    check(Fixed(bits), torch.cat((x, torch.full((len(x), 1), float(limit))), 1))


@each("bits", BITS)
def test_a_code_beyond_the_range_is_found(bits: int) -> None:
    """Wherever it is, and no other."""
    out = torch.empty(3, TILE)
    for place in range(3 * TILE):
        packed = Fixed(bits).random(3, seed=place)
        assert fixed_loops.decode(packed, out, 0)
        bit = 1 << place % TILE
        packed.planes[:, place // TILE] |= bit - (1 << 64) if bit >> 63 else bit
        assert not fixed_loops.decode(packed, out, 0)


# ---- `tah` alone


@each("rows", range(1, 18))
def test_flags_and_pivots_that_end_within_a_byte(rows: int) -> None:
    x = normal(rows, TILE)
    x[:, 33] = 100.0
    check(TAH, x)
    check_decode(TAH, TAH.random(rows, seed=rows, turned=1.0), 0, (rows, TILE), torch.float32)


@each("sign", [1.0, -1.0])
@each("spread", [0.0, 1.0])
def test_scales_and_zero_points_beside_every_half(sign: float, spread: float) -> None:
    """Tiles whose least element or range is an fp16, or fp32's next number to one."""
    values = beside_halves(1) * sign
    x = values[:, None].repeat(1, TILE)
    x[:, ::2] -= values[:, None] * spread
    x[0] = 4096.0  # makes the tensor's exponent 0
    check(TAH, x)
    check(Tah(four_bit=len(x)), x * 15)
    check(Tah(four_bit=0), x * 7)


@each("second", [2047.9998, 2048.0, 2048.0002, 0.0])
def test_outliers_and_near_outliers(second: float) -> None:
    x = normal(64, TILE).clamp(-1, 1)
    x.fill_diagonal_(-4096.0)
    x[:, 40] = second
    check(TAH, x)
    check(TAH, torch.cat((x, x[:, :17]), 1))


@each("share", [0.0, 0.1, 0.5, 0.99, 1.0])
@each("kinds", [1, 2, 5, 300])
def test_the_choice_among_equals(share: float, kinds: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = normal(kinds, TILE)[torch.randint(kinds, (900,), generator=generator)].view(3, 300, TILE)
    check(Tah(3, int(share * 300)), x)


def test_the_choice_among_entropies_that_hardly_differ() -> None:
    """Many ranks in one bucket of the search's first pass."""
    x = 1.0 + torch.arange(2000, dtype=torch.float32)[:, None] * torch.linspace(0, 1e-4, TILE)
    check(TAH, x)
    check(Tah(four_bit=777), x.flip(0))


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


@each("pivot", range(TILE))
def test_every_pivot(pivot: int) -> None:
    """In each of the four places that a pivot may have among the bytes of the pivots."""
    pivots = bitplanes.pack_sextets(torch.full((7,), pivot))
    packed = TAH.random(7, seed=pivot, turned=1.0)._replace(pivots=pivots)
    check_decode(TAH, packed, 0, (7, TILE), torch.float32)


def test_rounding_to_a_half_at_ties_and_at_the_smallest() -> None:
    """Every fp16, and what lies one, two and three quarters of the way to the next."""
    halves = torch.arange(0, INFINITY, dtype=torch.int16).view(torch.float16)
    halves = halves[halves.float() < 2.0**15 / 3]
    sections = TAH.random(len(halves), turned=0.0, four=1.0, largest=0x3C00)
    codes = torch.arange(TILE, dtype=torch.uint8).repeat(len(halves), 1) % 16
    planes = bitplanes.pack_planes(codes, 4)
    sections = sections._replace(scales=halves.clone(), low_planes=planes[:3], fourth_planes=planes[3])
    for place in (torch.zeros_like(halves), -halves, halves / 4):
        sections = sections._replace(scales=halves.clamp_min(2.0**-24), zero_points=place)
        for exponent in (0, -1, -2, -5, -9, -14, -20):
            for dtype in (torch.float16, torch.bfloat16):
                check_decode(TAH, sections, exponent, (len(halves), TILE), dtype)


def test_codes_of_zero_with_zero_points_of_zero() -> None:
    sections = TAH.random(64)._replace(zero_points=torch.full((64,), -0.0, dtype=torch.float16))
    sections.low_planes.zero_()
    sections.fourth_planes.zero_()
    check_decode(TAH, sections, 5, (64, TILE), torch.float32)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_bit_map_that_does_not_match_the_planes_is_refused(change: int) -> None:
    sections = TAH.random(100)
    count = sections.fourth_planes.numel() + change
    out = filled(torch.float32, 0x55, 100, TILE)
    spoiled = sections._replace(fourth_planes=torch.zeros(count, dtype=torch.int64))
    with pytest.raises(ValueError, match=f"{count - change} of 100 tiles with 4 bits, but there are {count}"):
        tah_loops_decode.decode(as_arrays(spoiled), out, 0)
    assert bool((out.view(torch.uint8) == 0x55).all())
