"""Plans for small cards, on one NVIDIA GPU with a cap: `python -m scripts.bench.memory_plan --out PATH`.

A stage of 8 blocks of Llama 8B's shape, the middle one of three, at 2 x 4096 and 1 x 32768 tokens. For each
cap it times a microbatch, forward and backward, in each way that fits:

    plan            ours: what a node with so much memory would do, by times that it measures first
    plan, few bits  the same, where the run file allows 8 and 4 bits: the bits that a stage would be given
    plain           everything kept
    again           every block runs again (full recompute)
    selective       torch's selective checkpointing, which keeps the products' results of each block
    budget          torch.compile of each block with the largest `activation_memory_budget` that fits
    agoq, compact   few bits, which change the run's bits

An optimizer's step is timed apart. Peaks are torch's: of tensors, and of what its allocator has reserved,
which the cap counts and the plan's estimate must not be below. A way that does not fit says both, and the
largest free piece, at that moment. `--segments fixed` takes the allocator as torch has it by default, to
compare: segments grow or not for a whole process. Weights are a tile of random numbers, repeated: to draw as
many takes longer than all else.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils import checkpoint

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.lab.results import commit
from node.model import chunk
from node.model.blocks import Block
from node.model.units import Initial, ParameterSpec
from node.pipeline.block_times import BlockTimes
from node.pipeline.device_memory import Devices, has_own_attention
from node.pipeline.memory_choice import Choice, MemoryPlan
from node.pipeline.memory_plan import Room
from node.pipeline.storage_choice import choose, chosen_config, words_of
from node.stage.allocator import VARIABLES, begin_peak, grow_segments, held
from node.stage.block_measure import measured_times
from node.stage.machine_info import arithmetic, fix_order
from node.stage.stage_model import StageModel

GB = 10**9
HOST_GB = 48
"""Main memory that the card may move to."""
CAPS = (12, 16, 24, 40, 80)
LENGTHS = {"2 x 4096": (2, 4096), "1 x 32768": (1, 32768)}
WAYS = ("plan", "plan, few bits", "plain", "again", "selective", "agoq", "compact", "budget")
ALLOWED = ("8", "4", "attention:8", "attention_output:8")
"""`storage.allow` of `plan, few bits`."""
BUDGETS = (0.8, 0.5, 0.3, 0.15)
MICROBATCHES = 4
STAGES, STAGE = 3, 1
BESIDE = int(0.7 * GB)
"""Of a cap, for what is not torch's: the context, kernels and cuBLAS' workspaces."""


def run_file(
    samples: int, length: int, *, preset: str = "off", model: ModelSection | None = None
) -> RunConfig:
    sizes = model or ModelSection(
        layers=8 * STAGES, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, sequence=length
    )
    return RunConfig(
        model=replace(sizes, sequence=length),
        training=TrainingSection(
            precision="bfloat16",
            weights="bfloat16",
            gradients="fp8",
            moments="fp8",
            microbatch=samples,
            global_batch=samples * MICROBATCHES,
            warmup_steps=0,
            cuda_graphs=False,
        ),
        storage=StorageSection(preset=preset),
        pipeline=PipelineSection(stages=STAGES),
    )


class Fixed(Room):
    """The same choice for every block."""

    def __init__(self, choice: Choice) -> None:
        super().__init__(devices=Devices(on_cpu=False))
        self._choice = choice

    def plan(self, config: RunConfig, stages: int, stage: int) -> MemoryPlan:
        plan = super().plan(config, stages, stage)
        return replace(plan, choices=(self._choice,) * len(plan.choices))


class Selective(nn.Module):
    """A block under torch's selective checkpointing: results of matrix products stay, the rest runs again."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.storage = block.storage

    def forward(self, x: Tensor, documents: None = None) -> Tensor:
        def contexts() -> tuple[Any, Any]:
            def policy(_: object, operation: object, *__: object, **___: object) -> Any:
                kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                ways = checkpoint.CheckpointPolicy
                return ways.MUST_SAVE if kept else ways.PREFER_RECOMPUTE

            return checkpoint.create_selective_checkpoint_contexts(policy)

        made = checkpoint.checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)
        return cast(Tensor, made)


def allowed(
    config: RunConfig, devices: Devices, size: int, device: torch.device, runs: int
) -> dict[str, Any]:
    """`timed` with the bits and the plan of a node that offers `size` bytes, of those in `ALLOWED`."""
    open_to = replace(config, storage=StorageSection(allow=ALLOWED))
    room = Room(devices=devices, memory_bytes=size, times=measured_times(open_to, device))
    storage = choose(open_to, STAGES, STAGE, room)
    chosen = chosen_config(open_to, storage)
    plan = room.plan(chosen, STAGES, STAGE).text() or "everything kept"
    return {**timed(chosen, room, device, runs), "plan": plan, "storage": words_of(storage)}


def budgeted(config: RunConfig, device: torch.device, runs: int) -> dict[str, Any]:
    """`timed` with the largest of `BUDGETS` that fits."""
    for budget in BUDGETS:
        found = tried(partial(timed, config, Fixed(Choice.KEPT), device, runs, budget=budget), device)
        torch._dynamo.reset()
        if "failed" not in found:
            break
    return {**found, "budget": budget}


def timed(
    config: RunConfig,
    room: Room,
    device: torch.device,
    runs: int,
    *,
    selective: bool = False,
    budget: float | None = None,
) -> dict[str, Any]:
    """Median seconds of a microbatch and of a step of the optimizer, and the peak."""
    with functorch_config.patch(activation_memory_budget=1.0 if budget is None else budget):
        return _timed(config, room, device, runs, selective, compiled=budget is not None)


