"""Causal attention in Triton, every sum in a fixed order (FlashAttention-2, arXiv 2307.08691).

Shape legend: B batch, H query heads, K key/value heads (H / K queries share one), S keys, Q <= S queries,
which have the last Q positions, D head width.

FlashAttention-2 adds the queries' gradients of all key blocks with atomics, or into separate buffers when the
order must be fixed. Here each program of one kernel owns a block of keys and values and loops over the
queries of all heads that share them; each program of another owns a block of queries and loops over the keys.
This computes the scores twice, seven products instead of five, but no program adds to another's results, so
equal inputs give equal bits.

The block sizes determine the order of the sums, and so the bits of a run. They depend only on the head width,
the dtype's width and the device's shared memory.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.attention.reach import EVERYTHING, Reach
from kernels.common.devices import Room
from kernels.common.dispatch import room

_LOG2E = tl.constexpr(1.4426950408889634)
ENOUGH_PROGRAMS = 512
"""The kernel for keys divides query heads until it has this many programs, because its first programs work
longest. The number determines the order of sums."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of one kernel: a program owns `rows` and reads `columns` at a time.

    Both are powers of two. The kernel for queries has at most as many columns as rows.
    """

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cuts:
    """Block sizes for one kind of device, by head width."""

    forward: dict[int, Blocks]
    """Rows of queries, columns of keys."""
    of_keys: dict[int, Blocks]
    """Rows of keys, columns of queries."""
    of_queries: dict[int, Blocks]
    """Rows of queries, columns of keys."""


CUTS = {
    Room.LARGE: Cuts(
        forward={64: Blocks(128, 64, 4, 3), 128: Blocks(128, 128, 8, 3), 256: Blocks(64, 32, 8, 2)},
        of_keys={64: Blocks(64, 128, 4, 2), 128: Blocks(128, 64, 8, 3), 256: Blocks(32, 32, 8, 1)},
        of_queries={64: Blocks(64, 64, 4, 3), 128: Blocks(64, 64, 4, 2), 256: Blocks(32, 32, 8, 1)},
    ),
    Room.SMALL: Cuts(
        forward={64: Blocks(64, 32, 4, 2), 128: Blocks(32, 32, 4, 2), 256: Blocks(32, 16, 4, 1)},
        of_keys={64: Blocks(32, 32, 4, 1), 128: Blocks(32, 32, 4, 1), 256: Blocks(16, 16, 4, 1)},
        of_queries={64: Blocks(32, 32, 4, 1), 128: Blocks(32, 32, 4, 1), 256: Blocks(16, 16, 4, 1)},
    ),
}
"""Block sizes in half precision, by kind of device."""
WIDE = Cuts(
    forward=dict.fromkeys((64, 128, 256), Blocks(16, 16, 4, 1)),
    of_keys=dict.fromkeys((64, 128, 256), Blocks(16, 16, 4, 1)),
    of_queries=dict.fromkeys((64, 128, 256), Blocks(16, 16, 4, 1)),
)
"""Block sizes for float32, and for devices with little shared memory."""


def cuts(part: torch.Tensor) -> Cuts:
    """The block sizes for tensors of this dtype on this device."""
    if part.dtype == torch.float32:
        return WIDE
    return CUTS.get(room(part.device), WIDE)


def _cut(part: torch.Tensor, blocks: dict[int, Blocks]) -> Blocks:
    return blocks[max(part.shape[-1], min(blocks))]


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
def _sees(position, key, first, window, DOCUMENTS: tl.constexpr):
    """Whether the query at a position sees a key, within its window and the document that begins at
    `first`."""
    seen = (key <= position) & (position - key < window)
    if DOCUMENTS:
        seen = seen & (key >= first)
    return seen


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
    firsts,
    first,
    last,
    owned,
    length,
    offset,
    window,
    scale,
    query_s,
    grad_s,
    MASKED: tl.constexpr,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
):
    """Add the queries from `first` to `last` to the gradients of the keys and values `owned`."""
    column = tl.arange(0, D)
    for start in tl.range(first, last, M):
        row = start + tl.arange(0, M)
        real = row < length
        at = row[:, None].to(tl.int64)
        q = tl.load(query + at * query_s + column[None, :], mask=real[:, None], other=0.0)
        g = tl.load(grad + at * grad_s + column[None, :], mask=real[:, None], other=0.0)
        log_sum = tl.load(log_sums + row, mask=real, other=float("inf"))
        scores = tl.dot(key, tl.trans(q), input_precision="ieee") * (scale * _LOG2E)
        weights = tl.exp2(scores - log_sum[None, :] * _LOG2E)
        if LIMITED:
            begun = row
            if DOCUMENTS:
                begun = tl.load(firsts + row, mask=real, other=0)
            seen = _sees(offset + row[None, :], owned[:, None], begun[None, :], window, DOCUMENTS)
            weights = tl.where(seen, weights, 0.0)
        elif MASKED:
            weights = tl.where(owned[:, None] <= offset + row[None, :], weights, 0.0)
        of_value = tl.dot(weights.to(q.dtype), g, of_value, input_precision="ieee")
        upstream = tl.dot(value, tl.trans(g), input_precision="ieee")
        upstream -= tl.load(inner + row, mask=real, other=0.0)[None, :]
        of_key = tl.dot((weights * upstream).to(q.dtype), q, of_key, input_precision="ieee")
    return of_key, of_value


@triton.jit(do_not_specialize=("offset", "window", "parts"))
def _keys_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    inner,
    of_key,
    of_value,
    firsts,
    lasts,
    length,
    keys_length,
    offset,
    window,
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
    of_key_b,
    of_key_h,
    of_key_s,
    of_value_b,
    of_value_h,
    of_value_s,
    firsts_b,
    of_key_part,
    of_value_part,
    parts,
    ADDS: tl.constexpr,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """The gradients of a block of keys and values. A program sums over one of `parts` equal parts of the
    query heads that share them."""
    # The first block of keys is seen by all queries: the longest work starts first.
    begin = tl.program_id(0) * N
    owned = begin + tl.arange(0, N)
    part, pair = (tl.program_id(1) % parts).to(tl.int64), tl.program_id(1) // parts
    b, k = (pair // kv_heads).to(tl.int64), pair % kv_heads
    group = heads // kv_heads // parts
    column = tl.arange(0, D)
    real = owned < keys_length
    # The queries that see all of these keys begin after the diagonal, which covers whole steps of M queries.
    first = tl.maximum(begin - offset, 0)
    diagonal = first + tl.maximum((begin + N - offset - first + M - 1) // M, 0) * M
    end = length
    if LIMITED:
        end = tl.minimum(length, begin + N - 1 + window - offset)
        if DOCUMENTS:
            last = lasts + b * keys_length + tl.minimum(begin + N, keys_length) - 1
            end = tl.minimum(end, tl.load(last) + 1)
        diagonal = end
    if ADDS and first >= end:
        return
    at = owned[:, None].to(tl.int64)
    keys = tl.load(key + b * key_b + k * key_h + at * key_s + column[None, :], mask=real[:, None], other=0.0)
    values = tl.load(
        value + b * value_b + k * value_h + at * value_s + column[None, :], mask=real[:, None], other=0.0
    )
    sum_key = tl.zeros((N, D), tl.float32)
    sum_value = tl.zeros((N, D), tl.float32)
    for one in tl.range(0, group):
        h = (k * parts + part) * group + one
        queries = query + b * query_b + h * query_h
        grads = grad + b * grad_b + h * grad_h
        place = (b * heads + h) * length
        sum_key, sum_value = _add_queries(
            sum_key, sum_value, keys, values, queries, grads, log_sums + place, inner + place,
            firsts + b * firsts_b, first, tl.minimum(diagonal, length), owned, length, offset, window,
            scale, query_s, grad_s, True, LIMITED, DOCUMENTS, D, M,
        )  # fmt: skip
        if not LIMITED:
            sum_key, sum_value = _add_queries(
                sum_key, sum_value, keys, values, queries, grads, log_sums + place, inner + place,
                firsts + b * firsts_b, diagonal, length, owned, length, offset, window,
                scale, query_s, grad_s, False, LIMITED, DOCUMENTS, D, M,
            )  # fmt: skip
    sum_key *= scale
    of_key += part * of_key_part + b * of_key_b + k * of_key_h
    of_value += part * of_value_part + b * of_value_b + k * of_value_h
    to_key = of_key + at * of_key_s + column[None, :]
    to_value = of_value + at * of_value_s + column[None, :]
    if ADDS:
        sum_key += tl.load(to_key, mask=real[:, None], other=0.0)
        sum_value += tl.load(to_value, mask=real[:, None], other=0.0)
    tl.store(to_key, sum_key.to(of_key.dtype.element_ty), mask=real[:, None])
    tl.store(to_value, sum_value.to(of_value.dtype.element_ty), mask=real[:, None])


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
    position,
    begun,
    length,
    window,
    scale,
    key_s,
    value_s,
    MASKED: tl.constexpr,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Add the keys from `first` to `last` to the gradients of the queries at `position`."""
    column = tl.arange(0, D)
    for start in tl.range(first, last, N):
        row = start + tl.arange(0, N)
        real = row < length
        at = row[:, None].to(tl.int64)
        keys = tl.load(key + at * key_s + column[None, :], mask=real[:, None], other=0.0)
        values = tl.load(value + at * value_s + column[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * _LOG2E)
        weights = tl.exp2(scores - log_sum[:, None])
        if LIMITED:
            seen = _sees(position[:, None], row[None, :], begun[:, None], window, DOCUMENTS)
            weights = tl.where(seen, weights, 0.0)
        elif MASKED:
            weights = tl.where(row[None, :] <= position[:, None], weights, 0.0)
        upstream = tl.dot(grad, tl.trans(values), input_precision="ieee") - inner[:, None]
        of_query = tl.dot((weights * upstream).to(keys.dtype), keys, of_query, input_precision="ieee")
    return of_query


@triton.jit
def _first_seen(firsts, first, begin, window, N: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The start of the first block of N keys that the query at position `begin`, number `first`, sees."""
    lowest = tl.maximum(begin - window + 1, 0)
    if DOCUMENTS:
        lowest = tl.maximum(lowest, tl.load(firsts + first))
    return lowest // N * N


@triton.jit(do_not_specialize=("offset", "window"))
def _queries_kernel(
    query,
    key,
    value,
    grad,
    log_sums,
    inner,
    of_query,
    firsts,
    length,
    keys_length,
    offset,
    window,
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
    firsts_b,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
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
    begin = offset + block * M
    lowest = 0
    begun = owned
    if LIMITED:
        lowest = _first_seen(firsts + b * firsts_b, block * M, begin, window, N, DOCUMENTS)
        if DOCUMENTS:
            begun = tl.load(firsts + b * firsts_b + owned, mask=real, other=0)
    # Whole blocks of keys that all of these queries see, and the rest.
    whole = tl.maximum(begin // N * N, lowest)
    total = tl.zeros((M, D), tl.float32)
    total = _add_keys(
        total, queries, grads, log_sum, products, keys, values, lowest, whole, offset + owned, begun,
        keys_length, window, scale, key_s, value_s, False, LIMITED, DOCUMENTS, D, N,
    )  # fmt: skip
    total = _add_keys(
        total, queries, grads, log_sum, products, keys, values, whole, tl.minimum(begin + M, keys_length),
        offset + owned, begun, keys_length, window, scale, key_s, value_s, True, LIMITED, DOCUMENTS, D, N,
    )  # fmt: skip
    # Heads of [B, Q, H, D] in a row, tokens evenly spaced.
    to = (b * length + at) * out_s + h * D + column[None, :]
    tl.store(of_query + to, (total * scale).to(of_query.dtype.element_ty), mask=real[:, None])


@triton.jit
def _attend(
    total,
    largest,
    powers,
    query,
    key,
    value,
    first,
    last,
    position,
    begun,
    length,
    window,
    scale,
    key_s,
    value_s,
    MASKED: tl.constexpr,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
):
    """Add the keys from `first` to `last` to the queries' results, largest scores and sums of powers."""
    column = tl.arange(0, D)
    for start in tl.range(first, last, N):
        row = start + tl.arange(0, N)
        real = row < length
        at = row[:, None].to(tl.int64)
        keys = tl.load(key + at * key_s + column[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * (scale * _LOG2E)
        if LIMITED:
            seen = _sees(position[:, None], row[None, :], begun[:, None], window, DOCUMENTS)
            scores = tl.where(seen, scores, -float("inf"))
        elif MASKED:
            scores = tl.where(row[None, :] <= position[:, None], scores, -float("inf"))
        most = tl.maximum(largest, tl.max(scores, 1))
        base = most
        if LIMITED:
            # A row that has seen no key yet has no difference to take.
            base = tl.where(most == -float("inf"), 0.0, most)
        weights = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(largest - base)
        powers = powers * shrunk + tl.sum(weights, 1)
        values = tl.load(value + at * value_s + column[None, :], mask=real[:, None], other=0.0)
        total = tl.dot(weights.to(values.dtype), values, total * shrunk[:, None], input_precision="ieee")
        largest = most
    return total, largest, powers


@triton.jit(do_not_specialize=("offset", "window"))
def _forward_kernel(
    query,
    key,
    value,
    out,
    log_sums,
    sinks,
    firsts,
    length,
    keys_length,
    offset,
    window,
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
    firsts_b,
    SINKS: tl.constexpr,
    LIMITED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
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
    keys = key + b * key_b + k * key_h
    values = value + b * value_b + k * value_h
    begin = offset + block * M
    lowest = 0
    begun = owned
    if LIMITED:
        lowest = _first_seen(firsts + b * firsts_b, block * M, begin, window, N, DOCUMENTS)
        if DOCUMENTS:
            begun = tl.load(firsts + b * firsts_b + owned, mask=real, other=0)
    whole = tl.maximum((begin + 1) // N * N, lowest)
    total = tl.zeros((M, D), tl.float32)
    if SINKS:
        # One more score, which has no value.
        largest = tl.zeros((M,), tl.float32) + tl.load(sinks + h).to(tl.float32) * _LOG2E
        powers = tl.zeros((M,), tl.float32) + 1.0
    else:
        largest = tl.zeros((M,), tl.float32) - float("inf")
        powers = tl.zeros((M,), tl.float32)
    total, largest, powers = _attend(
        total, largest, powers, queries, keys, values, lowest, whole, offset + owned, begun,
        keys_length, window, scale, key_s, value_s, False, LIMITED, DOCUMENTS, D, N,
    )  # fmt: skip
    total, largest, powers = _attend(
        total, largest, powers, queries, keys, values, whole, tl.minimum(begin + M, keys_length),
        offset + owned, begun, keys_length, window, scale, key_s, value_s, True, LIMITED, DOCUMENTS, D, N,
    )  # fmt: skip
    to = ((b * length + at) * heads + h) * D + column[None, :]
    tl.store(out + to, (total / powers[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    tl.store(log_sums + (b * heads + h) * length + owned, (largest + tl.log2(powers)) / _LOG2E, mask=real)


@dataclass(frozen=True)
class _Limits:
    """A `Reach` as the kernels read it, for queries from `offset` on."""

    offset: int
    window: int
    firsts: torch.Tensor | None
    """int32 [B, Q]: the start of each query's document."""

    @classmethod
    def of(cls, reach: Reach, queries: int, keys: int) -> "_Limits":
        offset = keys - queries
        firsts = None if reach.documents is None else reach.documents.first_bs[:, offset:keys]
        return cls(offset, reach.window or 2**30, firsts)

    def flags(self) -> dict[str, bool]:
        return {
            "LIMITED": self.window < 2**30 or self.firsts is not None,
            "DOCUMENTS": self.firsts is not None,
        }

    def lasts(self, keys: int) -> torch.Tensor | None:
        """int32 [B, S]: the number of the last query that sees each key, before any window."""
        if self.firsts is None:
            return None
        numbers = torch.arange(keys, dtype=torch.int32, device=self.firsts.device)
        numbers = numbers.expand(len(self.firsts), keys).contiguous()
        return torch.searchsorted(self.firsts.contiguous(), numbers, right=True, out_int32=True) - 1


def forward(
    query_bhqd: torch.Tensor,
    key_bksd: torch.Tensor,
    value_bksd: torch.Tensor,
    reach: Reach = EVERYTHING,
    sinks_h: torch.Tensor | None = None,
    *,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [B, H, Q, D], a transposed [B, Q, H, D], and the log-sum-exp, float32 [B, H, Q].

    Args:
        sinks_h: as in `kernels.attention.reference`.
        blocks: block sizes instead of the device's, for measurements.
    """
    batch, heads, length, width = query_bhqd.shape
    query, key, value = (_padded(part) for part in (query_bhqd, key_bksd, value_bksd))
    kv_heads, keys, wide = key.shape[1], key.shape[2], query.shape[-1]
    limits = _Limits.of(reach, length, keys)
    cut = blocks or _cut(query, cuts(query).forward)
    out = query.new_empty(batch, length, heads, wide)
    sums = torch.empty(batch, heads, length, device=query.device)
    strides = [stride for part in (query, key, value) for stride in part.stride()[:3]]
    firsts = sums if limits.firsts is None else limits.firsts
    _forward_kernel[(triton.cdiv(length, cut.rows), batch * heads)](
        query, key, value, out, sums, sums if sinks_h is None else sinks_h, firsts,
        length, keys, limits.offset, limits.window, heads, kv_heads, width**-0.5, *strides, firsts.stride(0),
        SINKS=sinks_h is not None, **limits.flags(), D=wide, M=cut.rows, N=cut.columns,
        num_warps=cut.warps, num_stages=cut.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out[..., :width].transpose(1, 2), sums


def backward(
    grad_bhsd: torch.Tensor,
    query_bhsd: torch.Tensor,
    key_bksd: torch.Tensor,
    value_bksd: torch.Tensor,
    out_bhsd: torch.Tensor,
    sums: torch.Tensor,
    reach: Reach = EVERYTHING,
    onto: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    of_keys: Blocks | None = None,
    of_queries: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values: the heads of each in one [B, S, H + 2 K, D], transposed.

    Args:
        sums: natural log-sum-exp of the scaled scores, float32 [B, H, Q].
        onto: float32 [B, K, S, D], to which the gradients of keys and values are added in place. Only with it
            may there be fewer queries than keys.
        of_keys, of_queries: block sizes instead of the device's, for measurements.
    """
    batch, heads, length, width = query_bhsd.shape
    query, key, value, grad, out = map(_padded, (query_bhsd, key_bksd, value_bksd, grad_bhsd, out_bhsd))
    kv_heads, keys_length, wide = key.shape[1], key.shape[2], query.shape[-1]
    sums = sums.contiguous()
    keys, queries = (
        of_keys or _cut(query, cuts(query).of_keys),
        of_queries or _cut(query, cuts(query).of_queries),
    )
    limits = _Limits.of(reach, length, keys_length)
    if onto is None:
        grads = query.new_empty(batch, length, heads + 2 * kv_heads, wide)
        of_query, of_key, of_value = grads.split((heads, kv_heads, kv_heads), dim=2)
    elif wide == width:
        of_query = query.new_empty(batch, length, heads, wide)
        of_key, of_value = (part.transpose(1, 2) for part in onto)
    else:
        of_query = query.new_empty(batch, length, heads, wide)
        of_key, of_value = (
            torch.zeros(batch, keys_length, kv_heads, wide, device=query.device) for _ in onto
        )
    inner = inner_products(grad, out)
    strides = [stride for part in (query, key, value, grad) for stride in part.stride()[:3]]
    scale = width**-0.5
    firsts = sums if limits.firsts is None else limits.firsts
    lasts = limits.lasts(keys_length)
    programs = triton.cdiv(keys_length, keys.rows) * batch * kv_heads
    parts = 1 if onto is not None else _parts(heads // kv_heads, programs)
    to_key, to_value = (part[None] for part in (of_key, of_value))
    if parts > 1:
        to_key, to_value = torch.empty(
            2, parts, batch, keys_length, kv_heads, wide, dtype=torch.float32, device=query.device
        )
    into = [part.stride(axis) for part in (to_key, to_value) for axis in (1, 3, 2)]
    _keys_kernel[(triton.cdiv(keys_length, keys.rows), batch * kv_heads * parts)](
        query, key, value, grad, sums, inner, to_key, to_value, firsts, sums if lasts is None else lasts,
        length, keys_length, limits.offset, limits.window, heads, kv_heads, scale, *strides, *into,
        firsts.stride(0), to_key.stride(0), to_value.stride(0), parts, ADDS=onto is not None,
        **limits.flags(), D=wide, N=keys.rows, M=keys.columns, num_warps=keys.warps,
        num_stages=keys.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        of_key.copy_(to_key.sum(0))
        of_value.copy_(to_value.sum(0))
    _queries_kernel[(triton.cdiv(length, queries.rows), batch * heads)](
        query, key, value, grad, sums, inner, of_query, firsts, length, keys_length, limits.offset,
        limits.window, heads, kv_heads, scale, *strides, of_query.stride(1), firsts.stride(0),
        **limits.flags(),
        D=wide, M=queries.rows, N=queries.columns, num_warps=queries.warps, num_stages=queries.stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    query_out, key_out, value_out = (
        part[..., :width].transpose(1, 2) for part in (of_query, of_key, of_value)
    )
    if onto is not None and wide != width:
        return query_out, onto[0].add_(key_out), onto[1].add_(value_out)
    return query_out, key_out, value_out


def _parts(group: int, programs: int) -> int:
    """Into how many equal parts the query heads that share keys are divided among programs, so that there are
    enough. Their float32 sums are added in order."""
    divisors = [count for count in range(1, group + 1) if group % count == 0]
    return next((count for count in divisors if programs * count >= ENOUGH_PROGRAMS), group)


def inner_products(grad_bhqd: torch.Tensor, out_bhqd: torch.Tensor) -> torch.Tensor:
    """The inner product of each query's result and its gradient, float32 [B, H, Q]."""
    grad, out = _padded(grad_bhqd), _padded(out_bhqd)
    batch, heads, length, wide = out.shape
    products = torch.empty(batch, heads, length, device=out.device)
    _inner_products[(triton.cdiv(length, 64), batch * heads)](
        out,
        grad,
        products,
        length,
        heads,
        *out.stride()[:3],
        *grad.stride()[:3],
        D=wide,
        M=64,
        enable_fp_fusion=True,
    )
    return products


def _padded(part: torch.Tensor) -> torch.Tensor:
    """Heads padded with zeros to a power of two, as the kernels read them."""
    width = part.shape[-1]
    if missing := max(16, triton.next_power_of_2(width)) - width:
        return F.pad(part, (0, missing))
    return part if part.stride(-1) == 1 else part.contiguous()
