"""Shared parts of the CPU loops of tiled quantizers: compiling, bits of floats, tiles, planes, threads.

Numba compiles at first use and caches the result beside the modules or below the user's home, one process at
a time. If it can write to neither, every process compiles for itself.

Loops over a tile are written so that LLVM vectorizes them, although it may not reorder operations on floats.
Constants are fp32, because numba computes in fp64 with a plain number.
"""

import hashlib
import logging
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys
from numpy.typing import NDArray

from kernels.common.compile_turn import CompileTurn
from kernels.common.tiles import NON_FINITE, NORMAL_BITS, SMALLEST_STEP, TILE, powers_of_two

_log = logging.getLogger(__name__)


def hash_of_sources(folder: Path) -> str:
    """A hash of every module below `folder` from which compiled loops may take code or constants."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        if "triton" not in path.relative_to(folder).parts:
            text = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:16]


SOURCES = hash_of_sources(Path(__file__).parents[1])
"""A part of every file name in numba's cache. Numba itself checks only the file of the function that it
compiles, not the files from which this function takes other functions and constants."""


class _Files(IndexDataCacheFile):
    """Files that several processes may write at the same time: the code of each signature has its own name.

    Numba numbers them, so two processes could give the same number to different code. Here the worst case is
    an entry that is missing from the index. The next process compiles it and adds it.
    """

    def save(self, key: object, data: object) -> None:
        number = hashlib.sha256(repr(key).encode()).digest()[:8]
        name = self._data_name(int.from_bytes(number, "little"))
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class _Names(CompileResultCacheImpl):
    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"{super().get_filename_base(fullname, abiflags)}-{SOURCES}"


class LoopCache(FunctionCache):
    """Numba's cache of a function, in files that belong to one state of the sources.

    Raises:
        RuntimeError: there is no folder for them.
    """

    _impl_class = _Names

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, SOURCES)

    def load_overload(self, sig: object, target_context: object) -> object:
        """Like numba's, but a process waits for its turn before it compiles.

        It then looks in the cache again, because another process may have compiled the loop meanwhile.

        Numba's own method first imports all that the compiler knows to translate, a fifth of a second in
        every process that packs. Code that is already compiled only needs numba's runtime, and the compiler
        imports the rest itself.
        """
        rtsys.initialize(target_context)
        overload = self._load_overload(sig, target_context)
        if overload is None and _TURN is not None:
            _TURN.take()
            overload = self._load_overload(sig, target_context)
        return overload


def _turn() -> CompileTurn | None:
    """The turn of this process; None if numba finds no folder that it may write to."""
    try:
        folder = Path(LoopCache(_turn).cache_path)
    except RuntimeError:
        _log.warning(
            "numba cannot keep what it compiles here, so every start compiles again: set NUMBA_CACHE_DIR "
            "or XDG_CACHE_HOME to a folder that this user may write to"
        )
        return None
    return CompileTurn(folder / f"compiling-{SOURCES}.lock")


_TURN = _turn()


def _compiler(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def compile_at_use(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = numba.njit(nogil=True, error_model="numpy", **options)(function)
        if _TURN is not None:
            dispatcher._cache = LoopCache(function)
            dispatcher.compile = _in_turn(dispatcher.compile, _TURN)
        compiler: Callable[..., Any] = dispatcher
        return compiler

    return compile_at_use


def _in_turn(compile_it: Callable[..., Any], turn: CompileTurn) -> Callable[..., Any]:
    def compile_in_turn(signature: object) -> Any:
        with global_compiler_lock, turn:
            return compile_it(signature)

    return compile_in_turn


compiled = _compiler()
inlined = _compiler(inline="always")
exact = _compiler(fastmath={"contract", "reassoc"})
"""Compiles with sums in any order, and without rounding products first. Only for arithmetic that is exact
anyway."""

ONE = np.float32(1.0)
LEAST_STEP = np.float32(SMALLEST_STEP)
# Added to a number of magnitude below 2**22, it puts the nearest integer, ties to even, into the lowest bits.
ROUND = np.float32(3 * 2.0**22)
ROUND_BITS = np.int32(ROUND.view(np.int32))
_HALF = np.float32(0.5)
_EIGHTH = np.float32(0.125)

# For every byte, the word whose byte k is the byte's bit k.
_SPREAD = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    .view(np.uint64)
    .reshape(256)
)
_BYTE = np.uint64(0xFF)

# A thread takes a multiple of 8 tiles, so that no two threads write to the same byte, and enough tiles to be
# worth starting.
_FLAGS_A_BYTE = 8
_FEWEST_TILES = 2048
_RANGES_A_THREAD = 8


@inlined
def float_of(bits):
    return np.uint32(bits).view(np.float32)


@inlined
def bits_of(x):
    return np.float32(x).view(np.int32)


@inlined
def value_of_half(half):
    """The fp32 value of the bits of a positive fp16."""
    if half >= 1 << 10:
        return float_of((half << 13) + (112 << 23))
    return np.float32(half) * LEAST_STEP


@inlined
def half_beside(magnitude, up):
    """The bits of the fp16 next below a magnitude (fp32), or next above. An fp16 magnitude gives itself."""
    bits = bits_of(magnitude)
    if bits >= 113 << 23:
        return np.int32(((bits - (112 << 23)) >> 13) + np.int32(up and bits & 0x1FFF != 0))
    # The bits of a subnormal fp16 count its smallest steps.
    steps = magnitude / LEAST_STEP
    whole = np.int32(steps)
    return np.int32(whole + np.int32(up and np.float32(whole) != steps))


@compiled
def largest_of(x):
    """The bits of the largest magnitude as fp32. Infinities and NaNs are above all others."""
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
    """Fill `tile`, fp32 `[64]`: the elements of x from `start` times both factors, padded with zeros."""
    # A separate view, because an index that might be negative stops LLVM from vectorizing the loop.
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
    """The Hadamard transform of a tile, divided by 8 so that it is its own inverse."""
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
    """Put bit k of `plane` into bit `place` of byte k of `words`, uint64 `[8]`."""
    for i in range(8):
        words[i] |= _SPREAD[plane >> np.uint64(8 * i) & _BYTE] << np.uint64(place)


@compiled
def store(tile, count, near, far, limit, half, out, start):
    """Write the first `count` elements of a tile to `out` from `start`, times both factors, clamped and
    rounded.

    `out` holds the bits of fp32, of bf16 or, with `half`, of fp16.
    """
    # A separate view, because an index that might be negative stops LLVM from vectorizing the loop.
    part = out[start : start + count]
    if out.itemsize == 4:
        for k in range(count):
            part[k] = bits_of(min(max(tile[k] * near * far, -limit), limit))
    elif half:
        for k in range(count):
            bits = bits_of(min(max(tile[k] * near * far, -limit), limit))
            magnitude = np.int32(bits & 0x7FFFFFFF)
            normal = np.int32((magnitude + 0xFFF + (magnitude >> 13 & 1) - (112 << 23)) >> 13)
            # Near 0.5, the last bit of fp32 is the smallest step of fp16.
            small = np.int32(bits_of(float_of(magnitude) + _HALF) - bits_of(_HALF))
            part[k] = (small if magnitude < 113 << 23 else normal) | (bits >> 16 & 0x8000)
    else:
        for k in range(count):
            bits = bits_of(min(max(tile[k] * near * far, -limit), limit))
            part[k] = np.uint32(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bits_to_read(x: torch.Tensor) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """The elements one after the other, as the bits of fp32 or of bf16, which is fp32's upper half."""
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
    return x.float().contiguous().view(-1).numpy().view(np.uint32)


