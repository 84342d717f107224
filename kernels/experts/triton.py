"""`kernels.experts.reference` in Triton. The device never waits for the host.

Shape legend: T tokens, E experts, k experts a token, S = T k slots, N outputs, K inputs.

A program of a product owns a tile of one expert's rows. The host does not know how many tiles an expert has,
so it starts the largest possible number of programs, and each finds its expert in the offsets; superfluous
programs end at once. A tile's shape and the order of its sums follow from the device, the dtype and the shape
of the weights, and for packed ones from the number of all rows, never from how many tokens an expert has: a
row has the same bits whatever the other rows are.

Packed weights (`kernels.blockfloat`) are rounded to the dtype of the other factor, as in the reference. For
few rows they are unpacked inside the product, a block of 128 inputs a row at a time. Each tile of rows does
so again, so for many rows they are unpacked before the product (`kernels.experts.unpacking`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blockfloat.layout import BLOCK
from kernels.blockfloat.triton.store import as_stored, load_blocks, load_wide, store_rounded, unpack_each
from kernels.common.devices import Room
from kernels.common.dispatch import room
from kernels.common.triton.numbers import INTERPRETED, as_bits
from kernels.experts.reference import Adapter, Order, PackedExperts, Weights
from kernels.experts.unpacking import unpacked_at_once

_INTERPRETED = tl.constexpr(INTERPRETED)
_LOWEST = tl.constexpr(-(2**31))


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time: `rows` x `columns` of a result, `depth` summands. Powers of two, at
    least 16. Bits depend on it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    half: Tile
    """Products in half precision with unpacked weights."""
    packed: Tile
    """Products with packed weights: 128 deep."""
    packed_back: Tile
    """The gradient of the input with packed weights: 128 columns."""
    weights: Tile
    """The gradient of weights: rows are outputs, columns inputs, summands tokens."""
    wide: Tile
    """All products in float32."""


TILES = {
    # The fastest of those tried on an H200 (scripts/results/experts_tiles.json).
    Room.LARGE: Tiles(
        half=Tile(128, 256, 64, 8, 3),
        packed=Tile(256, 128, 128, 8, 2),
        packed_back=Tile(256, 128, 64, 8, 3),
        weights=Tile(128, 128, 64, 8, 2),
        wide=Tile(64, 64, 32, 4, 2),
    ),
    Room.SMALL: Tiles(
        half=Tile(64, 128, 32, 4, 3),
        packed=Tile(64, 64, 128, 4, 2),
        packed_back=Tile(64, 128, 32, 4, 2),
        weights=Tile(64, 64, 32, 4, 3),
        wide=Tile(32, 32, 32, 4, 2),
    ),
    Room.NONE: Tiles(
        half=Tile(32, 32, 32, 4, 1),
        packed=Tile(32, 32, 128, 4, 1),
        packed_back=Tile(32, 128, 32, 4, 1),
        weights=Tile(32, 32, 32, 4, 1),
        wide=Tile(32, 32, 32, 4, 1),
    ),
}

ROUTED = 8
"""Tokens that a program routes."""
COLUMNS = 1024
"""Elements of a row that a program reads at a time. They determine the order of sums over a row."""
SUMMED = 32
"""Rows that the gradient of biases sums at a time."""


def tiles(device: torch.device) -> Tiles:
    return TILES[room(device)]


# ---- routing and grouping


@triton.jit
def _rank(logits):
    """Integers in the order of the logits; zeros of both signs are equal, and a NaN is the largest."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _probabilities(logits, columns, experts):
    """The softmax of rows, with zeros after the last expert."""
    logits = tl.where(columns < experts, logits, -float("inf"))
    powers = tl.exp(logits - tl.max(logits, 1)[:, None])
    return powers / tl.sum(powers, 1)[:, None]


