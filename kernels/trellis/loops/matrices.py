"""Sums over a matrix's rows and columns, and its prediction, for the `trellis` codec on a CPU.

On other devices torch does this. On a CPU torch reads the matrix once per operation and adds fp32 in fp64 far
more slowly than memory can be read. Every sum here is of integers and exact, so its order is free.

Compiled by numba at first use and cached. LLVM may not reorder additions of floats, so loops add neighbours
to neighbours, which it can vectorize.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import (
    bits_of,
    bits_to_fill,
    bits_to_read,
    compiled,
    exact,
    exponent_of,
    float_of,
    peak_of,
    run,
    store,
    two_factors,
)
from kernels.common.tiles import NON_FINITE

Floats = NDArray[np.float32]

# Fewest cheap elements per range of rows: starting a range costs as much as many elements.
_FEWEST = 1 << 19
# Ranges per thread: several, because a thread that shares its core is slower than the others.
_RANGES_A_THREAD = 4
# Work per element of a product of usual rank, relative to a cheap element.
PRODUCTS = 4
# Columns in a block, whose factors stay in the L1 cache.
_BLOCK = 64
_FACTOR1, _FACTOR2, _FACTOR3 = (np.uint64(n * _BLOCK) for n in (1, 2, 3))
PART = np.float32(2.0**9)
# Rows in a block, which read the columns' factors from the L1 cache.
ROWS = 8
# Elements written per call.
_AT_ONCE = 1 << 12


@exact
def sum_of_parts(row):
    total = 0.0
    for c in range(row.size):
        total += np.float64(np.rint(np.abs(row[c]) * PART))
    return total


@compiled
def _row_sums(x, first, last, sums):
    for r in range(first, last):
        sums[r] = sum_of_parts(x[r])


@compiled
def _column_sums(x, weight, first, last, sums):
    for r in range(first, last):
        row, w = x[r], weight[r]
        for c in range(row.size):
            sums[c] += np.float64(np.rint(np.rint(np.abs(row[c]) * PART) * w))


@exact
def _multiply(a, b, v, place, sums):
    """sums[c] = sum_k a[k] v[place + k * _BLOCK + c], followed by the same of b; a multiple of 4 columns.
    Two rows at once, because reading v takes longer than multiplying by it."""
    sums[:] = 0
    for k in range(0, a.size, 4):
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        first = np.uint64(place + k * _BLOCK)
        for c in range(_BLOCK):
            n = np.uint64(c)
            at = first + n
            v0, v1, v2, v3 = v[at], v[at + _FACTOR1], v[at + _FACTOR2], v[at + _FACTOR3]
            sums[n] += a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3
            sums[n + _FACTOR1] += b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3


@compiled
def subtract(x, u, v, row_power, column_power, out):
    """Fill `out`, `[n, C]`, with rows minus their predictions."""
    sums = np.empty(2 * _BLOCK, dtype=np.float32)
    rows, depth = u.shape
    for start in range(0, out.shape[1], _BLOCK):
        powers = column_power[start : start + _BLOCK]
        for r in range(0, rows, 2):
            # Pair a last single row with itself.
            _multiply(u[r], u[min(r + 1, rows - 1)], v, start * depth, sums)
            for row in range(min(2, rows - r)):
                sides = slice(start, start + powers.size)
                block, near, power = out[r + row, sides], x[r + row, sides], row_power[r + row]
                own = sums[row * _BLOCK : row * _BLOCK + powers.size]
                for c in range(powers.size):
                    block[c] = near[c] - own[c] * power * powers[c]


@compiled
def _reconstruct(n, step, u, v, row_power, column_power, first, last):
    sums = np.empty(2 * _BLOCK, dtype=np.float32)
    depth = u.shape[1]
    for begin in range(first, last, ROWS):
        end = min(begin + ROWS, last)
        for start in range(0, n.shape[1], _BLOCK):
            powers = column_power[start : start + _BLOCK]
            for r in range(begin, end, 2):
                _multiply(u[r], u[min(r + 1, end - 1)], v, start * depth, sums)
                for row in range(min(2, end - r)):
                    block, power = n[r + row, start : start + powers.size], row_power[r + row]
                    own = sums[row * _BLOCK : row * _BLOCK + powers.size]
                    for c in range(powers.size):
                        block[c] = bits_of(np.float32(block[c]) * step + own[c] * power * powers[c])


@compiled
def _scale(n, step, first, last):
    part = n[first:last]
    for k in range(part.size):
        part[k] = bits_of(np.float32(part[k]) * step)


@compiled
def _classes(row, column, highest, first, last, out):
    for r in range(first, last):
        own, numbers = row[r], out[r]
        for c in range(column.size):
            numbers[c] = np.uint8(min(max(np.int16(own + column[c]), np.int16(0)), highest))


@compiled
def _pack(values, bias, bits, out):
    """Pack integers: eight values of b bits take b bytes."""
    for start in range(0, values.size, 8):
        word = np.uint64(0)
        for k in range(min(8, values.size - start)):
            word |= np.uint64(np.int64(values[start + k]) + bias) << np.uint64(k * bits)
        place = start // 8 * bits
        for k in range(min(bits, out.size - place)):
            out[place + k] = (word >> np.uint64(8 * k)) & np.uint64(255)


@compiled
def _unpack(data, bias, bits, out):
    """Unpack integers. Returns whether only zeros follow the last value."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    rest = np.uint64(0)
    for start in range(0, out.size, 8):
        word = np.uint64(0)
        place = start // 8 * bits
        for k in range(min(bits, data.size - place)):
            word |= np.uint64(data[place + k]) << np.uint64(8 * k)
        count = min(8, out.size - start)
        for k in range(count):
            out[start + k] = np.int64(word >> np.uint64(k * bits) & mask) - bias
        if count < 8:
            rest = word >> np.uint64(count * bits)
    return rest == 0


