"""Checks votes: a vote must speak only for its voter and have plausible values. Also decides what votes lead
to. Pure.

A loss is plausible while it stays in a robust range of the newest steps, given by their median and median
absolute deviation. A norm is compared with a reference that follows the run so slowly that no node can move
it: one step may be far from it, many steps less far. Before there are enough steps, a unit's norm is compared
with recorded norms of the complete model, or else with those of other stages. A lie inside these ranges is
not found. A true value outside of them only makes the step run again on another node.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from node.run_state.actions import Action
from node.run_state.audits import Contradiction, Difference
from wire.messages import Vote


@dataclass(frozen=True)
class NonFinite:
    """A vote that must not be committed, because `what`, a value of `node_id`, is not finite."""

    node_id: str
    what: str


@dataclass(frozen=True)
class Overflow:
    """All have voted, and gradients of the scaled loss overflow at these nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class FiniteUncompressed:
    """A step that was not finite with the run's codecs is finite without them."""


@dataclass(frozen=True)
class Implausible:
    """All votes are finite, but a value of this node is far from those of earlier steps."""

    node_id: str
    """Empty for a loss that nodes reported which are gone."""
    what: str
    is_trend: bool = False
    """Whether this is so in most of the newest steps, which no other node has computed."""
    is_absurd: bool = False
    """Whether no training can continue with such a trend."""


@dataclass(frozen=True)
class NotReproduced:
    """The loaded state does not reproduce the recorded results: it is not the run's state, or a node lies."""

    what: str
    snapshot: int
    """The step whose state was loaded."""
    node_id: str | None = None
    """The node that alone reports the result, "" if it is gone; None if others have computed the same."""


@dataclass(frozen=True)
class RefusedVote:
    """A vote that no correct node of this stage sends."""

    node_id: str
    why: str


@dataclass(frozen=True)
class Disagreement:
    """Rows give different gradient norms for one stage. Rows that compute correctly give the same bits."""

    what: str
    reported: Mapping[str, Mapping[int, float]]
    """The norms from each node of this stage."""


Outcome = (
    list[Action]
    | NonFinite
    | Overflow
    | NotReproduced
    | FiniteUncompressed
    | Implausible
    | RefusedVote
    | Disagreement
    | Difference
    | Contradiction
)
"""What a vote leads to."""


UnitNumbers = Callable[[int], Sequence[frozenset[int]]]
"""A function of the number of stages that gives the numbers of each stage's layer units."""

REMEMBERED = 32
"""The number of steps that make up the range."""
LEAST = 8
"""The least number of steps for a range."""
HISTORY_STEPS = 1024
"""The number of recorded steps that a resumed run uses for its references."""
SPREAD = 8 * 1.4826
"""The width of the range in median absolute deviations; 1.4826 of them are a standard deviation of a normal
distribution."""
NORM_TIMES = 1e4
"""In one step, a squared norm of up to this many times the reference is plausible, whatever the deviations
are."""
TREND_TIMES = 100.0
"""In most of the newest `LEAST` steps, a squared norm of up to this many times the reference is plausible,
after subtracting the growth of other stages' norms."""
SHRUNK_TIMES = 1e6
"""A squared norm of at least the reference divided by this is plausible, if other stages' norms did not
shrink too."""
ABSURD_TIMES = 1e12
"""Nothing above this many times the reference is plausible, whatever the deviations are."""
RISE, FALL, EARLY = math.log(2) / 250, math.log(2) / 25, math.log(10)
"""How far the logarithm of a reference moves in a step: up, down, and in the n-th step `EARLY` / n."""
LEAST_CLIP, CLIPPED_STEPS = 0.01, 50
"""The operator is told if gradients are clipped to less than this share in this many consecutive steps."""
OTHERS_TIMES = 1e6
"""In the first steps, a squared norm of up to this many times the largest of other stages is plausible."""
LOSS_MARGIN = 1.0
"""A loss within this distance of the median, or within half of the median, is plausible whatever the
deviations are."""
REPEATED_TIMES = 16.0
"""A replayed step's squared norm must be within this many times the recorded one. Codecs and hardware may
differ."""
REPEATED_LOSS, REPEATED_PART = 0.1, 0.05
"""A replayed step's loss may differ by at most this much, or by this share."""
RECORDED = 1024
"""The number of steps whose votes are remembered for replays."""
FIRST_LOSS = 1e4
"""The largest plausible loss in the first steps."""


@dataclass(frozen=True, kw_only=True)
class PastStep:
    """The record of a committed step."""

    loss: float
    grad_norm: float
    """The norm before clipping, of the complete model."""
    seconds: float
    norms: Mapping[int, float] = field(default_factory=dict)
    """Squared norms by layer unit; empty if they are not recorded."""


