"""Rows in e4m3 and their products: the reference, and the kernels under Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from kernels.fp8 import rows
from kernels.fp8.products import (
    CodedWeight,
    code_columns,
    code_rows,
    product,
    weight_gradient,
)
from kernels.fp8.rows import Coded, decoded
from tests.support.interpreter import in_interpreter, outside

CPU = torch.device("cpu")


def inputs(width: int) -> Tensor:
    """Rows of all sizes: zeros, one number, numbers at the ends of float32's range, halfway cases."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(12, width, generator=generator)
    x[1] = 0
    x[2, 1:] = 0
    x[3] *= 2.0**-140
    x[4] *= 2.0**120
    x[5] = 448.0
    x[6] = torch.linspace(0, 448, width)
    x[7] = 2.0 ** torch.linspace(-40, 8, width)
    x[8, 0] = 449.0
    return x


@outside
def test_a_row_errs_by_half_a_step_of_its_codes() -> None:
    x = inputs(96)
    found = decoded(code_rows(x))
    # Of the smallest codes a step is 2**-9 of the scale, and no scale is below 2**-126.
    scale = (x.abs().amax(1, keepdim=True) / 224).clamp(min=2.0**-126)
    allowed = torch.maximum(x.abs() / 16, scale * 2.0**-10)
    assert bool(((found - x).abs() <= allowed).all())
    assert torch.equal(decoded(code_rows(found)), found)


@outside
def test_a_row_that_is_not_finite_spoils_its_products_alone() -> None:
    x, weight = inputs(64), torch.randn(3, 64)
    x[2, 5], x[3, 6] = torch.inf, torch.nan
    made = product(code_rows(x), code_rows(weight), torch.float32)
    assert made.isnan().all(1).tolist() == [row in (2, 3) for row in range(12)]


@outside
def test_products_are_those_of_what_codes_stand_for() -> None:
    x, weight = torch.randn(7, 64), torch.randn(5, 64)
    coded = CodedWeight.empty(5, 64, CPU)
    coded.write(weight)
    made = product(code_rows(x), coded.forward, torch.float32)
    wanted = decoded(code_rows(x)).double() @ decoded(coded.forward).double().t()
    assert (made - wanted).norm() < 1e-6 * wanted.norm()
    assert (made - x @ weight.t()).norm() < 0.05 * wanted.norm()
    grad = torch.randn(7, 5)
    of_x = product(code_rows(grad), coded.back, torch.float32)
    assert (of_x - grad @ weight).norm() < 0.05 * (grad @ weight).norm()


@outside
@pytest.mark.parametrize("tokens", [1, 16, 23])
def test_a_weights_gradient_is_the_product_of_columns(tokens: int) -> None:
    grads, x = torch.randn(tokens, 48), torch.randn(tokens, 64)
    coded = code_columns(grads), code_columns(x)
    assert coded[0].codes.shape[1] % 16 == 0, "tokens that cuBLAS can sum over"
    made = weight_gradient(*coded, torch.float32)
    wanted = decoded(coded[0]).double() @ decoded(coded[1]).double().t()
    assert (made - wanted).norm() < 1e-6 * wanted.norm()
    assert (made - weight_gradient(grads, x, torch.float32)).norm() < 0.05 * wanted.norm()


@outside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_product_of_codes_agrees(dtype: torch.dtype) -> None:
    """On a CPU torch has the operator that GPUs run."""
    a, b = code_rows(torch.randn(32, 64)), code_rows(torch.randn(48, 64))
    found = torch._scaled_mm(a.codes, b.codes.t(), a.scales, b.scales.t(), out_dtype=dtype)
    wanted = product(a, b, dtype)
    assert (found.double() - wanted.double()).norm() < (1e-6 if dtype == torch.float32 else 3e-3) * 500


@in_interpreter
@pytest.mark.parametrize(
    ("width", "chunk", "dtype"),
    [
        (1, 4096, torch.bfloat16),
        (48, 16, torch.float32),
        (48, 4096, torch.float32),
        (100, 16, torch.bfloat16),
        (100, 4096, torch.float32),
    ],
    ids=str,
)
def test_codes_and_scales_are_the_references(width: int, chunk: int, dtype: torch.dtype) -> None:
    """Also of rows longer than a program reads at a time, and of columns of a wider matrix."""
    from kernels.fp8 import triton

    x = inputs(width).to(dtype)
    x[9, 0], x[10, -1] = torch.inf, torch.nan
    wide = torch.zeros(12, 2 * width, dtype=dtype)
    wide[:, width:] = x
    wanted, found = Coded.empty(12, width, CPU), Coded.empty(12, width, CPU)
    rows.code_rows(x, wanted)
    for one in (x, wide[:, width:]):
        triton.code_rows(one, found, chunk=chunk)
        assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(found.scales.nan_to_num(nan=-1.0), wanted.scales.nan_to_num(nan=-1.0))


@in_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "tile"), [(1, 16), (48, 16), (100, 64)])
def test_codes_of_columns_are_the_references(width: int, tile: int, dtype: torch.dtype) -> None:
    """Of a matrix with more rows than a tile has, and of columns of a wider one, over poisoned codes."""
    from kernels.fp8 import triton

    x = torch.cat([inputs(width), inputs(width).flip(0)]).to(dtype)
    x[3, -1], x[20, 0] = torch.inf, torch.nan
    wide = torch.zeros(24, 2 * width, dtype=dtype)
    wide[:, width:] = x
    wanted, found = Coded.empty(width, 32, CPU), Coded.empty(width, 32, CPU)
    rows.code_columns(x, wanted)
    for one in (x, wide[:, width:], x.t().contiguous().t()):
        found.codes.view(torch.uint8).fill_(0x55)
        found.scales.fill_(7.0)
        triton.code_columns(one, found, tile=tile)
        assert torch.equal(found.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(found.scales.nan_to_num(nan=-1.0), wanted.scales.nan_to_num(nan=-1.0))
