"""Placement by measurement: what is believed of nodes, which moves follow, and orders of stages."""

import math
import random
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from node.tuning.decisions import pays
from node.tuning.places import Grid, PlacePlan, Volunteer, plan_places
from node.tuning.speeds import LEAST_STEPS, Line, Speeds
from node.tuning.stage_order import (
    Machines,
    StageOrder,
    Work,
    plan_order,
    rows_of,
    split_by_speed,
    step_seconds,
)
from wire.errors import ConfigError

FAST = Line(rate=125e6, round_trip=0.002)
SLOW = Line(rate=1.25e6, round_trip=0.1)
WORK = Work(stages=4, blocks=12, activation_bytes=1e5, gradient_bytes=1e5, microbatches=16)
EVEN = Grid(hosts=("a", "b", "c", "d"), split=(3, 3, 3, 3))
BLOCK = 0.02


def volunteers(*nodes: str, most: int = 12) -> list[Volunteer]:
    return [Volunteer(node_id=node, most_blocks=most) for node in nodes]


def lines(speeds: Speeds, nodes: str, slow: tuple[str, ...] = ()) -> None:
    """Fast lines between all, slow ones between these pairs."""
    for one in nodes:
        for other in nodes:
            if one != other:
                pair = "".join(sorted((one, other)))
                speeds.line(one, other, SLOW if pair in slow else FAST)


def plan(
    speeds: Speeds,
    nodes: str,
    now: Grid = EVEN,
    *,
    measured: float = 0.0,
    move_seconds: float = 1.0,
    steps_left: int = 1000,
    work: Work = WORK,
) -> PlacePlan | None:
    return plan_places(
        speeds,
        volunteers(*nodes),
        work,
        now,
        measured=measured,
        move_seconds=move_seconds,
        steps_left=steps_left,
    )


def truth(speeds: Speeds, real: dict[str, float], grid: Grid) -> float:
    """Seconds of a step with the real speeds, of a single row."""
    known = Speeds(real)
    known._lines = speeds._lines
    machines = known.machines(grid.hosts, [12] * len(grid.hosts))
    return step_seconds(machines, StageOrder(nodes=tuple(range(4)), split=grid.split), WORK)


def train(speeds: Speeds, grid: Grid, real: dict[str, float], lies: dict[str, float] | None = None) -> float:
    """Some steps of this grid, in which nodes say their real times or lie; returns a step's seconds."""
    seconds = truth(speeds, real, grid)
    said = {**real, **(lies or {})}
    for _ in range(LEAST_STEPS):
        passes = [said[node] * count for node, count in zip(grid.hosts, grid.split, strict=True)]
        speeds.step(grid.hosts, [float(count) for count in grid.split], passes, seconds, WORK)
    return seconds


def test_a_slow_line_is_no_link_of_the_pipeline_where_another_order_has_none() -> None:
    speeds = Speeds()
    for node in "abcd":
        speeds.claimed(node, BLOCK)
    lines(speeds, "abcd", slow=("ab", "cd"))
    found = plan(speeds, "abcd")
    assert found is not None
    neighbours = {"".join(sorted(pair)) for pair in pairwise(found.grid.hosts)}
    assert not neighbours & {"ab", "cd"}
    assert found.grid.split == EVEN.split
    assert found.then_seconds < 0.6 * found.now_seconds


def test_a_slow_node_gets_fewer_blocks_once_steps_have_shown_it() -> None:
    real = {"a": BLOCK, "b": BLOCK, "c": 3 * BLOCK, "d": BLOCK}
    speeds = Speeds()
    for node, seconds in real.items():
        speeds.claimed(node, seconds)
    lines(speeds, "abcd")
    assert plan(speeds, "abcd") is None, "claims alone move no block"
    seconds = train(speeds, EVEN, real)
    found = plan(speeds, "abcd", measured=seconds)
    assert found is not None
    split = dict(zip(found.grid.hosts, found.grid.split, strict=True))
    assert split["c"] == 1
    assert sum(split.values()) == 12
    assert truth(speeds, real, found.grid) < 0.7 * seconds
    assert found.then_seconds == pytest.approx(truth(speeds, real, found.grid))


