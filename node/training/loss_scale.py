"""The factor of the loss in a run that computes in float16, step by step. Pure, torch-free.

Numbers below 6e-8 are 0 in float16, and most gradients are smaller; above 65,504 they are infinite. So the
loss is multiplied by a power of two, which changes no bits but exponents, and gradients are divided by it
again where they are applied (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). A step whose gradients
are not finite is skipped: no weight changes, and the factor halves. After `training.loss_scale_steps` steps
that were not, it doubles. The factor of a step follows from which steps before it were skipped alone, so it
is part of the run's state: replays and resumed runs have the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from node.config.schema import TrainingSection

LEAST = 1.0
"""At this factor what is not finite is no overflow of the scale: the run looks for its cause."""
MOST = 2.0**24
BACK_OFF = 0.5
GROWTH = 2.0
SKIPPED = 0.0
"""In place of a clip coefficient: the step is skipped."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """As it is for one step."""

    factor: float
    steps: int = 0
    """Taken since it last changed."""

    def after(self, *, skipped: bool, every: int) -> "LossScale":
        """For the next step. `every`: it doubles after so many that are taken."""
        if skipped:
            return LossScale(factor=max(LEAST, self.factor * BACK_OFF))
        if self.steps + 1 == every:
            return LossScale(factor=min(MOST, self.factor * GROWTH))
        return replace(self, steps=self.steps + 1)


ScaleOf = Callable[[int], LossScale | None]
"""Step -> its scale; None in a run that computes in another precision."""


def no_scale(step: int) -> None:
    """`ScaleOf` of a run in another precision."""


class LossScales:
    """The factors of a run's steps."""

    def __init__(
        self,
        training: TrainingSection,
        skipped: Iterable[int] = (),
        known: tuple[int, LossScale] | None = None,
    ) -> None:
        """
        Args:
            skipped: the steps on record that were.
            known: a step and its scale, as a snapshot has it; earlier ones may not be on record.
        """
        self._every = training.loss_scale_steps
        first = LossScale(factor=training.loss_scale)
        self._known = [(0, first), *([known] if known else [])]
        self._newest = self._known[0]
        """The step that was asked for last, and its scale."""
        self._skipped = frozenset(skipped)

    def at(self, step: int) -> LossScale:
        """Of a step, all steps before which are committed."""
        begin, scale = max(
            (one for one in (*self._known, self._newest) if one[0] <= step), key=lambda one: one[0]
        )
        for before in range(begin, step):
            scale = scale.after(skipped=before in self._skipped, every=self._every)
        self._newest = step, scale
        return scale

    def overflows(self, step: int) -> bool:
        """Whether gradients of this step that are not finite are the factor's fault."""
        return self.at(step).factor > LEAST

    def words(self, step: int) -> str:
        """A line for the operator on this step, which is skipped."""
        factor = self.at(step + 1).factor
        return f"step {step + 1} is skipped: gradients overflow; the loss's factor is {factor:g} from now on"

    def committed(self, step: int, *, skipped: bool) -> None:
        """The step is committed, for the first time or again after a return to a snapshot."""
        self._skipped = self._skipped | {step} if skipped else self._skipped - {step}
        if self._newest[0] > step:
            self._newest = self._known[0]


def loss_scales(
    training: TrainingSection, skipped: Iterable[int] = (), known: tuple[int, LossScale] | None = None
) -> LossScales | None:
    """Those of a run, if it computes in float16; arguments as for `LossScales`."""
    return LossScales(training, skipped, known) if training.precision == "float16" else None
