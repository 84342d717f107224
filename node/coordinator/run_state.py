"""What the state machine of a run consists of, and what may be known of it from outside. Pure."""

from collections.abc import Mapping

from node.coordinator.blame import Blame
from node.coordinator.complaints import Complaints
from node.coordinator.ending import Ending
from node.coordinator.epoch import Epoch, StepPlan
from node.coordinator.epoch_series import EpochSeries
from node.coordinator.failures import Failures
from node.coordinator.laggards import Laggards
from node.coordinator.plan import Past, RunPlan
from node.coordinator.roster import Member, Roster
from node.coordinator.seating import Seating
from node.coordinator.snapshot_schedule import SnapshotSchedule
from wire.messages import Finish


class RunState:
    """Changed by `node.coordinator.machine.RunMachine` alone."""

    def __init__(self, plan: RunPlan, step_plan: StepPlan, past: Past) -> None:
        self.plan = plan
        self.stopped = False
        self._roster = Roster(silent_seconds=plan.silent_seconds, reconnect_seconds=plan.reconnect_seconds)
        self._snapshots = SnapshotSchedule(every=plan.snapshot_every, newest=past.newest_snapshot)
        self._failures = Failures()
        self._blame = Blame()
        self._epochs = EpochSeries(past, step_plan)
        self._seating = Seating(
            stages=plan.stages,
            min_stages=plan.min_stages,
            regroup_seconds=plan.regroup_seconds,
            stage_bytes=plan.stage_bytes,
            sharing=plan.sharing,
            previous=past.seats,
        )
        self._complaints = Complaints()
        self._laggards = Laggards()
        self._ending = Ending()
        self._growing = False
        self._unseen = 0.0
        """Seconds of the epoch in which nobody could be heard."""
        self.goodbye = Finish(reason="the run is over", failed=False)
        """What nodes hear once the run is."""

    @property
    def epoch(self) -> Epoch | None:
        """The placement that is on, if one is."""
        return self._epochs.current

    @property
    def members(self) -> Mapping[str, Member]:
        """Who is in the run, in the order in which they came."""
        return self._roster.members

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Nodes that are shut out for what their neighbours said, and what that was."""
        return self._complaints.quarantined

    @property
    def newest_snapshot(self) -> int:
        """The newest one that is complete and on disk; 0 before there is one."""
        return self._snapshots.newest
