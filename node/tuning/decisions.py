"""When a change pays, and which decisions on record apply to each step, so that a replay follows them. All
functions are pure."""

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Generic, Self, TypeVar

from wire.errors import ConfigError

Decided = TypeVar("Decided")


GAIN = 0.10
"""A change pays only if it is expected to shorten a step by at least this share."""
PAYBACK_STEPS = 200
"""The savings over this many steps, or over those that are left, must exceed the cost of a change."""
WATCHED = 8
"""The number of steps by which a decision is judged."""
WORSE = 0.05
"""A decision that made steps this much longer is reverted."""


def pays(saved: float, now: float, *, cost: float, steps_left: int) -> bool:
    """Whether to make a change after which a step of `now` seconds takes `saved` less.

    Args:
        cost: the seconds that the change takes.
    """
    return saved > 0.0 and saved >= GAIN * now and saved * min(steps_left, PAYBACK_STEPS) > cost


class Trial(Generic[Decided]):
    """A decision in use. It is judged by several steps at a time, because a single one may be noise."""

    def __init__(self, current: Decided) -> None:
        self.current = current
        self._before: tuple[Decided, float] | None = None
        """The previous decision and the usual seconds with it, if they are to be compared."""
        self._seconds: list[float] = []

    def step_done(self, seconds: float, watched: int = WATCHED) -> float | None:
        """Record a step's time. Returns the usual seconds with the current decision once `watched` steps show
        them."""
        self._seconds.append(seconds)
        if len(self._seconds) < watched:
            return None
        # The first step may compile, or find its links' rates.
        usual = median(self._seconds[1:])
        self._seconds.clear()
        return usual

    def judged(self) -> tuple[Decided, float] | None:
        """The previous decision and its seconds, if there is one to compare with. Each is returned once."""
        before, self._before = self._before, None
        return before

    def change(self, decided: Decided, usual: float | None) -> None:
        """Use another decision. `usual` are the seconds with the present one; None if they are not to be
        compared."""
        self._before = None if usual is None else (self.current, usual)
        self.current = decided
        self._seconds.clear()


@dataclass(frozen=True)
class StepHistory(Generic[Decided]):
    """Decisions, each valid from a step until the next decision.

    Raises:
        ConfigError: the steps do not ascend.
    """

    changes: tuple[tuple[int, Decided], ...] = ()
    """The first step of each decision, counted from 0, in ascending order."""

    def __post_init__(self) -> None:
        if any(step >= later for (step, _), (later, _) in pairwise(self.changes)):
            raise ConfigError("the plans on record must begin at ascending steps")

    def at(self, step: int) -> Decided | None:
        """The decision for a step; None before the first decision."""
        return next((decided for first, decided in reversed(self.changes) if first <= step), None)

    @property
    def newest(self) -> int:
        """The first step of the newest decision; 0 without one."""
        return self.changes[-1][0] if self.changes else 0

    def instead(self, step: int, decided: Decided) -> Self:
        """A history with this decision from `step` on, which replaces all later ones."""
        kept = (change for change in self.changes if change[0] < step)
        return replace(self, changes=(*kept, (step, decided)))
