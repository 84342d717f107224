"""What CUDA graphs save a stage, on an NVIDIA GPU: `python -m scripts.bench.captured_passes --out PATH`.

Runs a middle stage's passes over the microbatches of a step, two in flight: kernel by kernel through autograd
and by captured graphs (`training.cuda_graphs`), in turns in one process. First compares the bits of the third
step's results, upstream gradients, norms and weights. Then measures, per microbatch, forward and backward:

    seconds   from the first pass's start until the device is done with the last
    host      how long the calling thread takes to launch the work when nothing waits; it holds the GIL
              meanwhile, which the node's links need too
    memory    peak GPU memory that torch takes for the stage in its second step
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from scripts.report import gpu_report

STAGES = 4
STEP = 8
"""Microbatches a step."""
GPT2_XL = ModelSection(
    family="gpt2", layers=48, hidden=1600, heads=25, kv_heads=25, ffn=6400, vocab=50304, sequence=1024
)
SMALL = ModelSection(
    family="llama", layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50304, sequence=1024
)
LARGE = ModelSection(
    family="llama", layers=24, hidden=2048, heads=16, kv_heads=16, ffn=5504, vocab=32000, sequence=4096
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage and its microbatches."""

    name: str
    model: ModelSection
    microbatch: int
    preset: str = "off"

    def config(self, *, graphs: bool) -> RunConfig:
        few = {"gradients": "fp8", "moments": "fp8"} if self.preset != "off" else {}
        return RunConfig(
            model=self.model,
            training=TrainingSection(
                global_batch=STEP * self.microbatch,
                microbatch=self.microbatch,
                precision="bfloat16",
                cuda_graphs=graphs,
                **few,
            ),
            storage=StorageSection(preset=self.preset),
            pipeline=PipelineSection(stages=STAGES),
        )


CASES = (
    Case(name="GPT-2 XL", model=GPT2_XL, microbatch=1),
    Case(name="GPT-2 XL", model=GPT2_XL, microbatch=2),
    Case(name="GPT-2 XL", model=GPT2_XL, microbatch=4),
    Case(name="GPT-2 XL", model=GPT2_XL, microbatch=1, preset="agoq"),
    Case(name="124 million", model=SMALL, microbatch=1),
    Case(name="124 million", model=SMALL, microbatch=8),
    Case(name="1.3 billion", model=LARGE, microbatch=2),
)


class Stage:
    """A middle stage and its inputs."""

    def __init__(self, case: Case, *, graphs: bool) -> None:
        self._model = StageModel(case.config(graphs=graphs), torch.device("cuda", 0))
        self._model.build(1, STAGES)
        generator = torch.Generator("cuda").manual_seed(1)
        shape = (case.microbatch, case.model.sequence, case.model.hidden)
        self._fed = torch.randn(shape, generator=generator, device="cuda")
        self._gradient = torch.randn(shape, generator=generator, device="cuda") * 1e-3

    def passes(self) -> list[Tensor]:
        """Run all passes of a step, one microbatch ahead; return the tensors for the neighbours."""
        made = [self._model.forward(0, 0, self._fed.clone())]
        for microbatch in range(STEP):
            if microbatch + 1 < STEP:
                made.append(self._model.forward(0, microbatch + 1, self._fed * (1 + microbatch / 8)))
            upstream = self._model.backward(0, microbatch, self._gradient)
            assert upstream is not None
            made.append(upstream)
        return made

    def step(self) -> list[Tensor]:
        """Run a whole step; return the tensors for the neighbours, and norms."""
        self._model.begin_step()
        made = self.passes()
        norms = torch.tensor(list(self._model.squared_norms().values()))
        self._model.apply(1e-3, 0.5)
        return [*made, norms]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self._model.optimizer.parameters

    def timed(self) -> tuple[float, float]:
        """Seconds per microbatch, and the host's share of them."""
        self._model.begin_step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.passes()
        asked = time.perf_counter() - began
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEP, asked / STEP

    @classmethod
    def memory(cls, case: Case, *, graphs: bool) -> int:
        """Peak bytes that torch takes for a stage over a step after the first."""
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        stage = cls(case, graphs=graphs)
        stage.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        stage.step()
        return torch.cuda.max_memory_reserved() - before


def measure(case: Case, runs: int) -> dict[str, Any]:
    """Measure one row of the report."""
    memory = {graphs: Stage.memory(case, graphs=graphs) for graphs in (False, True)}
    stages = {graphs: Stage(case, graphs=graphs) for graphs in (False, True)}
    last = {
        graphs: [*[stage.step() for _ in range(3)][-1], *stage.weights] for graphs, stage in stages.items()
    }
    pairs = zip(last[False], last[True], strict=True)
    different = sum(not torch.equal(one, other) for one, other in pairs)
    last.clear()
    turns: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(runs):
        for graphs, stage in stages.items():
            turns[graphs].append(stage.timed())
    row: dict[str, Any] = {
        "name": case.name,
        "microbatch": case.microbatch,
        "tokens": case.microbatch * case.model.sequence,
        "storage": case.preset,
        "different_tensors": different,
        "runs": runs,
    }
    for graphs, label in ((False, "autograd"), (True, "graphs")):
        seconds, host = (statistics.median(times) for times in zip(*turns[graphs], strict=True))
        row[label] = {"seconds": seconds, "host_seconds": host, "memory_bytes": memory[graphs]}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what CUDA graphs save a stage.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=200.0, help="begin no more cases after this")
    arguments = parser.parse_args()
    begun = gpu_report(parser, "captured passes")
    fix_order(torch.device("cuda", 0))
    report: dict[str, Any] = {
        **begun,
        "microbatches_a_step": STEP,
        "rows": [],
    }
    began = time.monotonic()
    for case in CASES:
        if time.monotonic() - began > arguments.seconds:
            print(f"{case.name}, microbatch {case.microbatch}: left out, no time")
            continue
        row = measure(case, arguments.runs)
        report["rows"].append(row)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        ways = ", ".join(
            f"{label} {row[label]['seconds'] * 1e3:.2f} ms (host {row[label]['host_seconds'] * 1e3:.2f}), "
            f"{row[label]['memory_bytes'] / 2**30:.2f} GiB"
            for label in ("autograd", "graphs")
        )
        print(
            f"{case.name} x {case.microbatch} {case.preset}: {ways}; {row['different_tensors']} differ",
            flush=True,
        )
        gc.collect()
        torch.cuda.empty_cache()
    return 1 if any(row["different_tensors"] for row in report["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
