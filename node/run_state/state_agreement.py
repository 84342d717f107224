"""Which state of a step is the run's, from what the nodes that hold it report about its layers. Pure.

At a snapshot's step every host reports the hashes of its layers (`StateHashes`). Nodes of one stage and
one kind hold the same bits, so a layer counts with the hash that more than half of them report. A node
that recently fetched its state is no witness of it until the run has seen that it computes what others do.
If only one node holds a layer, the norms of its weights and moments are compared with those on nodes of
other kinds, and with the newest agreed ones.

If no hash has a majority, another node takes the place of one of those that differ, and computes the state
again from the newest agreed snapshot. Until then, what nodes reported about the earlier step is
remembered.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

from node.run_state.epoch import Epoch
from node.run_state.votes import UnitNumbers
from wire.messages import StateHashes, UnitHash

LATE_WORDS = 4
"""For how many past snapshots nodes may still report what they held."""
REMEMBERED = 64
"""How many snapshots are remembered."""
LEAST_TIMES, MOST_TIMES = 0.5, 4.0
"""The norm of a layer's weights stays between these multiples of that in the newest agreed snapshot, or moves
no further from it than the optimizer can move weights."""
MOMENT_TIMES = 1e3
"""The same for moments, which follow the gradients and never vanish: for the size of these gradients. Sums of
squares of first moments grow with its square, those of second moments with its fourth power."""
OTHER_KIND = 0.05
"""The share by which the sums of nodes of another kind may differ."""
PROBATION = 2
"""How many steps a newcomer must compute like others: the first shows its weights, the next its moments."""
MOST_DISPUTES = 3
"""How many attempts at one step may end without agreement before the run ends."""

Moved = Callable[[int, int, int], float]
"""A function of (layer unit, first step, last step) that gives how far, in their norm, the optimizer can move
the unit's weights between the states of these steps."""


@dataclass(frozen=True, kw_only=True)
class Settled:
    """All layers of a snapshot have their hashes."""

    step: int
    units: Mapping[int, UnitHash]
    alone: Mapping[int, str]
    """The node, for each layer unit that one node alone holds."""
    proven: frozenset[str]
    """Nodes that hold what was agreed."""
    cleared: frozenset[str]
    """Nodes that said the same in an attempt that came to nothing."""


@dataclass(frozen=True, kw_only=True)
class WrongState:
    """A node reports another state than the one on which others agree."""

    step: int
    node_id: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Dispute:
    """No state of a step has a majority, so the snapshot is not taken."""

    step: int
    nodes: tuple[str, ...]
    """The nodes that differ, in the order of their places; or the only holder, which differs from what the
    run had."""
    what: str


@dataclass(frozen=True, kw_only=True)
class TooFew:
    """Too many of the nodes that held the state are gone, so the snapshot is not taken."""

    step: int


Finding = Settled | WrongState | Dispute | TooFew


@dataclass
class _Asked:
    """One attempt at a snapshot."""

    step: int
    epoch: int
    stages: int
    grid: tuple[str, ...]
    """Row after row; "" where nobody was."""
    kinds: Mapping[str, Hashable]
    witnesses: frozenset[str]
    """Nodes that held the state before others fetched it."""
    makers: tuple[str, ...]
    """The node of each stage that hands in its layers."""
    trained: frozenset[int]
    """Layer units that have had gradients."""
    reported: dict[str, Mapping[int, UnitHash]] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    settled: Mapping[int, UnitHash] | None = None
    over: bool = False
    """It came to nothing."""

    def column(self, stage: int) -> tuple[str, ...]:
        return tuple(node for node in self.grid[stage :: self.stages] if node)

    def judges(self, stage: int) -> list[str]:
        """The nodes whose word counts on the layers that the stage's maker hands in.

        A witness alone decides nothing against newcomers, and they nothing against it.
        """
        column, kind = self.column(stage), self.kinds[self.makers[stage]]
        alike = [node for node in column if self.kinds[node] == kind]
        witnesses = [node for node in alike if node in self.witnesses]
        return witnesses if len(witnesses) > 1 else alike

    def outvoted(self, judges: Collection[str], words: Mapping[str, UnitHash], top: UnitHash) -> bool:
        """Whether newcomers say another thing than all witnesses."""
        witnessed = [words[node] for node in judges if node in self.witnesses and node in words]
        return bool(witnessed) and all(word.hashes != top.hashes for word in witnessed)


