"""`wire.relay.Rendezvous`: who is joined with whom, and what it keeps, whatever members do."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from wire.relay import ACCEPT, DIAL, MOST_OF_A_NODE, MOST_WAITING, PARTNER, TOGETHER, Rendezvous

NODES = ("node-a", "node-b", "node-c", "node-d")


def test_a_dialler_meets_the_one_it_dials() -> None:
    meeting = Rendezvous(most=100, allowed=frozenset(NODES))
    assert meeting.ask(1, "node-a", "node-b", role=DIAL).joined_with is None
    assert meeting.ask(2, "node-c", "node-a", role=ACCEPT).joined_with is None
    assert meeting.ask(3, "node-b", "node-a", role=DIAL).joined_with is None
    assert meeting.ask(4, "node-b", "node-a", role=ACCEPT).joined_with == 1
    assert meeting.ask(5, "node-a", "node-b", role=ACCEPT).joined_with == 3
    assert len(meeting) == 5


def test_two_that_want_to_dial_together_meet_each_other_alone() -> None:
    meeting = Rendezvous(most=100, allowed=frozenset(NODES))
    assert meeting.ask(1, "node-a", "node-b", role=DIAL).joined_with is None
    assert meeting.ask(2, "node-b", "node-a", role=TOGETHER).joined_with is None
    assert meeting.ask(3, "node-a", "node-b", role=TOGETHER).joined_with == 2
    assert meeting.ask(4, "node-b", "node-a", role=ACCEPT).joined_with == 1


def test_only_nodes_of_the_placement_are_joined() -> None:
    meeting = Rendezvous(most=100)
    assert "does not name" in meeting.ask(1, "node-a", "node-b", role=DIAL).refused
    meeting.allow(["node-a", "node-b"])
    assert "does not name" in meeting.ask(2, "node-a", "node-c", role=DIAL).refused
    assert "does not name" in meeting.ask(3, "node-a", "node-a", role=DIAL).refused
    assert not meeting.ask(4, "node-a", "node-b", role=DIAL).refused
    assert meeting.ask(5, "node-b", "node-a", role=ACCEPT).joined_with == 4
    assert sorted(meeting.allow(["node-b", "node-c"])) == [4, 5]
    assert not len(meeting)


def test_the_newest_of_those_that_wait_is_joined_and_the_oldest_goes() -> None:
    meeting = Rendezvous(most=100, allowed=frozenset(NODES))
    for number in range(MOST_WAITING):
        assert not meeting.ask(number, "node-a", "node-b", role=ACCEPT).dropped
    assert meeting.ask(50, "node-a", "node-b", role=ACCEPT).dropped == (0,)
    assert meeting.ask(51, "node-b", "node-a", role=DIAL).joined_with == 50
    meeting.gone(3)
    assert meeting.ask(52, "node-b", "node-a", role=DIAL).joined_with == 2


def test_one_member_cannot_take_every_connection() -> None:
    meeting = Rendezvous(most=1000, allowed=frozenset(NODES))
    for number in range(MOST_OF_A_NODE // 2):
        meeting.ask(2 * number, "node-a", "node-b", role=DIAL)
        meeting.ask(2 * number + 1, "node-b", "node-a", role=ACCEPT)
    assert not meeting.ask(500, "node-a", "node-c", role=DIAL).refused or len(meeting) <= MOST_OF_A_NODE
    for number in range(600, 600 + MOST_OF_A_NODE):
        meeting.ask(number, "node-a", "node-c", role=DIAL)
        meeting.ask(1000 + number, "node-c", "node-a", role=ACCEPT)
    assert "connections" in meeting.ask(900, "node-a", "node-d", role=DIAL).refused
    assert not meeting.ask(901, "node-d", "node-b", role=DIAL).refused
    full = Rendezvous(most=1, allowed=frozenset(NODES))
    full.ask(1, "node-a", "node-b", role=DIAL)
    assert "are taken" in full.ask(2, "node-c", "node-d", role=DIAL).refused


class Members(RuleBasedStateMachine):
    """Members come, go and are replaced at random."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = Rendezvous(most=20, allowed=frozenset(NODES))
        self.numbers = 0
        self.waiting: dict[int, tuple[str, str, bytes]] = {}
        self.joined: dict[int, int] = {}

    @rule(node=st.sampled_from(NODES), peer=st.sampled_from(NODES), role=st.sampled_from(list(PARTNER)))
    def ask(self, node: str, peer: str, role: bytes) -> None:
        self.numbers += 1
        answer = self.meeting.ask(self.numbers, node, peer, role)
        for number in answer.dropped:
            self.forget(number)
        if answer.refused:
            return
        if answer.joined_with is None:
            self.waiting[self.numbers] = (node, peer, role)
            return
        assert self.waiting.pop(answer.joined_with) == (peer, node, PARTNER[role])
        assert {node, peer} <= self.meeting.allowed and node != peer
        self.joined[self.numbers], self.joined[answer.joined_with] = answer.joined_with, self.numbers

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        known = sorted({*self.waiting, *self.joined})
        if known:
            number = data.draw(st.sampled_from(known))
            for each in (number, self.joined.get(number, number)):
                self.meeting.gone(each)
                self.forget(each)

    @rule(nodes=st.sets(st.sampled_from(NODES)))
    def place(self, nodes: set[str]) -> None:
        for number in self.meeting.allow(nodes):
            self.forget(number)
        assert all({node, peer} <= nodes for node, peer, _ in self.waiting.values())

    def forget(self, number: int) -> None:
        self.waiting.pop(number, None)
        self.joined.pop(number, None)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.meeting) == len(self.waiting) + len(self.joined) <= 20
        asked = list(self.waiting.values())
        assert all(asked.count(one) <= MOST_WAITING for one in asked)
        # Whoever waits has nobody to be joined with.
        assert not any((peer, node, PARTNER[role]) in asked for node, peer, role in asked)


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
