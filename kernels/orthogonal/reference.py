"""Newton-Schulz's iteration of degree 5, by which Muon makes updates orthogonal (K. Jordan 2024), in plain
torch.

Each matrix goes through it by itself, so the order of all sums follows from its shape alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5. Singular values end between 0.7 and 1.2, which is near enough to 1."""
LEAST_NORM = 1e-7


def orthogonal(matrices: Sequence[Tensor]) -> Tensor:
    """About the orthogonal matrix nearest to each of some float32 [rows, columns]: float32 [matrices, rows,
    columns]."""
    nearest = [_orthogonal(matrix) for matrix in matrices]
    return nearest[0].unsqueeze(0) if len(nearest) == 1 else torch.stack(nearest)


def _orthogonal(matrix: Tensor) -> Tensor:
    x = matrix / torch.linalg.vector_norm(matrix).clamp(min=LEAST_NORM)
    is_tall = len(matrix) > matrix.shape[1]
    if is_tall:
        x = x.t().contiguous()
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.t()
        polynomial = torch.addmm(square, square, square, beta=third, alpha=fifth)
        x = torch.addmm(x, polynomial, x, beta=first)
    nearest: Tensor = x.t() if is_tall else x
    return nearest
