"""The loops over a matrix of the `trellis` codec on a CPU against torch's operations: the same bits."""

import dataclasses

import numpy as np
import pytest
import torch

from kernels.common import tiles
from kernels.common.tiles import multiply_all, powers_of_two
from kernels.trellis import factors as trellis_factors
from kernels.trellis import reference as trellis
from kernels.trellis import scales as trellis_scales
from kernels.trellis.factors import Factors
from kernels.trellis.loops import matrices as trellis_matrix_loops
from kernels.trellis.loops import spaces as trellis_space_loops
from tests.support import trellis_cases
from tests.support.cases import each

# Rows and columns: around the blocks of 64 and the eight neighbours of a sum, and more than a thread takes.
SHAPES = [(1, 1), (3, 7), (5, 8), (2, 63), (7, 64), (4, 65), (9, 200), (1400, 401)]


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


@each(("rows", "columns"), SHAPES)
def test_sums(rows: int, columns: int) -> None:
    x = matrix(rows, columns, 1)
    parts = trellis_cases.parts(x)
    assert torch.equal(trellis_matrix_loops.row_sums(x), parts.sum(1, dtype=torch.float64))
    weight = torch.rand(rows, generator=torch.Generator().manual_seed(2)) * 2.0**20
    expected = parts.mul_(weight.unsqueeze(1)).round_().sum(0, dtype=torch.float64)
    assert torch.equal(trellis_matrix_loops.column_sums(x, weight), expected)


def test_a_matrix_that_is_not_contiguous() -> None:
    x = matrix(18, 40, 3)[::2, ::2]
    assert torch.equal(trellis_matrix_loops.row_sums(x), trellis_cases.parts(x).sum(1, dtype=torch.float64))