def _timed(
    config: RunConfig, room: Room, device: torch.device, runs: int, selective: bool, *, compiled: bool
) -> dict[str, Any]:
    model = StageModel(config, device, room=room)
    model.build(STAGE, STAGES)
    if compiled:
        for layer in (each for part in model._chunks for each in part.layers if isinstance(each, Block)):
            layer.fuses = False
            layer.compile()
    if selective:
        for part in model._chunks:
            for number, layer in enumerate(part.layers):
                if isinstance(layer, Block):
                    layer.fuses = False
                    part.layers[number] = Selective(layer)
    shape = (config.training.microbatch, config.model.sequence, config.model.hidden)
    fed = torch.randn(shape, device=device)
    above = torch.randn(shape, device=device) * 1e-3
    passes, steps = [], []
    for _ in range(1 + runs):
        begin_peak(device)
        model.begin_step()
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        # As in the schedule: the middle stage of three has two microbatches between their passes.
        model.forward(0, 0, fed.clone())
        for microbatch in range(1, MICROBATCHES):
            model.forward(0, microbatch, fed.clone())
            model.backward(0, microbatch - 1, above)
        model.backward(0, MICROBATCHES - 1, above)
        torch.cuda.synchronize(device)
        middle = time.perf_counter()
        model.squared_norms()
        model.apply(1e-4, 1.0)
        torch.cuda.synchronize(device)
        passes.append((middle - began) / MICROBATCHES)
        steps.append(time.perf_counter() - middle)
    most = held(device)
    model.drop()
    return {
        "microbatch_seconds": statistics.median(passes[1:]),
        "optimizer_seconds": statistics.median(steps[1:]),
        "peak_bytes": most.most_allocated,
        "reserved_bytes": most.most_reserved,
    }


def tried(work: Callable[[], dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """What `work` gives, or that it does not fit and what was held then."""
    try:
        return work()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        # Its frames still hold the tensors.
        return {"failed": str(error).strip().split("\n")[0][:160], "held": asdict(held(device))}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def tiled(model: ModelSection, unit: str, spec: ParameterSpec, seed: int) -> np.ndarray:
    """In place of `node.model.chunk.initial_weight`."""
    if spec.initial in (Initial.ONES, Initial.ZEROS):
        return np.full(spec.shape, float(spec.initial is Initial.ONES), dtype=np.float32)
    tile = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32)
    return np.resize(tile * np.float32(0.02), spec.shape)


def cap(device: torch.device, size: int) -> None:
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)


def stage_rows(
    name: str, caps: Sequence[int], ways: Sequence[str], device: torch.device, runs: int
) -> Iterator[dict[str, Any]]:
    samples, length = LENGTHS[name]
    config = run_file(samples, length)
    hidden = config.model.hidden
    cap(device, 1 << 50)
    times = measured_times(config, device)
    for gb in caps:
        size = gb * GB - BESIDE
        own = has_own_attention(arithmetic(device))
        devices = Devices(on_cpu=False, host_bytes=HOST_GB * GB, has_own_attention=own)
        room = Room(devices=devices, memory_bytes=gb * GB, times=times)
        began = time.perf_counter()
        plan = room.plan(config, STAGES, STAGE)
        solved = time.perf_counter() - began
        cap(device, size)
        found: dict[str, Any] = {}
        forms: dict[str, Callable[[], dict[str, Any]]] = {
            "plan": lambda room=room: timed(config, room, device, runs),
            "plan, few bits": lambda gb=gb, devices=devices: allowed(config, devices, gb * GB, device, runs),
            "plain": lambda: timed(config, Fixed(Choice.KEPT), device, runs),
            "again": lambda: timed(config, Fixed(Choice.AGAIN), device, runs),
            "selective": lambda: timed(config, Fixed(Choice.KEPT), device, runs, selective=True),
            "budget": lambda: budgeted(config, device, runs),
        }
        for preset in ("agoq", "compact"):
            other = run_file(samples, length, preset=preset)
            forms[preset] = lambda other=other: timed(other, Fixed(Choice.KEPT), device, runs)
        for way in ways:
            found[way] = tried(forms[way], device)
        row = {
            "tokens": name,
            "gb": gb,
            "plan": plan.text() or "everything kept",
            "fits": plan.fits,
            "solve_seconds": solved,
            "estimate_bytes": plan.memory.total,
            # What a node has on the way from and to its links; here the input and the gradient.
            "estimate_of_torch": plan.memory.total - plan.memory.fixed + 2 * 4 * samples * length * hidden,
            "cap_bytes": size,
            "added": plan.added,
            "host_bytes": plan.host_bytes,
            "times": None if times is None else asdict(cast(BlockTimes, times)),
            "ways": found,
        }
        sys.stderr.write(json.dumps(row) + "\n")
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--caps", type=int, nargs="+", default=list(CAPS))
    parser.add_argument("--tokens", nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=WAYS,
    )
    parser.add_argument("--segments", choices=("growing", "fixed"), default="growing")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    if args.segments == "growing":
        grow_segments(device)
    fix_order(device)
    chunk.initial_weight = tiled
    result: dict[str, Any] = {
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "runs": args.runs,
        "segments": args.segments,
        "allocator": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "rows": [],
    }
    for name in args.tokens:
        for row in stage_rows(name, args.caps, args.ways, device, args.runs):
            result["rows"].append(row)
            # What was measured stays, if time runs out.
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
