"""Causal attention as forward and backward calls, so that the caller decides how to keep what lies between
them.

Shape legend: B batch, H query heads, K key/value heads (H / K queries share one), S sequence, D head width.
Torch's FlashAttention operators (FlashAttention-2, arXiv 2307.08691) run on CPUs and most GPUs. On sm_90
forward is cuDNN's, which repeats its bits. Its backward does not, so backward is our own
(`kernels.attention.triton`).

Backward takes queries, keys, values and result that may have been stored and restored in between; the
log-sum-exp belongs to those that went forward. Where torch has no such operator (fp32 on a GPU, odd head
widths) only queries, keys and values are used, and backward runs forward again. Keys and values that queries
share are repeated there, because torch's other implementations make S x S matrices of groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

from kernels.common import dispatch

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_WIDTHS = (64, 128)
"""Head widths that `kernels.attention.triton` has block sizes for."""
_WIDE_BACKWARD = ((8, 0), (9, 0))
"""Capabilities that FlashAttention-2's backward has shared memory for with heads of 193 to 224."""


def has_flash(query_bhsd: Tensor) -> bool:
    """Whether torch can run backward from the result and its log-sum-exp."""
    if query_bhsd.device.type == "cpu":
        return query_bhsd.dtype in (torch.float32, *_FLASH_DTYPES)
    width = query_bhsd.shape[-1]
    if query_bhsd.device.type != "cuda" or query_bhsd.dtype not in _FLASH_DTYPES:
        return False
    capability = torch.cuda.get_device_capability(query_bhsd.device)
    if 192 < width <= 224 and capability not in _WIDE_BACKWARD:
        return False
    return width % 8 == 0 and width <= 256 and capability >= (8, 0)


def has_fixed_order_kernels(query_bhsd: Tensor) -> bool:
    """Whether cuDNN's forward and our own backward run, which are the fastest where sums have an order.

    Measured on sm_90 (scripts/results/compute.json): elsewhere FlashAttention-2 runs.
    """
    return (
        dispatch.has_kernels(query_bhsd.device.type)
        and query_bhsd.dtype in _FLASH_DTYPES
        and query_bhsd.shape[-1] in _KERNEL_WIDTHS
        and torch.cuda.get_device_capability(query_bhsd.device) == (9, 0)
    )


def repeat_shared(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, S, D]: one of each for every query head."""
    shared = query_bhsd.shape[1] // key_bksd.shape[1]
    if shared == 1:
        return key_bksd, value_bksd
    return key_bksd.repeat_interleave(shared, dim=1), value_bksd.repeat_interleave(shared, dim=1)


def attention(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor) -> tuple[Tensor, Tensor]:
    """The result [B, H, S, D] and its log-sum-exp, fp32 [B, H, S]; that is empty where nothing can use it.

    The result's transpose to [B, S, H, D] is contiguous where `has_flash`.
    """
    if not has_flash(query_bhsd):
        key_bhsd, value_bhsd = repeat_shared(query_bhsd, key_bksd, value_bksd)
        out = F.scaled_dot_product_attention(query_bhsd, key_bhsd, value_bhsd, is_causal=True)
        return out, query_bhsd.new_empty(0, dtype=torch.float32)
    if query_bhsd.device.type == "cpu":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_bhsd, key_bksd, value_bksd, 0.0, True
        )
        return out, sums
    if has_fixed_order_kernels(query_bhsd):
        # cuDNN's forward repeats its bits; only its backward does not.
        made = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query_bhsd, key_bksd, value_bksd, None, True, 0.0, True, False
        )
        return made[0], made[1].squeeze(-1)
    made = torch.ops.aten._scaled_dot_product_flash_attention(query_bhsd, key_bksd, value_bksd, 0.0, True)
    return made[0], made[1]


def attention_backward(
    grad_bhsd: Tensor,
    query_bhsd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    out_bhsd: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, summed in a fixed order: equal inputs give equal bits.

    Args:
        grad_bhsd: of the result.
        out_bhsd, sums: what `attention` gave; unused where it gave no log-sum-exp.
    """
    if not has_flash(query_bhsd):
        leaves = [part.detach().requires_grad_() for part in (query_bhsd, key_bksd, value_bksd)]
        with torch.enable_grad():
            repeated = repeat_shared(leaves[0], leaves[1], leaves[2])
            again = F.scaled_dot_product_attention(leaves[0], *repeated, is_causal=True)
        query, key, value = torch.autograd.grad(again, leaves, grad_bhsd)
        return query, key, value
    if query_bhsd.device.type == "cpu":
        return _backward_on_cpu(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums)
    if has_fixed_order_kernels(query_bhsd):
        from kernels.attention import triton

        return triton.backward(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums)
    length = query_bhsd.shape[-2]
    # The state of a generator that only dropout would use.
    unused = torch.zeros(2, dtype=torch.uint64, device=query_bhsd.device)
    with _fixed_order():
        query, key, value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_bhsd,
            query_bhsd,
            key_bksd,
            value_bksd,
            out_bhsd,
            sums,
            None,
            None,
            length,
            length,
            0.0,
            True,
            unused,
            unused,
        )
    return query, key, value


def _backward_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = query.shape[1], key.shape[1]
    # Not every version of torch sums over the queries of a head inside the operator.
    key, value = repeat_shared(query, key, value)
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, sums, 0.0, True
    )
    if heads != kv_heads:
        grouped = (kv_heads, heads // kv_heads)
        of_key, of_value = (part.unflatten(1, grouped).sum(2) for part in (of_key, of_value))
    return of_query, of_key, of_value


@contextmanager
def _fixed_order() -> Iterator[None]:
    """Make torch deterministic. Else, and also in its warn-only mode, FlashAttention adds the queries'
    gradients with atomics."""
    enabled = torch.are_deterministic_algorithms_enabled()
    if enabled and not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    # A module whose one setting is a property, which mypy does not see.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=enabled)
        settings.fill_uninitialized_memory = fill
