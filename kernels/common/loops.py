"""What the loops of tiled quantizers on a CPU share: bits of floats, tiles, planes, threads.

Compiled by numba at first use and kept in its cache beside the modules, each function with what it calls and
with the constants that it reads. Numba looks at the caller's file alone to find out whether that is still
right, so what is older than the files behind it is removed here. Where it may write nowhere, not beside the
modules nor below the user's home, every process compiles anew.

Loops over a tile are written so that LLVM makes vectors of them although it may not reorder operations on
floats. Constants are fp32: numba computes in fp64 with a plain number.
"""

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.tiles import NON_FINITE, NORMAL_BITS, SMALLEST_STEP, TILE, powers_of_two

_log = logging.getLogger(__name__)


def forget_older(cache: Path, sources: Iterable[Path]) -> None:
    """Remove from `cache` what was compiled of loops before any of `sources` changed: indices and code.

    Numba writes a new index before new code: until then another process would find old code by it.
    """
    newest = max(source.stat().st_mtime for source in sources)
    for path in cache.glob("*loops*.nb[ic]"):
        # Another process may do so too; a folder that cannot be written is not where numba keeps them.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < newest:
                path.unlink()


_KERNELS = Path(__file__).parents[1]
_SOURCES = [path for path in _KERNELS.rglob("*.py") if "triton" not in path.parts]
for _cache in _KERNELS.rglob("__pycache__"):
    forget_older(_cache, _SOURCES)

ONE = np.float32(1.0)
LEAST_STEP = np.float32(SMALLEST_STEP)
# Added to a number of magnitude below 2**22, it leaves the nearest integer, ties to even, in the lowest bits.
ROUND = np.float32(3 * 2.0**22)
ROUND_BITS = np.int32(ROUND.view(np.int32))
_HALF = np.float32(0.5)
_EIGHTH = np.float32(0.125)

# For every byte the word of which byte k is its bit k.
_SPREAD = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    .view(np.uint64)
    .reshape(256)
)
_BYTE = np.uint64(0xFF)

# Tiles that one thread takes at a time are a multiple of 8, so that no two write to the same byte, and
# enough to be worth a thread's start.
_FLAGS_A_BYTE = 8
_FEWEST_TILES = 2048
_RANGES_A_THREAD = 8


def _can_keep() -> bool:
    """Whether numba finds a place that it may write to."""
    try:
        numba.njit(cache=True)(_can_keep)
    except RuntimeError:
        _log.warning(
            "numba can keep nothing that it compiles here, so every start compiles anew: set NUMBA_CACHE_DIR "
            "or XDG_CACHE_HOME to a folder that this user may write to"
        )
        return False
    return True


_KEEP = _can_keep()
compiled = numba.njit(nogil=True, cache=_KEEP, error_model="numpy")
inlined = numba.njit(nogil=True, cache=_KEEP, error_model="numpy", inline="always")
# Sums in any order, of products that are not rounded before: for what is exact anyway, and nothing else.
exact = numba.njit(nogil=True, cache=_KEEP, error_model="numpy", fastmath={"contract", "reassoc"})


@inlined
def float_of(bits):
    return np.uint32(bits).view(np.float32)


@inlined
def bits_of(x):
    return np.float32(x).view(np.int32)


@inlined
def value_of_half(half):
    """The fp32 of a positive fp16's bits."""
    if half >= 1 << 10:
        return float_of((half << 13) + (112 << 23))
    return np.float32(half) * LEAST_STEP


@inlined
def half_beside(magnitude, up):
    """The bits of the fp16 next below a magnitude (fp32), or next above; the magnitude's if it is one."""
    bits = bits_of(magnitude)
    if bits >= 113 << 23:
        return np.int32(((bits - (112 << 23)) >> 13) + np.int32(up and bits & 0x1FFF != 0))
    # In fp16's smallest steps, as many as its bits.
    steps = magnitude / LEAST_STEP
    whole = np.int32(steps)
    return np.int32(whole + np.int32(up and np.float32(whole) != steps))


@compiled
def largest_of(x):
    """The largest magnitude's bits, as of fp32. Infinities and NaNs are above all others."""
    largest = np.int32(0)
    if x.itemsize == 2:
        for k in range(x.size):
            largest = max(largest, np.int32((np.uint32(x[k]) << np.uint32(16)) & 0x7FFFFFFF))
    else:
        for k in range(x.size):
            largest = max(largest, np.int32(x[k] & 0x7FFFFFFF))
    return largest


@compiled
def load(x, start, count, near, far, tile):
    """`tile`, fp32 `[64]`: the elements of x from `start` times both factors, filled up with zeros."""
    # A view of its own: an index that might be negative keeps a loop from becoming vectors.
    part = x[start : start + count]
    if x.itemsize == 2:
        for k in range(count):
            tile[k] = float_of(np.uint32(part[k]) << np.uint32(16)) * near * far
    else:
        for k in range(count):
            tile[k] = float_of(part[k]) * near * far
    for k in range(count, TILE):
        tile[k] = 0


