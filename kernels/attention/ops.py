"""Causal attention with separate calls forward and backward: the caller decides how to keep what lies
between.

Shape legend: B batch, H query heads, K key/value heads (H / K queries share one), S sequence, D head width.

Which implementation runs:

* On CPUs and most GPUs, torch's FlashAttention operators (FlashAttention-2, arXiv 2307.08691).
* On sm_90, cuDNN's forward, which repeats its bits. Its backward does not, so our own runs
  (`kernels.attention.triton`).
* With a limited `Reach`, FlashAttention-2 on GPUs. It takes the list of documents and the window, so keys
  that no query sees cost nothing. CPUs and other devices mask the scores.

Queries, keys, values and the result may have been stored and restored before they are passed to backward. The
log-sum-exp must be the one of the original forward. Where torch has no such operator (float32 on a GPU, odd
head widths), only queries, keys and values are used, and backward repeats forward. Keys and values that
several queries share are repeated there, because torch's other implementations make S x S matrices for
groups.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.deterministic
from torch import Tensor

from kernels.attention import reference
from kernels.attention.reach import EVERYTHING, Reach
from kernels.common import dispatch

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_KERNEL_WIDTHS = (64, 128)
"""Head widths that `kernels.attention.triton` has block sizes for."""
_WIDEST = 256
"""Head width up to which our own kernels compute chunks and sinks."""


def has_flash(query_bhsd: Tensor) -> bool:
    """Whether torch can run backward from the result and its log-sum-exp."""
    if query_bhsd.device.type == "cpu":
        return query_bhsd.dtype in (torch.float32, *_FLASH_DTYPES)
    width, kind = query_bhsd.shape[-1], dispatch.kind_of(query_bhsd.device)
    if not kind.flash_attention or query_bhsd.dtype not in _FLASH_DTYPES:
        return False
    if 192 < width <= 224 and not kind.wide_flash_backward:
        return False
    return width % 8 == 0 and width <= 256


def has_fixed_order_kernels(query_bhsd: Tensor) -> bool:
    """Whether cuDNN's forward and our own backward run. They are the fastest with a fixed order of sums on
    sm_90.

    Source: measurements in scripts/results/compute.json. Other GPUs run FlashAttention-2.
    """
    return (
        dispatch.has_kernels(query_bhsd.device, "attention")
        and query_bhsd.dtype in _FLASH_DTYPES
        and query_bhsd.shape[-1] in _KERNEL_WIDTHS
        and dispatch.kind_of(query_bhsd.device).own_attention
    )


def repeat_shared(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as [B, H, S, D]: one of each for every query head."""
    shared = query_bhsd.shape[1] // key_bksd.shape[1]
    if shared == 1:
        return key_bksd, value_bksd
    return key_bksd.repeat_interleave(shared, dim=1), value_bksd.repeat_interleave(shared, dim=1)


