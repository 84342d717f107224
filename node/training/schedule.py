"""Learning rate and gradient clipping as functions of the step. This module imports no torch, since the
coordinator uses it."""

from collections.abc import Iterable
from math import cos, isfinite, pi, sqrt

from node.config.schema import TrainingSection
from wire.errors import NonFiniteError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 5
"""`wsd` decays over 1 / `DECAY_SHARE` of the steps by default."""


def learning_rate(step: int, training: TrainingSection, steps: int) -> float:
    """The learning rate: a linear warm-up to `lr`, then the schedule, which ends at `min_lr_ratio * lr` in
    the last step.

    `constant` stays at `lr`. `wsd` stays at it until its last `decay_steps` steps and then falls linearly.

    Args:
        step: counted from 0. The first step already has a rate above 0.
        steps: the number of optimizer steps in the whole run. Later steps stay at the minimum.
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.lr * (step + 1) / warmup
    if training.schedule == "constant":
        return training.lr
    start = warmup
    if training.schedule == "wsd":
        # The last step before the decay is the last one at `lr`.
        start = max(warmup, steps - 1 - (training.decay_steps or max(1, steps // DECAY_SHARE)))
    progress = min(1.0, max(0, step - start) / max(1, steps - 1 - start))
    if training.schedule == "cosine":
        share = training.min_lr_ratio + (1.0 - training.min_lr_ratio) * 0.5 * (1.0 + cos(pi * progress))
    else:
        share = 1.0 - (1.0 - training.min_lr_ratio) * progress
    return training.lr * share


def global_norm(squared_norms: Iterable[float]) -> float:
    """The gradient norm of the whole model from the squared norms of its units, in model order.

    The numbers are added one after the other: `sum` rounds differently from Python 3.12 on, and bits must not
    depend on that.
    """
    total = 0.0
    for squared_norm in squared_norms:
        total += squared_norm
    return sqrt(total)


def clip_coefficient(total_norm: float, clip: float) -> float:
    """The factor of every gradient that limits the global norm to `clip`; 1 if `clip` is 0.

    Raises:
        NonFiniteError: the norm is infinite or not a number, so the step must not be applied.
    """
    if not isfinite(total_norm):
        raise NonFiniteError(
            f"the global gradient norm is {total_norm}, expected a finite number; "
            "lower [training] lr or raise warmup_steps"
        )
    if clip == 0.0 or total_norm <= clip:
        return 1.0
    return clip / total_norm
