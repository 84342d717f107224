"""Attention within a window and within documents, against scores that are masked outright."""

import pytest
import torch
from torch import Tensor

from kernels.attention.ops import attention, attention_backward, differentiable
from kernels.attention.reach import Documents, Reach, padded

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