def attention(
    query_bhsd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    reach: Reach = EVERYTHING,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The result [B, H, S, D] and its log-sum-exp in float32, which is empty where no backward can use it.

    The log-sum-exp is [B, H, S], or [H, B S] with documents on a GPU. The result's transpose to [B, S, H, D]
    is contiguous where `has_flash`.

    Args:
        query_bhsd: The queries of all keys' positions, or of a chunk: the last Q of them.
        key_bksd, value_bksd: The keys and values of all positions so far, [B, K, S, D].
        reach: Which of all keys each query sees, also for a chunk.
        sinks_h: A logit per head (`kernels.attention.reference`), or None. With sinks, and for a chunk, the
            log-sum-exp is [B, H, Q] on every device.
    """
    if _is_general(query_bhsd, key_bksd, reach, sinks_h):
        return _general(query_bhsd, key_bksd, value_bksd, reach, sinks_h)
    if not has_flash(query_bhsd):
        out = _masked(query_bhsd, *repeat_shared(query_bhsd, key_bksd, value_bksd), reach)
        return out, query_bhsd.new_empty(0, dtype=torch.float32)
    if query_bhsd.device.type == "cpu":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_bhsd, key_bksd, value_bksd, 0.0, not reach.is_limited, **_mask(query_bhsd, key_bksd, reach)
        )
        return out, sums
    if reach.is_limited:
        return _limited(query_bhsd, key_bksd, value_bksd, reach)
    if has_fixed_order_kernels(query_bhsd):
        # cuDNN's forward repeats its bits; only its backward does not.
        outputs = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query_bhsd, key_bksd, value_bksd, None, True, 0.0, True, False
        )
        return outputs[0], outputs[1].squeeze(-1)
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(query_bhsd, key_bksd, value_bksd, 0.0, True)
    return outputs[0], outputs[1]


def attention_backward(
    grad_bhsd: Tensor,
    query_bhsd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    out_bhsd: Tensor,
    sums: Tensor,
    reach: Reach = EVERYTHING,
    *,
    fixed_order: bool = True,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their dtypes.

    Sums have a fixed order by default: equal inputs give equal bits.

    Args:
        grad_bhsd: The result's gradient.
        out_bhsd, sums: What `attention` returned. They are unused where its log-sum-exp is empty.
        fixed_order: False lets GPUs add in any order where that is faster.
        sinks_h: The sinks that `attention` got. `sinks_gradient` computes their gradient.
    """
    if _is_general(query_bhsd, key_bksd, reach, sinks_h):
        parts = _gradients(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums, reach, None)
        of_query, of_key, of_value = (part.to(query_bhsd.dtype) for part in parts)
        return of_query, of_key, of_value
    if not has_flash(query_bhsd):
        leaves = [part.detach().requires_grad_() for part in (query_bhsd, key_bksd, value_bksd)]
        with torch.enable_grad():
            repeated = repeat_shared(leaves[0], leaves[1], leaves[2])
            again = _masked(leaves[0], *repeated, reach)
        query, key, value = torch.autograd.grad(again, leaves, grad_bhsd)
        return query, key, value
    if query_bhsd.device.type == "cpu":
        return _backward_on_cpu(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums, reach)
    if reach.is_limited:
        return _limited_backward(
            grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums, reach, fixed_order
        )
    if has_fixed_order_kernels(query_bhsd) and not fixed_order:
        return _backward_of_cudnn(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums)
    if has_fixed_order_kernels(query_bhsd):
        from kernels.attention import triton

        return triton.backward(grad_bhsd, query_bhsd, key_bksd, value_bksd, out_bhsd, sums)
    length = query_bhsd.shape[-2]
    # FlashAttention uses the state of a random generator only for dropout.
    unused = torch.zeros(2, dtype=torch.uint64, device=query_bhsd.device)
    with _order(fixed=fixed_order):
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


def chunk_backward(
    grad_bhqd: Tensor,
    query_bhqd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    out_bhqd: Tensor,
    sums: Tensor,
    of_key_bksd: Tensor,
    of_value_bksd: Tensor,
    reach: Reach = EVERYTHING,
    sinks_h: Tensor | None = None,
) -> Tensor:
    """The gradient of a chunk's queries, in their dtype. Those of keys and values are added to running sums.

    Every element of the sums gets one float32 addition per call, so the sums depend only on the order of
    calls: chunks go backward from the last to the first. There is no `fixed_order`, because each program of
    the kernels owns the elements that it sums, and nothing is faster without an order.

    Args:
        of_key_bksd, of_value_bksd: The sums, float32 [B, K, S, D], for the keys and values of all positions
            so far.
        reach, sinks_h: As `attention` got them.
    """
    parts = grad_bhqd, query_bhqd, key_bksd, value_bksd, out_bhqd, sums
    if not _is_general(query_bhqd, key_bksd, reach, sinks_h):
        of_query, of_key, of_value = attention_backward(*parts, reach)
        of_key_bksd.add_(of_key)
        of_value_bksd.add_(of_value)
        return of_query
    of_query, _, _ = _gradients(*parts, reach, (of_key_bksd, of_value_bksd))
    return of_query.to(query_bhqd.dtype)


def sinks_gradient(grad_bhqd: Tensor, out_bhqd: Tensor, sums: Tensor, sinks_h: Tensor) -> Tensor:
    """The gradient of `attention`'s sinks, float32 [H], from the gradient of its result."""
    if _has_kernels(out_bhqd):
        from kernels.attention import triton

        inner = triton.inner_products(grad_bhqd, out_bhqd)
    else:
        inner = reference.inner_products(grad_bhqd, out_bhqd)
    return -((sinks_h.float()[:, None] - sums).exp() * inner).sum((0, 2))


class _ReachAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the result and its log-sum-exp, and no mask."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        out, sums = attention(query, key, value, reach)
        ctx.reach = reach
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        return *attention_backward(grads[0], query, key, value, out, sums, ctx.reach), None


def differentiable(query_bhsd: Tensor, key_bksd: Tensor, value_bksd: Tensor, reach: Reach) -> Tensor:
    """The result of `attention` without its log-sum-exp, for autograd."""
    args = query_bhsd, key_bksd, value_bksd, reach
    result: Tensor = _ReachAttention.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _is_general(query: Tensor, key: Tensor, reach: Reach, sinks: Tensor | None) -> bool:
    """Whether torch's operators cannot compute it.

    They lack sinks and the queries of a chunk. They also lack the first chunk if documents go on after it.
    """
    length = key.shape[-2]
    longer = reach.documents is not None and reach.documents.first_bs.shape[1] != length
    return sinks is not None or query.shape[-2] != length or longer


def _has_kernels(query: Tensor) -> bool:
    """Whether our own kernels support these heads."""
    return dispatch.has_kernels(query.device, "attention") and query.shape[-1] <= _WIDEST


def _general(
    query: Tensor, key: Tensor, value: Tensor, reach: Reach, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _has_kernels(query):
        from kernels.attention import triton

        return triton.forward(query, key, value, reach, sinks)
    if query.device.type != "cpu" or not has_flash(query):
        return reference.attention(query, key, value, reach, sinks)
    mask = _mask(query, key, reach)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, not mask, **mask
    )
    if sinks is None:
        return out, sums
    with_sinks = torch.logaddexp(sums, sinks.float()[:, None])
    return out * (sums - with_sinks).exp()[..., None].to(out.dtype), with_sinks


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    reach: Reach,
    onto: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. With `onto` the last two are added to its tensors and
    returned."""
    if _has_kernels(query):
        from kernels.attention import triton

        if onto is None and query.shape[-2] != key.shape[-2]:
            onto = (
                key.new_zeros(key.shape, dtype=torch.float32),
                value.new_zeros(value.shape, dtype=torch.float32),
            )
        return triton.backward(grad, query, key, value, out, sums, reach, onto)
    if query.device.type != "cpu" or not has_flash(query):
        gradients = reference.attention_backward(grad, query, key, value, out, sums, reach)
    else:
        gradients = _backward_on_cpu(grad, query, key, value, out, sums, reach)
    return (
        gradients if onto is None else (gradients[0], onto[0].add_(gradients[1]), onto[1].add_(gradients[2]))
    )


def _mask(query: Tensor, key: Tensor, reach: Reach) -> dict[str, Tensor]:
    """The CPU operator's mask argument, if it needs one."""
    length = key.shape[-2]
    first = length - query.shape[-2]
    return {"attn_mask": reach.added(length, query, first)} if reach.is_limited or first else {}


def _masked(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
    if not reach.is_limited:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    seen = reach.allowed(query.shape[-2], query.device)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def _limits(length: int, reach: Reach) -> tuple[Tensor | None, dict[str, int]]:
    """FlashAttention's list of documents and its window, which does not count a query's own key."""
    ends = None if reach.documents is None else reach.documents.ends
    window = {"window_size_left": min(reach.window, length) - 1, "window_size_right": 0}
    return ends, window if reach.window else {}


def _rows(part: Tensor, ends: Tensor | None) -> Tensor:
    """[B, H, S, D] as [B, S, H, D], or with documents [B S, H, D]."""
    rows = part.transpose(1, 2)
    return rows if ends is None else rows.flatten(0, 1)


def _heads(rows: Tensor, batch: int, ends: Tensor | None) -> Tensor:
    """The inverse of `_rows`."""
    return (rows if ends is None else torch.unflatten(rows, 0, (batch, -1))).transpose(1, 2)


def _limited(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
    batch, _, length, _ = query.shape
    ends, window = _limits(length, reach)
    parts = (_rows(part, ends) for part in (query, key, value))
    outputs = torch.ops.aten._flash_attention_forward(
        *parts, ends, ends, length, length, 0.0, True, False, **window
    )
    return _heads(outputs[0], batch, ends), outputs[1]


def _limited_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    reach: Reach,
    fixed_order: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, length, _ = query.shape
    ends, window = _limits(length, reach)
    parts = (_rows(part, ends) for part in (grad, query, key, value, out))
    # FlashAttention uses the state of a random generator only for dropout.
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
    with _order(fixed=fixed_order):
        grads = torch.ops.aten._flash_attention_backward(
            *parts, sums, ends, ends, length, length, 0.0, True, unused, unused, **window
        )
    of_query, of_key, of_value = (_heads(part, batch, ends) for part in grads)
    return of_query, of_key, of_value


def _backward_of_cudnn(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the queries' gradients with atomics, in any order."""
    length = query.shape[-2]
    # cuDNN uses the state of a random generator only for dropout.
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        sums[..., None],
        unused,
        unused,
        None,
        None,
        None,
        length,
        length,
        0.0,
        True,
    )
    return grads


def _backward_on_cpu(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, reach: Reach
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = query.shape[1], key.shape[1]
    # Not every version of torch sums inside the operator over the queries that share a head.
    key, value = repeat_shared(query, key, value)
    mask = _mask(query, key, reach)
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, sums, 0.0, not mask, **mask
    )
    if heads != kv_heads:
        grouped = (kv_heads, heads // kv_heads)
        of_key, of_value = (part.unflatten(1, grouped).sum(2) for part in (of_key, of_value))
    return of_query, of_key, of_value


@contextmanager
def _order(*, fixed: bool) -> Iterator[None]:
    """Turn torch's deterministic mode on or off.

    While it is off or only warns, FlashAttention adds the queries' gradients with atomics.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if (enabled and not warns) == fixed:
        yield
        return
    # The module's one setting is a property, which mypy does not see.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(fixed)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        settings.fill_uninitialized_memory = fill
