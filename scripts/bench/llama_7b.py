"""The peak memory of Llama 2 7B's shape, beside COAT's: `python -m scripts.bench.llama_7b --out PATH`.

COAT's paper (papers/coat.txt, table 8) gives the peak memory of full training on 1, 2, 4 and 8 GPUs of 80 GB,
which share its state by FSDP and hold whole samples each. Here as many stages of a pipeline share the blocks.
The first stage holds as many microbatches as there are stages, so a GPU's samples in flight take as much as
whole samples of all blocks. Of each number of stages the first and the last are built and run on one NVIDIA
GPU, one after the other, in the order of 1F1B; the fuller counts. Microbatches are doubled until the card is
full. Speed is that of the slower of both, without a network: of a GPU, as in the paper.

`--tiny` runs the same path in seconds on a CPU with a small model, for tests; it measures no memory. Weights
are a tile of random numbers, repeated.
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.lab.results import commit
from node.model import chunk
from node.schedule.schedule import Kind, one_f_one_b
from node.stage.allocator import begin_peak, grow_segments, most_allocated
from node.stage.machine_info import fix_order
from node.stage.out_of_memory import ran_out
from node.stage.stage_model import StageModel
from scripts.bench.largest_model import wait
from scripts.bench.memory_plan import tiled

LLAMA_2_7B = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, sequence=2048
)
TINY = ModelSection(layers=8, hidden=64, heads=2, kv_heads=2, ffn=96, vocab=101, sequence=32)
COAT: tuple[dict[str, Any], ...] = (
    {"gpus": 1, "samples": 1, "way": "BF16", "peak": None, "most_samples": None, "speed": None},
    {"gpus": 1, "samples": 1, "way": "COAT", "peak": 79.3, "most_samples": 1, "speed": 5906},
    {"gpus": 2, "samples": 2, "way": "BF16", "peak": None, "most_samples": 1, "speed": 6130},
    {"gpus": 2, "samples": 2, "way": "COAT", "peak": 52.8, "most_samples": 4, "speed": 11351},
    {"gpus": 4, "samples": 2, "way": "BF16", "peak": 55.1, "most_samples": 2, "speed": 7730},
    {"gpus": 4, "samples": 2, "way": "COAT", "peak": 35.6, "most_samples": 4, "speed": 11257},
    {"gpus": 8, "samples": 2, "way": "BF16", "peak": 41.2, "most_samples": 4, "speed": 8238},
    {"gpus": 8, "samples": 2, "way": "COAT", "peak": 27.0, "most_samples": 8, "speed": 11241},
)
"""Of table 8, Llama 2 7B, 2,048 tokens a sample: GB, and tokens/s of a GPU with the most samples that fit.
None: out of memory."""
WAYS: dict[str, tuple[dict[str, Any], StorageSection]] = {
    "bf16": ({}, StorageSection()),
    "fp8, agoq": (
        {"compute": "fp8", "weights": "bfloat16", "gradients": "fp8", "moments": "fp8"},
        StorageSection(preset="agoq"),
    ),
}


def run_file(model: ModelSection, stages: int, way: str) -> RunConfig:
    training, storage = WAYS[way]
    return RunConfig(
        model=model,
        training=TrainingSection(
            precision="bfloat16",
            microbatch=1,
            global_batch=2 * stages,
            warmup_steps=0,
            cuda_graphs=False,
            **training,
        ),
        storage=storage,
        pipeline=PipelineSection(stages=stages),
    )


def one_step(model: StageModel, stage: int, stages: int, samples: int, sizes: ModelSection) -> None:
    """All passes of a stage for two microbatches a stage, each of so many samples; norms and optimizer."""
    device = model.device
    hidden = torch.randn(samples, sizes.sequence, sizes.hidden, device=device)
    tokens = torch.randint(0, sizes.vocab, (samples, sizes.sequence), device=device)
    labels = tokens if stage == stages - 1 else None
    model.begin_step()
    for action in one_f_one_b(stages, 2 * stages)[stage]:
        if action.kind is Kind.FORWARD:
            model.forward(0, action.microbatch, hidden if stage else tokens, labels)
        else:
            model.backward(0, action.microbatch, None if labels is not None else hidden)
    norms = model.squared_norms()
    model.apply(1e-4, min(1.0, sum(norms.values()) ** -0.5))


def measured(
    sizes: ModelSection, stages: int, stage: int, way: str, device: torch.device
) -> list[dict[str, Any]]:
    """Peak and seconds of a step, of microbatches of one sample, and of twice as many while they fit."""
    found: list[dict[str, Any]] = []
    samples = 1
    model = StageModel(run_file(sizes, stages, way), device)
    try:
        model.build(stage, stages)
        while samples <= (2 if device.type == "cpu" else 64):
            one_step(model, stage, stages, samples, sizes)
            begin_peak(device)
            wait(device)
            began = time.perf_counter()
            one_step(model, stage, stages, samples, sizes)
            wait(device)
            seconds = time.perf_counter() - began
            found.append({"samples": samples, "peak_bytes": most_allocated(device), "step_seconds": seconds})
            samples *= 2
    except Exception as error:  # torch raises several types when memory runs out; others pass
        if not ran_out(error):
            raise
    model.drop()
    return found


def row(sizes: ModelSection, stages: int, way: str, device: torch.device) -> dict[str, Any]:
    by_stage = []
    for stage in sorted({0, stages - 1}):
        by_stage.append(measured(sizes, stages, stage, way, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    # What fits in both.
    fuller = [
        {
            "samples": each[0]["samples"],
            "peak_bytes": max(one["peak_bytes"] for one in each),
            "step_seconds": max(one["step_seconds"] for one in each),
        }
        for each in zip(*by_stage, strict=False)
    ]
    for one in fuller:
        tokens = 2 * stages * one["samples"] * sizes.sequence
        one["tokens_a_second_of_a_gpu"] = tokens / one["step_seconds"] / stages
    return {"gpus": stages, "way": way, "measured": fuller}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else torch.device("cuda", 0)
    if not args.tiny:
        grow_segments(device)
        fix_order(device)
        chunk.initial_weight = tiled
    sizes = TINY if args.tiny else LLAMA_2_7B
    result: dict[str, Any] = {
        "commit": commit(),
        "hardware": "a CPU" if args.tiny else torch.cuda.get_device_name(device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "runs": 1,
        "sequence": sizes.sequence,
        "coat": list(COAT),
        "rows": [],
    }
    for given in COAT:
        way = "bf16" if given["way"] == "BF16" else "fp8, agoq"
        result["rows"].append(row(sizes, given["gpus"], way, device))
        sys.stderr.write(json.dumps(result["rows"][-1]) + "\n")
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
