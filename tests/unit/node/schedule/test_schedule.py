"""Orders of plain and interleaved 1F1B: complete, bounded in memory, same order of gradients."""

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.schedule.floor import PipelineStep
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
from node.schedule.simulation import simulate
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
