"""TAH-Quant as torch operators: Triton's kernels on a GPU, numba's loops on a CPU, with the same bits.

`torch.ops.thinwire.tah_encode` and `tah_decode` never wait for the device. A CUDA graph can capture them once
they have run. Scratch memory comes from torch's allocator. On a GPU without Triton, `wire.codecs.tah` runs
the reference.
"""

import torch

from kernels.common import dispatch
from kernels.common.operators import operator
from kernels.tah.loops import decode as loops_decode
from kernels.tah.loops import encode as loops_encode
from kernels.tah.reference import TahSections


@operator(
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
def encode(
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
    """Run `kernels.tah.reference.encode` on x into its sections, and write the exponent to `exponent` (int32,
    [1])."""
    if dispatch.has_kernels(x.device, "tah"):
        from kernels.tah.triton import encode as triton_encode

        triton_encode.encode(
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
        sections = TahSections(scales, zero_points, bit_map, pivots, low_planes, fourth_planes)
        exponent.copy_(loops_encode.encode(x, sections, samples=samples, four_bit=four_bit, tau=tau))


@operator("thinwire::tah_decode", mutates_args=("out",))
def decode(
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
    """Run `kernels.tah.reference.decode` on the sections into `out`. The exponent (int32, [1]) is on the
    device.

    Returns:
        int32 [k]. The largest is the fault that Triton's kernels detected (`kernels.common.dispatch`), or 0.
        On a CPU the caller must check the sections first.
    """
    if dispatch.has_kernels(out.device, "tah"):
        from kernels.tah.triton import decode as triton_decode

        return triton_decode.decode(
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
    sections = TahSections(scales, zero_points, bit_map, pivots, low_planes, fourth_planes)
    loops_decode.decode(sections, out, int(exponent))
    return dispatch.TAH_DECODE.statuses(scales).zero_()


@encode.register_fake
def _(*_: object) -> None:
    return None


@decode.register_fake
def _(scales: torch.Tensor, *_: object) -> torch.Tensor:
    return dispatch.TAH_DECODE.statuses(scales)
