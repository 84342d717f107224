"""What becomes of a step that failed: it is run again, once without compression, or the run ends. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from node.coordinator.actions import AbortKind
from node.coordinator.epoch import Epoch, Phase
from node.coordinator.stage_assignment import Candidate
from wire.messages import FailureKind, StepFailed

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
        reason = f"stage {epoch.hosts.index(node_id)}: {message}"
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

    def stage_given_up(self, epoch: Epoch, culprit: str, verdict: GiveUp) -> RunAgain:
        """Instead of the run's end: a spare takes this node's stage, and has as many attempts."""
        self._retries = 0
        return RunAgain(
            kind=verdict.kind,
            reason=verdict.reason,
            note=f"{verdict.why}: a spare takes stage {epoch.hosts.index(culprit)} from node {culprit}",
        )

    def not_finite(self, epoch: Epoch, node_id: str, what: str) -> RunAgain | GiveUp:
        """First time: the same step again without compression. Second time: the run diverges."""
        what = f"{what} at stage {epoch.hosts.index(node_id)} is not finite"
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


class Ending:
    """Of one run. Once it is due, what stages hold goes to disk, if it can be had, and the run stops."""

    def __init__(self) -> None:
        self._tried = False
        self._asked: str | None = None
        self._given_up: GiveUp | None = None

    @property
    def due(self) -> bool:
        return self._asked is not None or self._given_up is not None

    def ask(self, reason: str) -> None:
        """The operator wants it."""
        self._asked = self._asked or reason

    def give_up(self, verdict: GiveUp) -> None:
        """A failure ends the run."""
        self._given_up = verdict

    def saves_once(self, verdict: Verdict) -> bool:
        """Whether the nodes of the epoch that failed are placed again, to hand in what they hold: once."""
        if not self.due or self._tried or not verdict.saves:
            return False
        self._tried = True
        return True

    def last_words(self, kept: str) -> tuple[str, bool]:
        """Why the run ends, and whether it failed. `kept`: what of it is on disk."""
        if self._given_up is not None:
            return f"{self._given_up.why}; {kept}: {self._given_up.remedy}", True
        return self._asked or "", False


MAX_STRIKES = 3
"""Complaints of its neighbours about a node before it is quarantined."""
MAX_ALONE = 2
"""Nodes that are quarantined on the word of one neighbour alone; at the next it is out itself."""


def neighbours(epoch: Epoch, node_id: str) -> set[int]:
    """The stages that this one's node may have links to; the first and the last may have one too."""
    stage, stages = epoch.hosts.index(node_id), len(epoch.hosts)
    around = {stage - 1, stage + 1, *({0, stages - 1} if stage in (0, stages - 1) else ())} - {stage}
    return around & set(range(stages))


class Complaints:
    """Strikes against nodes: one an epoch is enough, whoever complains.

    Nobody but its neighbours can tell a node that breaks the protocol from one that is slandered. So one word
    is enough against a node or two, but who finds fault with every neighbour is the one at fault.
    """

    def __init__(self) -> None:
        self.quarantined: dict[str, str] = {}
        """Why nobody works with a node any more."""
        self._strikes: dict[str, int] = {}
        self._struck: dict[str, int] = {}
        """The epoch of each node's newest strike."""
        self._accusers: dict[str, set[str]] = {}
        """Who has complained of each node."""
        self._alone: dict[str, list[str]] = {}
        """The nodes that are quarantined on this one's word alone."""

    def hear(self, epoch: Epoch, node_id: str, message: StepFailed) -> str | None:
        """Take what a stage of `epoch` says; gives the node that is quarantined for it."""
        if message.kind is not FailureKind.PEER or node_id not in epoch.hosts:
            return None
        # Only a neighbour can know.
        if message.peer_stage not in neighbours(epoch, node_id):
            return None
        culprit = epoch.hosts[message.peer_stage]
        accusers = self._accusers.setdefault(culprit, set())
        accusers.add(node_id)
        if self._struck.get(culprit, 0) >= epoch.number:
            return None
        self._struck[culprit] = epoch.number
        self._strikes[culprit] = self._strikes.get(culprit, 0) + 1
        if self._strikes[culprit] < MAX_STRIKES:
            return None
        if len(accusers) == 1:
            others = self._alone.setdefault(node_id, [])
            if len(others) >= MAX_ALONE:
                del self._strikes[culprit], self._accusers[culprit]
                named = " and ".join(others)
                self.quarantined[node_id] = f"it alone found fault with {named}, and then with {culprit}"
                return node_id
            others.append(culprit)
        self.quarantined[culprit] = message.message
        return culprit


