"""The quantizers as torch operators: Triton's kernels on a GPU, numba's loops on a CPU; the same bits.

`torch.ops.thinwire.tah_encode` and its like never wait for the device and can be captured into a CUDA graph
once they have run on it. Scratch comes from torch's allocator. A GPU without Triton runs the reference.
"""

from functools import cache
from importlib.util import find_spec

import torch

from kernels.common.launch import FIXED_DECODE, TAH_DECODE
from kernels.fixed import loops as fixed_loops
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from kernels.tah.loops import decode as tah_loops_decode
from kernels.tah.loops import encode as tah_loops

# What decoding found wrong; of several the largest, in the order in which a decoder refuses.
BAD_CODE = 1
BAD_SCALE = 2
NON_FINITE = 4


@cache
def has_kernels(device_type: str) -> bool:
    """Whether there are Triton kernels for tensors on such a device."""
    return device_type == "cuda" and find_spec("triton") is not None


@torch.library.custom_op(
    "thinwire::tah_encode",
    mutates_args=(
        "scales",
        "zero_points",
        "bit_map",
        "pivots",
        "low_planes",
        "fourth_planes",
        "exponent",
    ),
)
def tah_encode(
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    bit_map: torch.Tensor,
    pivots: torch.Tensor,
    low_planes: torch.Tensor,
    fourth_planes: torch.Tensor,
    exponent: torch.Tensor,
    samples: int,
    four_bit: int,
    tau: float,
) -> None:
    """`kernels.tah.reference.encode` of x into its sections, and the exponent into `exponent` (int32, 1 element)."""
    if has_kernels(x.device.type):
        from kernels.tah.triton import encode as triton_tah

        triton_tah.encode(
            x,
            scales,
            zero_points,
            bit_map,
            pivots,
            low_planes,
            fourth_planes,
            exponent,
            samples=samples,
            four_bit=four_bit,
            tau=tau,
        )
    else:
        sections = tah.TahSections(scales, zero_points, bit_map, pivots, low_planes, fourth_planes)
        exponent.copy_(tah_loops.encode(x, sections, samples=samples, four_bit=four_bit, tau=tau))


@torch.library.custom_op("thinwire::tah_decode", mutates_args=("out",))
def tah_decode(
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    bit_map: torch.Tensor,
    pivots: torch.Tensor,
    low_planes: torch.Tensor,
    fourth_planes: torch.Tensor,
    out: torch.Tensor,
    exponent: torch.Tensor,
    samples: int,
    four_bit: int,
) -> torch.Tensor:
    """`kernels.tah.reference.decode` of the sections into `out`, with the exponent (int32, 1 element) on the device.

    Returns int32 `[k]`: the largest says what Triton's kernels found wrong, 0 if nothing. The others take
    sections that their caller has checked.
    """
    if has_kernels(out.device.type):
        from kernels.tah.triton import decode as triton_tah_decode

        return triton_tah_decode.decode(
            scales,
            zero_points,
            bit_map,
            pivots,
            low_planes,
            fourth_planes,
            out,
            exponent,
            samples=samples,
            four_bit=four_bit,
        )
    sections = tah.TahSections(scales, zero_points, bit_map, pivots, low_planes, fourth_planes)
    tah_loops_decode.decode(sections, out, int(exponent))
    return _status(scales, TAH_DECODE.tiles).zero_()


@torch.library.custom_op("thinwire::fixed_encode", mutates_args=("scales", "planes", "exponent"))
def fixed_encode(
    x: torch.Tensor, scales: torch.Tensor, planes: torch.Tensor, exponent: torch.Tensor, constant: float
) -> None:
    """`kernels.fixed.reference.encode` of x into its sections, and the exponent into `exponent` (int32, 1 element)."""
    if has_kernels(x.device.type):
        from kernels.fixed import triton as triton_fixed

        triton_fixed.encode(x, scales, planes, exponent, constant=constant)
    else:
        exponent.copy_(fixed_loops.encode(x, fixed.FixedSections(scales, planes), constant=constant))


@torch.library.custom_op("thinwire::fixed_decode", mutates_args=("out",))
def fixed_decode(
    scales: torch.Tensor, planes: torch.Tensor, out: torch.Tensor, exponent: torch.Tensor, constant: float
) -> torch.Tensor:
    """`kernels.fixed.reference.decode` of the sections into `out`; else as `tah_decode`."""
    if has_kernels(out.device.type):
        from kernels.fixed import triton as triton_fixed

        return triton_fixed.decode(scales, planes, out, exponent, constant=constant)
    fixed_loops.decode(fixed.FixedSections(scales, planes), out, int(exponent), constant=constant)
    return _status(scales, FIXED_DECODE.tiles).zero_()


def _status(scales: torch.Tensor, tiles: int) -> torch.Tensor:
    return scales.new_empty((scales.numel() + tiles - 1) // tiles, dtype=torch.int32)


@tah_encode.register_fake
def _(*_: object) -> None:
    return None


@fixed_encode.register_fake
def _(*_: object) -> None:
    return None


@tah_decode.register_fake
def _(scales: torch.Tensor, *_: object) -> torch.Tensor:
    return _status(scales, TAH_DECODE.tiles)


@fixed_decode.register_fake
def _(scales: torch.Tensor, *_: object) -> torch.Tensor:
    return _status(scales, FIXED_DECODE.tiles)
