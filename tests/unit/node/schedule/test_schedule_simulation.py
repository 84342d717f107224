"""The event simulation: right on cases that can be done by hand, and honest about dependencies and links."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.schedule.floor import LinkRate, Network, PipelineStep, Resource, ResourceKind
from node.schedule.schedule import (
    BoundaryTensor,
    Kind,
    Order,
    dependencies,
    held_activations,
    interleaved_1f1b,
    one_f_one_b,
    schedule,
)
from node.schedule.simulation import Span, Timeline, simulate
from wire.errors import ConfigError


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [7, 20])
def test_free_transfers_give_the_textbook_time(stages: int, microbatches: int) -> None:
    """(M + n - 1)(f + b): a bubble of n - 1 microbatches (arXiv 2104.04473, section 2.2.1)."""
    timeline = simulate(one_f_one_b(stages, microbatches), 1, 2, 0)
    assert timeline.total == (microbatches + stages - 1) * 3
    assert timeline.busy == (microbatches * 3,) * stages
    assert timeline.idle == ((stages - 1) * 3,) * stages
    assert timeline.floor == microbatches * 3


def test_interleaving_divides_the_bubble_by_chunks() -> None:
    """The bubble is (n - 1)(f + b) / v (arXiv 2104.04473, section 2.2.2)."""
    for chunks in (2, 3, 4):
        timeline = simulate(interleaved_1f1b(4, chunks, 16), 1, 2, 0)
        assert timeline.idle == (9.0,) * 4
        assert timeline.total == 16 * chunks * 3 + 9


def test_chunks_of_one_stage_exchange_tensors_for_nothing() -> None:
    timeline = simulate(interleaved_1f1b(1, 3, 4), 1, 2, transfer_time=100, latency=100)
    assert timeline.total == 3 * 4 * 3
    assert timeline.link_busy == {}


def test_a_step_by_hand() -> None:
    """Two stages, two microbatches, transfers of 2 s that share a link, and 0.5 s of latency."""
    timeline = simulate(one_f_one_b(2, 2), 1, 2, transfer_time=2, latency=0.5)
    times = [[(span.start, span.end) for span in spans] for spans in timeline.spans]
    assert times == [
        # Forwards at once; the first gradient leaves at 6.5 and takes 2.5, the second leaves at 9.5.
        [(0, 1), (1, 2), (9, 11), (12, 14)],
        # The second activation waits until 3 for the link.
        [(3.5, 4.5), (4.5, 6.5), (6.5, 7.5), (7.5, 9.5)],
    ]
    assert timeline.link_busy == {(0, 1): 4, (1, 0): 4}
    assert timeline.total == 14
    assert timeline.idle == (8, 8)


def test_times_may_depend_on_chunk_and_tensor() -> None:
    timeline = simulate(
        one_f_one_b(2, 1),
        forward_time=lambda chunk, microbatch: 1.0 + chunk,
        backward_time=lambda chunk, microbatch: 10.0 + chunk,
        transfer_time=lambda tensor: 100.0 if tensor.kind is Kind.FORWARD else 200.0,
    )
    assert timeline.total == 1 + 100 + 2 + 11 + 200 + 10


@pytest.mark.parametrize("chunks", [1, 2])
def test_window_hides_slow_round_trips_and_never_reorders_gradients(chunks: int) -> None:
    """Latency of twice a microbatch's compute: each wider window is faster, until nothing is left to hide."""
    forward, backward, latency, microbatches = 1 / chunks, 2 / chunks, 6.0, 96

    def run(window: int, microbatches: int = microbatches) -> Timeline:
        return simulate(schedule(4, chunks, microbatches, window), forward, backward, 0, latency)

    narrow, *wider = (run(window) for window in range(5))
    for before, after in zip([narrow, *wider], wider, strict=False):
        assert after.total < before.total
    assert narrow.total > 3 * narrow.floor
    for timeline in wider:
        assert gradient_order(timeline) == gradient_order(narrow)


def gradient_order(timeline: Timeline) -> list[list[tuple[int, int]]]:
    """For each stage, its backwards by chunk, in the order in which they ran."""
    backwards = [[s.action for s in spans if s.action.kind is Kind.BACKWARD] for spans in timeline.spans]
    # Sorting by chunk is stable, so within a chunk the order is the one that ran.
    return [[(a.chunk, a.microbatch) for a in sorted(b, key=lambda a: a.chunk)] for b in backwards]


def test_a_deadlock_is_found_and_named() -> None:
    """The second stage waits for two microbatches, but the first sends one and waits for its gradient."""
    (first,), (second, _) = one_f_one_b(1, 2), one_f_one_b(2, 2)
    with pytest.raises(ConfigError) as caught:
        simulate((first, second), 1, 1, 1)
    assert "stage 0 blocked at backward of chunk 0, microbatch 0" in str(caught.value)
    assert "stage 1 blocked at forward of chunk 0, microbatch 1" in str(caught.value)


