"""The loss scale of a run that computes in float16, step by step. All functions are pure and need no torch.

float16 cannot represent numbers below 6e-8, and most gradients are smaller; numbers above 65,504 are
infinite. So the loss is multiplied by a power of two, which changes only exponents, and gradients are divided
by it when they are applied (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). A step whose gradients
are not finite is skipped: no weight changes, and the scale halves. After `training.loss_scale_steps` steps
that were not skipped, it doubles. The scale of a step depends only on which steps before it were skipped. So
it is part of the run's state, and replays and resumed runs have the same scale.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from node.config.schema import TrainingSection

LEAST = 1.0
"""The lowest scale. Values that are not finite at this scale are no overflow, so the run looks for another
cause."""
MOST = 2.0**24
BACK_OFF = 0.5
"""The factor of the scale after a skipped step."""
GROWTH = 2.0
"""The factor of the scale after enough steps that were not skipped."""
SKIPPED = 0.0
"""A clip coefficient that means that the step is skipped."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    factor: float
    steps: int = 0
    """The number of steps taken since the scale last changed."""

    def after(self, *, skipped: bool, every: int) -> "LossScale":
        """The scale of the next step. It doubles after `every` steps that are taken."""
        if skipped:
            return LossScale(factor=max(LEAST, self.factor * BACK_OFF))
        if self.steps + 1 == every:
            return LossScale(factor=min(MOST, self.factor * GROWTH))
        return replace(self, steps=self.steps + 1)


ScaleOf = Callable[[int], LossScale | None]
"""Maps a step to its scale; to None in a run that computes in another precision."""


def no_scale(step: int) -> None:
    """The `ScaleOf` of a run in another precision."""


class LossScales:
    """The loss scales of a run's steps."""

    def __init__(
        self,
        training: TrainingSection,
        skipped: Iterable[int] = (),
        known: tuple[int, LossScale] | None = None,
    ) -> None:
        """
        Args:
            skipped: the steps that are on record as skipped.
            known: a step and its scale from a snapshot. Earlier steps may not be on record.
        """
        self._every = training.loss_scale_steps
        first = LossScale(factor=training.loss_scale)
        self._known = [(0, first), *([known] if known else [])]
        self._newest = self._known[0]
        """The step that was asked for last, and its scale."""
        self._skipped = frozenset(skipped)

    def at(self, step: int) -> LossScale:
        """The scale of a step. All steps before it must be committed."""
        begin, scale = max(
            (entry for entry in (*self._known, self._newest) if entry[0] <= step), key=lambda entry: entry[0]
        )
        for before in range(begin, step):
            scale = scale.after(skipped=before in self._skipped, every=self._every)
        self._newest = step, scale
        return scale

    def overflows(self, step: int) -> bool:
        """Whether gradients of this step that are not finite are due to the scale."""
        return self.at(step).factor > LEAST

    def words(self, step: int) -> str:
        """A line for the operator about this step, which is skipped."""
        factor = self.at(step + 1).factor
        return f"step {step + 1} is skipped: gradients overflow; the loss's factor is {factor:g} from now on"

    def committed(self, step: int, *, skipped: bool) -> None:
        """Record that a step is committed, for the first time or again after a return to a snapshot."""
        self._skipped = self._skipped | {step} if skipped else self._skipped - {step}
        if self._newest[0] > step:
            self._newest = self._known[0]


def loss_scales(
    training: TrainingSection, skipped: Iterable[int] = (), known: tuple[int, LossScale] | None = None
) -> LossScales | None:
    """The loss scales of a run that computes in float16; else None. The arguments are as for `LossScales`."""
    return LossScales(training, skipped, known) if training.precision == "float16" else None
