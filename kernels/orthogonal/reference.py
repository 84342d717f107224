"""The Newton-Schulz iteration of degree 5, which makes Muon's updates orthogonal, in plain torch.

Each matrix is computed separately, so the order of all sums depends only on its shape.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ITERATIONS = 5
POLYNOMIALS: dict[int, tuple[tuple[float, float, float], ...]] = {
    3: ((7.9347, -22.2581, 15.8015), (3.5653, -2.5649, 0.4860), (2.6613, -1.9772, 0.4526)),
    4: (
        (8.2193, -23.3375, 16.6266),
        (3.9641, -2.8377, 0.5158),
        (3.4368, -2.4752, 0.4762),
        (2.4901, -1.8343, 0.4368),
    ),
    5: ((3.4445, -4.7750, 2.0315),) * 5,
}
"""The factors of x, x^3 and x^5 in each iteration, by the number of iterations.

A matrix is divided by its norm first. Five iterations of K. Jordan's polynomial map singular values from
0.0008 on to values between 0.68 and 1.21. The other polynomials are Polar Express (arXiv 2505.16932, theorem
3.1 and section 3.4), the best for singular values above a lower bound. All but the last are made for values
up to 1.02, because values may exceed 1 in bfloat16. Four iterations map values from 0.003 on to between 0.76
and 1.2, three map values from 0.01 on to between 0.70 and 1.27.
"""
LEAST_NORM = 1e-7


def orthogonal(matrices: Sequence[Tensor], iterations: int = ITERATIONS) -> Tensor:
    """Approximate the orthogonal matrix nearest to each matrix.

    Args:
        matrices: float32 [rows, columns], all of one shape.
        iterations: A key of `POLYNOMIALS`.

    Returns:
        float32 [matrices, rows, columns].
    """
    nearest = [_orthogonal(matrix, iterations) for matrix in matrices]
    return nearest[0].unsqueeze(0) if len(nearest) == 1 else torch.stack(nearest)


def _orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    x = matrix / torch.linalg.vector_norm(matrix).clamp(min=LEAST_NORM)
    is_tall = len(matrix) > matrix.shape[1]
    if is_tall:
        x = x.t().contiguous()
    for first, third, fifth in POLYNOMIALS[iterations]:
        square = x @ x.t()
        polynomial = torch.addmm(square, square, square, beta=third, alpha=fifth)
        x = torch.addmm(x, polynomial, x, beta=first)
    nearest: Tensor = x.t() if is_tall else x
    return nearest
