"""What each exact planner wins over the simplest way, in one table: `python -m scripts.bench.planners`.

Every case compares the planned time of a step with that of the simple way by the same estimate, so that no
machine's noise is in the figures.

- Memory: the mixed-integer program against a greedy ladder. The ladder begins with everything kept and takes
  the change of one block, of all blocks of a kind, or of one part of the state that adds the least time for
  each byte it frees, until the stage fits. An 8B and a 1B model on small cards, in FP8 state and in float32.
- Sharing of gradient groups: the fewest whole subtrees against runs in the order of rows. A row sends each
  subtree of its own, so their number is what rows send.
"""

import argparse
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from node.config.schema import ModelSection, RunConfig
from node.lab.results import commit
from node.run_state.grid import share_groups
from node.schedule.gradient_groups import GroupTree
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import Choice, PlannedStage, _stages
from node.tuning.state_moves import STAYS, Moved
from scripts.bench.memory_plan import GB, HOST_GB, STAGE, STAGES, run_file
from scripts.report import RESULTS, write

OUT = RESULTS / "planners.json"
CAPS_GB = (12, 16, 24, 40)
DRAWS = 20


def memory_cases() -> Iterator[tuple[str, RunConfig]]:
    """A stage of a third of the model each."""
    llama_8b = run_file(2, 4096)
    yield "8B, 2 x 4096", llama_8b
    yield "8B, 1 x 32768", run_file(1, 32768)
    yield (
        "8B, 2 x 4096, float32 state",
        replace(
            llama_8b,
            training=replace(llama_8b.training, weights="float32", gradients="float32", moments="float32"),
        ),
    )
    one_billion = ModelSection(layers=24, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000)
    yield "1B, 8 x 2048", run_file(8, 2048, model=one_billion)


def greedy_added(stage: PlannedStage, memory_bytes: int) -> float | None:
    """What the ladder's plan adds to forward and backward, as a share; None if nothing fits."""
    names, counts = tuple(stage.columns), [[0] * len(stage.columns) for _ in stage.blocks]
    for row, blocks in zip(counts, stage.blocks, strict=True):
        row[names.index(Choice.KEPT)] = blocks
    kinds, state = stage.state_kinds, STAYS

    def tried(counts: list[list[int]], state: Moved) -> tuple[float, int] | None:
        choices = stage.order(counts)
        plan = stage.plan(choices, state=state)
        return (plan.added, plan.memory.total) if plan.fits else None

    def changes() -> Iterator[tuple[list[list[int]], Moved]]:
        for chunk, row in enumerate(counts):
            for old, number in enumerate(row):
                for new in range(len(names)):
                    for moving in {1, number} if number and new != old else ():
                        changed = [list(other) for other in counts]
                        changed[chunk][old] -= moving
                        changed[chunk][new] += moving
                        yield changed, state
        for kind, move in enumerate(kinds):
            for moving in {1, move.most - state[kind]}:
                parts = list(state)
                parts[kind] += moving
                if moving > 0 and parts[kind] <= move.most and parts[0]:
                    yield counts, Moved(*parts)

    now = tried(counts, state)
    while now is not None and now[1] > memory_bytes:
        added, total = now
        best: tuple[float, tuple[float, int], list[list[int]], Moved] | None = None
        for changed, moved in changes():
            found = tried(changed, moved)
            if found is None or found[1] >= total:
                continue
            price = (found[0] - added) / (total - max(found[1], memory_bytes))
            if best is None or price < best[0]:
                best = price, found, changed, moved
        if best is None:
            return None
        _, now, counts, state = best
    return None if now is None else now[0]


def memory_rows() -> Iterator[dict[str, Any]]:
    devices = Devices(on_cpu=False, host_bytes=HOST_GB << 30)
    for name, config in memory_cases():
        stage = _stages(config, STAGES, devices, only=STAGE)[0]
        for cap in CAPS_GB:
            everything = stage.plan(stage.alike(Choice.KEPT), cap * GB)
            planned = everything if everything.fits else stage.best(cap * GB)
            if planned is None:
                continue
            simple = greedy_added(stage, cap * GB)
            yield {
                "case": name,
                "gb": cap,
                "planned_over_all_kept": round(1 + planned.added, 4),
                "greedy_over_all_kept": None if simple is None else round(1 + simple, 4),
                "gain": None if simple is None else round((1 + simple) / (1 + planned.added), 4),
            }


def sharing_rows() -> Iterator[dict[str, Any]]:
    """Subtrees that rows send in runs of groups in the order of rows, over those of the planned sharing."""
    for groups, rows in ((4, 3), (8, 3), (8, 5), (12, 4), (16, 3), (16, 6)):
        gains, tree = [], GroupTree(groups)
        for seed in range(DRAWS):
            seconds = np.random.default_rng(seed).uniform(1.0, 2.0, rows).tolist()
            planned = share_groups(groups, seconds)
            first, simple = 0, []
            for run in planned:
                simple.append((first, first + len(run)))
                first += len(run)
            sent = sum(tree.subtree_count(*ends) for ends in simple)
            least = sum(tree.subtree_count(run[0], run[-1] + 1) for run in planned)
            gains.append(sent / least)
        yield {
            "groups": groups,
            "rows": rows,
            "draws": DRAWS,
            "bytes_mean": round(mean(gains), 4),
            "bytes_most": round(max(gains), 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    report = {
        "experiment": "planners",
        "commit": commit(),
        "hardware": f"{platform.machine()}, by estimates: no time of this machine is in it",
        "python": platform.python_version(),
        "runs": 1,
        "memory": list(memory_rows()),
        "group_sharing": list(sharing_rows()),
    }
    write(out, report)


if __name__ == "__main__":
    main()
