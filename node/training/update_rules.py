"""The arithmetic of update rules, which `node.model.optimizers` declares, and that of AdamW."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of

from kernels.fp8.ops import adamw_step
from kernels.fp8.reference import AdamWStep, Fp8Gradient, Moment, unpack_gradient
from node.config.schema import TrainingSection
from node.model.optimizers import SQUARE, SQUARE_COLUMNS, SQUARE_ROWS, AdamWRule, UpdateRule
from node.model.shards import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The settings of one step of a parameter."""

    lr: float
    weight_decay: float
    number: int
    """The number of the step, counted from 1."""
    scale: float = 1.0
    """The factor of the gradient, which is applied first."""
    salt: int = 0
    """32 bits for stochastic rounding of weights in bfloat16."""
    first: int = 0
    """The index of a piece's first element in its flat parameter, at the start of a block. It determines the
    random bits."""
    shard: Shard | None = None
    """Set if other ranks hold the rest of the parameter."""


class Turn(NamedTuple):
    """One parameter's arguments for `Updates.step`."""

    weight: Tensor
    gradient: Tensor | Fp8Gradient
    moments: Sequence[Tensor]
    step: Step


class Updates(ABC):
    """Updates parameters in place by one rule. It keeps no state between steps."""

    @abstractmethod
    def step(
        self,
        weight: Tensor,
        gradient: Tensor | Fp8Gradient,
        moments: Sequence[Tensor],
        step: Step,
    ) -> None:
        """Update one parameter, or a piece of it.

        Args:
            weight: float32, or bfloat16 if the moments are in e4m3. A piece is flat.
            gradient: float32 of the weight's shape, which may be overwritten, or e4m3 codes.
            moments: the tensors of all moments, in the order of the rule's `keys`.
        """

    def step_each(self, turns: Sequence[Turn]) -> None:
        """`step` for several whole parameters of which no other rank has a part, with the same bits."""
        for turn in turns:
            self.step(*turn)

    @abstractmethod
    def step_together(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        step: Step,
    ) -> None:
        """Update several whole parameters in float32. Their gradients are already scaled."""

    @abstractmethod
    def round_means(self, moments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copies of what rounds average over groups for a parameter's moments, by the kinds of the rule's
        `round_means`."""

    @abstractmethod
    def moments_after_round(
        self, parameter: nn.Parameter, change: Tensor, means: Mapping[str, Tensor], every: int, step: Step
    ) -> list[Tensor]:
        """The parameter's moments that would have produced a round's mean change in `every` equal steps.

        Args:
            parameter: with its value from the beginning of the round.
            change: the mean change over all groups.
            means: the averages over all groups, flat, by kind.
            step: the last step of the round.
        """


def updates_of(rule: UpdateRule, training: TrainingSection) -> Updates:
    """The arithmetic of a rule."""
    module, kind = rule.IMPLEMENTATION
    updates: Updates = getattr(import_module(f"{__package__}.{module}"), kind)(rule, training)
    return updates


class AdamW(Updates):
    """AdamW. Moments in float32 are updated by torch's functional AdamW, on a GPU by its fused kernel in one
    pass; moments in e4m3 by `kernels.fp8`.

    The first object of torch's optimizer class that a process creates would import torch's compiler, which
    takes seconds.
    """

    def __init__(self, rule: AdamWRule, training: TrainingSection) -> None:
        self._training = training

    def step(
        self, weight: Tensor, gradient: Tensor | Fp8Gradient, moments: Sequence[Tensor], step: Step
    ) -> None:
        training = self._training
        if len(moments) > 2:
            how = AdamWStep(
                lr=step.lr,
                beta1=training.beta1,
                beta2=training.beta2,
                eps=training.eps,
                weight_decay=step.weight_decay,
                step=step.number,
                clip_coefficient=step.scale,
                salt=step.salt,
                first=step.first,
            )
            adamw_step(weight, gradient, Moment(*moments[:3]), Moment(*moments[3:]), how)
            return
        values = unpack_gradient(gradient) if isinstance(gradient, Fp8Gradient) else gradient
        self.step_together([weight], [values.mul_(step.scale)], [moments], step)

    def step_together(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: Sequence[Sequence[Tensor]],
        step: Step,
    ) -> None:
        if any(mean.dtype != torch.float32 for mean, _ in moments):
            for weight, gradient, (mean, square) in zip(weights, gradients, moments, strict=True):
                wide = mean.float()
                self.step_together([weight], [gradient], [(wide, square)], step)
                mean.copy_(wide)
            return
        means, squares = zip(*moments, strict=True)
        # The function increments the counts. On a GPU the step reads them there.
        device = weights[0].device
        counts = torch.full((len(weights),), float(step.number - 1), device=device).unbind()
        adamw_of(
            list(weights),
            list(gradients),
            list(means),
            list(squares),
            [],
            list(counts),
            amsgrad=False,
            beta1=self._training.beta1,
            beta2=self._training.beta2,
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=self._training.eps,
            maximize=False,
            fused=device.type == "cuda",
        )

    def round_means(self, moments: Sequence[Tensor]) -> dict[str, Tensor]:
        square = moments[1]
        if square.ndim < 2:
            return {SQUARE: square.clone()}
        rows = square.flatten(1)
        return {SQUARE_ROWS: rows.mean(1), SQUARE_COLUMNS: rows.mean(0)}

    def moments_after_round(
        self, parameter: nn.Parameter, change: Tensor, means: Mapping[str, Tensor], every: int, step: Step
    ) -> list[Tensor]:
        training, square = self._training, _square(parameter, means)
        if step.lr == 0.0:  # of the last step of a schedule that ends at 0
            return [torch.zeros_like(change), square]
        mean = change / (step.lr * every)
        if parameter.ndim >= 2:
            mean.sub_(parameter, alpha=training.weight_decay)
        root = (square / (1 - training.beta2**step.number)).sqrt_().add_(training.eps)
        return [mean.mul_(root).mul_(1 - training.beta1**step.number), square]


def _square(parameter: nn.Parameter, means: Mapping[str, Tensor]) -> Tensor:
    """The second moment rebuilt from a round's means, in the parameter's shape."""
    if parameter.ndim < 2:
        return means[SQUARE].view(parameter.shape)
    rows, columns = means[SQUARE_ROWS], means[SQUARE_COLUMNS]
    mean = rows.mean()
    shares = torch.where(mean > 0, rows / mean, torch.zeros_like(rows))
    return torch.outer(shares, columns).view(parameter.shape)
