"""Which pairs of nodes measure the line between them, and when. Pure: the clock is an argument.

Only pairs that could become neighbours are measured: all pairs of a few nodes, or of many nodes each with
`NEAR` others. A few pairs measure at a time, each node in at most one of them, and each pair once while
both nodes stay. A node that does not answer delays no other pair: its turn ends, and after `MOST_FAILURES`
turns its pairs count as unknown. Answers about pairs that a node was not asked to measure are dropped.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from wire.messages import PeerRate, PlacedStage, ProbePeer
from wire.peer_probe import PROBE_SECONDS

ALL_PAIRS = 12
"""The most nodes for which all pairs are measured."""
NEAR = 6
"""With more nodes, each is measured with this many others."""
AT_ONCE = 4
"""The pairs that are measured at a time, or one for every `SHARE` nodes if that is more."""
SHARE = 50
TURN_SECONDS = 1.5 * PROBE_SECONDS
MOST_FAILURES = 2

Pair = tuple[str, str]
"""The node that dials, and the one that is dialled."""


@dataclass(frozen=True)
class _Turn:
    pair: Pair
    ends: float


class ProbeDesk:
    """Tracks the present nodes and their answers, and decides which pairs measure next."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}
        """Turns, by the node that dials."""
        self._failures: dict[Pair, int] = {}
        self._done: set[frozenset[str]] = set()
        self._here: Mapping[str, str] = {}
        self._wanted: list[Pair] = []

    def present(self, addresses: Mapping[str, str]) -> None:
        """Set the connected nodes, and the address at which others dial each ("" if they cannot)."""
        if addresses == self._here:
            return
        gone = self._here.keys() - addresses.keys()
        self._here = dict(addresses)
        if gone:
            self._done = {pair for pair in self._done if not pair & gone}
            self._failures = {pair: n for pair, n in self._failures.items() if not gone.intersection(pair)}
            self._turns = {
                node: turn for node, turn in self._turns.items() if not gone.intersection(turn.pair)
            }
        self._wanted = pairs_to_measure(addresses)

    @property
    def complete(self) -> bool:
        """Whether nothing remains to be measured."""
        return not self._turns and not any(map(self._is_open, self._wanted))

    @property
    def measured(self) -> int:
        """The number of pairs of present nodes whose line is known."""
        return len(self._done)

    def due(self, now: float) -> list[tuple[str, ProbePeer]]:
        """The nodes that should measure now, each with its message. `now`: seconds on any monotonic clock."""
        for node, turn in list(self._turns.items()):
            if now >= turn.ends:
                self._failed(node)
        busy = {node for turn in self._turns.values() for node in turn.pair}
        due = []
        most = max(AT_ONCE, len(self._here) // SHARE)
        for pair in self._wanted:
            if len(self._turns) >= most:
                break
            if not self._is_open(pair) or busy.intersection(pair):
                continue
            busy.update(pair)
            dialler, other = pair
            self._turns[dialler] = _Turn(pair, now + TURN_SECONDS)
            place = PlacedStage(node_id=other, address=self._here[other])
            due.append((dialler, ProbePeer(peer=place)))
        return due

    def answered(self, node: str, rate: PeerRate) -> bool:
        """Take a node's answer. Returns whether it was asked for and has a result."""
        turn = self._turns.get(node)
        if turn is None or turn.pair != (node, rate.node_id):
            return False
        if rate.round_trip <= 0 or (rate.up <= 0 and rate.down <= 0):
            self._failed(node)
            return False
        del self._turns[node]
        self._done.add(frozenset(turn.pair))
        return True

    def _failed(self, node: str) -> None:
        pair = self._turns.pop(node).pair
        self._failures[pair] = self._failures.get(pair, 0) + 1
        # Other pairs come first. This one may not be wanted any more.
        if pair in self._wanted:
            self._wanted.remove(pair)
            self._wanted.append(pair)

    def _is_open(self, pair: Pair) -> bool:
        return frozenset(pair) not in self._done and self._failures.get(pair, 0) < MOST_FAILURES


def pairs_to_measure(addresses: Mapping[str, str]) -> list[Pair]:
    """Pairs that may become neighbours, in the order to measure them. One of the two can dial the other."""
    nodes = sorted(addresses, key=_mark)
    if len(nodes) <= ALL_PAIRS:
        pairs: Sequence[Pair] = list(combinations(nodes, 2))
    else:
        # A ring in an unpredictable order joins all nodes, and links across it keep distances short.
        steps = [1 + k * k for k in range(NEAR // 2)]
        count = len(nodes)
        both = {tuple(sorted((k, (k + step) % count))) for step in steps for k in range(count)}
        pairs = [(nodes[a], nodes[b]) for a, b in sorted(both, key=lambda pair: (pair[1] - pair[0], pair))]
    rounds = []
    for first, other in pairs:
        if addresses[other]:
            rounds.append((first, other))
        elif addresses[first]:
            rounds.append((other, first))
    return rounds


def _mark(node: str) -> bytes:
    return hashlib.sha256(node.encode()).digest()
