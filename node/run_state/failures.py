"""Tracks nodes' faults, and decides what happens after a step has failed. Pure.

A failed step runs again. The cases differ in the nodes that run it:

- If a stage keeps failing, a spare takes it.
- A complaint between two nodes shows that one of them is wrong, but not which. One of them gives up its
  stage, so that the next complaint tells: a liar has then failed with several partners, an honest node with
  one.
- A value that is not finite, or far from those of recent steps, is computed again on another node. If it is
  then correct, the first node was at fault. If not, the links run uncompressed, which tells a fault of the
  codecs from divergence.
- A message that no correct node sends counts only against its sender.

No node's report shuts out another node, and neither do those of a minority.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import NamedTuple

from node.run_state.actions import AbortKind
from node.run_state.epoch import Epoch, Phase
from node.run_state.stage_assignment import Candidate
from node.run_state.votes import Implausible
from node.telemetry.clock import WAITS, TimeKind
from wire.messages import (
    Applied,
    AwaitedSums,
    FailureKind,
    NodeMessage,
    Placed,
    Ready,
    StepFailed,
    Validated,
    Vote,
)

MAX_RETRIES = 3
"""The number of failed attempts at a step, without a death, after which the run stops."""
MAX_STRIKES = 3
"""The number of refused messages, refuted values, or failed pairs after which a node is shut out."""
MIN_PARTNERS = 2
"""The number of different nodes with which a node must have failed before complaints count against it."""
MEMORY_STEPS = 100
"""For this many steps, a node that gave up its stage gets one only if no other node is left."""
LEAST_ENDS, MOST_ENDS = 3, 8
"""The least and the most ends of a node that count together."""
UNLIKELY = 1e-4
"""A node stands out if, at the rate of all others, the probability of this many ends in such a short time is
at most this."""
CALM_SECONDS = 600.0
"""The usual rate of ends before the others' rate is known: one end in this many seconds of having a stage."""
MOST_KNOWN = 4096
"""The most nodes that are remembered."""
MOST_DOUBLED = 5
"""How often `MEMORY_STEPS` can double for a node that gives up its stage repeatedly."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the epoch ends, and what happens next."""

    kind: AbortKind
    reason: str
    note: str = ""
    """A line for the operator; empty if there is nothing to add."""
    culprit: str = ""
    """The node that gives up its stage for this reason."""


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
    """Decides whether a failed step runs again or ends the run, and on which nodes. `RunMachine` calls it."""

    def __init__(self) -> None:
        self._retries = 0
        self._at = -1
        """The newest step that failed."""
        self._suspect: tuple[int, str, str] | None = None
        """The step that was not finite, its value that was not, and the node that reported it."""

    @property
    def suspect_step(self) -> int | None:
        """The step to run without compression."""
        return self._suspect[0] if self._suspect is not None else None

    def failed(self, epoch: Epoch, node_id: str, message: str, step: int | None = None) -> RunAgain | GiveUp:
        """A stage failed in a step, but its node is alive.

        Args:
            step: the stage's, which may still have had to apply the previous one. None: the epoch's.
        """
        at = epoch.step if step is None else max(epoch.step - 1, min(epoch.step, step))
        if at > self._at:
            # If steps follow without a pause, only the node itself knows that the previous one is applied.
            self._at, self._retries = at, 0
        self._retries += 1
        reason = f"{epoch.place_of(node_id)}: {message}"
        if self._retries > MAX_RETRIES:
            return GiveUp(
                kind=AbortKind.FAILED,
                reason=reason,
                note=f"step {at + 1} failed {self._retries} times in a row: the run ends once what "
                "its stages hold is on disk",
                why=f"step {at + 1} failed {self._retries} times in a row, last at {reason}",
                remedy="mend that, then resume",
            )
        return RunAgain(kind=AbortKind.FAILED, reason=reason)

    def stage_given_up(self, epoch: Epoch, culprit: str, verdict: Verdict) -> RunAgain:
        """A spare takes this node's stage, and has the same number of attempts."""
        self._retries = 0
        failed = f"step {epoch.step + 1} failed at {verdict.reason}"
        taker = "a spare takes" if epoch.rows == 1 else "other rows take"
        why = verdict.why if isinstance(verdict, GiveUp) else failed
        return RunAgain(
            kind=verdict.kind,
            reason=verdict.reason,
            note=f"{why}: {taker} {epoch.place_of(culprit)} from node {culprit}",
            culprit=culprit,
        )

    def not_finite(self, epoch: Epoch, node_id: str, what: str) -> RunAgain | GiveUp:
        """Other nodes found it too: run the step without compression. If it already was, the run diverges."""
        if epoch.uncompressed:
            return GiveUp(
                kind=AbortKind.NOT_FINITE,
                reason=what,
                why=f"step {epoch.step + 1} was not committed: {what}, with uncompressed links too, "
                "so the run diverges",
                remedy="lower training.lr, then resume",
            )
        self._suspect = (epoch.step, what, node_id)
        return RunAgain(
            kind=AbortKind.NOT_FINITE,
            reason=what,
            note=f"step {epoch.step + 1} is not committed: {what}; running it again with uncompressed links",
        )

    @property
    def suspect_node(self) -> str:
        """The node that reported the step that runs without compression; "" if there is none."""
        return self._suspect[2] if self._suspect is not None else ""

    def finite_without(self, epoch: Epoch, node_id: str) -> RunAgain:
        """The step is finite without compression. Without the node that reported it, it may be with it."""
        assert self._suspect is not None, "a node has reported it"
        what, self._suspect = self._suspect[1], None
        note = (
            f"step {epoch.step + 1} is finite with uncompressed links; "
            f"it runs again with its codecs, without node {node_id}"
        )
        return RunAgain(kind=AbortKind.NOT_FINITE, reason=what, note=note, culprit=node_id)

    def finite_uncompressed(self, epoch: Epoch) -> GiveUp:
        """The step is finite without compression, so the codecs are at fault."""
        _, what, _ = self._suspect or (epoch.step, "a tensor", "")
        return GiveUp(
            kind=AbortKind.NOT_FINITE,
            reason=what,
            why=f"step {epoch.step + 1} was not committed: {what}; with uncompressed links it is finite, "
            "so the codecs are the cause",
            remedy="use wider codecs in [pipeline], then resume",
        )

    def absurd(self, epoch: Epoch, doubt: Implausible) -> GiveUp:
        """A node's norms have grown beyond all bounds, and no other node can confirm or refute them."""
        why = (
            f"step {epoch.step + 1} was not committed: {doubt.what}, as node {doubt.node_id} says, and no "
            "other node is left to compute it again"
        )
        remedy = f"let one more node join or evict node {doubt.node_id}, then resume"
        return GiveUp(kind=AbortKind.FAILED, reason=doubt.what, why=why, remedy=remedy)

    def committed(self, step: int) -> None:
        """All votes on `step` were valid."""
        if self.suspect_step == step:
            self._suspect = None

    def forgive(self) -> None:
        """Reset the count: a step is done, or a node that caused the failures is gone."""
        self._retries = 0


