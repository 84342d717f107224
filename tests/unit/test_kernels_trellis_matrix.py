"""The loops over a matrix of the `trellis` codec on a CPU against torch's operations, which a GPU without
Triton uses: the same bits."""

import pytest
import torch

from kernels import trellis, trellis_factors, trellis_matrix_loops, trellis_scales
from kernels.tiles import multiply_all, powers_of_two
from kernels.trellis_factors import Factors

# Rows and columns: around the blocks of 64 and the eight neighbours of a sum, and more than a thread takes.
SHAPES = [(1, 1), (3, 7), (5, 8), (2, 63), (7, 64), (4, 65), (9, 200), (700, 401)]


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Of every magnitude that a normalised tensor may have, and exact halves of what is rounded."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-40, 12, (rows, 1), generator=generator)
    x.view(-1)[::5] = torch.randint(-9, 9, x.view(-1)[::5].shape, generator=generator) / 2**10
    x.view(-1)[::11] = 0
    return x.clamp_(-(2.0**13), 2.0**13)


def factors(rows: int, columns: int, rank: int, seed: int) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    limit = 7

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    return Factors(
        bits=4,
        u=integers(-limit, limit + 1, rows, rank).to(torch.int8),
        v=integers(-limit, limit + 1, columns, rank).to(torch.int8),
        multiplier=integers(0, 256, rank),
        row_exponent=integers(0, 20, rows),
        column_exponent=integers(0, 12, columns),
        exponent=-30,
    )


@pytest.fixture(params=[1, 2], ids="threads-{}".format, autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums(rows: int, columns: int) -> None:
    x = matrix(rows, columns, 1)
    parts = trellis_scales.parts(x)
    assert torch.equal(trellis_matrix_loops.row_sums(x), parts.sum(1, dtype=torch.float64))
    weight = torch.rand(rows, generator=torch.Generator().manual_seed(2)) * 2.0**20
    expected = parts.mul_(weight.unsqueeze(1)).round_().sum(0, dtype=torch.float64)
    assert torch.equal(trellis_matrix_loops.column_sums(x, weight), expected)


def test_a_matrix_that_is_not_contiguous() -> None:
    x = matrix(18, 40, 3)[::2, ::2]
    assert torch.equal(trellis_matrix_loops.row_sums(x), trellis_scales.parts(x).sum(1, dtype=torch.float64))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_whitening_rounds_and_clips(rows: int, columns: int) -> None:
    x = matrix(rows, columns, 4)
    row, column = (2.0 ** torch.arange(n).remainder(9).sub(4).float() for n in (rows, columns))
    expected = (x * row.unsqueeze(1)).mul_(column).round_().clamp_(-255, 255)
    assert torch.equal(trellis_matrix_loops.whitened(x, row, column, 255), expected)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("rank", [1, 4, 31, 32])
def test_what_is_left_of_a_prediction_and_back(rows: int, columns: int, rank: int) -> None:
    x, by = matrix(rows, columns, 5), factors(rows, columns, rank, 6)
    predicted = trellis_factors.predict(by)
    left = trellis_factors.residual(x, by)
    assert torch.equal(left, x - predicted)
    code = 12345
    n = torch.randint(-(2**25), 2**25, (rows * columns,), dtype=torch.int32)
    n[::2] %= 64
    expected = n.float().mul_(trellis.step_of(code)).add_(predicted.view(-1))
    assert torch.equal(trellis.reconstruct(n.clone(), code, by), expected)


@pytest.mark.parametrize("elements", [1, 63, 4097, 1 << 19])
def test_multiples_of_a_step(elements: int) -> None:
    n = torch.arange(elements, dtype=torch.int32) * 63 - 2**24
    expected = n.float().mul_(trellis.step_of(777))
    assert torch.equal(trellis.reconstruct(n, 777, None), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exponent", [-149, -30, -1, 0, 9, 100, 127])
def test_what_is_stored_is_finite_and_rounded(dtype: torch.dtype, exponent: int) -> None:
    values = matrix(31, 411, 8).view(-1)
    out = torch.empty(31, 411, dtype=dtype).fill_(float("nan"))
    trellis.restore(values.clone(), exponent, out)
    y = multiply_all(values, powers_of_two(torch.tensor(exponent, dtype=torch.int32)))
    limit = torch.finfo(dtype).max
    assert torch.equal(out, y.clamp_(-limit, limit).view(out.shape).to(dtype))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_classes_are_clipped_sums(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(7)
    row, column = (torch.randint(-8192, 8193, (n,), generator=generator).short() for n in (rows, columns))
    row[::2] %= 60
    column[::2] %= 60
    expected = (row.unsqueeze(1) + column).clamp_(0, 103).to(torch.uint8)
    assert torch.equal(trellis_matrix_loops.classes(row, column, 103), expected)


def test_what_two_threads_take_is_all_there_is() -> None:
    parts = trellis_matrix_loops._ranges(700, 401)
    assert len(parts) > 1
    assert [row for first, last in parts for row in range(first, last)] == list(range(700))
