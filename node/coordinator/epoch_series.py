"""The epochs of one run, one after the other: their numbers, and what the next one begins with. Pure."""

from node.coordinator.epoch import Committed, Epoch, Phase, StepPlan
from node.coordinator.plan import Past

PLACING_SECONDS = 90.0
"""A node that lives but does not say within this time what it holds is stuck. It exceeds what a node allows
itself to end the epoch before."""


class EpochSeries:
    """One epoch at a time, or none."""

    def __init__(self, past: Past, step_plan: StepPlan) -> None:
        self.current: Epoch | None = None
        self.ended: Epoch | None = None
        """The newest that is over."""
        self._step_plan = step_plan
        self._last_number = past.last_epoch
        self._committed = past.committed
        self._newest_state = past.committed.step + 1 if past.committed is not None else 0
        self._branches: set[int] | None = None
        """That of the newest commit, and those that began since; unknown before a commit is heard of."""
        self._windows: tuple[int, ...] = ()
        """The newest plan for the links; empty before there is one."""
        self._began = 0.0

    def begin(
        self,
        seats: tuple[str, ...],
        addresses: tuple[str, ...],
        *,
        newest_snapshot: int,
        suspect_step: int | None,
        now: float,
    ) -> Epoch:
        """The next epoch. Its nodes are about to be told their places."""
        self._last_number += 1
        self._began = now
        if self._branches is not None and self.ended is not None and self.ended.branch is not None:
            self._branches.add(self.ended.branch)
        self.current = Epoch(
            number=self._last_number,
            seats=seats,
            addresses=addresses,
            newest_snapshot=newest_snapshot,
            newest_state=self._newest_state,
            committed=self._committed,
            branches=None if self._branches is None else frozenset(self._branches),
            suspect_step=suspect_step,
            plan=self._step_plan,
        )
        if len(self._windows) == len(seats) - 1:
            self.current.planned_windows = self._windows
        return self.current

    def end(self) -> Epoch | None:
        """The epoch is over; gives it, if there is one."""
        over, self.current = self.current, None
        self.ended = over or self.ended
        return over

    def committed(self, committed: Committed) -> None:
        """A step of the epoch is committed."""
        self._committed = committed
        self._branches = None if committed.branch is None else {committed.branch}
        self._newest_state = max(self._newest_state, committed.step + 1)

    def plan_windows(self, number: int, windows: tuple[int, ...]) -> None:
        """If this epoch is on: its next step has these windows, and later epochs of as many stages too."""
        if self.current is not None and self.current.number == number:
            self._windows = self.current.planned_windows = windows

    def unplaced(self, now: float) -> dict[str, str]:
        """Nodes that have had their time to take their places, and have not; the line for each."""
        epoch = self.current
        if epoch is None or epoch.phase is not Phase.PLACING or now - self._began <= PLACING_SECONDS:
            return {}
        line = f"it did not take its place within {PLACING_SECONDS:g} s: start it again"
        return {node: line for node in epoch.seats if node not in epoch.answered}
