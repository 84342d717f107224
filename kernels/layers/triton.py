"""Rotary position embedding in place and dropout, with the bits of `kernels.common.layers`; the residual sum;
and the cross entropy of logits, with gradients that replace the logits."""

import torch
import triton
import triton.language as tl

from kernels.blockfloat.triton.store import load_wide, store_jit, store_rounded
from kernels.common.layers import DROP_BITS, drop_threshold
from kernels.common.triton.numbers import as_bits, mixed, wrapped

_DROP_MASK = tl.constexpr((1 << DROP_BITS) - 1)
ADDED = 4096
"""Elements per program of `add`."""
HEADS = 8
"""Heads that a program rotates at a time. No bit depends on it."""
LOGITS = 4096
"""A token's logits that a program reads at a time. They determine the order of sums."""


@store_jit
def _rotate(
    x, out, cos, sin, length, heads, row_stride, sign, D: tl.constexpr, HALF: tl.constexpr, T: tl.constexpr
):
    """Rotate one token's heads, a contiguous row [heads, D] of x. `out` is `as_bits(x)`."""
    token = tl.program_id(0)
    column = tl.arange(0, HALF)
    here = column < D // 2
    entry = (token % length) * D + column
    c = tl.load(cos + entry, mask=here, other=0.0)[None, :]
    s = tl.load(sin + entry, mask=here, other=0.0)[None, :] * sign
    start = 0
    while start < heads:
        head = start + tl.arange(0, T)
        real = (head < heads)[:, None] & here[None, :]
        place = token.to(tl.int64) * row_stride + head[:, None] * D + column[None, :]
        a, b = load_wide(x + place, real), load_wide(x + place + D // 2, real)
        store_rounded(out + place, a * c - b * s, real)
        store_rounded(out + place + D // 2, b * c + a * s, real)
        start += T


@triton.jit
def _add(x, y, out, n, B: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    real = place < n
    store_rounded(out + place, load_wide(x + place, real) + load_wide(y + place, real), real)


@store_jit
def _drop(x, out, salt, n, width, first, stride, least, factor, B: tl.constexpr):
    """out = x * factor where an element's random bits reach `least`, else x * 0."""
    place = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    real = place < n
    # Only the lower half of the element's number is hashed.
    element = (place // width * stride + place % width + first).to(tl.uint32)
    bits = mixed(element ^ tl.load(salt).to(tl.uint32)) & _DROP_MASK
    kept = bits.to(tl.int32) >= least
    store_rounded(out + place, load_wide(x + place, real) * tl.where(kept, factor, 0.0), real)


@triton.jit(do_not_specialize=("ignored", "scale"))
def _cross_entropy(
    logits, out, labels, losses, columns, ignored, scale, GRADIENTS: tl.constexpr, B: tl.constexpr
):
    """A token's loss; with `GRADIENTS`, its logits' gradients times `scale`. `out` is `as_bits(logits)`."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    counts = (label != ignored).to(tl.float32)
    logits += token * columns
    out += token * columns
    # Read before the first barrier of the program's warps, because gradients may soon overwrite it.
    chosen = load_wide(logits + label, (label >= 0) & (label < columns))
    largest = -float("inf")
    total = 0.0
    start = 0
    while start < columns:
        column = start + tl.arange(0, B)
        inside = column < columns
        x = tl.where(inside, load_wide(logits + column, inside), -float("inf"))
        most = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - most) + tl.sum(tl.exp(x - most), 0)
        largest = most
        start += B
    tl.store(losses + token, tl.where(label != ignored, tl.log(total) + largest - chosen, 0.0))
    if GRADIENTS:
        share = 1.0 / total
        start = 0
        while start < columns:
            column = start + tl.arange(0, B)
            inside = column < columns
            x = load_wide(logits + column, inside)
            made = tl.exp(x - largest) * share - tl.where(column == label, 1.0, 0.0)
            store_rounded(out + column, made * (counts * scale), inside)
            start += B


def cross_entropy_(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int, scale: float | None
) -> torch.Tensor:
    """See `kernels.common.layers.cross_entropy_`; logits are contiguous."""
    losses = torch.empty(len(labels), device=logits.device)
    if len(labels):
        _cross_entropy[(len(labels),)](
            logits,
            as_bits(logits),
            labels,
            losses,
            logits.shape[1],
            ignored,
            0.0 if scale is None else scale,
            GRADIENTS=scale is not None,
            B=min(LOGITS, triton.next_power_of_2(logits.shape[1])),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return losses


def drop(x: torch.Tensor, salt: torch.Tensor, share: float, *, first: int, stride: int) -> torch.Tensor:
    """See `kernels.common.layers.drop`; x is float32 or bfloat16."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _drop[(triton.cdiv(x.numel(), ADDED),)](
            x,
            as_bits(out),
            salt,
            x.numel(),
            x.shape[-1],
            wrapped(first),
            stride,
            drop_threshold(share),
            # Rounded to x's dtype, as in the reference.
            torch.tensor(1.0 / (1.0 - share), dtype=x.dtype).item(),
            B=ADDED,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y in x's dtype, float32 or bfloat16; both contiguous."""
    out = torch.empty_like(x)
    if x.numel():
        _add[(triton.cdiv(x.numel(), ADDED),)](
            x, y, as_bits(out), x.numel(), B=ADDED, num_warps=8, enable_fp_fusion=True
        )
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Rotate x [B, S, H, D]: in place if a token's heads are contiguous and tokens are evenly spaced, as in
    columns of a wider tensor; else returns a rotated copy."""
    batch, length, heads, width = x.shape
    even = batch == 1 or x.stride(0) == length * x.stride(1)
    if not even or x.stride()[2:] != (width, 1):
        x = x.contiguous()
    if x.numel():
        _rotate[(batch * length,)](
            x,
            as_bits(x),
            cos,
            sin,
            length,
            heads,
            x.stride(1),
            -1.0 if back else 1.0,
            D=width,
            HALF=triton.next_power_of_2(width // 2),
            T=HEADS,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return x
