"""Which volunteers relay the links of which neighbours: a plan without I/O, and the messages that apply it.

A pair of neighbours needs a relay if neither can be dialled. It gets the relay that transfers a piece of a
tensor fastest, by the sum of both round trips and the piece's time at the share of the relay's rate that is
left for one more link. So pairs are spread over relays. Each pair also knows the next best relays, and both
ends keep connections waiting there. When a relay dies, or delivers far less than it should (`wire.delivery`),
its links continue through the next one without asking the coordinator, whose own relay is the last. Nodes
report slow relays, and their links get others from the next placement on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from node.coordinator.sessions import ControlSession
from wire.identity.names import split_address
from wire.messages import RELAY_LEFT, CoordinatorMessage, PlacedStage, Placement, RelayFor, Relays

PIECE_BYTES = 256 * 1024
"""The bytes of a link's frame."""
UNKNOWN_SECONDS = 0.2
"""The assumed round trip in seconds to a relay that has not been measured."""
MOST_CHOICES = 3
"""The most relays of one pair."""
MOST_FURTHER = 2
"""The most addresses of a node besides its first."""
LEAST_RATE = 125_000.0
"""The least rate in bytes per second (1 Mbit/s) that a relay must have left for a link."""

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class RelayOffer:
    address: str
    """host:port at which the coordinator has reached it."""
    rate: float
    """The bytes per second that it relays."""


class RelayPlan:
    """Which volunteer relays for which pair. Pure: equal calls give equal plans."""

    def __init__(self) -> None:
        self.offers: dict[str, RelayOffer] = {}
        self._times: dict[str, dict[str, float]] = {}
        """Round trips in seconds, by node and relay."""
        self._left: set[Pair] = set()
        """A node and a relay that its links left as too slow. Other nodes still try the relay."""
        self._routes: dict[str, dict[str, tuple[str, ...]]] = {}
        """The relays of the link between a node and a neighbour, the best first."""

    def measured(self, node: str, times: Mapping[str, float]) -> list[str]:
        """Take a node's round trips to these relays. Returns the relays that its links have newly left."""
        known = {relay: seconds for relay, seconds in times.items() if relay in self.offers}
        left = [relay for relay, seconds in known.items() if seconds >= RELAY_LEFT]
        if not left:
            self._times[node] = known
        left = [relay for relay in left if (node, relay) not in self._left]
        self._left.update((node, relay) for relay in left)
        return left

    def gone(self, node: str) -> bool:
        """A node has left. Returns whether it was a relay."""
        self._times.pop(node, None)
        self._left = {pair for pair in self._left if pair[0] != node}
        return self.offers.pop(node, None) is not None

    def place(self, rows: Sequence[Sequence[PlacedStage]]) -> None:
        """Choose relays for the neighbours of a placement. `rows` are its pipelines."""
        load = dict.fromkeys(self.offers, 0)
        self._routes = {}
        # A run of a thousand nodes has 60,000 pairs of neighbours.
        for pair in pairs_to_relay(rows) if self.offers else ():
            choices = sorted(
                (self._seconds(pair, relay, load[relay]), relay)
                for relay, offer in self.offers.items()
                if relay not in pair
                and not any((node, relay) in self._left for node in pair)
                and offer.rate / (load[relay] + 1) >= LEAST_RATE
            )
            if choices:
                best = tuple(relay for _, relay in choices[:MOST_CHOICES])
                for node, other in (pair, pair[::-1]):
                    self._routes.setdefault(node, {})[other] = best
                load[choices[0][1]] += 1

    def relays_of(self, node: str) -> Mapping[str, tuple[str, ...]]:
        """The relays of the link to each neighbour of `node`, the best first."""
        return self._routes.get(node, {})

    def _seconds(self, pair: Pair, relay: str, load: int) -> float:
        there = sum(self._times.get(node, {}).get(relay, UNKNOWN_SECONDS) for node in pair)
        return there + PIECE_BYTES * (load + 1) / self.offers[relay].rate


def pairs_to_relay(rows: Sequence[Sequence[PlacedStage]]) -> list[Pair]:
    """Neighbours that cannot dial each other: in a row, ends included, and of a stage between rows."""
    pairs: dict[Pair, None] = {}
    beside = [ends for row in rows for ends in (*pairwise(row), (row[-1], row[0]))]
    beside += [ends for column in zip(*rows, strict=True) for ends in combinations(column, 2)]
    for first, other in beside:
        # A place without a node's name is empty.
        is_pair = bool(first.node_id and other.node_id) and first.node_id != other.node_id
        if is_pair and not first.address and not other.address:
            low, high = sorted((first.node_id, other.node_id))
            pairs[low, high] = None
    return sorted(pairs)


