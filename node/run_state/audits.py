"""Audits: two rows compute the same gradient group, and the results that their nodes report are compared.
Pure.

With every vote, a node sends digests of what it computed for each group: of the tensors that it sent and
received, and of its packed gradient. In some steps, which no node can predict, another row also computes one
of a row's groups. From the same inputs, nodes of the same kind compute the same bits. So the first
difference, in the order of the computation, is between two nodes of one stage, and one of them is wrong.

A node whose values are all wrong is found in an audited step if its row is one of the two. A digest covers
what a node computed: a node that computes correctly and then sends other gradients between rows is not found.
"""

import hmac
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from node.run_state.grid import Groups
from wire.messages import BoundaryEnd, FailureKind, GroupDigests, StepFailed, Vote


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A group that several rows compute in a step."""

    group: int
    rows: tuple[int, ...]
    """The row that the group belongs to, then the rows that compute it only as a check."""

    def extra(self, row: int) -> tuple[int, ...]:
        """The groups that a row computes to check another."""
        return (self.group,) if row in self.rows[1:] else ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Nodes of one stage computed different values from the same inputs, so at least one is wrong."""

    step: int
    group: int
    what: str
    """The value in words, which are the same in every attempt at the step."""
    reported: Mapping[str, bytes]
    """The value's digest, by node."""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """Two neighbours report different digests of a tensor that one sent to the other, so one report is
    wrong."""

    receiver: str
    what: str
    step: int
    stage: int
    """The sender's stage and row."""
    row: int

    def complaint(self, epoch: int) -> StepFailed:
        """The receiver's complaint about the sender."""
        return StepFailed(
            epoch=epoch,
            step=self.step,
            kind=FailureKind.PEER,
            message=f"{self.what}: stage {self.stage} says that it sent something else",
            peer_stage=self.stage,
            peer_replica=self.row,
        )


