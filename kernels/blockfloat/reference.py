"""Stored tensors in blocks of 128, in plain torch. Other implementations give the same bits.

All arithmetic is fp32, and each operation rounds on its own, to nearest even. m is the largest |x_k| of a
block, L the limit of its format (`kernels.blockfloat.layout` has the layout and the formats):

1. s = m * (1 / L), rounded to bf16; 0 if m < 2**-100; NaN if m >= 2**126 or the block holds a NaN.
2. a = min(|x_k| * (1 / s), L), and 0 where s is 0.
3. The magnitude code of an e2m format, with M = 2**mantissa, is the least of rint(a * 2**-k) + k M for k = 0,
   1, 2, which is the nearest. With 3 bits it is the number of thresholds below a.
4. The code is the magnitude code with x's sign bit above it.
5. Decoding, with e = magnitude code div M: the value is the magnitude code itself if e = 0, else
   (M + code mod M) * 2**(e - 1). It is multiplied by s and rounded to the output's dtype.

A block that is not finite decodes to NaNs. The gradient's norm shows that, so nothing has to wait for a
check. Padding never leaves the buffer. Block-wise FP4 for stored activations: AGoQ, arXiv 2605.00539,
section 4.1.2.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from kernels.blockfloat import outliers
from kernels.blockfloat.layout import (
    APART,
    BLOCK,
    NAN_SCALE,
    SHARDS,
    SMALL_MAGNITUDES,
    SMALL_THRESHOLDS,
    SMALLEST_BITS,
    TOO_LARGE_BITS,
    blocks_of,
    limit,
    mantissa,
    packed_bytes,
    payload_offset,
)

# Blocks that a CPU works on at once, so that the scratch memory stays in cache.
_CPU_BLOCKS = 2048


def pack(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Store x (fp32, bf16 or fp16, `[..., C]`) in `bits` (3, 4, 5, 6, 8 or 16, or with `APART`): uint8, 1-D.

    The size is `packed_bytes(x.shape, bits)`. Never waits for the device.
    """
    if bits >= APART:
        return outliers.pack(x, bits, outliers.channel_sums, _pack_rest)
    rows = _block_rows(x)
    if bits == 16:
        # Copied even if x is bf16, because an operator may not return its input.
        return rows.to(torch.bfloat16, copy=True).view(-1).view(torch.uint8)
    # Zeros also fill the gap after the scales, so that equal tensors have equal bytes.
    packed = torch.zeros(packed_bytes(x.shape, bits), dtype=torch.uint8, device=x.device)
    scales, shards = _sections(packed, rows.shape[0], bits)
    for block in _ranges(rows.shape[0], x.device):
        codes, scales[block] = _encode(rows[block].float(), bits)
        low = 0
        for width, shard in zip(SHARDS[bits], shards, strict=True):
            shard[block] = _pack_shard(codes >> low if low else codes, width)
            low += width
    return packed


