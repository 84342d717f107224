"""The arithmetic of a space of few dimensions for the `trellis` codec on a CPU: `kernels.trellis.factors`.

Every number is an integer and every sum exact: in fp32 over `CHUNK` products, in fp64 over chunks. So they
may be contracted and added in any order, and torch's matrix product gives the same; but its threads wait for
their next work by spinning, and here most of the work is of loops with threads of their own.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import compiled, exact, inlined, run
from kernels.trellis.loops.matrices import PRODUCTS, ROWS, filled_up, ranges

# Products of a whitened element and a factor, below 2**14, that add up within fp32's integers.
CHUNK = 1024
_FOUR = 4
# Whitening, and its transpose, beside a sum of magnitudes.
_WHITENING = 3


@exact
def _dots(a, b, c0, c1, c2, c3, part):
    """Sums of products of two rows with four. As many of either as there are registers to add in."""
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = np.float32(0)
    for i in range(a.size):
        x, y = a[i], b[i]
        s0 += x * c0[i]
        s1 += x * c1[i]
        s2 += x * c2[i]
        s3 += x * c3[i]
        t0 += y * c0[i]
        t1 += y * c1[i]
        t2 += y * c2[i]
        t3 += y * c3[i]
    part[0], part[1], part[2], part[3] = s0, s1, s2, s3
    part[4], part[5], part[6], part[7] = t0, t1, t2, t3


@compiled
def multiply(a, b, out):
    """out[r, k] = a[r] . b[k], of rows that the innermost caches hold; as many b as a multiple of 4."""
    part, total = np.empty(2 * _FOUR, dtype=np.float32), np.empty(2 * _FOUR, dtype=np.float64)
    rows, columns = a.shape
    for k in range(0, b.shape[0], _FOUR):
        for r in range(0, rows, 2):
            near = min(r + 1, rows - 1)
            total[:] = 0
            for start in range(0, columns, CHUNK):
                some = slice(start, min(start + CHUNK, columns))
                _dots(
                    a[r, some],
                    a[near, some],
                    b[k, some],
                    b[k + 1, some],
                    b[k + 2, some],
                    b[k + 3, some],
                    part,
                )
                for i in range(2 * _FOUR):
                    total[i] += np.float64(part[i])
            for i in range(min(_FOUR, out.shape[1] - k)):
                out[r, k + i], out[near, k + i] = total[i], total[_FOUR + i]


@compiled
def _multiply_all(a, b, first, last, out):
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        multiply(a[start:stop], b, out[start:stop])


@compiled
def whiten(row, power, column_power, limit, white):
    for c in range(row.size):
        white[c] = min(max(np.rint(row[c] * power * column_power[c]), -limit), limit)


@compiled
def _whiten_all(x, row_power, column_power, limit, first, last, out, turned):
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        for r in range(start, stop):
            whiten(x[r], row_power[r], column_power, limit, out[r])
        for c in range(x.shape[1]):
            for r in range(start, stop):
                turned[c, r] = out[r, c]


@inlined
def factor(product, energy, unit, most):
    """A row's coefficient, from its product with a direction."""
    return min(max(np.rint(product / energy / unit), -most), most)


@compiled
def _spread(image, energy, total):
    """Of the magnitudes of coefficients, in 2**-16."""
    for r in range(image.shape[0]):
        row = image[r]
        for k in range(energy.size):
            total[k] += np.rint(np.abs(row[k] / energy[k]) * 65536.0)


@compiled
def _factors(image, energy, unit, told, most, u):
    for r in range(image.shape[0]):
        for k in range(energy.size):
            u[r, k] = np.int8(factor(image[r, k], energy[k], unit[k], most)) if told[k] else np.int8(0)


@compiled
def _to_parts(x, precise, by, out):
    by[:] = 0
    for c in range(x.shape[0]):
        row = x[c]
        for k in range(by.size):
            by[k] = max(by[k], abs(row[k]))
    for k in range(by.size):
        by[k] = precise / max(by[k], 1e-300) if by[k] > 0 else 0.0
    for c in range(x.shape[0]):
        row, parts = x[c], out[c]
        for k in range(by.size):
            parts[k] = np.rint(row[k] * by[k])


@compiled
def _to_integers(parts, limit, of_mean, by):
    """In place."""
    by[:] = 0
    for c in range(parts.shape[0]):
        row = parts[c]
        for k in range(by.size):
            by[k] += abs(row[k])
    for k in range(by.size):
        mean = by[k] / parts.shape[0]
        by[k] = of_mean / max(mean, 1e-300) if mean > 0 else 0.0
    for c in range(parts.shape[0]):
        row = parts[c]
        for k in range(by.size):
            row[k] = min(max(np.rint(row[k] * by[k]), -limit), limit)


@exact
def _gram(q, out):
    """Rows of q as many as a multiple of 4. What is above the diagonal, and then what is below it."""
    for c in range(0, q.shape[0], _FOUR):
        for i in range(q.shape[1]):
            w0, w1, w2, w3 = q[c, i], q[c + 1, i], q[c + 2, i], q[c + 3, i]
            line, q0, q1, q2, q3 = out[i, i:], q[c, i:], q[c + 1, i:], q[c + 2, i:], q[c + 3, i:]
            for k in range(line.size):
                line[k] += w0 * q0[k] + w1 * q1[k] + w2 * q2[k] + w3 * q3[k]
    for i in range(out.shape[0]):
        for k in range(i):
            out[i, k] = out[k, i]


