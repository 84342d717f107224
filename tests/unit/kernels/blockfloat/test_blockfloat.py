"""Stored tensors: sizes, nearest codes, extremes, odd shapes."""

import math

import pytest
import torch

from kernels.blockfloat import ops as blockfloat_ops
from kernels.blockfloat import outliers
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import (
    APART,
    SHARDS,
    SMALL_MAGNITUDES,
    WIDTHS,
    blocks_of,
    limit,
    packed_bytes,
    payload_offset,
)
from tests.support.cases import each

FLOATS = (3, 4, 5, 6, 8)
SHAPES = ((1,), (127,), (128,), (129,), (3, 128), (2, 5, 200), (40, 1), (7, 384))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(x: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return blockfloat.unpack(blockfloat.pack(x, bits), x.shape, bits, dtype)


def magnitudes(bits: int) -> list[float]:
    """Every magnitude of a format, from its definition: sign, two exponent bits, mantissa."""
    if bits == 3:
        return list(SMALL_MAGNITUDES)
    step = 2 ** (bits - 3)
    return [float(m) for m in range(step)] + [float((step + m) * 2**e) for e in range(3) for m in range(step)]


@each("bits", (*WIDTHS, 4 + APART))
@each("shape", SHAPES)
def test_size_is_what_the_layout_says(shape: tuple[int, ...], bits: int) -> None:
    x = normal(*shape)
    packed = blockfloat.pack(x, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (packed_bytes(shape, bits),)
    back = there_and_back(x, bits)
    assert back.shape == x.shape and back.is_contiguous() and back.isfinite().all()


def test_sizes_of_whole_blocks_are_the_widths_and_a_16th_of_a_byte_more() -> None:
    for bits in FLOATS:
        assert 8 * packed_bytes((64, 1024), bits) / (64 * 1024) == bits + 16 / 128
    assert 8 * packed_bytes((64, 1024), 16) == 16 * 64 * 1024
    assert blocks_of((2, 3, 129)) == 12
    assert [payload_offset(9, bits) for bits in (4, 16)] == [32, 0]
    assert all(sum(shards) == bits for bits, shards in SHARDS.items())


@pytest.mark.parametrize("bits", FLOATS)
def test_the_nearest_magnitude_is_stored(bits: int) -> None:
    values = magnitudes(bits)
    assert values[-1] == limit(bits) and values == sorted(values)
    # Powers of two as scales, so that nothing but the code is rounded.
    fine = torch.linspace(-limit(bits), limit(bits), 4001)
    rows = torch.cat((fine, torch.zeros(-4001 % 127))).view(-1, 127)
    x = torch.cat((torch.full((rows.shape[0], 1), limit(bits)), rows), 1) * 2.0**-7
    back = there_and_back(x, bits)[:, 1:].reshape(-1)[:4001] * 2.0**7
    table = torch.tensor(values)
    distance = (fine.abs()[:, None] - table).abs()
    assert torch.equal((fine.abs() - back.abs()).abs(), distance.min(1).values)
    assert torch.equal(torch.signbit(back), torch.signbit(fine))


@pytest.mark.parametrize("bits", FLOATS)
def test_representable_values_round_trip_exactly(bits: int) -> None:
    values = magnitudes(bits)
    row = torch.tensor((values + [-v for v in values] * 16)[: 128 - len(values)] + values)[:128]
    x = torch.stack([row * 2.0**e for e in (-90, -3, 0, 100)])
    assert torch.equal(there_and_back(x, bits), x)
    assert torch.equal(there_and_back(x, bits).signbit(), x.signbit())


@pytest.mark.parametrize(
    ("bits", "error"), [(3, 0.215), (4, 0.112), (5, 0.056), (6, 0.028), (8, 0.0070), (16, 0.0018)]
)
def test_relative_error_on_normal_numbers(bits: int, error: float) -> None:
    x = normal(200, 512)
    found = (there_and_back(x, bits) - x).norm() / x.norm()
    assert 0.8 * error < found < error


def test_outlier_channels_are_apart_in_bfloat16_and_leave_the_others_their_bits() -> None:
    """Adacc's separation, on one channel of a hundred that is 20 times as large."""
    x = normal(1024, 1024, seed=1)
    x[:, ::100] *= 20
    apart = there_and_back(x, 4 + APART)
    error, plain = (float((back - x).norm() / x.norm()) for back in (apart, there_and_back(x, 4)))
    assert error < 0.26 * plain
    assert torch.equal(apart[:, ::100], x[:, ::100].bfloat16().float())
    assert 8 * packed_bytes(x.shape, 4 + APART) / x.numel() < 4.38
    # The five channels that are apart without being outliers are those with the largest sums.
    kept = {int(n) for n in (apart == x.bfloat16().float()).all(0).nonzero()}
    assert kept == set(x.abs().sum(0).topk(16).indices.tolist())


def test_of_equal_channels_the_lower_is_apart_and_what_is_not_finite_shows() -> None:
    x = torch.ones(6, 130)
    x[:, 100:] = -2.0
    assert torch.equal(there_and_back(x, 3 + APART)[:, 100:103], x[:, 100:103])
    found = blockfloat.pack(x, 4 + APART)
    assert found[packed_bytes(x.shape, 4) :][:12].view(torch.int32).tolist() == [100, 101, 102]
    # The numbers 1 and 2, and nothing that was in memory before.
    assert blockfloat.pack(torch.zeros(6, 130), 4 + APART).nonzero().flatten().tolist() == [804, 808]
    x[2, 3], x[4, 129], x[0] = math.nan, math.inf, 1e-38
    sums = outliers.channel_sums(x, outliers.factor(x))
    assert sums.dtype == torch.int64 and int(sums.min()) >= 0
    back = there_and_back(x, 4 + APART)
    assert back[2].isnan().any() and not back[4].isfinite().all()
    assert back[[1, 3, 5]].isfinite().all()


def test_ties_go_to_the_even_code() -> None:
    # Steps of 1 at 4 bits where the largest is 12: 0.5, 1.5 and 2.5 lie between codes.
    row = torch.zeros(128)
    row[:8] = torch.tensor([12.0, 0.5, 1.5, 2.5, 5.0, 7.0, 10.0, -10.0])
    assert there_and_back(row, 4)[:8].tolist() == [12.0, 0.0, 2.0, 2.0, 4.0, 8.0, 8.0, -8.0]


@pytest.mark.parametrize("bits", FLOATS)
def test_extreme_values(bits: int) -> None:
    x = normal(8, 300, seed=1)
    x[0] *= 1e-35
    x[1, :128] = 0
    x[2] = 3e37
    x[3] *= 1e30
    x[4, 5] = math.nan
    x[5, 140] = math.inf
    x[6, 299] = -math.inf
    back = there_and_back(x, bits)
    assert (back[0] == 0).all() and (back[1, :128] == 0).all()
    # All are the block's largest, so only the scale is rounded.
    assert ((back[2] - 3e37).abs() / 3e37 < 2**-8).all()
    assert (back[3].isfinite()).all() and (back[3] != 0).any()
    assert back[4, :128].isnan().all() and not back[4, 128:].isnan().any()
    assert back[5, 128:256].isnan().all() and back[6, 256:].isnan().all()
    assert not back[5, :128].isnan().any() and not back[6, :256].isnan().any()
    assert there_and_back(torch.full((128,), 3.3e38), bits).isnan().all()


@each("bits", WIDTHS)
@each("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_and_views_are_stored_as_their_values(bits: int, dtype: torch.dtype) -> None:
    x = normal(6, 5, 64, seed=2).to(dtype)
    for view in (x, x.transpose(0, 1), x[:, ::2], x[..., 3:40]):
        packed = blockfloat.pack(view, bits)
        assert torch.equal(packed, blockfloat.pack(view.float().contiguous(), bits))
        back = blockfloat.unpack(packed, view.shape, bits, torch.bfloat16)
        assert torch.equal(back, there_and_back(view, bits).bfloat16())


def test_padding_and_memory_from_before_never_show() -> None:
    for bits in WIDTHS:
        x = normal(3, 70, seed=3)
        room = torch.full((3, 200), math.nan)
        room[:, :70] = x
        assert torch.equal(blockfloat.pack(room[:, :70], bits), blockfloat.pack(x, bits))


def test_blocks_do_not_see_each_other() -> None:
    x = normal(5000, 128, seed=4)
    for bits in (3, 4, 6):
        whole = there_and_back(x, bits)
        parts = torch.cat([there_and_back(part, bits) for part in x.split(333)])
        assert torch.equal(whole, parts)


@each("dtype", [torch.float32, torch.bfloat16])
@each("bits", WIDTHS)
def test_what_operators_store_is_no_view_of_their_input(bits: int, dtype: torch.dtype) -> None:
    """Whole blocks of bf16 are stored as they are at 16 bits; torch refuses a result that is its input."""
    x, weight = normal(2, 128).to(dtype), normal(128).to(dtype)
    stored = [
        blockfloat_ops.store(x, bits),
        blockfloat_ops.norm_store(x, weight, None, 1e-5, bits, dtype)[1],
        *blockfloat_ops.ffn_store(x, x.clone(), bits)[1:],
    ]
    before = [packed.clone() for packed in stored]
    x.zero_()
    assert all(map(torch.equal, stored, before))
