"""What Muon's step takes beside AdamW's, at the shapes of models with 124 million and 1.2 billion parameters.

    python -m scripts.bench.muon [--tiles]

On a GPU. All parameters of a model are stepped, as a stage that holds all of it does; times are medians, in
milliseconds. Beside them: forward and backward of the model's blocks, without embedding and head, over 65,536
tokens, and Newton-Schulz's iteration by torch's batched products and by our kernels; with `--tiles` for
several sizes of their tiles.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.orthogonal import triton
from kernels.orthogonal.reference import COEFFICIENTS, ITERATIONS
from node.config.schema import LoraSection, ModelSection, TrainingSection
from node.lab.results import commit
from node.model.chunk import build_chunk, compute_precision
from node.model.lora_shapes import trained_specs
from node.model.optimizers import AdamWRule, UpdateRule, update_rule
from node.model.units import block_name, unit_names
from node.stage.machine_info import fix_order
from node.training.muon import Muon
from node.training.update_rules import AdamW, Step, Updates
from scripts.experiments.convergence_runs import MODEL
from scripts.report import RESULTS, version

OUT = RESULTS / "muon.json"
CUDA = torch.device("cuda")
MODELS = {
    "124M": MODEL,
    "1.2B": replace(MODEL, layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256),
}
WAYS = {
    f"{optimizer}, moments in {moments}": replace(TrainingSection(), optimizer=optimizer, moments=moments)
    for optimizer in ("adamw", "muon")
    for moments in ("float32", "fp8")
}
TOKENS = 65536
SAMPLES = 8
RUNS = 10
SHAPES = ((24, 768, 768), (12, 768, 2048), (4, 2048, 2048), (1, 2048, 8192))
TILES = (
    triton.TILES,
    triton.Tiles(128, 128, 64, 4, 3),
    triton.Tiles(128, 128, 64, 8, 4),
    triton.Tiles(128, 128, 32, 8, 4),
    triton.Tiles(128, 256, 64, 8, 3),
    triton.Tiles(64, 128, 64, 4, 4),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure Muon's step beside AdamW's.")
    parser.add_argument("--tiles", action="store_true", help="try several sizes of tiles")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    fix_order(CUDA)
    report: dict[str, Any] = {
        "experiment": "muon",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "runs": RUNS,
        "tokens": TOKENS,
        "iterations": iterations(TILES if arguments.tiles else TILES[:1]),
        "models": [],
    }
    for name in arguments.models:
        report["models"].append({"model": name, **measured(MODELS[name])})
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


def timed(way: Callable[[], object]) -> float:
    """Median milliseconds."""
    times = []
    for run in range(2 + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        way()
        end.record()
        end.synchronize()
        if run >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measured(model: ModelSection) -> dict[str, Any]:
    """The time of a step each way, the bytes of its moments, and the time of the blocks' passes."""
    steps = []
    for way, training in WAYS.items():
        step, parameters, moment_bytes = whole_step(model, training)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        milliseconds = timed(step)
        steps.append(
            {
                "way": way,
                "milliseconds": milliseconds,
                "moment_bytes_a_parameter": moment_bytes / parameters,
                "scratch_bytes": torch.cuda.max_memory_allocated() - before,
            }
        )
        del step
        torch.cuda.empty_cache()
    passes = timed(block_passes(model)) * model.layers * TOKENS / (SAMPLES * model.sequence)
    return {"parameters": parameters, "steps": steps, "block_passes_milliseconds": passes}


def whole_step(model: ModelSection, training: TrainingSection) -> tuple[Callable[[], None], int, int]:
    """A step of all parameters, how many there are, and the bytes of their moments."""
    groups: dict[tuple[UpdateRule, bool], list[tuple[Tensor, Tensor, list[Tensor]]]] = {}
    parameters = moment_bytes = 0
    for unit in unit_names(model):
        for spec in trained_specs(model, LoraSection(), unit):
            shape, is_matrix = spec.shape, len(spec.shape) >= 2
            rule = update_rule(training, unit, spec.name, shape)
            weight, gradient = (1e-2 * torch.randn(shape, device=CUDA) for _ in range(2))
            moments = []
            for part in rule.keys(training, spec.name, is_matrix=is_matrix).values():
                dtype, count = getattr(torch, part.dtype), part.count(spec.elements)
                moments.append(torch.full((count,), part.first, dtype=dtype, device=CUDA))
            if len(moments) == len(rule.moments):
                moments = [moment.view(shape) for moment in moments]
            parameters += spec.elements
            moment_bytes += sum(moment.nbytes for moment in moments)
            groups.setdefault((rule, is_matrix), []).append((weight, gradient, moments))
    updates: dict[UpdateRule, Updates] = {
        rule: AdamW(rule, training) if isinstance(rule, AdamWRule) else Muon(rule, training)  # type: ignore[arg-type]
        for rule, _ in groups
    }

    def step() -> None:
        for (rule, is_matrix), each in groups.items():
            how = Step(lr=1e-4, weight_decay=0.1 if is_matrix else 0.0, number=2)
            if is_matrix and training.moments == "fp8":
                for weight, gradient, moments in each:
                    updates[rule].step(weight, gradient, moments, how)
            else:
                weights, gradients, all_moments = zip(*each, strict=True)
                updates[rule].step_together(weights, gradients, all_moments, how)

    return step, parameters, moment_bytes


def block_passes(model: ModelSection) -> Callable[[], None]:
    """Forward and backward of one block."""
    chunk = build_chunk(model, [block_name(0)], 0, CUDA)
    x = torch.randn(SAMPLES, model.sequence, model.hidden, device=CUDA, requires_grad=True)
    gradient = torch.randn_like(x)

    def passes() -> None:
        with compute_precision("bfloat16", CUDA):
            out = chunk(x)
        torch.autograd.backward(out, gradient)

    return passes


def iterations(tiles: tuple[triton.Tiles, ...]) -> list[dict[str, Any]]:
    """Milliseconds of Newton-Schulz's iteration by shape, and the products that it needs over that time."""
    found = []
    for count, rows, columns in SHAPES:
        start = torch.randn(count, rows, columns, device=CUDA)
        start = (start / start.norm(dim=(1, 2), keepdim=True)).bfloat16()
        work = ITERATIONS * count * 2 * (2 * rows * rows * columns + rows**3)
        for name, way in {
            "torch, batched": library,
            **{str(each): (lambda x, each=each: triton.iterate(x, each)) for each in tiles},
        }.items():
            milliseconds = timed(lambda way=way, start=start: way(start.clone()))  # type: ignore[misc]
            found.append(
                {
                    "shape": [count, rows, columns],
                    "way": name,
                    "milliseconds": milliseconds,
                    "teraflops_of_whole_products": work / milliseconds / 1e9,
                }
            )
    return found


def library(x: Tensor) -> Tensor:
    """The iteration by batched products, all of each."""
    first, third, fifth = COEFFICIENTS
    for _ in range(ITERATIONS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x


if __name__ == "__main__":
    sys.exit(main())
