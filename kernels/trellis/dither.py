"""Dither that encoder and decoder know: it makes the `trellis` codec's error independent of the values.

The encoder adds a dither from -1 to 1 steps to every element before it searches for a path. The decoder
subtracts it. So small values are not lost: the mean of the decoded values is the value itself, and the errors
of many tensors average out. (Subtractive dither: Schuchman, 1964; of lattices: Zamir and Feder, 1996.)

A width of two steps is right for this trellis. Its paths are a lattice with one point in 2**E unit cubes,
because each quantizer is as coarse as two steps. No two points of the half-open cube [-1, 1)**E differ by a
lattice point: both quantizers are 0 at a lane's start and only an odd index leads to the other one, so the
first nonzero coordinate of a path is even. Hence the cube tiles space, and dither that is uniform over it
leaves an error that does not depend on the elements (Zamir and Feder, theorem 1).

The dither is a function of the salt and the element's position: 16 bits of `kernels.common.random_bits`.
"""

import torch

from kernels.common.random_bits import random_bits
from kernels.trellis.loops import dither as dither_loops

# 64ths of a step in a step, the unit of `dithers`.
_SIXTY_FOURTHS = 64.0


def dithers(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """The dither of each element in steps, fp32 `[count]`: odd multiples of 2**-16 between -1 and 1."""
    return random_bits(count, salt, device).float().mul_(2.0).add_(1.0).mul_(2.0**-16).sub_(1.0)


def added(x: torch.Tensor, gain: float, salt: int) -> torch.Tensor:
    """fp32 `[E]` in 64ths of a step with its dither: x times `gain`, plus the dither, each rounded."""
    if x.device.type == "cpu":
        return dither_loops.added(x, gain, salt)
    return (x * gain).add_(dithers(x.numel(), salt, x.device).mul_(_SIXTY_FOURTHS))


def subtract(values: torch.Tensor, step: float, salt: int) -> torch.Tensor:
    """Subtract dithers times `step`, each rounded, from fp32 `[E]`, in place."""
    if values.device.type == "cpu":
        return dither_loops.subtract(values, step, salt)
    return values.sub_(dithers(values.numel(), salt, values.device).mul_(step))
