"""Learning rate and gradient clipping as functions of the step. Torch-free, for the coordinator."""

from collections.abc import Iterable
from math import cos, isfinite, pi, sqrt

from node.config.schema import TrainingSection
from wire.errors import NonFiniteError

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAY_SHARE = 5
"""`wsd` decays over one step in this many, by default."""


def learning_rate(step: int, training: TrainingSection, steps: int) -> float:
    """Linear warmup to `lr`, then the schedule, which ends at `min_lr_ratio * lr` in the last step.

    `constant` stays at `lr`; `wsd` does until its last `decay_steps` steps and then falls linearly.

    Args:
        step: counted from 0; the first step already moves.
        steps: optimizer steps in the whole run; later steps stay at the minimum.
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
    """The gradient norm of the whole model from those of its units, in model order.

    One plain addition after the other: `sum` rounds differently from Python 3.12 on, and bits must not depend
    on that.
    """
    total = 0.0
    for squared_norm in squared_norms:
        total += squared_norm
    return sqrt(total)


def clip_coefficient(total_norm: float, clip: float) -> float:
    """What every gradient is multiplied by so that the global norm is at most `clip`; 1 if `clip` is 0.

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
