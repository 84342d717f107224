"""Orders of stages by measured speeds and lines: near the best that there is."""

import math
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from node.tuning.decisions import pays
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
    with pytest.raises(ConfigError, match="12 blocks cannot be 13 stages"):
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
