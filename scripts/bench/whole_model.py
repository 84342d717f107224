"""A whole model's steps on one NVIDIA GPU: `python -m scripts.bench.whole_model --out PATH`.

Each of our ways takes turns with the other in one process, on the same shape and tokens, with AdamW on
float32 weights:

    ours      the one stage of a run with `stages = 1`: passes as CUDA graphs, norms, clipping, AdamW
    compiled  transformers' model in bf16 autocast, each layer under torch.compile, with the attention that
              torch prefers, clipping and torch's fused AdamW

Also: what of our step is neither forward nor backward, and how long building the stage and its first steps
take with nothing compiled before. Needs transformers.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from scripts.report import gpu_report

MICROBATCHES = 8
COMPILED = "compiled"
LR, CLIP = 1e-4, 1.0
Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Shape:
    name: str
    microbatch: int
    model: ModelSection

    @property
    def tokens(self) -> int:
        """Of a step."""
        return MICROBATCHES * self.microbatch * self.model.sequence

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and labels of each microbatch."""
        size = (MICROBATCHES, self.microbatch, self.model.sequence + 1)
        generator = torch.Generator("cuda").manual_seed(1)
        ids = torch.randint(0, self.model.vocab, size, generator=generator, device="cuda")
        return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


SHAPES = (
    Shape(
        name="124 million",
        microbatch=8,
        model=ModelSection(
            layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50304, sequence=1024
        ),
    ),
    Shape(
        name="Llama 1B",
        microbatch=2,
        model=ModelSection(
            layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000, sequence=4096
        ),
    ),
)


class Ours:
    def __init__(self, shape: Shape, compute: str) -> None:
        began = time.perf_counter()
        config = RunConfig(
            model=shape.model,
            training=TrainingSection(
                global_batch=MICROBATCHES * shape.microbatch,
                microbatch=shape.microbatch,
                precision="bfloat16",
                compute=compute,
            ),
            pipeline=PipelineSection(stages=1),
        )
        self._stage = StageModel(config, torch.device("cuda", 0))
        self._stage.build(0, 1)
        torch.cuda.synchronize()
        self.first = {"build": time.perf_counter() - began}
        self._batches = shape.batches()
        self.beside: list[float] = []
        """Seconds of each step that are neither forward nor backward."""
        # The second step captures graphs.
        for name in ("first step", "second step"):
            began = time.perf_counter()
            self.step()
            torch.cuda.synchronize()
            self.first[name] = time.perf_counter() - began
        self.beside.clear()

    def step(self) -> None:
        stage = self._stage
        torch.cuda.synchronize()
        began = time.perf_counter()
        stage.begin_step()
        torch.cuda.synchronize()
        beside = time.perf_counter() - began
        for number, (inputs, labels) in enumerate(self._batches):
            stage.forward(0, number, inputs, labels)
            stage.backward(0, number, None)
        stage.finish_step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        squared = sum(stage.squared_norms().values())
        stage.apply(LR, min(1.0, CLIP / (squared**0.5 + 1e-6)))
        torch.cuda.synchronize()
        self.beside.append(beside + time.perf_counter() - began)


def compiled(shape: Shape) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = shape.model
    torch.use_deterministic_algorithms(False)
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        num_hidden_layers=model.layers,
        vocab_size=model.vocab,
        attn_implementation="sdpa",
        max_position_embeddings=model.sequence,
        use_cache=False,
    )
    whole = LlamaForCausalLM(config).to("cuda")
    for layer in whole.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(
        whole.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    batches = shape.batches()

    def step() -> None:
        torch.use_deterministic_algorithms(False)
        for inputs, labels in batches:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = whole(input_ids=inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.use_deterministic_algorithms(True)

    for _ in range(2):
        step()
    return step


def timed(step: Step) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(shape: Shape, chosen: Sequence[str], runs: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    beside: dict[str, float] = {}
    start: dict[str, dict[str, float]] = {}
    ours = [name for name in chosen if name != COMPILED]
    loop = compiled(shape) if COMPILED in chosen else None
    # One of ours at a time: all of them need more than a card of 80 GB.
    for name in ours or [COMPILED]:
        one = Ours(shape, {"ours": "precision", "ours, fp8": "fp8"}[name]) if ours else None
        for _ in range(runs):
            if one is not None:
                seconds[name].append(timed(one.step))
            if loop is not None:
                seconds[COMPILED].append(timed(loop))
        if one is not None:
            beside[name], start[name] = statistics.median(one.beside), one.first
        del one
        gc.collect()
        torch.cuda.empty_cache()
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "name": shape.name,
        "tokens": shape.tokens,
        "runs": runs,
        "seconds": median,
        "tokens_per_second": {name: shape.tokens / found for name, found in median.items()},
        "beside_share": {name: found / median[name] for name, found in beside.items()},
        "start_seconds": start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a whole model's steps on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=5)
    names = ["ours", "ours, fp8", COMPILED]
    parser.add_argument("--ways", nargs="+", choices=names, default=names, metavar="WAY")
    arguments = parser.parse_args()
    begun = gpu_report(parser, "steps of a whole model")
    # Triton's cache as on a machine that has never trained.
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-cache-")
    fix_order(torch.device("cuda", 0))
    report: dict[str, Any] = {
        **begun,
        "rows": [],
    }
    for shape in SHAPES:
        report["rows"].append(measure(shape, arguments.ways, arguments.runs))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report["rows"][-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
