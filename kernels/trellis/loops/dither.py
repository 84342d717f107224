"""`kernels.trellis.dither` on a CPU, by compiled loops: the same bits."""

import numpy as np
import torch

from kernels.common.loops import compiled, inlined, run
from kernels.common.random_bits import FIRST_FACTOR, SECOND_FACTOR
from kernels.trellis.loops.matrices import ranges

_FIRST, _SECOND = np.uint32(FIRST_FACTOR), np.uint32(SECOND_FACTOR)
_HIGH, _LESS, _SIXTEEN = np.uint32(16), np.uint32(15), np.uint32(0xFFFF)
_TWO, _ONE = np.float32(2.0), np.float32(1.0)
_UNIT, _SIXTY_FOURTHS = np.float32(2.0**-16), np.float32(64.0)


@inlined
def _dither(place, salt):
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
    """As `kernels.trellis.dither.added`."""
    out = torch.empty_like(x)
    given, results, by, of = x.numpy(), out.numpy(), np.float32(gain), np.uint32(salt)
    run(lambda first, last: _add(given, by, of, first, last, results), ranges(x.numel(), 1))
    return out


def subtract(values: torch.Tensor, step: float, salt: int) -> torch.Tensor:
    """As `kernels.trellis.dither.subtract`."""
    given, by, of = values.numpy(), np.float32(step), np.uint32(salt)
    run(lambda first, last: _subtract(given, by, of, first, last), ranges(values.numel(), 1))
    return values