def test_a_stage_moves_only_if_the_gain_pays_the_move_back() -> None:
    real = {"a": BLOCK, "b": BLOCK, "c": 3 * BLOCK, "d": BLOCK}
    speeds = Speeds(real)
    lines(speeds, "abcd")
    seconds = truth(speeds, real, EVEN)
    gain = seconds - truth(speeds, real, Grid(hosts=EVEN.hosts, split=(4, 4, 1, 3)))
    assert plan(speeds, "abcd", measured=seconds, move_seconds=0.9 * 200 * gain) is not None
    assert plan(speeds, "abcd", measured=seconds, move_seconds=1.1 * 200 * gain) is None
    assert plan(speeds, "abcd", measured=seconds, move_seconds=0.9 * 50 * gain, steps_left=50) is not None
    assert plan(speeds, "abcd", measured=seconds, move_seconds=1.1 * 50 * gain, steps_left=50) is None
    slightly = Speeds({**real, "c": 1.05 * BLOCK})
    lines(slightly, "abcd")
    assert plan(slightly, "abcd", move_seconds=0.0) is None, "a gain below a tenth is noise"


def test_a_host_that_lies_about_its_speed_gets_no_more_blocks() -> None:
    """It is five times slower than it says: that costs its own stage, and moves nothing of the others."""
    real = {"a": BLOCK, "b": 5 * BLOCK, "c": BLOCK, "d": BLOCK}
    lies = {"b": BLOCK / 100}
    speeds = Speeds()
    for node, seconds in {**real, **lies}.items():
        speeds.claimed(node, seconds)
    lines(speeds, "abcd")
    assert plan(speeds, "abcd") is None
    seconds = train(speeds, EVEN, real, lies)
    assert not speeds.is_known(["b"])
    assert plan(speeds, "abcd", measured=seconds) is None


def test_a_spare_that_lies_costs_one_stage_until_it_is_measured() -> None:
    """It claims to be fast, huge and well connected, takes the slowest node's place, and loses it."""
    real = {"a": BLOCK, "b": BLOCK, "c": 2 * BLOCK, "d": BLOCK, "x": 6 * BLOCK}
    speeds = Speeds()
    for node in "abcd":
        speeds.claimed(node, real[node])
    lines(speeds, "abcdx")
    seconds = train(speeds, EVEN, real)
    speeds.claimed("x", BLOCK / 100)
    taken = plan(speeds, "abcdx", measured=seconds)
    assert taken is not None
    assert "x" in taken.grid.hosts, "an honest spare would help here"
    share = dict(zip(taken.grid.hosts, taken.grid.split, strict=True))["x"]
    assert share <= 3, "never more than an even share"
    now = Grid(hosts=taken.grid.hosts, split=taken.grid.split)
    slower = train(speeds, now, real, {"x": BLOCK / 100})
    back = plan(speeds, "abcdx", now, measured=slower)
    assert back is not None
    assert "x" not in back.grid.hosts
    honest = train(speeds, back.grid, real)
    assert honest <= seconds, "all is at least as it was before it came"
    assert plan(speeds, "abcdx", back.grid, measured=honest) is None, "its claims do not count again"


def test_what_a_host_says_of_a_line_takes_nobodys_place() -> None:
    """It says that its neighbour's line is dead, and the spare's is fast. The steps show otherwise."""
    real = dict.fromkeys("abcd", BLOCK)
    speeds = Speeds()
    for node in "abcdx":
        speeds.claimed(node, BLOCK)
    lines(speeds, "abcdx")
    seconds = train(speeds, EVEN, real)
    assert plan(speeds, "abcdx", measured=seconds) is None, "there is nothing to gain"
    for dead in (Line(rate=100.0, round_trip=0.002), Line(rate=125e6, round_trip=1e9)):
        speeds.line("a", "b", dead)
        speeds.line("b", "a", dead)
        assert plan(speeds, "abcdx", measured=seconds) is None
        # Where steps are as long as it says, the line counts.
        slow = truth(speeds, real, EVEN)
        found = plan(speeds, "abcdx", measured=slow)
        assert found is not None
        assert {"a", "b"} not in [set(pair) for pair in pairwise(found.grid.hosts)]


def test_a_host_that_says_it_is_slow_is_believed_up_to_the_measured_step() -> None:
    """The others get no more blocks by it than if it were as slow as the whole step allows."""
    real = dict.fromkeys("abcd", BLOCK)
    speeds = Speeds()
    lines(speeds, "abcd")
    seconds = train(speeds, EVEN, real, {"b": 1e9})
    believed = speeds.block_seconds("b")
    assert believed is not None
    assert 3 * believed <= seconds / WORK.microbatches
    assert plan(speeds, "abcd", measured=seconds) is None


