"""How many small cards a model takes, and what that costs: `python -m scripts.bench.small_plans`.

For models of 1, 3 and 8 billion parameters and cards of 6 to 16 GB, a gigabyte of which the desktop has: the
fewest cards that hold the run by the program's own plan, and the fewest where the plan adds little time.
Estimates, with times of a typical card; no GPU is needed.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.lab.results import commit, hardware
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import MemoryPlan, Room, least_stage_bytes
from scripts.report import RESULTS, write

OUT = RESULTS / "small_plans.json"
SHAPES = {
    "Llama 3.2 1B": (16, 2048, 32, 8192, True),
    "Llama 3.2 3B": (28, 3072, 24, 8192, True),
    "Llama 3.1 8B": (32, 4096, 32, 14336, False),
}
"""Blocks, hidden size, heads, width of the feed-forward, whether embedding and head are tied."""
CARDS_GB = (6, 8, 10, 11, 12, 16)
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Of cards."""
DESKTOP_GB = 1
HOST_GB = 8
"""Main memory for what does not fit: half of 16 GB."""
LITTLE = 0.1
"""Of a microbatch's time, that a plan adds."""
SEQUENCE = 2048


def run_of(shape: str, *, adapters: bool) -> RunConfig:
    """All weights in bf16 with gradients and moments in FP8, or adapters on weights in 4 bits."""
    layers, hidden, heads, ffn, tied = SHAPES[shape]
    model = ModelSection(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        sequence=SEQUENCE,
        tied=tied,
    )
    training = TrainingSection(global_batch=32, precision="bfloat16")
    config = RunConfig(model=model, training=training, pipeline=PipelineSection(stages=1))
    if adapters:
        return replace(config, lora=LoraSection(rank=16, base="4"))
    low = replace(training, weights="bfloat16", gradients="fp8", moments="fp8")
    return replace(config, training=low, storage=StorageSection(preset="agoq"))


def plans(config: RunConfig, cards: int, memory: int) -> list[MemoryPlan]:
    """Of the first, a middle and the last stage: other stages are as the middle one; empty if none fits."""
    devices = Devices(on_cpu=False, host_bytes=HOST_GB << 30)
    cut = replace(config, pipeline=replace(config.pipeline, stages=cards))
    if max(least_stage_bytes(cut, cards, devices)) > memory:
        return []
    room = Room(devices=devices, memory_bytes=memory)
    found = [room.plan(cut, cards, stage) for stage in sorted({0, cards // 2, cards - 1})]
    return found if all(plan.fits for plan in found) else []


def row(shape: str, gb: int, *, adapters: bool) -> dict[str, Any]:
    config, memory = run_of(shape, adapters=adapters), int((gb - DESKTOP_GB) * 1e9)
    made: dict[str, Any] = {"model": shape, "adapters": adapters, "gb": gb}
    for cards in COUNTS:
        if not (found := plans(config, cards, memory)):
            continue
        slowest = max(found, key=lambda plan: plan.added)
        if "cards" not in made:
            made |= {"cards": cards, "added": slowest.added, "how": slowest.text()}
            made["host_gb"] = max(plan.host_bytes for plan in found) / 1e9
        if slowest.added <= LITTLE:
            return made | {"cards_little": cards, "added_little": slowest.added}
    return made


def rows() -> Iterator[dict[str, Any]]:
    for adapters in (False, True):
        for shape in SHAPES:
            for gb in CARDS_GB:
                found = row(shape, gb, adapters=adapters)
                print(found, file=sys.stderr, flush=True)
                yield found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(argv)
    report = {
        "commit": commit(),
        "hardware": hardware(),
        "runs": 1,
        "desktop_gb": DESKTOP_GB,
        "host_gb": HOST_GB,
        "sequence": SEQUENCE,
        "little": LITTLE,
        "rows": list(rows()),
    }
    write(given.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
