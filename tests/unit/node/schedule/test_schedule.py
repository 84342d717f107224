"""Orders of plain and interleaved 1F1B: complete, bounded in memory, same order of gradients."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.schedule.floor import LinkRate, Network, PipelineStep, Resource, ResourceKind
from node.schedule.schedule import (
    Action,
    BoundaryTensor,
    Dependencies,
    Kind,
    Order,
    Orders,
    dependencies,
    has_head_first,
    held_activations,
    interleaved_1f1b,
    one_f_one_b,
    schedule,
)
from node.schedule.simulation import Span, Timeline, simulate
from node.schedule.turns import Turns
from tests.support.cases import each
from tests.support.examples import examples
from wire.errors import ConfigError


def spelled(order: Order) -> str:
    """`F0.2` is the forward of local chunk 0, microbatch 2; `F0.2.1` that of its slice 1."""
    sliced = any(action.slice for action in order)
    return " ".join(
        f"{action.kind[0].upper()}{action.chunk}.{action.microbatch}" + f".{action.slice}" * sliced
        for action in order
    )


def check_complete(orders: Orders, chunks: int, microbatches: int, slices: int = 1) -> None:
    """Every stage runs all slices of all microbatches of its chunks once each way: forwards by slice,
    backwards by microbatch and last slice first, each after its forward. Slices of a head on the first stage
    go backward as they went forward."""
    for stage, order in enumerate(orders):
        own = chunks + (stage == 0 and has_head_first(orders))
        numbers = product(range(own), range(microbatches), range(slices))
        assert Counter(order) == Counter(Action(kind, *each) for each in numbers for kind in Kind)
        place = {action: index for index, action in enumerate(order)}
        for chunk in range(own):
            forwards, backwards = ([a for a in order if a.chunk == chunk and a.kind is kind] for kind in Kind)
            of_head = chunk == chunks
            assert forwards == sorted(forwards, key=lambda a: (a.microbatch, a.slice))
            assert backwards == sorted(
                backwards, key=lambda a: (a.microbatch, a.slice if of_head else -a.slice)
            )
            assert all(place[replace(action, kind=Kind.FORWARD)] < place[action] for action in backwards)


def test_window_lets_every_stage_but_the_last_run_ahead() -> None:
    assert tuple(map(spelled, one_f_one_b(3, 4, window=1))) == (
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3",
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    )


def test_interleaved_takes_uneven_groups_larger_first() -> None:
    last = interleaved_1f1b(2, 2, 5)[1]
    assert spelled(last) == (
        "F0.0 F0.1 F0.2 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F0.3 B0.0 F0.4 B0.1 F1.3 B0.2 F1.4 B1.3 B1.4 B0.3 B0.4"
    )


def test_held_activations_are_the_designs_counts() -> None:
    """Design section 4, "Bits by stage"; AGoQ's figure for n = 4, v = 2."""
    assert [held_activations(order) for order in interleaved_1f1b(4, 2, 16)] == [11, 9, 7, 5]
    for stages in range(1, 9):
        assert [held_activations(order) for order in one_f_one_b(stages, 16)] == list(range(stages, 0, -1))
        for chunks in (2, 3, 4):
            held = [held_activations(order) for order in interleaved_1f1b(stages, chunks, 4 * stages)]
            assert held == [2 * (stages - i - 1) + (chunks - 1) * stages + 1 for i in range(stages)]


