"""What a run has to do between two steps, asked without doing it. Pure.

Most steps follow the one before at once: then the commit of one carries the begin of the next, and a vote for
that says that the commit was applied. Where anything is to be done in between (a snapshot, a measurement, the
end of the epoch, nodes that enter) the run waits until all stages have said `Applied`.
"""

from collections.abc import Callable, Sequence

from node.run_state.codec_control import CodecControl
from node.run_state.epoch import Epoch, Phase
from node.run_state.failures import Ending
from node.run_state.grid import GroupSharing
from node.run_state.held_out import HeldOutSchedule
from node.run_state.membership import Roster
from node.run_state.newcomers import Newcomers
from node.run_state.run_plan import RunPlan
from node.run_state.snapshot_schedule import SnapshotSchedule
from node.run_state.stage_assignment import Candidate


class BetweenSteps:
    """Of one run. Arguments `step` are the step that runs next if nothing else is to be done."""

    def __init__(
        self,
        plan: Callable[[], RunPlan],
        roster: Roster,
        snapshots: SnapshotSchedule,
        newcomers: Newcomers,
        sharing: GroupSharing,
        codecs: CodecControl,
        measurements: HeldOutSchedule,
        ending: Ending,
    ) -> None:
        self._plan = plan
        self._roster = roster
        self._snapshots = snapshots
        self._newcomers = newcomers
        self._sharing = sharing
        self._codecs = codecs
        self._measurements = measurements
        self._ending = ending

    def is_to_end(self, epoch: Epoch) -> bool:
        """Whether the epoch ends once its state is on disk, because the run does or a stage leaves."""
        return self._ending.due or bool(self._roster.leaving(epoch.hosts))

    def may_go_on(self, epoch: Epoch, ahead: int = 0) -> bool:
        """Whether the epoch goes on to the step that is so many after its own."""
        stays = self._newcomers.awaited or self.is_to_end(epoch)
        return not stays and epoch.step + ahead < self._plan().total_steps

    def leaves_to_others(self, epoch: Epoch) -> bool:
        """Whether the epoch ends only for nodes that leave, and other rows hold the state of their stages."""
        stays = self._ending.due or self._newcomers.awaited or epoch.step >= self._plan().total_steps
        return not stays and self._roster.dispensable(epoch)

    def validation_due(self, epoch: Epoch, step: int) -> bool:
        """Whether the held-out loss of this step's state is to be measured."""
        plan = self._plan()
        if not plan.held_out or epoch.uncompressed or self.is_to_end(epoch) or self._snapshots.awaited:
            return False
        return self._measurements.due(step, plan.valid_every, plan.total_steps)

    def moves_groups(self, epoch: Epoch, step: int, steps_done: int) -> bool:
        """Whether it pays to give rows other groups or links other codecs; or a replay has other codecs."""
        left = self._plan().total_steps - step
        gains = self._sharing.may_gain(epoch.hosts, epoch.groups, steps=steps_done, left=left)
        free = self._snapshots.idle and self._roster.connected(epoch.hosts)
        return self._codecs.recorded_change(epoch, step) or (
            free and (gains or self._codecs.may_gain(epoch, step))
        )

    def holds_progress(self, epoch: Epoch) -> bool:
        """Whether the epoch may be past the newest snapshot, so that ending it now would lose work."""
        return epoch.phase in (Phase.STEPPING, Phase.APPLYING) or self._snapshots.newest < epoch.step

    def nothing(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> bool:
        """Whether the step after the one that was just committed may begin with the commit.

        Args:
            candidates: nodes that could host a stage.
            now: seconds, as for `SnapshotSchedule`.
        """
        step = epoch.step + 1
        return (
            self.may_go_on(epoch, ahead=1)
            and not self._snapshots.awaited
            and not self._snapshots.wanted_or_due(step, now)
            and not self.validation_due(epoch, step)
            and not self._newcomers.ready(step)
            and not self._newcomers.may_begin(epoch, candidates)
            and not self.moves_groups(epoch, step, epoch.steps_done + 1)
        )
