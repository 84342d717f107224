"""Fused layers and attention on a GPU: near the exact gradients, the same bits every time, no waiting."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention.ops import attention, attention_backward, has_fixed_order_kernels
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.layers import ops
from node.config.schema import ModelSection
from node.model import blocks
from node.model.chunk import build_chunk, compute_precision


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("width", [64, 128, 96])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(300, 8, 2), (77, 3, 3), (1024, 4, 4)])
def test_attention_is_exact_to_rounding_and_repeats_its_bits(
    length: int, heads: int, kv_heads: int, width: int
) -> None:
    query, key, value, grad = (
        drawn(2, length, count, width, seed=seed).bfloat16().transpose(1, 2)
        for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    leaves = [part.float().requires_grad_() for part in (query, key, value)]
    exact = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    wanted = [exact, *torch.autograd.grad(exact, leaves, grad.float())]
    seen: list[Tensor] | None = None
    for _ in range(20):
        out, sums = attention(query, key, value)
        found = [out, *attention_backward(grad, query, key, value, out, sums)]
        assert seen is None or all(torch.equal(one, other) for one, other in zip(found, seen, strict=True))
        seen = found
        assert out.transpose(1, 2).is_contiguous()
    assert seen is not None
    unordered = attention_backward(grad, query, key, value, *attention(query, key, value), fixed_order=False)
    assert all(distance(one, other) < 0.006 for one, other in zip(unordered, wanted[1:], strict=True))
    assert all(distance(one, other.detach()) < 0.006 for one, other in zip(seen, wanted, strict=True))
    hopper = torch.cuda.get_device_capability() == (9, 0) and dispatch.has_kernels(query.device, "attention")
    assert has_fixed_order_kernels(query) == (hopper and width != 96)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [200, 1024])
def test_norms_and_activations_are_the_references(width: int, biased: bool, dtype: torch.dtype) -> None:
    allowed = 5e-6 if dtype == torch.float32 else 5e-3
    x, residual, gate, up, grad = (drawn(3, 300, width, seed=seed) for seed in range(5))
    gate, up, grad = gate.to(dtype), up.to(dtype), grad.to(dtype)
    weight, bias = drawn(width, seed=6), drawn(width, seed=7) if biased else None
    exact = reference.norm(x.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    assert distance(ops.norm(x, weight, bias, 1e-5, dtype), exact) < allowed
    found = ops.norm_backward(grad, x, residual, weight, bias, 1e-5)
    wanted = reference.norm_gradient(grad, x, weight, bias, 1e-5)
    assert distance(found[0], wanted[0] + residual) < 5e-6 and distance(found[1], wanted[1]) < 5e-6
    alone = ops.norm_backward(grad, x.to(dtype), None, weight, bias, 1e-5)
    assert alone[0].dtype == dtype and distance(alone[0], wanted[0]) < allowed
    other = None if biased else up
    inner = reference.gelu(gate.double()) if biased else reference.gated(gate.double(), up.double(), False)
    assert distance(ops.activation(gate, other), inner) < allowed
    gradients = (
        (reference.gelu_gradient(grad, gate),) if biased else reference.gated_gradient(grad, gate, up, False)
    )
    again, made = ops.activation_backward(grad.clone(), gate, other)
    assert distance(again, inner) < allowed
    assert all(distance(one, two) < allowed for one, two in zip(made, gradients, strict=True))


@pytest.mark.parametrize("back", [False, True])
def test_rotary_has_the_references_bits(back: bool) -> None:
    x = drawn(2, 33, 5, 64).bfloat16().transpose(1, 2)
    angles = drawn(40, 32, seed=2).repeat(1, 2)
    wanted = reference.rotate(x, angles.cos()[:33], angles.sin()[:33], back=back)
    assert torch.equal(ops.rotate(x.clone(), angles.cos(), angles.sin(), back=back), wanted)


@pytest.mark.parametrize(
    ("family", "hidden"), [("llama", 512), ("llama", 1024), ("llama", 768), ("gpt2", 512)]
)
def test_a_fused_block_is_as_near_the_exact_one_as_the_plain_block(
    family: str, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 64, 128 and 96; the fused block repeats its bits."""
    model = ModelSection(family=family, layers=1, hidden=hidden, heads=8, kv_heads=2, ffn=1376, sequence=300)
    device = torch.device("cuda")
    x, upstream = drawn(2, 300, hidden), drawn(2, 300, hidden, seed=2)

    def run(fused: bool, precision: str = "bfloat16") -> list[Tensor]:
        monkeypatch.setattr(blocks.Block, "fuses", fused)
        chunk = build_chunk(model, ("block.0000",), 3, device)
        leaf = x.clone().requires_grad_()
        with compute_precision(precision, device):
            result = chunk(leaf)
        torch.autograd.backward(result, upstream)
        gradients = [leaf.grad, *(parameter.grad for parameter in chunk.parameters())]
        return [result.detach(), *(part for part in gradients if part is not None)]

    exact, plain, first, second = run(False, "float32"), run(False), run(True), run(True)
    assert all(torch.equal(part, again) for part, again in zip(first, second, strict=True))
    for found, ordinary, wanted in zip(first, plain, exact, strict=True):
        assert distance(found, wanted) < 1.2 * distance(ordinary, wanted) + 1e-4
