"""The fixed-point quantizer as torch operators: Triton's kernels on a GPU, numba's loops on a CPU, same bits.

`torch.ops.thinwire.fixed_encode` and `fixed_decode` never wait for the device. A CUDA graph can capture them
once they have run. Scratch memory comes from torch's allocator.
"""

import torch

from kernels.common import dispatch
from kernels.common.operators import operator
from kernels.fixed import loops
from kernels.fixed.reference import FixedSections


@operator("thinwire::fixed_encode", mutates_args=("scales", "planes", "exponent"))
def encode(
    x: torch.Tensor, scales: torch.Tensor, planes: torch.Tensor, exponent: torch.Tensor, constant: float
) -> None:
    """Run `kernels.fixed.reference.encode` into the sections, and write the exponent to `exponent` (int32,
    [1])."""
    if dispatch.has_kernels(x.device, "fixed"):
        from kernels.fixed import triton

        triton.encode(x, scales, planes, exponent, constant=constant)
    else:
        exponent.copy_(loops.encode(x, FixedSections(scales, planes), constant=constant))


@operator("thinwire::fixed_decode", mutates_args=("out",))
def decode(
    scales: torch.Tensor, planes: torch.Tensor, out: torch.Tensor, exponent: torch.Tensor, constant: float
) -> torch.Tensor:
    """Run `kernels.fixed.reference.decode` on the sections into `out`. Returns faults like
    `kernels.tah.ops.decode`."""
    if dispatch.has_kernels(out.device, "fixed"):
        from kernels.fixed import triton

        return triton.decode(scales, planes, out, exponent, constant=constant)
    loops.decode(FixedSections(scales, planes), out, int(exponent), constant=constant)
    return dispatch.FIXED_DECODE.statuses(scales).zero_()


@encode.register_fake
def _(*_: object) -> None:
    return None


@decode.register_fake
def _(scales: torch.Tensor, *_: object) -> torch.Tensor:
    return dispatch.FIXED_DECODE.statuses(scales)