class Ending:
    """Why a run ends. If possible, the stages' state is saved before the run stops."""

    def __init__(self) -> None:
        self._tried = False
        self._asked: str | None = None
        self._given_up: GiveUp | None = None
        self._missing = ""
        self.soon = False
        """Whether the run continues soon."""

    @property
    def due(self) -> bool:
        return self._asked is not None or self._given_up is not None

    def ask(self, reason: str, *, soon: bool = False) -> None:
        """The operator ends the run. A run that would continue soon may still be ended for good."""
        if self._asked is None or (self.soon and self._asked != reason):
            self._asked, self.soon = reason, soon

    def give_up(self, verdict: GiveUp) -> None:
        """A failure ends the run."""
        self._given_up = verdict

    def missing(self, what: str) -> None:
        """Part of the state could not be saved."""
        self._missing = f"; {what}"

    def saves_once(self) -> bool:
        """Whether the nodes of the failed epoch are placed again, once, to hand in their state."""
        if not self.due or self._tried:
            return False
        self._tried = True
        return True

    def last_words(self, kept: str) -> tuple[str, bool]:
        """Why the run ends, and whether it failed. `kept`: what is on disk, in words."""
        if self._given_up is not None:
            return f"{self._given_up.why}{self._missing}; {kept}: {self._given_up.remedy}", True
        return (self._asked or "") + (f"{self._missing}; {kept}" if self._missing else ""), False


class Accused(NamedTuple):
    """The node that is most likely at fault for complaints between neighbours."""

    node_id: str
    partners: Collection[str]
    """The nodes with which it failed."""
    why: str

    def is_proven(self, members: Collection[str]) -> bool:
        """Whether one of its partners is honest if fewer than half of all these nodes lie."""
        return 2 * len(self.partners) >= len({self.node_id, *self.partners, *members})


class Quarantine:
    """Nodes that are shut out, and the strikes that lead to it."""

    def __init__(self) -> None:
        self.why: dict[str, str] = {}
        """Why each node is shut out."""
        self._strikes: Counter[str] = Counter()
        self._pairs: dict[frozenset[str], dict[int, int]] = {}
        """The epochs, and their steps, in which one node of a pair accused the other of a violation."""

    def strike(self, node_id: str, why: str) -> bool:
        """Count a fault that only this node can have caused. Returns whether it is shut out for it."""
        self._strikes[node_id] += 1
        if node_id in self.why or self._strikes[node_id] < MAX_STRIKES:
            return False
        self.why[node_id] = f"{why}, the last of {MAX_STRIKES} such faults"
        return True

    def convict(self, node_id: str, why: str) -> bool:
        """Shut a node out for one proven fault. Returns False if it already is."""
        is_news = node_id not in self.why
        self.why.setdefault(node_id, why)
        return is_news

    def complaint(self, epoch: Epoch, node_id: str, failure: StepFailed) -> "Accused | None":
        """Count a complaint about a neighbour, once per epoch and pair. Returns the node that is at fault for
        it, if one is.

        This is a node that failed with several nodes, and more often than any of them.
        """
        other = other_end(epoch, node_id, failure) if failure.kind is FailureKind.PEER else None
        if other is None:
            return None
        steps = self._pairs.setdefault(frozenset((node_id, other)), {})
        if epoch.number in steps:
            return None
        steps[epoch.number] = epoch.step
        self._forget_before(epoch.step - MEMORY_STEPS)
        for node in (other, node_id):
            partners = {partner for pair in self._pairs if node in pair for partner in pair} - {node}
            if len(partners) < MIN_PARTNERS or self._failed(node) < MAX_STRIKES or node in self.why:
                continue
            if all(self._failed(partner) < self._failed(node) for partner in partners):
                named = " and ".join(sorted(partners))
                why = f"it had a part in all of {self._failed(node)} failures with {named}"
                return Accused(node, partners, why)
        return None

    def _failed(self, node_id: str) -> int:
        return sum(len(epochs) for pair, epochs in self._pairs.items() if node_id in pair)

    def _forget_before(self, step: int) -> None:
        """Drop old failures, because links of honest nodes fail occasionally too."""
        for pair, epochs in list(self._pairs.items()):
            self._pairs[pair] = {number: at for number, at in epochs.items() if at >= step}
            if not self._pairs[pair]:
                del self._pairs[pair]