@compiled
def _normalise(words, near, far, out, first, last):
    some, part = words[first:last], out[first:last]
    if words.itemsize == 2:
        for k in range(part.size):
            part[k] = float_of(np.uint32(some[k]) << np.uint32(16)) * near * far
    else:
        for k in range(part.size):
            part[k] = float_of(some[k]) * near * far


@compiled
def _store(values, near, far, limit, half, out, first, last):
    for start in range(first, last, _AT_ONCE):
        stop = min(start + _AT_ONCE, last)
        store(values[start:stop], stop - start, near, far, limit, half, out, start)


class Prediction(NamedTuple):
    """u m v^T, exact in fp32 in any order, times powers of two for rows and columns."""

    u: torch.Tensor  # int8 [R, K]
    multiplier: torch.Tensor  # int32 [K]
    v: torch.Tensor  # int8 [C, K]
    row_power: torch.Tensor  # fp32 [R]
    column_power: torch.Tensor  # [C]


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Row sums of the magnitudes in parts (`kernels.trellis.scales`), fp64 `[R]`."""
    values = x.contiguous().numpy()
    sums = np.empty(len(values))
    run(lambda first, last: _row_sums(values, first, last, sums), ranges(*x.shape))
    return torch.from_numpy(sums)


def column_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Column sums of the magnitudes in parts times the rows' weights, fp32 `[R]`, rounded; fp64 `[C]`."""
    values, weights = x.contiguous().numpy(), weight.numpy()
    parts = []

    def add(first: int, last: int) -> None:
        sums = np.zeros(values.shape[1])
        _column_sums(values, weights, first, last, sums)
        parts.append(sums)

    run(add, ranges(*x.shape))
    return torch.from_numpy(np.sum(parts, axis=0))


def normalised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent e of `kernels.common.tiles.tensor_exponent`, and x * 2**-e in fp32, of x's shape.

    If x is not finite, the second tensor is uninitialized.
    """
    words = bits_to_read(x)
    exponent = exponent_of(words)
    out = np.empty(words.size, dtype=np.float32)
    if (power := int(exponent)) != NON_FINITE:
        near, far = two_factors(-power)
        run(
            lambda first, last: _normalise(words, near, far, out, first, last),
            ranges(words.size, 1),
        )
    return exponent, torch.from_numpy(out).view(x.shape)


def peak(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, fp32 `[]`."""
    return torch.tensor(peak_of(bits_to_read(x)))


