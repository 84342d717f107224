"""A stage of an 8B shape with samples of 131,072 tokens on a card of 24 GB: does it fit, and how fast is it.

    python -m scripts.bench.long_samples [--blocks 8] [--length 131072] [--slices 64] [--cap 24]

On a GPU. The stage holds a quarter of Llama 3's 8B shape, frozen in few bits, with adapters. One sample goes
forward and backward without a network, cut into slices under a cap of memory; then whole, on all of the card,
if that fits. Before that, adapters' gradients at `--short` tokens are compared with those of a whole sample.
"""

import argparse
import gc
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.lab.results import commit
from node.schedule.placement import slice_ranges
from node.stage.stage_model import StageModel
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_memory
from scripts.report import RESULTS, version, write

STAGE, STAGES = 1, 4
MODEL = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, rope_theta=500000.0
)
STORAGE = StorageSection(
    norm_input="4", ffn_input="recompute", attention="recompute", attention_output="recompute"
)


def config(blocks: int, length: int, slices: int, storage: StorageSection) -> RunConfig:
    """Four stages of equal size, of which the second is measured: it has neither embedding nor head."""
    return RunConfig(
        model=replace(MODEL, layers=4 * blocks, sequence=length),
        training=TrainingSection(global_batch=1, microbatch=1, precision="bfloat16", warmup_steps=0),
        storage=storage,
        lora=LoraSection(rank=16, base="4"),
        pipeline=PipelineSection(stages=STAGES, split=(blocks,) * STAGES, window=0, sequence_chunks=slices),
    )


class Stage:
    """The measured stage, and one sample's hidden states."""

    def __init__(self, own: RunConfig) -> None:
        self.device, self.slices = torch.device("cuda"), slice_ranges(own)
        self.model = StageModel(own, self.device)
        self.model.build(STAGE, STAGES)
        shape = 1, own.model.sequence, own.model.hidden
        generator = torch.Generator().manual_seed(0)
        # In main memory: a link brings one slice at a time.
        self.fed = torch.randn(shape, generator=generator).bfloat16()
        self.above = torch.randn(shape, generator=generator).mul_(1e-3).bfloat16()

    def step(self) -> float:
        """Forward and backward of the sample; seconds."""
        self.model.begin_step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number, own in enumerate(self.slices):
            fed = self.fed[:, own.start : own.stop].to(self.device).float()
            self.model.forward(0, 0, fed, number=number)
        for number, own in reversed(list(enumerate(self.slices))):
            above = self.above[:, own.start : own.stop].to(self.device).float()
            self.model.backward(0, 0, above, number)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def gradients(self) -> dict[str, torch.Tensor]:
        taken = self.model.take_gradients(self.model.optimizer.units)
        return {
            f"{unit} {name}": one.float().cpu() for unit, own in taken.items() for name, one in own.items()
        }


def freed() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measured(own: RunConfig, cap_gb: float, steps: int) -> dict[str, Any]:
    """A sample's seconds and memory, or what it lacked."""
    freed()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gb * 1e9 / total) if cap_gb else 1.0)
    found: dict[str, Any] = {
        "slices": own.pipeline.sequence_chunks,
        "cap_gb": cap_gb,
        "estimated_bytes": stage_memory(own, STAGES, Devices(on_cpu=False))[STAGE].total,
    }
    try:
        stage = Stage(own)
        found["seconds"] = [round(stage.step(), 3) for _ in range(steps)]
        found["tokens_a_second"] = round(own.model.sequence / found["seconds"][-1], 1)
        found["fits"] = True
    except torch.OutOfMemoryError as error:
        found |= {"fits": False, "lacked": str(error).split(". ")[0]}
    found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def compared(blocks: int, length: int, slices: int) -> dict[str, Any]:
    """The error of adapters' gradients against those of a whole sample, relative to each one's norm."""
    gradients = []
    for count in (1, slices):
        freed()
        stage = Stage(config(blocks, length, count, StorageSection()))
        stage.step()
        gradients.append(stage.gradients())
        del stage
    whole, sliced = gradients
    errors = {
        name: float((sliced[name] - one).norm() / one.norm()) for name, one in whole.items() if one.any()
    }
    cosines = [
        float(torch.cosine_similarity(sliced[name].flatten(), whole[name].flatten(), dim=0))
        for name in errors
    ]
    return {
        "blocks": blocks,
        "length": length,
        "slices": slices,
        "largest_error": max(errors.values()),
        "mean_error": sum(errors.values()) / len(errors),
        "least_cosine": min(cosines),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure long samples in slices on a small card.")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the stage")
    parser.add_argument("--length", type=int, default=131072, help="tokens of a sample")
    parser.add_argument("--slices", type=int, default=64)
    parser.add_argument("--cap", type=float, default=24.0, help="GB of the small card")
    parser.add_argument("--short", type=int, default=16384, help="tokens where gradients are compared")
    parser.add_argument("--steps", type=int, default=2, help="samples; the last one counts")
    parser.add_argument("--out", type=Path, default=RESULTS / "long_samples.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "model": asdict(MODEL),
        "blocks": arguments.blocks,
        "length": arguments.length,
        "storage": asdict(STORAGE),
        "runs": [],
    }
    report["gradients"] = compared(2, arguments.short, 8)
    print(report["gradients"], flush=True)
    write(arguments.out, report)
    for slices, cap in ((arguments.slices, arguments.cap), (1, 0.0)):
        own = config(arguments.blocks, arguments.length, slices, STORAGE)
        report["runs"].append(measured(own, cap, arguments.steps if cap else 1))
        print(report["runs"][-1], flush=True)
        write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