class Blame:
    """The node that is most likely at fault for a failure, and the nodes that gave up a stage for one."""

    def __init__(self) -> None:
        self._replaced: dict[str, int] = {}
        """The nodes that gave up a stage. Until the given step, they get one only if no other node is
        left."""
        self._unsteady: set[str] = set()
        """Those of them that only ended or left too often, and have not ended again since."""
        self._faults: dict[str, list[int]] = {}
        """The steps at which each node gave up a stage for being slow, or for ending in steps."""
        self._heeded: dict[str, int] = {}
        """The step at which each node's complaint made a neighbour give up its stage."""
        self._own: dict[str, list[int]] = {}
        """The steps at which each node failed by itself."""
        self._links: dict[str, list[int]] = {}
        """The steps at which each node reported a neighbour or the link to it."""
        self._named: Counter[str] = Counter()
        """The number of failures in which each node was involved since the newest change of hosts."""
        self._at_work: frozenset[str] = frozenset()
        """The nodes that computed the newest finished step."""

    def done(self, nodes: Collection[str], step: int) -> None:
        """These nodes have completed a step."""
        self._at_work = frozenset(nodes)
        self._named.clear()
        for reports in (self._own, self._links):
            for node, steps in list(reports.items()):
                reports[node] = [at for at in steps if step - at <= MEMORY_STEPS]
        self._replaced = {node: until for node, until in self._replaced.items() if step <= until}
        self._unsteady &= self._replaced.keys()
        self._heeded = {node: at for node, at in self._heeded.items() if step - at <= MEMORY_STEPS}

    def suspects(self, epoch: Epoch, node_id: str, failure: StepFailed) -> Sequence[str]:
        """The nodes that may be at fault for a stage's report, the most likely first. For a link that is its
        other end, unless more speaks against the reporter: another node has already lost its stage on its
        word, it is new and the other is not, or other failures involved its links too.
        """
        other = other_end(epoch, node_id, failure)
        ends = [node_id] if other is None else [other, node_id]
        self._named.update(ends)
        (self._own if other is None else self._links).setdefault(node_id, []).append(epoch.step)
        if other is None:
            self._unsteady.discard(node_id)
        return sorted(
            ends, key=lambda node: (node not in self._heeded, node in self._at_work, -self._named[node])
        )

    def replace(self, culprit: str, *, by: str, step: int) -> None:
        """The node gives up its stage because of a report by `by`."""
        self._replaced[culprit] = max(step + MEMORY_STEPS, self._replaced.get(culprit, 0))
        self._own.pop(culprit, None)
        for node in (culprit, by):
            self._links.pop(node, None)
        self._unsteady.discard(culprit)
        if by != culprit:
            self._heeded[by] = step
        self._named.clear()

    def set_back(self, node_id: str, step: int, *, ended: bool = False) -> int:
        """For some steps from now on, the node gets a stage only if no other node is left.

        Returns their number: twice the previous number if that period is over and was recent, or 0 if the
        same period only restarts.

        Args:
            ended: whether the reason is that the node ended or left.
        """
        if ended and node_id not in self._replaced and not self._own.get(node_id):
            self._unsteady.add(node_id)
        else:
            self._unsteady.discard(node_id)
        known = [at for at in self._faults.get(node_id, ()) if step - at <= MEMORY_STEPS * 2**MOST_DOUBLED]
        # If so, it had a stage because no other node was left.
        again = bool(known) and self.is_set_back(node_id, step)
        self._faults[node_id] = [*known[: len(known) - again], step]
        steps = MEMORY_STEPS * 2 ** min(len(self._faults[node_id]) - 1, MOST_DOUBLED)
        self._replaced[node_id] = step + steps
        return 0 if again else steps

    def is_set_back(self, node_id: str, step: int) -> bool:
        """Whether the node gets a stage only if no other is left."""
        return self._replaced.get(node_id, -1) > step

    def inherit(self, node_id: str, before: str) -> None:
        """Move the faults of the node `before` to `node_id`."""
        if before in self._replaced:
            self._replaced[node_id] = self._replaced.pop(before)
        if before in self._unsteady:
            self._unsteady.add(node_id)
        self._faults[node_id] = self._faults.pop(before, [])

    def keeps_failing(self, node_id: str) -> bool:
        """Whether it has recently failed by itself often, or reported its links often, although each step was
        completed."""
        most = max(len(reports.get(node_id, ())) for reports in (self._own, self._links))
        return most >= 2 * MAX_RETRIES

    def exonerate(self, node_id: str) -> None:
        """Another node in its place had the same result, so it is not at fault."""
        self._replaced.pop(node_id, None)

    def blameless(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The nodes that have not recently given up a stage."""
        return [candidate for candidate in candidates if candidate.node_id not in self._replaced]

    def unsteady(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The nodes that have only ended or left too often, which may be chance. One more end counts against
        them. In a seat that would otherwise be empty, such a node costs others little."""
        return [candidate for candidate in candidates if candidate.node_id in self._unsteady]

    def usable(self, candidates: Sequence[Candidate], least: int) -> list[Candidate]:
        """The nodes that have not recently given up a stage. If there are fewer than `least`, the others are
        appended."""
        blameless = self.blameless(candidates)
        if len(blameless) >= least:
            return blameless
        return sorted(candidates, key=lambda candidate: candidate.node_id in self._replaced)


@dataclass
class _Hosting:
    """How long a node hosted stages, and how often that ended."""

    owner: str
    seconds: float = 0.0
    """The total number of seconds."""
    since: float | None = None
    """When its current or its last hosting began."""
    ends: int = 0
    before_end: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=MOST_ENDS + 1))
    """The seconds that it hosted before each of its newest ends, and since the last one."""
    failed_at: int = -1
    """The newest step in which it failed by itself."""


