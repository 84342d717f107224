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

A step is timed again until two in a row differ by less than 1 %, at least twice and `--runs` times at most.
An optimizer's step is timed apart. Peaks are torch's: of tensors, which the plan's estimate must not be
below, and of what its allocator has reserved, which the cap counts. A way that does not fit says both, and
the largest free piece, at that moment. Budgets come last, because they compile; none is tried where every
block run again does not fit either: less of a block cannot be kept.

The report is written after each way. A call that was cut goes on where it left off with `--go-on`: rows keep
their plan and its times. With `--seconds` no way begins after so many. `--segments fixed` takes the allocator
as torch has it by default, to compare: segments grow or not for a whole process. Weights are a tile of random
numbers, repeated: to draw as many takes longer than all else.
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
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils import checkpoint

from kernels.common.dispatch import kind_of
from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.lab.results import commit
from node.model import chunk
from node.model.blocks import Block
from node.model.families.family import Initial, ParameterSpec
from node.stage.allocator import VARIABLES, begin_peak, grow_segments, held
from node.stage.block_measure import measured_times
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from node.tuning.block_times import BlockTimes
from node.tuning.device_memory import Devices
from node.tuning.memory import FIXED_BYTES
from node.tuning.memory_plan import Choice, MemoryPlan, Room
from node.tuning.storage_choice import choose, chosen_config, words_of

GB = 10**9
HOST_GB = 48
"""Main memory that the card may move to."""
CAPS = (12, 16, 24, 40, 80)
LENGTHS = {"2 x 4096": (2, 4096), "1 x 32768": (1, 32768)}
WAYS = ("plan", "plan, few bits", "plain", "again", "selective", "agoq", "compact", "budget")
ALLOWED = ("8", "4", "attention:8", "attention_output:8")
"""`storage.allow` of `plan, few bits`."""
BUDGETS = (0.8, 0.5, 0.3, 0.15)
ALIKE = 0.01
"""Two steps in a row that differ by less end the repeats."""
MICROBATCHES = 4
STAGES, STAGE = 3, 1
BESIDE = int(0.7 * GB)
"""Bytes of a cap that torch does not get: the CUDA context, and the process itself, which a plan counts as
`FIXED_BYTES`."""


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

    def forward(self, x: Tensor, documents: None = None, place: None = None) -> Tensor:
        def contexts() -> tuple[Any, Any]:
            def policy(_: object, operation: object, *__: object, **___: object) -> Any:
                kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                ways = checkpoint.CheckpointPolicy
                return ways.MUST_SAVE if kept else ways.PREFER_RECOMPUTE

            return checkpoint.create_selective_checkpoint_contexts(policy)

        made = checkpoint.checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)
        return cast(Tensor, made)


def allowed(config: RunConfig, room: Room, device: torch.device, runs: int) -> dict[str, Any]:
    """`timed` with the bits and the plan of a node with this room, of those in `ALLOWED`."""
    storage = choose(config, STAGES, STAGE, room)
    chosen = chosen_config(config, storage)
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
    """Median seconds of a microbatch and of a step of the optimizer, and the peak.

    Args:
        runs: steps that are timed at most.
    """
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
    passes: list[float] = []
    steps: list[float] = []
    while len(passes) < 3 or (len(passes) < 1 + runs and abs(passes[-1] - passes[-2]) > ALIKE * passes[-1]):
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
        "steps": len(passes) - 1,
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
        # The last line of what a compiler raises says why.
        lines = str(error).strip().split("\n")
        words = " ".join(dict.fromkeys((lines[0], lines[-1])))
        return {"failed": words[:300], "held": asdict(held(device))}
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


