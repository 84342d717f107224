"""A plan's memory against what a CPU takes, over random settings: `python -m scripts.checks.memory_settings`.

Each setting draws a model's shape, precisions, storage, microbatch, stage and a memory between what the stage
needs at least and with everything kept; the stage is planned for it, built, and runs a step. The estimate
must never be below the peak that torch's profiler counts; how far it is above is what a stage might have had
more.
Fails if one is below, or if a plan took two seconds or more.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.lab.results import commit
from node.stage.stage_model import StageModel
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_memory
from node.tuning.memory_plan import Room, least_stage_bytes
from scripts.report import RESULTS, write
from tests.support.memory_meter import measured

OUT = RESULTS / "memory_settings.json"
STAGES = 2
SOLVE_SECONDS = 2.0
CPU = torch.device("cpu")
FAMILIES = ("llama", "llama", "mixture", "gpt2")


def draw(random: random.Random) -> tuple[RunConfig, int, int]:
    """A run, a stage of it, and the memory to plan that for."""
    family = random.choice(FAMILIES)
    experts = random.choice((2, 4, 8)) if family == "mixture" else 0
    heads, width = random.choice((2, 4, 8)), random.choice((16, 32, 64))
    hidden = heads * width
    model = ModelSection(
        family=family,
        layers=STAGES * random.randint(1, 4),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if family == "gpt2" else random.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
        ffn=int(hidden * random.choice((1, 2, 2.75, 4))),
        vocab=random.choice((256, 512, 2048, 8192)),
        sequence=random.choice((32, 64, 128, 256)),
        experts=experts,
        experts_per_token=random.randint(1, experts) if experts else 0,
    )
    half = random.random() < 0.5
    fp8 = random.random() < 0.5
    microbatch = random.choice((1, 2, 4, 8))
    training = TrainingSection(
        microbatch=microbatch,
        global_batch=microbatch * random.choice((4, 8)),
        precision="bfloat16" if half else "float32",
        weights="bfloat16" if half and fp8 else "float32",
        gradients=random.choice(("float32", "fp8")),
        moments="fp8" if fp8 else "float32",
    )
    config = RunConfig(
        model=model,
        training=training,
        storage=StorageSection(preset=random.choice(("off", "agoq", "compact"))),
        pipeline=PipelineSection(stages=STAGES, window=0),
    )
    stage = random.randrange(STAGES)
    most = stage_memory(config, STAGES)[stage].total
    least = least_stage_bytes(config, STAGES, Devices())[stage]
    return config, stage, least + int((most - least) * random.random())


def compared(config: RunConfig, stage: int, memory_bytes: int) -> dict[str, Any]:
    """The estimate and the peak of one setting, bytes of tensors."""
    room = Room(memory_bytes=memory_bytes)
    began = time.perf_counter()
    plan = room.plan(config, STAGES, stage)
    solved = time.perf_counter() - began
    memory = plan.memory
    return {
        "family": config.model.family,
        "precision": config.training.precision,
        "weights": config.training.weights,
        "gradients": config.training.gradients,
        "moments": config.training.moments,
        "storage": config.storage.preset,
        "stage": stage,
        "plan": plan.text() or "everything kept",
        "estimate": memory.state + max(memory.passes, memory.applying),
        "most_is": "passes" if memory.passes > memory.applying else "the optimizer's step",
        "peak": measured(config, StageModel(config, CPU, room=room), stage, STAGES - stage),
        "solve_seconds": solved,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all settings, and of those whose peak is the optimizer's step or the passes."""
    kinds = {"all": rows} | {
        kind: [row for row in rows if row["most_is"] == kind] for kind in ("passes", "the optimizer's step")
    }
    found: dict[str, Any] = {"solve_seconds": max(row["solve_seconds"] for row in rows)}
    for kind, those in kinds.items():
        ratios = sorted(row["estimate"] / row["peak"] for row in those)
        if ratios:
            found[kind] = {
                "settings": len(ratios),
                "least": ratios[0],
                "median": statistics.median(ratios),
                "most": ratios[-1],
                "within 5 %": sum(1.0 <= ratio <= 1.05 for ratio in ratios),
                "below": sum(ratio < 1.0 for ratio in ratios),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The solver's library takes seconds to load, once.
    warm, stage, _ = draw(random.Random(0))
    Room(memory_bytes=least_stage_bytes(warm, STAGES, Devices())[stage]).plan(warm, STAGES, stage)
    drawn = random.Random(args.seed)
    rows = []
    for _ in range(args.settings):
        rows.append(compared(*draw(drawn)))
        sys.stderr.write(f"{rows[-1]['estimate'] / rows[-1]['peak']:.3f} {rows[-1]}\n")
    found = summary(rows)
    write(
        args.out,
        {
            "commit": commit(),
            "hardware": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "seed": args.seed,
            "summary": found,
            "rows": rows,
        },
    )
    below, slow = found["all"]["below"], found["solve_seconds"] >= SOLVE_SECONDS
    return 1 if below or slow else 0


if __name__ == "__main__":
    sys.exit(main())
