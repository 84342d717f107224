"""Find whose values are wrong: not finite, not plausible, or not the same in all rows. Pure.

The step runs again without the node that is the likeliest cause. What the commit says then refutes what
others said before. With one word against another nobody is refuted: a third node computes the same, in
another row, or a spare that takes the place of one of the two once their state is on disk.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from node.run_state.actions import AbortKind
from node.run_state.audits import Auditor, Difference
from node.run_state.epoch import Epoch
from node.run_state.failures import Blame, RunAgain
from node.run_state.stage_assignment import Candidate, StageAssigner
from node.run_state.votes import Disagreement


@dataclass
class _Doubt:
    """A step with a value that is not finite or not plausible, or not the same in all rows, and what was done
    to find the cause."""

    step: int
    retried: set[int] = field(default_factory=set)
    """Stages that another node has computed again."""
    left_out: set[str] = field(default_factory=set)
    """With several rows: nodes without which the step ran again."""
    replaced: str = ""
    """Who gave up the stage that was retried last."""
    stage: int = -1
    """That stage."""
    norms: dict[str, Mapping[int, float]] = field(default_factory=dict)
    """What nodes said when rows did not agree."""
    computed: dict[str, dict[str, set[bytes]]] = field(default_factory=dict)
    """What nodes said in audits: digests by value and node, where they did not agree."""
    wrong: set[str] = field(default_factory=set)
    """Whom two others contradict in an audit."""
    third_for: str = ""
    """Whose place a spare takes, so that there are three words."""

    def suspects(self, epoch: Epoch, node_id: str, *, neighbours: bool) -> list[str]:
        """Nodes whose stage others are to compute again: the one that reports, those of its stage in other
        rows, whose gradients are in its sum, then those that send to it."""
        stage, row = epoch.stage_of(node_id), epoch.row(epoch.replica_of(node_id))
        near = [row[one] for one in sorted(epoch.neighbours(node_id))] if neighbours else []
        if epoch.rows == 1:
            return [node for node in (node_id, *near) if epoch.stage_of(node) not in self.retried]
        column = [node for node in epoch.hosts[stage :: epoch.stages] if node != node_id]
        return [node for node in (node_id, *column, *near) if node not in self.left_out]

    def replace(self, epoch: Epoch, culprit: str) -> None:
        """The step runs again without this node."""
        self.replaced, self.stage = culprit, epoch.stage_of(culprit)
        if epoch.rows == 1:
            self.retried.add(self.stage)
        else:
            self.left_out.add(culprit)

    def refuted(self, epoch: Epoch) -> list[str]:
        """Whose norms are not those of the commit, where two nodes or more say the same as it does."""
        wrong = []
        for stage in range(epoch.stages):
            right = set(epoch.hosts[stage :: epoch.stages])
            units = epoch.votes[epoch.hosts[stage]].norms
            said = {node: norms for node, norms in self.norms.items() if norms.keys() == units.keys()}
            right |= {node for node, norms in said.items() if norms == units}
            wrong += [node for node, norms in said.items() if norms != units and len(right) > 1]
        return wrong


@dataclass(frozen=True, kw_only=True)
class CallThird:
    """A spare takes the place of one of two nodes that differ, once the state before the step is on disk."""

    note: str


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """One of two nodes is wrong, and no third can say which: the step is committed."""

    note: str
    """For the operator; empty if these two were named before."""


class WrongValues:
    """One doubt at a time: that of the step that runs."""

    def __init__(self, assigner: StageAssigner, blame: Blame, auditor: Auditor) -> None:
        self._assigner = assigner
        self._blame = blame
        self._auditor = auditor
        self._doubt: _Doubt | None = None
        self._told: set[frozenset[str]] = set()
        """Pairs that differ and that the operator knows of."""

    def nothing_to_try(self, epoch: Epoch) -> None:
        """The step is not run again without another node; who was left out last was not the cause."""
        doubt = self._of(epoch)
        self._blame.exonerate(doubt.replaced)
        doubt.replaced = ""

    def compute_again(
        self,
        epoch: Epoch,
        node_id: str,
        what: str,
        candidates: Sequence[Candidate],
        now: float,
        *,
        neighbours: bool,
    ) -> RunAgain | None:
        """Run the step again without a node that may be wrong; None if none is left to try, or no other.

        Args:
            node_id: who reported the value.
            neighbours: it may come from what neighbours sent.
        """
        self.nothing_to_try(epoch)
        doubt, others = self._of(epoch), self._blame.blameless(candidates)
        for culprit in doubt.suspects(epoch, node_id, neighbours=neighbours):
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

    def rows_differ(
        self,
        epoch: Epoch,
        found: Disagreement | Difference,
        candidates: Sequence[Candidate],
        now: float,
    ) -> RunAgain | CallThird | Undecided | None:
        """Nodes of one stage do not say the same: run the step again without the one that two contradict.

        Of two, none is the odd one: a third has to compute the same. None if the run cannot do without the
        node.
        """
        if isinstance(found, Disagreement):
            return self._norms_differ(epoch, found, candidates, now)
        return self._audit_differs(epoch, found, candidates, now)

    def _norms_differ(
        self, epoch: Epoch, found: Disagreement, candidates: Sequence[Candidate], now: float
    ) -> RunAgain | CallThird | None:
        doubt = self._of(epoch)
        is_first = not doubt.norms
        doubt.norms.update(found.said)
        note = f"step {epoch.step + 1} is not committed: {found.what}; it runs again"
        if not is_first:
            said = {node: tuple(sorted(norms.items())) for node, norms in doubt.norms.items()}
            usual, most = Counter(said.values()).most_common(1)[0]
            odd = [node for node in found.said if said[node] != usual]
            if most == 1:
                third = self._call_third(epoch, found.said, found.what, candidates)
                if third is not None:
                    return third
            if not self._leave_out(odd[-1], candidates, epoch.step, now):
                return None
            note += f", without node {odd[-1]}"
        return RunAgain(kind=AbortKind.DIFFERS, reason=found.what, note=note)

    def _audit_differs(
        self, epoch: Epoch, found: Difference, candidates: Sequence[Candidate], now: float
    ) -> RunAgain | CallThird | Undecided | None:
        doubt = self._of(epoch)
        said = doubt.computed.setdefault(found.what, {})
        for node, digest in found.said.items():
            said.setdefault(node, set()).add(digest)
        self._auditor.doubted = found.step, found.group
        what = f"{found.what} is not the same in all rows that computed group {found.group}"
        note = f"step {epoch.step + 1} is not committed: {what}; it runs again"
        if wrong := _contradicted(said):
            doubt.wrong |= wrong
            if not self._leave_out(min(wrong), candidates, epoch.step, now):
                return None
            note += f" without node {min(wrong)}, which two others contradict"
        elif epoch.has_more_auditors:
            note += ", and a third row computes the group"
        else:
            return self._call_third(epoch, found.said, what, candidates) or self._undecided(epoch, found)
        return RunAgain(kind=AbortKind.DIFFERS, reason=what, note=note)

    def _undecided(self, epoch: Epoch, found: Difference) -> Undecided:
        nodes = sorted(found.said, key=epoch.hosts.index)
        named = " and ".join(f"{node} ({epoch.place_of(node)})" for node in nodes)
        note = (
            f"step {epoch.step + 1}: {found.what} is not the same from {named}; one of them is wrong, and no "
            "third node can say which: let another node of their kind join"
        )
        is_news = frozenset(nodes) not in self._told
        self._told.add(frozenset(nodes))
        return Undecided(note=note if is_news else "")

    def make_room(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> None:
        """What the nodes hold is on disk, so a spare that was called can take its place."""
        doubt = self._doubt
        if doubt is not None and doubt.step == epoch.step and doubt.third_for in epoch.hosts:
            self._leave_out(doubt.third_for, candidates, epoch.step, now)

    def _call_third(
        self, epoch: Epoch, nodes: Collection[str], what: str, candidates: Sequence[Candidate]
    ) -> CallThird | None:
        """Call a spare of the kind of these nodes, once a step."""
        doubt, one = self._of(epoch), max(nodes, key=epoch.hosts.index)
        kinds = {candidate.node_id: candidate.kind for candidate in candidates}
        spares = [
            candidate.node_id
            for candidate in self._blame.blameless(candidates)
            if candidate.node_id not in epoch.hosts and candidate.kind == kinds.get(one)
        ]
        if doubt.third_for or not spares:
            return None
        doubt.third_for = one
        return CallThird(
            note=f"step {epoch.step + 1} is not committed: {what}; it runs again once a spare has the place "
            f"of node {one}, to tell who is wrong"
        )

    def leave_out_one(
        self, suspects: Sequence[str], candidates: Sequence[Candidate], step: int, now: float, *, by: str
    ) -> str | None:
        """The first suspect that the run can do without gives up its stage, for what `by` said."""
        for node_id in suspects:
            if self._assigner.hand_over(node_id, self._blame.blameless(candidates), now):
                self._blame.replace(node_id, by=by, step=step)
                return node_id
        return None

    def _leave_out(self, node_id: str, candidates: Sequence[Candidate], step: int, now: float) -> bool:
        return self.leave_out_one([node_id], candidates, step, now, by=node_id) is not None

    def refuted(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        """The step is committed: who was wrong before, with a line for each. The doubt is over.

        From the next epoch on others have their stages, if there are any.
        """
        doubt, step = self._doubt, epoch.step
        if doubt is None or doubt.step != step:
            return {}
        self._doubt = self._auditor.doubted = None
        odd = f"its gradient of step {step + 1} was not that of other nodes with its stage"
        wrong = dict.fromkeys(doubt.refuted(epoch), odd)
        for what, said in doubt.computed.items():
            for node, digest in self._auditor.agreed.get(what, {}).items():
                said.setdefault(node, set()).add(digest)
            for node in sorted(doubt.wrong | _contradicted(said)):
                wrong[node] = f"it computed {what} in step {step + 1} and two others did not get the same"
        for node_id in wrong:
            if node_id in epoch.hosts:
                self._leave_out(node_id, candidates, step, now)
        if doubt.third_for and doubt.third_for not in wrong and wrong:
            self._blame.exonerate(doubt.third_for)
        if doubt.replaced:
            found = (
                f"what it gave for stage {doubt.stage} in step {step + 1} was wrong, as another node found"
            )
            wrong[doubt.replaced] = found
        return wrong

    def _of(self, epoch: Epoch) -> _Doubt:
        if self._doubt is None or self._doubt.step != epoch.step:
            self._doubt = _Doubt(step=epoch.step)
        return self._doubt


def _contradicted(said: Mapping[str, Collection[bytes]]) -> set[str]:
    """Who said something else than two others, who said the same."""
    counts = Counter(digest for digests in said.values() for digest in set(digests))
    right = [digest for digest, nodes in counts.items() if nodes > 1]
    if len(right) != 1:
        return set()
    return {node for node, digests in said.items() if set(digests) != {right[0]}}
