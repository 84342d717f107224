"""Attention's backward, and norms, activations and rotary that store nothing, under Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from kernels.common import layers as reference
from kernels.common.matrices import side_by_side
from tests.support.interpreter import inside

pytestmark = inside


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 3e-6 * wanted.double().norm())


@pytest.mark.parametrize(
    ("of_keys", "of_queries"),
    [((16, 32), (32, 16)), ((32, 16), (16, 16))],
    ids=["keys 16 x 32", "keys 32 x 16"],
)
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(64, 2, 2), (77, 4, 2), (5, 3, 1), (20, 12, 2)])
@pytest.mark.parametrize("enough", [1, 9, 512])
def test_gradients_of_attention_are_the_exact_ones(
    length: int,
    heads: int,
    kv_heads: int,
    enough: int,
    of_keys: tuple[int, int],
    of_queries: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with blocks of more queries than keys, where the sequence ends inside a block, and where programs
    share the query heads of a key."""
    from kernels.attention import triton
    from kernels.attention.triton import Blocks, backward

    monkeypatch.setattr(triton, "ENOUGH_PROGRAMS", enough)

    query, key, value, grad = (
        drawn(2, length, count, 16, seed=seed).transpose(1, 2)
        for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    leaves = [part.detach().requires_grad_() for part in (query, key, value)]
    shared = [part.repeat_interleave(heads // kv_heads, 1) for part in leaves[1:]]
    scores = leaves[0] @ shared[0].transpose(-1, -2) / 16**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    out = scores.softmax(-1) @ shared[1]
    wanted = torch.autograd.grad(out, leaves, grad)
    found = backward(
        grad,
        query,
        key,
        value,
        out.detach(),
        scores.logsumexp(-1).detach(),
        of_keys=Blocks(*of_keys, 4, 2),
        of_queries=Blocks(*of_queries, 4, 2),
    )
    assert all(near(one, other) for one, other in zip(found, wanted, strict=True))
    # Columns of one tensor, so that one product takes all three back.
    assert side_by_side([part.transpose(1, 2).flatten(2) for part in found]).data_ptr() == found[0].data_ptr()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("width", [1, 130, 256])
def test_norms_that_store_nothing(width: int, biased: bool) -> None:
    from kernels.blockfloat.triton import norm

    x, grad, residual = (drawn(3, 7, width, seed=seed) for seed in range(3))
    weight, bias = drawn(width, seed=4), drawn(width, seed=5) if biased else None
    assert near(norm.norm(x, weight, bias, 1e-5, torch.float32), reference.norm(x, weight, bias, 1e-5))
    of_x, of_weight, of_bias = norm.norm_backward(grad, x, residual, weight, bias, 1e-5, 0)
    wanted = reference.norm_gradient(grad, x, weight, bias, 1e-5)
    assert near(of_x, wanted[0] + residual) and near(of_weight, wanted[1])
    assert wanted[2] is None or near(of_bias, wanted[2])
    of_x, of_weight, _ = norm.norm_backward(grad, x, None, weight, bias, 1e-5, 0)
    assert near(of_x, wanted[0]) and near(of_weight, wanted[1])


@pytest.mark.parametrize("gate_of", ["", "silu", "gelu"])
@pytest.mark.parametrize("width", [1, 130])
def test_activations_that_store_nothing(width: int, gate_of: str) -> None:
    from kernels.blockfloat.triton import ffn

    gate, up, grad = (drawn(3, 7, width, seed=seed) for seed in range(3))
    gelu = gate_of == "gelu"
    wanted: tuple[Tensor, ...]
    if gate_of:
        inner, wanted = reference.gated(gate, up, gelu), reference.gated_gradient(grad, gate, up, gelu)
    else:
        inner, wanted = reference.gelu(gate), (reference.gelu_gradient(grad, gate),)
    assert near(ffn.activation(gate, up if gate_of else None, gelu), inner)
    again = grad.clone()
    found = ffn.ffn_backward(again, gate, up if gate_of else None, 0, gelu)
    assert near(again, inner)
    assert near(found, torch.cat(wanted, dim=-1))


def test_activations_of_columns_are_those_of_whole_tensors() -> None:
    """One product makes the gate and up side by side; their gradients too are columns of one tensor."""
    from kernels.blockfloat.triton import ffn

    both, grad = drawn(3, 7, 2 * 130), drawn(3, 7, 130, seed=2)
    gate, up = both.chunk(2, dim=-1)
    assert torch.equal(ffn.activation(gate, up), ffn.activation(gate.contiguous(), up.contiguous()))
    found, wanted = (
        ffn.ffn_backward(grad.clone(), one, other, 0)
        for one, other in ((gate, up), (gate.contiguous(), up.contiguous()))
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("first", "stride"), [(0, 77), (7 * 77 + 5, 200), (2**32 - 100, 2**20)])
def test_dropout_has_the_references_bits(dtype: torch.dtype, first: int, stride: int) -> None:
    """Of more elements than one program has, and with numbers that need more than 32 bits."""
    from kernels.layers.triton import drop

    x = drawn(3, 31, 77).to(dtype)
    salt = torch.tensor([-1640531527], dtype=torch.int32)
    for share in (0.1, 0.5):
        found = drop(x, salt, share, first=first, stride=stride)
        wanted = reference.drop(x, salt, share, first=first, stride=stride)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(bits), wanted.view(bits))
        assert abs(float((wanted == 0).float().mean()) - share) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [7, 64, 301])
def test_losses_of_logits_and_their_gradients(
    vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several turns over a row's logits, the largest in the first and in the last; between guards."""
    from kernels.layers import triton

    monkeypatch.setattr(triton, "LOGITS", 64)
    logits = (drawn(6, vocab) * 20).to(dtype)
    logits[0, 0] = logits[1, -1] = 90.0
    logits[2, 1:] = -torch.inf
    labels = torch.arange(6) % vocab
    labels[2], labels[3] = 0, -100
    room = torch.full((8, vocab), torch.nan, dtype=dtype)
    found, wanted = room[1:7], logits.clone()
    for scale in (None, 0.125):
        found.copy_(logits)
        losses = triton.cross_entropy_(found, labels, -100, scale)
        expected = reference.cross_entropy_(wanted, labels, -100, scale)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-7)
    assert not found[3].any() and losses[3] == 0 and room[0].isnan().all() and room[7].isnan().all()
    logits[4, 0] = torch.nan
    assert triton.cross_entropy_(logits, labels, -100, 1.0).isnan().tolist() == [n == 4 for n in range(6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_residual_sum_has_torchs_bits(dtype: torch.dtype) -> None:
    from kernels.layers.triton import add

    x, made = drawn(3, 7, 130), drawn(3, 7, 130, seed=2).to(dtype)
    assert torch.equal(add(x, made), x + made)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (9, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_has_the_references_bits(dtype: torch.dtype, heads: int, width: int, back: bool) -> None:
    from kernels.layers.triton import rotate_

    x = drawn(2, 5, heads, width).to(dtype)
    angles = drawn(5, width // 2, seed=2).repeat(1, 2)
    wanted = reference.rotate(x.transpose(1, 2), angles.cos(), angles.sin(), back=back).transpose(1, 2)
    assert torch.equal(rotate_(x.clone(), angles.cos(), angles.sin(), back=back), wanted)
    # Columns of a wider tensor, as one product for queries, keys and values makes them: turned in place.
    wide = torch.zeros(2, 5, 3 * heads, width, dtype=dtype)
    columns = wide[:, :, heads : 2 * heads]
    columns.copy_(x)
    rotate_(columns, angles.cos(), angles.sin(), back=back)
    assert torch.equal(columns, wanted)
    assert not wide[:, :, :heads].any() and not wide[:, :, 2 * heads :].any()
