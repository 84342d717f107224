"""`tah`: TAH-Quant, with 4.41 bits per element and a header. The default for activations.

Payload: scales, fp16 | zero-points, fp16 | bit-map, 1 bit per tile | pivots, 6 bits per tile | three
bit-planes of all tiles | fourth bit-plane of the 4-bit tiles, in order.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common import dispatch
from kernels.common.tiles import (
    HALF_INFINITY,
    HALF_MAGNITUDE,
    MAX_EXPONENT,
    MIN_EXPONENT,
    TILE,
    tiles_per_row,
)
from kernels.tah import reference as tah
from wire.codecs.base import Codec, Layout
from wire.codecs.formats import TahFormat, four_bit_tiles, samples_and_tiles
from wire.errors import NonFiniteError, PackedMismatchError

_FLAGS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
# From the flags of 8 tiles, one bit each, to the mask of their 48 pivot bits: uint8 `[256, 6]`.
_PIVOTS = np.packbits(_FLAGS.repeat(6, axis=1), axis=1, bitorder="little")


class TahCodec(Codec):
    """TAH-Quant with G = A = 64, p = 0.80, tau = 2. The arithmetic is in `kernels.tah.reference`.

    With three or more dimensions, the first one counts samples; a smaller tensor is one sample.
    """

    exponents = range(MIN_EXPONENT, MAX_EXPONENT + 1)

    def _padding_is_clear(self, payload: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
        layout = _layout(shape)
        scales, _, bit_map, pivots, low_planes, fourth_planes = layout.raw(payload)
        plain = scales.view("<i2") >= 0  # tiles that are not rotated
        if not layout.gaps_are_clear(payload) or (plain.size % 8 and bit_map[-1] >> plain.size % 8):
            return False
        forbidden = _PIVOTS.take(np.packbits(plain, bitorder="little"), axis=0).reshape(-1)
        hidden = np.count_nonzero(pivots & forbidden[: pivots.size])
        if hidden or (plain.size % 4 and pivots[-1] >> plain.size * 6 % 8):
            return False
        if (short := shape[-1] % TILE) == 0:
            return True
        four = np.unpackbits(bit_map, count=plain.size, bitorder="little").view(np.bool_)
        if np.count_nonzero(four) * 8 != fourth_planes.size:
            return True  # decoding refuses such a bit-map
        fourth = np.zeros(plain.size, dtype=np.uint64)
        fourth[four] = fourth_planes.view("<u8")
        last = slice(tiles_per_row(shape[-1]) - 1, None, tiles_per_row(shape[-1]))
        words = np.bitwise_or.reduce(low_planes.view("<u8").reshape(tah.LOW_PLANES, -1)[:, last])
        words |= fourth[last]
        # A rotated tile always has 64 codes, even if the tile was short.
        return int(words[plain[last]].max(initial=0)) < 1 << short

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        samples, tiles = samples_and_tiles(tensor.shape)
        layout = _layout(tensor.shape)
        layout.clear_gaps(payload)
        four = four_bit_tiles(tiles)
        if dispatch.has_kernels(tensor.device, "tah"):
            from kernels.tah.triton import encode as triton_encode

            exponent = torch.empty((), dtype=torch.int32, device=tensor.device)
            sections = tah.TahSections(*layout.views(payload))
            triton_encode.encode(tensor, *sections, exponent, samples=samples, four_bit=four)
            return exponent
        if tensor.device.type == "cpu":
            # Here, because a node that computes on a GPU needs no numba, which takes long to import.
            from kernels.tah.loops import encode as tah_loops

            arrays = layout.arrays(payload)
            return tah_loops.encode(tensor, arrays, samples=samples, four_bit=four)
        parts = tah.TahSections(*layout.views(payload))
        return tah.encode(tensor, parts, samples=samples, four_bit=four)

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        samples, tiles = samples_and_tiles(out.shape)
        layout = _layout(out.shape)
        if dispatch.has_kernels(out.device, "tah"):
            from kernels.tah.triton import decode as triton_decode

            sections, four = tah.TahSections(*layout.views(payload)), four_bit_tiles(tiles)
            device_exponent = torch.full((), exponent, dtype=torch.int32, device=out.device)
            status = triton_decode.decode(*sections, out, device_exponent, samples=samples, four_bit=four)
            _refuse(int(status.max()), tiles)
            return
        on_cpu = out.device.type == "cpu"
        arrays = layout.arrays(payload if on_cpu else payload.cpu())
        scales, zero_points, bit_map = arrays[:3]
        _refuse(_fault(scales, zero_points, bit_map, samples, tiles), tiles)
        if on_cpu:
            from kernels.tah.loops import decode as tah_loops_decode

            tah_loops_decode.decode(arrays, out, exponent)
        else:
            tah.decode(tah.TahSections(*layout.views(payload)), out, exponent)


def _fault(
    scales: NDArray[np.int16],
    zero_points: NDArray[np.int16],
    bit_map: NDArray[np.uint8],
    samples: int,
    tiles: int,
) -> int:
    """The code, in `kernels.common.dispatch`, of a fault that the CPU decoder would miss; 0 if there is none.

    It uses numpy, because torch would wake threads for these few bytes, which then keep their cores busy.
    """
    # For a few numbers, counting takes a fraction of the time of a minimum or maximum.
    scales, zero_points = scales & HALF_MAGNITUDE, zero_points & HALF_MAGNITUDE
    if np.count_nonzero(scales >= HALF_INFINITY) or np.count_nonzero(zero_points >= HALF_INFINITY):
        return dispatch.NON_FINITE
    if np.count_nonzero(scales) < scales.size:
        return dispatch.BAD_SCALE
    flags = np.unpackbits(bit_map, count=samples * tiles, bitorder="little")
    if samples == 1:
        return 0 if np.count_nonzero(flags) == four_bit_tiles(tiles) else dispatch.BAD_CODE
    four = np.count_nonzero(flags.view(np.bool_).reshape(samples, tiles), axis=1)
    return 0 if (four == four_bit_tiles(tiles)).all() else dispatch.BAD_CODE


def _refuse(fault: int, tiles: int) -> None:
    if fault == dispatch.NON_FINITE:
        raise NonFiniteError("a packed tah tensor has scales or zero-points that are not finite: refused")
    if fault == dispatch.BAD_SCALE:
        raise PackedMismatchError("a packed tah tensor has a scale of zero: refused")
    if fault == dispatch.BAD_CODE:
        raise PackedMismatchError(
            f"the bit-map of a packed tah tensor must select {four_bit_tiles(tiles)} of each sample's "
            f"{tiles} tiles: refused"
        )


@lru_cache(maxsize=256)
def _layout(shape: tuple[int, ...]) -> Layout:
    return Layout(*TahFormat().sections(shape))
