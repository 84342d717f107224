"""Admission of connections: places are bounded, and a crowd loses before anybody else does."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from wire.admission import (
    MOST_OF_A_NODE,
    PROOF_SECONDS,
    SILENT_SECONDS,
    Admission,
    Limits,
    Phase,
    address_group,
)

SMALL = Limits(silent=4, handshakes=3, proven=5)


def test_ten_thousand_idle_connections_keep_one_other_address() -> None:
    admission = Admission(SMALL)
    assert admission.accepted(0, "10.0.0.1", 0.0) == []
    for number in range(1, 10_001):
        assert 0 not in admission.accepted(number, "10.0.0.2", 0.0)
    assert admission.count(Phase.SILENT) == SMALL.silent
    assert admission.spoke(0, 0.0) == []
    for number in range(20_000, 20_100):
        admission.accepted(number, "10.0.0.2", 0.0)
        assert 0 not in admission.spoke(number, 0.0)
    assert admission.proved(0, "node-a", 0.0) == []
    assert admission.count(Phase.PROVEN) == 1


def test_a_newcomer_from_the_crowd_itself_gets_the_place_of_the_oldest() -> None:
    admission = Admission(SMALL)
    dropped = [admission.accepted(number, "10.0.0.2", 0.0) for number in range(6)]
    assert dropped == [[], [], [], [], [0], [1]]


def test_an_address_that_has_shown_a_certificate_comes_before_strangers_until_it_is_a_crowd_itself() -> None:
    admission = Admission(SMALL)
    admission.accepted(0, "10.0.0.1", 0.0)
    admission.spoke(0, 0.0)
    admission.proved(0, "node-a", 0.0)
    admission.accepted(1, "10.0.0.1", 0.0)
    for number in range(2, 100):
        assert 1 not in admission.accepted(number, f"10.1.0.{number}", 0.0)
    admission.accepted(100, "10.0.0.1", 0.0)
    assert admission.next_out == 1 and admission.accepted(101, "10.1.1.1", 0.0) == [1]


def test_the_next_to_go_is_known_before_it_goes() -> None:
    admission = Admission(SMALL)
    for number in range(SMALL.silent):
        assert admission.next_out is None
        admission.accepted(number, f"10.0.0.{number}", 0.0)
    assert admission.next_out == 0 and admission.accepted(9, "10.0.0.9", 0.0) == [0]
    admission.spoke(1, 0.0)
    assert admission.next_out is None


def test_one_node_cannot_take_all_places_of_proven_connections() -> None:
    admission = Admission(Limits(silent=4, handshakes=4, proven=100))
    for number in range(MOST_OF_A_NODE + 3):
        admission.accepted(number, "10.0.0.2", 0.0)
        admission.spoke(number, 0.0)
        dropped = admission.proved(number, "node-a", 0.0)
        assert dropped == ([number - MOST_OF_A_NODE] if number >= MOST_OF_A_NODE else [])
    assert admission.count(Phase.PROVEN) == MOST_OF_A_NODE


def test_silence_and_missing_proof_end_a_connection_and_proof_keeps_it() -> None:
    admission = Admission(SMALL)
    for number in range(3):
        admission.accepted(number, f"10.0.0.{number}", 0.0)
    admission.spoke(1, 1.0)
    admission.spoke(2, 1.0)
    admission.proved(2, "node-a", 2.0)
    assert admission.expired(SILENT_SECONDS - 0.1) == []
    assert admission.expired(SILENT_SECONDS) == [0]
    assert admission.expired(1.0 + PROOF_SECONDS) == [1]
    assert admission.expired(1e9) == [] and len(admission) == 1


def test_without_descriptors_the_older_half_of_the_strangers_goes() -> None:
    admission = Admission(Limits(silent=10, handshakes=10, proven=10))
    for number in range(6):
        admission.accepted(number, "10.0.0.2", float(number))
    admission.spoke(0, 10.0)
    admission.spoke(5, 11.0)
    admission.proved(5, "node-a", 12.0)
    assert admission.shed() == [1, 2, 3]
    assert len(admission) == 3


def test_an_address_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert address_group("10.0.0.1") == address_group("::ffff:10.0.0.1") == "10.0.0.1"
    assert address_group("2001:db8::1") == address_group("2001:db8::2:3") != address_group("2001:db8:0:1::1")
    assert address_group("fe80::1%eth0") == "fe80::/64"


events = st.lists(
    st.tuples(
        st.sampled_from(["accept", "speak", "prove", "close", "expire", "shed"]),
        st.integers(0, 30),
        st.integers(0, 3),
    ),
    max_size=80,
)


@settings(max_examples=examples(300))
@given(events=events)
def test_slots_are_kept_and_every_connection_is_released_once(events: list[tuple[str, int, int]]) -> None:
    admission, alive, now, numbers = Admission(SMALL), set[int](), 0.0, iter(range(1000, 10_000))
    silent: dict[int, int] = {}
    for what, which, group in events:
        now += 0.7
        number = which if which in alive else -1
        dropped: list[int] = []
        match what:
            case "accept":
                number = which if which not in alive else next(numbers)
                dropped = admission.accepted(number, f"10.0.0.{group}", now)
                if dropped:
                    crowds = Counter(silent[one] for one in alive if one in silent)
                    assert crowds[silent[dropped[0]]] == max(crowds.values()), "the largest group loses"
                alive.add(number)
                silent[number] = group
            case "speak":
                silent.pop(number, None)
                dropped = admission.spoke(number, now)
            case "prove":
                dropped = admission.proved(number, f"node-{group}", now)
            case "close":
                admission.closed(number)
                alive.discard(number)
            case "expire":
                dropped = admission.expired(now)
            case "shed":
                dropped = admission.shed()
        assert len(set(dropped)) == len(dropped) and set(dropped) <= alive
        assert what in ("expire", "shed") or number not in dropped
        alive -= set(dropped)
        silent = {one: of for one, of in silent.items() if one in alive}
        assert len(admission) == len(alive)
        assert admission.count(Phase.SILENT) <= SMALL.silent
        assert admission.count(Phase.HANDSHAKE) <= SMALL.handshakes
        assert admission.count(Phase.PROVEN) <= SMALL.proven
