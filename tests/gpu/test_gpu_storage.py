"""Stored tensors on a GPU: the CPU's bits, gradients near the plain block's, equal bits twice, no waiting."""

import pytest
import torch
from torch import Tensor

from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import ops as blockfloat_ops
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import APART, WIDTHS
from node.config.schema import ModelSection
from node.model.chunk import build_chunk, compute_precision
from node.model.storage import PRESETS, Storage
from tests.support.poison import needs_kernels


def sample(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(shape, generator=generator) ** 3
    x.view(-1, shape[-1])[1] = 0
    x.view(-1, shape[-1])[2] *= 1e-33
    return x


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.cpu().double() - wanted.double()).norm() <= 5e-6 * wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(300, 512), (3, 50, 200), (77,), (90, 1)], ids=str)
@pytest.mark.parametrize("bits", (*WIDTHS, 4 + APART))
def test_bits_are_the_cpus(bits: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (sample(*shape) if len(shape) > 1 else torch.linspace(-3, 7, shape[0])).to(dtype)
    packed = blockfloat.pack(x, bits)
    made = blockfloat_ops.store(x.cuda(), bits)
    assert made.is_cuda and torch.equal(made.cpu(), packed)
    back = blockfloat_ops.restore(made, list(shape), bits, dtype)
    assert torch.equal(back.cpu(), blockfloat.unpack(packed, shape, bits, dtype))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [200, 1024])
def test_norms_and_inner_activations_are_the_cpus(width: int, biased: bool) -> None:
    x, grad, residual, weight = (
        sample(700, width),
        sample(700, width),
        sample(700, width),
        sample(3, width)[0],
    )
    bias = sample(4, width)[0] if biased else None
    there = [None if part is None else part.cuda() for part in (x, grad, residual, weight, bias)]
    normed, packed = blockfloat_ops.norm_store(there[0], there[3], there[4], 1e-5, 4, torch.float32)
    wanted, expected = blockfloat_layers.norm_store(x, weight, bias, 1e-5, 4, torch.float32)
    assert torch.equal(packed.cpu(), expected) and near(normed, wanted)
    found = blockfloat_ops.norm_backward(there[1], packed, there[2], there[3], there[4], 1e-5, 4)
    for part, exact in zip(
        found, blockfloat_layers.norm_backward(grad, expected, residual, weight, bias, 1e-5, 4), strict=True
    ):
        assert near(part, exact)
    made = blockfloat_ops.ffn_store(there[0], there[2] if biased else None, 4)
    on_cpu = blockfloat_layers.ffn_store(x, residual if biased else None, 4)
    assert near(made[0], on_cpu[0]) and torch.equal(made[1].cpu(), on_cpu[1])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("preset", ["agoq", "compact"])
def test_a_block_repeats_its_bits_and_is_near_the_plain_one(family: str, preset: str) -> None:
    model = ModelSection(family=family, layers=1, hidden=512, heads=8, kv_heads=2, ffn=1376, sequence=300)
    device = torch.device("cuda")
    x, upstream = sample(2, 300, 512).to(device), sample(2, 300, 512).to(device)

    def run(storage: Storage) -> list[Tensor]:
        chunk = build_chunk(model, ("block.0000",), 3, device, storage=storage)
        leaf = x.clone().requires_grad_()
        with compute_precision("bfloat16", device):
            result = chunk(leaf)
        torch.autograd.backward(result, upstream)
        gradients = [leaf.grad, *(parameter.grad for parameter in chunk.parameters())]
        return [result.detach(), *(part for part in gradients if part is not None)]

    plain, first, second = run(Storage()), run(PRESETS[preset]), run(PRESETS[preset])
    assert all(torch.equal(part, again) for part, again in zip(first, second, strict=True))
    distances = [
        float((part - exact).norm() / exact.norm()) for part, exact in zip(first, plain, strict=True)
    ]
    assert distances[0] < 0.01 and max(distances) < 0.25


def test_nothing_waits_for_the_device() -> None:
    needs_kernels("storage")
    x = sample(256, 512).cuda()
    weight = torch.ones(512, device="cuda")

    def work() -> None:
        packed = blockfloat_ops.store(x, 4)
        blockfloat_ops.restore(packed, [256, 512], 4, torch.bfloat16)
        _, kept = blockfloat_ops.norm_store(x, weight, None, 1e-5, 4, torch.bfloat16)
        blockfloat_ops.norm_backward(x, kept, x, weight, None, 1e-5, 4)
        inner, gate, up = blockfloat_ops.ffn_store(x, x, 4)
        blockfloat_ops.ffn_backward(inner, gate, up, 4)

    # Compiles.
    work()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
