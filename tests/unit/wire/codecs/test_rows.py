"""Rows that go through a codec together: the bytes and values that each has by itself."""

import pytest
import torch

from kernels.common.tiles import NON_FINITE
from tests.support.cases import each
from wire.codecs.base import ROW_BYTES
from wire.codecs.header import EXPONENT, HEADER_BYTES
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

NAMES = ("fp32", "bf16", "fp16", "fixed-2", "fixed-8", "fixed-10", "tah", "trellis-4.41", "dither-3")


def rows(width: int) -> torch.Tensor:
    """Rows as gradients have them, and what codecs find hard."""
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(width))
    x[1] = 0
    x[2] *= 1e-42
    x[3] *= 1e37
    x[4] *= torch.logspace(-30, 10, width)
    x[5] = -0.0
    x[6] = 7.25
    x[7, width // 2] = -1e30
    return x


def exponents(name: str, x: torch.Tensor) -> torch.Tensor:
    packed = codec(name).pack_rows(x)
    return packed[:, EXPONENT].contiguous().view(torch.int32)[:, 0]


@each("name", NAMES)
@each("width", [1, 77, 128, 1300])
def test_rows_together_are_each_by_itself(name: str, width: int) -> None:
    x, which = rows(width), codec(name)
    for row, packed in zip(x, which.pack_rows(x), strict=True):
        assert torch.equal(packed, which.pack(row))


@each("name", NAMES)
def test_rows_are_unpacked_together_as_each_by_itself(name: str) -> None:
    x, which = rows(130), codec(name)
    spec = TensorSpec(x.dtype, (130,))
    packed = [which.encode(row) for row in x]
    size = len(packed[0])
    records = torch.full((len(x), -(-size // ROW_BYTES) * ROW_BYTES), 0xA5, dtype=torch.uint8)
    for record, one in zip(records, packed, strict=True):
        record[:size] = one
    values = which.unpack_rows(records, spec, [which.open(one.numpy(), spec) for one in packed])
    expected = torch.stack([which.decode(one, spec) for one in packed])
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))


@each("name", ["fp32", "bf16", "fixed-8"])
def test_forged_rows_are_refused(name: str) -> None:
    which, spec = codec(name), TensorSpec(torch.float32, (128,))
    records = torch.zeros(3, 640, dtype=torch.uint8)
    for record in records:
        packed = which.encode(torch.randn(128))
        record[: len(packed)] = packed
    header = which.open(packed.numpy(), spec)
    records[1, HEADER_BYTES : HEADER_BYTES + 4] = 0xFF  # NaNs, in scales too
    with pytest.raises(NonFiniteError):
        which.unpack_rows(records, spec, [header] * 3)


@each("name", NAMES)
@each("bad", [float("nan"), float("inf"), -float("inf")])
def test_only_the_row_that_is_not_finite_says_so(name: str, bad: float) -> None:
    x = torch.randn(3, 100)
    x[1, 37] = bad
    assert (exponents(name, x) == NON_FINITE).tolist() == [False, True, False]


def test_values_beyond_a_codecs_range_are_not_finite() -> None:
    x = torch.tensor([[3.4e38, 1.0], [3.3e38, 1.0]])
    assert (exponents("bf16", x) == NON_FINITE).tolist() == [True, False]
