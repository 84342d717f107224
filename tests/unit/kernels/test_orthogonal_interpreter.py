"""Products of Newton-Schulz's iteration under Triton's interpreter, in float32."""

import pytest
import torch

from tests.support import orthogonal_cases as cases
from tests.support.interpreter import inside

pytestmark = inside

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", cases.SHAPES)
def test_products_are_exact(shape: tuple[int, int]) -> None:
    from kernels.orthogonal import triton

    cases.check_symmetric(triton.symmetric, shape, CPU, torch.float32)
    cases.check_product(triton.product, shape, CPU, torch.float32)


@pytest.mark.parametrize("shape", [(3, 40), (20, 17)])
def test_a_matrix_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    from kernels.orthogonal import triton

    def orthogonal(matrices: list[torch.Tensor]) -> torch.Tensor:
        return triton.iterate(triton.normalized(matrices, torch.float32), triton.Tiles(16, 32, 16))

    cases.check_iteration(orthogonal, shape, CPU, 1e-4)
