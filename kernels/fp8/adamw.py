"""AdamW on moments in e4m3 (kernels.fp8.reference), weights in fp32, or in bf16 with stochastic rounding.

One call updates one parameter: unpack the moments, update them and the weight in fp32, pack them. The update
itself uses the moments before they are packed (papers/coat.txt, section 3; Loshchilov and Hutter 2019).

Stochastic rounding draws 16 bits an element from a hash of (salt, element), where the caller makes the salt
from seed, step and parameter: the same step gives the same bits however often it is run and whatever the
launch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.common.random_bits import random_bits
from kernels.fp8.reference import Fp8Gradient, Moment, pack_moment, unpack_gradient, unpack_moment
from kernels.quantizer_ops import has_kernels

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """What one step does to a parameter; everything but `salt` is the same for all of a group."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1."""
    clip_coefficient: float
    """Gradients are multiplied by it first."""
    salt: int
    """32 bits, for stochastic rounding."""

    @property
    def keep(self) -> float:
        """What weight decay leaves of a weight."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_correction(self) -> float:
        """What the second moment's root is divided by."""
        return math.sqrt(1 - self.beta2**self.step)


def adamw_step(
    parameter: Tensor, gradient: Tensor | Fp8Gradient, mean: Moment, square: Moment, step: AdamWStep
) -> None:
    """Update `parameter` (contiguous, fp32 or bf16, n elements), `mean` and `square` in place.

    Args:
        gradient: [n] or of the parameter's shape, any float dtype, or e4m3 codes.
    """
    if has_kernels(parameter.device.type):
        from kernels.fp8 import triton as triton_fp8

        triton_fp8.adamw_step(parameter, gradient, mean, square, step)
    else:
        reference_step(parameter, gradient, mean, square, step)


def reference_step(
    parameter: Tensor, gradient: Tensor | Fp8Gradient, mean: Moment, square: Moment, step: AdamWStep
) -> None:
    """`adamw_step` in plain torch, on any device."""
    g = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient.flatten().float()
    g = g * step.clip_coefficient
    m = unpack_moment(mean).lerp_(g, 1 - step.beta1)
    v = unpack_moment(square).mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
    flat = parameter.view(-1)
    weight = flat.float() * step.keep
    weight -= step.step_size * m / (v.sqrt() / step.root_correction + step.eps)
    flat.copy_(weight if flat.dtype == torch.float32 else round_stochastically(weight, step.salt))
    pack_moment(m, mean)
    pack_moment(v, square)


def round_stochastically(values: Tensor, salt: int) -> Tensor:
    """bf16 of fp32 `values` [n]: up or down with the odds that make the mean right."""
    bits = values.view(torch.int32).long() & _MASK
    # Adding below the last kept bit and cutting off rounds a magnitude up as often as its rest is long.
    rounded = (bits + random_bits(values.numel(), salt, values.device)) >> 16
    special = (bits & 0x7F800000) == 0x7F800000
    halves = torch.where(special, bits >> 16, rounded & 0xFFFF)
    return (halves - ((halves & 0x8000) << 1)).to(torch.int16).view(torch.bfloat16)