@triton.jit(do_not_specialize=("tokens",))
def _route(
    logits,
    weights,
    chosen,
    tokens,
    experts,
    choices,
    NORMALIZE: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column, choice = tl.arange(0, E)[None, :], tl.arange(0, C)[None, :]
    inside = (token < tokens)[:, None]
    x = tl.load(logits + token[:, None] * experts + column, mask=inside & (column < experts), other=0.0)
    ranks = _rank(x)
    left = column + tl.zeros((R, E), tl.int32) < experts
    best = tl.full((R, C), -float("inf"), tl.float32)
    for number in tl.range(0, choices):
        highest = tl.max(tl.where(left, ranks, _LOWEST), 1)
        winner = tl.min(tl.where(left & (ranks == highest[:, None]), column, E), 1)
        picked = column == winner[:, None]
        value = tl.sum(tl.where(picked, x, 0.0), 1)
        best = tl.where(choice == number, value[:, None], best)
        left = left & (column != winner[:, None])
        tl.store(chosen + token * choices + number, winner.to(tl.int64), mask=token < tokens)
    largest = tl.max(best, 1)[:, None]
    powers = tl.exp(best - largest)
    if NORMALIZE:
        total = tl.sum(powers, 1)[:, None]
    else:
        total = tl.sum(tl.where(column < experts, tl.exp(x - largest), 0.0), 1)[:, None]
    where = token[:, None] * choices + choice
    tl.store(weights + where, powers / total, mask=inside & (choice < choices))


@triton.jit(do_not_specialize=("tokens",))
def _route_backward(
    grad,
    logits,
    weights,
    chosen,
    out,
    tokens,
    experts,
    choices,
    NORMALIZE: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, E)[None, :]
    real = token < tokens
    inner = tl.zeros((R,), tl.float32)
    for number in tl.range(0, choices):
        place = token * choices + number
        weight = tl.load(weights + place, mask=real, other=0.0)
        inner += weight * tl.load(grad + place, mask=real, other=0.0)
    where = token[:, None] * experts + column
    inside = real[:, None] & (column < experts)
    made = tl.zeros((R, E), tl.float32)
    if not NORMALIZE:
        x = tl.load(logits + where, mask=inside, other=0.0)
        made = -_probabilities(x, column, experts) * inner[:, None]
    for number in tl.range(0, choices):
        place = token * choices + number
        weight = tl.load(weights + place, mask=real, other=0.0)
        own = weight * tl.load(grad + place, mask=real, other=0.0)
        if NORMALIZE:
            own -= weight * inner
        winner = tl.load(chosen + place, mask=real, other=-1).to(tl.int32)
        made += tl.where(column == winner[:, None], own[:, None], 0.0)
    tl.store(out + where, made, mask=inside)


@triton.jit(do_not_specialize=("slots",))
def _reverse(order, places, slots, B: tl.constexpr):
    place = tl.program_id(0) * B + tl.arange(0, B)
    real = place < slots
    tl.store(places + tl.load(order + place, mask=real, other=0), place, mask=real)


def route(logits_te: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `kernels.experts.reference.route`."""
    tokens, experts = logits_te.shape
    logits = logits_te.contiguous()
    weights = torch.empty(tokens, choices, device=logits.device)
    chosen = torch.empty(tokens, choices, dtype=torch.int64, device=logits.device)
    if tokens:
        _route[(triton.cdiv(tokens, ROUTED),)](
            logits, weights, chosen, tokens, experts, choices,
            NORMALIZE=normalize, R=ROUTED, E=_width(experts), C=_width(choices), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return weights, chosen


def route_backward(
    grad_tk: Tensor, logits_te: Tensor, weights_tk: Tensor, experts_tk: Tensor, normalize: bool
) -> Tensor:
    """See `kernels.experts.reference.route_backward`."""
    tokens, experts = logits_te.shape
    gradient = torch.empty_like(logits_te, memory_format=torch.contiguous_format)
    if tokens:
        _route_backward[(triton.cdiv(tokens, ROUTED),)](
            grad_tk.contiguous(), logits_te.contiguous(), weights_tk, experts_tk, gradient,
            tokens, experts, weights_tk.shape[1],
            NORMALIZE=normalize, R=ROUTED, E=_width(experts), num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return gradient


def group(experts_tk: Tensor, experts: int) -> Order:
    """See `kernels.experts.reference.group`."""
    # A sort of narrower numbers takes fewer passes.
    narrow = torch.int16 if experts < 2**15 else torch.int32
    ordered, wide = experts_tk.reshape(-1).to(narrow).sort(stable=True)
    slots = wide.int()
    places = torch.empty(experts_tk.shape, dtype=torch.int32, device=slots.device)
    if len(slots):
        _reverse[(triton.cdiv(len(slots), COLUMNS),)](
            slots, places, len(slots), B=COLUMNS, enable_fp_fusion=True
        )
    numbers = torch.arange(experts + 1, dtype=narrow, device=slots.device)
    return Order(slots=slots, places=places, offsets=torch.searchsorted(ordered, numbers, out_int32=True))


# ---- products


@triton.jit
def _tile_of(offsets, tile, experts, M: tl.constexpr, E: tl.constexpr):
    """The expert of a tile of M rows (`experts` or more for a tile after the last), the tile's first row, and
    the end of the expert's rows."""
    number = tl.arange(0, E)
    known = number < experts
    first = tl.load(offsets + number, mask=known, other=0)
    last = tl.load(offsets + number + 1, mask=known, other=0)
    counts = (last - first + M - 1) // M
    ends = tl.cumsum(counts, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    mine = number == expert
    row = tl.sum(tl.where(mine, first + (tile - ends + counts) * M, 0), 0)
    return expert, row, tl.sum(tl.where(mine, last, 0), 0)


@triton.jit
def _operand(values, like):
    """Numbers as `tl.dot` takes them, rounded to the dtype that `like` points to. The interpreter computes
    nothing in bf16: there bf16 is kept in fp32."""
    if _INTERPRETED and values.dtype == tl.bfloat16:
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if _INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        values = as_stored(values.to(tl.float32), like)
    else:
        values = values.to(like.dtype.element_ty)
    return values


@triton.jit
def _as_stored(y, pointers):
    """y as the dtype of `pointers` holds it, in fp32; int16 stands for bf16."""
    if pointers.dtype.element_ty == tl.float16:
        return y.to(tl.float16).to(tl.float32)
    return as_stored(y, pointers)


@triton.jit(do_not_specialize=("blocks",))
def _products(
    x,
    weights,
    bias,
    low,
    up,
    onto,
    slots,
    offsets,
    out,
    experts,
    choices,
    columns,
    depth,
    blocks,
    x_row,
    weight_expert,
    weight_column,
    weight_depth,
    rank,
    up_column,
    up_rank,
    column_tiles,
    BITS: tl.constexpr,
    BACK: tl.constexpr,
    GATHERS: tl.constexpr,
    BIASED: tl.constexpr,
    RANK: tl.constexpr,
    ADDS: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """out[row, column] = sum over depth of x[row, depth] times the weight of (column, depth). With RANK, also
    that over `rank` of low[row, rank] times that of `up`; with ADDS, also what `onto` holds.

    Packed weights lie as columns of `depth` numbers, or with BACK as `depth` rows of columns, in `blocks`
    blocks per expert.
    """
    expert, row, end = _tile_of(offsets, tl.program_id(0) // column_tiles, experts, M, E)
    if expert >= experts:
        return
    rows = row + tl.arange(0, M)
    real = rows < end
    source = rows.to(tl.int64)
    if GATHERS:
        source = (tl.load(slots + rows, mask=real, other=0) // choices).to(tl.int64)
    first = tl.program_id(0) % column_tiles * N
    column = first + tl.arange(0, N)
    inside = column < columns
    weights += expert.to(tl.int64) * weight_expert
    x_rows = x + source[:, None] * x_row
    total = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, depth, D):
        step = start + tl.arange(0, D)
        if EVEN:
            left = tl.load(x_rows + step[None, :], mask=real[:, None], other=0.0)
        else:
            left = tl.load(x_rows + step[None, :], mask=real[:, None] & (step < depth)[None, :], other=0.0)
        if BITS == 0:
            where = weights + column[:, None].to(tl.int64) * weight_column + step[None, :] * weight_depth
            if EVEN:
                right = tl.load(where, mask=inside[:, None], other=0.0)
            else:
                right = tl.load(where, mask=inside[:, None] & (step < depth)[None, :], other=0.0)
            right = tl.trans(_operand(right, x))
        elif BACK:
            block = step.to(tl.int64) * tl.cdiv(columns, 128) + first // 128
            right = _operand(load_blocks(weights, blocks, block, step < depth, BITS), x)
        else:
            block = column.to(tl.int64) * tl.cdiv(depth, 128) + start // 128
            right = tl.trans(_operand(load_blocks(weights, blocks, block, inside, BITS), x))
        total = tl.dot(_operand(left, x), right, total, input_precision="ieee")
    if RANK > 0:
        step = tl.arange(0, RANK)
        real_steps = (step < rank)[None, :]
        where = low + rows[:, None].to(tl.int64) * rank + step[None, :]
        left = tl.load(where, mask=real[:, None] & real_steps, other=0.0)
        where = up + expert.to(tl.int64) * rank * columns
        where += column[:, None].to(tl.int64) * up_column + step[None, :] * up_rank
        right = tl.load(where, mask=inside[:, None] & real_steps, other=0.0)
        total = tl.dot(_operand(left, x), tl.trans(_operand(right, x)), total, input_precision="ieee")
    if BIASED:
        # Round before the bias is added, as in the reference.
        total = _as_stored(total, out)
        total += _as_stored(load_wide(bias + expert * columns + column, inside), out)[None, :]
    place = rows[:, None].to(tl.int64) * columns + column[None, :]
    if ADDS:
        total += load_wide(onto + place, real[:, None] & inside[None, :])
    store_rounded(out + place, total, real[:, None] & inside[None, :])


@triton.jit
def _of_weights(
    grad,
    x,
    slots,
    offsets,
    out,
    choices,
    outputs,
    inputs,
    grad_row,
    x_row,
    output_tiles,
    input_tiles,
    GATHERS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
):
    """out[expert] = sum over the expert's rows of grad[row, outputs] x[row, inputs], R rows at a time."""
    tile = tl.program_id(0)
    expert = tile // (output_tiles * input_tiles)
    row = tile // input_tiles % output_tiles * N + tl.arange(0, N)
    column = tile % input_tiles * K + tl.arange(0, K)
    first, last = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((N, K), tl.float32)
    for start in tl.range(first, last, R):
        rows = start + tl.arange(0, R)
        real = rows < last
        source = rows.to(tl.int64)
        at = grad + source[:, None] * grad_row + row[None, :]
        left = tl.load(at, mask=real[:, None] & (row < outputs)[None, :], other=0.0)
        if GATHERS:
            source = (tl.load(slots + rows, mask=real, other=0) // choices).to(tl.int64)
        at = x + source[:, None] * x_row + column[None, :]
        right = tl.load(at, mask=real[:, None] & (column < inputs)[None, :], other=0.0)
        left, right = tl.trans(_operand(left, grad)), _operand(right, grad)
        total = tl.dot(left, right, total, input_precision="ieee")
    at = out + (expert.to(tl.int64) * outputs + row[:, None]) * inputs + column[None, :]
    store_rounded(at, total, (row < outputs)[:, None] & (column < inputs)[None, :])


@triton.jit
def _of_biases(grad, offsets, out, columns, row_stride, R: tl.constexpr, B: tl.constexpr):
    expert = tl.program_id(0)
    column = tl.program_id(1) * B + tl.arange(0, B)
    first, last = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    total = tl.zeros((R, B), tl.float32)
    for start in tl.range(first, last, R):
        rows = start + tl.arange(0, R)
        at = grad + rows[:, None].to(tl.int64) * row_stride + column[None, :]
        total += load_wide(at, (rows < last)[:, None] & (column < columns)[None, :])
    store_rounded(out + expert.to(tl.int64) * columns + column, tl.sum(total, 0), column < columns)


def matmul(
    x: Tensor,
    weights: Weights,
    order: Order,
    bias_en: Tensor | None = None,
    *,
    gathers: bool = False,
    adapter: Adapter | None = None,
) -> Tensor:
    """See `kernels.experts.reference.matmul`."""
    out = torch.empty(order.places.numel(), weights.shape[1], dtype=x.dtype, device=x.device)
    bias = None if bias_en is None else bias_en.contiguous()
    _multiply(out, x, weights, order, bias, adapter, gathers=gathers)
    return out


def input_gradient(
    grad_sn: Tensor,
    weights: Weights,
    order: Order,
    *,
    adapter: Adapter | None = None,
    onto: Tensor | None = None,
) -> Tensor:
    """See `kernels.experts.reference.input_gradient`."""
    out = onto
    if out is None:
        out = torch.empty(len(grad_sn), weights.shape[2], dtype=grad_sn.dtype, device=grad_sn.device)
    _multiply(out, grad_sn, weights, order, None, adapter, back=True, adds=onto is not None)
    return out


def _multiply(
    out: Tensor,
    x: Tensor,
    weights: Weights,
    order: Order,
    bias: Tensor | None,
    adapter: Adapter | None,
    *,
    gathers: bool = False,
    back: bool = False,
    adds: bool = False,
) -> None:
    """Fill `out`; packed weights of many rows are unpacked first, those of some experts at a time."""
    slots, columns = out.shape
    if not slots or not columns:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    low, up = (out, out) if adapter is None else (part.contiguous() for part in adapter)
    rank = 0 if adapter is None else low.shape[1]
    experts, outputs, inputs = weights.shape
    depth = outputs if back else inputs
    at_once = 0
    if isinstance(weights, PackedExperts):
        at_once = unpacked_at_once(experts, outputs * inputs * x.element_size(), slots)
    for first in range(0, experts, at_once or experts):
        some = slice(first, first + (at_once or experts))
        part: Weights = weights
        if at_once and isinstance(weights, PackedExperts):
            part = unpack_each(weights.packed[some], weights.shape[1:], weights.bits, x.dtype)
        count = part.shape[0]
        tile = _tile(x, part, columns, depth, back)
        column_tiles = triton.cdiv(columns, tile.columns)
        # No split of the slots has more tiles, because the last tile of every expert may be almost empty.
        row_tiles = slots // tile.rows + min(count, slots)
        packed = isinstance(part, PackedExperts)
        data = part.packed if isinstance(part, PackedExperts) else part
        steps = (0, 0) if packed else data.stride()[1:]
        _products[(row_tiles * column_tiles,)](
            x,
            data,
            out if bias is None else bias[some],
            low,
            up if adapter is None else up[some],
            out,
            order.slots,
            order.offsets[first : first + count + 1],
            as_bits(out),
            count,
            order.choices,
            columns,
            depth,
            outputs * triton.cdiv(inputs, BLOCK),
            x.stride(0),
            data.stride(0),
            *(steps[::-1] if back else steps),
            rank,
            *((1, columns) if back else (rank, 1)),
            column_tiles,
            BITS=part.bits if isinstance(part, PackedExperts) else 0,
            BACK=back,
            GATHERS=gathers,
            BIASED=bias is not None,
            RANK=_width(rank) if rank else 0,
            ADDS=adds,
            EVEN=depth % tile.depth == 0,
            M=tile.rows,
            N=tile.columns,
            D=tile.depth,
            E=_width(count),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )


def weight_gradient(
    grad_sn: Tensor, x: Tensor, order: Order, dtype: torch.dtype, *, gathers: bool = False
) -> Tensor:
    """See `kernels.experts.reference.weight_gradient`."""
    experts, outputs, inputs = len(order.offsets) - 1, grad_sn.shape[1], x.shape[1]
    kinds = tiles(x.device)
    tile = kinds.wide if grad_sn.dtype == torch.float32 else kinds.weights
    rows, columns = min(tile.rows, _width(outputs)), min(tile.columns, _width(inputs))
    gradient = torch.empty(experts, outputs, inputs, dtype=dtype, device=x.device)
    grad_sn, x = (part if part.stride(-1) == 1 else part.contiguous() for part in (grad_sn, x))
    output_tiles, input_tiles = triton.cdiv(outputs, rows), triton.cdiv(inputs, columns)
    if gradient.numel():
        _of_weights[(experts * output_tiles * input_tiles,)](
            grad_sn, x, order.slots, order.offsets, as_bits(gradient), order.choices, outputs, inputs,
            grad_sn.stride(0), x.stride(0), output_tiles, input_tiles,
            GATHERS=gathers, N=rows, K=columns, R=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=True,
        )  # fmt: skip
    return gradient


def bias_gradient(grad_sn: Tensor, order: Order, dtype: torch.dtype) -> Tensor:
    """See `kernels.experts.reference.bias_gradient`."""
    experts, columns = len(order.offsets) - 1, grad_sn.shape[1]
    gradient = torch.empty(experts, columns, dtype=dtype, device=grad_sn.device)
    grad = grad_sn if grad_sn.stride(-1) == 1 else grad_sn.contiguous()
    width = min(128, _width(columns))
    if gradient.numel():
        _of_biases[(experts, triton.cdiv(columns, width))](
            grad,
            order.offsets,
            as_bits(gradient),
            columns,
            grad.stride(0),
            R=SUMMED,
            B=width,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return gradient


def _tile(x: Tensor, weights: Weights, columns: int, depth: int, back: bool) -> Tile:
    """The device's tile, reduced for narrower results and shorter sums."""
    kinds = tiles(x.device)
    packed = isinstance(weights, PackedExperts)
    half = kinds.packed_back if packed and back else kinds.packed if packed else kinds.half
    tile = kinds.wide if x.dtype == torch.float32 else half
    wide = BLOCK if packed and back else min(tile.columns, _width(columns))
    deep = BLOCK if packed and not back else min(tile.depth, _width(depth))
    return Tile(tile.rows, wide, deep, tile.warps, tile.stages)


def _width(count: int) -> int:
    """The smallest power of two of at least 16 and `count`."""
    power: int = max(16, triton.next_power_of_2(count))
    return power


# ---- the sum of results


@triton.jit
def _combine(y, weights, places, out, columns, choices, row_stride, WEIGHTED: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * B + tl.arange(0, B)
    inside = column < columns
    total = tl.zeros((B,), tl.float32)
    for choice in tl.range(0, choices):
        place = tl.load(places + token * choices + choice).to(tl.int64)
        row = load_wide(y + place * row_stride + column, inside)
        if WEIGHTED:
            row *= tl.load(weights + token * choices + choice)
        total += row
    store_rounded(out + token * columns + column, total, inside)


def combine(y_sn: Tensor, weights_tk: Tensor | None, order: Order) -> Tensor:
    """See `kernels.experts.reference.combine`; the bits are the same."""
    tokens, columns = len(order.places), y_sn.shape[1]
    y = y_sn if y_sn.stride(-1) == 1 else y_sn.contiguous()
    out = torch.empty(tokens, columns, dtype=y.dtype, device=y.device)
    width = min(COLUMNS, _width(columns))
    if out.numel():
        _combine[(tokens, triton.cdiv(columns, width))](
            y, order.places if weights_tk is None else weights_tk.contiguous(), order.places, as_bits(out),
            columns, order.choices, y.stride(0),
            WEIGHTED=weights_tk is not None, B=width, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
