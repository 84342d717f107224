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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.orthogonal import triton
from kernels.orthogonal.reference import ITERATIONS, POLYNOMIALS
from node.config.schema import LoraSection, ModelSection, TrainingSection
from node.lab.results import commit
from node.model.chunk import build_chunk, compute_precision
from node.model.lora_shapes import trained_specs
from node.model.optimizers import AdamWRule, UpdateRule, update_rule
from node.model.units import block_name, unit_names
from node.stage.machine_info import fix_order
from node.training.muon import Muon
from node.training.update_rules import AdamW, Step, Turn, Updates
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
WAYS |= {
    f"muon, moments in float32, {count} iterations": replace(
        TrainingSection(), optimizer="muon", muon_iterations=count
    )
    for count in (4, 3)
}
TOKENS = 65536
SAMPLES = 8
RUNS = 10
SHAPES = ((24, 768, 768), (12, 768, 2048), (4, 2048, 2048), (1, 2048, 8192))
TILES = (
    triton.TILES,
    triton.Tiles(128, 256, 64, 8, 3),
    triton.Tiles(128, 256, 64, 8, 4),
    triton.Tiles(128, 128, 64, 4, 3),
    triton.Tiles(128, 128, 32, 8, 4),
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
        "models": [],
        "iterations": [],
    }
    tiles = TILES if arguments.tiles else TILES[:1]
    for key, part in (
        *(("models", partial(model_report, name)) for name in arguments.models),
        *(("iterations", partial(iterations, shape, tiles)) for shape in SHAPES),
    ):
        report[key] += part()
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def timed(way: Callable[[], object]) -> float:
    """Median milliseconds on the GPU, its waits for the host included."""
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


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The same work as a CUDA graph, which no host holds up."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def model_report(name: str) -> list[dict[str, Any]]:
    return [{"model": name, **measured(MODELS[name])}]


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
                "milliseconds_without_waits": timed(captured(step)),
                "moment_bytes_a_parameter": moment_bytes / parameters,
                "scratch_bytes": torch.cuda.max_memory_allocated() - before,
            }
        )
        del step
        torch.cuda.empty_cache()
        print(way, milliseconds, flush=True)
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
                updates[rule].step_each([Turn(*arguments, how) for arguments in each])
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


def iterations(shape: tuple[int, int, int], tiles: tuple[triton.Tiles, ...]) -> list[dict[str, Any]]:
    """Milliseconds of Newton-Schulz's iteration by way, the products that it needs over that time, and the
    singular values of the first matrix after it."""
    count, rows, columns = shape
    # Rows from large to small, so that singular values are as those of gradients.
    start = torch.randn(shape, device=CUDA) * torch.logspace(0, -3, rows, device=CUDA)[:, None]
    start = (start / start.norm(dim=(1, 2), keepdim=True)).bfloat16()
    work = ITERATIONS * count * 2 * (2 * rows * rows * columns + rows**3)
    usual = triton.iterate(start.clone())
    ways: dict[str, Callable[[Tensor], Tensor]] = {"torch, batched": library}
    ways |= {str(each): partial(triton.iterate, tiles=each) for each in tiles}
    ways["by its square"] = by_square
    found = []
    for name, way in ways.items():
        milliseconds = timed(lambda way=way: way(start.clone()))  # type: ignore[misc]
        result = way(start.clone())
        values = torch.linalg.svdvals(result[0].float())
        found.append(
            {
                "shape": list(shape),
                "way": name,
                "milliseconds": milliseconds,
                "teraflops_of_whole_products": work / milliseconds / 1e9,
                "same_bits": torch.equal(result, usual),
                "singular_values": [values.min().item(), values.max().item()],
            }
        )
    return found


def library(x: Tensor) -> Tensor:
    """The iteration by batched products, all of each."""
    for first, third, fifth in POLYNOMIALS[ITERATIONS]:
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        x = torch.baddbmm(x, polynomial, x, beta=first)
    return x


def by_square(x: Tensor) -> Tensor:
    """The iteration on the square x x^T, of the shorter side, and one product with x at the end: fewer
    operations where x is much longer than wide, and less precise for small singular values."""
    source = x.mT if x.shape[1] > x.shape[2] else x
    square = x.new_empty((len(x), source.shape[1], source.shape[1]))
    triton.symmetric(source, square)
    polynomial, half, whole = (torch.empty_like(square) for _ in range(3))
    for number, (first, third, fifth) in enumerate(POLYNOMIALS[ITERATIONS]):
        triton.symmetric(square, polynomial, beta=third, alpha=fifth)
        if number == 0:
            whole.copy_(polynomial).diagonal(dim1=1, dim2=2).add_(first)
        else:
            triton.product(polynomial, whole.clone(), whole, beta=first)
        if number + 1 < ITERATIONS:
            triton.product(polynomial, square, half, beta=first)
            triton.product(polynomial, half, square, beta=first)
    out = torch.empty_like(x)
    triton.product(whole, source, out.mT if out.shape[1] > out.shape[2] else out, beta=0.0)
    return out


if __name__ == "__main__":
    sys.exit(main())
