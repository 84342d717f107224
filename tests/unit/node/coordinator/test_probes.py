"""Which pairs of nodes measure their line, and that no node can hold up, starve or deceive the others."""

from collections import Counter

from node.coordinator.probes import (
    ALL_PAIRS,
    AT_ONCE,
    MOST_FAILURES,
    NEAR,
    TURN_SECONDS,
    ProbeDesk,
    pairs_to_measure,
)
from wire.messages import PeerRate, ProbePeer


def good(other: str) -> PeerRate:
    return PeerRate(node_id=other, round_trip=0.01, up=1e7, down=1e7)


def everybody(count: int, *, hidden: int = 0) -> dict[str, str]:
    """Nodes, of which the first `hidden` cannot be dialled."""
    return {f"node-{k:04}": "" if k < hidden else f"10.0.0.{k % 250}:7{k % 10}00" for k in range(count)}


def told(asked: list[tuple[str, ProbePeer]]) -> list[tuple[str, str]]:
    return [(node, probe.peer.node_id) for node, probe in asked]


def test_all_pairs_of_a_few_nodes_are_measured_once_and_each_node_in_one_at_a_time() -> None:
    desk = ProbeDesk()
    here = everybody(6)
    desk.present(here)
    done: Counter[frozenset[str]] = Counter()
    for now in range(100):
        pairs = told(desk.due(float(now)))
        assert len(pairs) <= AT_ONCE
        assert max(Counter(node for pair in pairs for node in pair).values(), default=1) == 1
        for node, other in pairs:
            assert desk.answered(node, good(other))
            done[frozenset((node, other))] += 1
    assert len(done) == 15
    assert set(done.values()) == {1}
    assert desk.complete


def test_of_many_nodes_each_measures_its_line_to_a_few_and_all_are_joined() -> None:
    here = everybody(1000)
    pairs = pairs_to_measure(here)
    count = Counter(node for pair in pairs for node in pair)
    assert set(count) == set(here)
    assert max(count.values()) <= NEAR
    assert len(pairs) <= 1000 * NEAR // 2
    reached, edge = {"node-0000"}, ["node-0000"]
    beside: dict[str, list[str]] = {}
    for one, other in pairs:
        beside.setdefault(one, []).append(other)
        beside.setdefault(other, []).append(one)
    while edge:
        for other in beside[edge.pop()]:
            if other not in reached:
                reached.add(other)
                edge.append(other)
    assert reached == set(here)
    assert len(pairs_to_measure(everybody(ALL_PAIRS))) == ALL_PAIRS * (ALL_PAIRS - 1) // 2


def test_a_node_that_cannot_be_dialled_dials_and_two_such_are_no_pair() -> None:
    here = everybody(4, hidden=2)
    pairs = pairs_to_measure(here)
    assert all(here[other] for _, other in pairs)
    assert len(pairs) == 5


def test_a_node_that_never_answers_holds_up_nobody() -> None:
    desk = ProbeDesk()
    here = everybody(6)
    desk.present(here)
    mute, now, measured = "node-0003", 0.0, set()
    while not desk.complete:
        assert now < 100 * TURN_SECONDS
        for node, other in told(desk.due(now)):
            if mute not in (node, other):
                assert desk.answered(node, good(other))
                measured.add(frozenset((node, other)))
        now += 1.0
    assert len(measured) == 10, "all pairs without it"
    asked = told(desk.due(now))
    assert asked == [], f"after {MOST_FAILURES} turns it is not asked again"


def test_others_are_measured_while_a_node_is_silent() -> None:
    desk = ProbeDesk()
    desk.present(everybody(6))
    first = told(desk.due(0.0))
    silent, answering = first[0], first[1:]
    for node, other in answering:
        desk.answered(node, good(other))
    again = told(desk.due(0.1))
    assert again
    assert not any({*pair} & {*silent} for pair in again)


def test_what_nobody_asked_for_is_dropped() -> None:
    desk = ProbeDesk()
    desk.present(everybody(4))
    (node, other), *_ = told(desk.due(0.0))
    third = next(one for one in everybody(4) if one not in (node, other))
    assert not desk.answered(node, good(third)), "another pair than it was asked about"
    assert not desk.answered(third, good(node)), "a node that was not asked"
    assert desk.answered(node, good(other))
    assert not desk.answered(node, good(other)), "twice"


def test_an_answer_without_a_rate_counts_as_none() -> None:
    desk = ProbeDesk()
    desk.present(everybody(2))
    for _ in range(MOST_FAILURES):
        ((node, other),) = told(desk.due(0.0))
        assert not desk.answered(node, PeerRate(node_id=other))
    assert desk.due(0.0) == []
    assert desk.complete


def test_who_comes_back_is_measured_again() -> None:
    desk = ProbeDesk()
    here = everybody(3)
    desk.present(here)
    for now in range(10):
        for node, other in told(desk.due(float(now))):
            desk.answered(node, good(other))
    assert desk.complete
    desk.present({node: address for node, address in here.items() if node != "node-0001"})
    assert desk.due(20.0) == []
    desk.present(here)
    asked = told(desk.due(30.0))
    assert asked
    assert all("node-0001" in pair for pair in asked)


def test_a_pair_that_nobody_needs_any_more_ends_its_turn_without_an_answer() -> None:
    """The node that was to be dialled comes back behind a relay: then it dials, not the other one."""
    desk = ProbeDesk()
    here = everybody(2)
    desk.present(here)
    ((node, other),) = told(desk.due(0.0))
    desk.present({**here, other: ""})
    assert desk.due(TURN_SECONDS - 1) == []
    assert told(desk.due(TURN_SECONDS)) == [(other, node)]
