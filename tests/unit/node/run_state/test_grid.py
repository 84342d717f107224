"""Rows of a grid: who is in which, which groups each computes, and what spares prepare for."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from node.run_state.grid import (
    HELD_GROUPS,
    PROMPT_SECONDS,
    Groups,
    GroupSharing,
    StepGroups,
    holders_by_stage,
    row_seconds,
    share_groups,
    spare_stages,
)
from node.run_state.stage_assignment import Candidate, StageAssigner, assign
from node.schedule.gradient_groups import GroupTree
from node.tuning.decisions import GAIN
from tests.support.cases import each


def nodes(names: str) -> list[Candidate]:
    return [Candidate(node_id=name, memory_bytes=0) for name in names]


def make_assigner(rows: int, stages: int = 2, least: int = 2, previous: str = "") -> StageAssigner:
    return StageAssigner(
        stages=stages,
        min_stages=least,
        regroup_seconds=10.0,
        stage_bytes=lambda count, _devices: [12 // count] * count,
        previous=tuple(previous),
        most_rows=rows,
        previous_rows=max(1, len(previous) // stages),
    )


# ---- groups


def test_rows_of_equal_speed_share_evenly_and_the_first_take_the_rest() -> None:
    assert share_groups(4, [None, None]) == ((0, 1), (2, 3))
    assert share_groups(4, [None, None, None]) == ((0, 1), (2,), (3,))
    assert share_groups(1, [None]) == ((0,),)
    assert share_groups(8, [10.0, None, 20.0]) == ((0, 1, 2, 3), (4, 5), (6, 7))


def test_a_row_with_more_groups_has_a_whole_subtree() -> None:
    assert share_groups(4, [1.1, 1.0, 1.1]) == ((0,), (2, 3), (1,))
    assert share_groups(8, [2.0, 1.0, 2.0]) == ((0, 1), (4, 5, 6, 7), (2, 3))
    runs = share_groups(64, [float(row % 3 + 1) for row in range(16)])
    assert sorted(group for run in runs for group in run) == list(range(64)), "too many to try"


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0, 3.0]), min_size=1, max_size=4),
)
def test_no_other_sharing_of_a_step_as_short_has_fewer_subtrees(groups: int, seconds: list[float]) -> None:
    assume(len(seconds) <= groups)
    tree, rows = GroupTree(groups), len(seconds)

    def step(runs: Groups) -> float:
        return max(len(run) * one for run, one in zip(runs, seconds, strict=True))

    def subtrees(runs: Groups) -> int:
        return sum(len(tree.subtrees(run)) for run in runs)

    shared = share_groups(groups, list(seconds))
    cuts = [(0, *one, groups) for one in itertools.combinations(range(1, groups), rows - 1)]
    others = (
        tuple(tuple(range(cut[place], cut[place + 1])) for place in order)
        for cut in cuts
        for order in itertools.permutations(range(rows))
    )
    best = min((step(runs), subtrees(runs)) for runs in others)
    assert (step(shared), subtrees(shared)) == best


def test_groups_stay_while_a_move_gains_nothing() -> None:
    even = share_groups(4, [None, None])
    assert share_groups(4, [1.0, 1.4], even) == even
    assert share_groups(4, [1.0, 3.0], even) == ((0, 1, 2), (3,))
    assert share_groups(4, [1.0, 1.0, 1.0], even) == ((0, 1), (2,), (3,))


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4),
    st.integers(1, 7),
    st.none() | st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_no_other_sharing_ends_a_step_earlier(
    seconds: list[float], groups: int, held: list[int] | None
) -> None:
    rows = len(seconds)
    assume(groups >= rows)
    current = None
    if held is not None:
        ends = [0, *itertools.accumulate(held)]
        current = tuple(tuple(range(first, end)) for first, end in itertools.pairwise(ends))
    shared = share_groups(groups, list(seconds), current)
    assert len(shared) == rows and all(shared)
    assert sorted(group for run in shared for group in run) == list(range(groups))
    assert all(run == tuple(range(run[0], run[-1] + 1)) for run in shared)

    def step(counts: tuple[int, ...]) -> float:
        return max(count * one for count, one in zip(counts, seconds, strict=True))

    counts = itertools.product(range(1, groups + 1), repeat=rows)
    best = min(step(one) for one in counts if sum(one) == groups)
    found = step(tuple(map(len, shared)))
    assert found == best or (shared == current and best > (1 - GAIN) * found)


def test_a_row_is_as_slow_as_its_slowest_node() -> None:
    assert row_seconds("abcd", 2, {"a": 1.0, "b": 2.0, "c": 3.0}) == [2.0, None]


def moves(
    speeds: Sequence[float], *, groups: int, noise: float, change: float = 5.0, left: int = 1000
) -> int:
    """How often groups move in 600 steps of rows with one node each; times vary by `noise`."""
    draw = random.Random(groups)
    hosts = [f"n{row}" for row in range(len(speeds))]
    sharing, now, moved = GroupSharing(groups), 0.0, 0
    current = sharing.groups_for(hosts, rows=len(hosts), now=now)
    now, steps = now + change, 0
    for _ in range(600):
        took = [one * max(0.1, draw.gauss(1.0, noise)) for one in speeds]
        step = max(len(run) * one for run, one in zip(current, took, strict=True))
        now, steps = now + step, steps + 1
        sharing.measured(dict(zip(hosts, took, strict=True)), step, now)
        if sharing.may_gain(hosts, current, steps=steps, left=left):
            after = sharing.groups_for(hosts, rows=len(hosts), now=now)
            assert after != current
            current, moved, steps, now = after, moved + 1, 0, now + change
    return moved


@pytest.mark.parametrize(("groups", "rows"), [(4, 2), (4, 3), (8, 2), (8, 3), (16, 4)])
def test_groups_of_equal_rows_never_move_however_noisy_steps_are(groups: int, rows: int) -> None:
    assert moves([1.0] * rows, groups=groups, noise=0.3) == 0


@pytest.mark.parametrize("rows", [2, 3, 4])
def test_a_row_of_half_the_speed_gives_groups_away_once(rows: int) -> None:
    assert moves([2.0, *[1.0] * (rows - 1)], groups=8, noise=0.1) == 1


def test_a_move_pays_for_its_epoch() -> None:
    speeds = [2.0, 1.0]
    assert moves(speeds, groups=8, noise=0.05, change=1000.0) == 0
    assert moves(speeds, groups=8, noise=0.05, change=50.0) == 1
    assert moves(speeds, groups=8, noise=0.05, change=50.0, left=2) == 0


def run_of(
    speeds: Sequence[float],
    said: Sequence[float],
    *,
    groups: int,
    steps: int = 600,
    admits: bool = False,
) -> list[float]:
    """The seconds of each step of rows with one node each, which say that they take other times. If it
    `admits` that, a row with more than four groups says what it takes."""
    hosts = [f"n{row}" for row in range(len(speeds))]
    sharing, took, since = GroupSharing(groups), list[float](), 0
    current = sharing.groups_for(hosts, rows=len(hosts), now=0.0)
    for step in range(steps):
        took.append(max(len(run) * one for run, one in zip(current, speeds, strict=True)))
        told = [
            true if admits and len(run) > 4 else one
            for true, one, run in zip(speeds, said, current, strict=True)
        ]
        sharing.measured(dict(zip(hosts, told, strict=True)), took[-1], sum(took))
        since += 1
        if sharing.may_gain(hosts, current, steps=since, left=steps - step):
            current, since = sharing.groups_for(hosts, rows=len(hosts), now=sum(took)), 0
    return took


@each("rows", [2, 4, 8])
@each("said", [0.0, 0.01, 0.5])
@each("admits", [False, True])
def test_a_row_that_says_that_it_is_fast_and_is_not_gets_no_more_groups_for_long(
    said: float, rows: int, admits: bool
) -> None:
    honest = run_of([1.0] * rows, [1.0] * rows, groups=4 * rows)
    told = [said, *[1.0] * (rows - 1)]
    took = run_of([1.0] * rows, told, groups=4 * rows, admits=admits)
    slow = [at for at, one in enumerate(took) if one > honest[at]]
    assert len(slow) <= 0.05 * len(took)
    assert took[-1] == honest[-1] == 4.0


def test_a_row_that_was_slow_for_a_while_after_a_move_gets_more_groups_later() -> None:
    """Nodes say what is true. Some steps take long for another reason."""
    speeds, hosts = [0.5, 1.0, 1.0], ["a", "b", "c"]
    sharing, current, since = GroupSharing(8), ((0, 1, 2), (3, 4, 5), (6, 7)), 0
    assert sharing.groups_for(hosts, rows=3, now=0.0) == current
    counts = []
    for step in range(300):
        hiccup = 3.0 if 30 <= step < 40 else 0.0
        took = max(len(run) * one for run, one in zip(current, speeds, strict=True)) + hiccup
        sharing.measured(dict(zip(hosts, speeds, strict=True)), took, 5.0 * step)
        since += 1
        if sharing.may_gain(hosts, current, steps=since, left=300):
            current, since = sharing.groups_for(hosts, rows=3, now=5.0 * step), 0
        counts.append(len(current[0]))
    assert (counts[35], counts[45], counts[-1]) == (4, 2, 4)


# ---- who is in which row


def test_whole_rows_stay_together() -> None:
    holders = ["a", None, "c", "d", None, "f"]
    assert holders_by_stage(holders, 3, set("acdf")) == [["c", "a"], ["d", "f"]]
    assert assign(holders, nodes("acdf"), 2, lambda _s, _d: [1, 1], rows=2, previous_rows=3) == (
        "c",
        "d",
        "a",
        "f",
    )


def test_a_node_left_out_for_a_step_is_a_newcomer_again() -> None:
    assigner = make_assigner(2)
    assigner.choose(nodes("abcd"), 0.0)
    assigner.vacate("a", 1.0)
    assert assigner.choose(nodes("bcd"), 1.0) == ("c", "d")
    assigner.vacate("d", 2.0)
    # Nobody holds the second stage: all go back to what is on disk, so newcomers may come in.
    assert assigner.choose(nodes("bcxy"), 2.0) == ("c", "b", "x", "y")


def test_newcomers_enter_when_the_grid_can_grow() -> None:
    assigner = make_assigner(2)
    assigner.choose(nodes("ab"), 0.0)
    assert not assigner.can_grow(2, nodes("abx"))
    assert assigner.can_grow(2, nodes("abxy"))
    assert not assigner.can_grow(2, nodes("abxyz"), rows=2)
    assert assigner.choose(nodes("abxy"), 1.0) == ("a", "b")
    assigner.regroup(2.0)
    assert assigner.choose(nodes("abxy"), 2.0) == ("a", "b", "x", "y")
    assert assigner.choose(nodes("abxyz"), 3.0) == ("a", "b", "x", "y")


def test_a_stage_is_taken_from_a_node_if_another_row_holds_it() -> None:
    assigner = make_assigner(2)
    assigner.choose(nodes("abcd"), 0.0)
    assert assigner.hand_over("b", nodes("abcd"), 1.0)
    assert assigner.choose(nodes("acd"), 1.0) == ("c", "d")
    assert not assigner.hand_over("d", nodes("cd"), 2.0)


def test_a_restarted_coordinator_waits_briefly_for_all_rows() -> None:
    assigner = make_assigner(2, previous="abcd")
    assert assigner.choose(nodes("ab"), 0.0) is None
    assert assigner.choose(nodes("abcd"), 5.0) == ("a", "b", "c", "d")
    assigner = make_assigner(2, previous="abcd")
    assert assigner.choose(nodes("abx"), 0.0) is None
    assert assigner.choose(nodes("abx"), 10.0) == ("a", "b")


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["die", "join", "grow", "again"]), st.integers(0, 99)), max_size=25),
)
def test_nobody_else_is_placed_while_every_stage_has_a_holder(
    stages: int, rows: int, events: list[tuple[str, int]]
) -> None:
    assigner = make_assigner(rows, stages=stages, least=stages)
    here = [f"n{i}" for i in range(stages)]
    now = 0.0
    for count, (event, which) in enumerate(events):
        now += 20.0
        before, rows_before = assigner._holders, assigner.rows
        grid = [set(before[stage::stages]) & set(here) for stage in range(stages)]
        match event:
            case "die" if here:
                gone = here.pop(which % len(here))
                assigner.vacate(gone, now)
                grid = [one - {gone} for one in grid]
            case "join":
                here.append(f"x{count}")
            case "grow":
                assigner.regroup(now)
            case _:
                pass
        placed = assigner.choose([Candidate(node_id=node, memory_bytes=0) for node in here], now)
        if placed is None:
            assert len(here) < stages
            continue
        assert len(placed) == assigner.rows * stages and 1 <= assigner.rows <= rows
        assert len(set(placed)) == len(placed) and set(placed) <= set(here)
        columns = [set(placed[stage::stages]) for stage in range(stages)]
        if event != "grow" and rows > 1 and before and rows_before and all(grid):
            assert all(now_in <= held for now_in, held in zip(columns, grid, strict=True))
            assert assigner.rows == min(map(len, grid))
        if event == "grow" or not all(grid):
            assert assigner.rows == min(rows, len(here) // stages)
        for stage, held in enumerate(grid):
            stayed = held & set(placed)
            assert stayed <= columns[stage], "who holds a stage keeps it"


# ---- spares


def test_spares_prepare_for_their_own_stage_or_for_the_one_with_fewest_spares() -> None:
    assert spare_stages("abcd", {}, 3) == {"a": 0, "b": 1, "c": 2, "d": 0}
    assert spare_stages("abc", {"c": 0}, 2) == {"a": 1, "b": 0, "c": 0}
    assert spare_stages("ab", {"a": 5, "b": 1}, 2) == {"a": 0, "b": 1}


def test_groups_of_rows_that_die_one_after_another_go_to_different_rows_where_times_are_unknown() -> None:
    shared = StepGroups({row: (row,) for row in range(6)}, 0.0)
    unknown = dict[int, float | None].fromkeys(range(6))
    for at, row in enumerate((5, 4, 3), start=1):
        shared.lose(row)
        del unknown[row]
        assert shared.give(unknown, now=100.0 * at)
    assert [shared.of(row) for row in range(3)] == [(0, 5), (1, 4), (2, 3)]


@each("audited", [(), (0,)])
def test_a_row_that_also_checks_another_is_done_later(audited: tuple[int, ...]) -> None:
    shared = StepGroups({0: (0, 1), 1: (2, 3), 2: (4,)}, 0.0)
    shared.lose(2)
    assert shared.give({0: 1.0, 1: 1.0}, 2.0, audited)
    assert shared.of(1 if audited else 0)[-1] == 4


@each("seconds", [0.1, 1.0, 1.5, 6.0])
def test_groups_that_take_less_than_a_moment_are_held_and_given_several_at_a_time(seconds: float) -> None:
    """Until the clock is asked again, no row is without work."""
    shared = StepGroups({0: range(24), 1: range(24, 48)}, 0.0)
    known: dict[int, float | None] = {0: seconds, 1: seconds}
    shared.hold_back(known)
    held = max(HELD_GROUPS, math.ceil(HELD_GROUPS * PROMPT_SECONDS / seconds))
    assert [len(shared.of(row)) for row in known] == [min(held, 24)] * 2
    now = 0.0
    while shared.waiting:
        now += 0.5
        shared.give(known, now)
        for row in known:
            left = len(shared.of(row)) * seconds - now
            assert 0.0 <= left <= HELD_GROUPS * max(seconds, PROMPT_SECONDS) + seconds


@each("seconds", [0.0, 5e-324])
def test_a_row_that_says_that_groups_take_no_time_has_all_that_it_is_given_at_once(seconds: float) -> None:
    """Nodes report their own times. With one stage, a row is one node."""
    shared = StepGroups({0: range(24), 1: range(24, 48)}, 0.0)
    shared.hold_back({0: seconds, 1: 10.0})
    assert [len(shared.of(row)) for row in (0, 1)] == [24, HELD_GROUPS]
