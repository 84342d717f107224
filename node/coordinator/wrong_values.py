"""Find whose values are wrong: not finite, not plausible, or not the same in all rows. Pure.

The step runs again without the node that is the likeliest cause. What the commit says then refutes what
others said before; with one word against another, nobody is refuted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from node.coordinator.actions import AbortKind
from node.coordinator.epoch import Epoch
from node.coordinator.failures import Blame, RunAgain
from node.coordinator.stage_assignment import Candidate, StageAssigner
from node.coordinator.votes import Disagreement


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


class WrongValues:
    """One doubt at a time: that of the step that runs."""

    def __init__(self, assigner: StageAssigner, blame: Blame) -> None:
        self._assigner = assigner
        self._blame = blame
        self._doubt: _Doubt | None = None

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
        self, epoch: Epoch, found: Disagreement, candidates: Sequence[Candidate], now: float
    ) -> RunAgain | None:
        """Run the step again; if rows differ once more, without the node whose gradient is the odd one.

        None if the run cannot do without it.
        """
        doubt, culprit = self._of(epoch), found.node_id
        is_first = not doubt.norms
        doubt.norms.update(found.norms)
        note = f"step {epoch.step + 1} is not committed: {found.what}; it runs again"
        if not is_first:
            if not self._assigner.hand_over(culprit, self._blame.blameless(candidates), now):
                return None
            self._blame.replace(culprit, by=culprit, step=epoch.step)
            note += f", without node {culprit}"
        return RunAgain(kind=AbortKind.DIFFERS, reason=found.what, note=note)

    def refuted(self, epoch: Epoch, candidates: Sequence[Candidate], now: float) -> dict[str, str]:
        """The step is committed: who was wrong before, with a line for each. The doubt is over.

        From the next epoch on others have their stages, if there are any.
        """
        doubt, step = self._doubt, epoch.step
        if doubt is None or doubt.step != step:
            return {}
        self._doubt = None
        odd = f"its gradient of step {step + 1} was not that of other nodes with its stage"
        wrong = dict.fromkeys(doubt.refuted(epoch), odd)
        for node_id in wrong:
            if self._assigner.hand_over(node_id, self._blame.blameless(candidates), now):
                self._blame.replace(node_id, by=node_id, step=step)
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