@compiled
def hadamard(tile):
    """The butterflies over a tile, and the division by 8 that makes them their own inverse."""
    h = 1
    while h < TILE:
        for i in range(0, TILE, 2 * h):
            for k in range(i, i + h):
                a, b = tile[k], tile[k + h]
                tile[k], tile[k + h] = a + b, a - b
        h *= 2
    for k in range(TILE):
        tile[k] *= _EIGHTH


@compiled
def add_plane(words, plane, place):
    """Put bit k of `plane` where bit `place` of byte k of `words`, uint64 `[8]`, is."""
    for i in range(8):
        words[i] |= _SPREAD[plane >> np.uint64(8 * i) & _BYTE] << np.uint64(place)


@compiled
def store(tile, count, near, far, limit, half, out, start):
    """Write the first `count` of a tile to `out` from `start`, times both factors, clamped, rounded.

    `out` holds the bits of fp32, or those of bf16 or, with `half`, of fp16.
    """
    # A view of its own: an index that might be negative keeps a loop from becoming vectors.
    part = out[start : start + count]
    if out.itemsize == 4:
        for k in range(count):
            part[k] = bits_of(min(max(tile[k] * near * far, -limit), limit))
    elif half:
        for k in range(count):
            bits = bits_of(min(max(tile[k] * near * far, -limit), limit))
            magnitude = np.int32(bits & 0x7FFFFFFF)
            normal = np.int32((magnitude + 0xFFF + (magnitude >> 13 & 1) - (112 << 23)) >> 13)
            # Beside one half fp32's last bit is fp16's smallest step.
            small = np.int32(bits_of(float_of(magnitude) + _HALF) - bits_of(_HALF))
            part[k] = (small if magnitude < 113 << 23 else normal) | (bits >> 16 & 0x8000)
    else:
        for k in range(count):
            bits = bits_of(min(max(tile[k] * near * far, -limit), limit))
            part[k] = np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bits_to_read(x: torch.Tensor) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """The elements one after the other as the bits of fp32, or of bf16, its upper half."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
    return x.float().contiguous().view(-1).numpy().view(np.uint32)


def peak_of(words: NDArray[np.uint32] | NDArray[np.uint16]) -> np.float32:
    """The largest magnitude. Infinities and NaNs are above all numbers."""
    found: list[int] = []
    run(lambda first, last: found.append(largest_of(words[first:last])), ranges(words.size, TILE))
    return np.float32(np.uint32(max(found)).view(np.float32))


def exponent_of(words: NDArray[np.uint32] | NDArray[np.uint16], constant: float = 1.0) -> torch.Tensor:
    """As `kernels.common.tiles.tensor_exponent`. Torch's threads would keep cores busy for a while once done."""
    peak = peak_of(words)
    with np.errstate(over="ignore"):
        largest = peak * np.float32(constant)
    exponent = math.frexp(largest)[1] - NORMAL_BITS if np.isfinite(largest) else NON_FINITE
    return torch.tensor(exponent, dtype=torch.int32)


def two_factors(exponent: torch.Tensor) -> tuple[np.float32, np.float32]:
    """2**exponent as `kernels.common.tiles.powers_of_two`, the nearer to 1 first and always there."""
    factors = [np.float32(factor.item()) for factor in powers_of_two(exponent)]
    return (factors[0], factors[1]) if len(factors) == 2 else (ONE, factors[0])


def bits_to_fill(out: torch.Tensor) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """The elements of a contiguous tensor one after the other, as the bits that `store` writes."""
    flat = out.view(-1)
    if out.dtype == torch.float32:
        return flat.view(torch.int32).numpy().view(np.uint32)
    return flat.view(torch.int16).numpy().view(np.uint16)


def ranges(n: int, unit: int = 1) -> list[tuple[int, int]]:
    """Ranges of n tiles, or of n pieces of `unit` to a tile, that threads take in turn.

    Several to a thread, because one that has to share its core is slower than the others.
    """
    step = _FLAGS_A_BYTE * unit
    each = -(-n // (torch.get_num_threads() * _RANGES_A_THREAD * step)) * step
    size = max(each, _FEWEST_TILES * unit)
    return [(first, min(first + size, n)) for first in range(0, n, size)]


def run(work: Callable[[int, int], None], parts: list[tuple[int, int]]) -> None:
    """Call `work` for every range, in this thread and as many others as torch may use here.

    Not in torch's threads, which would keep cores busy for a while once done.
    """
    left = iter(parts)

    def take() -> None:
        for first, last in left:
            work(first, last)

    if (others := min(torch.get_num_threads(), len(parts)) - 1) <= 0:
        take()
        return
    pool = _threads(torch.get_num_threads() - 1)
    taken = [pool.submit(take) for _ in range(others)]
    try:
        take()
    finally:
        # What has not begun has nothing left to do: another caller's work keeps the threads.
        begun = [other for other in taken if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Kept: to start threads takes as long as many a loop."""
    return ThreadPoolExecutor(count, thread_name_prefix="loops")


# Threads do not outlive a fork.
os.register_at_fork(after_in_child=_threads.cache_clear)
