"""`kernels.fixed.loops` gives the bits of `kernels.fixed.reference`, its reference, both ways and for any
tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.common.tiles import MAX_EXPONENT, MIN_EXPONENT, NON_FINITE, TILE, tiles_per_row
from kernels.fixed import loops as fixed_loops
from kernels.fixed import reference as fixed
from tests.support import loops_cases
from tests.support.cases import each
from tests.support.examples import examples
from tests.support.loops_cases import DTYPES, filled, random_bits

BITS = range(2, 11)
MAX_FLOAT = torch.finfo(torch.float32).max
INFINITY = 0x7C00  # the bits of fp16's


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sections(bits: int, n: int, filling: int) -> fixed.FixedSections:
    return fixed.FixedSections(filled(torch.float16, filling, n), filled(torch.int64, filling, bits, n))


def random_sections(bits: int, n: int, *, seed: int = 0, largest: int = INFINITY) -> fixed.FixedSections:
    """Anything that passes the checks of the codec; filling, too."""
    generator = torch.Generator().manual_seed(seed)
    planes = torch.randint(256, (bits, n * 8), dtype=torch.uint8, generator=generator).view(torch.int64)
    beyond = planes[0].clone()
    for plane in planes[1:]:
        beyond &= plane
    planes[bits - 1] &= ~beyond
    scales = torch.randint(1, largest, (n,), dtype=torch.int16, generator=generator)
    return fixed.FixedSections(scales.view(torch.float16), planes)


def check_decode(
    packed: fixed.FixedSections,
    exponent: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decoding gives the reference's values."""
    expected = torch.zeros(shape, dtype=dtype)
    fixed.decode(packed, expected, exponent)

    def decode(out: torch.Tensor) -> None:
        assert fixed_loops.decode(packed, out, exponent)

    loops_cases.check_decode(packed, expected, decode)
    return expected


