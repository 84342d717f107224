"""What every codec promises for every tensor: size, error bound, refusal, determinism."""

from collections.abc import Callable

import pytest
import torch

from kernels.common import tiles
from tests.support.cases import each
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat, TahFormat
from wire.codecs.registry import codec, codec_names
from wire.codecs.tah import TahCodec, four_bit_tiles
from wire.errors import CodecError, ConfigError, NonFiniteError
from wire.spec import TensorSpec

TILED = [name for name in codec_names() if name == "tah" or name.startswith("fixed")]
SHAPES = [(1,), (63,), (64,), (65,), (3, 1), (2, 3, 64), (2, 3, 130), (1, 1, 1, 200), (2, 2, 1, 3, 65)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spec_of(x: torch.Tensor) -> TensorSpec:
    return TensorSpec(x.dtype, tuple(x.shape))


def round_trip(name: str, x: torch.Tensor) -> torch.Tensor:
    packed = codec(name).encode(x)
    assert packed.dtype == torch.uint8
    assert packed.shape == (codec(name).packed_bytes(spec_of(x)),)
    decoded = codec(name).decode(packed, spec_of(x))
    assert decoded.dtype == x.dtype and decoded.shape == x.shape and decoded.isfinite().all()
    return decoded


def error_bound(name: str, x: torch.Tensor) -> torch.Tensor:
    """How far a decoded element may be off, fp64 `[tiles]`: half a step, fp16's and the dtype's rounding."""
    rows = tiles.tile_rows(x).double()
    low, high = rows.amin(1), rows.amax(1)
    largest = torch.maximum(-low, high)
    rounding = largest * torch.finfo(x.dtype).eps + rows.abs().max() * 2.0**-37 + torch.finfo(x.dtype).tiny
    if name == "tah":
        # A rotated tile's values reach 4.07 times its largest; all 64 errors may fall onto one element.
        second = rows.abs().topk(2, 1).values[:, 1]
        turned = largest > 2 * second
        span = torch.where(turned, largest * 8.2 * 8, high - low + largest * 2.0**-9)
        return span / 7 / 2 * (1 + 2.0**-9) + rounding
    limit = float(2 ** (int(name[6:]) - 1) - 1)
    return largest / limit / 2 * (1 + 2.0**-9) + rounding


@each("dtype", DTYPES)
@each("shape", SHAPES)
@each("name", codec_names())
def test_shapes_and_dtypes(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape).to(dtype)
    decoded = round_trip(name, x)
    if name in TILED:
        off = tiles.tile_rows(decoded.double() - x.double()).abs().amax(1)
        assert (off <= error_bound(name, x)).all()
    elif name.startswith(("trellis", "dither")):
        # One step for all of it, in twice the bits: its own tests bound the error closely.
        assert (decoded.double() - x.double()).norm() <= 0.3 * x.double().norm()
    elif name == "fp32" or str(dtype) in {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(name, ""):
        assert torch.equal(decoded, x)
    elif name == "fp16":
        # Under a power of two the smallest elements keep more bits than in plain fp16.
        limit = 2.0**-11 * x.double().abs() * (1 if dtype == torch.float32 else 16)
        assert ((decoded.double() - x.double()).abs() <= limit + 2.0**-40 * x.double().abs().max()).all()
    else:
        assert torch.equal(decoded, x.to(torch.bfloat16).to(dtype))


def extremes() -> dict[str, torch.Tensor]:
    spike = torch.zeros(2, 2, 128)
    spike[1, 0, 77] = -5
    return {
        "zeros": torch.zeros(2, 3, 64),
        "negative zeros": -torch.zeros(2, 3, 64),
        "all equal": torch.full((2, 3, 100), -7.25),
        "one spike": spike,
        "subnormal": normal(2, 100) * 1e-40,
        "smallest": torch.full((1, 64), 2.0**-149),
        "1e30": normal(3, 70) * 1e30,
        "largest": torch.tensor([3.4028235e38, -3.4028235e38, 1.0]).repeat(40),
        "mixed": torch.tensor([1e-30, 1e30, -1e-30, 0.0]).repeat(33),
        "gradients of 1e-30": normal(2, 4, 128) * 1e-30,
        "largest fp16": torch.tensor([65504.0, -65504.0, 3.0], dtype=torch.float16).repeat(50),
        "largest bf16": torch.tensor([3.3895e38, 1.0], dtype=torch.bfloat16).repeat(50),
    }


@each("name", TILED)
@each("which", extremes())
def test_extreme_values(name: str, which: str) -> None:
    x = extremes()[which]
    decoded = round_trip(name, x)
    off = tiles.tile_rows(decoded.double() - x.double()).abs().amax(1)
    assert (off <= error_bound(name, x)).all()
    if "zeros" in which:
        assert (decoded == 0).all()


@each("name", codec_names())
@each("bad", [float("nan"), float("inf"), float("-inf")])
@each("dtype", DTYPES)
def test_non_finite_values_are_refused(name: str, bad: float, dtype: torch.dtype) -> None:
    x = normal(2, 3, 100).to(dtype)
    x[1, 2, 99] = bad
    with pytest.raises(NonFiniteError, match=r"shape \[2, 3, 100\]"):
        codec(name).encode(x)


@pytest.mark.parametrize("which", extremes())
def test_fp16_keeps_eleven_bits_at_any_size(which: str) -> None:
    x = extremes()[which]
    largest = x.double().abs().max()
    off = (round_trip("fp16", x).double() - x.double()).abs()
    # Below 2**-14 of fp16's largest, bits are lost one by one; the dtype itself rounds what is subnormal.
    assert (off <= 2.0**-11 * x.double().abs() + 2.0**-40 * largest + 2.0**-149).all()
    if x.dtype == torch.float16:
        assert (off == 0).all()


def test_bf16_takes_the_largest_of_fp16() -> None:
    """Rounded to bf16 they are 65536, which fp16 does not have: they come out as its largest."""
    x = torch.tensor([65504.0, -65504.0, 65408.0, 65376.0, 1.0]).half()
    packed = codec("bf16").encode(x)
    assert packed[64:].view(torch.bfloat16).tolist() == [65536.0, -65536.0, 65536.0, 65280.0, 1.0]
    decoded = codec("bf16").decode(packed, TensorSpec(torch.float16, (5,)))
    assert decoded.tolist() == [65504.0, -65504.0, 65504.0, 65280.0, 1.0]


def test_values_beyond_a_raw_codecs_range_are_refused() -> None:
    with pytest.raises(NonFiniteError):
        codec("bf16").encode(torch.tensor([3.4028235e38]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match="use float32"):
        codec("tah").encode(torch.ones(4, dtype=dtype))


@each("name", codec_names())
def test_memory_layout_and_autograd_do_not_matter(name: str) -> None:
    x = normal(2, 96, 70)
    expected = codec(name).encode(x)
    assert torch.equal(codec(name).encode(x.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    assert torch.equal(codec(name).encode(torch.cat((x, x), 2)[:, :, 70:]), expected)
    assert torch.equal(codec(name).encode(x.clone().requires_grad_()), expected)
    assert torch.equal(codec(name).encode(x[:1].expand(2, -1, -1)), codec(name).encode(x[:1].repeat(2, 1, 1)))


@each("name", codec_names())
def test_the_input_is_left_as_it_was(name: str) -> None:
    x = normal(2, 8, 128)
    x[..., 3] *= 100
    before = x.clone()
    packed = codec(name).encode(x)
    packed_before = packed.clone()
    codec(name).decode(packed, spec_of(x))
    assert torch.equal(x, before) and torch.equal(packed, packed_before)


@each("name", codec_names())
def test_packed_bytes_at_any_address_decode(name: str) -> None:
    x = normal(2, 8, 70)
    packed = codec(name).encode(x)
    expected = codec(name).decode(packed, spec_of(x))
    for shift in (1, 8):
        moved = torch.cat((torch.zeros(shift, dtype=torch.uint8), packed))[shift:]
        assert torch.equal(codec(name).decode(moved, spec_of(x)), expected)


@each("name", codec_names())
@each("shape", [(2, 9, 192), (2, 9, 70)])
def test_every_byte_and_element_is_written(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(*shape)
    x[0, 0, 5] = 50
    clean = codec(name).encode(x)
    decoded = codec(name).decode(clean, spec_of(x))

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: object, **keywords: object) -> torch.Tensor:
            made = make(*args, **keywords)
            made.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in every float dtype
            return made

        return empty

    for owner, method in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, method, poisoned(getattr(owner, method)))
    assert torch.equal(codec(name).encode(x), clean)
    assert torch.equal(codec(name).decode(clean, spec_of(x)), decoded)


@each("name", [*TILED, "trellis-4.41"])
@each("width", [192, 100])
def test_blocks_and_threads_do_not_change_a_bit(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than torch's grain of 32768 elements, so that two threads do share the work.
    x = normal(3, 250, width)
    x[..., 9] *= 20
    packed = codec(name).encode(x)
    decoded = codec(name).decode(packed, spec_of(x))
    torch.set_num_threads(2)
    try:
        assert torch.equal(codec(name).encode(x), packed)
        assert torch.equal(codec(name).decode(packed, spec_of(x)), decoded)
    finally:
        torch.set_num_threads(1)
    monkeypatch.setattr(tiles, "_CPU_BLOCK", 37)
    assert torch.equal(codec(name).encode(x), packed)
    assert torch.equal(codec(name).decode(packed, spec_of(x)), decoded)


@each("exponent", [-140, -60, -3, 40, 100])
@each("name", [*TILED, "trellis-4.41"])
def test_powers_of_two_pass_through(name: str, exponent: int) -> None:
    # Normalisation makes the codec blind to scale: only the header's exponent differs.
    x = normal(2, 4, 128)
    scaled = torch.ldexp(x.double(), torch.tensor(exponent)).float()
    if exponent < -120:
        # Below fp32's normal range the input itself loses digits.
        x = torch.ldexp(scaled.double(), torch.tensor(-exponent)).float()
    plain, moved = codec(name).encode(x), codec(name).encode(scaled)
    assert torch.equal(plain[64:], moved[64:])
    assert moved[48:52].view(torch.int32).item() - plain[48:52].view(torch.int32).item() == exponent


@pytest.mark.parametrize("bits", [1, 11])
def test_bits_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="fixed-2 to fixed-10"):
        FixedCodec(FixedFormat(bits))


@each("tiles_a_sample", range(1, 60))
def test_exactly_four_fifths_of_each_samples_tiles_get_four_bits(tiles_a_sample: int) -> None:
    x = normal(3, tiles_a_sample, 64, seed=tiles_a_sample)
    assert four_bit_tiles(tiles_a_sample) == round(0.8 * tiles_a_sample)
    bit_map = TahCodec(TahFormat()).encode(x)[64 + 2 * -(-6 * tiles_a_sample // 16) * 16 :]
    flags = [bool(bit_map[i // 8] >> i % 8 & 1) for i in range(3 * tiles_a_sample)]
    for sample in range(3):
        chosen = flags[sample * tiles_a_sample : (sample + 1) * tiles_a_sample]
        assert sum(chosen) == round(0.8 * tiles_a_sample)


def test_ties_go_to_the_lower_index() -> None:
    bit_map = TahCodec(TahFormat()).encode(normal(1, 64).repeat(10, 1))[64 + 2 * 32 :]
    assert bit_map[:2].tolist() == [0xFF, 0]


def test_true_bits_of_a_million_elements() -> None:
    for dtype in DTYPES:
        spec = TensorSpec(dtype, (1, 1024, 1024))
        assert codec("tah").bits_per_element(spec) <= 4.45
        assert codec("tah").bits_per_element(spec) == pytest.approx(4.41, abs=0.001)
        for bits in range(2, 11):
            assert codec(f"fixed-{bits}").bits_per_element(spec) == pytest.approx(bits + 0.25, abs=0.001)


def test_an_unknown_name_suggests_the_nearest() -> None:
    fixed = {f"fixed-{b}" for b in range(2, 11)}
    assert set(codec_names()) == {"fp32", "bf16", "fp16", "tah", "trellis-4", "dither-4", *fixed}
    with pytest.raises(ConfigError, match="'fixed-8'"):
        codec("fixed8")
    with pytest.raises(ConfigError, match="known: fp32"):
        codec("zstandard")


# ---- codecs for gradients: of any size, and of mixed sizes


# Codec, and the largest relative error on normal numbers.
CODECS = {"tah": 0.13, "fixed-4": 0.12, "fixed-6": 0.03, "fixed-8": 0.007, "fixed-10": 0.002}


def gradients(rows: int = 256, columns: int = 320, seed: int = 5) -> torch.Tensor:
    """Normal numbers in fp32, one sample."""
    return torch.randn((1, rows, columns), generator=torch.Generator().manual_seed(seed))


def decoded(name: str, x: torch.Tensor) -> torch.Tensor:
    return codec(name).decode(codec(name).encode(x), TensorSpec(x.dtype, tuple(x.shape)))


def error(y: torch.Tensor, x: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


@each("name", CODECS)
@each("size", [1e-38, 1e-30, 1e-12, 1e-5, 1.0, 1e5, 1e30])
def test_error_does_not_depend_on_size(name: str, size: float) -> None:
    """Paper, appendix G: gradients near 1e-5. A scale in fp16 alone ends at 6e-8, and at zero for 1e-30."""
    x = gradients() * size
    y = decoded(name, x)
    assert y.isfinite().all()
    assert error(y, x) < CODECS[name]
    assert error(y, x) == pytest.approx(error(decoded(name, gradients()), gradients()), rel=0.02)


@pytest.mark.parametrize("name", CODECS)
def test_tiles_of_mixed_sizes_keep_their_own_precision(name: str) -> None:
    """Rows from 1 down to a millionth of the largest, beside rows of zeros."""
    sizes = torch.tensor([1.0, 1e-2, 1e-4, 1e-6, 0.0]).repeat_interleave(64)
    x = gradients(len(sizes)) * sizes[None, :, None] * 1e-5
    y = decoded(name, x)
    assert not y[0, -64:].any()
    for start in range(0, 256, 64):
        rows = slice(start, start + 64)
        # Which tiles get four bits depends on the whole sample: some rows may get three alone.
        limit = 0.22 if name == "tah" else 1.1 * CODECS[name]
        assert error(y[0, rows], x[0, rows]) < limit


@pytest.mark.parametrize("name", CODECS)
def test_where_it_ends(name: str) -> None:
    """What is 2**40 times smaller than the tensor's largest element comes back as next to nothing."""
    x = gradients()
    x[:, 1] = gradients(1)[0] * 2.0**-40
    y = decoded(name, x)
    assert y.isfinite().all()
    assert y[:, 1].abs().max() <= 2.0**-33


@pytest.mark.parametrize("name", ["tah", "fixed-4", "fixed-8"])
@pytest.mark.parametrize("size", [1e-5, 1e-30])
def test_bf16_gradients_too(name: str, size: float) -> None:
    x = (gradients() * size).to(torch.bfloat16)
    assert error(decoded(name, x), x) < CODECS[name] + 0.003