def _is_address(text: str) -> bool:
    try:
        return bool(split_address(text))
    except ValueError:
        return False


class RelayDesk:
    """Updates the plan from what sessions report, and tells nodes and relays about it."""

    def __init__(self, send: Callable[[str, CoordinatorMessage], object], enabled: bool) -> None:
        """`enabled`: whether links of this run may be relayed."""
        self.plan = RelayPlan()
        self.allow_here: Callable[[Sequence[str]], None] = lambda nodes: None
        """Called with the nodes of each placement before they learn of it. The coordinator's relay joins only
        these."""
        self._send = send
        self._enabled = enabled
        self._here: dict[str, None] = {}
        """Connected nodes, the one connected longest first."""
        self._allowed: tuple[str, ...] = ()
        self._rows: list[list[PlacedStage]] = []
        self._placements: dict[str, Placement] = {}
        """The newest placement of each placed node."""
        self._also: dict[str, tuple[str, ...]] = {}
        """Further addresses of nodes that can be dialled."""

    def addresses(self) -> list[str]:
        """The addresses (host:port) of volunteers that relay, the fastest first."""
        offers = sorted(self.plan.offers.values(), key=lambda offer: -offer.rate)
        return [offer.address for offer in offers]

    def opened(self, session: ControlSession) -> None:
        node, rate = session.node_id, session.hello.relay_rate
        self._here[node] = None
        others = dict.fromkeys(address for address in session.hello.also if address != session.address)
        self._also[node] = tuple(filter(_is_address, others))[:MOST_FURTHER] if session.address else ()
        if self._enabled and rate >= LEAST_RATE and session.address:
            self.plan.offers[node] = RelayOffer(address=session.address, rate=rate)
            self._send(node, RelayFor(nodes=self._allowed))
            self._tell(list(self._here))
            self._tell_links()
        elif self.plan.offers:
            self._tell([node])

    def closed(self, node: str) -> None:
        """A node has disconnected."""
        self._here.pop(node, None)
        self._also.pop(node, None)
        if self.plan.gone(node):
            self._tell(list(self._here))

    def placed(self, nodes: Sequence[str], addresses: Sequence[str], rows: int) -> None:
        """A new placement: `nodes` row after row, any two of which may be joined, with their addresses."""
        self._placements = {}
        self.offered(nodes, addresses, rows)

    def offered(self, nodes: Sequence[str], addresses: Sequence[str], rows: int) -> None:
        """The same placement with other nodes in some seats."""
        stages = len(nodes) // rows
        places = [PlacedStage(node_id=n, address=a) for n, a in zip(nodes, addresses, strict=True)]
        self._rows = [places[row * stages : (row + 1) * stages] for row in range(rows)]
        self.plan.place(self._rows)
        self._allowed = tuple(dict.fromkeys(filter(None, nodes)))
        self.allow_here(self._allowed)
        for relay in self.plan.offers:
            self._send(relay, RelayFor(nodes=self._allowed))

    def with_relays(self, node: str, placement: Placement) -> Placement:
        """The placement with the relays of this node's links, and its neighbours' further addresses."""
        # Nodes learn of its changes once.
        self._placements[node] = replace(placement, renewed=())
        relays = {}
        for peer, choices in self.plan.relays_of(node).items():
            if places := tuple(self._place(relay) for relay in choices if relay in self.plan.offers):
                relays[peer] = places
        also = {}
        if self._also:
            beside = (*placement.stages, *(row.node for row in placement.rows))
            also = {
                place.node_id: further
                for place in beside
                if place.node_id != node and (further := self._also.get(place.node_id, ()))
            }
        return replace(placement, relays=relays, also=also) if relays or also else placement

    def _tell_links(self) -> None:
        """A relay has joined during the epoch: tell the links that need one."""
        self.plan.place(self._rows)
        for node, placement in list(self._placements.items()):
            if (routed := self.with_relays(node, placement)).relays:
                self._send(node, routed)

    def _tell(self, nodes: Sequence[str]) -> None:
        message = Relays(relays=tuple(self._place(relay) for relay in self.plan.offers))
        for node in nodes:
            self._send(node, message)

    def _place(self, relay: str) -> PlacedStage:
        return PlacedStage(node_id=relay, address=self.plan.offers[relay].address)
