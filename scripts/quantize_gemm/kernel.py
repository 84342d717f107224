"""A layer's matrix product that stores its input in 4 bits as it reads it: an experiment, no part of a node.

out = f(input) @ weight.T, where f is SwiGLU of two inputs or RMSNorm of one, computed on each tile of the
input right before it enters the tensor cores, and the raw input stored as `kernels.blockfloat.reference.pack` stores
it. All tiles of the output in a row of tiles read the same input; each block of it is packed by exactly one
of their programs: by the first column's, or by all columns' in turns (`Config.spread`).

RMSNorm needs a row's sum of squares before anything else, which a program that goes along the row does not
have: here the product runs on x * scale, squares are summed meanwhile, and the result is divided at the end.

Compile with `enable_fp_fusion=False`, as all kernels that store blocks: it leaves the tensor cores alone.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.blockfloat.layout import BLOCK, blocks_of, limit
from kernels.blockfloat.triton.store import load_wide, store_blocks, store_rounded
from kernels.common.triton.numbers import INTERPRETED, as_bits

BITS = 4

_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Rows, columns and depth of a program's tiles, its warps and the stages of its loads.

    No stored bit depends on them; sums do."""

    rows: int = 128
    columns: int = 128
    depth: int = 64
    """128; or 64, when a block is two tiles deep, and is read once more to be packed."""
    warps: int = 8
    stages: int = 3
    spread: bool = False
    """Whether all columns of tiles pack in turns, or the first packs all."""
    group: int = 8
    """Rows of tiles that go through the columns together, so that what they read stays in the cache."""


CONFIGS = (
    Config(columns=256),
    Config(columns=256, stages=4),
    Config(columns=256, depth=128, stages=2),
    Config(rows=64, columns=256, warps=4, stages=2),
    Config(columns=128, stages=4),
    Config(columns=128, warps=4),
    Config(columns=128, depth=128, stages=2),
    Config(columns=256, spread=True),
    Config(rows=64, columns=256, warps=4, stages=2, spread=True),
)
"""What the bench tries. The fewer columns a tile has, the more often SwiGLU is computed."""


