"""Attention of chunks, and with sinks, on a GPU: near the exact results, the same bits every time."""

import pytest
import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.ops import attention, attention_backward, chunk_backward, sinks_gradient
from kernels.attention.reach import Documents, Reach

GPU = torch.device("cuda", 0)
LENGTH = 900
CHUNKS = ((0, 400), (400, 401), (401, 640), (640, LENGTH))


def drawn(count: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(2, LENGTH, count, width, generator=made, device="cuda").to(dtype).transpose(1, 2)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def reach_of(window: int, apart: bool) -> Reach:
    starts = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.01
    return Reach(window=window, documents=Documents.of(starts, GPU) if apart else None)


@pytest.mark.parametrize(
    ("window", "apart", "sinks", "width", "heads", "kv_heads", "dtype"),
    [
        (0, False, False, 128, 8, 2, torch.bfloat16),
        (100, False, True, 64, 8, 2, torch.bfloat16),
        (0, True, False, 96, 3, 3, torch.float16),
        (100, True, True, 256, 4, 1, torch.bfloat16),
        (100, True, False, 64, 2, 1, torch.float32),
    ],
)
def test_chunks_give_what_the_whole_sequence_does(
    window: int, apart: bool, sinks: bool, width: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    query, key, value, grad = (
        drawn(count, width, seed, dtype) for seed, count in enumerate((heads, kv_heads, kv_heads, heads))
    )
    reach, logits = reach_of(window, apart), torch.linspace(-1, 3, heads, device=GPU) if sinks else None
    wide = [part.float() for part in (query, key, value)]
    whole = reference.attention(wide[0], wide[1], wide[2], reach, logits)
    expected = reference.attention_backward(grad.float(), wide[0], wide[1], wide[2], *whole, reach)
    wanted = [*whole, *expected]
    if logits is not None:
        wanted.append(-((logits[:, None] - whole[1]).exp() * (grad.float() * whole[0]).sum(-1)).sum((0, 2)))
    seen: list[Tensor] | None = None
    for _ in range(3):
        of_key, of_value = (torch.zeros(2, kv_heads, LENGTH, width, device=GPU) for _ in range(2))
        made = [
            attention(query[:, :, first:last], key[:, :, :last], value[:, :, :last], reach, logits)
            for first, last in CHUNKS
        ]
        of_queries, of_sinks = [], torch.zeros(heads, device=GPU)
        for (first, last), (out, sums) in reversed([*zip(CHUNKS, made, strict=True)]):
            mine = grad[:, :, first:last]
            parts = query[:, :, first:last], key[:, :, :last], value[:, :, :last], out, sums
            onto = of_key[:, :, :last], of_value[:, :, :last]
            of_queries.insert(0, chunk_backward(mine, *parts, *onto, reach, logits))
            if logits is not None:
                of_sinks += sinks_gradient(mine, out, sums, logits)
        outs, sums = (torch.cat(parts, 2) for parts in zip(*made, strict=True))
        found = [outs, sums, torch.cat(of_queries, 2), of_key, of_value, *([of_sinks] if sinks else [])]
        assert seen is None or all(torch.equal(one, other) for one, other in zip(found, seen, strict=True))
        seen = found
    assert seen is not None
    allowed = {torch.bfloat16: 0.008, torch.float16: 0.002, torch.float32: 1e-5}[dtype]
    assert all(distance(one, other) < allowed for one, other in zip(seen, wanted, strict=True))


def test_a_whole_sequence_with_sinks_has_the_exact_gradients() -> None:
    query, key, value, grad = (
        drawn(count, 64, seed, torch.bfloat16) for seed, count in enumerate((8, 2, 2, 8))
    )
    reach, logits = reach_of(100, False), torch.linspace(-1, 3, 8, device=GPU)
    out, sums = attention(query, key, value, reach, logits)
    found = attention_backward(grad, query, key, value, out, sums, reach, sinks_h=logits)
    wide = query.float(), key.float(), value.float()
    whole = reference.attention(*wide, reach, logits)
    expected = reference.attention_backward(grad.float(), *wide, *whole, reach)
    assert distance(out, whole[0]) < 0.008
    assert all(distance(one, other) < 0.008 for one, other in zip(found, expected, strict=True))
    of_sinks = sinks_gradient(grad, out, sums, logits)
    assert distance(of_sinks, sinks_gradient(grad, whole[0].contiguous(), whole[1], logits)) < 0.008
