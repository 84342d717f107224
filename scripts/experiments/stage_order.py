"""Orders of stages by measured speeds and lines, in simulation: against every order, and in five settings.

    python -m scripts.experiments.stage_order

First, nodes of unlike speeds in sites with slow lines between them: the planned order's step floor over the
shortest of every choice and order (at most eight nodes: 8! orders). Then the settings of DT-FM (Yuan et al.,
NeurIPS 2022; simulated there too, `scheduler/generate_sim_com_matrices.py` at 69f05e5): 64 equal nodes as 8
rows of 8 stages, the slowest row's floor as planned, and with nodes in the order in which they come.

The model is GPT-3 1.3B's shape: 24 blocks 2048 wide, 2048 tokens a microbatch, tensors in 4.41 bits, 12 ms a
block.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from node.lab.results import commit
from node.tuning.stage_order import (
    Machines,
    Matrix,
    StageOrder,
    Work,
    plan_order,
    rows_of,
    split_by_speed,
    step_seconds,
)
from scripts.report import RESULTS, write

OUT = RESULTS / "stage_order.json"
NODES, ROWS, STAGES = 64, 8, 8
GBIT = 1e9 / 8
SHUFFLES = 10
WORK = Work(
    stages=STAGES,
    blocks=24,
    activation_bytes=2048 * 2048 * 4.41 / 8,
    gradient_bytes=2048 * 2048 * 4.41 / 8,
    microbatches=64,
    head_blocks=1.0,
)
BLOCK_SECONDS = 0.012
# Round trips in ms and Gbit/s, as that code has them.
WORLD = {
    "Oregon Virginia": (67, 0.79),
    "Oregon Ohio": (49, 1.10),
    "Oregon Tokyo": (96, 0.523),
    "Oregon Seoul": (124, 0.46),
    "Oregon London": (136, 0.42),
    "Oregon Frankfurt": (143, 0.404),
    "Oregon Ireland": (124, 0.482),
    "Virginia Ohio": (11, 1.12),
    "Virginia Tokyo": (143, 0.524),
    "Virginia Seoul": (172, 0.5),
    "Virginia London": (76, 1.16),
    "Virginia Frankfurt": (90, 1.02),
    "Virginia Ireland": (67, 1.05),
    "Ohio Tokyo": (130, 0.694),
    "Ohio Seoul": (159, 0.529),
    "Ohio London": (86, 1.05),
    "Ohio Frankfurt": (99, 0.799),
    "Ohio Ireland": (77, 1.14),
    "Tokyo Seoul": (34, 1.10),
    "Tokyo London": (210, 0.366),
    "Tokyo Frankfurt": (223, 0.36),
    "Tokyo Ireland": (199, 0.465),
    "Seoul London": (238, 0.342),
    "Seoul Frankfurt": (235, 0.358),
    "Seoul Ireland": (228, 0.335),
    "London Frankfurt": (14, 1.14),
    "London Ireland": (12, 1.09),
    "Frankfurt Ireland": (24, 1.08),
}
CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
COUNTRY = {
    "Virginia Oregon": (67, 1.15),
    "Virginia California": (59, 1.05),
    "Virginia Ohio": (11, 1.12),
    "Oregon California": (12, 1.25),
    "Oregon Ohio": (49, 1.10),
    "California Ohio": (52, 1.02),
}
STATES = ("Virginia", "Oregon", "California", "Ohio")

Setting = tuple[Matrix, Matrix]
"""Gbit/s and round trips in ms."""


def datacenter() -> Setting:
    """8 instances of 8 GPUs."""
    near = np.kron(np.eye(8), np.ones((8, 8))) > 0
    return np.where(near, 100.0, 3.125), np.zeros((NODES, NODES))


def spot() -> Setting:
    """8 instances of 4 GPUs and 32 of one."""
    blocks = [np.arange(NODES) // 4 if k < 32 else 100 + np.arange(NODES) for k in range(NODES)]
    where = np.array([blocks[k][k] for k in range(NODES)])
    near = where[:, None] == where[None, :]
    return np.where(near, 100.0, 1.25), np.zeros((NODES, NODES))


def universities() -> Setting:
    """Ohio and Virginia."""
    where = np.arange(NODES) // 32
    near = where[:, None] == where[None, :]
    return np.where(near, 5.0, 1.12), np.where(near, 1.0, 11.0)


def spread(places: tuple[str, ...], pairs: dict[str, tuple[float, float]]) -> Setting:
    """As many nodes in each place."""
    where = np.arange(NODES) * len(places) // NODES
    rate, trip = np.full((NODES, NODES), 2.0), np.full((NODES, NODES), 10.0)
    for a in range(NODES):
        for b in range(NODES):
            one, other = places[where[a]], places[where[b]]
            if one != other:
                known = pairs.get(f"{one} {other}") or pairs[f"{other} {one}"]
                trip[a, b], rate[a, b] = known
    return rate, trip


SETTINGS: dict[str, Callable[[], Setting]] = {
    "data centre": datacenter,
    "spot instances": spot,
    "two universities": universities,
    "four states": lambda: spread(STATES, COUNTRY),
    "the world": lambda: spread(CITIES, WORLD),
}


def unlike(seed: int, count: int) -> Machines:
    """Speeds differ by up to 4; three sites, with slow lines between them, other ones each way."""
    draw = np.random.default_rng(seed)
    site = draw.integers(0, 3, count)
    near = site[:, None] == site[None, :]
    mbit = np.where(near, 1000.0, np.exp(draw.uniform(math.log(20), math.log(500), (count, count))))
    return Machines(
        block_seconds=tuple(draw.uniform(0.01, 0.04, count).tolist()),
        most_blocks=tuple(draw.integers(4, 13, count).tolist()),
        rate=mbit * 1e6 / 8,
        latency=np.where(near, 0.001, draw.uniform(0.01, 0.12, (count, count))),
    )


def against_every_order(count: int, draws: int) -> dict[str, Any]:
    """The planned step over the shortest one, for rows of all of so many nodes."""
    work = Work(
        stages=count,
        blocks=2 * count,
        activation_bytes=WORK.activation_bytes / 4,
        gradient_bytes=WORK.gradient_bytes / 4,
        microbatches=64,
        head_blocks=1.0,
    )
    ratios, arrival, took = [], [], []
    for seed in range(draws):
        machines = unlike(seed, count)
        began = time.process_time()
        order = plan_order(machines, work)
        took.append(time.process_time() - began)
        every = [
            step_seconds(machines, StageOrder(nodes=nodes, split=split), work)
            for nodes in permutations(range(count))
            if (split := split_by_speed(machines, nodes, work)) is not None
        ]
        if order is None or not every:
            continue
        ratios.append(step_seconds(machines, order, work) / min(every))
        arrival.append(mean(every) / min(every))
    return {
        "nodes": count,
        "orders": math.factorial(count),
        "draws": len(ratios),
        "planned_over_best_mean": round(mean(ratios), 4),
        "planned_over_best_worst": round(max(ratios), 4),
        "any_order_over_best_mean": round(mean(arrival), 3),
        "planning_seconds_mean": round(mean(took), 3),
    }


def in_setting(name: str) -> dict[str, Any]:
    """The slowest of the rows, planned and as nodes come."""
    gbit, trip = SETTINGS[name]()
    machines = Machines(
        block_seconds=(BLOCK_SECONDS,) * NODES,
        most_blocks=(WORK.blocks,) * NODES,
        rate=gbit * GBIT,
        latency=trip / 2e3,
    )
    began = time.process_time()
    rows = rows_of(machines, WORK, ROWS)
    took = time.process_time() - began
    come = []
    for seed in range(SHUFFLES):
        nodes = np.random.default_rng(seed).permutation(NODES).reshape(ROWS, STAGES).tolist()
        splits = [split_by_speed(machines, row, WORK) for row in nodes]
        come.append(
            max(
                step_seconds(machines, StageOrder(nodes=tuple(row), split=split), WORK)
                for row, split in zip(nodes, splits, strict=True)
                if split is not None
            )
        )
    planned = max(step_seconds(machines, row, WORK) for row in rows)
    alone = StageOrder(nodes=rows[0].nodes, split=rows[0].split)
    compute = max(
        BLOCK_SECONDS * (n + WORK.head_blocks * (k == STAGES - 1)) for k, n in enumerate(alone.split)
    )
    return {
        "setting": name,
        "rows": len(rows),
        "planned_seconds": round(planned, 3),
        "as_they_come_seconds_mean": round(mean(come), 3),
        "as_they_come_seconds_worst": round(max(come), 3),
        "compute_alone_seconds": round(compute * WORK.microbatches, 3),
        "gain": round(mean(come) / planned, 3),
        "planning_seconds": round(took, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate orders of stages by measured speeds and lines.")
    parser.add_argument("--most", type=int, default=8, help="nodes up to which every order is tried")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "experiment": "stage_order",
        "commit": commit(),
        "simulation": True,
        "against_every_order": [],
        "settings": [],
    }
    for name in SETTINGS:
        report["settings"].append(in_setting(name))
        print(json.dumps(report["settings"][-1]), flush=True)
    for count in range(3, arguments.most + 1):
        report["against_every_order"].append(against_every_order(count, 20 if count < 7 else 4))
        print(json.dumps(report["against_every_order"][-1]), flush=True)
        write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
