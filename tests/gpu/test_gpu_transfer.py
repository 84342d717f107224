"""Tensors off a GPU and onto it, on streams beside the stage's own: the CPU's bits, in whatever order."""

import pytest
import torch

from node.stage.device_transfer import CpuTransfer, CudaTransfer, DeviceTransfer
from wire.codecs.aqsgd import AqsgdCodec, AqsgdTensorCodec, SampleBatch
from wire.codecs.base import Codec
from wire.codecs.registry import codec
from wire.codecs.sample_cache import SampleCache
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

SPEC = TensorSpec(torch.float32, (2, 512, 1024))
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["bf16", "tah", "fixed-8"])
def test_packing_sees_the_tensor_as_it_was_marked(name: str) -> None:
    """Packing waits for work queued before the mark; the bits are the CPU's."""
    transfer = CudaTransfer(DEVICE)
    base = torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(1))
    expected = codec(name).encode(base)
    for _ in range(5):
        x = base.to(DEVICE)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        y = x * 1.0
        mark = transfer.mark()
        packed = transfer.pack(codec(name), y, mark)
        assert packed.is_pinned()
        assert torch.equal(packed, expected)


@pytest.mark.parametrize("name", ["bf16", "tah", "fixed-8"])
def test_compute_sees_what_was_unpacked(name: str) -> None:
    transfer = CudaTransfer(DEVICE)
    packed = codec(name).encode(torch.randn(SPEC.shape, generator=torch.Generator().manual_seed(2)))
    expected = codec(name).decode(packed, SPEC).double().sum()
    for _ in range(5):
        tensor, mark = transfer.unpack(codec(name), packed.clone(), SPEC)
        transfer.wait(tensor, mark)
        total = tensor.double().sum()
        del tensor
        assert torch.allclose(total.cpu(), expected, rtol=1e-12)


class Remembering:
    """`aqsgd-4` with the two ends of a boundary, whose four samples come two at a time, and a transfer."""

    def __init__(self, transfer: DeviceTransfer, shape: tuple[int, ...] = SPEC.shape[1:]) -> None:
        self.ends = [SampleCache(4, shape, since=0) for _ in range(2)]
        self.transfer = transfer
        found = codec("aqsgd-4")
        assert isinstance(found, AqsgdCodec)
        self._codec = found

    def codec(self, end: int, place: int) -> AqsgdTensorCodec:
        cache, samples = self.ends[end], (3 - place, place)
        return self._codec.of(SampleBatch(cache, samples, tuple(map(cache.knows, samples)), place))

    def step(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What was packed and what came out, of each microbatch; then the commit."""
        made = []
        for place, x in enumerate(tensors):
            packed = self.transfer.pack(self.codec(0, place), x, self.transfer.mark())
            out, mark = self.transfer.unpack(self.codec(1, place), packed.clone(), SPEC)
            self.transfer.wait(out, mark)
            made += [packed, out]
        for end in self.ends:
            end.commit()
        return made


def test_aqsgd_caches_hold_the_cpus_bits() -> None:
    """First pass, then changes: what is sent, what comes out and what both ends remember."""
    gpu, cpu = Remembering(CudaTransfer(DEVICE)), Remembering(CpuTransfer())
    base = torch.randn((2, *SPEC.shape), generator=torch.Generator().manual_seed(3))
    for step in range(4):
        drift = torch.randn(base.shape, generator=torch.Generator().manual_seed(10 + step))
        tensors = list(base + 0.1 * step * drift)
        expected = cpu.step(tensors)
        for got, wanted in zip(gpu.step([x.to(DEVICE) for x in tensors]), expected, strict=True):
            assert torch.equal(got.cpu(), wanted)
        for end in (0, 1):
            there, here = (each.ends[end].recall(range(4), torch.device("cpu")) for each in (gpu, cpu))
            assert torch.equal(there.view(torch.int16), here.view(torch.int16))
            assert gpu.ends[end].crc(range(4)) == cpu.ends[end].crc(range(4))


def test_an_aborted_step_on_a_gpu_updates_no_cache() -> None:
    gpu = Remembering(CudaTransfer(DEVICE))
    x = torch.randn((2, *SPEC.shape), generator=torch.Generator().manual_seed(4)).to(DEVICE)
    gpu.step(list(x))
    before = gpu.ends[0].recall(range(4), torch.device("cpu"))
    gpu.transfer.pack(gpu.codec(0, 0), x[1], gpu.transfer.mark())
    gpu.ends[0].rollback()
    gpu.ends[0].commit()
    assert torch.equal(gpu.ends[0].recall(range(4), torch.device("cpu")), before)


@pytest.mark.parametrize("name", ["tah", "fixed-8", "trellis-4", "aqsgd-4"])
def test_the_steady_state_allocates_nothing(name: str) -> None:
    transfer = CudaTransfer(DEVICE)
    x = torch.randn(SPEC.shape, device=DEVICE)
    remembering = Remembering(transfer)

    def stateless(chosen: Codec) -> None:
        packed = transfer.pack(chosen, x, transfer.mark())
        tensor, mark = transfer.unpack(chosen, packed, SPEC)
        transfer.wait(tensor, mark)

    def round_trip() -> None:
        if name == "aqsgd-4":
            remembering.step([x, x])
        else:
            stateless(codec(name))
        # Host memory is free once the device has read it, which on a busy one may be after the next pack.
        torch.cuda.synchronize()

    for _ in range(4):
        round_trip()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(DEVICE)["segment.all.allocated"]
    host = torch.cuda.host_memory_stats()["num_host_alloc"]
    for _ in range(20):
        round_trip()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats(DEVICE)["segment.all.allocated"] == before
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == host


def test_non_finite_values_are_refused() -> None:
    transfer = CudaTransfer(DEVICE)
    x = torch.full(SPEC.shape, torch.nan, device=DEVICE)
    with pytest.raises(NonFiniteError):
        transfer.pack(codec("fixed-8"), x, transfer.mark())
