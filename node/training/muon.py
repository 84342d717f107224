"""Muon: the mean of a matrix's gradient, orthogonalized (K. Jordan 2024; arXiv 2502.16982).

A matrix has the same bits whichever others are updated with it, so the bits do not depend on the split. A
matrix must be whole when it is orthogonalized: tensor-parallel ranks gather it, and all of them compute it.
An update is scaled to the root mean square of AdamW's updates, so that one learning rate suits both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kernels.fp8.ops import momentum_step
from kernels.fp8.reference import Fp8Gradient, Moment, round_stochastically, unpack_gradient
from kernels.orthogonal.ops import orthogonal
from node.config.schema import TrainingSection
from node.model.optimizers import ITERATED, MEAN, MuonRule
from node.training.update_rules import Step, Turn, Updates

SCALE = 0.2
"""The root mean square of updates. AdamW's have 0.2 to 0.4."""


class Muon(Updates):
    """Nesterov momentum, then `orthogonal`."""

    def __init__(self, rule: MuonRule, training: TrainingSection) -> None:
        self._joined = rule.joined
        self._momentum = training.momentum
        self._iterations = training.muon_iterations

    def step(
        self, weight: Tensor, gradient: Tensor | Fp8Gradient, moments: Sequence[Tensor], step: Step
    ) -> None:
        self._step_alike([Turn(weight, gradient, moments, step)])

    def step_each(self, turns: Sequence[Turn]) -> None:
        if turns[0].weight.device.type == "cpu":
            # A CPU orthogonalizes matrices one by one, and memory is planned for one.
            super().step_each(turns)
            return
        for group in _groups([turn.weight for turn in turns]):
            self._step_alike([turns[number] for number in group])

    def step_together(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        step: Step,
    ) -> None:
        self._mix([mean for (mean,) in moments], list(gradients))
        for group in _groups(weights):
            self._move([weights[n] for n in group], [gradients[n] for n in group], step)

    def round_means(self, moments: Sequence[Tensor]) -> dict[str, Tensor]:
        return {MEAN: moments[0].clone()}

    def moments_after_round(
        self, parameter: nn.Parameter, change: Tensor, means: Mapping[str, Tensor], every: int, step: Step
    ) -> list[Tensor]:
        """The mean over groups. The change does not determine the momentum: it is a sum of orthogonal
        matrices, which do not say how long the momentum is in each direction."""
        return [means[MEAN].view(parameter.shape)]

    def _step_alike(self, turns: Sequence[Turn]) -> None:
        """Update parameters of one shape. They share their learning rate and decay."""
        values = [self._mixed(turn) for turn in turns]
        weights = [turn.weight for turn in turns]
        moved = [weight if weight.dtype == torch.float32 else weight.float() for weight in weights]
        self._move(moved, values, turns[0].step)
        for weight, (_, _, _, step), result in zip(weights, turns, moved, strict=True):
            if weight is not result:
                weight.view(-1).copy_(round_stochastically(result.flatten(), step.salt, step.first))

    def _mixed(self, turn: Turn) -> Tensor:
        """Add a gradient to its mean and return the matrix to orthogonalize, in the weight's shape."""
        weight, gradient, moments, step = turn
        if len(moments) > 1:
            return momentum_step(gradient, Moment(*moments), self._momentum, step.scale).view(weight.shape)
        values = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient
        values = values.view(weight.shape).mul_(step.scale)
        self._mix(list(moments), [values])
        return values

    def _mix(self, means: list[Tensor], gradients: list[Tensor]) -> None:
        """Nesterov momentum: add gradients to their means, and replace each gradient by its Nesterov update.
        Both are computed in float32 before means are rounded to bfloat16."""
        if means[0].dtype != torch.float32:
            for mean, gradient in zip(means, gradients, strict=True):
                wide = mean.float()
                self._mix([wide], [gradient])
                mean.copy_(wide)
            return
        torch._foreach_lerp_(means, gradients, 1 - self._momentum)
        torch._foreach_lerp_(gradients, means, self._momentum)

    def _move(self, weights: list[Tensor], updates: list[Tensor], step: Step) -> None:
        """Update float32 weights of one shape by the orthogonal matrices nearest to `updates`."""
        shard = step.shard
        whole = updates if shard is None else [shard.whole(update) for update in updates]
        parts = [part for update in whole for part in update.chunk(self._joined)]
        nearest = list(orthogonal(parts, self._iterations).view(len(whole), *whole[0].shape))
        if shard is not None:
            nearest = [shard.own(each) for each in nearest]
        torch._foreach_mul_(weights, 1 - step.lr * step.weight_decay)
        scale = SCALE * math.sqrt(max(parts[0].shape))
        torch._foreach_add_(weights, nearest, alpha=-step.lr * scale)


def _groups(weights: Sequence[Tensor]) -> Iterator[list[int]]:
    """Groups of the numbers of weights of one shape, each as large as memory is planned for."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, weight in enumerate(weights):
        by_shape.setdefault(weight.shape, []).append(number)
    for shape, numbers in by_shape.items():
        most = max(1, ITERATED // shape.numel())
        yield from (numbers[first : first + most] for first in range(0, len(numbers), most))