class _Norms:
    """Logarithms of one layer unit's squared norms: the newest ones, and the reference."""

    def __init__(self) -> None:
        self.newest: deque[float] = deque(maxlen=REMEMBERED)
        self.reference = 0.0
        self._steps = 0

    def __len__(self) -> int:
        return len(self.newest)

    def add(self, value: float) -> None:
        self.newest.append(value)
        self._steps += 1
        moved = self.usual() - self.reference
        if self._steps > LEAST:
            early = EARLY / self._steps
            moved = min(max(moved, -max(FALL, early)), max(RISE, early))
        self.reference += moved

    def usual(self, *more: float) -> float:
        """The median of the newest `LEAST` values, including `more`."""
        return median([*self.newest, *more][-LEAST:])

    def margin(self, times: float, spread: float) -> float:
        """How far a logarithm may be from the reference: `times`, or more if steps differ much.

        Steady growth does not count as difference: only how its steps differ from one another matters.
        """
        moves = [after - before for before, after in pairwise(self.newest)]
        deviation = _range(moves)[1] / math.sqrt(2) if moves else 0.0
        return max(math.log(times), min(spread * deviation, math.log(ABSURD_TIMES)))


class VoteHistory:
    """The values of the newest steps' votes, by layer unit."""

    def __init__(
        self, units: UnitNumbers, past: Sequence[PastStep] = (), rounds_from: int | None = None
    ) -> None:
        """
        Args:
            past: the newest steps of an earlier coordinator, oldest first. If the norms of units are not
                recorded, none is larger than the complete model's norm.
            rounds_from: the first step that is a round, if any. Norms of rounds are those of weight changes
                instead of gradients. `past` has steps of the kind that comes next.
        """
        self._rounds_from = rounds_from
        self._in_rounds: bool | None = None
        self._units = units
        self._model = _Norms()
        """The recorded norms of the complete model."""
        self._norms: dict[int, _Norms] = {}
        self._clipped = 0
        """The number of consecutive steps in which gradients were clipped to almost nothing."""
        self._losses: deque[float] = deque(maxlen=REMEMBERED)
        self._loss_stages: dict[int, int] = {}
        """The stage that has the head, by number of stages."""
        self._step = -1
        self._confirmed: set[int] = set()
        """Units whose norms, far above the others', were confirmed by another node."""
        self._record: dict[int, tuple[Mapping[int, float], float]] = {}
        """Norms and loss of committed steps that may be replayed."""
        for step in past:
            if 0 < step.grad_norm < math.inf:
                self._model.add(2 * math.log(step.grad_norm))
            self._remember(step.norms, step.loss)

    def begins(self, step: int) -> None:
        """Votes are for this step from now on. Norms of the other kind of step do not apply to it."""
        in_rounds = self._rounds_from is not None and step >= self._rounds_from
        if self._in_rounds not in (None, in_rounds):
            self._norms.clear()
            self._model = _Norms()
            self._confirmed.clear()
        self._in_rounds = in_rounds

    @property
    def trained(self) -> Collection[int]:
        """Layer units that have had gradients."""
        return self._norms.keys()

    def on_record(self, step: int, norms: Mapping[int, float], loss: float) -> None:
        """Record a step's results. The step may be replayed."""
        self._record.pop(step, None)
        self._record[step] = norms, loss
        if len(self._record) > RECORDED:
            del self._record[next(iter(self._record))]

    def not_reproduced(
        self,
        step: int,
        columns: Sequence[Sequence[str]],
        votes: Sequence[Vote],
        parts: Mapping[str, Collection[float]] = {},
    ) -> tuple[str, str | None] | None:
        """Which value of a replayed step is far from the recorded one, in words, and who alone reports it, as
        in `NotReproduced`; None if none is.

        Args:
            columns: the nodes of each stage.
            votes: by stage.
            parts: as for `implausible`.
        """
        if step not in self._record:
            return None
        known, was = self._record[step]
        loss_stage = self.loss_stage(len(columns))
        loss = votes[loss_stage].loss
        assert loss is not None, "steps without labels are not compared"
        if math.isfinite(was) and abs(loss - was) > max(REPEATED_LOSS, REPEATED_PART * abs(was)):
            what = f"step {step + 1}, run again, has a loss of {loss:.4g} and had {was:.4g}"
            return what, self._reporter(parts, columns[loss_stage][0], is_large=loss > was)
        norms = [sum(vote.norms.values()) for vote in votes]
        before = [sum(known.get(unit, 0.0) for unit in vote.norms) for vote in votes]
        norm, then = sum(norms), sum(before)
        if then > 0.0 and not 1 / REPEATED_TIMES <= norm / then <= REPEATED_TIMES:
            what = (
                f"step {step + 1}, run again, has a gradient of norm {norm**0.5:.4g} and had {then**0.5:.4g}"
            )
            column = columns[max(range(len(columns)), key=lambda at: abs(norms[at] - before[at]))]
            return what, column[0] if len(column) == 1 else None
        return None

    def loss_stage(self, stages: int) -> int:
        """The stage that reports losses. It has the head, which is the last layer unit."""
        if stages not in self._loss_stages:
            units = self._units(stages)
            self._loss_stages[stages] = max(range(stages), key=lambda stage: max(units[stage]))
        return self._loss_stages[stages]

    def refusal(
        self,
        vote: Vote,
        stage: int,
        stages: int,
        groups: Collection[int] | None = None,
        *,
        has_rows: bool = False,
    ) -> str | None:
        """Why this stage cannot have sent this vote: it speaks for others, or has an impossible value.

        Args:
            groups: the gradient groups of its row; None if the run has only one.
            has_rows: whether there are several rows, which compare sums.
        """
        units, has_loss = self._units(stages)[stage], stage == self.loss_stage(stages)
        if vote.norms.keys() != units:
            return f"its vote names layer units {_some(vote.norms)}, and stage {stage} holds {_some(units)}"
        if not vote.sums.keys() <= (units if has_rows else set()):
            return (
                f"its vote has sums of layer units {_some(vote.sums)}, which are not for stage {stage} to say"
            )
        if groups is not None or vote.group_losses:
            return _group_refusal(vote, has_loss, set(groups or ()))
        if vote.loss is None and has_loss:
            return "it voted without a loss, as the stage with the head"
        if vote.loss is not None and not has_loss:
            return "it voted with a loss, which only the stage with the head has"
        if vote.loss is not None and vote.loss < 0:
            return "it voted with a loss below 0"
        return None

    def implausible(
        self, hosts: Sequence[str], votes: Sequence[Vote], parts: Mapping[str, Collection[float]] = {}
    ) -> Implausible | None:
        """The finite vote that is far from those of earlier steps, if any.

        Args:
            hosts: by stage, like `votes`.
            parts: with several rows, the parts of the loss by the node that reported them; those of nodes
                that are gone by "".
        """
        if (odd := self._trend(hosts, votes)) is not None:
            return odd
        largest = [max(vote.norms.values(), default=0.0) for vote in votes]
        # The largest norm among all stages but one is among the two largest.
        first, second = (*sorted(largest, reverse=True)[:2], 0.0)[:2]
        for stage, vote in enumerate(votes):
            others = second if largest[stage] == first else first
            for unit, norm in vote.norms.items():
                if self._is_far(unit, norm, others):
                    what = f"the gradient of layer unit {unit} at stage {stage}"
                    return Implausible(hosts[stage], f"{what} is far from those of the newest steps")
            if vote.loss is not None and self._is_loss_far(vote.loss):
                what = f"the loss of {vote.loss:g} at stage {stage}"
                is_large = not self._losses or vote.loss > median(self._losses)
                culprit = self._reporter(parts, hosts[stage], is_large=is_large)
                return Implausible(culprit, f"{what} is far from those of the newest steps")
        return None

    def committed(self, step: int, norms: Mapping[int, float], loss: float, *, confirmed: bool) -> None:
        """A step is committed. `confirmed`: it was not plausible, but another node found the same."""
        if confirmed:
            others = median(norms.values()) if norms else 0.0
            self._confirmed.update(unit for unit, norm in norms.items() if norm > OTHERS_TIMES * others)
        self.on_record(step, norms, loss)
        if step <= self._step:
            return  # a replay
        self._step = step
        self._remember(norms, loss)
        if confirmed:
            for unit_norms in self._norms.values():
                unit_norms.reference = unit_norms.usual()

    def clipped(self, coefficient: float, norms: Mapping[int, float], hosts: Sequence[str]) -> str | None:
        """A line for the operator if gradients were clipped to almost nothing in many consecutive steps."""
        self._clipped = self._clipped + 1 if coefficient < LEAST_CLIP else 0
        if self._clipped != CLIPPED_STEPS:
            return None
        units = self._units(len(hosts))
        stage = max(range(len(hosts)), key=lambda at: sum(norms.get(unit, 0.0) for unit in units[at]))
        least = f"{LEAST_CLIP:.0%}"
        return (
            f"in {CLIPPED_STEPS} steps running training.clip left less than {least} of the gradients, so "
            f"weights may hardly change; the largest are those that node {hosts[stage]} reports for stage "
            f"{stage}: see whether the loss still falls, lower training.lr or raise training.clip, or evict "
            "that node if only its stage is like this"
        )

    def _remember(self, norms: Mapping[int, float], loss: float) -> None:
        for unit, norm in norms.items():
            if norm > 0 or unit in self._norms:
                self._norms.setdefault(unit, _Norms()).add(_log(norm))
        if math.isfinite(loss):
            self._losses.append(loss)

    def _is_far(self, unit: int, norm: float, others: float) -> bool:
        known = self._norms.get(unit, self._model)
        if len(known) < LEAST:
            known = self._model
        if len(known) >= LEAST:
            if norm <= 0 or math.log(norm) <= known.reference + math.log(NORM_TIMES):
                return False  # the margin is at least as large, so it need not be computed
            return math.log(norm) > known.reference + known.margin(NORM_TIMES, SPREAD)
        return others > 0 and norm > OTHERS_TIMES * others and unit not in self._confirmed

    def _trend(self, hosts: Sequence[str], votes: Sequence[Vote]) -> Implausible | None:
        """A unit whose norms have left their reference in most of the newest steps while others' have not."""
        moved = []
        for vote in votes:
            known = {
                unit: past for unit in vote.norms if len(past := self._norms.get(unit, _Norms())) >= LEAST
            }
            moved.append(
                {unit: past.usual(_log(vote.norms[unit])) - past.reference for unit, past in known.items()}
            )
        by_stage = [median(units.values()) if units else 0.0 for units in moved]
        for stage, units in enumerate(moved):
            elsewhere = [move for other, move in enumerate(by_stage) if other != stage]
            common = median(elsewhere) if elsewhere else 0.0
            for unit, move in units.items():
                above, below = move - max(0.0, common), min(0.0, common) - move
                if above <= math.log(TREND_TIMES) and below <= math.log(SHRUNK_TIMES):
                    continue  # the margins are at least as large, so they need not be computed
                norms = self._norms[unit]
                grows = above > norms.margin(TREND_TIMES, SPREAD / 2)
                if not grows and below <= norms.margin(SHRUNK_TIMES, SPREAD / 2):
                    continue
                times = f"{math.exp(min(abs(move), 700.0)):.0e} times {'above' if grows else 'below'}"
                what = (
                    f"the squared norm of layer unit {unit} at stage {stage} is {times} that of earlier steps"
                )
                absurd = above > math.log(ABSURD_TIMES)
                return Implausible(hosts[stage], what, is_trend=True, is_absurd=absurd)
        return None

    def _reporter(self, parts: Mapping[str, Collection[float]], default: str, *, is_large: bool) -> str:
        """The node whose parts of a loss that is far off are the largest, or the smallest if it is small."""
        means = {node: sum(losses) / len(losses) for node, losses in parts.items() if losses}
        return (max if is_large else min)(means, key=lambda node: means[node], default=default)

    def _is_loss_far(self, loss: float) -> bool:
        if len(self._losses) < LEAST:
            return loss > FIRST_LOSS
        middle, deviation = _range(self._losses)
        return abs(loss - middle) > max(SPREAD * deviation, LOSS_MARGIN, abs(middle) / 2)


