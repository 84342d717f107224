"""Finds the node whose values are wrong: not finite, not plausible, or different between rows. Pure.

The step runs again without the node that is the most likely cause. The commit then refutes what other nodes
reported before. If one node contradicts another, neither is refuted, and a third node computes the same: a
node of another row or, once the state is on disk, a spare or a node of the same row that changes places with
one of the two. If there are only two nodes, the step still runs again, because a card that fails at random
does not fail twice in the same way. If their gradients still differ, the run ends, because there is no reason
to choose either.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from node.run_state.actions import AbortKind
from node.run_state.audits import Auditor, Difference
from node.run_state.epoch import Epoch
from node.run_state.failures import MEMORY_STEPS, Blame, GiveUp, RunAgain
from node.run_state.membership import Roster
from node.run_state.stage_assignment import StageAssigner
from node.run_state.votes import Disagreement

LONE_OVERFLOWS = 3
"""This many times, a node that alone finds that gradients overflow is believed. Then it is checked."""


@dataclass
class _Doubt:
    """A step with a value that is not finite, not plausible, or different between rows, and what was done to
    find the cause."""

    step: int
    stages: int
    retried: set[int] = field(default_factory=set)
    """Stages that another node has computed again."""
    left_out: set[str] = field(default_factory=set)
    """With several rows, the nodes without which the step ran again, one at a time."""
    replaced: str = ""
    """The node that gave up the stage that was retried last."""
    stage: int = -1
    """The stage that was retried last."""
    results: dict[int, dict[str, object]] = field(default_factory=dict)
    """The newest result from each node of a stage (`Vote.result`), if rows disagreed."""
    computed: dict[str, dict[str, set[bytes]]] = field(default_factory=dict)
    """Nodes' reports in audits that found a difference: digests by value and node."""
    wrong: dict[str, str] = field(default_factory=dict)
    """The nodes that an audit proved wrong, with a line for each."""
    third_for: str = ""
    """The node whose place a third node takes, so that three nodes have computed the same."""
    exchanged: str = ""
    """The node that changes places with that node; empty if it is a spare."""

    def suspects(self, epoch: Epoch, node_id: str, *, neighbours: bool) -> list[str]:
        """Nodes whose stage others should compute again: the one that reports, those of its stage in other
        rows, whose gradients are in its sum, then those that send to it."""
        stage, row = epoch.stage_of(node_id), epoch.row(epoch.replica_of(node_id))
        near = [row[at] for at in sorted(epoch.neighbours(node_id)) if row[at]] if neighbours else []
        if epoch.rows == 1:
            return [node for node in (node_id, *near) if epoch.stage_of(node) not in self.retried]
        column = [node for node in epoch.column(stage) if node != node_id]
        # Newcomers first, in any place, because least is known about their state.
        new = [node for node in epoch.hosts if node in epoch.newcomers]
        return [node for node in dict.fromkeys((*new, node_id, *column, *near)) if node not in self.left_out]

    def replace(self, epoch: Epoch, culprit: str) -> None:
        """The step runs again without this node."""
        self.replaced, self.stage = culprit, epoch.stage_of(culprit)
        if epoch.rows == 1:
            self.retried.add(self.stage)
        else:
            self.left_out.add(culprit)

    def refuted(self, epoch: Epoch) -> list[str]:
        """Nodes whose results differ from those of the commit, in stages where at least two nodes agree with
        it."""
        wrong = []
        for stage, by_node in self.results.items():
            right = {*epoch.column(stage)}
            committed = epoch.votes[epoch.speakers[stage]].result
            right |= {node for node, result in by_node.items() if result == committed}
            right -= epoch.newcomers
            wrong += [node for node, result in by_node.items() if result != committed and len(right) > 1]
        return wrong

    def note_results(self, epoch: Epoch) -> None:
        """All have voted, and rows disagree."""
        for node in epoch.hosts:
            self.results.setdefault(epoch.stage_of(node), {})[node] = epoch.votes[node].result

    def odd_results(self, newcomers: Collection[str]) -> list[str]:
        """Nodes that most of their stage's known nodes contradict, and newcomers that all of these
        contradict."""
        odd = []
        for values in self.results.values():
            known = [value for node, value in values.items() if node not in newcomers] or [*values.values()]
            usual, most = Counter(known).most_common(1)[0]
            for node, value in values.items():
                is_most = most > max(1, len(known) // 2)
                if value != usual and (is_most or (node in newcomers and len({*known}) == 1)):
                    odd.append(node)
        return odd

    def note_computed(self, by_value: Mapping[str, Mapping[str, bytes]]) -> None:
        """Take nodes' reports in an audit of this step: digests by value and node. Finds out who is wrong."""
        for what, digests in by_value.items():
            known = self.computed.setdefault(what, {})
            for node, digest in digests.items():
                known.setdefault(node, set()).add(digest)
            for node in sorted(_contradicted(known)):
                twice = len(known[node]) > 1
                why = "twice and got different values" if twice else "and two others did not get the same"
                self.wrong[node] = f"it computed {what} in step {self.step + 1} {why}"


@dataclass(frozen=True, kw_only=True)
class CallThird:
    """Another node must take the place of one of two that differ, once the state before the step is on
    disk."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Refuted:
    """A node was wrong, or at least had a wrong value."""

    node_id: str
    why: str
    at_fault: bool
    """Whether it caused the wrong value itself: for a sum, other rows may have sent it a part."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One of two nodes that differed is gone, and the step is committed as the other node computed it."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """One of two nodes is wrong, and no third node can tell which. The step is committed."""

    note: str
    """A line for the operator; empty if these two were named before."""


class WrongValues:
    """The doubts about the current step, one at a time. `RunMachine` asks which node should compute the step
    again."""

    def __init__(self, assigner: StageAssigner, roster: Roster, blame: Blame, auditor: Auditor) -> None:
        self._assigner = assigner
        self._roster = roster
        self._blame = blame
        self._auditor = auditor
        self._doubt: _Doubt | None = None
        self._lone_overflows: Counter[str] = Counter()
        """How often each node alone found an overflow, since another one confirmed that."""
        self._overflow: tuple[int, str] = (-1, "")
        """A step that runs again without the node at which its gradients overflow."""
        self._told: set[frozenset[str]] = set()
        """Pairs of nodes that differ and were reported to the operator."""
        self._involved: dict[int, Collection[str]] = {}
        """With several rows, the suspects of the newest steps that ran again without one of them."""
        self._found: dict[str, tuple[int, int]] = {}
        """Those without which such a step was right, with their stage and the step, until they are back."""

    def nothing_to_try(self, epoch: Epoch) -> None:
        """The step does not run again without another node. The one left out last was not the cause."""
        doubt = self._of(epoch)
        self._blame.exonerate(doubt.replaced)
        doubt.replaced = ""

    def computed_twice(self, epoch: Epoch) -> bool:
        """Whether more than one node has computed the doubtful value of the running step."""
        doubt = self._of(epoch)
        return epoch.rows > 1 or bool(doubt.retried)

    def compute_again(
        self,
        epoch: Epoch,
        node_id: str,
        what: str,
        now: float,
        *,
        neighbours: bool,
    ) -> RunAgain | None:
        """Run the step again without a node that may be wrong; None if none is left to try, or no other.

        Args:
            node_id: the node that reported the value.
            neighbours: whether the value may come from what neighbours sent.
        """
        doubt = self._of(epoch)
        innocent = doubt.replaced
        self.nothing_to_try(epoch)
        others = self._blame.blameless(self._roster.candidates())
        if innocent and epoch.rows > 1:
            # Else a member that stops in time would be the only one left of its stage.
            self._assigner.take_back(innocent, doubt.stage, epoch.stages)
        suspects = doubt.suspects(epoch, node_id, neighbours=neighbours)
        if epoch.rows > 1:
            row = epoch.row(epoch.replica_of(node_id)) if neighbours else ()
            suspects = self._by_involvement(epoch, suspects, {*filter(None, row)} - doubt.left_out)
        for culprit in suspects:
            if self._is_doubtful(epoch, culprit):
                continue
            if self._assigner.hand_over(culprit, others, now):
                self._blame.replace(culprit, by=culprit, step=epoch.step)
                doubt.replace(epoch, culprit)
                who = "a spare computes" if epoch.rows == 1 else "other rows compute"
                note = (
                    f"step {epoch.step + 1} is not committed: {what}; {who} stage {doubt.stage} again, "
                    f"in place of node {culprit}"
                )
                return RunAgain(kind=AbortKind.NOT_FINITE, reason=what, note=note)
        return None

    def _by_involvement(self, epoch: Epoch, suspects: Sequence[str], row: Collection[str]) -> list[str]:
        """The suspects of a step, first those that were involved in most of the newest such steps. Whoever
        was left out in one of them was not wrong if it happens again without it.

        Args:
            row: nodes whose wrong values others may have passed on. They are suspects the second time.
        """
        now = epoch.step
        self._involved = {step: nodes for step, nodes in self._involved.items() if now - step <= MEMORY_STEPS}
        self._involved.setdefault(now, frozenset((*suspects, *row)))
        for node, (_, step) in list(self._found.items()):
            if now - step > MEMORY_STEPS or epoch.has(node):
                del self._found[node]
            elif step < now:
                self._blame.exonerate(node)
        counts = Counter(chain.from_iterable(self._involved.values()))
        known = [*suspects, *(node for node in sorted(row) if node not in suspects and counts[node] > 1)]
        return sorted(known, key=lambda node: -counts[node])

    def _is_doubtful(self, epoch: Epoch, node_id: str) -> bool:
        """Whether one node alone would be left of the stage that may as well be wrong, as another one was
        left out before. Nobody could check the one that stays."""
        stage, counts = epoch.stage_of(node_id), Counter(chain.from_iterable(self._involved.values()))
        known = [node for node in epoch.column(stage) if node not in epoch.newcomers]
        if len(known) != 2 or node_id not in known or all(at != stage for at, _ in self._found.values()):
            return False
        (other,) = {*known} - {node_id}
        return other not in self._of(epoch).left_out and counts[other] >= counts[node_id]

    def overflow(self, epoch: Epoch, nodes: Sequence[str], now: float) -> RunAgain | None:
        """Gradients overflow at these nodes. None: the step is skipped.

        A node that alone finds that again and again may only say so, which would keep the loss's scale down.
        So others compute the step without it, once.
        """
        step, checked = self._overflow
        if step == epoch.step:
            self._overflow = (-1, "")
            self._lone_overflows.pop(checked, None)
            self._blame.exonerate(checked)
            return None
        first, *others = nodes
        self._lone_overflows[first] += not others
        if others or self._lone_overflows[first] <= LONE_OVERFLOWS:
            return None
        what = f"gradients overflow at {epoch.place_of(first)}"
        if not self._leave_out(first, epoch.step, now):
            return None
        self._overflow = epoch.step, first
        note = (
            f"step {epoch.step + 1} is not committed: {what}, as node {first} alone finds once more; it runs "
            "again without that node"
        )
        return RunAgain(kind=AbortKind.NOT_FINITE, reason=what, note=note)

    def rows_differ(
        self,
        epoch: Epoch,
        odd: Disagreement | Difference,
        now: float,
    ) -> RunAgain | CallThird | Undecided | GiveUp | None:
        """Nodes of one stage disagree: run the step again without the node that most contradict.

        Of two, neither is the odd one, so a third has to compute the same. None if the run cannot do without
        the node.
        """
        if isinstance(odd, Disagreement):
            return self._norms_differ(epoch, odd, now)
        return self._audit_differs(epoch, odd, now)

    def _norms_differ(
        self, epoch: Epoch, case: Disagreement, now: float
    ) -> RunAgain | CallThird | GiveUp | None:
        doubt = self._of(epoch)
        is_first = not doubt.results
        doubt.note_results(epoch)
        note = f"step {epoch.step + 1} is not committed: {case.what}; it runs again"
        if is_first:
            return RunAgain(kind=AbortKind.DIFFERS, reason=case.what, note=note)
        odd = [node for node in doubt.odd_results(epoch.newcomers) if node in epoch.hosts]
        if not odd:
            if (third := self._call_third(epoch, case.reported, case.what)) is not None:
                return third
            # A node whose values change each time need not be wrong: a liar can change others' sums.
            differ = self._named(epoch, case.reported)
            return GiveUp(
                kind=AbortKind.DIFFERS,
                reason=case.what,
                why=f"step {epoch.step + 1} was not committed: {case.what}, and no other node can say which "
                f"of {differ} is wrong",
                remedy="resume with one more node of their kind, or without one of them",
            )
        if not self._leave_out(odd[0], epoch.step, now):
            return None
        note += f", without node {odd[0]}"
        return RunAgain(kind=AbortKind.DIFFERS, reason=case.what, note=note)

    def _audit_differs(
        self, epoch: Epoch, odd: Difference, now: float
    ) -> RunAgain | CallThird | Undecided | None:
        if new := [node for node in epoch.hosts if node in epoch.newcomers]:
            return self._newcomers_differ(epoch, odd, new, now)
        doubt = self._of(epoch)
        is_first = odd.what not in doubt.computed
        doubt.note_computed({**self._auditor.agreed, odd.what: odd.reported})
        self._auditor.doubted = odd.step, odd.group
        what = f"{odd.what} is not the same in all rows that computed group {odd.group}"
        note = f"step {epoch.step + 1} is not committed: {what}; it runs again"
        if wrong := [node for node in sorted(doubt.wrong) if node in epoch.hosts]:
            if not self._leave_out(wrong[0], epoch.step, now):
                return None
            note += f" without node {wrong[0]}: {doubt.wrong[wrong[0]]}"
        elif epoch.has_more_auditors:
            note += ", and a third row computes the group"
        elif (third := self._call_third(epoch, odd.reported, what, only_spares=is_first)) is not None:
            return third
        elif not is_first or frozenset(odd.reported) in self._told:
            return self._undecided(epoch, odd)
        return RunAgain(kind=AbortKind.DIFFERS, reason=what, note=note)

    def _newcomers_differ(
        self,
        epoch: Epoch,
        odd: Difference,
        new: Sequence[str],
        now: float,
    ) -> RunAgain | None:
        """Newcomers' results differ from those of earlier holders of the state, which continue alone.

        This does not count against newcomers, because the state that they got may be wrong.
        """
        gone = [node for node in new if self._leave_out(node, epoch.step, now)]
        if not gone:
            return None
        for node in gone:
            self._blame.exonerate(node)
        self._auditor.refused += 1
        note = (
            f"step {epoch.step + 1} is not committed: {odd.what} is not the same from newcomers and from "
            f"those that held the state before; it runs again without node {', node '.join(gone)}"
        )
        return RunAgain(kind=AbortKind.DIFFERS, reason=odd.what, note=note)

    def third_for_state(self, epoch: Epoch, nodes: Sequence[str], now: float) -> str:
        """Let another node take the place of one of these, which differ on a state, to compute it too.

        Returns the line for the operator; empty if there is no third node of their kind.
        """
        for node_id in [node for node in reversed(nodes) if node in epoch.hosts]:
            alike = self._alike(node_id)
            if self._has_spare(epoch, alike) and self._leave_out(node_id, epoch.step, now):
                self._assigner.regroup(now)
                return f"a spare takes the place of node {node_id}, to tell who is wrong"
            for other in epoch.row(epoch.replica_of(node_id)):
                if epoch.rows == 1 or other == node_id or other not in alike:
                    continue
                if self._assigner.can_exchange(node_id, other, self._roster.candidates()):
                    self._assigner.exchange(node_id, other, self._roster.candidates())
                    return f"node {node_id} and node {other} change places, to tell who is wrong"
        return ""

    def cleared(self, nodes: Collection[str]) -> None:
        """Other nodes have confirmed these nodes' results."""
        for node in nodes:
            self._blame.exonerate(node)

    def _undecided(self, epoch: Epoch, odd: Difference) -> Undecided:
        note = (
            f"step {epoch.step + 1}: {odd.what} is not the same from {self._named(epoch, odd.reported)}; one "
            "of them is wrong, and no third node can say which: let another node of their kind join"
        )
        is_news = frozenset(odd.reported) not in self._told
        self._told.add(frozenset(odd.reported))
        return Undecided(note=note if is_news else "")

    def _named(self, epoch: Epoch, nodes: Collection[str]) -> str:
        """The nodes with their places, for the operator."""
        ordered = sorted(nodes, key=epoch.hosts.index)
        return " and ".join(f"{node} ({epoch.place_of(node)})" for node in ordered)

    def make_room(self, epoch: Epoch, now: float) -> None:
        """The nodes' state is on disk, so the third node that was called can take its place."""
        doubt = self._doubt
        if doubt is None or doubt.step != epoch.step or doubt.third_for not in epoch.hosts:
            return
        if doubt.exchanged:
            self._assigner.exchange(doubt.third_for, doubt.exchanged, self._roster.candidates())
        else:
            self._leave_out(doubt.third_for, epoch.step, now)

    def _call_third(
        self,
        epoch: Epoch,
        nodes: Collection[str],
        what: str,
        *,
        only_spares: bool = False,
    ) -> CallThird | None:
        """Call a third node of these two nodes' kind, once per step: a spare, else one of another stage."""
        doubt, last = self._of(epoch), max(nodes, key=epoch.hosts.index)
        if doubt.third_for:
            return None
        alike = self._alike(last)
        start = f"step {epoch.step + 1} is not committed: {what}; it runs again once "
        if self._has_spare(epoch, alike):
            doubt.third_for = last
            return CallThird(note=f"{start}a spare has the place of node {last}, to tell who is wrong")
        row = epoch.row(epoch.replica_of(last))
        for other in (node for node in row if node != last and node in alike and not only_spares):
            if self._assigner.can_exchange(last, other, self._roster.candidates()):
                doubt.third_for, doubt.exchanged = last, other
                return CallThird(
                    note=f"{start}node {last} and node {other} have changed places, to tell who is wrong"
                )
        return None

    def _alike(self, node_id: str) -> list[str]:
        """The candidates of this node's kind, including itself."""
        kinds = {offer.node_id: (offer.kind, offer.devices) for offer in self._roster.candidates()}
        return [node for node, kind in kinds.items() if kind == kinds.get(node_id)]

    def _has_spare(self, epoch: Epoch, nodes: Collection[str]) -> bool:
        """Whether one of these candidates hosts no stage and has not recently given one up."""
        blameless = {offer.node_id for offer in self._blame.blameless(self._roster.candidates())}
        return any(node in blameless and node not in epoch.hosts for node in nodes)

    def leave_out_one(self, suspects: Sequence[str], step: int, now: float, *, by: str) -> str | None:
        """The first suspect that the run can do without gives up its stage because of a report by `by`."""
        others = self._blame.blameless(self._roster.candidates())
        for node_id in suspects:
            if self._assigner.hand_over(node_id, others, now):
                self._blame.replace(node_id, by=by, step=step)
                return node_id
        return None

    def _leave_out(self, node_id: str, step: int, now: float) -> bool:
        return self.leave_out_one([node_id], step, now, by=node_id) is not None

    def refuted(self, epoch: Epoch, now: float) -> list[Refuted | Alone]:
        """The step is committed, which ends the doubt. Returns the nodes that were wrong in earlier attempts.

        From the next epoch on, other nodes have their stages, if there are any.
        """
        doubt, step = self._doubt, epoch.step
        results: list[Refuted | Alone] = []
        if self._overflow[0] == step:
            (_, node), self._overflow = self._overflow, (-1, "")
            self._blame.set_back(node, step)
            why = f"gradients of step {step + 1} do not overflow without it"
            results.append(Refuted(node_id=node, why=why, at_fault=False))
        if doubt is None or doubt.step != step:
            return results
        self._doubt = self._auditor.doubted = None
        if doubt.computed:
            doubt.note_computed(self._auditor.agreed)
        wrong = dict(doubt.wrong)
        if doubt.replaced:
            if epoch.rows > 1:
                self._found[doubt.replaced] = doubt.stage, step
            wrong[doubt.replaced] = (
                f"what it gave for stage {doubt.stage} in step {step + 1} was wrong, as another node found"
            )
        odd = {node for node in doubt.refuted(epoch) if node not in wrong}
        for node_id in (*doubt.wrong, *odd):
            if node_id in epoch.hosts:
                self._leave_out(node_id, step, now)
        if (
            doubt.third_for
            and not doubt.exchanged
            and doubt.third_for not in {*wrong, *odd}
            and (wrong or odd)
        ):
            self._blame.exonerate(doubt.third_for)
        results += [
            # With several rows, others may have sent it a part of what it gave.
            Refuted(node_id=node, why=why, at_fault=node in doubt.wrong or epoch.rows == 1)
            for node, why in wrong.items()
        ]
        for stage, by_node in doubt.results.items() if epoch.rows == 1 else ():
            host = epoch.hosts[stage]
            gone = [node for node, result in by_node.items() if result != epoch.votes[host].result]
            if gone and not odd:
                differed = f"node {', node '.join(sorted(gone))}, which left its place, differed"
                note = f"step {step + 1} is as node {host} alone computes stage {stage}; {differed}"
                results.append(Alone(note=f"{note}: let one more node of their kind join"))
        why = f"its gradient of step {step + 1} was not that of other nodes with its stage"
        return results + [Refuted(node_id=node, why=why, at_fault=False) for node in sorted(odd)]

    def _of(self, epoch: Epoch) -> _Doubt:
        if self._doubt is None or (self._doubt.step, self._doubt.stages) != (epoch.step, epoch.stages):
            self._doubt = _Doubt(step=epoch.step, stages=epoch.stages)
        return self._doubt


def _contradicted(by_node: Mapping[str, Collection[bytes]]) -> set[str]:
    """Nodes that reported two digests of one value, or another one than nodes that agree."""
    wrong = {node for node, digests in by_node.items() if len(digests) > 1}
    counts = Counter(digest for digests in by_node.values() for digest in set(digests))
    right = [digest for digest, nodes in counts.items() if nodes > 1]
    if len(right) != 1:
        return wrong
    return wrong | {node for node, digests in by_node.items() if set(digests) != {right[0]}}
