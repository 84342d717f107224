"""One epoch after another: what each takes over from those before it. Pure."""

from collections.abc import Hashable, Sequence

from node.run_state.audits import Auditor
from node.run_state.epoch import Committed, Epoch, Phase, StepPlan
from node.run_state.grid import ONE_ROW, Groups
from node.run_state.run_plan import Past, RunPlan
from node.run_state.votes import VoteHistory

PLACING_SECONDS = 90.0
"""A node that does not say within this time what state it holds is stuck. Longer than a node may take to end
the epoch before."""


class EpochSeries:
    """One epoch at a time, or none."""

    def __init__(self, plan: RunPlan, past: Past, step_plan: StepPlan, auditor: Auditor) -> None:
        committed = past.committed
        self._neighbours = plan.neighbours
        self._auditor = auditor
        self._history = VoteHistory(plan.unit_numbers, past.newest, plan.rounds_from)
        for step, one in past.later.items():
            self._history.on_record(step, one.norms, one.loss)
        self.current: Epoch | None = None
        self.ended: Epoch | None = None
        """The newest that is over."""
        self._step_plan = step_plan
        self._scales = past.scales
        self._unlabelled = plan.unlabelled
        self._last_number = past.last_epoch
        self._committed = committed
        self._newest_state = committed.step + 1 if committed is not None else 0
        self._lineages: set[int] | None = None
        """That of the newest commit, and those that began since; unknown before the first commit."""
        self._windows: tuple[int, ...] = ()
        """The newest plan for the links; empty before there is one."""
        self._windows_of = (0, 0)
        """Nodes and rows that it was made for."""
        self._began = 0.0
        self._left: set[int] = set()
        """Lineages of states that are not the run's."""

    def begin(
        self,
        hosts: tuple[str, ...],
        addresses: tuple[str, ...],
        *,
        newest_snapshot: int,
        suspect_step: int | None,
        now: float,
        groups: Groups = ONE_ROW,
        kinds: Sequence[Hashable] = (),
    ) -> Epoch:
        """The next epoch. Its nodes are about to receive their places."""
        self._last_number += 1
        self._began = now
        if self._lineages is not None and self.ended is not None and self.ended.lineage is not None:
            self._lineages.add(self.ended.lineage)
        self.current = Epoch(
            number=self._last_number,
            hosts=hosts,
            addresses=addresses,
            newest_snapshot=newest_snapshot,
            newest_state=self._newest_state,
            committed=self._committed,
            lineages=None if self._lineages is None else frozenset(self._lineages),
            suspect_step=suspect_step,
            plan=self._step_plan,
            neighbours=self._neighbours,
            history=self._history,
            groups=groups,
            auditor=self._auditor,
            kinds=kinds,
            scales=self._scales,
        )
        self.current.left = frozenset(self._left)
        self.current.unlabelled = self._unlabelled
        if (len(hosts), len(groups)) == self._windows_of:
            self.current.planned_windows = self._windows
        return self.current

    def leave(self) -> None:
        """No later epoch goes on from what the current one's nodes hold."""
        if self.current is not None and self.current.lineage is not None:
            self._left.add(self.current.lineage)

    def end(self) -> Epoch | None:
        """The epoch is over; gives it, if there is one."""
        over, self.current = self.current, None
        self.ended = over or self.ended
        return over

    def committed(self, committed: Committed) -> None:
        """A step of the epoch is committed."""
        self._committed = committed
        self._lineages = None if committed.lineage is None else {committed.lineage}
        self._newest_state = max(self._newest_state, committed.step + 1)

    def plan_windows(self, number: int, windows: tuple[int, ...]) -> None:
        """If this epoch is on: its next step has these windows, and later epochs of as many stages too."""
        if self.current is not None and self.current.number == number:
            self._windows = self.current.planned_windows = windows
            self._windows_of = len(self.current.hosts), self.current.rows

    def unplaced(self, now: float) -> dict[str, str]:
        """Nodes that have had their time to take their places, and have not; the line for each."""
        epoch = self.current
        if epoch is None or epoch.phase is not Phase.PLACING or now - self._began <= PLACING_SECONDS:
            return {}
        line = f"it did not take its place within {PLACING_SECONDS:g} s: start it again"
        return {node: line for node in epoch.hosts if node not in epoch.answered}
