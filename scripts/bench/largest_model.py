"""The largest model on one card of 24 GB: `python -m scripts.bench.largest_model --out PATH`.

All layers of Llama 8B's shape, 1 x 4096 tokens a microbatch, trained on one NVIDIA GPU whose memory is capped
as if it had 24 GB. The plan is the node's own for such a card, by times that it measures first: what each
block keeps, runs again or moves, and which state is in host memory. Whole steps are timed, norms and the
optimizer included. Of the paper of LLMQ the same is beside it, on another card.

`--card N` plans for another card, `--layers N` for another depth. `--tiny` runs the same path in seconds on a
CPU with a small model, for tests; it measures nothing. A step that runs short of memory is repeated with less
of it, as on a node, and counted. Weights are a tile of random numbers, repeated.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.lab.results import commit
from node.model import chunk
from node.model.host_memory import PlainHostMemory
from node.model.units import unit_names, unit_parameters
from node.stage.allocator import VARIABLES, begin_peak, grow_segments, held
from node.stage.block_measure import measured_times
from node.stage.machine_info import fix_order
from node.stage.out_of_memory import ran_out
from node.stage.stage_model import StageModel
from node.tuning.block_times import assumed_times
from node.tuning.device_memory import Devices
from node.tuning.memory import FIXED_BYTES
from node.tuning.memory_plan import Room, least_stage_bytes
from scripts.bench.memory_plan import BESIDE, GB, cap, tiled

LLAMA_8B = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=4096, rope_theta=500000.0
)
TINY = ModelSection(layers=8, hidden=64, heads=2, kv_heads=2, ffn=96, vocab=101, sequence=32)
LLMQ: tuple[dict[str, Any], ...] = (
    {
        "model": "7B",
        "products": "BF16",
        "tokens_a_second": 2700,
        "mfu": 0.71,
        "offloaded": "m, v, weights, x",
    },
    {
        "model": "7B",
        "products": "FP8",
        "tokens_a_second": 4300,
        "mfu": 0.61,
        "offloaded": "m, v, masters, weights, x",
    },
    {
        "model": "14B",
        "products": "BF16",
        "tokens_a_second": 1300,
        "mfu": 0.59,
        "offloaded": "x, m, v, gradients, weights",
    },
    {
        "model": "14B",
        "products": "FP8",
        "tokens_a_second": 2000,
        "mfu": 0.55,
        "offloaded": "x, m, v, gradients, weights, masters",
    },
)
"""On one RTX 4090 of 24 GB, from papers/llmq.txt, tables 1 and 7: microbatches of 16 (7B) and 32 (14B)
samples, 500,000 tokens a step, all moments and gradients in bf16."""
ATTEMPTS = 4
"""Of a step that runs short of memory."""


def run_file(model: ModelSection, microbatches: int, products: str) -> RunConfig:
    return RunConfig(
        model=model,
        training=TrainingSection(
            precision="bfloat16",
            weights="bfloat16",
            gradients="fp8",
            moments="fp8",
            compute=products,
            microbatch=1,
            global_batch=microbatches,
            warmup_steps=0,
            cuda_graphs=False,
        ),
        pipeline=PipelineSection(stages=1),
    )


def one_step(model: StageModel, config: RunConfig, number: int, device: torch.device) -> dict[str, float]:
    """Seconds of its microbatches and of the rest, and its mean loss."""
    random = torch.Generator().manual_seed(number)
    shape = (config.microbatches, 1, config.model.sequence + 1)
    tokens = torch.randint(0, config.model.vocab, shape, generator=random).to(device)
    wait(device)
    began = time.perf_counter()
    model.begin_step()
    losses = []
    for microbatch, sample in enumerate(tokens):
        losses.append(model.forward(0, microbatch, sample[:, :-1], sample[:, 1:]))
        model.backward(0, microbatch, None)
    wait(device)
    middle = time.perf_counter()
    norms = model.squared_norms()
    model.apply(1e-4, min(1.0, sum(norms.values()) ** -0.5))
    wait(device)
    return {
        "microbatch_seconds": (middle - began) / config.microbatches,
        "optimizer_seconds": time.perf_counter() - middle,
        "loss": float(torch.stack(losses).sum()),
    }


def host_bytes(model: StageModel) -> int:
    """What activations take at most, moments, weights and main gradients, without the rounding of tensors."""
    optimizer, streaming = model.optimizer, model.optimizer.streaming
    kept = [one.nbytes for one in (streaming.weights, streaming.gradients, streaming.codes) if one]
    moments = 0 if optimizer._on_host is None else optimizer._on_host.nbytes
    return (0 if model._host is None else model._host.most_lent_bytes) + moments + sum(kept)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(
    config: RunConfig, room: Room, device: torch.device, runs: int, *, on_cpu: bool = False
) -> dict[str, Any]:
    """Medians over `runs` steps after a first one."""
    began = time.perf_counter()
    model = StageModel(config, device, room=room, host=PlainHostMemory(device) if on_cpu else None)
    model.build(0, 1)
    wait(device)
    built = time.perf_counter() - began
    steps: list[dict[str, float]] = []
    short = 0
    if not on_cpu:
        begin_peak(device)
    while len(steps) <= runs:
        try:
            steps.append(one_step(model, config, len(steps), device))
            continue
        except Exception as error:  # torch raises several types when memory runs out; others pass
            short += 1
            if not ran_out(error) or short == ATTEMPTS:
                raise
        # Outside, where the error no longer holds what the step had made.
        gc.collect()
        if not model.relieve():
            raise MemoryError("no plan takes less")
        begin_peak(device)
    control = model._control
    assert control is not None
    most = None if on_cpu else held(device)
    times = {key: statistics.median(step[key] for step in steps[1:]) for key in steps[0] if key != "loss"}
    tokens = config.training.global_batch * config.model.sequence
    whole = config.microbatches * times["microbatch_seconds"] + times["optimizer_seconds"]
    found = {
        **times,
        "step_seconds": whole,
        "tokens_a_second": tokens / whole,
        "tokens_a_second_without_optimizer": tokens / (whole - times["optimizer_seconds"]),
        "losses": [step["loss"] for step in steps],
        "build_seconds": built,
        "ran_short": short,
        "plan_at_the_end": control.plan.text(),
        "host_bytes_taken": host_bytes(model),
        "peak_bytes": None if most is None else most.most_allocated,
        "reserved_bytes": None if most is None else most.most_reserved,
    }
    model.drop()
    return found


def row(args: argparse.Namespace, products: str, device: torch.device) -> dict[str, Any]:
    sizes = TINY if args.tiny else replace(LLAMA_8B, layers=args.layers)
    config = run_file(sizes, args.microbatches, products)
    devices = Devices(on_cpu=False, host_bytes=args.host * GB)
    size = args.card * GB - BESIDE
    if args.tiny:
        times, memory = assumed_times(config, devices), least_stage_bytes(config, 1, devices)[0]
    else:
        cap(device, 1 << 50)
        times = measured_times(config, device)
        # Packed tensors on their way are not there: no node is at the other end.
        memory = size + FIXED_BYTES
    room = Room(devices=devices, memory_bytes=memory, times=times)
    plan = room.plan(config, 1, 0)
    found = {
        "products": products,
        "parameters": sum(unit_parameters(sizes, unit) for unit in unit_names(sizes)),
        "plan": plan.text(),
        "fits": plan.fits,
        "estimate_bytes": plan.memory.total,
        "estimate_without_process": plan.memory.total - plan.memory.fixed,
        "planned_microbatch_seconds": plan.seconds,
        "planned_added": plan.added,
        "host_bytes": plan.host_bytes,
        "cap_bytes": None if args.tiny else size,
        "times": None if times is None else asdict(times),
    }
    if not args.tiny:
        cap(device, size)
    try:
        found |= measured(config, room, device, args.runs, on_cpu=args.tiny)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if args.tiny:
            raise
        found |= {"failed": str(error).strip().split("\n")[0][:160], "held": asdict(held(device))}
    gc.collect()
    if not args.tiny:
        torch.cuda.empty_cache()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--card", type=int, default=24, help="memory that the card is taken to have, in GB")
    parser.add_argument("--host", type=int, default=96, help="main memory for the stage, in GB")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers)
    parser.add_argument("--microbatches", type=int, default=8, help="in a step")
    parser.add_argument("--products", nargs="+", default=["precision"], choices=("precision", "fp8"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if not args.tiny:
        grow_segments(device)
        fix_order(device)
        chunk.initial_weight = tiled
    result: dict[str, Any] = {
        "commit": commit(),
        "hardware": "a CPU" if args.tiny else torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "runs": args.runs,
        "card_gb": args.card,
        "layers": TINY.layers if args.tiny else args.layers,
        "microbatches": args.microbatches,
        "allocator": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "llmq_on_an_rtx_4090": list(LLMQ),
        "rows": [],
    }
    for products in args.products:
        result["rows"].append(row(args, products, device))
        sys.stderr.write(json.dumps(result["rows"][-1]) + "\n")
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
