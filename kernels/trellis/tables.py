"""Static frequency tables of the `trellis` codec. No table is sent over the wire.

A *class* says how wide the quantizer's indices are spread: class c has a standard deviation of
2**((c - 12) / 4) indices. Classes from `CLASSES` on have no tables of their own: the lowest `shift` bits of
their indices are sent as they are, and the rest belongs to a class of the last octave.

A table gives each index in `[-reach, reach]`, and the escape, a frequency of at least one in `TOTAL`. A
symbol is index + `MIDDLE`, so it has its index's parity; the escape's index is even. Every number here is
computed with integers or with decimals of 50 digits, so none depends on how a library rounds.
"""

from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

PRECISION = 12
TOTAL = 1 << PRECISION
CLASSES = 24
MIDDLE = 44
ESCAPE = 2 * MIDDLE + 2
SYMBOLS = ESCAPE + 1
MAX_SHIFT = 20
# The number of symbols in a row of `Tables.codes`, a power of two.
ROW = 128
# The position of the shift in an entry of `divided_codes`, above 12 bits of start and 13 of frequency.
SHIFT_AT = 25
MAX_CLASS = CLASSES + 4 * MAX_SHIFT - 1

# The distributions that a tensor's elements may have, one for the whole tensor: normal, or with longer tails.
GAUSSIAN, LAPLACE = range(2)
FAMILIES = 2
# The families of the same distributions with dither (`kernels.trellis.loops.dither`) start at this one.
DITHERED = FAMILIES

# The class of standard deviation 1.
_UNIT_CLASS = 12
# Bits of a cost after the binary point.
COST_BITS = 16

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tables:
    """Frequencies of one family. Rows are 2 * class + quantizer (0: even multiples of a step, 1: odd)."""

    frequency: Int32Array  # [2 * CLASSES, SYMBOLS], rows add up to TOTAL
    # What an encoder looks up, [2 * CLASSES * ROW]: start | frequency << 12, start being the sum of all
    # frequencies before. Zero for symbols that a class does not have.
    codes: Int32Array
    # What a decoder looks up, [2 * CLASSES * TOTAL], for every slot: slot - start | frequency - 1 << 12 |
    # symbol << 24.
    slots: Int32Array
    mean_cost: NDArray[np.int64]  # [MAX_CLASS + 1]: what an element of a class costs on average, in 2**-16


def reach(number: int) -> int:
    """The largest index, in magnitude, that a class below `CLASSES` codes without an escape."""
    return int(_deviation(number) * 6) + 4


