"""Where torch has FlashAttention, and attention without it: no group of heads, no S x S matrix."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels.attention.ops
import node.model.blocks
from kernels.attention.ops import attention, attention_backward, has_flash

BATCH, HEADS, KEYS, SEQUENCE, WIDTH = 2, 6, 2, 16, 8


@pytest.mark.parametrize(
    ("capability", "widths"),
    [
        ((7, 5), {}),
        ((8, 0), {64, 192, 200, 224, 232, 256}),
        ((8, 6), {64, 192, 232, 256}),
        ((9, 0), {64, 192, 200, 224, 232, 256}),
        ((12, 0), {64, 192, 232, 256}),
    ],
)
def test_flash_attention_is_available_where_its_backward_is(
    capability: tuple[int, int], widths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads of 193 to 224 only GPUs with the memory of an A100 or H100 have it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def query(width: int) -> Tensor:
        like = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(1, 1, 1, width))
        return cast(Tensor, like)

    tried = (60, 64, 192, 200, 224, 232, 256, 264)
    assert {width for width in tried if has_flash(query(width))} == set(widths)


def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A gradient of the result, queries, keys and values."""
    made = torch.Generator().manual_seed(1)

    def drawn(count: int) -> Tensor:
        return torch.randn(BATCH, count, SEQUENCE, WIDTH, generator=made)

    return drawn(HEADS), drawn(HEADS), drawn(KEYS), drawn(KEYS)


@pytest.fixture
def without_flash(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Key heads of all calls of torch's own attention, none of which may be of groups."""
    of_torch, seen = F.scaled_dot_product_attention, list[int]()

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert not options.pop("enable_gqa", False)
        seen.append(key.shape[1])
        return of_torch(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for module in (kernels.attention.ops, node.model.blocks):
        monkeypatch.setattr(module, "has_flash", lambda query: False)
    return seen


def test_shared_keys_are_repeated_where_there_is_no_flash_attention(
    request: pytest.FixtureRequest,
) -> None:
    grad, query, key, value = heads()
    expected, sums = attention(query, key, value)
    gradients = attention_backward(grad, query, key, value, expected, sums)
    plain = node.model.blocks.attention(query, key, value)
    seen = request.getfixturevalue("without_flash")
    found, none = attention(query, key, value)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(attention_backward(grad, query, key, value, found, none), gradients)
    torch.testing.assert_close(node.model.blocks.attention(query, key, value), plain)
    assert seen == [HEADS] * 3
