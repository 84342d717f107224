"""Attention of a chunk's queries to all keys before them, and sinks, under Triton's interpreter, on a CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.reach import Documents, Reach
from tests.support.interpreter import inside
from tests.support.poison import poisoned_memory

pytestmark = [
    *inside,
    # The powers of a row that has seen no key yet are of minus infinity, in numpy as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
BATCH, LENGTH = 2, 77


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def drawn(count: int, length: int, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Heads that are columns of a wider tensor."""
    made = torch.randn(BATCH, length, count + 1, width, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).transpose(1, 2)[:, 1:]


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    error = 3e-6 if dtype == torch.float32 else 2e-3
    assert found.shape == wanted.shape
    return bool((found.double() - wanted.double()).norm() <= error * wanted.double().norm())


def documents() -> Documents:
    starts = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    starts[0, [1, 30, 31, 60, LENGTH - 1]] = True
    return Documents.of(starts, torch.device("cpu"))


REACHES = {
    "all": Reach(),
    "window": Reach(window=9),
    "documents": Reach(documents=documents()),
    "both": Reach(window=20, documents=documents()),
}


@pytest.mark.parametrize(
    ("first", "last", "reach", "sinks", "cut", "heads", "width", "dtype"),
    [
        (40, LENGTH, "all", False, (16, 32), (2, 1), 16, torch.float32),
        (33, 50, "all", True, (32, 16), (3, 1), 24, torch.float32),
        (0, 45, "all", True, (16, 16), (2, 2), 16, torch.float16),
        (76, LENGTH, "window", False, (16, 32), (4, 2), 16, torch.float32),
        (19, 64, "window", True, (32, 16), (2, 1), 16, torch.float32),
        (0, LENGTH, "window", False, (16, 16), (2, 1), 16, torch.float32),
        (25, LENGTH, "documents", False, (16, 32), (2, 1), 16, torch.float32),
        (60, 61, "documents", True, (32, 16), (3, 1), 16, torch.float32),
        (0, 70, "both", False, (32, 32), (2, 1), 16, torch.float32),
        (47, LENGTH, "both", True, (16, 16), (2, 2), 24, torch.float16),
    ],
)
def test_a_chunk_attends_to_all_keys_before_it(
    first: int,
    last: int,
    reach: str,
    sinks: bool,
    cut: tuple[int, int],
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
) -> None:
    """Gradients of keys and values are added to what is there, and to nothing behind the chunk."""
    from kernels.attention.triton import Blocks, backward, forward

    rows, columns = cut
    query, grad = (drawn(heads[0], last - first, width, seed, dtype) for seed in (1, 4))
    key, value = (drawn(heads[1], last, width, seed, dtype) for seed in (2, 3))
    logits = torch.linspace(-1, 3, heads[0]) if sinks else None
    wanted = reference.attention(query, key, value, REACHES[reach], logits)
    out, sums = forward(query, key, value, REACHES[reach], logits, blocks=Blocks(rows, columns, 4, 1))
    assert near(out, wanted[0], dtype) and near(sums, wanted[1], dtype) and out.dtype == dtype
    before = torch.randn(2, BATCH, heads[1], LENGTH, width, generator=torch.Generator().manual_seed(5))
    after = before.clone()
    onto = after[0, :, :, :last], after[1, :, :, :last]
    found = backward(
        grad, query, key, value, out, sums, REACHES[reach], onto,
        of_keys=Blocks(rows, columns, 4, 1), of_queries=Blocks(max(cut), min(cut), 4, 1),
    )  # fmt: skip
    expected = reference.attention_backward(grad, query, key, value, *wanted, REACHES[reach])
    assert near(found[0], expected[0], dtype) and found[0].dtype == dtype
    for number in range(2):
        assert torch.equal(after[number, :, :, last:], before[number, :, :, last:])
        change = after[number, :, :, :last] - before[number, :, :, :last]
        assert near(change, expected[1 + number], torch.float16 if dtype == torch.float16 else torch.float32)


def test_a_whole_sequence_with_sinks_is_a_chunk_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the functions that models call, whose launches follow from the device."""
    from kernels.attention import ops
    from kernels.common import dispatch

    monkeypatch.setattr(dispatch, "has_kernels", lambda *_: True)
    query, grad = (drawn(4, 40, 64, seed, torch.float32) for seed in (1, 4))
    key, value = (drawn(2, 40, 64, seed, torch.float32) for seed in (2, 3))
    sinks, reach = torch.linspace(-1, 3, 4), Reach(window=9)
    wanted = reference.attention(query, key, value, reach, sinks)
    out, sums = ops.attention(query, key, value, reach, sinks)
    assert near(out, wanted[0], torch.float32)
    found = ops.attention_backward(grad, query, key, value, out, sums, reach, sinks_h=sinks)
    expected = reference.attention_backward(grad, query, key, value, *wanted, reach)
    assert all(near(one, other, torch.float32) for one, other in zip(found, expected, strict=True))
    of_sinks = ops.sinks_gradient(grad, out, sums, sinks)
    monkeypatch.undo()
    assert near(of_sinks, ops.sinks_gradient(grad, *wanted, sinks), torch.float32)