def test_the_suspected_is_believed_again_once_steps_are_explained() -> None:
    real = {"a": BLOCK, "b": BLOCK, "c": BLOCK, "d": BLOCK}
    speeds = Speeds()
    lines(speeds, "abcd")
    stalled = 10 * truth(speeds, real, EVEN)
    assert not speeds.step(EVEN.hosts, [3.0] * 4, [3 * BLOCK] * 4, stalled, WORK)
    suspected = speeds.block_seconds("a")
    assert suspected is not None
    assert suspected > 5 * BLOCK
    train(speeds, EVEN, real)
    assert speeds.block_seconds("a") == pytest.approx(BLOCK)
    assert speeds.is_known("abcd")


def test_rows_have_one_split_and_hold_different_nodes() -> None:
    nodes = "abcdefgh"
    real = {node: BLOCK * (4 if node in "ah" else 1) for node in nodes}
    speeds = Speeds(real)
    lines(speeds, nodes)
    now = Grid(hosts=tuple(nodes), split=(3, 3, 3, 3))
    found = plan(speeds, nodes, now)
    assert found is not None
    assert sorted(found.grid.hosts) == list(nodes)
    assert len(found.grid.rows) == 2
    blocks = list(zip(found.grid.hosts, found.grid.split * 2, strict=True))
    assert max(count * real[node] for node, count in blocks) < 3 * 4 * BLOCK


def test_what_is_not_measured_of_a_line_follows_from_the_lines_of_its_ends() -> None:
    speeds = Speeds({node: BLOCK for node in "abc"})
    speeds.line("a", "b", FAST)
    speeds.line("c", "b", SLOW)
    speeds.downloads("c", 1e6)
    machines = speeds.machines(["a", "b", "c"], [4, 4, 4])
    assert machines.rate[0, 1] == FAST.rate
    assert machines.rate[2, 1] == SLOW.rate
    assert machines.rate[0, 2] == 1e6, "nothing was measured towards c but its download"
    assert machines.latency[0, 2] == (FAST.round_trip + SLOW.round_trip) / 4


def test_plans_of_many_nodes_are_made_in_time_and_are_better_than_the_order_of_arrival() -> None:
    draw = random.Random(3)
    nodes = [f"n{k}" for k in range(40)]
    speeds = Speeds({node: BLOCK * draw.uniform(1, 3) for node in nodes})
    for one in nodes:
        for other in draw.sample(nodes, 6):
            if one != other:
                rate = math.exp(draw.uniform(math.log(1e6), math.log(1e8)))
                speeds.line(one, other, Line(rate=rate, round_trip=0.05))
    work = Work(stages=8, blocks=24, activation_bytes=1e5, gradient_bytes=1e5, microbatches=16)
    now = Grid(hosts=tuple(nodes[:8]), split=(3,) * 8)
    found = plan_places(
        speeds, volunteers(*nodes, most=24), work, now, measured=0.0, move_seconds=1.0, steps_left=1000
    )
    assert found is not None
    assert found.then_seconds < 0.8 * found.now_seconds


def test_a_plan_is_the_same_after_it_was_on_record() -> None:
    made = PlacePlan(grid=EVEN, now_seconds=2.0, then_seconds=1.5, shown={"a": 0.1})
    assert PlacePlan.from_json(made.to_json()) == made
    for damaged in ("", "{}", '{"hosts": 3}', made.to_json().replace("2.0", '"x"')):
        with pytest.raises(ConfigError, match="damaged"):
            PlacePlan.from_json(damaged)


MBIT = 1e6 / 8
TENSOR = 512_000.0


def work(stages: int, blocks: int = 12, microbatches: int = 32, head: float = 1.0) -> Work:
    return Work(
        stages=stages,
        blocks=blocks,
        activation_bytes=TENSOR,
        gradient_bytes=TENSOR,
        microbatches=microbatches,
        head_blocks=head,
    )


def machines(seed: int, count: int, *, memory: int = 12) -> Machines:
    """Nodes whose speeds differ by up to 4, in sites with slow lines between them, other ones each way."""
    draw = np.random.default_rng(seed)
    site = draw.integers(0, 3, count)
    near = site[:, None] == site[None, :]
    rate = np.where(near, 1000.0, np.exp(draw.uniform(math.log(20), math.log(500), (count, count)))) * MBIT
    latency = np.where(near, 0.001, draw.uniform(0.01, 0.12, (count, count)))
    return Machines(
        block_seconds=tuple(draw.uniform(0.01, 0.04, count).tolist()),
        most_blocks=tuple(draw.integers(2, memory + 1, count).tolist()),
        rate=rate,
        latency=latency,
    )


