"""Matrices in e4m3 on a GPU: the reference's codes, and products of columns."""

import pytest
import torch

from kernels.common.dispatch import kind_of
from kernels.fp8 import rows
from kernels.fp8.products import code_columns, code_rows, weight_gradient
from kernels.fp8.rows import Coded

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (100, 48), (1000, 130), (4096, 2048)])
def test_codes_of_columns_and_rows_are_the_references(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width).mul_(torch.logspace(-30, 30, width)).to(dtype)
    x[0, 0], x[-1, -1] = torch.nan, torch.inf
    for found, transposed in ((code_columns(x.to(CUDA)), x.t().contiguous()), (code_rows(x.to(CUDA)), x)):
        wanted = Coded.empty(*transposed.shape, torch.device("cpu"))
        rows.code_rows(transposed, wanted)
        codes = found.codes.view(torch.uint8).cpu()
        assert torch.equal(codes[:, : transposed.shape[1]], wanted.codes.view(torch.uint8))
        assert not codes[:, transposed.shape[1] :].any()
        assert torch.equal(found.scales.cpu().nan_to_num(nan=-1.0), wanted.scales.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("tokens", [16, 1000, 8192])
def test_weight_gradients_are_those_of_bf16_within_the_codes_errors(tokens: int) -> None:
    if not kind_of(CUDA).fp8_products:
        pytest.skip("needs a GPU with products in e4m3")
    grads = torch.randn(tokens, 768, dtype=torch.bfloat16, device=CUDA)
    x = torch.randn(tokens, 512, dtype=torch.bfloat16, device=CUDA)
    coded = code_columns(grads), code_columns(x)
    found, again = (weight_gradient(*coded, torch.bfloat16) for _ in range(2))
    wanted = grads.double().t() @ x.double()
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    assert torch.equal(found, again)