class Auditor:
    """Chooses what is audited in each step, and compares the digests."""

    def __init__(
        self, rate: float, secret: bytes, boundaries: Callable[[int], int], *, compares: bool = False
    ) -> None:
        """
        Args:
            rate: the share of steps with an audit.
            secret: known only to the coordinator, so that no node can predict these steps.
            boundaries: number of stages -> boundaries between chunks.
            compares: newcomers are compared in their first steps, even at a rate of 0.
        """
        self._compares = compares
        self._rate = rate
        self._secret = secret
        self._boundaries = boundaries
        self.doubted: tuple[int, int] | None = None
        """A step and one of its groups, which is always audited, by two more rows if there are any."""
        self.refused = 0
        """How often newcomers' results differed from those of earlier holders, so that another row compares
        the next ones: one that lies keeps none out."""
        self.agreed: dict[str, dict[str, bytes]] = {}
        """The newest audit's digests: for each value the digest of each node, if all nodes reported the
        same."""

    @property
    def is_on(self) -> bool:
        """Whether every vote has digests, not only votes in which newcomers are compared."""
        return self._rate > 0.0

    def draw(
        self, step: int, groups: Groups, kinds: Sequence[Hashable], new: Sequence[int] = ()
    ) -> Audit | None:
        """The audit of a step, which is the same whenever the step runs with this placement.

        Args:
            groups: the groups of each row; empty for a row that computes nothing.
            kinds: the kinds of hosts, row after row. Rows check each other if their nodes' kinds are equal.
            new: rows that are always compared with another row.
        """
        rows = [row for row, run in enumerate(groups) if run]
        if len(rows) == 1 or not (self._rate > 0.0 or (new and self._compares)):
            return None
        alike = rows_alike(kinds, len(groups))
        known = [row for row in rows if row not in new] if new and self._compares else []
        first = self.refused % max(1, len(known))
        for old in (*known[first:], *known[:first]):
            if others := [row for row in alike[old] if row in new and row in rows]:
                return Audit(group=groups[old][0], rows=(old, *others[:2]))
        if self._rate == 0.0:
            return None
        pairs = [(own, row) for own, row in permutations(rows, 2) if row in alike[own]]
        if self.doubted is not None and self.doubted[0] == step:
            group = self.doubted[1]
            own = next(row for row, run in enumerate(groups) if group in run)
            others = [row for first, row in pairs if first == own]
            return Audit(group=group, rows=(own, *others[:2])) if others else None
        drawn = hmac.digest(self._secret, step.to_bytes(8), "sha256")
        share, pair, which = (int.from_bytes(drawn[at : at + 8]) for at in (0, 8, 16))
        if not pairs or share >= self._rate * 2**64:
            return None
        own, row = pairs[pair % len(pairs)]
        return Audit(group=groups[own][which % len(groups[own])], rows=(own, row))

    def refusal(
        self, vote: Vote, stage: int, stages: int, own: Sequence[int], extra: Sequence[int], *, has_loss: bool
    ) -> str | None:
        """Why this stage cannot have sent these digests; None if it can.

        Args:
            own: the groups of its row; empty if the step has no digests.
            extra: groups of another row that it computed.
            has_loss: whether it has the head.
        """
        wanted = {*own, *extra}
        if vote.digests.keys() != wanted:
            return f"its vote has digests of the groups {sorted(vote.digests)}, not of {sorted(wanted)}"
        if not wanted:
            return None
        last = self._boundaries(stages) - 1
        ends = set()
        for boundary in range(last + 1):
            before, after = boundary % stages == stage, (boundary + 1) % stages == stage
            ends |= {BoundaryEnd(boundary, backward, backward) for backward in (False, True) if before}
            ends |= {BoundaryEnd(boundary, backward, not backward) for backward in (False, True) if after}
        for group, digests in vote.digests.items():
            if digests.boundaries.keys() != ends:
                return f"its digests of group {group} are not those of stage {stage}"
            if (digests.loss is not None) != (has_loss and group in extra):
                return f"its digests of group {group} have a loss in the wrong place"
        return None

    def compare(
        self, audit: Audit, step: int, rows: Mapping[int, Sequence[tuple[str, Vote]]], loss_stage: int
    ) -> Difference | Contradiction | None:
        """The first difference in the order of the computation; None if all reports are equal.

        Args:
            rows: by audited row, the node and the vote of each stage.
        """
        self.agreed = {}
        group, stages = audit.group, len(next(iter(rows.values())))
        digests_of = {row: [vote.digests[group] for _, vote in places] for row, places in rows.items()}
        last = self._boundaries(stages) - 1
        order = [(boundary, False) for boundary in range(last + 1)]
        backward = [(boundary, True) for boundary in range(last, -1, -1)]
        for boundary, is_gradient in order:
            if (odd := self._at(step, group, rows, digests_of, boundary, backward=is_gradient)) is not None:
                return odd
        losses = {row: _loss(places[loss_stage][1], group) for row, places in rows.items()}
        if (odd := self._difference(step, group, "the loss", rows, loss_stage, losses)) is not None:
            return odd
        for boundary, is_gradient in backward:
            if (odd := self._at(step, group, rows, digests_of, boundary, backward=is_gradient)) is not None:
                return odd
        for stage in range(stages):
            sums = {row: digests[stage].gradient for row, digests in digests_of.items()}
            if (odd := self._difference(step, group, "the gradient", rows, stage, sums)) is not None:
                return odd
        return None

    def _at(
        self,
        step: int,
        group: int,
        rows: Mapping[int, Sequence[tuple[str, Vote]]],
        found: Mapping[int, Sequence[GroupDigests]],
        boundary: int,
        *,
        backward: bool,
    ) -> Difference | Contradiction | None:
        stages = len(next(iter(rows.values())))
        sender, receiver = boundary % stages, (boundary + 1) % stages
        if backward:
            sender, receiver = receiver, sender
        what = f"the {'gradients' if backward else 'activations'} over boundary {boundary}"
        sent = {}
        for row, digests in found.items():
            sent[row] = digests[sender].boundaries[BoundaryEnd(boundary, backward, False)]
            if digests[receiver].boundaries[BoundaryEnd(boundary, backward, True)] != sent[row]:
                node = rows[row][receiver][0]
                return Contradiction(receiver=node, what=what, step=step, stage=sender, row=row)
        return self._difference(step, group, what, rows, sender, sent)

    def _difference(
        self,
        step: int,
        group: int,
        what: str,
        rows: Mapping[int, Sequence[tuple[str, Vote]]],
        stage: int,
        values: Mapping[int, bytes],
    ) -> Difference | None:
        digest_of = {rows[row][stage][0]: value for row, value in values.items()}
        what = f"{what} of stage {stage}"
        if len(set(values.values())) > 1:
            return Difference(step=step, group=group, what=what, reported=digest_of)
        self.agreed[what] = digest_of
        return None


def rows_alike(kinds: Sequence[Hashable], rows: int) -> list[list[int]]:
    """For each row, the rows whose nodes are of the same kinds, itself included.

    Args:
        kinds: the kinds of hosts, row after row.
    """
    stages = len(kinds) // rows
    of_rows = [tuple(kinds[row * stages : (row + 1) * stages]) for row in range(rows)]
    return [[row for row, other in enumerate(of_rows) if other == own] for own in of_rows]


def _loss(vote: Vote, group: int) -> bytes:
    loss = vote.digests[group].loss
    return struct.pack("<d", vote.group_losses[group] if loss is None else loss)