def exhaustive(of: Machines, job: Work) -> float:
    """The shortest step of every choice and order of nodes, with the best split of each."""
    best = math.inf
    for nodes in permutations(range(of.count), job.stages):
        split = split_by_speed(of, nodes, job)
        if split is not None:
            best = min(best, step_seconds(of, StageOrder(nodes=nodes, split=split), job))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_near_the_best_of_all(seed: int) -> None:
    """No choice and order of the nodes has a step that is shorter by more than 6 %."""
    count, stages = ((4, 4), (5, 3), (6, 4), (6, 5))[seed % 4]
    of, job = machines(seed, count), work(stages)
    order, best = plan_order(of, job), exhaustive(of, job)
    assert (order is None) == math.isinf(best)
    if order is not None:
        assert sum(order.split) == job.blocks and len(set(order.nodes)) == stages
        assert all(n <= of.most_blocks[node] for node, n in zip(order.nodes, order.split, strict=True))
        assert step_seconds(of, order, job) <= 1.06 * best


@pytest.mark.parametrize("seed", range(4))
def test_blocks_by_speed_have_the_least_maximum(seed: int) -> None:
    of, job = machines(seed, 4), work(4, blocks=9, head=1.5)
    nodes = tuple(range(4))
    found = split_by_speed(of, nodes, job)

    def slowest(split: tuple[int, ...]) -> float:
        blocks = [*split[:-1], split[-1] + job.head_blocks]
        return max(n * of.block_seconds[k] for k, n in enumerate(blocks))

    bars = [(0, *cut, 9) for cut in combinations(range(1, 9), 3)]
    every = [tuple(b - a for a, b in pairwise(one)) for one in bars]
    fitting = [split for split in every if all(n <= of.most_blocks[k] for k, n in enumerate(split))]
    assert (found is None) == (not fitting)
    if found is not None:
        assert slowest(found) == min(map(slowest, fitting))


def test_no_row_where_memory_does_not_suffice() -> None:
    of = machines(3, 4)
    short = Machines(block_seconds=of.block_seconds, most_blocks=(2,) * 4, rate=of.rate, latency=of.latency)
    assert plan_order(short, work(4, blocks=9)) is None
    assert plan_order(of, work(5)) is None
    with pytest.raises(ConfigError, match="over 13 stages"):
        work(13)


def test_a_node_that_claims_too_much_costs_no_more_than_its_own_stage() -> None:
    """One says that it is a hundred times as fast and near to all. The plan goes by that once; measured as it
    is, the same nodes have an order that leaves it what it can do."""
    of, job = machines(11, 6, memory=12), work(4)
    speeds, rate, latency = list(of.block_seconds), of.rate.copy(), of.latency.copy()
    honest = speeds[2]
    speeds[2] = honest / 100
    rate[2, :], rate[:, 2] = 1e12, 1e12
    latency[2, :], latency[:, 2] = 0.0, 0.0
    lie = Machines(block_seconds=tuple(speeds), most_blocks=of.most_blocks, rate=rate, latency=latency)
    believed = plan_order(lie, job)
    assert believed is not None and 2 in believed.nodes
    # Its memory bounds what it can take, whatever it says; the others' order suits their own lines.
    assert believed.split[believed.nodes.index(2)] <= of.most_blocks[2]
    measured, right = step_seconds(of, believed, job), plan_order(of, job)
    assert right is not None
    assert step_seconds(of, right, job) <= measured
    assert pays(measured - step_seconds(of, right, job), measured, cost=30.0, steps_left=1000)


def test_a_move_must_gain_a_tenth_and_pay_back() -> None:
    assert pays(2.0, 10.0, cost=60.0, steps_left=1000)
    assert not pays(0.5, 10.0, cost=0.0, steps_left=1000)
    assert not pays(2.0, 10.0, cost=60.0, steps_left=20)
    assert not pays(2.0, 10.0, cost=500.0, steps_left=10_000)


def test_rows_have_nodes_of_their_own_and_the_slowest_gains_by_exchange() -> None:
    of, job = machines(21, 8, memory=12), work(4)
    rows = rows_of(of, job, 2)
    nodes = [node for row in rows for node in row.nodes]
    assert len(rows) == 2 and len(set(nodes)) == 8
    arrival = [tuple(range(4)), tuple(range(4, 8))]
    before = [split_by_speed(of, one, job) for one in arrival]
    slowest = max(
        step_seconds(of, StageOrder(nodes=one, split=split), job)
        for one, split in zip(arrival, before, strict=True)
        if split is not None
    )
    assert max(step_seconds(of, row, job) for row in rows) < slowest
