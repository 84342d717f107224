"""The arithmetic of each update rule that `node.model.optimizers` declares."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_of

from kernels.fp8.ops import adamw_step
from kernels.fp8.reference import AdamWStep, Fp8Gradient, Moment, unpack_gradient
from node.config.schema import TrainingSection
from node.model.optimizers import SQUARE, SQUARE_COLUMNS, SQUARE_ROWS, AdamWRule
from node.model.shards import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step does to a parameter."""

    lr: float
    weight_decay: float
    number: int
    """Counted from 1."""
    scale: float = 1.0
    """Gradients are multiplied by it first."""
    salt: int = 0
    """32 bits, for stochastic rounding of weights in bfloat16."""
    first: int = 0
    """The first element of a piece in its flat parameter, at a block's begin. It decides the random bits."""
    shard: Shard | None = None
    """Set if other ranks hold the rest of the parameter."""


class Turn(NamedTuple):
    """One parameter's arguments of `Updates.step`."""

    weight: Tensor
    gradient: Tensor | Fp8Gradient
    moments: Sequence[Tensor]
    step: Step


class Updates(ABC):
    """Steps parameters by one rule, in place. It keeps nothing of them between steps."""

    @abstractmethod
    def step(
        self,
        weight: Tensor,
        gradient: Tensor | Fp8Gradient,
        moments: Sequence[Tensor],
        step: Step,
    ) -> None:
        """Step one parameter, or a piece of it.

        Args:
            weight: float32, or bfloat16 where the moments are in e4m3; a piece is flat.
            gradient: of the weight's shape, float32, which may be changed, or e4m3 codes.
            moments: the tensors of all moments in the order of the rule's `keys`.
        """

    def step_each(self, turns: Sequence[Turn]) -> None:
        """`step` of whole parameters that no other rank has a part of, with the same bits."""
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
        """The same of many whole parameters in float32; gradients are scaled already."""

    @abstractmethod
    def round_means(self, moments: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copies of what rounds average of a parameter's moments over groups, by the kinds of the rule's
        `round_means`."""

    @abstractmethod
    def moments_after_round(
        self, parameter: nn.Parameter, change: Tensor, means: Mapping[str, Tensor], every: int, step: Step
    ) -> list[Tensor]:
        """A parameter's moments that would have taken a round's mean change in `every` equal steps.

        Args:
            parameter: as the round began with it.
            means: over all groups, flat.
            step: the last of the round.
        """


class AdamW(Updates):
    """torch's AdamW with moments in float32, by its function: the first of its optimizers that a process
    makes imports torch's compiler, which takes seconds. On a GPU in one pass over all state, by its own
    kernel. With moments in e4m3 by `kernels.fp8`."""

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
        # The function counts them up. On a GPU the step reads them there.
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
    """The second moment that a round's means stand for, in the parameter's shape."""
    if parameter.ndim < 2:
        return means[SQUARE].view(parameter.shape)
    rows, columns = means[SQUARE_ROWS], means[SQUARE_COLUMNS]
    mean = rows.mean()
    shares = torch.where(mean > 0, rows / mean, torch.zeros_like(rows))
    return torch.outer(shares, columns).view(parameter.shape)
