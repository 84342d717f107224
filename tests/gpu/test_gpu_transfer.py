"""Tensors off a GPU and onto it, on streams beside the stage's own: the CPU's bits, in whatever order."""

import pytest
import torch

from node.stage.device_transfer import CudaTransfer
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

SPEC = TensorSpec(torch.float32, (2, 512, 1024))
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["bf16", "tah", "fixed-8"])
def test_packing_sees_the_tensor_as_it_was_marked(name: str) -> None:
    """Work queued before the mark is seen though the device has not done it yet; the bits are the CPU's."""
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


def test_the_steady_state_allocates_nothing() -> None:
    transfer = CudaTransfer(DEVICE)
    x = torch.randn(SPEC.shape, device=DEVICE)

    def round_trip() -> None:
        packed = transfer.pack(codec("tah"), x, transfer.mark())
        tensor, mark = transfer.unpack(codec("tah"), packed, SPEC)
        transfer.wait(tensor, mark)

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


def test_what_is_not_finite_is_refused() -> None:
    transfer = CudaTransfer(DEVICE)
    x = torch.full(SPEC.shape, torch.nan, device=DEVICE)
    with pytest.raises(NonFiniteError):
        transfer.pack(codec("fixed-8"), x, transfer.mark())