def disagreement(votes: Mapping[str, Vote], columns: Sequence[Sequence[str]]) -> Disagreement | None:
    """Nodes of one stage that computed different gradients, if any. `columns`: the nodes of each stage."""
    for stage, column in enumerate(columns):
        first, *others = column
        if any(votes[node].result != votes[first].result for node in others):
            norms = {node: votes[node].norms for node in column}
            return Disagreement(f"the gradient of stage {stage} is not the same in all rows", norms)
    return None


def summed_loss(losses: Mapping[int, float]) -> float:
    """The step's loss, from its groups' parts. They are added in order, so the sum does not depend on which
    rows computed them."""
    total = 0.0
    for group in sorted(losses):  # `sum` rounds differently from Python 3.12 on
        total += losses[group]
    return total


def unscaled(vote: Vote, factor: float) -> Vote:
    """The vote with the norms of the unscaled gradients. `factor` is a power of two, so no bit is lost."""
    if factor == 1.0:
        return vote
    return replace(vote, norms={unit: norm / factor**2 for unit, norm in vote.norms.items()})


def _group_refusal(vote: Vote, has_loss: bool, groups: Collection[int]) -> str | None:
    """Why a vote's losses of groups are refused. Each group counts once, for the row that computes it."""
    if vote.loss is not None:
        return "it voted with a loss, and not with those of its groups"
    wanted = groups if has_loss else set()
    if vote.group_losses.keys() != wanted:
        return f"its vote has the losses of groups {_some(vote.group_losses)}, not of {_some(wanted)}"
    if any(loss < 0 for loss in vote.group_losses.values()):
        return "it voted with a loss below 0"
    return None


def _log(norm: float) -> float:
    """The logarithm of a squared norm; for 0, that of the least positive number."""
    return math.log(max(norm, math.ulp(0.0)))


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median absolute deviation from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def _some(units: Collection[int]) -> str:
    named = sorted(units)
    return f"{named[:8]}{'...' if len(named) > 8 else ''}"