@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 16),
    st.integers(0, 4),
    st.randoms(use_true_random=False),
)
def test_unlucky_times_delay_but_never_break(
    stages: int, chunks: int, microbatches: int, window: int, random: Random
) -> None:
    """Whatever compute and transfers take: all runs, in order, one at a time, after what it needs."""
    transfers: dict[BoundaryTensor, float] = {}

    def transfer(tensor: BoundaryTensor) -> float:
        assert tensor not in transfers, "sent twice"
        transfers[tensor] = random.choice((0.0, 0.1, 1.0, 50.0))
        return transfers[tensor]

    def compute(chunk: int, microbatch: int) -> float:
        return random.choice((0.0, 0.5, 1.0, 20.0))

    latency = random.choice((0.0, 3.0))
    orders = schedule(stages, chunks, microbatches, window)
    timeline = simulate(orders, compute, compute, transfer, latency)

    assert tuple(actions(spans) for spans in timeline.spans) == orders
    assert timeline.total >= timeline.floor
    assert len(transfers) == (2 * microbatches * (stages * chunks - 1) if stages > 1 else 0)
    made = {
        dependencies(span.action, stage, stages, chunks).makes: span.end
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    }
    for stage, spans in enumerate(timeline.spans):
        now = 0.0
        for span in spans:
            assert now <= span.start <= span.end
            now = span.end
            needs = dependencies(span.action, stage, stages, chunks).needs
            if needs is not None:
                travelled = transfers[needs] + latency if stages > 1 else 0.0
                # A sum of many times may differ in its last bits from another way of adding them up.
                assert span.start >= made[needs] + travelled - 1e-9


def actions(spans: tuple[Span, ...]) -> Order:
    return tuple(span.action for span in spans)


def test_links_of_a_stage_share_its_interface() -> None:
    """The middle stage uploads activations to one neighbour and gradients to the other."""
    network = Network(3, [], [LinkRate(up=1, down=1)] * 3)
    sizes = {Kind.FORWARD: 4.0, Kind.BACKWARD: 6.0}
    timeline = simulate(one_f_one_b(3, 16, 4), 1, 1, network=network, sizes=sizes)
    upload = Resource(kind=ResourceKind.INTERFACE, stage=1, direction="up")
    assert timeline.link_busy[upload] == 16 * 10
    assert timeline.floor == 160
    floor = PipelineStep(
        microbatches=16,
        forward=[1] * 3,
        backward=[1] * 3,
        activation_bytes=4,
        gradient_bytes=6,
        interfaces=[LinkRate(up=1, down=1)] * 3,
    ).floor()
    assert 0.85 < floor.share(timeline.total) <= 1


def test_connections_share_a_line_evenly() -> None:
    """The middle stage downloads one byte a second from both sides, tensors of 4 bytes."""
    lines = [LinkRate(), LinkRate(down=1), LinkRate()]
    sizes = {Kind.FORWARD: 4.0, Kind.BACKWARD: 4.0}
    timeline = simulate(one_f_one_b(3, 2, 2), 0.5, 0.5, network=Network(3, [], lines), sizes=sizes)
    # The first activation comes from 0.5 to 4.5, and the second has the line alone until the last stage sends
    # a gradient at 6: then both have half of it. The activation's last 2.5 bytes are there at 11, and the
    # gradient's last 1.5 at 12.5.
    assert [(span.start, span.end) for span in timeline.spans[1]] == [
        (4.5, 5.0),
        (11.0, 11.5),
        (12.5, 13.0),
        (16.5, 17.0),
    ]


def test_what_waits_for_a_line_holds_up_no_other() -> None:
    """A tensor to a neighbour whose download is busy leaves its sender's upload to the other neighbour."""
    lines = [LinkRate(), LinkRate(), LinkRate(), LinkRate(down=0.1)]
    sizes = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0}
    timeline = simulate(one_f_one_b(4, 4, 8), 0.5, 0.5, network=Network(4, [], lines), sizes=sizes)
    # Stage 2 sends four activations at once, which take the last stage's line 10 s each.
    made = next(span.end for span in timeline.spans[2] if span.action.kind is Kind.BACKWARD)
    used = next(span.start for span in timeline.spans[1] if span.action.kind is Kind.BACKWARD)
    assert used == made < 20


def test_each_link_may_have_a_window_of_its_own() -> None:
    """Only the slow link needs one; the stages behind it hold no more than before."""
    network = Network(4, [LinkRate(), LinkRate(latency=9.0), LinkRate()])
    sizes = {Kind.FORWARD: 1.0, Kind.BACKWARD: 1.0}

    def total(window: tuple[int, int, int]) -> float:
        return simulate(schedule(4, 1, 32, window), 1, 2, network=network, sizes=sizes).total

    assert total((0, 6, 0)) == total((6, 6, 6)) < 0.5 * total((0, 0, 0))
    assert [held_activations(order) for order in schedule(4, 1, 32, (0, 6, 0))] == [10, 9, 2, 1]
    with pytest.raises(ConfigError, match="2 windows given; 4 stages have 3 links"):
        schedule(4, 1, 32, (1, 1))