class Departures:
    """Finds nodes that end, leave or fail much more often than others while they host a stage.

    Counts are compared with the others' rate, so if all machines come and go, no node stands out.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Hosting] = {}

    def arrives(self, candidate: Candidate, present: Collection[str]) -> str | None:
        """A node arrives. A new node continues the record of its owner's newest node that is gone. Returns
        that node."""
        if candidate.node_id in self._nodes:
            return None
        owner = candidate.owner
        gone = [
            node
            for node, past in self._nodes.items()
            if past.owner == owner and past.ends and node not in present
        ]
        before = gone[-1] if gone and owner else None
        hosting = _Hosting(owner) if before is None else self._nodes.pop(before)
        self._nodes[candidate.node_id] = hosting
        if len(self._nodes) > MOST_KNOWN:
            del self._nodes[
                next(node for node in self._nodes if node not in present or node == candidate.node_id)
            ]
        return before

    def placed(self, hosts: Collection[str], now: float) -> None:
        """These nodes host stages from now on, and no others."""
        for node, hosting in self._nodes.items():
            self._look(hosting, now)
            hosting.since = now if node in hosts else None

    def ends(self, node_id: str, now: float, failed_at: int | None = None) -> str | None:
        """A host ends or leaves, or fails by itself in a step, which counts once. A line if it stands out."""
        hosting = self._nodes.get(node_id)
        if hosting is None or hosting.since is None or failed_at == hosting.failed_at:
            return None
        for other in self._nodes.values():
            self._look(other, now)
        if failed_at is None:
            hosting.since = None
        else:
            hosting.failed_at = failed_at
        hosting.ends += 1
        count = sum(other.ends for other in self._nodes.values()) - hosting.ends
        seconds = sum(other.seconds for other in self._nodes.values()) - hosting.seconds
        rate = (count + 1) / (seconds + CALM_SECONDS)
        hosted, line = 0.0, None
        for ends, before in enumerate(reversed(hosting.before_end), 1):
            hosted += before
            if ends >= LEAST_ENDS and _chance(ends, rate * hosted) < UNLIKELY:
                line = f"it ended, left or failed {ends} times within {hosted:.0f} s of having a stage"
        hosting.before_end.append(0.0)
        return line

    def _look(self, hosting: _Hosting, now: float) -> None:
        if hosting.since is not None:
            hosting.seconds += now - hosting.since
            hosting.before_end[-1] += now - hosting.since
            hosting.since = now


def _chance(least: int, mean: float) -> float:
    """The probability that a Poisson variable with this mean is at least `least`."""
    term = below = math.exp(-mean)
    for count in range(1, least):
        term *= mean / count
        below += term
    return 1.0 - below


def other_end(epoch: Epoch, node_id: str, failure: StepFailed) -> str | None:
    """The node at the other end of the failed link, if a link to a neighbour failed.

    It is a node of the same row, or a node of the same stage in another row.
    """
    if failure.kind not in (FailureKind.LINK, FailureKind.PEER):
        return None
    return neighbour_at(epoch, node_id, failure.peer_stage, failure.peer_replica)


def neighbour_at(epoch: Epoch, node_id: str, stage: int, row: int) -> str | None:
    """The node in this place, if a link leads there from the given node's place."""
    if node_id not in epoch.hosts:
        return None
    if row == epoch.replica_of(node_id):
        is_end = stage in epoch.neighbours(node_id)
    else:
        is_end = 0 <= row < epoch.rows and stage == epoch.stage_of(node_id)
    return (epoch.row(row)[stage] or None) if is_end else None


SLOW_SECONDS = 10.0
"""After this many seconds beyond the usual time, the operator is told for which node a step waits."""
STEP_PATIENCE = 30.0
FIRST_PATIENCE = 120.0
"""The patience in an epoch's first step and while its state is loaded, when kernels are compiled and links
warm up."""
WORKING_PATIENCE, WORKING_TIMES = 2.0, 10.0
"""A node that reports work has more patience: this multiple of an idle node's patience, or this multiple of
the usual step time."""
PATIENCE_TIMES = 3.0
"""A node may take this multiple of the others' time, or of the usual step time. The stages of a slow pipeline
answer in turn."""
LATE_SECONDS = 900.0
"""How long after the first answer several nodes without one count as late. One of them waits for another, and
reports it within ten minutes (`node.stage.watchdog`, `node.stage.inbox`)."""
LATE_TIMES = 3.0
REMEMBERED_STEPS = 9
SLOW_TIMES, SLOW_LEAST = 2.0, 2.0
"""A node is slow in a step if it adds this many times the usual step time, and at least this many seconds."""
SLOW_STEPS, LOOKED_AT = 4, 32
"""A node is slow if it was slow in `SLOW_STEPS` of at most `LOOKED_AT` consecutive steps."""
SLOWER_STEP = 1.005
"""The most by which the usual step time grows per step, as a factor."""
MORE_SECONDS = {Phase.PLACING: 10.0, Phase.RESTORING: 30.0}
"""The seconds used instead of `SLOW_LEAST` in these phases: the previous epoch has to end, and kernels are
compiled."""
FASTER = 1.5
"""A spare counts as faster only if it is expected to be this many times as fast."""
LEAST_RATE = 250_000.0
"""The bytes per second that every node is expected to reach when it fetches or hands in its state."""


