"""The arithmetic of `kernels.trellis.factors` (a low-dimensional space) for the `trellis` codec on a CPU.

Every number is an integer and every sum is exact: in fp32 over `CHUNK` products, in fp64 over chunks. So any
order of sums gives the same, and torch's matrix product would too. But torch's threads spin while they wait,
and most of the work here runs on the loops' own threads.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common.loops import compiled, exact, inlined, run
from kernels.trellis.loops.matrices import PRODUCTS, ROWS, filled_up, ranges

# Number of products (whitened element times factor, below 2**14) whose sum is an exact integer in fp32.
CHUNK = 1024
_FOUR = 4
# Work per element of whitening with its transpose, relative to a sum of magnitudes.
_WHITENING = 3


@exact
def _dots(a, b, c0, c1, c2, c3, part):
    """Dot products of two rows with four others; so many sums fit the registers."""
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
    """out[r, k] = a[r] . b[k], for rows that fit the L1 cache; a multiple of 4 rows of b."""
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
    """A row's coefficient from its product with a direction."""
    return min(max(np.rint(product / energy / unit), -most), most)


@compiled
def _spread(image, energy, total):
    """Sum of the coefficients' magnitudes, in units of 2**-16."""
    for r in range(image.shape[0]):
        row = image[r]
        for k in range(energy.size):
            total[k] += np.rint(np.abs(row[k] / energy[k]) * 65536.0)


@compiled
def _factors(image, energy, unit, used, most, u):
    for r in range(image.shape[0]):
        for k in range(energy.size):
            u[r, k] = np.int8(factor(image[r, k], energy[k], unit[k], most)) if used[k] else np.int8(0)


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
    """Products of q's rows, a multiple of 4 of them: above the diagonal, then mirrored below it."""
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
    """Gram-Schmidt on the columns of `products`, which are overwritten, and on those of a unit matrix."""
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
        # Below the diagonal all is zero.
        for i in range(k + 1):
            for j in range(k + 1, len(gram)):
                turn[i, j] -= turn[i, k] * share[j]
        for i in range(k + 1, len(gram)):
            for j in range(k + 1, len(gram)):
                gram[i, j] -= share[i] * gram[k, j]


@exact
def _turn(q, by, out):
    """q times an upper triangular matrix, with a multiple of 4 rows."""
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
    """fp32 x `[R, C]` times fp32 factors of rows and columns, rounded and clipped; and its transpose."""
    values, by_row, by_column = x.contiguous().numpy(), row_power.numpy(), column_power.numpy()
    out, turned = np.empty_like(values), np.empty(values.shape[::-1], dtype=np.float32)
    most = np.float32(limit)
    run(
        lambda first, last: _whiten_all(values, by_row, by_column, most, first, last, out, turned),
        ranges(len(values), values.shape[1], _WHITENING),
    )
    return torch.from_numpy(out), torch.from_numpy(turned)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, fp64 `[R, K]`; a is whitened fp32 `[R, C]`, b holds integers up to 63 in fp64 `[C, K]`."""
    values, right = a.contiguous().numpy(), across(b)
    out = np.empty((len(values), b.shape[1]))
    run(
        lambda first, last: _multiply_all(values, right, first, last, out),
        ranges(len(values), values.shape[1], PRODUCTS),
    )
    return torch.from_numpy(out)


def across(b: torch.Tensor) -> NDArray[np.float32]:
    """The columns of fp64 `[C, K]` as rows in fp32, padded with zeros to a multiple of 4."""
    rows, columns = b.shape
    out = np.zeros((filled_up(columns), rows), dtype=np.float32)
    out[:columns] = b.numpy().T
    return out


def spread(image: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    """Sums of the magnitudes of the first K columns of fp64 `[R, N]` over `energy`, fp64 `[K]`.

    Each magnitude is rounded to units of 2**-16; the result is fp64 `[K]` in these units.
    """
    total = np.zeros(energy.numel())
    _spread(image.numpy(), energy.numpy(), total)
    return torch.from_numpy(total)


def factors(
    image: torch.Tensor, energy: torch.Tensor, unit: NDArray[np.float64], used: NDArray[np.bool_], limit: int
) -> torch.Tensor:
    """The columns over `energy` and `unit`, rounded, clipped, int8 `[R, K]`; zero where `used` is false."""
    u = np.empty((len(image), energy.numel()), dtype=np.int8)
    _factors(image.numpy(), energy.numpy(), unit, used, float(limit), u)
    return torch.from_numpy(u)


def to_parts(x: torch.Tensor, precise: int) -> torch.Tensor:
    """fp64 `[C, K]` with columns scaled to a largest element of `precise`, rounded."""
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
    """The upper triangular matrix that makes columns with these products, fp64 `[K, K]`, orthogonal.

    A column becomes zero if its part orthogonal to the earlier ones has a squared norm of at most `least`.
    """
    turn = np.eye(len(gram))
    _make_orthogonal(gram.copy(), least, turn)
    return turn


def turned(q: torch.Tensor, by: NDArray[np.float64]) -> torch.Tensor:
    """q times upper triangular integers `[K, K]`, exact below 2**53."""
    values, more = q.contiguous().numpy(), -by.shape[0] % _FOUR
    out = np.zeros_like(values)
    if more:
        values, by = np.pad(values, ((0, 0), (0, more))), np.pad(by, ((0, more), (0, 0)))
    _turn(values, by, out)
    return torch.from_numpy(out)
