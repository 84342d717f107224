"""e4m3 gradients and AdamW by device: Triton's kernels on a GPU, pieces on a CPU, and otherwise the
reference."""

from torch import Tensor

from kernels.common import dispatch
from kernels.fp8 import cpu, reference
from kernels.fp8.reference import AdamWStep, Draw, Fp8Gradient, Moment


def accumulate_gradient(gradient: Fp8Gradient, addend: Tensor, draw: Draw | None = None) -> None:
    """`kernels.fp8.reference.accumulate_gradient`, with the same bits."""
    if dispatch.has_kernels(addend.device, "fp8"):
        from kernels.fp8 import triton

        triton.accumulate_gradient(gradient, addend, draw)
    elif addend.device.type == "cpu":
        cpu.accumulate_gradient(gradient, addend, None if draw is None else draw.salt)
    else:
        reference.accumulate_gradient(gradient, addend, draw)


def sum_gradients(codes: Tensor, exponents: Tensor, into: Fp8Gradient) -> None:
    """`kernels.fp8.reference.sum_gradients`, with the same bits."""
    if dispatch.has_kernels(codes.device, "fp8"):
        from kernels.fp8 import triton

        triton.sum_gradients(codes, exponents, into)
    elif codes.device.type == "cpu":
        cpu.sum_gradients(codes, exponents, into)
    else:
        reference.sum_gradients(codes, exponents, into)


def momentum_step(
    gradient: Tensor | Fp8Gradient, mean: Moment, momentum: float, clip_coefficient: float
) -> Tensor:
    """`kernels.fp8.reference.momentum_step`. On a GPU the last bits of logarithms may differ."""
    if dispatch.has_kernels(mean.codes.device, "fp8"):
        from kernels.fp8 import triton

        return triton.momentum_step(gradient, mean, momentum, clip_coefficient)
    return reference.momentum_step(gradient, mean, momentum, clip_coefficient)


def adamw_step(
    parameter: Tensor, gradient: Tensor | Fp8Gradient, mean: Moment, square: Moment, step: AdamWStep
) -> None:
    """`kernels.fp8.reference.adamw_step`. On a GPU the last bits of the moments' logarithms may differ."""
    if dispatch.has_kernels(parameter.device, "fp8"):
        from kernels.fp8 import triton

        triton.adamw_step(parameter, gradient, mean, square, step)
    else:
        reference.adamw_step(parameter, gradient, mean, square, step)