def transfer_seconds(size: int, rate: float) -> float:
    """The seconds for a node to fetch or hand in `size` bytes, at a measured rate (0: unknown)."""
    return 4 * size / max(rate, LEAST_RATE)


_WAITS = {TimeKind.WAIT_UPSTREAM: -1, TimeKind.WAIT_DOWNSTREAM: 1}
"""The offset of the stage for which a node waits, by the kind of wait."""
_IDLE = frozenset({"", TimeKind.WAIT_VOTES, TimeKind.WAIT_COORDINATOR})
_ASKS = {
    Placed: Phase.PLACING,
    Ready: Phase.RESTORING,
    Vote: Phase.STEPPING,
    Applied: Phase.APPLYING,
    Validated: Phase.VALIDATING,
}
"""The phase that asks for each kind of answer."""
_DOING = {
    Phase.PLACING: "placed",
    Phase.RESTORING: "to load its state",
    Phase.APPLYING: "to apply a step",
    Phase.VALIDATING: "to measure the held-out loss",
}


@dataclass(frozen=True, kw_only=True)
class Late:
    """What to do if a step does not continue."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """The nodes that are late, with a line for each."""
    note: str | None = None
    """A line for the operator."""
    deadlock: tuple[str, StepFailed] | None = None
    """A node and its neighbour report that each waits for the other, or that the other has all that it needs.
    So one of them is wrong. If no other node can take either place, the `nodes` count as late."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A node that delays the run repeatedly, although it answers before the deadlines."""

    node_id: str
    times: float
    """Its delay, as a multiple of the usual step time."""
    line: str


class _Pace:
    """The usual step times with some number of stages, in seconds per gradient group of the row with the most
    groups."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self.reference = math.inf
        """Like `newest`, but it grows only slowly from step to step."""

    def add(self, seconds: float) -> None:
        self.newest.append(seconds)
        usual = median(self.newest)
        is_known = len(self.newest) > REMEMBERED_STEPS // 2
        self.reference = min(usual, self.reference * SLOWER_STEP) if is_known else usual


@dataclass(kw_only=True)
class _Phase:
    """What nodes did in one phase of an epoch."""

    epoch: Epoch
    at: tuple[int, int, Phase, int]
    """Epoch, step, phase, and held-out passes done."""
    asked: Mapping[str, None]
    """The nodes that it waits for, in their order. There may be a thousand, each with many messages."""
    is_first: bool
    """Whether it is the first step of its epoch."""
    began: float
    answers: dict[str, float] = field(default_factory=dict)
    """The seconds from the phase's start to each node's answer."""
    newest: dict[str, float] = field(default_factory=dict)
    """When each node answered last; a death has it answer again."""
    waited: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Each node's seconds by `TimeKind`, as it reports them."""
    rows: dict[str, int] = field(default_factory=dict)
    """The row for whose sums each node waited, as it reported last."""
    loading: Mapping[str, float] = field(default_factory=dict)
    """The seconds that each host may take to fetch its state, in addition to the usual time."""


class _Report(NamedTuple):
    """What a node says of its time."""

    at: float
    """When it said so."""
    kind: str
    """The `TimeKind` on which it recently spent most time; "" for nothing."""
    awaited: AwaitedSums | None
    """The sums for which it waited."""


_NO_REPORT = _Report(0.0, "", None)


