"""Rows that a GPU packs together: each row's bytes and values are the CPU's."""

import pytest
import torch
from torch import Tensor

from kernels.common.tiles import NON_FINITE
from node.model.units import unit_names
from node.stage.device_transfer import CudaTransfer
from node.training.group_sums import CodecPacking
from tests.support.device_sums import DeviceSums, GroupSums, through
from tests.support.grouped_gradients import Gradients, configured, gradients
from tests.support.poison import needs_kernels
from wire.codecs.formats import codec_format
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

CPU = torch.device("cpu")
NAMES = ("fp32", "bf16", "fp16", "fixed-2", "fixed-4", "fixed-8", "fixed-10", "trellis-4.41", "dither-3")
WIDTHS = (1, 77, 4099, 32768, 65536, 98304, 131072)


def rows(width: int, name: str = "", count: int = 9) -> Tensor:
    """Rows as gradients have them, and what codecs find hard; for `fp16` within its range."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(count, width, generator=generator) * 1e-4
    x *= torch.where(torch.rand(count, width, generator=generator) < 3e-3, 30.0, 1.0)
    x[1] = 0
    x[2] *= 1e-38
    x[3] *= 1e38
    x[4] *= torch.logspace(-26, 14, width)
    x[5] = -0.0
    x[6] = 7.25
    x[7] = 0
    x[7, width // 2] = -1e30
    return x.clamp_(-65504, 65504) if name == "fp16" else x


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_values_are_the_cpus(name: str, width: int) -> None:
    x, which = rows(width, name), codec(name)
    expected = [which.decode(which.encode(row), TensorSpec(row.dtype, (width,))) for row in x]
    for row, packed in zip(x, which.pack_rows(x.cuda()).cpu(), strict=True):
        assert torch.equal(packed, which.pack(row))
    values = through(which, x.cuda()).cpu()
    assert torch.equal(values.view(torch.int32), torch.stack(expected).view(torch.int32))


@pytest.mark.parametrize("name", ["trellis-4.41", "fixed-8"])
def test_many_rows_are_each_by_itself(name: str) -> None:
    """More than fit in the room of one call."""
    which = codec(name)
    x = torch.randn(400, 65536, device="cuda") * torch.logspace(-3, 3, 400, device="cuda")[:, None]
    packed, values = which.pack_rows(x), through(which, x)
    for number in (0, 1, 57, 199, 200, 201, 333, 399):
        alone = which.encode(x[number])
        assert torch.equal(packed[number, :60], alone[:60])
        assert torch.equal(packed[number, 64:], alone[64:])
        assert torch.equal(values[number], which.decode(alone, TensorSpec(x.dtype, (65536,))))


@pytest.mark.parametrize("name", NAMES)
def test_a_node_packs_and_unpacks_rows_as_the_cpu_does(name: str) -> None:
    x, which, device = rows(65536), codec(name), CudaTransfer(torch.device("cuda", 0))
    spec = TensorSpec(x.dtype, (65536,))
    on_gpu = x.cuda()
    packed = device.pack_rows(which, on_gpu, device.mark())
    for row, one in zip(x, packed, strict=True):
        assert torch.equal(one, which.encode(row))
    values, mark = device.unpack_rows(which, packed, spec)
    device.wait(values, mark)
    expected = torch.stack([which.decode(one, spec) for one in packed])
    assert torch.equal(values.cpu().view(torch.int32), expected.view(torch.int32))
    on_gpu[3, 77] = float("nan")
    with pytest.raises(NonFiniteError) as refused:
        device.pack_rows(which, on_gpu, device.mark())
    assert refused.value.row == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_only_the_row_that_is_not_finite_says_so(name: str, bad: float) -> None:
    x = torch.randn(3, 5000)
    x[1, 37] = bad
    packed = codec(name).pack_rows(x.cuda()).cpu()
    exponents = packed[:, EXPONENT].contiguous().view(torch.int32)[:, 0]
    assert (exponents == NON_FINITE).tolist() == [False, True, False]


def on_gpu(values: Gradients) -> Gradients:
    return {unit: {name: one.cuda() for name, one in named.items()} for unit, named in values.items()}


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "fixed-8", "trellis-4.41"])
def test_sums_are_those_of_packed_pieces(name: str) -> None:
    needs_kernels(codec_format(name).KERNELS)
    config = configured(name)
    units = unit_names(config.model)
    expected = GroupSums(config, units, CodecPacking(CPU), of_round=False)
    sums = DeviceSums(config, units, of_round=False)
    for group in range(4):
        expected.group_done(group, gradients(config, group))
        sums.group_done(group, on_gpu(gradients(config, group)))
    found = dict(sums.finish())
    for unit, values in expected.finish():
        for parameter, value in values.items():
            assert torch.equal(found[unit][parameter].cpu().view(torch.int32), value.view(torch.int32))
