"""A stage of Qwen3-30B-A3B's shape with frozen experts, on one GPU: `python -m scripts.bench.mixture_stage`.

Random weights. Reports the seconds of a microbatch forward and backward, and the most memory that tensors
took, for each of `--ways`:

    all           ours, with adapters of rank 8 on all projections
    attention     ours, with adapters on those of attention
    peft          the same layers in transformers, in bfloat16 and by its fastest product of experts, with
                  PEFT's adapters of rank 8 on the projections of attention and experts
    transformers  the same without adapters
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import (
    LoraSection,
    PipelineSection,
    RunConfig,
    StorageSection,
    TrainingSection,
)
from node.lab.results import commit
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from scripts.experiments.capped_run import QWEN3_30B_A3B
from scripts.report import RESULTS, version, write

OUT = RESULTS / "mixture_stage.json"
WARM, ROUNDS = 3, 5
"""The second step of a node captures graphs."""
ATTENTION = ("query", "key", "value", "attention_output")
WAYS = ("all", "attention", "peft", "transformers")


Pass = tuple[Callable[[], Any], Callable[[], Any]]
"""Forward and backward of one microbatch."""


def inputs(samples: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the gradient of what is made of them."""
    generator = torch.Generator(device).manual_seed(1)
    shape = samples, QWEN3_30B_A3B.sequence, QWEN3_30B_A3B.hidden
    x, above = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
    return x, above / QWEN3_30B_A3B.sequence


def of_node(
    blocks: int, base: str, preset: str, targets: tuple[str, ...], samples: int, device: torch.device
) -> Pass:
    """A stage as a node has it, with neither embedding nor head."""
    config = RunConfig(
        model=replace(QWEN3_30B_A3B, layers=4 * blocks),
        training=TrainingSection(
            global_batch=samples, microbatch=samples, precision="bfloat16", warmup_steps=0
        ),
        storage=StorageSection(preset=preset),
        lora=LoraSection(rank=8, base=base, targets=targets),
        pipeline=PipelineSection(stages=4, split=(blocks,) * 4, window=0),
    )
    stage = StageModel(config, device)
    stage.build(1, 4)
    x, above = inputs(samples, device)

    def forward() -> None:
        stage.begin_step()
        stage.forward(0, 0, x)

    return forward, lambda: stage.backward(0, 0, above)


def measured(work: Pass, samples: int, device: torch.device) -> dict[str, Any]:
    forward, backward = work
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    seconds: list[tuple[float, float]] = []
    for _ in range(WARM + ROUNDS):
        torch.cuda.synchronize(device)
        first = time.perf_counter()
        forward()
        torch.cuda.synchronize(device)
        second = time.perf_counter()
        backward()
        torch.cuda.synchronize(device)
        seconds.append((second - first, time.perf_counter() - second))
    ahead, back = (statistics.median(kind) for kind in zip(*seconds[WARM:], strict=True))
    tokens = samples * QWEN3_30B_A3B.sequence
    return {
        "tokens": tokens,
        "held_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated(device),
        "forward_seconds": ahead,
        "backward_seconds": back,
        "tokens_per_second": tokens / (ahead + back),
    }


def of_transformers(blocks: int, adapted: bool, samples: int, device: torch.device) -> Pass:
    """The same blocks there, and the norm behind the last one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    model = QWEN3_30B_A3B
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=model.hidden,
        num_hidden_layers=blocks,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_width,
        moe_intermediate_size=model.ffn,
        num_experts=model.experts,
        num_experts_per_tok=model.experts_per_token,
        norm_topk_prob=True,
        max_position_embeddings=model.sequence,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    config._experts_implementation = "grouped_mm"
    with device:
        theirs: torch.nn.Module = Qwen3MoeModel(config).bfloat16().requires_grad_(False)
    if adapted:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        theirs = get_peft_model(theirs, adapters)

    x, above = inputs(samples, device)
    x, above = x.bfloat16().requires_grad_(), above.bfloat16()
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.append(theirs(inputs_embeds=x, use_cache=False).last_hidden_state)

    return forward, lambda: torch.autograd.backward(made.pop(), above)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--base", default="4")
    parser.add_argument("--storage", default="agoq")
    parser.add_argument("--samples", nargs="+", type=int, default=[1], help="of a microbatch")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    fix_order(device)
    rows = []
    for way in args.ways:
        for samples in args.samples:
            if way in ("all", "attention"):
                targets = ATTENTION if way == "attention" else ()
                work = of_node(args.blocks, args.base, args.storage, targets, samples, device)
            else:
                work = of_transformers(args.blocks, way == "peft", samples, device)
            rows.append({"way": way, "blocks": args.blocks} | measured(work, samples, device))
            print(json.dumps(rows[-1]), flush=True)
            del work
            gc.collect()
            torch.cuda.empty_cache()
    write(
        args.out,
        {
            "commit": commit(),
            "hardware": torch.cuda.get_device_name(device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "runs": ROUNDS,
            "base": args.base,
            "storage": args.storage,
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
