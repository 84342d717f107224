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

import numpy as np
import torch

from kernels.common.loops import compiled, inlined, run
from kernels.common.random_bits import FIRST_FACTOR, SECOND_FACTOR
from kernels.trellis.loops.matrices import ranges

_FIRST, _SECOND = np.uint32(FIRST_FACTOR), np.uint32(SECOND_FACTOR)
_HIGH, _LESS, _SIXTEEN = np.uint32(16), np.uint32(15), np.uint32(0xFFFF)
_TWO, _ONE = np.float32(2.0), np.float32(1.0)
# 64ths of a step, the unit of `added`, in a step.
_UNIT, _SIXTY_FOURTHS = np.float32(2.0**-16), np.float32(64.0)


@inlined
def _dither(place, salt):
    """The dither of an element in steps: an odd multiple of 2**-16 between -1 and 1."""
    x = np.uint32(np.uint32(place) ^ salt)
    x = np.uint32(np.uint32(x ^ (x >> _HIGH)) * _FIRST)
    x = np.uint32(np.uint32(x ^ (x >> _LESS)) * _SECOND)
    x = np.uint32(x ^ (x >> _HIGH)) & _SIXTEEN
    return (np.float32(x) * _TWO + _ONE) * _UNIT - _ONE


@compiled
def _add(x, gain, salt, first, last, out):
    for place in range(first, last):
        scaled = np.float32(x[place] * gain)
        out[place] = scaled + _dither(place, salt) * _SIXTY_FOURTHS


@compiled
def _subtract(values, step, salt, first, last):
    for place in range(first, last):
        off = np.float32(_dither(place, salt) * step)
        values[place] = values[place] - off


def added(x: torch.Tensor, gain: float, salt: int) -> torch.Tensor:
    """fp32 `[E]` in 64ths of a step with its dither: x times `gain`, plus the dither, each rounded."""
    out = torch.empty_like(x)
    given, results, by, of = x.numpy(), out.numpy(), np.float32(gain), np.uint32(salt)
    run(lambda first, last: _add(given, by, of, first, last, results), ranges(x.numel(), 1))
    return out


def subtract(values: torch.Tensor, step: float, salt: int) -> torch.Tensor:
    """Subtract dithers times `step`, each rounded, from fp32 `[E]`, in place."""
    given, by, of = values.numpy(), np.float32(step), np.uint32(salt)
    run(lambda first, last: _subtract(given, by, of, first, last), ranges(values.numel(), 1))
    return values