class Stragglers:
    """Finds nodes that do not answer when others have, and nodes that always answer late.

    It watches the loading of state, votes, and the ends of steps. If one node of a pipeline does nothing, no
    node can answer. Heartbeats report what nodes do: the cause is the node for which others wait, and which
    waits for none.

    Deadlines are based on the others' times, so a node cannot extend its own deadlines.
    """

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        """`seconds`: the times of an earlier coordinator's newest steps."""
        self._does: dict[str, _Report] = {}
        """The newest report of each node."""
        self._phase: _Phase | None = None
        self._first = self._last = 0.0
        self._answered = 0
        self._generation, self._changed_at = -1, 0.0
        """That of the answers, and since when. After a change of the step's work all nodes answer anew."""
        self._is_told = False
        self._before = sorted(seconds)[len(seconds) // 4] if seconds else 0.0
        """The usual step time of an earlier coordinator, most of whose steps may have had a slow node."""
        self._paces: dict[int, _Pace] = {}
        """Step times by number of stages."""
        self._spent: dict[str, tuple[int, Mapping[str, float]]] = {}
        """Each node's epoch and seconds by `TimeKind`, as in its newest vote."""
        self._costs: dict[tuple[str, Phase], deque[tuple[float, float]]] = {}
        """What each node cost in the newest phases of a kind, and what it was allowed to cost, in seconds."""
        self._pairs: dict[frozenset[str], int] = {}
        """Nodes that were late, each with one that it waited for and that was early, and the newest step."""
        self.times: dict[str, float] = {}
        """The delays of slow nodes, as multiples of the usual step time."""

    def relieved(self, slow: Slow) -> None:
        """Other nodes take this node's stage: remember how slow it was."""
        self.times[slow.node_id] = slow.times

    def answered(self, node_id: str, message: NodeMessage, now: float) -> None:
        """A node answers in this phase. Call it before the epoch receives the answer."""
        phase = self._phase
        if phase is None or node_id not in phase.asked or _ASKS.get(type(message)) is not phase.at[2]:
            return
        if isinstance(message, Vote):
            if message.step != phase.at[1]:
                return
            epoch, before = self._spent.get(node_id, (0, {}))
            before = before if epoch == phase.at[0] else {}
            spent = message.telemetry.seconds
            phase.waited.setdefault(
                node_id, {kind: seconds - before.get(kind, 0.0) for kind, seconds in spent.items()}
            )
            self._spent[node_id] = phase.at[0], spent
        phase.answers.setdefault(node_id, now - phase.began)
        phase.newest[node_id] = now

    def watch(self, epoch: Epoch | None, now: float) -> None:
        """Call it whenever a phase may have ended or begun."""
        at = None if epoch is None else (epoch.number, epoch.step, epoch.phase, epoch.passes_done)
        before = self._phase
        if before is not None and at == before.at:
            return
        if before is not None and len(before.answers) == len(before.asked):
            self._judge(before, now - before.began)
        self._answered, self._is_told, self._generation = 0, False, -1
        self._phase = None
        if epoch is not None and at is not None:
            is_first = epoch.steps_done == 0
            asked = dict.fromkeys(epoch.asked)
            self._phase = _Phase(epoch=epoch, at=at, asked=asked, is_first=is_first, began=now)

    def forget(self, node_id: str) -> None:
        """The node has lost its stage."""
        for key in [key for key in self._costs if key[0] == node_id]:
            del self._costs[key]

    def slow(self, epoch: Epoch) -> list[Slow]:
        """Hosts that delay the run repeatedly, the slowest first."""
        slow = []
        for (node, phase), costs in self._costs.items():
            if not epoch.has(node) or len(costs) < SLOW_STEPS or not costs[-1][0]:
                continue
            count, lost, usual = 0, 0.0, 0.0
            for cost, may in reversed(costs):
                count, lost, usual = count + (cost > 0), lost + cost, usual + may
                if count >= SLOW_STEPS and lost > usual:
                    break
            else:
                continue
            step = max(self._usual(epoch, slowly=True), 1e-3)
            what = "step" if phase is Phase.STEPPING else f"time that it was {_DOING[phase]}"
            line = f"it holds up each {what} by {lost / count:.1f} s, where a step takes {step:.2g} s"
            slow.append(Slow(node_id=node, times=1 + lost / count / step, line=line))
        return sorted(slow, key=lambda each: -each.times)

    def _judge(self, phase: _Phase, seconds: float) -> None:
        """All have answered: compute what each node cost."""
        kind, epoch = phase.at[2], phase.epoch
        usual = self._usual(epoch, slowly=True)
        early = _early(list(phase.answers.values()), len(phase.asked))
        least = MORE_SECONDS.get(kind, SLOW_LEAST)
        may = {node: max(least, SLOW_TIMES * max(early, usual)) for node in phase.asked}
        if kind is Phase.RESTORING:
            for node, extra in phase.loading.items():
                may[node] += extra
        late = {node: at - early for node, at in phase.answers.items() if at - early > may[node]}
        costs = {node: cost for node, cost in late.items() if not self._waited(phase, node, cost, late)}
        costs = self._caused(phase, costs, late)
        if kind is Phase.STEPPING:
            in_time = max(at for node, at in phase.answers.items() if node not in late)
            if not late and self._knows_pace(epoch) and seconds - usual > max(least, SLOW_TIMES * usual):
                costs = self._worked_long(phase, seconds, usual)
                in_time = math.nan if costs else seconds
            if not math.isnan(in_time) and not (phase.is_first and self._knows_pace(epoch)):
                self._paces.setdefault(epoch.stages, _Pace()).add(in_time / epoch.most_groups)
            if phase.is_first:
                return  # kernels are compiled
        for node in phase.asked:
            known = self._costs.setdefault((node, kind), deque(maxlen=LOOKED_AT))
            known.append((costs.get(node, 0.0), SLOW_TIMES * usual))
            if kind is Phase.STEPPING and len(known) == LOOKED_AT and not any(cost for cost, _ in known):
                self.times.pop(node, None)

    def _waited(self, phase: _Phase, node: str, cost: float, late: Collection[str]) -> bool:
        """Whether this late node waited for another late one, which did not wait for it."""
        return any(
            other in late and node not in self._awaited(phase, other, cost / 2)
            for other in self._awaited(phase, node, cost / 2)
        )

    def _caused(self, phase: _Phase, costs: Mapping[str, float], late: Collection[str]) -> dict[str, float]:
        """What nodes cost, if those pay that kept others waiting and answered early themselves.

        One of two is right about that, and a node that is wrong again and again is so with several others.
        """
        step = phase.at[1]
        self._pairs = {pair: at for pair, at in self._pairs.items() if step - at <= MEMORY_STEPS}
        causes: dict[str, list[str]] = {}
        for node, cost in costs.items():
            awaited = self._awaited(phase, node, cost / 2)
            causes[node] = [other for other in awaited if other and other not in late]
            self._pairs.update((frozenset((node, other)), step) for other in causes[node])
        named = Counter(chain.from_iterable(self._pairs))
        caused: dict[str, float] = {}
        for node, cost in costs.items():
            payers = [other for other in causes[node] if named[other] > named[node]] or [node]
            caused.update((payer, max(cost, caused.get(payer, 0.0))) for payer in payers)
        return caused

    def _awaited(self, phase: _Phase, node: str, least: float) -> list[str]:
        """The neighbours for which a node reports that it waited at least `least` seconds in a step."""
        epoch, spent = phase.epoch, phase.waited.get(node, {})
        if not epoch.has(node):
            return []  # it is gone
        row, stage = epoch.row(epoch.replica_of(node)), epoch.stage_of(node)
        long = [by for kind, by in _WAITS.items() if spent.get(kind, 0.0) > least]
        peers = epoch.column(stage) if spent.get(TimeKind.SYNC, 0.0) > least else []
        if peers and (known := neighbour_at(epoch, node, stage, phase.rows.get(node, -1))) is not None:
            peers = [known]
        return [*(row[(stage + by) % epoch.stages] for by in long), *(peer for peer in peers if peer != node)]

    def _worked_long(self, phase: _Phase, seconds: float, usual: float) -> dict[str, float]:
        """Nodes whose own work took most of a long step. Empty if that applies to most nodes, because then no
        node is at fault."""
        works = {
            node: sum(part for kind, part in spent.items() if kind not in WAITS)
            for node, spent in phase.waited.items()
        }
        long = {node: seconds - usual for node, work in works.items() if 2 * work > seconds + usual}
        return long if 2 * len(long) <= len(phase.asked) else {}

    def _knows_pace(self, epoch: Epoch) -> bool:
        return epoch.stages in self._paces

    def _usual(self, epoch: Epoch, *, slowly: bool = False) -> float:
        """The usual step time; 0 before a step is measured. `slowly`: the long-term value."""
        if (pace := self._paces.get(epoch.stages)) is None:
            return self._before
        return (pace.reference if slowly else median(pace.newest)) * epoch.most_groups

    def says(self, node_id: str, kind: str, now: float, awaited: AwaitedSums | None = None) -> None:
        """A node reports what it spends its time on, and the sums that it waits for."""
        self._does[node_id] = _Report(now, kind, awaited)
        if self._phase is not None and awaited is not None:
            self._phase.rows[node_id] = awaited.row

    def look(self, epoch: Epoch | None, now: float, loading: Mapping[str, float]) -> Late:
        """Find nodes that are late. Call it often.

        Args:
            loading: the seconds that each host may take to fetch its state, in addition to the usual time.
        """
        self.watch(epoch, now)
        phase = self._phase
        if epoch is None or phase is None or epoch.phase in (Phase.PLACING, Phase.IDLE):
            return Late()
        phase.loading = loading
        if epoch.generation != self._generation:
            self._generation, self._changed_at, self._answered = epoch.generation, now, 0
        usual = self._usual(epoch)
        is_work = epoch.phase in (Phase.STEPPING, Phase.VALIDATING)
        if is_work and (stuck := self._stuck(epoch, now, usual)) is not None:
            return stuck
        if not epoch.answered:
            return Late() if is_work or len(epoch.asked) > 1 else self._alone_late(epoch, now, loading)
        if self._answered == 0:
            self._first = now
        if len(epoch.answered) > self._answered:
            self._answered, self._last = len(epoch.answered), now
        missing = [node for node in epoch.asked if node not in epoch.answered]
        if not missing:
            return Late()
        beyond = now - max(self._last, phase.began + usual)
        work = "load its state" if epoch.phase is Phase.RESTORING else f"end step {epoch.step + 1}"
        is_loading = epoch.phase is Phase.RESTORING
        extra = max((loading.get(node, 0.0) for node in missing), default=0.0) if is_loading else 0.0
        if len(missing) == 1:
            late = now - self._last
            if late > self._patience(epoch, usual) + extra:
                line = f"it did not {work} within {late:.0f} s after all others did: start it again"
                return Late(nodes={missing[0]: line}, deadlock=self._withheld(epoch, missing[0]))
        elif epoch.phase is not Phase.RESTORING:
            late = now - self._first
            if late > max(LATE_SECONDS, LATE_TIMES * (self._first - phase.began)):
                line = f"it did not {work} within {late:.0f} s after another did: start it again"
                return Late(nodes=dict.fromkeys(missing, line))
        if beyond > SLOW_SECONDS + extra and not self._is_told:
            return self._tell(epoch, missing, beyond)
        return Late()

    def _withheld(self, epoch: Epoch, node: str) -> tuple[str, StepFailed] | None:
        """The dispute if a node reports that it waits for others which have answered. One of them may have
        kept what it needs."""
        if epoch.phase not in (Phase.STEPPING, Phase.VALIDATING):
            return None
        other = self._waits_for(epoch, node)
        if other is None and self._doing(node) == TimeKind.SYNC:
            column = [peer for peer in epoch.column(epoch.stage_of(node)) if peer != node]
            if len(column) > 1:
                return node, _deadlock(epoch, None)
            other = column[0] if column else None
        return None if other is None else (node, _deadlock(epoch, other))

    def _tell(self, epoch: Epoch, nodes: Sequence[str], beyond: float) -> Late:
        self._is_told = True
        named = ", ".join(f"node {node} ({epoch.place_of(node)})" for node in nodes)
        note = f"step {epoch.step + 1} waits for {named}: {beyond:.0f} s beyond what is usual"
        return Late(note=note)

    def _alone_late(self, epoch: Epoch, now: float, loading: Mapping[str, float]) -> Late:
        """What to do about the only node that was asked. There is no other node to compare its time with."""
        (node,) = epoch.asked
        waited = now - self._began
        if waited <= LATE_SECONDS + loading.get(node, 0.0):
            return Late()
        return Late(nodes={node: f"it did not answer within {waited:.0f} s: start it again"})

    def _stuck(self, epoch: Epoch, now: float, usual: float) -> Late | None:
        """The step waits for nodes that wait for no other, or for two that wait for each other."""
        missing = [node for node in epoch.asked if node not in epoch.answered]
        is_alone = len(epoch.asked) == 1
        if len(missing) < 2 and not is_alone:
            return None
        waits = {node: self._waits_for(epoch, node) for node in missing}
        waited_for = set(waits.values())
        stuck = [node for node in missing if is_alone or (waits[node] is None and node in waited_for)]
        if epoch.answered:
            # Others have done all that these nodes need, and these do not report waiting for one another.
            stuck = [node for node in missing if node in stuck or self._is_alone(epoch, node, waits[node])]
        is_usual = epoch.steps_done and epoch.phase is Phase.STEPPING
        least = STEP_PATIENCE if is_usual else FIRST_PATIENCE
        kinds = _IDLE.union(WAITS) if is_alone else _IDLE  # a node alone has nobody to wait for
        idle = [node for node in stuck if self._does.get(node, _NO_REPORT).kind in kinds]
        lates = {node: now - self._busy_since(epoch, node) - usual for node in missing}
        over = [node for node in idle if lates[node] > max(least, PATIENCE_TIMES * usual)]
        if over:
            line = f"it did nothing in step {epoch.step + 1}, which waits for it: start it again"
            return Late(nodes=dict.fromkeys(over, line))
        late = max(lates[node] for node in stuck or missing)
        limit = max(WORKING_PATIENCE * least, WORKING_TIMES * usual)
        if usual and late > limit:
            # Before a step is measured, its usual time is unknown.
            if stuck:
                line = f"step {epoch.step + 1} waits for it {late:.0f} s beyond what is usual: start it again"
                nodes = dict.fromkeys((node for node in stuck if lates[node] > limit), line)
                disputes = (self._withheld(epoch, node) for node in nodes)
                return Late(nodes=nodes, deadlock=next(filter(None, disputes), None))
            if (deadlock := self._contradiction(epoch, waits)) is not None:
                return Late(deadlock=deadlock)
        if stuck and (usual or idle) and late > SLOW_SECONDS and not self._is_told:
            return self._tell(epoch, stuck, late)
        return None

    def _contradiction(self, epoch: Epoch, waits: Mapping[str, str | None]) -> tuple[str, StepFailed] | None:
        """A node whose report of its wait contradicts that of a neighbour, and the neighbour's failure. The
        neighbour is the one that contradicts most others.

        A node that waits for sums has sent all sums over its own groups. It may lack those of other rows, and
        then it has no sum over all groups to send.
        """
        pairs = []
        for node, other in waits.items():
            if other is None or (then := waits.get(other)) is None:
                continue
            needs, lacks = self._does[node].awaited, self._does[other].awaited
            is_for_sums = TimeKind.SYNC == self._doing(node) == self._doing(other)
            is_excused = needs is None or (needs.is_total and lacks is not None and not lacks.is_total)
            if not is_excused if is_for_sums else then == node:
                pairs.append((node, other))
        if not pairs:
            return None
        named = Counter(chain.from_iterable(pairs))
        node, other = max(pairs, key=lambda pair: named[pair[1]])
        return node, _deadlock(epoch, other, is_mutual=waits[other] == node)

    def _doing(self, node: str) -> str:
        """What a node spends its time on in this step, as it reports; "" for nothing."""
        at, kind, _ = self._does.get(node, _NO_REPORT)
        return kind if at > self._began else ""

    @property
    def _began(self) -> float:
        return 0.0 if self._phase is None else self._phase.began

    def _busy_since(self, epoch: Epoch, node: str) -> float:
        """When a node got the work that it has not done yet.

        Its row may have got groups long after the step began. A node that has voted since then only has to
        vote again.
        """
        since = max(self._began, epoch.given_at(node))
        newest = -math.inf if self._phase is None else self._phase.newest.get(node, -math.inf)
        return max(since, self._changed_at) if newest >= since else since

    def _is_alone(self, epoch: Epoch, node: str, awaited: str | None) -> bool:
        """Whether a node reports, in this step, that it waits for no node that has not answered."""
        at, kind, _ = self._does.get(node, _NO_REPORT)
        return at > self._began and (kind != TimeKind.SYNC if awaited is None else awaited in epoch.answered)

    def _waits_for(self, epoch: Epoch, node: str) -> str | None:
        """The neighbour for which this node reports that it waits in this step; None for an empty seat."""
        at, kind, awaited = self._does.get(node, _NO_REPORT)
        if at <= self._began:
            return None
        if kind == TimeKind.SYNC and awaited is not None:
            return neighbour_at(epoch, node, epoch.stage_of(node), awaited.row)
        if kind not in _WAITS:
            return None
        stage = epoch.stage_of(node) + _WAITS[TimeKind(kind)]
        return epoch.row(epoch.replica_of(node))[stage % epoch.stages] or None

    def _patience(self, epoch: Epoch, usual: float) -> float:
        """The seconds that the last node may take after all others: more than others took, or steps take."""
        least = STEP_PATIENCE if epoch.steps_done else FIRST_PATIENCE
        answers = [] if self._phase is None else list(self._phase.answers.values())
        return max(least, PATIENCE_TIMES * max(usual, _early(answers, len(epoch.asked))))


def _early(answers: Sequence[float], count: int) -> float:
    """When the first third of the nodes had answered: the other two thirds cannot delay it."""
    return sorted(answers)[min((count - 1) // 3, len(answers) - 1)] if answers else 0.0


def _deadlock(epoch: Epoch, other: str | None, *, is_mutual: bool = True) -> StepFailed:
    """The report of a node that waits for a neighbour which has answered, or which waits too: for the node if
    `is_mutual`. None: for one of several."""
    if other is None:
        what = "it waits for other rows, which have answered"
    elif other in epoch.answered:
        what = f"it waits for {epoch.place_of(other)}, which has answered"
    elif is_mutual:
        what = f"it and {epoch.place_of(other)} say that each waits for the other"
    else:
        what = f"it waits for gradients from {epoch.place_of(other)}, which says that it waits for others"
    return StepFailed(
        epoch=epoch.number,
        step=epoch.step,
        kind=FailureKind.PEER,
        message=what,
        peer_stage=-1 if other is None else epoch.stage_of(other),
        peer_replica=0 if other is None else epoch.replica_of(other),
    )
