"""Newton-Schulz's iteration of degree 5, by which Muon makes updates orthogonal, in plain torch.

Each matrix goes through it by itself, so the order of all sums follows from its shape alone.
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
"""Factors of x, x^3 and x^5 in each iteration, by how many there are.

Of a matrix over its norm, five iterations of K. Jordan's polynomial bring singular values from 0.0008 on to
between 0.68 and 1.21. The others are Polar Express (arXiv 2505.16932, theorem 3.1 and section 3.4), the best
for singular values from a least one on, all but the last for values up to 1.02, since in bfloat16 they may
come to more than 1: four bring those from 0.003 on to between 0.76 and 1.2, three those from 0.01 on to
between 0.70 and 1.27.
"""
LEAST_NORM = 1e-7


def orthogonal(matrices: Sequence[Tensor], iterations: int = ITERATIONS) -> Tensor:
    """About the orthogonal matrix nearest to each of some float32 [rows, columns]: float32 [matrices, rows,
    columns]. `iterations` is a key of `POLYNOMIALS`."""
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