class Blame:
    """What is held against nodes since a step was last done."""

    def __init__(self) -> None:
        self._replaced: set[str] = set()
        """They gave up a stage for it."""
        self._heeded: set[str] = set()
        """A neighbour gave up its stage on their word."""
        self._named: Counter[str] = Counter()
        """In how many failures, since the newest change of hosts, each had a part."""
        self._at_work: frozenset[str] = frozenset()
        """Who did the newest step that is done."""

    def done(self, nodes: Collection[str]) -> None:
        """These nodes have done a step."""
        self._at_work = frozenset(nodes)
        self._replaced.clear()
        self._heeded.clear()
        self._named.clear()

    def suspects(self, epoch: Epoch, node_id: str, failure: StepFailed) -> Sequence[str]:
        """Take what a stage says of a failure: who may be at fault, the likeliest first.

        Of a link the other end, unless there is more against this one: on its word another has gone already,
        it is new where the other is not, or other failures were of its links too.
        """
        other = _other_end(epoch, node_id, failure)
        ends = [node_id] if other is None else [other, node_id]
        self._named.update(ends)
        return sorted(
            ends, key=lambda node: (node not in self._heeded, node in self._at_work, -self._named[node])
        )

    def take_stage(self, culprit: str, *, by: str) -> None:
        """The node gives up its stage, for what `by` said."""
        self._replaced.add(culprit)
        if by != culprit:
            self._heeded.add(by)
        self._named.clear()

    def blameless(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that have not given up a stage."""
        return [candidate for candidate in candidates if candidate.node_id not in self._replaced]


def _other_end(epoch: Epoch, node_id: str, failure: StepFailed) -> str | None:
    """Who is at the other end of the link that failed, if it was one of a neighbour's."""
    if failure.kind not in (FailureKind.LINK, FailureKind.PEER):
        return None
    stage = failure.peer_stage
    return epoch.hosts[stage] if stage in neighbours(epoch, node_id) else None


LATE_SECONDS = 900.0
"""Behind the first answer; longer than what nodes and their neighbours allow."""
LATE_TIMES = 3.0
"""As often as the first answer itself took: the stages of a slow pipeline answer one after the other."""


class Stragglers:
    """Looks at each step, first its votes and then its end, since somebody has answered."""

    def __init__(self) -> None:
        self._at: tuple[int, int, Phase] | None = None
        self._began = 0.0
        self._first: float | None = None

    def look(self, epoch: Epoch | None, now: float) -> dict[str, str]:
        """Who is too late, and the line for each. Call it often: times count from when it is called."""
        at = (epoch.number, epoch.step, epoch.phase) if epoch is not None else None
        if at != self._at:
            self._at, self._began, self._first = at, now, None
        if epoch is None or epoch.phase not in (Phase.STEPPING, Phase.APPLYING) or not epoch.answered:
            return {}
        if self._first is None:
            self._first = now
        late = now - self._first
        if late <= max(LATE_SECONDS, LATE_TIMES * (self._first - self._began)):
            return {}
        line = f"it did not end step {epoch.step + 1} within {late:.0f} s after another did: start it again"
        return {node: line for node in epoch.hosts if node not in epoch.answered}
