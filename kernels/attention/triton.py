"""Causal attention's backward in Triton, every sum in a fixed order (FlashAttention-2, arXiv 2307.08691).

Shape legend: B batch, H query heads, K key/value heads (H / K queries share one), S sequence, D head width.

FlashAttention-2 adds the queries' gradients of all key blocks with atomics, or into separate buffers when the
order must be fixed. Here one kernel owns a block of keys and values and walks over the queries of all heads
that share them; another owns a block of queries and walks over the keys. The scores are computed twice, seven
products instead of five, and no program adds to what another wrote: equal inputs give equal bits.

The block sizes decide the order of the sums, so they belong to what a run's bits are a function of. They are
a function of the head width alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Blocks:
    """How one kernel is cut: `rows` is what a program owns, `columns` what it reads at a time.

    Both are powers of two. The kernel of queries takes no more columns than rows.
    """

    rows: int
    columns: int
    warps: int
    stages: int


OF_KEYS = {64: Blocks(64, 128, 4, 2), 128: Blocks(128, 64, 8, 3)}
"""The kernel of keys and values, by head width: rows of keys, columns of queries."""
OF_QUERIES = {64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 2)}
"""The kernel of queries, by head width: rows of queries, columns of keys."""


@triton.jit
def _inner_products(
    out,
    grad,
    sums,
    length,
    heads,
    out_b,
    out_h,
    out_s,
    grad_b,
    grad_h,
    grad_s,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """sums[b, h, s] = out[b, h, s, :] . grad[b, h, s, :], float32."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), head % heads
    column = tl.arange(0, D)
    real = row < length
    at_out = out + b * out_b + h * out_h + row[:, None].to(tl.int64) * out_s + column[None, :]
    at_grad = grad + b * grad_b + h * grad_h + row[:, None].to(tl.int64) * grad_s + column[None, :]
    o = tl.load(at_out, mask=real[:, None], other=0.0).to(tl.float32)
    g = tl.load(at_grad, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(sums + head.to(tl.int64) * length + row, tl.sum(o * g, 1), mask=real)


@triton.jit
def _add_queries(
    of_key,
    of_value,
    key,
    value,
    query,
    grad,
    log_sums,
    inner,
    first,
    last,
    owned,
    length,
    scale,
    query_s,
    grad_s,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """Add what the queries from `first` to `last` give to the gradients of the keys and values `owned`."""
    column = tl.arange(0, D)
    for start in tl.range(first, last, M):
        row = start + tl.arange(0, M)
        real = row < length
        at = row[:, None].to(tl.int64)
        q = tl.load(query + at * query_s + column[None, :], mask=real[:, None], other=0.0)
        g = tl.load(grad + at * grad_s + column[None, :], mask=real[:, None], other=0.0)
        log_sum = tl.load(log_sums + row, mask=real, other=float("inf"))
        scores = tl.dot(key, tl.trans(q)) * (scale * _LOG2E)
        weights = tl.exp2(scores - log_sum[None, :] * _LOG2E)
        if MASKED:
            weights = tl.where(owned[:, None] <= row[None, :], weights, 0.0)
        of_value = tl.dot(weights.to(q.dtype), g, of_value)
        upstream = tl.dot(value, tl.trans(g)) - tl.load(inner + row, mask=real, other=0.0)[None, :]
        of_key = tl.dot((weights * upstream).to(q.dtype), q, of_key)
    return of_key, of_value


@triton.jit
def _keys_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    inner,
    of_key,
    of_value,
    length,
    heads,
    kv_heads,
    scale,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    grad_b,
    grad_h,
    grad_s,
    out_s,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    # The first block of keys is seen by all queries: the longest work starts first.
    owned = tl.program_id(0) * N + tl.arange(0, N)
    b, k = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    group = heads // kv_heads
    column = tl.arange(0, D)
    real = owned < length
    at = owned[:, None].to(tl.int64)
    keys = tl.load(key + b * key_b + k * key_h + at * key_s + column[None, :], mask=real[:, None], other=0.0)
    values = tl.load(
        value + b * value_b + k * value_h + at * value_s + column[None, :], mask=real[:, None], other=0.0
    )
    sum_key = tl.zeros((N, D), tl.float32)
    sum_value = tl.zeros((N, D), tl.float32)
    begin = tl.program_id(0) * N
    # The diagonal, in whole steps of M queries.
    diagonal = begin + (N if N > M else M)
    for one in tl.range(0, group):
        h = k * group + one
        queries = query + b * query_b + h * query_h
        grads = grad + b * grad_b + h * grad_h
        place = (b * heads + h) * length
        sum_key, sum_value = _add_queries(
            sum_key, sum_value, keys, values, queries, grads, log_sums + place, inner + place,
            begin, tl.minimum(diagonal, length), owned, length, scale, query_s, grad_s, True, D, M,
        )  # fmt: skip
        sum_key, sum_value = _add_queries(
            sum_key, sum_value, keys, values, queries, grads, log_sums + place, inner + place,
            diagonal, length, owned, length, scale, query_s, grad_s, False, D, M,
        )  # fmt: skip
    # Heads of [B, S, K, D] in a row, tokens evenly spaced.
    to = (b * length + at) * out_s + k * D + column[None, :]
    tl.store(of_key + to, (sum_key * scale).to(of_key.dtype.element_ty), mask=real[:, None])
    tl.store(of_value + to, sum_value.to(of_value.dtype.element_ty), mask=real[:, None])


@triton.jit
def _add_keys(
    of_query,
    query,
    grad,
    log_sum,
    inner,
    key,
    value,
    first,
    last,
    owned,
    length,
    scale,
    key_s,
    value_s,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Add what the keys from `first` to `last` give to the gradients of the queries `owned`."""
    column = tl.arange(0, D)
    for start in tl.range(first, last, N):
        row = start + tl.arange(0, N)
        real = row < length
        at = row[:, None].to(tl.int64)
        keys = tl.load(key + at * key_s + column[None, :], mask=real[:, None], other=0.0)
        values = tl.load(value + at * value_s + column[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys)) * (scale * _LOG2E)
        weights = tl.exp2(scores - log_sum[:, None])
        if MASKED:
            weights = tl.where(row[None, :] <= owned[:, None], weights, 0.0)
        upstream = tl.dot(grad, tl.trans(values)) - inner[:, None]
        of_query = tl.dot((weights * upstream).to(keys.dtype), keys, of_query)
    return of_query


@triton.jit
def _queries_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    inner,
    of_query,
    length,
    heads,
    kv_heads,
    scale,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    grad_b,
    grad_h,
    grad_s,
    out_s,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    # The last block of queries sees all keys: the longest work starts first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    owned = block * M + tl.arange(0, M)
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    k = h // (heads // kv_heads)
    column = tl.arange(0, D)
    real = owned < length
    at = owned[:, None].to(tl.int64)
    queries = tl.load(
        query + b * query_b + h * query_h + at * query_s + column[None, :], mask=real[:, None], other=0.0
    )
    grads = tl.load(
        grad + b * grad_b + h * grad_h + at * grad_s + column[None, :], mask=real[:, None], other=0.0
    )
    place = (b * heads + h) * length
    log_sum = tl.load(log_sums + place + owned, mask=real, other=float("inf")) * _LOG2E
    products = tl.load(inner + place + owned, mask=real, other=0.0)
    keys = key + b * key_b + k * key_h
    values = value + b * value_b + k * value_h
    begin = block * M
    total = tl.zeros((M, D), tl.float32)
    total = _add_keys(
        total, queries, grads, log_sum, products, keys, values,
        0, begin, owned, length, scale, key_s, value_s, False, D, N,
    )  # fmt: skip
    total = _add_keys(
        total, queries, grads, log_sum, products, keys, values,
        begin, tl.minimum(begin + M, length), owned, length, scale, key_s, value_s, True, D, N,
    )  # fmt: skip
    # Heads of [B, S, H, D] in a row, tokens evenly spaced.
    to = (b * length + at) * out_s + h * D + column[None, :]
    tl.store(of_query + to, (total * scale).to(of_query.dtype.element_ty), mask=real[:, None])


def backward(
    grad_bhsd: torch.Tensor,
    query_bhsd: torch.Tensor,
    key_bksd: torch.Tensor,
    value_bksd: torch.Tensor,
    out_bhsd: torch.Tensor,
    sums: torch.Tensor,
    *,
    of_keys: Blocks | None = None,
    of_queries: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values: the heads of each in one [B, S, H + 2 K, D], transposed.

    Args:
        sums: natural log-sum-exp of the scaled scores, float32 [B, H, S].
        of_keys, of_queries: other cuts than the head width's, for measurements.
    """
    batch, heads, length, width = query_bhsd.shape
    kv_heads = key_bksd.shape[1]
    query, key, value, grad, out = (
        part if part.stride(-1) == 1 else part.contiguous()
        for part in (query_bhsd, key_bksd, value_bksd, grad_bhsd, out_bhsd)
    )
    sums = sums.contiguous()
    keys, queries = of_keys or OF_KEYS[width], of_queries or OF_QUERIES[width]
    inner = torch.empty_like(sums)
    made = query.new_empty(batch, length, heads + 2 * kv_heads, width)
    of_query, of_key, of_value = made.split((heads, kv_heads, kv_heads), dim=2)
    _inner_products[(triton.cdiv(length, 64), batch * heads)](
        out, grad, inner, length, heads, *out.stride()[:3], *grad.stride()[:3], D=width, M=64
    )
    strides = [stride for part in (query, key, value, grad) for stride in part.stride()[:3]]
    strides.append(made.stride(1))
    scale = width**-0.5
    _keys_kernel[(triton.cdiv(length, keys.rows), batch * kv_heads)](
        query, key, value, grad, sums, inner, of_key, of_value, length, heads, kv_heads, scale, *strides,
        D=width, N=keys.rows, M=keys.columns, num_warps=keys.warps, num_stages=keys.stages,
    )  # fmt: skip
    _queries_kernel[(triton.cdiv(length, queries.rows), batch * heads)](
        query, key, value, grad, sums, inner, of_query, length, heads, kv_heads, scale, *strides,
        D=width, M=queries.rows, N=queries.columns, num_warps=queries.warps, num_stages=queries.stages,
    )  # fmt: skip
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)