@compiled
def _make_orthogonal(gram, least, turn):
    """Gram-Schmidt on the columns of products, which are lost, and on those of a unit matrix."""
    share = np.empty(len(gram), dtype=np.float64)
    for k in range(len(gram)):
        pivot = gram[k, k]
        if pivot <= least:
            turn[:, k] = 0
            gram[k] = 0
            gram[:, k] = 0
            continue
        for j in range(k + 1, len(gram)):
            share[j] = gram[k, j] / pivot
        # Below the diagonal there are zeros.
        for i in range(k + 1):
            for j in range(k + 1, len(gram)):
                turn[i, j] -= turn[i, k] * share[j]
        for i in range(k + 1, len(gram)):
            for j in range(k + 1, len(gram)):
                gram[i, j] -= share[i] * gram[k, j]


@exact
def _turn(q, by, out):
    """q times an upper triangular matrix with as many rows as a multiple of 4."""
    for c in range(q.shape[0]):
        row = q[c]
        for i in range(0, by.shape[0], _FOUR):
            w0, w1, w2, w3 = row[i], row[i + 1], row[i + 2], row[i + 3]
            b0, b1, b2, b3 = by[i, i:], by[i + 1, i:], by[i + 2, i:], by[i + 3, i:]
            turned = out[c, i:]
            for k in range(turned.size):
                turned[k] += w0 * b0[k] + w1 * b1[k] + w2 * b2[k] + w3 * b3[k]


def whitened(
    x: torch.Tensor, row_power: torch.Tensor, column_power: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, fp32 `[R, C]`, times fp32 of its rows and columns, rounded and clipped; and it turned, `[C, R]`."""
    values, by_row, by_column = x.contiguous().numpy(), row_power.numpy(), column_power.numpy()
    out, turned = np.empty_like(values), np.empty(values.shape[::-1], dtype=np.float32)
    most = np.float32(limit)
    run(
        lambda first, last: _whiten_all(values, by_row, by_column, most, first, last, out, turned),
        ranges(len(values), values.shape[1], _WHITENING),
    )
    return torch.from_numpy(out), torch.from_numpy(turned)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, fp64 `[R, K]`, of whitened fp32 `[R, C]` and integers up to 63, fp64 `[C, K]`."""
    values, right = a.contiguous().numpy(), across(b)
    out = np.empty((len(values), b.shape[1]))
    run(
        lambda first, last: _multiply_all(values, right, first, last, out),
        ranges(len(values), values.shape[1], PRODUCTS),
    )
    return torch.from_numpy(out)


def across(b: torch.Tensor) -> NDArray[np.float32]:
    """The columns of fp64 `[C, K]` one after the other in fp32, filled up with zeros to a multiple of 4."""
    rows, columns = b.shape
    out = np.zeros((filled_up(columns), rows), dtype=np.float32)
    out[:columns] = b.numpy().T
    return out


def spread(image: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """Of as many columns of fp64 `[R, N]` as fp64 `[K]` has elements, over which they are taken: the sums of
    their magnitudes in 2**-16, rounded one by one, fp64 `[K]`."""
    total = np.zeros(energy.numel())
    _spread(image.numpy(), energy.numpy(), total)
    return torch.from_numpy(total)


def factors(
    image: torch.Tensor, energy: torch.Tensor, unit: NDArray[np.float64], told: NDArray[np.bool_], limit: int
) -> torch.Tensor:
    """The same columns over both, rounded and clipped, int8 `[R, K]`; zeros where nothing is told."""
    u = np.empty((len(image), energy.numel()), dtype=np.int8)
    _factors(image.numpy(), energy.numpy(), unit, told, float(limit), u)
    return torch.from_numpy(u)


def to_parts(x: torch.Tensor, precise: int) -> torch.Tensor:
    """fp64 `[C, K]` with columns scaled so that their largest element becomes `precise`, rounded."""
    out = np.empty(tuple(x.shape))
    _to_parts(x.contiguous().numpy(), float(precise), np.empty(x.shape[1]), out)
    return torch.from_numpy(out)


def to_integers(x: torch.Tensor, precise: int, limit: int, of_mean: float) -> torch.Tensor:
    """As `to_parts`, then scaled to a mean magnitude of `of_mean`, rounded and clipped to `limit`."""
    parts = to_parts(x, precise)
    _to_integers(parts.numpy(), float(limit), of_mean, np.empty(x.shape[1]))
    return parts


def gram(q: torch.Tensor) -> NDArray[np.float64]:
    """q^T q of integers in fp64 `[C, K]`, exact below 2**53."""
    values = q.contiguous().numpy()
    if len(values) % _FOUR:
        values = np.pad(values, ((0, -len(values) % _FOUR), (0, 0)))
    out = np.zeros((values.shape[1], values.shape[1]))
    _gram(values, out)
    return out


def gram_schmidt(gram: NDArray[np.float64], least: float) -> NDArray[np.float64]:
    """What turns columns with these products, fp64 `[K, K]`, into orthogonal ones: upper triangular.

    Columns of which no more than `least`, squared, is beside those before them become zero.
    """
    turn = np.eye(len(gram))
    _make_orthogonal(gram.copy(), least, turn)
    return turn


def turned(q: torch.Tensor, by: NDArray[np.float64]) -> torch.Tensor:
    """q times integers `[K, K]`, nothing below their diagonal, exact below 2**53."""
    values, more = q.contiguous().numpy(), -by.shape[0] % _FOUR
    out = np.zeros_like(values)
    if more:
        values, by = np.pad(values, ((0, 0), (0, more))), np.pad(by, ((0, more), (0, 0)))
    _turn(values, by, out)
    return torch.from_numpy(out)