@pytest.mark.parametrize("stages", range(1, 7))
def test_every_schedule_is_complete_bounded_and_free_of_deadlock(stages: int) -> None:
    # All up to a group of stages, and more that divide badly and well; Hypothesis draws larger ones.
    several = sorted({*range(1, stages + 2), 2 * stages, 31})
    for chunks in range(1, 5):
        for microbatches in several:
            for window in (0, 1, 2, 4):
                orders = schedule(stages, chunks, microbatches, window)
                check_complete(orders, chunks, microbatches)
                simulate(orders, forward_time=1, backward_time=2, transfer_time=0.5)
                groups = max(1, microbatches // (stages * (1 + (window + 1) // 2)))
                largest = -(-microbatches // groups)
                for stage, order in enumerate(orders):
                    hops = stages - 1 - stage
                    limit = 1 + hops * (1 + window)
                    if chunks > 1:
                        limit = 1 + (chunks - 1) * largest + hops * (2 + window)
                    assert held_activations(order) == min(microbatches * chunks, limit)


@given(
    st.integers(1, 16),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(0, 20),
)
@settings(max_examples=examples(40))
def test_larger_schedules_are_complete_and_free_of_deadlock(
    stages: int, chunks: int, microbatches: int, window: int
) -> None:
    orders = schedule(stages, chunks, microbatches, window)
    check_complete(orders, chunks, microbatches)
    simulate(orders, forward_time=1, backward_time=1, transfer_time=0)


def test_slices_go_forward_first_to_last_and_backward_last_to_first() -> None:
    assert tuple(map(spelled, schedule(2, 1, 2, slices=2))) == (
        "F0.0.0 F0.0.1 F0.1.0 B0.0.1 F0.1.1 B0.0.0 B0.1.1 B0.1.0",
        "F0.0.0 F0.0.1 B0.0.1 F0.1.0 B0.0.0 F0.1.1 B0.1.1 B0.1.0",
    )
    first, _ = schedule(2, 1, 2, head_first=True, slices=2)
    assert spelled(first) == (
        "F0.0.0 F0.0.1 F1.0.0 B1.0.0 F0.1.0 F1.0.1 B1.0.1 F0.1.1 F1.1.0 B1.1.0 B0.0.1 F1.1.1 B1.1.1 B0.0.0 "
        "B0.1.1 B0.1.0"
    )


@given(
    stages=st.integers(1, 8),
    microbatches=st.integers(1, 8),
    window=st.integers(0, 8),
    slices=st.integers(2, 7),
    head=st.booleans(),
    swap=st.booleans(),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(30))
def test_slices_run_in_order_within_memory_and_without_deadlock(
    stages: int, microbatches: int, window: int, slices: int, head: bool, swap: bool, random: Random
) -> None:
    head = head and stages > 1
    orders = schedule(stages, 1, microbatches, window, head_first=head, slices=slices)
    check_complete(orders, 1, microbatches, slices)

    def seconds(*_: object) -> float:
        return random.choice((0.0, 0.5, 1.0, 20.0))

    timeline = simulate(orders, seconds, seconds, seconds, 1.0, swap=swap)
    for stage, (order, spans) in enumerate(zip(orders, timeline.spans, strict=True)):
        ran = tuple(span.action for span in spans)
        assert swap or ran == order
        # The head's forward holds nothing: its backward follows at once.
        held = held_activations(tuple(action for action in ran if action.chunk == 0))
        assert held <= slices + (stages - 1 + head - stage) * (1 + window)
        for chunk in range(1 + (head and stage == 0)):
            # A head alone needs no other slice.
            back = list(range(slices)) if chunk else list(reversed(range(slices)))
            passes = {kind: [a for a in ran if a.chunk == chunk and a.kind is kind] for kind in Kind}
            for kind, of_microbatch in ((Kind.FORWARD, list(range(slices))), (Kind.BACKWARD, back)):
                numbers = [(action.microbatch, action.slice) for action in passes[kind]]
                assert numbers == [(m, s) for m in range(microbatches) for s in of_microbatch]


def test_slices_of_several_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 chunk a stage, or 1 slice"):
        schedule(2, 2, 4, slices=2)


def test_slices_divide_fill_and_drain() -> None:
    """Four stages and 16 microbatches; a microbatch takes 3 seconds on each, whatever it is cut into."""
    for slices in (1, 2, 4, 8):
        orders = schedule(4, 1, 16, slices=slices)
        total = simulate(orders, 1 / slices, 2 / slices).total
        assert total == pytest.approx(16 * 3 + 3 * 3 / slices)
        floor = PipelineStep(microbatches=16, forward=[1.0] * 4, backward=[2.0] * 4, slices=slices).floor()
        assert floor.seconds == pytest.approx(total)
        assert floor.microbatch_seconds == pytest.approx(3.0)


def test_with_the_head_first_its_passes_are_between_the_first_chunks() -> None:
    orders = schedule(3, 1, 4, head_first=True)
    assert tuple(map(spelled, orders)) == (
        "F0.0 F0.1 F0.2 F1.0 B1.0 F0.3 F1.1 B1.1 B0.0 F1.2 B1.2 B0.1 F1.3 B1.3 B0.2 B0.3",
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
    )


@given(st.integers(2, 9), st.integers(1, 5), st.integers(1, 60), st.integers(0, 12), st.booleans())
def test_schedules_with_the_head_first_are_complete_and_free_of_deadlock(
    stages: int, chunks: int, microbatches: int, window: int, swap: bool
) -> None:
    orders = schedule(stages, chunks, microbatches, window, head_first=True)
    assert has_head_first(orders)
    check_complete(orders, chunks, microbatches)
    timeline = simulate(orders, 1, 2, 0.5, 1.0, swap=swap and chunks == 1)
    for stage, (order, spans) in enumerate(zip(orders, timeline.spans, strict=True)):
        ran = tuple(span.action for span in spans)
        for chunk in range(chunks + (stage == 0)):
            backwards = [a.microbatch for a in ran if a.kind is Kind.BACKWARD and a.chunk == chunk]
            assert backwards == list(range(microbatches))
        assert held_activations(ran) <= held_activations(order)


def test_a_single_stage_has_no_head_chunk() -> None:
    with pytest.raises(ConfigError, match="at least 2 stages"):
        schedule(1, 1, 4, head_first=True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 1, 0), "stages = 0"),
        ((1, 0, 1, 0), "chunks = 0"),
        ((1, 2, 0, 0), "microbatches = 0"),
        ((2, 1, 4, -1), "window = -1"),
    ],
)
def test_impossible_sizes_are_refused(arguments: tuple[int, int, int, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        schedule(*arguments)


def test_dependencies_name_boundaries() -> None:
    def of(kind: Kind, chunk: int, stage: int) -> Dependencies:
        return dependencies(Action(kind, chunk, 7), stage, stages=3, chunks=2)

    def tensor(kind: Kind, boundary: int) -> BoundaryTensor:
        return BoundaryTensor(kind, boundary, 7)

    forward, backward = Kind.FORWARD, Kind.BACKWARD
    assert of(forward, 0, 0) == Dependencies(None, tensor(forward, 0))
    assert of(forward, 0, 2) == Dependencies(tensor(forward, 1), tensor(forward, 2))
    assert of(forward, 1, 0) == Dependencies(tensor(forward, 2), tensor(forward, 3))
    assert of(forward, 1, 2) == Dependencies(tensor(forward, 4), None)
    assert of(backward, 1, 2) == Dependencies(None, tensor(backward, 4))
    assert of(backward, 1, 0) == Dependencies(tensor(backward, 3), tensor(backward, 2))
    assert of(backward, 0, 0) == Dependencies(tensor(backward, 0), None)


@pytest.mark.parametrize(
    ("stages", "chunks", "head"),
    [(1, 1, 0), (1, 3, 0), (2, 1, 0), (3, 2, 0), (5, 4, 0), (3, 1, 1), (3, 2, 1)],
)
@pytest.mark.parametrize("window", [0, 1])
def test_every_tensor_is_made_once_and_needed_once(stages: int, chunks: int, head: int, window: int) -> None:
    made: list[BoundaryTensor] = []
    needed: list[BoundaryTensor] = []
    orders = schedule(stages, chunks, 6, window, head_first=head == 1)
    for stage, order in enumerate(orders):
        for action in order:
            edges = dependencies(action, stage, stages, chunks, head_first=head == 1)
            made += [edges.makes] if edges.makes else []
            needed += [edges.needs] if edges.needs else []
    assert len(made) == len(set(made)) == 2 * 6 * (stages * chunks - 1 + head)
    assert len(needed) == len(set(needed))
    assert set(needed) == set(made)


# ---- the orders equal those of torch.distributed.pipelining, which runs here without processes or tensors


class RecordingStage:
    """Stands in for torch's stage: records what it is asked to compute, and has nothing to send."""

    is_last = False

    def __init__(self, stages: int, stage: int) -> None:
        self.num_stages = stages
        self.stage_index = stage
        self.actions: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(Kind.FORWARD, 0, microbatch))

    def backward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(Kind.BACKWARD, 0, microbatch))

    def no_operations(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations
    perform_reduce_grad = no_operations


@cache
def plain() -> Any:
    """torch's 1F1B as it runs. (Its `pipeline_order` numbers the last stage's forwards from 1 by mistake.)"""
    from torch.distributed.pipelining import Schedule1F1B  # slow to import: not when tests are collected

    class Plain(Schedule1F1B):
        def _initialize_stage(self, *args: object, **kwargs: object) -> None:
            """Nothing to set up: there are no tensors whose shapes must be learnt."""

    return Plain


def reference_1f1b(stages: int, microbatches: int) -> Orders:
    recorders = [RecordingStage(stages, stage) for stage in range(stages)]
    for recorder in recorders:
        plain()(recorder, microbatches)._step_microbatches()
    return tuple(tuple(recorder.actions) for recorder in recorders)


# torch names a full backward `B`. It also puts in idle slots (None).
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD}