@each(("rows", "columns"), SHAPES)
def test_scales_of_rows_and_columns_at_once(rows: int, columns: int) -> None:
    x = matrix(rows, columns, 15)
    for found, expected in zip(trellis_scales.scales(x), trellis_scales.in_turn(x, True, True), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


@each(("rows", "columns"), SHAPES)
def test_whitening_rounds_and_clips(rows: int, columns: int) -> None:
    x = matrix(rows, columns, 4)
    row, column = (2.0 ** torch.arange(n).remainder(9).sub(4).float() for n in (rows, columns))
    expected = (x * row.unsqueeze(1)).mul_(column).round_().clamp_(-255, 255)
    white, turned = trellis_space_loops.whitened(x, row, column, 255)
    assert torch.equal(white, expected) and torch.equal(turned, expected.T)


@each(("rows", "columns"), [*SHAPES, (1030, 1029), (1029, 2051)])
@each("rank", [1, 8, 32, 33, 64])
def test_products_with_directions(rows: int, columns: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(9)
    white = torch.randint(-255, 256, (rows, columns), generator=generator).float()
    right = torch.randint(-63, 64, (columns, rank), generator=generator).double()
    # The largest sums that there may be.
    white[0], right[:, 0] = 255, 63
    assert torch.equal(trellis_space_loops.product(white, right), white.double() @ right)


@pytest.mark.parametrize("rank", [1, 8, 33])
def test_coefficients_of_products_and_their_magnitudes(rank: int) -> None:
    generator = torch.Generator().manual_seed(10)
    image = torch.randint(-(2**18), 2**18, (301, 40), generator=generator).double()
    energy, unit = torch.randint(1, 4000, (2, rank), generator=generator).double()
    told, unit = np.arange(rank) % 3 != 1, unit / 256
    first = image[:, :rank]
    assert torch.equal(
        trellis_space_loops.spread(image, energy), (first / energy).abs().mul_(2.0**16).round_().sum(0)
    )
    expected = (first / energy / unit).round_().clamp_(-7, 7)
    found = trellis_space_loops.factors(image, energy, unit.numpy(), told, 7)
    assert torch.equal(found, torch.where(torch.from_numpy(told), expected, 0.0).to(torch.int8))


@pytest.mark.parametrize("rank", [1, 8, 33])
def test_integer_columns_are_orthogonalised_as_by_torch(rank: int) -> None:
    x = torch.randn(301, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(12)) * 1e6
    x[:, rank // 2] = 0
    largest = x.abs().amax(0)
    scale = torch.where(largest > 0, x.new_full((1,), 1 << 17) / largest.clamp_min(1e-300), 0.0)
    parts = (x * scale).round_()
    assert torch.equal(trellis_space_loops.to_parts(x, 1 << 17), parts)
    mean = parts.abs().sum(0) / x.new_full((1,), 301)
    factor = torch.where(mean > 0, x.new_full((1,), 15.75) / mean.clamp_min(1e-300), 0.0)
    expected = (parts * factor).round_().clamp_(-63, 63)
    assert torch.equal(trellis_space_loops.to_integers(x, 1 << 17, 63, 15.75), expected)
    assert np.array_equal(trellis_space_loops.gram(parts), (parts.T @ parts).numpy())
    by = np.triu(np.arange(rank * rank, dtype=np.float64).reshape(rank, rank) - 17)
    assert torch.equal(trellis_space_loops.turned(parts, by), parts @ torch.from_numpy(by))


@pytest.mark.parametrize("rank", [1, 8, 33])
def test_gram_schmidt_is_that_of_numpy_and_leaves_out_what_depends(rank: int) -> None:
    x = torch.randint(-(2**17), 2**17, (120, rank), generator=torch.Generator().manual_seed(14)).double()
    if rank > 1:
        x[:, 3] = 2 * x[:, 1] - x[:, 2]
        x[:, 5] = 0
    gram = (x.T @ x).numpy()
    least, left, expected = 2.0**14, gram.copy(), np.eye(rank)
    for k in range(rank):
        if left[k, k] <= least:
            expected[:, k] = left[k] = left[:, k] = 0
            continue
        share = left[k, k + 1 :] / left[k, k]
        expected[:, k + 1 :] -= expected[:, k : k + 1] * share
        left[k + 1 :, k + 1 :] -= share[:, None] * left[k, k + 1 :]
    found = trellis_space_loops.gram_schmidt(gram, least)
    assert np.array_equal(found, expected) and np.array_equal(gram, (x.T @ x).numpy())
    assert not rank > 1 or (not found[:, [3, 5]].any() and found[:, [0, 1, 2, 4]].any(0).all())


@each("bits", range(1, 9))
@each("count", [1, 7, 8, 9, 1000])
def test_packed_bits_round_trip_and_padding_is_checked(bits: int, count: int) -> None:
    bias = (1 << (bits - 1)) - 1
    values = torch.arange(count).remainder(1 << bits).sub(bias).to(torch.int32)
    packed = torch.full((-(-count * bits // 8),), 255, dtype=torch.uint8)
    trellis_matrix_loops.pack(values, bias, bits, packed)
    whole = sum((value + bias) << (bits * place) for place, value in enumerate(values.tolist()))
    assert packed.numpy().tobytes() == whole.to_bytes(-(-count * bits // 8), "little")
    back, clear = trellis_matrix_loops.unpacked(packed, count, bias, bits, torch.int32)
    assert clear and torch.equal(back, values)
    if count * bits % 8:
        packed[-1] |= 128
        assert not trellis_matrix_loops.unpacked(packed, count, bias, bits, torch.int32)[1]


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("magnitude", [1e-38, 1.0, 6e4])
def test_normalised_elements_and_their_peak(dtype: torch.dtype, magnitude: float) -> None:
    x = (matrix(33, 129, 13) / 2.0**13 * magnitude).to(dtype)
    exponent, y = trellis_matrix_loops.normalised(x)
    expected = tiles.tensor_exponent(x)
    assert torch.equal(exponent, expected)
    assert torch.equal(y, tiles.normalised(x, tiles.powers_of_two(-expected)))
    assert trellis_matrix_loops.peak(y) == y.abs().amax()
    x[3, 4] = float("nan")
    assert trellis_matrix_loops.normalised(x)[0].item() == tiles.NON_FINITE


@each(("rows", "columns"), SHAPES)
@each("rank", [1, 4, 31, 32])
def test_residuals_round_trip(rows: int, columns: int, rank: int) -> None:
    x, by = matrix(rows, columns, 5), factors(rows, columns, rank, 6)
    predicted = trellis_cases.predict(by)
    told = trellis_factors.left_scales(x, by), trellis_scales.in_turn(x - predicted, True, True)
    assert all(torch.equal(found, expected) for found, expected in zip(*told, strict=True))
    code = 12345
    n = torch.randint(-(2**25), 2**25, (rows * columns,), dtype=torch.int32)
    n[::2] %= 64
    expected = n.float().mul_(trellis.step_of(code)).add_(predicted.view(-1))
    assert torch.equal(trellis.reconstruct(n.clone(), code, by), expected)


@each(("rows", "columns"), [(40, 30), (47, 65), (301, 200), (1100, 401)])
@each("kind", [(1, 3), (4, 4), (7, 6)])
def test_a_matrix_fitted_at_once_is_what_torch_fits(rows: int, columns: int, kind: tuple[int, int]) -> None:
    x = matrix(rows, columns, 16)
    sample = x[::3].contiguous()
    space = trellis_factors.spaces(sample, 9, [(9, 4), kind])[1]
    found, expected = trellis_factors.fitted(x, space), trellis_cases.fit(x, space)
    for field in dataclasses.fields(expected):
        one, other = getattr(found.factors, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other
    assert expected.u.any() and torch.equal(space.sample.u, expected.u[::3])
    assert torch.equal(space.sample.row_exponent, expected.row_exponent[::3])
    left = x - trellis_cases.predict(expected)
    assert torch.equal(found.residual, left) and found.peak == left.abs().amax()
    row, column = trellis_scales.in_turn(left, True, True)
    assert torch.equal(found.row, row) and torch.equal(found.column, column)


@pytest.mark.parametrize("elements", [1, 63, 4097, 1 << 19])
def test_multiples_of_a_step(elements: int) -> None:
    n = torch.arange(elements, dtype=torch.int32) * 63 - 2**24
    expected = n.float().mul_(trellis.step_of(777))
    assert torch.equal(trellis.reconstruct(n, 777, None), expected)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("exponent", [-149, -30, -1, 0, 9, 100, 127])
def test_stored_values_are_finite_and_rounded(dtype: torch.dtype, exponent: int) -> None:
    values = matrix(31, 411, 8).view(-1)
    out = torch.empty(31, 411, dtype=dtype).fill_(float("nan"))
    trellis_matrix_loops.restore(values.clone(), exponent, out)
    y = multiply_all(values, powers_of_two(torch.tensor(exponent, dtype=torch.int32)))
    limit = torch.finfo(dtype).max
    assert torch.equal(out, y.clamp_(-limit, limit).view(out.shape).to(dtype))


@each(("rows", "columns"), SHAPES)
def test_classes_are_clipped_sums(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(7)
    row, column = (torch.randint(-8192, 8193, (n,), generator=generator).short() for n in (rows, columns))
    row[::2] %= 60
    column[::2] %= 60
    expected = (row.unsqueeze(1) + column).clamp_(0, 103).to(torch.uint8)
    assert torch.equal(trellis_matrix_loops.classes(row, column, 103), expected)


def test_two_threads_take_everything_once() -> None:
    parts = trellis_matrix_loops.ranges(1400, 401)
    assert len(parts) > 1
    assert [row for first, last in parts for row in range(first, last)] == list(range(1400))
