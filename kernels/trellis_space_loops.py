"""The arithmetic of a space of few dimensions for the `trellis` codec on a CPU: `kernels.trellis_factors`.

Every number is an integer and every sum exact: in fp32 over `CHUNK` products, in fp64 over chunks. So they
may be contracted and added in any order, and torch's matrix product gives the same; but its threads wait for
their next work by spinning, and here most of the work is of loops with threads of their own.

Compiled by numba at first use and kept in its cache.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.loops import compiled, contracted, run
from kernels.trellis_matrix_loops import PRODUCTS, ranges

# Products of a whitened element and a factor, below 2**14, that add up within fp32's integers.
CHUNK = 1024
# Directions at a time, so that a loop over them is vectors of known number.
WIDE = 32
_FOUR = 4
_ROW1, _ROW2, _ROW3 = (np.uint64(n * WIDE) for n in (1, 2, 3))
_ZERO = np.float32(0)


@contracted
def _multiply_row(row, b, part, total):
    """total[k] = sum_c row[c] b[c, k]; b flat, with three rows of zeros at its end."""
    total[:] = 0
    for start in range(0, row.size, CHUNK):
        part[:] = 0
        stop = min(start + CHUNK, row.size)
        for c in range(start, stop, _FOUR):
            left, place = stop - c, np.uint64(c * WIDE)
            a0, a1, a2, a3 = row[c], _ZERO, _ZERO, _ZERO
            if left >= _FOUR:
                a1, a2, a3 = row[c + 1], row[c + 2], row[c + 3]
            elif left > 1:
                a1 = row[c + 1]
                a2 = row[c + 2] if left > 2 else _ZERO
            for i in range(WIDE):
                k = np.uint64(i)
                n = place + k
                part[k] += a0 * b[n] + a1 * b[n + _ROW1] + a2 * b[n + _ROW2] + a3 * b[n + _ROW3]
        for k in range(WIDE):
            total[k] += np.float64(part[k])


@contracted
def _add_rows(a, start, stop, first, last, b, part):
    """part[c, k] += sum_r a[r, first + c] b[r, k], four rows at a time; part and b flat."""
    for r in range(start, stop, _FOUR):
        left, place = stop - r, np.uint64(r * WIDE)
        a0 = a[r, first:last]
        a1 = a[min(r + 1, stop - 1), first:last]
        a2 = a[min(r + 2, stop - 1), first:last]
        a3 = a[min(r + 3, stop - 1), first:last]
        # Behind the last row nothing is added.
        m1, m2, m3 = np.float32(left > 1), np.float32(left > 2), np.float32(left > 3)
        for c in range(a0.size):
            w0, w1, w2, w3 = a0[c], a1[c] * m1, a2[c] * m2, a3[c] * m3
            at = np.uint64(c * WIDE)
            for i in range(WIDE):
                k = np.uint64(i)
                n = place + k
                part[at + k] += w0 * b[n] + w1 * b[n + _ROW1] + w2 * b[n + _ROW2] + w3 * b[n + _ROW3]


@compiled
def _multiply(a, b, first, last, out):
    part, total = np.empty(WIDE, dtype=np.float32), np.empty(WIDE, dtype=np.float64)
    for r in range(first, last):
        for block in range(len(b)):
            _multiply_row(a[r], b[block], part, total)
            some = out[r, block * WIDE : (block + 1) * WIDE]
            for k in range(some.size):
                some[k] = total[k]


@compiled
def _multiply_turned(a, b, first, last, out):
    part = np.empty((last - first) * WIDE, dtype=np.float32)
    for block in range(len(b)):
        some = out[first:last, block * WIDE : (block + 1) * WIDE]
        for start in range(0, a.shape[0], CHUNK):
            part[:] = 0
            _add_rows(a, start, min(start + CHUNK, a.shape[0]), first, last, b[block], part)
            for c in range(last - first):
                for k in range(some.shape[1]):
                    some[c, k] += np.float64(part[c * WIDE + k])


@compiled
def _whiten(row, power, column_power, limit, white):
    for c in range(row.size):
        white[c] = min(max(np.rint(row[c] * power * column_power[c]), -limit), limit)


@compiled
def _whiten_all(x, row_power, column_power, limit, first, last, out):
    for r in range(first, last):
        _whiten(x[r], row_power[r], column_power, limit, out[r])


@compiled
def _fit(x, row_power, column_power, limit, v, energy, unit, told, most, first, last, u):
    part, total = np.empty(WIDE, dtype=np.float32), np.empty(WIDE, dtype=np.float64)
    white = np.empty(x.shape[1], dtype=np.float32)
    for r in range(first, last):
        _whiten(x[r], row_power[r], column_power, limit, white)
        for block in range(len(v)):
            _multiply_row(white, v[block], part, total)
            for k in range(block * WIDE, min((block + 1) * WIDE, u.shape[1])):
                found = min(max(np.rint(total[k % WIDE] / energy[k] / unit[k]), -most), most)
                u[r, k] = np.int8(found) if told[k] else np.int8(0)


@compiled
def _to_parts(x, precise, out):
    for k in range(x.shape[1]):
        largest = 0.0
        for c in range(x.shape[0]):
            largest = max(largest, abs(x[c, k]))
        factor = precise / max(largest, 1e-300) if largest > 0 else 0.0
        for c in range(x.shape[0]):
            out[c, k] = np.rint(x[c, k] * factor)


@compiled
def _to_integers(parts, limit, of_mean):
    """In place."""
    for k in range(parts.shape[1]):
        total = 0.0
        for c in range(parts.shape[0]):
            total += abs(parts[c, k])
        mean = total / parts.shape[0]
        factor = of_mean / max(mean, 1e-300) if mean > 0 else 0.0
        for c in range(parts.shape[0]):
            parts[c, k] = min(max(np.rint(parts[c, k] * factor), -limit), limit)


@contracted
def _gram(q, out):
    for c in range(q.shape[0]):
        row = q[c]
        for i in range(row.size):
            line = out[i]
            for k in range(row.size):
                line[k] += row[i] * row[k]


@contracted
def _turn(q, by, out):
    for c in range(q.shape[0]):
        row, turned = q[c], out[c]
        for i in range(row.size):
            line = by[i]
            for k in range(row.size):
                turned[k] += row[i] * line[k]


def whitened(
    x: torch.Tensor, row_power: torch.Tensor, column_power: torch.Tensor, limit: int
) -> torch.Tensor:
    """x, fp32 `[R, C]`, times fp32 of its rows and columns, rounded and clipped."""
    values, by_row, by_column = x.contiguous().numpy(), row_power.numpy(), column_power.numpy()
    out = np.empty_like(values)
    most = np.float32(limit)
    run(
        lambda first, last: _whiten_all(values, by_row, by_column, most, first, last, out),
        ranges(*x.shape),
    )
    return torch.from_numpy(out)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, fp64 `[R, K]`, of whitened fp32 `[R, C]` and integers up to 63, fp64 `[C, K]`."""
    values, right = a.contiguous().numpy(), _filled(b)
    out = np.empty((len(values), b.shape[1]))
    run(
        lambda first, last: _multiply(values, right, first, last, out),
        ranges(len(values), values.shape[1], PRODUCTS),
    )
    return torch.from_numpy(out)


