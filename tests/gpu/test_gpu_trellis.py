"""`trellis-R` on a GPU: the CPU's bytes and values for odd shapes, extreme values, many rates; refusals."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import ops as trellis_ops
from kernels.trellis import reference as trellis
from kernels.trellis.code import Coded
from kernels.trellis.grid import Grid
from tests.support.poison import needs_kernels
from tests.support.trellis_cases import encode_lanes
from wire.codecs.header import EXPONENT, seal
from wire.codecs.registry import codec
from wire.errors import NonFiniteError, PackedMismatchError
from wire.spec import TensorSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import trellis_write

GOLDEN = trellis_write.inputs()
RATES = (
    "trellis-2",
    "trellis-3.45",
    "trellis-4.41",
    "trellis-8.125",
    "trellis-10",
    "dither-2",
    "dither-3.45",
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> dict[str, torch.Tensor]:
    low_rank = normal(3, 700, 8) @ normal(8, 520, seed=1) + 0.1 * normal(3, 700, 520, seed=2)
    outliers = normal(2, 300, 200)
    outliers[..., 17] = 3000
    outliers[1, 7, 9] = -1e6
    return {
        "low rank": low_rank,
        "outliers": outliers.half().clamp(-6e4, 6e4),
        "one element": torch.tensor([-3.25]),
        "a row": normal(1, 4099),
        "a column": normal(5003, 1),
        "zeros": torch.zeros(40, 50, dtype=torch.bfloat16),
        "equal": torch.full((64, 96), 7.25),
        "one spike": torch.zeros(90, 80).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1e30)),
        "tiny": normal(3, 64, 200) * 1e-38,
        "subnormal": normal(3, 64, 200) * 1e-43,
        "large": (normal(3, 64, 200) * 1e37).bfloat16(),
        "40 decades": normal(128, 256) * torch.logspace(-30, 10, 128)[:, None],
        "not contiguous": normal(64, 128, 90).transpose(0, 2)[:, :, ::3],
        "three groups": normal(140, 1031).bfloat16(),
    }


def assert_same(x: torch.Tensor, name: str) -> None:
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    assert torch.equal(which.encode(x.cuda()).cpu(), packed)
    decoded = which.decode(packed.cuda(), spec)
    assert decoded.is_cuda and torch.equal(decoded.cpu(), which.decode(packed, spec))


@pytest.mark.parametrize("name", RATES)
@pytest.mark.parametrize("which", inputs())
def test_bytes_and_values_are_the_cpus(which: str, name: str) -> None:
    assert_same(inputs()[which], name)


@pytest.mark.parametrize("which", GOLDEN)
def test_golden_inputs_give_the_cpus_bytes(which: str) -> None:
    assert_same(GOLDEN[which], "trellis-4.41")


@pytest.mark.parametrize("highest", [20, 60, 103])
@pytest.mark.parametrize(
    "where", [Grid(1, 1, 1, 1), Grid(61, 3, 5, 5), Grid(4000, 2, 63, 32), Grid(150000, 5, 1000, 32)], ids=str
)
def test_lanes_give_the_cpus_words_for_every_class(where: Grid, highest: int) -> None:
    needs_kernels("trellis")
    generator = torch.Generator().manual_seed(highest)
    number = torch.randint(0, highest + 1, (where.elements,), generator=generator).to(torch.uint8)
    x = torch.randn(where.elements, generator=generator) * torch.exp2((number.float() - 12) / 4)
    x[::37] *= 50
    x.clamp_(-(2.0**14), 2.0**14)
    for family in range(2):
        expected = trellis_lanes.encode(x, number, trellis.gain(9000), where, family)
        made = encode_lanes(x.cuda(), number.cuda(), trellis.gain(9000), where, family)
        assert torch.equal(made.states.cpu(), expected.states)
        assert torch.equal(made.counts.cpu(), expected.counts)
        total = int(expected.counts.sum())
        words, joined = torch.empty(2, total, dtype=torch.int16)
        trellis_lanes.join(expected, words)
        trellis_lanes.join(Coded(made.states, made.counts.cpu(), made.words.cpu()), joined)
        assert torch.equal(joined, words)
        counts = expected.counts.long()
        n, whole = trellis_ops.decode(made.states, counts.cuda(), joined.cuda(), number.cuda(), where, family)
        found, _ = trellis_lanes.decode(expected.states, counts, words, number, where, family)
        assert whole and torch.equal(n.cpu(), found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_refused_when_sealed(bad: float) -> None:
    x = normal(64, 100).cuda()
    x[1, 50] = bad
    packed = codec("trellis-4.41").pack(x).cpu()
    with pytest.raises(NonFiniteError):
        seal(packed.numpy())


def test_damage_is_refused_or_decoded_as_by_the_cpu() -> None:
    x = GOLDEN["low-rank"]
    which, spec = codec("trellis-4.41"), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    header = replace(which._header(spec), exponent=int(packed[EXPONENT].view(torch.int32)))
    generator = torch.Generator().manual_seed(4)
    refused = 0
    for _ in range(60):
        forged = packed.clone()
        place = int(torch.randint(64, packed.numel(), (), generator=generator))
        forged[place] ^= int(torch.randint(1, 256, (), generator=generator))
        said = []
        for one in (forged, forged.cuda()):
            try:
                said.append(which.unpack(one, spec, header).cpu())
            except PackedMismatchError as error:
                said.append(str(error))
        assert type(said[0]) is type(said[1])
        if isinstance(said[0], str):
            refused += 1
            assert said[0] == said[1]
        else:
            assert torch.equal(said[0], said[1])
    assert refused > 40


GRAPHED = ("low rank", "outliers", "one spike", "tiny", "three groups", "zeros")


@pytest.mark.parametrize("name", ["trellis-2", "trellis-4.41"])
@pytest.mark.parametrize("which", GRAPHED)
def test_a_graph_packs_whatever_its_input_holds(which: str, name: str) -> None:
    """Captured with zeros: the plan, the step and the number of attempts are those of the tensor replayed."""
    needs_kernels("trellis")
    x = inputs()[which]
    expected = codec(name).encode(x)
    held = torch.zeros_like(x, device="cuda")
    codec(name).pack(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = codec(name).pack(held)
    for tensor, wanted in ((x, expected), (-x, codec(name).encode(-x)), (x, expected)):
        held.copy_(tensor)
        packed.fill_(0xA5)
        graph.replay()
        made = packed.cpu()
        seal(made.numpy())
        assert torch.equal(made, wanted)


def test_a_graph_passes_non_finite_values_on_to_be_refused() -> None:
    needs_kernels("trellis")
    x = normal(64, 100).cuda()
    codec("trellis-4.41").pack(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = codec("trellis-4.41").pack(x)
    x[1, 50] = float("nan")
    graph.replay()
    with pytest.raises(NonFiniteError):
        seal(packed.cpu().numpy())


def test_packing_never_waits_for_the_device() -> None:
    needs_kernels("trellis")
    x = normal(8, 1024, 512).bfloat16().cuda()
    which = codec("trellis-4.41")
    expected = which.pack(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = which.pack(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(packed, expected)


def test_nothing_is_written_outside_of_the_payload() -> None:
    from kernels.trellis.triton import encode as triton_trellis_encode
    from wire.codecs.trellis import settings

    x = inputs()["low rank"].cuda()
    expected = codec("trellis-4.41").encode(x.cpu())[64:]
    size = expected.numel()
    whole = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
    payload = whole[256 : 256 + size]
    triton_trellis_encode.encode(x.view(-1, x.shape[-1]), payload, settings(2100, 520, size))
    assert torch.equal(payload.cpu(), expected)
    assert (whole[:256] == 0xA5).all() and (whole[256 + size :] == 0xA5).all()


def test_host_transfers_do_not_grow_with_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a tensor on a GPU is copied to the host but the prefix, when it is decoded."""
    needs_kernels("trellis")
    copied: list[int] = []
    original = torch.Tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        copied.append(self.nbytes)
        return original(self)

    x = normal(8, 1024, 512).bfloat16().cuda()
    which, spec = codec("trellis-4.41"), TensorSpec(x.dtype, tuple(x.shape))
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    packed = which.pack(x)
    header = replace(which._header(spec), exponent=int(packed[EXPONENT].view(torch.int32)))
    which.unpack(packed, spec, header)
    assert copied and sum(copied) < x.nbytes // 50
