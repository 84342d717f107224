"""Muon: the mean of a matrix's gradient, made orthogonal (K. Jordan 2024; arXiv 2502.16982).

Each matrix is stepped by itself, so the order of all sums follows from its shape alone: bits are the same on
any split. An update is scaled to the root mean square of AdamW's, by which one learning rate serves both.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.fp8.reference import (
    Fp8Gradient,
    Moment,
    pack_moment,
    round_stochastically,
    unpack_gradient,
    unpack_moment,
)
from node.config.schema import TrainingSection
from node.model.optimizers import MuonRule
from node.training.update_rules import Step, Updates

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5. Singular values end between 0.7 and 1.2, which is near enough to 1."""
SCALE = 0.2
"""AdamW's updates have a root mean square of 0.2 to 0.4."""
_LEAST_NORM = 1e-7


class Muon(Updates):
    """Nesterov's momentum, then `orthogonal`."""

    def __init__(self, rule: MuonRule, training: TrainingSection) -> None:
        self._joined = rule.joined
        self._momentum = training.momentum

    def step(
        self, weight: Tensor, gradient: Tensor | Fp8Gradient, moments: Sequence[Tensor], step: Step
    ) -> None:
        values = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient
        values = values.view(weight.shape).mul_(step.scale)
        packed = Moment(*moments) if len(moments) > 1 else None
        mean = moments[0] if packed is None else unpack_moment(packed).view(weight.shape)
        mean.lerp_(values, 1 - self._momentum)
        values.lerp_(mean, self._momentum)
        if packed is not None:
            pack_moment(mean.flatten(), packed)
            del mean
        is_float32 = weight.dtype == torch.float32
        moved = weight if is_float32 else weight.float()
        moved.mul_(1 - step.lr * step.weight_decay)
        rows = len(weight) // self._joined
        for part, update in zip(torch.split(moved, rows), torch.split(values, rows), strict=True):
            part.add_(orthogonal(update), alpha=-step.lr * SCALE * math.sqrt(max(part.shape)))
        if not is_float32:
            weight.view(-1).copy_(round_stochastically(moved.flatten(), step.salt, step.first))

    def step_together(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        step: Step,
    ) -> None:
        for each in zip(weights, gradients, moments, strict=True):
            self.step(*each, step)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to `matrix` [rows, columns], by Newton-Schulz's iteration of degree
    5: in bfloat16 on a GPU, in float32 elsewhere."""
    x = matrix / torch.linalg.vector_norm(matrix).clamp(min=_LEAST_NORM)
    if matrix.device.type == "cuda":
        x = x.bfloat16()
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
