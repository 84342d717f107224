"""Which volunteers relay for whom, and who hears of it."""

from dataclasses import replace

from node.coordinator.relays import LEAST_RATE, RelayDesk, RelayOffer, RelayPlan, pairs_to_relay
from node.coordinator.sessions import ControlSession
from tests.support.pki import hello
from wire.messages import RELAY_LEFT, CoordinatorMessage, PlacedStage, Placement, RelayFor, Relays

A, B, C, D = (f"node-{letter * 10}" for letter in "abcd")
R, S = "node-rrrrrrrrrr", "node-ssssssssss"


def row(*places: str | tuple[str, str]) -> tuple[PlacedStage, ...]:
    """Stages of nodes that cannot be dialled, or of (node, address)."""
    pairs = [(place, "") if isinstance(place, str) else place for place in places]
    return tuple(PlacedStage(node_id=node, address=address) for node, address in pairs)


def plan(**rates: float) -> RelayPlan:
    found = RelayPlan()
    for name, rate in rates.items():
        found.offers[{"r": R, "s": S, "a": A}[name]] = RelayOffer(address=f"{name}:1", rate=rate)
    return found


def test_neighbours_of_whom_neither_can_be_dialled_need_a_relay() -> None:
    assert pairs_to_relay([row(A, B)]) == [(A, B)]
    assert pairs_to_relay([row(A, (B, "b:1"))]) == []
    assert pairs_to_relay([row(A, B, C)]) == [(A, B), (A, C), (B, C)], "the ends may be neighbours too"
    assert pairs_to_relay([row(A, (C, "c:1")), row(B, D)]) == [(A, B), (B, D)], "a stage in all rows"
    assert pairs_to_relay([row(A)]) == []


def test_the_relay_with_the_shortest_way_comes_first_and_the_others_after_it() -> None:
    found = plan(r=1e9, s=1e9)
    found.measured(A, {R: 0.08, S: 0.01})
    found.measured(B, {R: 0.01, S: 0.02})
    found.place([row(A, B)])
    assert found.relays_of(A) == {B: (S, R)} and found.relays_of(B) == {A: (S, R)}
    assert found.relays_of(C) == {}
    found.measured(A, {R: 0.001, S: 0.01})
    found.place([row(A, B)])
    assert found.relays_of(A) == {B: (R, S)}


def test_a_relay_that_a_node_left_is_none_for_its_links() -> None:
    found = plan(r=1e9, s=1e9)
    for node in (A, B, C, D):
        found.measured(node, {R: 0.01, S: 0.02})
    assert found.measured(A, {R: RELAY_LEFT, "node-unknown000": RELAY_LEFT}) == [R]
    assert found.measured(A, {R: RELAY_LEFT}) == [], "told once"
    found.place([row(A, B), row(C, D)])
    assert found.relays_of(A)[B] == (S,) and found.relays_of(B)[A] == (S,)
    assert found.relays_of(C)[D][0] == R, "one node's word is no other's"
    found.measured(A, {R: 0.01, S: 0.02})  # a new measurement of round trips changes nothing
    found.place([row(A, B)])
    assert found.relays_of(A)[B] == (S,)
    found.gone(A)
    found.place([row(A, B)])
    assert found.relays_of(A)[B][0] in (R, S) and len(found.relays_of(A)[B]) == 2


def test_links_spread_over_relays_by_what_each_has_left() -> None:
    found = plan(r=4e6, s=1.2e6)
    for node in (A, B, C, D):
        found.measured(node, {R: 0.01, S: 0.01})
    rows = [row(A, B), row(C, D)]
    found.place(rows)
    first = [found.relays_of(one)[other][0] for one, other in pairs_of(found)]
    assert len(first) == 4
    assert first.count(R) == 3 and first.count(S) == 1, "one link of S is better than the fourth of R"


def pairs_of(found: RelayPlan) -> list[tuple[str, str]]:
    return [(one, other) for one in (A, B, C, D) for other in found.relays_of(one) if one < other]