def reference_interleaved(stages: int, chunks: int, microbatches: int) -> Orders:
    """torch calls a chunk a stage and a stage a rank; its stage index is our global chunk."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    local: list[Any] = [
        SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, stage_index=c * stages)
        for c in range(chunks)
    ]
    order: dict[int, list[Any]] = ScheduleInterleaved1F1B(local, microbatches).pipeline_order
    return tuple(
        tuple(
            Action(KINDS[a.computation_type.value], a.stage_index // stages, a.microbatch_index)
            for a in order[rank]
            if a is not None
        )
        for rank in range(stages)
    )


@each("stages", range(1, 9))
def test_plain_orders_equal_torchs(stages: int) -> None:
    for microbatches in range(stages, 33):  # torch takes no fewer than the stages
        assert one_f_one_b(stages, microbatches) == reference_1f1b(stages, microbatches)


@each(
    ("stages", "chunks", "microbatches"),
    [
        (stages, chunks, microbatches)
        for stages in (1, 2, 3, 4, 5, 8)
        for chunks in (2, 3, 4)
        for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
        if microbatches % max(1, microbatches // stages) == 0  # torch takes no others
    ],
)
def test_interleaved_orders_equal_torchs(stages: int, chunks: int, microbatches: int) -> None:
    assert schedule(stages, chunks, microbatches) == reference_interleaved(stages, chunks, microbatches)


def test_one_chunk_interleaved_equals_torchs_too() -> None:
    for stages in range(1, 6):
        assert interleaved_1f1b(stages, 1, 2 * stages) == reference_interleaved(stages, 1, 2 * stages)
        assert interleaved_1f1b(stages, 1, 2 * stages) == one_f_one_b(stages, 2 * stages, window=1)


# ---- the event simulation: right on cases that can be done by hand, and honest about dependencies and links


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [7, 20])
def test_free_transfers_give_the_textbook_time(stages: int, microbatches: int) -> None:
    """(M + n - 1)(f + b): a bubble of n - 1 microbatches (arXiv 2104.04473, section 2.2.1)."""
    timeline = simulate(one_f_one_b(stages, microbatches), 1, 2, 0)
    assert timeline.total == (microbatches + stages - 1) * 3
    assert timeline.busy == (microbatches * 3,) * stages


def test_interleaving_divides_the_bubble_by_chunks() -> None:
    """The bubble is (n - 1)(f + b) / v (arXiv 2104.04473, section 2.2.2)."""
    for chunks in (2, 3, 4):
        timeline = simulate(interleaved_1f1b(4, chunks, 16), 1, 2, 0)
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
    assert timeline.busy == (6, 6)


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
    assert narrow.total > 3 * busiest(narrow)
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
    assert timeline.total >= busiest(timeline)
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


def busiest(timeline: Timeline) -> float:
    """No schedule of the same work is shorter: the busiest stage's compute or link's transfers."""
    return max((*timeline.busy, *timeline.link_busy.values()))


def actions(spans: tuple[Span, ...]) -> Order:
    return tuple(span.action for span in spans)


def test_links_of_a_stage_share_its_interface() -> None:
    """The middle stage uploads activations to one neighbour and gradients to the other."""
    network = Network(3, [], [LinkRate(up=1, down=1)] * 3)
    sizes = {Kind.FORWARD: 4.0, Kind.BACKWARD: 6.0}
    timeline = simulate(one_f_one_b(3, 16, 4), 1, 1, network=network, sizes=sizes)
    upload = Resource(kind=ResourceKind.INTERFACE, stage=1, direction="up")
    assert timeline.link_busy[upload] == 16 * 10
    assert busiest(timeline) == 160
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


# ---- a stage's turns: the order when nothing is late, and what may overtake it when something is


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_without_delays_actions_run_in_order(chunks: int, swap: bool) -> None:
    for order in schedule(3, chunks, 7, 1):
        turns = Turns(order, swap=swap and chunks == 1)
        assert [turns.begin(lambda place: True) for _ in order] == list(range(len(order)))
        assert turns.left == 0 and not turns.choices
        assert turns.begin(lambda place: True) is None


def test_a_gradient_overtakes_forwards_that_are_late_and_they_catch_up() -> None:
    order = one_f_one_b(2, 4, 1)[0]
    assert "".join(action.kind[0] for action in order) == "fffbfbbb"
    turns = Turns(order, swap=True)
    assert turns.choices == [0]
    assert turns.begin(lambda place: place == 0) == 0
    # The next forward is late; the first gradient is here.
    assert turns.choices == [1, 3]
    assert turns.begin(lambda place: place == 3) == 3
    assert turns.choices == [1], "no forward is left whose backward could run"
    assert turns.begin(lambda place: False) is None
    ran = [turns.begin(lambda place: True) for _ in range(turns.left)]
    assert ran == [1, 2, 4, 5, 6, 7]


def test_a_forward_overtakes_a_gradient_only_into_room_that_is_free() -> None:
    order = one_f_one_b(2, 4, 1)[0]
    turns = Turns(order, swap=True)
    for _ in range(3):
        turns.begin(lambda place: True)
    # Three are held, as many as the order ever holds.
    assert turns.choices == [3]
    turns.begin(lambda place: True)
    assert turns.choices == [4, 5]


def test_without_swaps_the_order_waits() -> None:
    turns = Turns(one_f_one_b(2, 4, 1)[0], swap=False)
    turns.begin(lambda place: True)
    assert turns.choices == [1]
    assert turns.begin(lambda place: place != 1) is None


def test_the_next_item_is_looked_at_once() -> None:
    turns = Turns(one_f_one_b(2, 4, 1)[0], swap=True)
    assert turns.upcoming(3) == [0, 1, 2]
    turns.begin(lambda place: True)
    assert turns.upcoming(1) == [1, 3]
    assert turns.upcoming(3) == [1, 2, 3]


@given(
    st.integers(1, 6), st.integers(1, 16), st.integers(0, 5), st.booleans(), st.randoms(use_true_random=False)
)
def test_whatever_is_late_all_runs_in_sequence_and_within_memory(
    stages: int, microbatches: int, window: int, swap: bool, random: Random
) -> None:
    orders = schedule(stages, 1, microbatches, window)

    def seconds(*_: object) -> float:
        return random.choice((0.0, 0.5, 1.0, 20.0))

    # A deadlock would be a ConfigError.
    timeline = simulate(orders, seconds, seconds, seconds, 1.0, swap=swap)
    for spans, order in zip(timeline.spans, orders, strict=True):
        ran = tuple(span.action for span in spans)
        for kind in Kind:
            assert [a.microbatch for a in ran if a.kind is kind] == list(range(microbatches))
        assert held_activations(ran) <= held_activations(order)
        assert swap or ran == order


def test_a_wide_window_is_free_where_gradients_may_overtake() -> None:
    """A link that takes longer than a stage computes: forwards come slowly, and gradients need not wait."""

    def run(window: int, swap: bool) -> Timeline:
        return simulate(one_f_one_b(4, 16, window), 1, 2, 5.0, 0.5, swap=swap)

    narrow, best = run(0, True).total, min(run(window, False).total for window in range(6))
    assert narrow > 1.2 * best
    assert run(6, False).total > 1.2 * best
    for window in range(2, 16):
        assert run(window, True).total <= 1.001 * best