class StateAgreement:
    """The newest attempts at snapshots of one run, and what nodes reported about them."""

    def __init__(
        self,
        units: UnitNumbers,
        weights_from: float = inf,
        moved: Moved = lambda *_: 0.0,
    ) -> None:
        """
        Args:
            units: number of stages -> the numbers of each stage's layer units.
            weights_from: snapshots of this step and of later ones have weights alone.
        """
        self._units = units
        self._weights_from = weights_from
        self._moved = moved
        self._asked: dict[int, _Asked] = {}
        """The newest attempt at each step."""
        self._newest: Mapping[int, UnitHash] = {}
        """The hashes of the newest snapshot that was agreed on."""
        self._newest_step = 0
        """Its step."""
        self._words: dict[tuple[int, int], dict[int, dict[str, UnitHash]]] = {}
        """What nodes reported of each unit when they differed, by step and number of stages."""
        self._disputes: Counter[int] = Counter()
        self._doubtful: set[str] = set()
        """Nodes that differ from others, since the newest snapshot that was agreed on."""
        self._alone: dict[int, tuple[str, ...]] = {}
        """The nodes that alone held a layer, by step of an agreed snapshot."""

    # ---- what happens

    def expect(self, epoch: Epoch) -> None:
        """A snapshot of the epoch's state is being taken; an earlier attempt at its step is over."""
        self._asked[epoch.step] = _Asked(
            step=epoch.step,
            epoch=epoch.number,
            stages=epoch.stages,
            grid=tuple(epoch.grid),
            kinds=epoch.kinds_of,
            witnesses=frozenset(epoch.hosts) - epoch.newcomers,
            makers=epoch.snapshot_nodes,
            trained=frozenset(epoch.trained),
        )

    def refusal(self, node_id: str, message: StateHashes) -> str | None:
        """Why no correct node of this place sends this."""
        asked = self._asked.get(message.step)
        if asked is None or asked.epoch != message.epoch or node_id not in asked.kinds:
            return None
        units = self._units(asked.stages)[asked.grid.index(node_id) % asked.stages]
        if message.units.keys() != units:
            return f"its hashes of the state of step {message.step} are not of the layers that it holds"
        return None

    def take(self, node_id: str, message: StateHashes) -> list[Finding]:
        """A node says what it holds."""
        asked = self._asked.get(message.step)
        if asked is None or asked.epoch != message.epoch or node_id not in asked.kinds or asked.over:
            return []
        if node_id in asked.reported:
            return []  # told again, since a connection broke
        asked.reported[node_id] = message.units
        return self._look(asked)

    def lost(self, node_id: str) -> list[Finding]:
        """A node is gone: do not wait for its report."""
        findings: list[Finding] = []
        for asked in [ask for ask in self._asked.values() if node_id in ask.kinds]:
            asked.gone.add(node_id)
            findings += self._look(asked)
        return findings

    def stored(self, step: int) -> None:
        """The snapshot of `step` is complete: nobody goes back to before it."""
        # Who is slow to say what it held is found out all the same.
        for at in sorted(self._asked)[:-LATE_WORDS]:
            del self._asked[at]
        for at in sorted(self._alone)[:-REMEMBERED]:
            del self._alone[at]
        self._words = {at: words for at, words in self._words.items() if at[0] > step}
        self._disputes = Counter({at: count for at, count in self._disputes.items() if at > step})

    def may_try_again(self, step: int) -> bool:
        """Whether another node's word may still settle it."""
        return self._disputes[step] <= MOST_DISPUTES

    # ---- inside

    def _look(self, asked: _Asked) -> list[Finding]:
        """What follows from all that was said of an attempt so far."""
        if asked.over:
            return []
        if asked.settled is not None:
            return [*self._wrong(asked, asked.settled)]
        agreed: dict[int, UnitHash] = {}
        alone: dict[int, str] = {}
        complete, short = True, False
        for stage, units in enumerate(self._units(asked.stages)):
            judges = asked.judges(stage)
            waits = [node for node in judges if node not in asked.reported and node not in asked.gone]
            for unit in sorted(units):
                words = {node: asked.reported[node][unit] for node in judges if node in asked.reported}
                top, count = _most(words)
                if len(judges) > 1 and count > len(judges) // 2 and not asked.outvoted(judges, words, top):
                    agreed[unit] = top
                elif waits:
                    complete = False
                elif len({word.hashes for word in words.values()}) > 1:
                    return self._disputed(asked, stage, words)
                elif len(judges) > 1 or not words:
                    short = True
                elif (
                    why := self._implausible(asked, stage, unit, top) or self._doubted(asked, unit, words)
                ) and not self._reported_before(asked, unit, words, top):
                    return self._disputed(asked, stage, words, why)
                else:
                    agreed[unit], alone[unit] = top, judges[0]
        if complete and short:
            asked.over = True
            return [TooFew(step=asked.step)]
        if not complete:
            return []
        asked.settled = self._newest = agreed
        self._newest_step = asked.step
        self._doubtful.clear()
        self._alone[asked.step] = tuple(dict.fromkeys(alone.values()))
        wrong = self._wrong(asked, agreed)
        bad = {odd.node_id for odd in wrong}
        before = self._words.get((asked.step, asked.stages), {})
        cleared = {
            node for unit, words in before.items() for node in words if words[node] == agreed.get(unit)
        }
        settled = Settled(
            step=asked.step,
            units=agreed,
            alone=alone,
            proven=frozenset(asked.reported.keys() - bad),
            cleared=frozenset(cleared - bad),
        )
        return [settled, *wrong]

    def _wrong(self, asked: _Asked, agreed: Mapping[int, UnitHash]) -> list[WrongState]:
        """The nodes of the makers' kinds that report something else than what was agreed on, now or in
        earlier attempts."""
        wrong: dict[str, WrongState] = {}
        for stage, units in enumerate(self._units(asked.stages)):
            kind, judges = asked.kinds[asked.makers[stage]], asked.judges(stage)
            for unit in sorted(units):
                words = {
                    node: asked.reported[node][unit]
                    for node in asked.column(stage)
                    if node in asked.reported and asked.kinds[node] == kind
                }
                earlier = self._words.get((asked.step, asked.stages), {}).get(unit, {})
                right = agreed[unit].hashes
                # An earlier attempt may have had other bits, unless somebody says the same in both.
                if any(node in words and words[node].hashes == w.hashes for node, w in earlier.items()) or (
                    len(judges) == 1 and (len(earlier) == 1 or right in {w.hashes for w in earlier.values()})
                ):
                    words = {**earlier, **words}
                same = sum(words[node].hashes == right for node in words)
                for node, word in words.items():
                    if word.hashes != right and node not in asked.gone:
                        wrong.setdefault(node, self._against(asked, node, unit, max(same, len(judges) // 2)))
        for node in wrong:
            asked.gone.add(node)  # said once
        return list(wrong.values())

    def _against(self, asked: _Asked, node: str, unit: int, others: int) -> WrongState:
        who = "another node holds" if others == 1 else f"{others} other nodes hold"
        why = f"its state of layer unit {unit} after step {asked.step} is not the one that {who}"
        return WrongState(step=asked.step, node_id=node, why=why)

    def _disputed(
        self, asked: _Asked, stage: int, words: Mapping[str, UnitHash], why: str = ""
    ) -> list[Finding]:
        """Nodes differ, or the only holder differs from what the run had. Returns who is wrong by the reports
        of earlier attempts, or else a dispute."""
        asked.over = True
        self._disputes[asked.step] += 1
        known = self._words.setdefault((asked.step, asked.stages), {})
        wrong: dict[str, WrongState] = {}
        for unit in sorted(self._units(asked.stages)[stage]):
            earlier = known.setdefault(unit, {})
            known_words = {
                **earlier,
                **{node: asked.reported[node][unit] for node in words if node in asked.witnesses},
            }
            top, count = _most(known_words)
            # Who says another thing than before computed another state, and is no witness of this one.
            steady = {n for n in known_words if n not in earlier or earlier[n] == known_words[n]}
            if len(steady) > 2 and count > len(known_words) // 2:
                for node in [n for n in words if asked.reported[n][unit].hashes != top.hashes]:
                    wrong.setdefault(node, self._against(asked, node, unit, count))
            earlier.update(known_words)
        if len(words) > 1 or self._doubtful.intersection(words):
            self._doubtful.update(words)
        nodes = tuple(sorted(words, key=asked.grid.index))
        what = why or f"the state of stage {stage} after step {asked.step} is not the same in all rows"
        return [*wrong.values()] or [Dispute(step=asked.step, nodes=nodes, what=what)]

    def _reported_before(self, asked: _Asked, unit: int, words: Collection[str], word: UnitHash) -> bool:
        """Whether another node said the same in an earlier attempt."""
        earlier = self._words.get((asked.step, asked.stages), {}).get(unit, {})
        return any(other.hashes == word.hashes for node, other in earlier.items() if node not in words)

    def _doubted(self, asked: _Asked, unit: int, words: Collection[str]) -> str | None:
        """Whether the only holder, or who held the layer before, differs from others on an earlier state.

        Else whoever stays when the other one goes would be right.
        """
        earlier = self._words.get((asked.step, asked.stages), {}).get(unit, {})
        if self._doubtful.isdisjoint({*words, *earlier}):
            return None
        named = ", node ".join(sorted(self._doubtful))
        return f"nobody else holds layer unit {unit} after step {asked.step} since node {named} differed"

    def _implausible(self, asked: _Asked, stage: int, unit: int, word: UnitHash) -> str | None:
        """What is odd about a layer that one node alone holds; None if nothing."""
        what = f"layer unit {unit} after step {asked.step} at node {asked.makers[stage]}"
        others = [node for node in asked.column(stage) if node in asked.reported and node in asked.witnesses]
        for node in others:
            other = asked.reported[node][unit]
            if not _near(word.weights, other.weights):
                return f"the weights of {what} are not those of node {node}"
            if not (_near(word.moments, other.moments) and _near(word.squares, other.squares)):
                return f"the optimizer's moments of {what} are not those of node {node}"
        has_moments = asked.step < self._weights_from
        if unit in asked.trained and 0.0 in (word.weights, word.squares if has_moments else 1.0):
            return f"{what} is all zeros"
        if (before := self._newest.get(unit)) is None:
            return None
        times = (word.weights / before.weights) ** 0.5 if before.weights else 1.0
        if not LEAST_TIMES <= times <= MOST_TIMES:
            first, last = sorted((self._newest_step, asked.step))
            if abs(times - 1) * before.weights**0.5 > self._moved(unit, first, last):
                return f"the weights of {what} are {times:.3g} times those of the snapshot before"
        for now, then, power in ((word.moments, before.moments, 2), (word.squares, before.squares, 4)):
            most = MOMENT_TIMES**power
            if has_moments and then and not 1 / most <= now / then <= most:
                return f"the optimizer's moments of {what} are far from those of the snapshot before"
        return None

    def held_alone(self, step: int) -> tuple[str, ...]:
        """Nodes that alone held a layer of this snapshot, where nobody else could say what it is."""
        return self._alone.get(step, ())


class Standing:
    """Which hosts are witnesses of the run's state.

    A host that fetched its state while others held it is no witness until it has computed the same as they
    did in its first `PROBATION` steps, or holds the agreed state of a snapshot.
    """

    def __init__(self) -> None:
        self._proven: set[tuple[str, int, int]] = set()
        """Nodes, with their stage and the number of stages."""
        self._left: Counter[str] = Counter()
        """The steps that each newcomer still has to show."""

    def began(self, epoch: Epoch) -> None:
        """All hosts hold the state of the epoch's first step."""
        places = {(node, epoch.stage_of(node), epoch.stages) for node in epoch.hosts}
        known = self._proven & places
        # What all load at once is the same for all.
        self._proven = known if known and epoch.step > 0 and not epoch.is_loaded else places
        self._left = Counter(dict.fromkeys((node for node, *_ in places - self._proven), PROBATION))
        self._note(epoch)

    def entered(self, epoch: Epoch, node_id: str, stage: int) -> None:
        """A node gets a seat of the epoch while that is on."""
        self._proven.discard((node_id, stage, epoch.stages))
        self._left[node_id] = PROBATION

    def noted(self, epoch: Epoch, nodes: Collection[str]) -> None:
        """These nodes have their seats now."""
        if nodes:
            self._note(epoch)

    def stepped(self, epoch: Epoch) -> None:
        """The newest step of the epoch is committed."""
        if epoch.audit is None or not epoch.newcomers:
            return
        for row in epoch.audit.rows[1:]:
            self._left.subtract(node for node in epoch.row(row) if node in epoch.newcomers)
        self.prove(epoch, [node for node in epoch.newcomers if self._left[node] <= 0])

    def prove(self, epoch: Epoch, nodes: Collection[str]) -> None:
        """These nodes hold the run's state."""
        new = epoch.newcomers.intersection(nodes)
        self._proven |= {(node, epoch.stage_of(node), epoch.stages) for node in new}
        self._note(epoch)

    def _note(self, epoch: Epoch) -> None:
        epoch.trust({node for node, *_ in self._proven})


def _most(words: Mapping[str, UnitHash]) -> tuple[UnitHash, int]:
    """The most frequent report, and how many nodes gave it."""
    if not words:
        return UnitHash(""), 0
    ((hashes, count),) = Counter(word.hashes for word in words.values()).most_common(1)
    return next(word for word in words.values() if word.hashes == hashes), count


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= OTHER_KIND * max(value, other)
