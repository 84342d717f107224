"""e4m3 gradients, moments and AdamW on a GPU against the reference."""

import pytest
import torch

from kernels import fp8
from kernels.adamw import adamw_step
from tests.support import fp8_cases as cases

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SIZES = (1, 127, 129, 5000, 1 << 20)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-5, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulation_gives_the_references_bits(count: int, scale: float, dtype: torch.dtype) -> None:
    cases.check_accumulation(fp8.accumulate_gradient, CUDA, count, scale, dtype)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_marked_alike(bad: float) -> None:
    cases.check_not_finite(fp8.accumulate_gradient, CUDA, bad)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("many", [1, 2, 5])
def test_sums_give_the_references_bits(count: int, many: int) -> None:
    cases.check_sums(fp8.sum_gradients, CUDA, count, many)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_adamw_is_the_references_but_for_logarithms(count: int, weights: torch.dtype, packed: bool) -> None:
    cases.check_adamw(adamw_step, CUDA, count, weights, packed=packed)