def peak_of(words: NDArray[np.uint32] | NDArray[np.uint16]) -> np.float32:
    """The largest magnitude. Infinities and NaNs are above all numbers."""
    peaks: list[int] = []
    run(lambda first, last: peaks.append(largest_of(words[first:last])), ranges(words.size, TILE))
    return np.float32(np.uint32(max(peaks)).view(np.float32))


def exponent_of(words: NDArray[np.uint32] | NDArray[np.uint16]) -> torch.Tensor:
    """`kernels.common.tiles.tensor_exponent` without torch's threads, which keep cores busy for a while
    afterwards."""
    largest = peak_of(words)
    return _whole(math.frexp(largest)[1] - NORMAL_BITS if np.isfinite(largest) else NON_FINITE)


@cache
def _whole(number: int) -> torch.Tensor:
    """int32 0-d, only for reading. It is cached, because creating one takes as long as a loop over a small
    tensor."""
    return torch.tensor(number, dtype=torch.int32)


@cache
def two_factors(exponent: int) -> tuple[np.float32, np.float32]:
    """2**exponent as in `kernels.common.tiles.powers_of_two`, but always two factors, the one nearer to 1
    first."""
    factors = [np.float32(factor.item()) for factor in powers_of_two(_whole(exponent))]
    return (factors[0], factors[1]) if len(factors) == 2 else (ONE, factors[0])


def bits_to_fill(out: torch.Tensor) -> NDArray[np.uint32] | NDArray[np.uint16]:
    """The elements of a contiguous tensor one after the other, as the bits that `store` writes."""
    flat = out.view(-1)
    if out.dtype == torch.float32:
        return flat.view(torch.int32).numpy().view(np.uint32)
    return flat.view(torch.int16).numpy().view(np.uint16)


def ranges(n: int, unit: int = 1) -> list[tuple[int, int]]:
    """Ranges of n tiles, or of n pieces with `unit` pieces per tile, which threads take in turn.

    There are several per thread, so that a thread that shares its core with other work takes fewer.
    """
    step = _FLAGS_A_BYTE * unit
    each = -(-n // (torch.get_num_threads() * _RANGES_A_THREAD * step)) * step
    size = max(each, _FEWEST_TILES * unit)
    return [(first, min(first + size, n)) for first in range(0, n, size)]


def run(work: Callable[[int, int], None], parts: list[tuple[int, int]]) -> None:
    """Call `work` for every range, in this thread and in as many others as torch may use here.

    Torch's own threads would keep cores busy for a while afterwards.
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
        # Work that has not begun would find nothing left to do. Other callers' work may occupy the threads.
        begun = [other for other in taken if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """The pool is cached, because starting threads takes as long as many of the loops."""
    return ThreadPoolExecutor(count, thread_name_prefix="loops")


# Threads do not survive a fork.
os.register_at_fork(after_in_child=_threads.cache_clear)