@triton.jit
def _wide(values):
    """fp32 of what was loaded without a mask."""
    if _INTERPRETED and values.dtype == tl.bfloat16:
        # The interpreter's own conversion is wrong for subnormal numbers.
        bits = values.to(tl.int16, bitcast=True).to(tl.int32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def _half(values):
    """fp32 rounded to bf16; under the interpreter, whose bf16 has no arithmetic, as fp32."""
    if _INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = values.to(tl.bfloat16)
    return rounded


@triton.jit
def _silu(v):
    if _INTERPRETED:
        result = v / (1.0 + tl.exp(-v))
    else:
        # v sigmoid(v) by one special operation an element, as every column of tiles does this again: an
        # exponential and a quotient take three times as many instructions. Its error is below bf16's.
        half = 0.5 * v
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        result = tl.fma(half, tanh, half)
    return result


@triton.jit
def _pack_again(x, packed, n, first_row, rows, index, per_row, ROWS: tl.constexpr, LIMIT: tl.constexpr):
    """Read the blocks at `index` of ROWS rows, most likely from a cache, and store them."""
    # With 16 or 64 at a time more of the product's registers are spilled.
    for part in tl.static_range(ROWS // 32):
        row = first_row.to(tl.int64) + part * 32 + tl.arange(0, 32)
        inside = row < rows
        where = (row * per_row + index)[:, None] * 128 + tl.arange(0, 128)[None, :]
        y = load_wide(x + where, inside[:, None] & (where >= 0))
        store_blocks(packed, n, row * per_row + index, inside, y, 4, LIMIT)


@triton.jit
def _pack_tile(y, packed, n, first_row, rows, index, per_row, ROWS: tl.constexpr, LIMIT: tl.constexpr):
    """Store blocks that a program holds, fp32 `[ROWS, 128]`."""
    row = first_row.to(tl.int64) + tl.arange(0, ROWS)
    store_blocks(packed, n, row * per_row + index, row < rows, y, 4, LIMIT)


@triton.jit
def _product(
    x,
    beside,
    scale,
    weight,
    packed_x,
    packed_beside,
    n,
    rows,
    width,
    columns,
    tile_row,
    tile_column,
    STEPS: tl.constexpr,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    SPREAD: tl.constexpr,
    WAIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A tile of the product, and the sums of squares of its rows of x; blocks whose turn it is packed."""
    # Rows and columns beyond the end read others again, so that no load needs a mask.
    row = (tile_row * ROWS + tl.arange(0, ROWS)) % rows
    column = (tile_column * COLUMNS + tl.arange(0, COLUMNS)) % columns
    across = tl.cdiv(columns, COLUMNS)
    k = tl.arange(0, DEPTH)
    per_row = width // 128
    source = row[:, None] * width + k[None, :]
    matrix = column[None, :] * width + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for step in range(0, STEPS if _INTERPRETED else width // DEPTH):
        start = step * DEPTH
        y = _wide(tl.load(x + start + source))
        if NORM:
            squares += tl.sum(y * y, 1)
            inner = y * _wide(tl.load(scale + start + k))[None, :]
        else:
            u = _wide(tl.load(beside + start + source))
            inner = _silu(y) * u
        part = tl.load(weight + start + matrix)
        if _INTERPRETED:
            total = tl.dot(_half(inner), _wide(part), total)
        else:
            total = tl.dot(_half(inner), part, total)
            if WAIT:
                # No instruction, but it ends the product here.
                total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
        if STORE:
            index = start // 128
            turn = index % across if SPREAD else tile_column
            if (tile_column == turn) & (start % 128 == 0):
                first = tile_row * ROWS
                if DEPTH == 128:
                    _pack_tile(y, packed_x, n, first, rows, index, per_row, ROWS, LIMIT)
                    if not NORM:
                        _pack_tile(u, packed_beside, n, first, rows, index, per_row, ROWS, LIMIT)
                else:
                    _pack_again(x, packed_x, n, first, rows, index, per_row, ROWS, LIMIT)
                    if not NORM:
                        _pack_again(beside, packed_beside, n, first, rows, index, per_row, ROWS, LIMIT)
    return total, squares


# Rows are odd as often as not: no compilation of their own for those that are multiples of 16.
@partial(triton.jit, do_not_specialize=("n", "rows"))
def _quantize_gemm(
    x,
    beside,
    scale,
    weight,
    out,
    packed_x,
    packed_beside,
    n,
    rows,
    width,
    columns,
    eps,
    STEPS: tl.constexpr,
    LIMIT: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    SPREAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = (RMSNorm(x) if NORM else silu(x) * beside) @ weight.T; x, and `beside` if not NORM, stored."""
    program = tl.program_id(0)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    tile_row = group * GROUP + program % (GROUP * across) % height
    tile_column = program % (GROUP * across) // height

    # Programs that pack nothing let a product run while they make the next tile. Where it would run into the
    # branch that packs, and in a kernel without any, ptxas would make each part wait for the one before.
    # fmt: off
    if STORE and (SPREAD or tile_column == 0):
        total, squares = _product(
            x, beside, scale, weight, packed_x, packed_beside, n, rows, width, columns, tile_row, tile_column,
            STEPS, LIMIT, NORM, True, SPREAD, True, ROWS, COLUMNS, DEPTH,
        )
    else:
        total, squares = _product(
            x, beside, scale, weight, packed_x, packed_beside, n, rows, width, columns, tile_row, tile_column,
            STEPS, LIMIT, NORM, False, SPREAD, not STORE, ROWS, COLUMNS, DEPTH,
        )
    # fmt: on
    if NORM:
        total = total * (1.0 / tl.sqrt(squares / width + eps))[:, None]
    row = tile_row * ROWS + tl.arange(0, ROWS)
    column = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    target = row.to(tl.int64)[:, None] * columns + column[None, :]
    store_rounded(out + target, total, (row < rows)[:, None] & (column < columns)[None, :])


def quantize_gemm(
    x: torch.Tensor,
    beside: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    packed: tuple[torch.Tensor, ...],
    *,
    config: Config,
    eps: float = 1e-5,
    only_compile: bool = False,
) -> None:
    """The product into `out`, and what was stored into `packed`, which is empty to store nothing.

    Args:
        x: `[rows, width]`, bf16 or fp32; a width of whole blocks.
        beside: SwiGLU's other input, like x; or None.
        scale: RMSNorm's parameter `[width]`, fp32; or None.
        weight: bf16 `[columns, width]`, as a linear layer has it.
        out: bf16 `[rows, columns]`.
        packed: of x, and of `beside` if it is there: buffers of `kernels.blockfloat.triton.store.empty_packed`.
    """
    (rows, width), columns = x.shape, weight.shape[0]
    if (beside is None) == (scale is None):
        raise ValueError("give either the other input of SwiGLU or the parameter of RMSNorm")
    if width % BLOCK or columns % 16:
        raise ValueError(
            f"a product of {width} by {columns}: the width must be a multiple of {BLOCK}, columns of 16"
        )
    if config.depth not in (BLOCK // 2, BLOCK) or config.rows % 32:
        raise ValueError(
            f"tiles of {config.rows} rows, {config.depth} deep: rows must be a multiple of 32, "
            f"the depth {BLOCK // 2} or {BLOCK}"
        )
    if max(x.numel(), weight.numel()) >= 2**31:
        raise ValueError(f"{rows} x {width} x {columns}: places are counted in 32 bits; give fewer rows")
    inputs = [tensor for tensor in (x, beside) if tensor is not None]
    if packed and len(packed) != len(inputs):
        raise ValueError(f"{len(inputs)} inputs need as many buffers, not {len(packed)}")
    if any(not tensor.is_contiguous() for tensor in (*inputs, weight, out)):
        raise ValueError("inputs, weight and out must be contiguous")
    # What a variant has no use for is given another tensor, which it does not look at.
    first, second = (packed[0], packed[-1]) if packed else (out, out)
    arguments: list[Any] = [x, x if beside is None else beside, x if scale is None else scale, weight]
    arguments += [as_bits(out), first, second, blocks_of(x.shape), rows, width, columns, eps]
    grid = (triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns),)
    run = partial(_quantize_gemm.warmup, grid=grid) if only_compile else _quantize_gemm[grid]
    run(
        *arguments,
        # The interpreter cannot count to a number that it computed; a compilation serves all widths.
        STEPS=width // config.depth if INTERPRETED else 0,
        LIMIT=limit(BITS),
        NORM=beside is None,
        STORE=bool(packed),
        SPREAD=config.spread,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=False,
    )
