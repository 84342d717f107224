"""What each step has by decisions on record, for replays: a step always has what it first ran with. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, Self, TypeVar

from wire.errors import ConfigError

Decided = TypeVar("Decided")


@dataclass(frozen=True)
class StepHistory(Generic[Decided]):
    """Decisions, each from a step on, until the next. Raises ConfigError for steps that do not ascend."""

    changes: tuple[tuple[int, Decided], ...] = ()
    """The first step of each decision, counted from 0, in ascending order."""

    def __post_init__(self) -> None:
        if any(step >= later for (step, _), (later, _) in pairwise(self.changes)):
            raise ConfigError("the plans on record must begin at ascending steps")

    def at(self, step: int) -> Decided | None:
        """What step `step` has; None before the first decision."""
        return next((made for first, made in reversed(self.changes) if first <= step), None)

    @property
    def newest(self) -> int:
        """The first step of the newest decision; 0 without one."""
        return self.changes[-1][0] if self.changes else 0

    def instead(self, step: int, decided: Decided) -> Self:
        """With this from `step` on, in place of all that followed."""
        kept = (change for change in self.changes if change[0] < step)
        return replace(self, changes=(*kept, (step, decided)))