def unpack(packed: torch.Tensor, shape: Sequence[int], bits: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that `pack` stored, as a new contiguous tensor of `shape` and `dtype`."""
    if bits >= APART:
        return outliers.put_back(unpack(packed, shape, bits - APART, dtype), packed, bits)
    count, width = blocks_of(shape), shape[-1]
    if bits == 16:
        rows = packed.view(torch.bfloat16).view(count, BLOCK).to(dtype)
    else:
        scales, shards = _sections(packed, count, bits)
        rows = torch.empty(count, BLOCK, dtype=dtype, device=packed.device)
        table = _magnitudes(bits, packed.device)
        for block in _ranges(count, packed.device):
            codes = _unpack_shard(shards[0][block], SHARDS[bits][0])
            if len(shards) > 1:
                codes |= _unpack_shard(shards[1][block], SHARDS[bits][1]) << SHARDS[bits][0]
            values = table.index_select(0, codes.view(-1).int()).view(-1, BLOCK)
            rows[block] = values.mul_(scales[block, None].float())
    whole = rows.view(-1, -(-width // BLOCK) * BLOCK)[:, :width]
    # Copied, so that changes to the result do not reach the stored tensor.
    restored = whole.clone(memory_format=torch.contiguous_format) if bits == 16 else whole.contiguous()
    return restored.view(tuple(shape))


def _pack_rest(x: torch.Tensor, bits: int, apart: torch.Tensor) -> torch.Tensor:
    return pack(x.index_fill(-1, apart, 0), bits)


def _block_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., C]` as `[blocks, 128]`, filled up with zeros."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if short := -width % BLOCK:
        rows = F.pad(rows, (0, short))
    return rows.contiguous().view(-1, BLOCK)


def _ranges(blocks: int, device: torch.device) -> Iterator[slice]:
    size = _CPU_BLOCKS if device.type == "cpu" else max(blocks, 1)
    for start in range(0, blocks, size):
        yield slice(start, min(start + size, blocks))


def _sections(packed: torch.Tensor, blocks: int, bits: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The scales, bf16 `[blocks]`, and the shards, uint8 `[blocks, bytes]`, as views of the buffer."""
    scales = packed[: 2 * blocks].view(torch.bfloat16)
    shards = []
    start = payload_offset(blocks, bits)
    for width in SHARDS[bits]:
        nbytes = BLOCK * width // 8
        shards.append(packed[start : start + blocks * nbytes].view(blocks, nbytes))
        start += blocks * nbytes
    return scales, shards


def _encode(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8 `[n, 128]`, and scales, bf16 `[n]`, of rows fp32 `[n, 128]`."""
    magnitudes = rows.abs()
    largest = magnitudes.view(torch.int32).amax(1)
    top = limit(bits)
    scale = (largest.view(torch.float32) * (1.0 / top)).to(torch.bfloat16)
    scale = torch.where(largest < SMALLEST_BITS, 0.0, scale)
    nan = torch.tensor(NAN_SCALE, dtype=torch.int16, device=rows.device).view(torch.bfloat16)
    scale = torch.where(largest >= TOO_LARGE_BITS, nan, scale)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
    scaled = magnitudes.mul_(inverse[:, None])
    # The comparison is False for a NaN, so it becomes the limit on every device.
    scaled = torch.where(scaled < top, scaled, top)
    if bits == 3:
        codes = torch.zeros(rows.shape, dtype=torch.uint8, device=rows.device)
        for threshold in SMALL_THRESHOLDS:
            codes += scaled > threshold
    else:
        step = 2 ** mantissa(bits)
        nearest = scaled.round()
        for exponent in (1, 2):
            torch.minimum(nearest, (scaled * 0.5**exponent).round_().add_(exponent * step), out=nearest)
        codes = nearest.to(torch.uint8)
    codes |= torch.signbit(rows).to(torch.uint8) << (bits - 1)
    return codes, scale


def _magnitudes(bits: int, device: torch.device) -> torch.Tensor:
    """The value of every code in units of the scale, fp32."""
    if bits == 3:
        positive = list(SMALL_MAGNITUDES)
    else:
        step = 2 ** mantissa(bits)
        positive = [
            float(code) if code < step else float((step + code % step) << (code // step - 1))
            for code in range(4 * step)
        ]
    return torch.tensor(positive + [-value for value in positive], dtype=torch.float32, device=device)


def _pack_shard(codes: torch.Tensor, width: int) -> torch.Tensor:
    """The lowest `width` bits of codes, uint8 `[n, 128]`, as bytes `[n, 16 * width]`."""
    if width == 8:
        return codes
    each = 8 // width
    parts = (codes & (2**width - 1)).view(codes.shape[0], -1, each)
    packed: torch.Tensor = parts[:, :, 0].clone()
    for place in range(1, each):
        packed |= parts[:, :, place] << (place * width)
    return packed


def _unpack_shard(shard: torch.Tensor, width: int) -> torch.Tensor:
    """The inverse of `_pack_shard`: a new uint8 `[n, 128]`."""
    if width == 8:
        return shard.clone()
    each = 8 // width
    codes = torch.empty(shard.shape[0], BLOCK // each, each, dtype=torch.uint8, device=shard.device)
    for place in range(each):
        torch.bitwise_and(shard >> (place * width), 2**width - 1, out=codes[:, :, place])
    return codes.view(-1, BLOCK)