def pack(values: torch.Tensor, bias: int, bits: int, out: torch.Tensor) -> None:
    """Fill uint8 `out` with the integers plus `bias` (not negative), `bits` bits each, lowest bit first."""
    _pack(values.contiguous().view(-1).numpy(), bias, bits, out.numpy())


def unpacked(
    data: torch.Tensor, count: int, bias: int, bits: int, dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """The inverse of `pack`, and whether only zeros follow."""
    out = torch.empty(count, dtype=dtype)
    return out, bool(_unpack(data.numpy(), bias, bits, out.numpy()))


def classes(row: torch.Tensor, column: torch.Tensor, highest: int) -> torch.Tensor:
    """Sums of int16 `[R]` and `[C]`, clipped to 0 to `highest`, uint8 `[R, C]`."""
    by_row, by_column = row.numpy(), column.numpy()
    out = np.empty((len(row), len(column)), dtype=np.uint8)
    most = np.int16(highest)
    run(lambda first, last: _classes(by_row, by_column, most, first, last, out), ranges(*out.shape))
    return torch.from_numpy(out)


def reconstruct(n: torch.Tensor, step: float, prediction: Prediction | None) -> torch.Tensor:
    """n * step plus the prediction, each rounded to fp32, `[E]`, in the memory of int32 n `[E]`."""
    words, by = n.numpy(), np.float32(step)
    if prediction is None:
        run(lambda first, last: _scale(words, by, first, last), ranges(n.numel(), 1))
    else:
        factors = operands(prediction)
        rows = words.reshape(len(prediction.u), -1)
        run(
            lambda first, last: _reconstruct(rows, by, *factors, first, last),
            ranges(len(rows), rows.shape[1], PRODUCTS),
        )
    return n.view(torch.float32)


def restore(values: torch.Tensor, exponent: int, out: torch.Tensor) -> None:
    """Fill contiguous `out` with fp32 `[E]` times 2**exponent, clamped and rounded to its dtype."""
    near, far = two_factors(exponent)
    limit = np.float32(torch.finfo(out.dtype).max)
    half = out.dtype == torch.float16
    read, write = values.numpy(), bits_to_fill(out)
    run(
        lambda first, last: _store(read, near, far, limit, half, write, first, last),
        ranges(values.numel(), 1),
    )


def operands(prediction: Prediction) -> tuple[Floats, Floats, Floats, Floats]:
    """Arguments of `subtract`: u times the multipliers, padded with zeros to a multiple of 4 dimensions, v in
    `blocks`, and the powers of two."""
    rank = prediction.v.shape[1]
    u = np.zeros((len(prediction.u), filled_up(rank)), dtype=np.float32)
    np.multiply(prediction.u.numpy(), prediction.multiplier.numpy().astype(np.float32), out=u[:, :rank])
    return u, blocks(prediction.v), prediction.row_power.numpy(), prediction.column_power.numpy()


def blocks(v: torch.Tensor) -> Floats:
    """`[C, K]` in blocks of columns, flat: a block has all columns' first factors, then all second ones."""
    columns, rank = v.shape
    depth, count = filled_up(rank), -(-columns // _BLOCK)
    filled = np.zeros((count * _BLOCK, depth), dtype=np.float32)
    filled[:columns, :rank] = v.numpy()
    return np.ascontiguousarray(filled.reshape(count, _BLOCK, depth).transpose(0, 2, 1)).ravel()


def filled_up(rank: int) -> int:
    """The next multiple of 4."""
    return -(-rank // 4) * 4


def ranges(rows: int, columns: int, work: int = 1) -> list[tuple[int, int]]:
    """Ranges of rows for the threads, at least one. `work`: cost of an element relative to a cheap one."""
    whole, threads = rows * columns, torch.get_num_threads()
    count = min(-(-whole * work // _FEWEST), threads * _RANGES_A_THREAD, rows)
    if count > threads:
        # Ranges of equal length.
        count -= count % threads
    each = -(-rows // max(count, 1)) if rows else 1
    return [(first, min(first + each, rows)) for first in range(0, max(rows, 1), each)]