def turned_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T @ b, fp64 `[C, K]`, of whitened fp32 `[R, C]` and integers up to 63, fp64 `[R, K]`."""
    values, right = a.contiguous().numpy(), _filled(b)
    rows, columns = values.shape
    out = np.zeros((columns, b.shape[1]))
    run(
        lambda first, last: _multiply_turned(values, right, first, last, out),
        ranges(columns, rows, PRODUCTS),
    )
    return torch.from_numpy(out)


def fit(
    x: torch.Tensor,
    row_power: torch.Tensor,
    column_power: torch.Tensor,
    limit: int,
    v: torch.Tensor,
    divisors: tuple[torch.Tensor, torch.Tensor],
    told: NDArray[np.bool_],
    most: int,
) -> torch.Tensor:
    """The whitened rows times v, divided by both divisors, rounded and clipped to `most`: int8 `[R, K]`.

    Dimensions that are not told get zeros.
    """
    values, right = x.contiguous().numpy(), _filled(v)
    by_row, by_column = row_power.numpy(), column_power.numpy()
    energy, unit = (divisor.numpy() for divisor in divisors)
    u = np.empty((len(values), v.shape[1]), dtype=np.int8)
    clip, largest = np.float32(limit), np.float64(most)
    run(
        lambda first, last: _fit(
            values, by_row, by_column, clip, right, energy, unit, told, largest, first, last, u
        ),
        ranges(len(values), values.shape[1], PRODUCTS),
    )
    return torch.from_numpy(u)


def to_parts(x: torch.Tensor, precise: int) -> torch.Tensor:
    """fp64 `[C, K]` with columns scaled so that their largest element becomes `precise`, rounded."""
    out = np.empty(tuple(x.shape))
    _to_parts(x.contiguous().numpy(), float(precise), out)
    return torch.from_numpy(out)


def to_integers(x: torch.Tensor, precise: int, limit: int, of_mean: float) -> torch.Tensor:
    """As `to_parts`, then scaled to a mean magnitude of `of_mean`, rounded and clipped to `limit`."""
    parts = to_parts(x, precise)
    _to_integers(parts.numpy(), float(limit), of_mean)
    return parts


def gram(q: torch.Tensor) -> NDArray[np.float64]:
    """q^T q of integers in fp64 `[C, K]`, exact below 2**53."""
    values = q.contiguous().numpy()
    out = np.zeros((values.shape[1], values.shape[1]))
    _gram(values, out)
    return out


def turned(q: torch.Tensor, by: NDArray[np.float64]) -> torch.Tensor:
    """q times integers `[K, K]`, exact below 2**53."""
    values = q.contiguous().numpy()
    out = np.zeros_like(values)
    _turn(values, by, out)
    return torch.from_numpy(out)


def _filled(b: torch.Tensor) -> NDArray[np.float32]:
    """b in fp32, `[blocks, n]`: `WIDE` columns at a time, filled up with zeros and three rows of them."""
    rows, columns = b.shape
    blocks = -(-columns // WIDE)
    filled = np.zeros((blocks, rows + _FOUR - 1, WIDE), dtype=np.float32)
    for block in range(blocks):
        some = b[:, block * WIDE : (block + 1) * WIDE]
        filled[block, :rows, : some.shape[1]] = some.numpy()
    return filled.reshape(blocks, -1)