def split(classes: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Table (a class below `CLASSES`) and shift of classes from 0 to `MAX_CLASS`."""
    shift = np.maximum((classes - (CLASSES - 4)) >> 2, 0).astype(np.int32)
    return classes - 4 * shift, shift


@cache
def tables(family: int) -> Tables:
    frequency = np.zeros((2 * CLASSES, SYMBOLS), dtype=np.int32)
    with localcontext() as context:
        context.prec = 50
        for number in range(CLASSES):
            for odd in (0, 1):
                frequency[2 * number + odd] = _frequencies(family, number, odd)
    start = (np.cumsum(frequency, axis=1) - frequency).astype(np.int32)
    codes = np.zeros((2 * CLASSES, ROW), dtype=np.int32)
    codes[:, :SYMBOLS] = np.where(frequency > 0, start | frequency << PRECISION, 0)
    symbols = np.repeat(np.tile(np.arange(SYMBOLS), 2 * CLASSES), frequency.ravel()).reshape(-1, TOTAL)
    rows = np.arange(2 * CLASSES)[:, None]
    offset = np.arange(TOTAL) - start[rows, symbols]
    slots = offset | (frequency[rows, symbols] - 1) << PRECISION | symbols << 2 * PRECISION
    cost = bits_of_counts()[frequency]
    table, shift = split(np.arange(MAX_CLASS + 1, dtype=np.int32))
    # Escapes need one slot, although they are far rarer than that.
    mean = ((frequency.astype(np.int64) * cost)[:, :ESCAPE].sum(1) + TOTAL // 2) >> PRECISION
    mean_cost = ((mean[2 * table] + mean[2 * table + 1]) >> 1) + (shift.astype(np.int64) << COST_BITS)
    return Tables(frequency, codes.ravel(), slots.astype(np.int32).ravel(), mean_cost)


@cache
def divided_codes(device: torch.device) -> torch.Tensor:
    """`Tables.codes` of all families, one after the other, on a device, with what divides by frequencies:
    int64, entry | shift << `SHIFT_AT` | inverse << 32, zero where the entry is.

    n // frequency is n * inverse >> shift for every n below 2**31: inverse, below 2**32, is 2**shift /
    frequency rounded up, shift 31 and the frequency's binary logarithm rounded up. (Granlund and Montgomery,
    1994, theorem 4.2.)
    """
    codes = np.concatenate([tables(family).codes for family in range(2 * FAMILIES)]).astype(np.int64)
    frequency = np.maximum(codes >> PRECISION, 1)
    shift = 31 + sum((frequency > 1 << power).astype(np.int64) for power in range(PRECISION))
    inverse = ((1 << shift) + frequency - 1) // frequency
    divided = codes | shift << SHIFT_AT | inverse << 32
    return torch.from_numpy(np.where(codes > 0, divided, 0)).to(device)


@cache
def codes_on(device: torch.device, family: int) -> torch.Tensor:
    """`Tables.codes` on a device."""
    return torch.from_numpy(tables(family).codes).to(device)


@cache
def symbols_on(device: torch.device, family: int) -> torch.Tensor:
    """The symbols of `Tables.slots` on a device, uint8."""
    return torch.from_numpy((tables(family).slots >> 2 * PRECISION).astype(np.uint8)).to(device)


def _deviation(number: int) -> Decimal:
    """Standard deviation of a class, in indices: a power of the fourth root of two."""
    return Decimal(2).sqrt().sqrt() ** (number - _UNIT_CLASS)


def _frequencies(family: int, number: int, odd: int) -> list[int]:
    """Frequencies of one table. Index k of the odd quantizer stands for k + 1/2."""
    # What is quantized carries the noise of choosing a path, too.
    noise = _PATH_NOISE + (_DITHER_NOISE if family >= DITHERED else 0)
    deviation = (_deviation(number) ** 2 + noise).sqrt()
    limit = reach(number)
    indices = range(-limit, limit + 1 - odd)
    edges = [Decimal(k) - Decimal("0.5") * (1 - odd) for k in (*indices, limit + 1 - odd)]
    distribution = (_gaussian, _laplace)[family % FAMILIES]
    below = [distribution(edge / deviation) for edge in edges]
    room = TOTAL - len(indices) - 1
    row = [0] * SYMBOLS
    row[ESCAPE] = 1
    for k, low, high in zip(indices, below, below[1:], strict=False):
        row[k + MIDDLE] = 1 + int((high - low) * room)
    # Rounding down leaves a little; the middle can use it best.
    row[MIDDLE] += TOTAL - sum(row)
    return row


_PATH_NOISE = Decimal("0.07")
# The variance of dither of two steps, which are one index.
_DITHER_NOISE = 1 / Decimal(12)


def _gaussian(z: Decimal) -> Decimal:
    """The normal distribution's share below z, by its Taylor series; beyond 9 nothing is left."""
    if abs(z) > 9:
        return Decimal(int(z > 0))
    term = total = z
    square, n = z * z, 0
    while abs(term) > Decimal("1e-40"):
        n += 1
        term = -term * square / (2 * n)
        total += term / (2 * n + 1)
    return Decimal("0.5") + total / _ROOT_OF_TWO_PI


# To 50 digits, and the square root of pi / 2, by which a Laplace distribution of the same mean magnitude is
# narrower.
_ROOT_OF_TWO_PI = Decimal("2.5066282746310005024157652848110452530069867406099")
_ROOT_OF_HALF_PI = _ROOT_OF_TWO_PI / 2


def _laplace(z: Decimal) -> Decimal:
    """The share below z of a Laplace distribution with the mean magnitude of a normal one."""
    tail = (-abs(z) * _ROOT_OF_HALF_PI).exp() / 2
    return tail if z < 0 else 1 - tail


@cache
def bits_of_counts() -> Int32Array:
    """-log2(n / TOTAL) in 2**-16 bits for n from 0 to TOTAL, by squaring integers; 0 for n = 0."""
    n = np.arange(TOTAL + 1, dtype=np.int64)
    exponent = np.zeros_like(n)
    for power in range(1, PRECISION + 1):
        exponent += n >= 1 << power
    mantissa = np.maximum(n, 1) << (30 - exponent)  # in [1, 2) * 2**30
    log = exponent << COST_BITS
    for bit in range(COST_BITS - 1, -1, -1):
        mantissa = (mantissa * mantissa) >> 30
        two = mantissa >> 31
        log += two << bit
        mantissa >>= two
    bits = (PRECISION << COST_BITS) - log
    bits[0] = 0
    return bits.astype(np.int32)
