"""Quantizing inside a layer's matrix product, or beside it: `scripts/bench_quantize_gemm.py --out PATH`.

Needs an NVIDIA GPU of Hopper's kind. First the fused kernel's stored bits against the CPU's reference and
its products against fp64's, in every configuration; `--check` stops there. Then these, in turns, each in a
CUDA graph, at the shapes of known models' layers and 8192 tokens:

    producer        SwiGLU or norm that stores its input as it reads it, then cuBLAS: what a block does
    separate        SwiGLU or norm, cuBLAS, and a kernel of its own that stores
    fused           one kernel for all three, in the fastest of its configurations
    unstored        SwiGLU or norm, then cuBLAS; nothing is stored
    fused_unstored  the fused kernel when it stores nothing
    gemm            cuBLAS alone
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from quantize_gemm.check import PART_TOLERANCE, TOLERANCE, cases, check
from quantize_gemm.kernel import CONFIGS, Config
from quantize_gemm.ways import LAYERS, Inputs, Layer, fused, sample, ways
from triton.runtime.errors import OutOfResources
from wording import one_line

from node.lab.results import commit

TOKENS = 8192
CHECKED = ((333, 640, 400), (129, 256, 272), (1, 128, 16))
"""Rows, width and columns."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantizing inside a layer's matrix product, or beside it.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--runs", type=int, default=25, help="timed turns")
    parser.add_argument("--check", action="store_true", help="only check bits and products")
    arguments = parser.parse_args()
    if arguments.out is None and not arguments.check:
        parser.error("--out is needed, or --check")
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    start = time.monotonic()
    compile_all()
    print(f"compiled, {time.monotonic() - start:.1f} s", flush=True)
    wrong = check_all()
    print(f"checks: {len(wrong)} failed, {time.monotonic() - start:.1f} s", flush=True)
    if arguments.check:
        return 1 if wrong else 0
    rows = [measure(layer, arguments.runs) for layer in LAYERS]
    failed = len(wrong) + sum(not row["agrees"] for row in rows)
    report = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "tokens": TOKENS,
        "runs": arguments.runs,
        "tolerance": {"product": TOLERANCE, "row or column": PART_TOLERANCE},
        "failed_checks": failed,
        "rows": rows,
    }
    report["seconds"] = time.monotonic() - start
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{report['seconds']:.0f} s, {failed} failed checks, report in {arguments.out}")
    return 1 if failed else 0


def compile_all() -> None:
    """All configurations at once: one after the other takes longer than all the rest of this."""
    small = [layer for layer in LAYERS if layer.model == LAYERS[0].model]
    inputs = [sample(16, layer, "cuda") for layer in small]
    # What cannot be compiled says so when it is checked.
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in CONFIGS:
            for one in inputs:
                fused(one, config, only_compile=True)


def check_all() -> list[str]:
    """Print what is wrong, and return it."""
    wrong: list[str] = []
    for what, inputs, finite in cases("cuda", CHECKED):
        for config in CONFIGS:
            try:
                found = check(what, inputs, finite, config)
            except OutOfResources:
                # Another GPU has less shared memory; `tune` records it.
                continue
            except Exception as problem:  # the other configurations are to be tried
                found = [f"{what}, {config}: {one_line(problem)}"]
            wrong += found
            for line in found:
                print("FAILED:", line, flush=True)
    return wrong


def measure(layer: Layer, runs: int) -> dict[str, Any]:
    """All ways at one layer, in turns, the fused kernel tuned before."""
    inputs = sample(TOKENS, layer, "cuda")
    tried = [tune(inputs, config) for config in CONFIGS]
    best = min((row for row in tried if "milliseconds" in row), key=lambda row: row["milliseconds"])
    config = Config(**best["config"])
    works = ways(inputs, config)
    agrees = _agree(works["producer"](), works["fused"]())
    graphs = {name: _graph(work) for name, work in works.items()}
    times = _in_turns({name: graph.replay for name, graph in graphs.items()}, runs)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    kind = str(layer.dtype).removeprefix("torch.")
    print(
        f"{layer.model:10} {layer.name:12} {kind:8}",
        " ".join(f"{name} {value:.3f}" for name, value in medians.items()),
        config,
        flush=True,
    )
    return {
        "model": layer.model,
        "layer": layer.name,
        "dtype": kind,
        "width": layer.width,
        "columns": layer.columns,
        "milliseconds": medians,
        "spread": {name: [min(taken), max(taken)] for name, taken in times.items()},
        "teraflops": {
            name: 2e-9 * TOKENS * layer.width * layer.columns / value for name, value in medians.items()
        },
        "agrees": agrees,
        "config": best["config"],
        "tried": tried,
    }


def _agree(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    """Whether two ways stored the same bits, and their products differ by their roundings alone."""
    distance = (one[0].float() - other[0].float()).norm() / one[0].float().norm()
    same = len(one) == len(other) and all(map(torch.equal, one[1:], other[1:]))
    if not (same and distance < 2 * TOLERANCE):
        print(f"FAILED: stored bits {'equal' if same else 'differ'}, products differ by {distance:.2g}")
        return False
    return True


def tune(inputs: Inputs, config: Config) -> dict[str, Any]:
    """The median of few runs of a configuration; why it failed, if it does."""
    row: dict[str, Any] = {"config": asdict(config)}
    try:
        taken = _in_turns({"fused": lambda: fused(inputs, config)}, 5)["fused"]
    except Exception as problem:  # the others may work
        return row | {"failed": one_line(problem)}
    return row | {"milliseconds": statistics.median(taken)}


def _graph(work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call, which writes into memory of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _in_turns(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """Milliseconds of each of `works`, one run of each a turn, the first two turns left out."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(runs + 2):
        for name, work in works.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            if turn >= 2:
                times[name].append(first.elapsed_time(last))
    return times


if __name__ == "__main__":
    sys.exit(main())