def test_no_relay_is_used_beyond_its_rate_nor_by_itself() -> None:
    found = plan(r=1.5 * LEAST_RATE, a=1e9)
    found.place([row(A, B), row(C, D)])
    chosen = {pair: found.relays_of(pair[0])[pair[1]] for pair in pairs_of(found)}
    assert [pair for pair, relays in chosen.items() if relays[0] == R] == [(A, B)]
    assert all(A not in relays for pair, relays in chosen.items() if A in pair)


def session(node: str, address: str, rate: float = 0.0) -> ControlSession:
    return ControlSession(node, replace(hello(address), relay_rate=rate), address)


class Sent:
    """Messages to nodes, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, CoordinatorMessage]] = []

    def __call__(self, node: str, message: CoordinatorMessage) -> None:
        self.all.append((node, message))

    def take(self) -> list[tuple[str, CoordinatorMessage]]:
        taken, self.all = self.all, []
        return taken


def test_nodes_hear_of_relays_and_relays_of_whom_they_may_join() -> None:
    sent, here = Sent(), list[str]()
    desk = RelayDesk(sent, enabled=True)
    desk.allow_here = lambda nodes: here.extend(nodes)
    desk.opened(session(A, ""))
    assert sent.take() == []
    desk.opened(session(R, "r:1", 1e7))
    relays = Relays(relays=row((R, "r:1")))
    assert sent.take() == [(R, RelayFor(nodes=())), (A, relays), (R, relays)]
    desk.opened(session(B, ""))
    assert sent.take() == [(B, relays)]
    desk.placed([A, B], ["", ""], 1)
    assert here == [A, B]
    assert sent.take() == [(R, RelayFor(nodes=(A, B)))]
    placement = Placement(epoch=1, stage=0, stages=row(A, B))
    assert desk.with_relays(A, placement).relays == {B: row((R, "r:1"))}
    assert desk.with_relays(B, placement).relays == {A: row((R, "r:1"))}
    desk.opened(session(S, "s:1", 1e7))
    both = row((R, "r:1"), (S, "s:1"))
    assert sent.take()[-2:] == [
        (A, replace(placement, relays={B: both})),
        (B, replace(placement, relays={A: both})),
    ], "links that are open learn of another relay"
    desk.closed(S)
    sent.take()
    desk.closed(R)
    assert sent.take() == [(A, Relays(relays=())), (B, Relays(relays=()))]
    assert desk.with_relays(A, placement) == placement
    desk.closed(A)
    assert sent.take() == []


def test_a_node_that_can_be_dialled_may_be_so_at_its_further_addresses_too() -> None:
    desk = RelayDesk(Sent(), enabled=True)
    false = "no address", f"{'a' * 100_000}:70"
    also = ("[2001:db8::7]:70", "198.51.100.7:70", *false, "198.51.100.8:70", "198.51.100.9:70")
    for node, address in ((A, "198.51.100.7:70"), (B, "")):
        one = session(node, address)
        one.hello = replace(one.hello, also=also)
        desk.opened(one)
    placement = Placement(epoch=1, stage=1, stages=row((A, "198.51.100.7:70"), (B, "")))
    assert desk.with_relays(B, placement).also == {A: ("[2001:db8::7]:70", "198.51.100.8:70")}
    assert desk.with_relays(A, replace(placement, stage=0)).also == {}, "nobody reaches it at the first"
    desk.closed(A)
    assert desk.with_relays(B, placement).also == {}


def test_who_cannot_be_dialled_or_offers_too_little_is_no_relay() -> None:
    for desk, one in (
        (RelayDesk(Sent(), enabled=True), session(R, "", 1e7)),
        (RelayDesk(Sent(), enabled=True), session(R, "r:1", LEAST_RATE / 2)),
        (RelayDesk(Sent(), enabled=False), session(R, "r:1", 1e7)),
    ):
        desk.opened(one)
        assert not desk.plan.offers
