"""Matrices in e4m3 on a GPU: the reference's codes."""

import pytest
import torch

from kernels.fp8 import rows
from kernels.fp8.products import code_rows
from kernels.fp8.rows import Coded

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (100, 48), (1000, 130), (4096, 2048)])
def test_codes_of_rows_are_the_references(tokens: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, width).mul_(torch.logspace(-30, 30, width)).to(dtype)
    x[0, 0], x[-1, -1] = torch.nan, torch.inf
    found, wanted = code_rows(x.to(CUDA)), Coded.empty(*x.shape, torch.device("cpu"))
    rows.code_rows(x, wanted)
    assert torch.equal(found.codes.view(torch.uint8).cpu(), wanted.codes.view(torch.uint8))
    assert torch.equal(found.scales.cpu().nan_to_num(nan=-1.0), wanted.scales.nan_to_num(nan=-1.0))
