"""What it costs to say which state a stage holds at a snapshot's step: seconds and bytes, at the shape of 1B.

    python -m scripts.bench.state_hashes [--runs 5] [--device cuda] [--out FILE]

The state of a block is float32 weights and moments, and its hash the SHA-256 of its file and sums of squares.
A stage's cost is that of its bytes. Steps take the compute time that `scripts/results/compute.json` has of
this shape on a GPU, without any wait for a link, so that the share of a step is the most that it can be.

Two ways, in the same run. `copied`: the compute thread copies the state, then threads hash the copy; times
are processor seconds, those of a GPU's copies seconds. `beside`: threads hash the state where it is while
products of the step's length run, and the next change waits for them. What that costs is how much longer
these take with the hashing than without. Writes scripts/results/state_hashes.json, or FILE.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from node.config.schema import RunConfig
from node.lab.results import commit, hardware
from node.model.units import parameter_specs
from node.stage.state_copy import READERS, StateCopy, hash_layer
from node.state.unit_state import unit_hash
from node.training.optimizer import StateTensor, copy_to_cpu
from node.tuning.snapshot_place import stage_state_bytes
from scripts.bench.compute import SHAPES
from scripts.report import RESULTS, write
from wire.messages import StateHashes, UnitHash
from wire.messages_proto import node_message_to_proto

STAGES, BLOCKS = 4, 16
MICROBATCHES = 32
"""Of 8192 tokens each in a step."""
UNIT = "block.0000"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what hashes of a stage's state cost.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where the state is: cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "state_hashes.json", metavar="FILE")
    args = parser.parse_args()
    runs, device = args.runs, torch.device(args.device)
    shape = next(one for one in SHAPES if one.name == "Llama 1B")
    model = shape.model.__class__(**{**vars(shape.model), "layers": BLOCKS})
    config = RunConfig(model=model)
    held = {
        f"{kind}.{spec.name}": torch.rand(spec.shape, device=device)
        for spec in parameter_specs(model, UNIT)
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
    }
    size = sum(one.numel() * one.element_size() for one in held.values())
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    copied = _median(runs, lambda: [copy_to_cpu(one) for one in held.values()], clock)
    state = {name: copy_to_cpu(one) for name, one in held.items()}
    arrays = {name: one.numpy() for name, one in state.items()}
    alone = _median(runs, lambda: unit_hash(arrays))
    with ThreadPoolExecutor(READERS) as pool:
        together = _median(runs, lambda: list(pool.map(unit_hash, [arrays] * READERS))) / READERS
    (row,) = [
        one
        for one in json.loads((RESULTS / "compute.json").read_text(encoding="utf-8"))["rows"]
        if one["name"] == shape.name
    ]
    a_block = row["seconds"]["plain"] / row["blocks"]
    step = MICROBATCHES * a_block * BLOCKS / STAGES
    every = config.run.snapshot_every
    assert isinstance(every, int)
    stage_bytes = max(stage_state_bytes(config, STAGES))
    message = StateHashes(
        epoch=1,
        step=every,
        units={unit: UnitHash("ab" * 32, 1.5, 1.5, 1.5) for unit in range(BLOCKS // STAGES + 1)},
    )
    told = node_message_to_proto(message).ByteSize()
    stage_hash = together * stage_bytes / size
    beside = _beside(runs, held, round(stage_bytes / size), step, device)
    report = {
        "bench": "state_hashes",
        "commit": commit(),
        "hardware": hardware() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "device": device.type,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": runs,
        "block_bytes": size,
        "copy_gb_a_second": size / copied / 1e9,
        "hash_gb_a_second": {"1 thread": size / alone / 1e9, f"{READERS} threads": size / together / 1e9},
        "stages": STAGES,
        "stage_bytes": stage_bytes,
        "snapshot_every": every,
        "step_seconds": step,
        "hash_seconds_a_snapshot": stage_hash,
        "hash_seconds_a_step": stage_hash / every,
        "copied": {
            "seconds_a_snapshot": copied * stage_bytes / size,
            "share_of_a_step": copied * stage_bytes / size / every / step,
        },
        "beside": {**beside, "share_of_a_step": beside["seconds_a_snapshot"] / every / step},
        "bytes_a_snapshot": told,
        "bytes_a_step": told / every,
        "note": "a GPU's copy goes over its bus, this machine's through its memory",
    }
    write(args.out, report)
    print(json.dumps(report, indent=1))
    return 0


def _beside(
    runs: int, held: Mapping[str, Tensor], blocks: int, step: float, device: torch.device
) -> dict[str, float]:
    """Seconds of products of about `step` seconds: alone, and while threads hash the state of so many blocks,
    for which what comes next waits."""
    factor = torch.rand(
        2048, 2048, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16
    )

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(factor, factor)
        if device.type != "cpu":
            torch.cuda.synchronize()

    once = _median(runs, lambda: products(64), time.perf_counter) / 64
    count, waits = max(1, round(step / once)), list[float]()

    def with_hashes() -> None:
        units = [
            (f"block.{number:04}", {name: StateTensor(one, one.dtype) for name, one in held.items()})
            for number in range(blocks)
        ]
        began = time.perf_counter()
        state = StateCopy(units)
        waited = time.perf_counter() - began
        hashes = [pool.submit(hash_layer, state, unit) for unit in state.units]
        products(count)
        began = time.perf_counter()
        state.settle()
        waits.append(waited + time.perf_counter() - began)
        state.close()
        for one in hashes:
            one.exception()

    with ThreadPoolExecutor(READERS) as pool:
        together = _median(runs, with_hashes, time.perf_counter)
    alone = _median(runs, lambda: products(count), time.perf_counter)
    return {
        "products_alone": alone,
        "products_with_hashes": together,
        "waited_seconds_a_snapshot": statistics.median(waits[1:]),
        "seconds_a_snapshot": together - alone,
    }


def _median(runs: int, work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """By default processor seconds of all threads: other processes do not count."""
    taken = []
    for _ in range(runs + 1):
        began = clock()
        work()
        taken.append(clock() - began)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    sys.exit(main())
