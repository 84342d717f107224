"""Attention of a sequence's last queries to all keys before them, in plain torch and float32.

Shape legend: B batch, H query heads, K key/value heads (H / K queries share one), S keys, Q <= S queries,
which are those of the last Q positions, D head width.

A sink is a logit per head that takes part in the softmax and has no value, so that a query can attend to
nothing (gpt-oss). The log-sum-exp includes it, so the gradients of queries, keys and values do not need it.
"""

import torch
from torch import Tensor

from kernels.attention.reach import Reach


def attention(
    query_bhqd: Tensor, key_bksd: Tensor, value_bksd: Tensor, reach: Reach, sinks_h: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result [B, H, Q, D] in the queries' dtype, and its log-sum-exp, float32 [B, H, Q]."""
    scores = _scores(query_bhqd, key_bksd, reach)
    sums = scores.logsumexp(-1)
    if sinks_h is not None:
        sums = torch.logaddexp(sums, sinks_h.float()[:, None])
    shared = _repeated(value_bksd, query_bhqd.shape[1])
    return ((scores - sums[..., None]).exp() @ shared).to(query_bhqd.dtype), sums


def attention_backward(
    grad_bhqd: Tensor,
    query_bhqd: Tensor,
    key_bksd: Tensor,
    value_bksd: Tensor,
    out_bhqd: Tensor,
    sums: Tensor,
    reach: Reach,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in float32, from what `attention` returned."""
    heads, kv_heads = query_bhqd.shape[1], key_bksd.shape[1]
    scale = query_bhqd.shape[-1] ** -0.5
    weights = (_scores(query_bhqd, key_bksd, reach) - sums[..., None]).exp()
    grad = grad_bhqd.float()
    inner = inner_products(grad, out_bhqd)[..., None]
    upstream = weights * (grad @ _repeated(value_bksd, heads).mT - inner) * scale
    of_query = upstream @ _repeated(key_bksd, heads)
    of_key, of_value = upstream.mT @ query_bhqd.float(), weights.mT @ grad
    of_key, of_value = (part.unflatten(1, (kv_heads, -1)).sum(2) for part in (of_key, of_value))
    return of_query, of_key, of_value


def inner_products(grad_bhqd: Tensor, out_bhqd: Tensor) -> Tensor:
    """The dot product of each query's result with its gradient, float32 [B, H, Q]."""
    return (grad_bhqd.float() * out_bhqd.float()).sum(-1)


def _scores(query: Tensor, key: Tensor, reach: Reach) -> Tensor:
    """Scaled scores, float32 [B, H, Q, S]. They are minus infinity where a query does not see a key."""
    length = key.shape[2]
    scores: Tensor = query.float() @ _repeated(key, query.shape[1]).mT * query.shape[-1] ** -0.5
    return scores.masked_fill(~reach.allowed(length, query.device, length - query.shape[2]), -torch.inf)


def _repeated(part_bksd: Tensor, heads: int) -> Tensor:
    return part_bksd.float().repeat_interleave(heads // part_bksd.shape[1], 1)
