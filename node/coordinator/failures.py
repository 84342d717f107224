"""What becomes of a step that failed: it is run again, once without compression, or the run ends. Pure."""

from dataclasses import dataclass

from node.coordinator.actions import AbortKind
from node.coordinator.epoch import Epoch

MAX_RETRIES = 3
"""Attempts at one step that may fail, with nobody dead, before the run stops."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong with the epoch, and so why it ends."""

    kind: AbortKind
    reason: str
    note: str = ""
    """A line for the operator, if there is more to say."""
    saves: bool = True
    """If the run ends here, what its stages hold is worth a snapshot."""


@dataclass(frozen=True, kw_only=True)
class RunAgain(Verdict):
    """The step runs again, in a new epoch."""


@dataclass(frozen=True, kw_only=True)
class GiveUp(Verdict):
    """The run ends."""

    why: str
    remedy: str
    """What the operator can do."""


class Failures:
    """Judges the failures of one run, as they come."""

    def __init__(self) -> None:
        self._retries = 0
        self._suspect: tuple[int, str] | None = None
        """The step that was not finite, and what of it."""

    @property
    def suspect_step(self) -> int | None:
        """The step that is to be run without compression."""
        return self._suspect[0] if self._suspect is not None else None

    def failed(self, epoch: Epoch, node_id: str, message: str) -> RunAgain | GiveUp:
        """A stage could not do its part of the step, and nobody is dead."""
        self._retries += 1
        reason = f"stage {epoch.seats.index(node_id)}: {message}"
        if self._retries > MAX_RETRIES:
            return GiveUp(
                kind=AbortKind.FAILED,
                reason=reason,
                note=f"step {epoch.step + 1} failed {self._retries} times in a row: the run ends once what "
                "its stages hold is on disk",
                why=f"step {epoch.step + 1} failed {self._retries} times in a row, last at {reason}",
                remedy="mend that, then resume",
            )
        return RunAgain(kind=AbortKind.FAILED, reason=reason)

    def seat_given_up(self, epoch: Epoch, culprit: str, verdict: GiveUp) -> RunAgain:
        """Instead of the run's end: a spare takes this node's stage, and has as many attempts."""
        self._retries = 0
        return RunAgain(
            kind=verdict.kind,
            reason=verdict.reason,
            note=f"{verdict.why}: a spare takes stage {epoch.seats.index(culprit)} from node {culprit}",
        )

    def not_finite(self, epoch: Epoch, node_id: str, what: str) -> RunAgain | GiveUp:
        """First time: the same step again without compression. Second time: the run diverges."""
        what = f"{what} at stage {epoch.seats.index(node_id)} is not finite"
        if epoch.uncompressed:
            # No snapshot: of a run that diverges, older states are worth more than the newest.
            return GiveUp(
                kind=AbortKind.NOT_FINITE,
                reason=what,
                saves=False,
                why=f"step {epoch.step + 1} was not committed: {what}, with uncompressed links too, "
                "so the run diverges",
                remedy="lower training.lr, then resume",
            )
        self._suspect = (epoch.step, what)
        return RunAgain(
            kind=AbortKind.NOT_FINITE,
            reason=what,
            note=f"step {epoch.step + 1} is not committed: {what}; running it again with uncompressed links",
        )

    def finite_uncompressed(self, epoch: Epoch) -> GiveUp:
        """The step that was not finite is, without compression."""
        _, what = self._suspect or (epoch.step, "a tensor")
        return GiveUp(
            kind=AbortKind.NOT_FINITE,
            reason=what,
            saves=False,
            why=f"step {epoch.step + 1} was not committed: {what}; with uncompressed links it is finite, "
            "so the codecs are the cause",
            remedy="use wider codecs in [pipeline], then resume",
        )

    def committed(self, step: int) -> None:
        """The votes of every stage on `step` were in order."""
        if self.suspect_step == step:
            self._suspect = None

    def forgive(self) -> None:
        """Count anew: a step is done, or a node is gone, whose own end the failures were."""
        self._retries = 0
