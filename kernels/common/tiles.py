"""Tiles, a tensor's exponent and rounding to fp16, which all tiled quantizers here share.

A tensor `[..., C]` is cut along its last dimension into tiles of `TILE` contiguous elements. A shorter last
tile is padded with zeros. Tiles are numbered row by row: tile t of row r has the number r * ceil(C / 64) + t.

A tensor is normalized first: with e its exponent (`tensor_exponent`), y = x * 2**-e lies in (-2**13, 2**13),
which is exact. So scales and zero-points are in fp16's range for every finite input, whether its elements are
near 1e-30 or 1e30. Elements 2**37 times smaller than the tensor's largest are zero in fp16.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

# Re-exported.
from kernels.common.tile_layout import TILE as TILE
from kernels.common.tile_layout import tiles_per_row as tiles_per_row

# The largest exponent of a normalized element, exclusive. A rotated tile reaches 4.07 times its largest
# element (one spike a and 63 elements just below a / 2, summed and divided by 8), which still fits fp16's
# 65504.
NORMAL_BITS = 13

# The smallest step that is stored: fp16's smallest subnormal. A tile of zeros has it too, because no step is
# zero.
SMALLEST_STEP = 2.0**-24

# The exponents that a finite tensor can have: from 2**-149 (fp32's smallest) to below 2**128.
MIN_EXPONENT = -149 + 1 - NORMAL_BITS
MAX_EXPONENT = 128 - NORMAL_BITS

# Returned instead of an exponent if the tensor has infinities or NaNs.
NON_FINITE = 0x7FFF

# Among the bits of an fp16: those of its magnitude, and an infinity's. NaNs are above.
HALF_MAGNITUDE = 0x7FFF
HALF_INFINITY = 0x7C00

# The tiles that a CPU works on at a time, so that the scratch stays in cache (1 MiB for each fp32 buffer).
_CPU_BLOCK = 4096


def tile_rows(x: torch.Tensor) -> torch.Tensor:
    """`[..., C]` to `[tiles, 64]`. It copies only if C is no multiple of 64 or x is not contiguous."""
    width = x.shape[-1]
    short = -width % TILE
    rows = x.reshape(-1, width)
    return (F.pad(rows, (0, short)) if short else rows.contiguous()).view(-1, TILE)


def blocks(tiles: int, device: torch.device) -> Iterator[slice]:
    """Ranges of tiles to work on one after the other. Results never depend on where a range ends."""
    size = _CPU_BLOCK if device.type == "cpu" else tiles
    for start in range(0, tiles, size):
        yield slice(start, min(start + size, tiles))


def tensor_exponent(x: torch.Tensor) -> torch.Tensor:
    """The exponent e, int32 0-d on x's device, for which the largest |x| * 2**-e lies in [2**12, 2**13).

    It is -13 for a tensor of zeros, and `NON_FINITE` if x has an infinity or a NaN. The function never waits
    for the device.
    """
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).float()
    _, exponent = torch.frexp(largest)
    return torch.where(torch.isfinite(largest), exponent.int() - NORMAL_BITS, NON_FINITE).int()


def powers_of_two(exponent: torch.Tensor) -> list[torch.Tensor]:
    """2**exponent as fp32 0-d factors to multiply by in turn, because one factor does not exceed 2**127.

    The factor nearer to 1 comes first, so that a result below fp32's normal range is rounded once.
    """
    factors = both_powers_of_two(exponent)
    # Skipping a factor of one changes nothing. On a GPU, finding out whether it is one would wait for the
    # device.
    return factors[1:] if exponent.device.type == "cpu" and factors[0].item() == 1 else factors


def both_powers_of_two(exponent: torch.Tensor) -> list[torch.Tensor]:
    """`powers_of_two` for any number of exponents, always with two factors."""
    far = exponent.clamp(-126, 126)
    return [_power_of_two(exponent - far), _power_of_two(far)]


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    return ((exponent + 127) << 23).int().view(torch.float32)


def normalised(rows: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """A new fp32 tensor: rows times every factor in order."""
    # Widened first, because normalizing would overflow fp16.
    return multiply_all(rows.to(torch.float32, copy=True), factors)


def multiply_all(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
    """x times every factor, in place, in order."""
    for factor in factors:
        x.mul_(factor)
    return x


def short_tiles(per_tile: torch.Tensor, width: int) -> torch.Tensor:
    """A view of the entries of each row's last tile in a tensor `[n]` for rows of `width` elements."""
    return per_tile.view(-1, tiles_per_row(width))[:, -1]


def _next_up(half: torch.Tensor) -> torch.Tensor:
    """The next larger fp16. Negative numbers grow as their bits decrease."""
    bits = half.view(torch.int16)
    return torch.where(bits < 0, bits - 1, bits + 1).to(torch.int16).view(torch.float16)


def ceil_to_half(x: torch.Tensor) -> torch.Tensor:
    """The smallest fp16 that is not below x (fp32, within fp16's range)."""
    half = x.to(torch.float16)
    return torch.where(half.float() < x, _next_up(half), half)


def floor_to_half(x: torch.Tensor) -> torch.Tensor:
    """The largest fp16 that is not above x (fp32, within fp16's range).

    Magnitudes below 2**-100 count as 0, so that hardware which flushes subnormals gives the same result.
    """
    return -ceil_to_half(-torch.where(x.abs() < 2.0**-100, 0.0, x))


def step_for(span: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The smallest fp16 of which `steps` cover `span`; fp32 `[n]` both.

    The divisor is a tensor, because torch on a GPU multiplies by the reciprocal of a plain number.
    """
    return ceil_to_half((span / steps).clamp_min(SMALLEST_STEP))


def restore(out: torch.Tensor, tiles: Callable[[slice], torch.Tensor], exponent: int) -> None:
    """Fill `out` (`[..., C]`, contiguous) from `tiles`, which returns fp32 `[t, 64]` for a block of tiles.
    The result may be overwritten.

    It multiplies by 2**exponent and rounds to out's dtype, within its finite range: the last code of a tile
    may be half a step above the largest element, which must not become an infinity.
    """
    width = out.shape[-1]
    if width % TILE:
        padded = out.new_empty(out.numel() // width, tiles_per_row(width) * TILE)
        rows = padded.view(-1, TILE)
    else:
        rows = out.view(-1, TILE)
    limit = torch.finfo(out.dtype).max
    # Normalized values decode to below 2**24, rotated back or not.
    may_overflow = exponent + 24 >= math.frexp(limit)[1]
    factors = powers_of_two(torch.tensor(exponent, dtype=torch.int32))
    for block in blocks(rows.shape[0], out.device):
        y = multiply_all(tiles(block), factors)
        rows[block] = y.clamp_(-limit, limit) if may_overflow else y
    if width % TILE:
        out.view(-1, width).copy_(padded[:, :width])
