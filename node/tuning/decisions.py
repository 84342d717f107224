"""When a change pays, and what each step has by the decisions on record, which a replay follows. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Generic, Self, TypeVar

from wire.errors import ConfigError

Decided = TypeVar("Decided")


GAIN = 0.10
"""A change pays only if a step is expected to take this much less time."""
PAYBACK_STEPS = 200
"""What a change saves in so many steps, or in those that are left, is more than it costs."""
WATCHED = 8
"""Steps by which a decision is judged."""
WORSE = 0.05
"""One that made steps this much longer is taken back."""


def pays(saved: float, now: float, *, cost: float, steps_left: int) -> bool:
    """Whether to change what makes a step take `now` seconds, for one that takes `saved` less.

    `cost`: seconds that the change takes.
    """
    return saved > 0.0 and saved >= GAIN * now and saved * min(steps_left, PAYBACK_STEPS) > cost


class Trial(Generic[Decided]):
    """A decision in use, judged by some steps at a time: a single one may be noise."""

    def __init__(self, current: Decided) -> None:
        self.current = current
        self._before: tuple[Decided, float] | None = None
        """The decision before, and the usual seconds with it, if they are compared."""
        self._seconds: list[float] = []

    def step_done(self, seconds: float, watched: int = WATCHED) -> float | None:
        """A step took so long. What is usual with the current decision, once `watched` steps show it."""
        self._seconds.append(seconds)
        if len(self._seconds) < watched:
            return None
        # The first one compiles, or finds its links' rates.
        usual = median(self._seconds[1:])
        self._seconds.clear()
        return usual

    def judged(self) -> tuple[Decided, float] | None:
        """The decision before and its seconds, if there is one to compare with; once for each decision."""
        before, self._before = self._before, None
        return before

    def change(self, decided: Decided, usual: float | None) -> None:
        """Use another. `usual`: seconds with the present one, to compare with, if at all."""
        self._before = None if usual is None else (self.current, usual)
        self.current = decided
        self._seconds.clear()


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
        return next((decided for first, decided in reversed(self.changes) if first <= step), None)

    @property
    def newest(self) -> int:
        """The first step of the newest decision; 0 without one."""
        return self.changes[-1][0] if self.changes else 0

    def instead(self, step: int, decided: Decided) -> Self:
        """With this from `step` on, in place of all that followed."""
        kept = (change for change in self.changes if change[0] < step)
        return replace(self, changes=(*kept, (step, decided)))
