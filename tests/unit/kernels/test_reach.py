"""Attention within a window and within documents, against scores that are masked outright."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.ops import (
    attention,
    attention_backward,
    chunk_backward,
    differentiable,
    sinks_gradient,
)
from kernels.attention.reach import EVERYTHING, Documents, Reach, padded

BATCH, HEADS, KEYS, SEQUENCE, WIDTH = 2, 6, 2, 300, 8


def drawn(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, count, SEQUENCE, WIDTH, generator=made).to(dtype)


def starts() -> Tensor:
    found = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    found[0, [0, 1, 130, 131, 299]] = True
    found[1, [64]] = True
    return found


def documents() -> Documents:
    return Documents.of(starts(), torch.device("cpu"))


def exact(query: Tensor, key: Tensor, value: Tensor, window: int, apart: bool) -> Tensor:
    """One query at a time over the keys that it may see."""
    of_document = starts().long()
    of_document[:, 0] = 1
    numbers = of_document.cumsum(1)
    rows = torch.zeros_like(query)
    for sample in range(BATCH):
        for at in range(SEQUENCE):
            seen = [
                other
                for other in range(at + 1)
                if (not window or at - other < window)
                and (not apart or numbers[sample, other] == numbers[sample, at])
            ]
            for head in range(HEADS):
                keys, values = (part[sample, head * KEYS // HEADS, seen] for part in (key, value))
                scores = keys @ query[sample, head, at] / WIDTH**0.5
                rows[sample, head, at] = torch.softmax(scores, 0) @ values
    return rows


@pytest.mark.parametrize(("window", "apart"), [(7, False), (0, True), (50, True)])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "none"])
def test_a_query_sees_its_window_and_its_document(
    window: int, apart: bool, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flash:
        monkeypatch.setattr("kernels.attention.ops.has_flash", lambda query: False)
    query, key, value, grad = drawn(HEADS, 1), drawn(KEYS, 2), drawn(KEYS, 3), drawn(HEADS, 4)
    reach = Reach(window=window, documents=documents() if apart else None)
    leaves = [part.double().requires_grad_() for part in (query, key, value)]
    seen = reach.allowed(SEQUENCE, torch.device("cpu"))
    repeated = [part.repeat_interleave(HEADS // part.shape[1], 1) for part in leaves]
    scores = repeated[0] @ repeated[1].transpose(2, 3) / WIDTH**0.5
    wanted = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ repeated[2]
    if flash:
        one_by_one = exact(query, key, value, window, apart).double()
        torch.testing.assert_close(one_by_one, wanted, atol=1e-5, rtol=0)
    gradients = torch.autograd.grad(wanted, leaves, grad.double())
    out, sums = attention(query, key, value, reach)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    found = attention_backward(grad, query, key, value, out, sums, reach)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=1e-5)
    again = [part.clone().requires_grad_() for part in (query, key, value)]
    torch.autograd.backward(differentiable(*again, reach), grad)
    for leaf, one in zip(again, found, strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, one)


def test_documents_are_listed_for_samples_laid_end_to_end() -> None:
    found = documents()
    usual = BATCH * SEQUENCE // 64
    assert found.ends.tolist() == [0, 1, 130, 131, 299, 300, 364] + [600] * (usual + 1 - 7)
    assert found.first_bs[0, [0, 1, 129, 130, 298, 299]].tolist() == [0, 1, 1, 130, 131, 299]
    assert found.first_bs[1, [0, 63, 64, 299]].tolist() == [0, 0, 64, 64]


def test_the_list_of_documents_has_the_same_length_for_most_microbatches() -> None:
    assert [padded(count, 4, 1024) for count in (1, 4, 64, 65, 129, 4096)] == [64, 64, 64, 128, 256, 4096]


def chunks(length: int) -> list[tuple[int, int]]:
    """Of unequal lengths, the last one of a single query."""
    cuts = [0, 100, 101, length - 1, length]
    return [*pairwise(cuts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "apart"), [(0, False), (7, False), (0, True), (50, True)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_chunks_of_a_sequence_give_what_the_whole_does(
    with_sinks: bool, window: int, apart: bool, dtype: torch.dtype
) -> None:
    """Forward from the first chunk to the last, backward the other way; also by the plain reference."""
    query, key, value, grad = drawn(HEADS, 1), drawn(KEYS, 2), drawn(KEYS, 3), drawn(HEADS, 4)
    query, key, value, grad = (part.to(dtype) for part in (query, key, value, grad))
    reach = Reach(window=window, documents=documents() if apart else None)
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    leaves = [part.double().requires_grad_() for part in (query, key, value)]
    shared = [part.repeat_interleave(HEADS // KEYS, 1) for part in leaves[1:]]
    scores = leaves[0] @ shared[0].transpose(2, 3) / WIDTH**0.5
    scores = scores.masked_fill(~reach.allowed(SEQUENCE, torch.device("cpu")), -torch.inf)
    column = torch.zeros(BATCH, HEADS, SEQUENCE, 0).double()
    if sinks is not None:
        leaves.append(sinks.double().requires_grad_())
        column = leaves[3][None, :, None, None].expand(BATCH, HEADS, SEQUENCE, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :SEQUENCE]
    exact = weights @ shared[1]
    wanted = [exact.detach(), *torch.autograd.grad(exact, leaves, grad.double())]
    of_key, of_value = (torch.zeros(BATCH, KEYS, SEQUENCE, WIDTH) for _ in range(2))
    outs, of_queries, of_sinks = [], [], torch.zeros(HEADS)
    kept = []
    for first, last in chunks(SEQUENCE):
        parts = query[:, :, first:last], key[:, :, :last], value[:, :, :last]
        out, sums = attention(*parts, reach, sinks)
        plain, plain_sums = reference.attention(*parts, reach, sinks)
        torch.testing.assert_close((out, sums), (plain, plain_sums), rtol=2e-3, atol=2e-3)
        outs.append(out)
        kept.append((first, last, (*parts, out, sums)))
    for first, last, parts in reversed(kept):
        onto = of_key[:, :, :last], of_value[:, :, :last]
        of_queries.insert(0, chunk_backward(grad[:, :, first:last], *parts, *onto, reach, sinks))
        if sinks is not None:
            of_sinks += sinks_gradient(grad[:, :, first:last], *parts[3:], sinks)
        plain_gradients = reference.attention_backward(grad[:, :, first:last], *parts, reach)
        whole = attention_backward(grad[:, :, first:last], *parts, reach, sinks_h=sinks)
        for one, other in zip(whole, plain_gradients, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-2)
    found = [torch.cat(outs, 2), torch.cat(of_queries, 2), of_key, of_value, of_sinks]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for one, other in zip(found[: len(wanted)], wanted, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "none"])
def test_sinks_of_a_whole_sequence_have_autograds_gradient(
    flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flash:
        monkeypatch.setattr("kernels.attention.ops.has_flash", lambda query: False)
    query, key, value, grad = drawn(HEADS, 1), drawn(KEYS, 2), drawn(KEYS, 3), drawn(HEADS, 4)
    leaves = [part.requires_grad_() for part in (query, key, value, torch.linspace(-2, 2, HEADS))]
    parts, sinks = [part.detach() for part in leaves[:3]], leaves[3].detach()
    found, sums = attention(*parts, EVERYTHING, sinks)
    gradients = attention_backward(grad, *parts, found, sums, EVERYTHING, sinks_h=sinks)
    shared = [part.repeat_interleave(HEADS // KEYS, 1) for part in leaves[1:3]]
    scores = query @ shared[0].transpose(2, 3) / WIDTH**0.5
    scores = scores.masked_fill(torch.ones(SEQUENCE, SEQUENCE).triu(1).bool(), -torch.inf)
    column = leaves[3][None, :, None, None].expand(BATCH, HEADS, SEQUENCE, 1)
    wanted = torch.cat([scores, column], -1).softmax(-1)[..., :SEQUENCE] @ shared[1]
    torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(
        (*gradients, sinks_gradient(grad, found, sums, sinks)),
        torch.autograd.grad(wanted, leaves, grad),
        rtol=1e-4,
        atol=1e-5,
    )