class Bench:
    """Rows of caps, each with the ways that are measured in it."""

    def __init__(self, device: torch.device, runs: int) -> None:
        self._device, self._runs = device, runs
        own = kind_of(device).own_attention
        self._devices = Devices(on_cpu=False, host_bytes=HOST_GB * GB, has_own_attention=own)
        self._times: dict[RunConfig, BlockTimes | None] = {}

    def _room(self, gb: int, times: BlockTimes | None) -> Room:
        # The card's memory less the context, as a node finds it.
        return Room(devices=self._devices, memory_bytes=gb * GB - BESIDE + FIXED_BYTES, times=times)

    def _measured(self, config: RunConfig) -> BlockTimes | None:
        if config not in self._times:
            cap(self._device, 1 << 50)
            self._times[config] = measured_times(config, self._device)
        return self._times[config]

    def row(self, name: str, gb: int) -> dict[str, Any]:
        """Without ways: the plan."""
        samples, length = LENGTHS[name]
        config = run_file(samples, length)
        times = self._measured(config)
        began = time.perf_counter()
        plan = self._room(gb, times).plan(config, STAGES, STAGE)
        solved = time.perf_counter() - began
        # What a node has on the way from and to its links; here the input and the gradient.
        passing = 2 * 4 * samples * length * config.model.hidden
        whole = plan.memory.total - plan.memory.fixed + passing
        return {
            "tokens": name,
            "gb": gb,
            "commit": commit(),
            "plan": plan.text() or "everything kept",
            "fits": plan.fits,
            "solve_seconds": solved,
            "estimate_bytes": plan.memory.total,
            "estimate_of_torch": whole,
            "estimate_of_tensors": whole - plan.memory.pages,
            "cap_bytes": gb * GB - BESIDE,
            "added": plan.added,
            "host_bytes": plan.host_bytes,
            "times": None if times is None else asdict(times),
            "ways": {},
        }

    def measure(self, row: dict[str, Any], way: str) -> dict[str, Any]:
        """One way, at a row's cap."""
        samples, length = LENGTHS[row["tokens"]]
        config, device, runs = run_file(samples, length), self._device, self._runs
        work: Callable[[], dict[str, Any]]
        if way == "plan":
            room = self._room(row["gb"], times_of(row["times"]))
            work = partial(timed, config, room, device, runs)
        elif way == "plan, few bits":
            open_to = replace(config, storage=StorageSection(allow=ALLOWED))
            work = partial(allowed, open_to, self._room(row["gb"], self._measured(open_to)), device, runs)
        elif way == "budget":
            if "failed" in row["ways"].get("again", {}):
                return {"failed": "not tried: with every block run again it does not fit either"}
            work = partial(budgeted, config, device, runs)
        elif way in ("agoq", "compact"):
            preset = run_file(samples, length, preset=way)
            work = partial(timed, preset, Fixed(Choice.KEPT), device, runs)
        else:
            choice = Choice.AGAIN if way == "again" else Choice.KEPT
            work = partial(timed, config, Fixed(choice), device, runs, selective=way == "selective")
        cap(device, row["cap_bytes"])
        return tried(work, device)


def times_of(recorded: dict[str, Any] | None) -> BlockTimes | None:
    """What a report says of times. How much copies slow compute is not planned with any more."""
    if recorded is None:
        return None
    return BlockTimes.from_json(json.dumps({key: recorded[key] for key in recorded if key != "slowing"}))


def measure_all(
    bench: Bench,
    rows: list[dict[str, Any]],
    names: Sequence[str],
    caps: Sequence[int],
    ways: Sequence[str],
    keep: Callable[[], None],
) -> Iterator[str]:
    """Measure the ways that `rows` lack and add them, budgets last. Calls `keep` after each way, and yields a
    line with its result."""
    by_place = {(row["tokens"], row["gb"]): row for row in rows}
    for last in (False, True):
        for name, gb, way in product(names, caps, [way for way in ways if (way == "budget") == last]):
            row = by_place.get((name, gb))
            if row is None:
                row = by_place[name, gb] = bench.row(name, gb)
                rows.append(row)
            if way not in row["ways"]:
                row["ways"][way] = bench.measure(row, way)
                keep()
                yield f"{name}, {gb} GB, {way}: {json.dumps(row['ways'][way])}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--go-on", type=Path, help="what an earlier call wrote: measure what it lacks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no way after so many")
    parser.add_argument("--runs", type=int, default=4)
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
    if args.go_on is not None and args.go_on.exists():
        result["rows"] = json.loads(args.go_on.read_text(encoding="utf-8"))["rows"]

    def keep() -> None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    bench, until = Bench(device, args.runs), time.perf_counter() + args.seconds
    for line in measure_all(bench, result["rows"], args.tokens, args.caps, args.ways, keep):
        sys.stderr.write(line + "\n")
        if time.perf_counter() > until:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