def check(x: torch.Tensor, bits: int) -> None:
    """Both ways."""
    n = x[..., 0].numel() * tiles_per_row(x.shape[-1])
    expected, found = (sections(bits, n, filling) for filling in (0x55, 0xAA))
    before = x.clone()
    exponent = fixed.encode(x, expected)
    assert fixed_loops.encode(x, found).equal(exponent)
    assert torch.equal(x, before)
    if exponent == NON_FINITE:
        return
    for name, one, other in zip(fixed.FixedSections._fields, expected, found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name
    check_decode(found, int(exponent), tuple(x.shape), x.dtype)


@each("bits", BITS)
@each("width", [1, 7, 63, 64, 65, 128, 200])
def test_any_width(width: int, bits: int) -> None:
    check(normal(3, 5, width, seed=width).to(DTYPES[(width + bits) % 3]), bits)


@each("dtype", DTYPES)
@each("bits", BITS)
def test_numbers_of_any_exponent(bits: int, dtype: torch.dtype) -> None:
    check(random_bits(dtype, 200, 100), bits)
    # Without infinities' neighbours, smaller ones are not all zero to fp16.
    x = random_bits(dtype, 200, 100, seed=1)
    check(torch.where(x.abs() < 1, x, x.sign()), bits)
    check(torch.where(x.abs() < 1e-4, x, 0), bits)


@each("bits", [2, 8, 9])
@each("largest", [2.0**-149, 2.0**-140, 1e-38, 2.0**-100, 1e-20, 1.0, 1e20, 2.0**126, MAX_FLOAT])
def test_tensors_of_any_size(largest: float, bits: int) -> None:
    x = normal(40, 100)
    x = (x / x.abs().max()).double() * largest
    spread = x * torch.logspace(-20, 0, 40, dtype=torch.float64)[:, None]
    check(x.float(), bits)
    check(spread.float(), bits)


@each("bits", BITS)
def test_zeros(bits: int) -> None:
    check(torch.zeros(9, 100), bits)
    check(-torch.zeros(9, 100), bits)
    x = torch.zeros(9, 100)
    x[4, 70] = -3.0
    check(x, bits)


@each("bits", BITS)
def test_scales_beside_every_half(bits: int) -> None:
    """Tiles whose largest element over L is an fp16, or fp32's next number to one."""
    halves = torch.arange(0, 0x6C00, 7, dtype=torch.int16).view(torch.float16).float()
    halves = halves * (2 ** (bits - 1) - 1)
    halves = halves[halves < 4096]
    words = halves.view(torch.int32)
    values = torch.cat([(words + step).clamp_min(0).view(torch.float32) for step in (-1, 0, 1)])
    x = values[:, None] * torch.linspace(-1, 1, TILE)
    x[0] = 4096.0  # makes the tensor's exponent 0
    check(x, bits)


@each("bits", BITS)
def test_codes_at_ties(bits: int) -> None:
    limit = 2 ** (bits - 1) - 1
    x = torch.arange(-limit, limit + 0.25, 0.25).repeat(3)
    x = torch.cat((x, torch.zeros(-len(x) % (TILE - 1)))).view(-1, TILE - 1)
    check(torch.cat((x, torch.full((len(x), 1), float(limit))), 1), bits)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_reported(bad: float) -> None:
    x = normal(10, 100)
    x[3, 99] = bad
    assert fixed_loops.encode(x, sections(8, 20, 0)).item() == NON_FINITE


def test_memory_layout_does_not_matter() -> None:
    check(normal(100, 70).t(), 8)
    check(normal(4, 30, 200)[:, ::2, 3:150], 9)


@each("dtype", DTYPES)
@each("exponent", [*range(MIN_EXPONENT, MAX_EXPONENT + 1, 12), -127, -126, MAX_EXPONENT])
def test_any_exponent(exponent: int, dtype: torch.dtype) -> None:
    """Down to fp32's smallest numbers and beyond the largest of every dtype."""
    for bits in (2, 5, 8, 10):
        packed = random_sections(bits, 100, seed=exponent + 200)
        assert bool(check_decode(packed, exponent, (50, 100), dtype).isfinite().all())


@each("bits", BITS)
def test_a_code_beyond_the_range_is_found(bits: int) -> None:
    """Wherever it is, and no other."""
    out = torch.empty(3, TILE)
    for place in range(3 * TILE):
        packed = random_sections(bits, 3, seed=place)
        assert fixed_loops.decode(packed, out, 0)
        bit = 1 << place % TILE
        packed.planes[:, place // TILE] |= bit - (1 << 64) if bit >> 63 else bit
        assert not fixed_loops.decode(packed, out, 0)


@pytest.mark.usefixtures("two_threads")
@each(("width", "dtype"), zip([64, 100, 200], DTYPES, strict=True))
def test_threads_do_not_interfere(width: int, dtype: torch.dtype) -> None:
    for rows in (683, 1366):
        check(normal(3, rows, width).to(dtype), 6)


@settings(max_examples=examples(100))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(BITS),
    power=st.integers(-150, 127),
    raw=st.booleans(),
)
def test_any_tensor(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    bits: int,
    power: int,
    raw: bool,
) -> None:
    x = random_bits(dtype, *shape, seed=seed) if raw else normal(*shape, seed=seed).to(dtype)
    x = (x.double() * 2.0**power).to(dtype) if not raw else x
    check(x.nan_to_num(1.0, 2.0, 3.0), bits)


@settings(max_examples=examples(100))
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 140)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    bits=st.sampled_from(BITS),
    exponent=st.integers(MIN_EXPONENT, MAX_EXPONENT),
    largest=st.integers(2, INFINITY),
)
def test_any_sections(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    bits: int,
    exponent: int,
    largest: int,
) -> None:
    n = shape[0] * shape[1] * tiles_per_row(shape[2])
    packed = random_sections(bits, n, seed=seed, largest=largest)
    check_decode(packed, exponent, shape, dtype)
