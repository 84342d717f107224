"""How fast a stage computes, on an NVIDIA GPU: `python -m scripts.bench.compute --out PATH`.

Times a middle stage's forward and backward of a microbatch in bf16. Each way takes turns with
`compiled, fastest` and `products`, in one process:

    plain, agoq            our stage, CUDA graphs, with nothing packed and with `storage.preset = "agoq"`
    plain, any order       attention's gradients in no fixed order (`training.deterministic = false`)
    fp8; fp8, agoq         the same with `training.compute = "fp8"`
    fp8, all products      also with `training.weight_gradients = "fp8"`
    ..., any order         of these, attention's gradients in no fixed order
    compiled, fastest      transformers' layers under torch.compile, with the attention torch prefers
    compiled, fixed order  the same with torch's deterministic algorithms, which a run that replays needs
    compiled, torchao      the first with torchao's FP8 products, recipe `tensorwise`
    products               its matrix products and attention alone, as a CUDA graph, each tensor in place

Our weights are float32 with a bf16 copy a step and float32 gradients, as in a run; transformers' weights and
gradients are bf16. Needs transformers, and torchao for its way.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.attention.ops import attention, attention_backward
from node.config.schema import ModelSection, PipelineSection, RunConfig, StorageSection, TrainingSection
from node.schedule.placement import chunk_units
from node.stage.machine_info import fix_order
from node.stage.stage_model import StageModel
from scripts.report import gpu_report

MICROBATCHES = 8
COMPILED = "compiled, fastest"
BASES = (COMPILED, "products")
"""Ways that the others are compared with."""
Way = Callable[[], None]
"""Computes `MICROBATCHES` microbatches, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The middle stage of three."""

    name: str
    microbatch: int
    model: ModelSection

    @property
    def blocks(self) -> int:
        """Of the middle stage: placement gives it more where the head is large."""
        return len(chunk_units(RunConfig(model=self.model), 3)[1])


def _llama(blocks: int, **sizes: Any) -> ModelSection:
    return ModelSection(family="llama", layers=3 * blocks, **sizes)


SHAPES = (
    Shape(
        name="Llama 1B",
        microbatch=2,
        model=_llama(4, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=32000, sequence=4096),
    ),
    Shape(
        name="Llama 8B",
        microbatch=2,
        model=_llama(4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, sequence=4096),
    ),
    Shape(
        name="124 million",
        microbatch=8,
        model=_llama(3, hidden=768, heads=12, kv_heads=12, ffn=2048, vocab=50304, sequence=1024),
    ),
)


def ours(
    shape: Shape,
    preset: str,
    compute: str = "precision",
    weight_gradients: str = "precision",
    *,
    fixed_order: bool = True,
) -> Way:
    small = {"gradients": "fp8", "moments": "fp8", "weights": "bfloat16"} if preset != "off" else {}
    config = RunConfig(
        model=shape.model,
        training=TrainingSection(
            global_batch=MICROBATCHES * shape.microbatch,
            microbatch=shape.microbatch,
            precision="bfloat16",
            compute=compute,
            weight_gradients=weight_gradients,
            deterministic=fixed_order,
            **small,
        ),
        storage=StorageSection(preset=preset),
        pipeline=PipelineSection(stages=3),
    )
    stage = StageModel(config, torch.device("cuda", 0))
    stage.build(1, 3)
    fed = torch.randn(shape.microbatch, shape.model.sequence, shape.model.hidden, device="cuda")
    gradient = torch.randn_like(fed) * 1e-3

    def passes() -> None:
        for microbatch in range(MICROBATCHES):
            stage.forward(0, microbatch, fed.detach())
            stage.backward(0, microbatch, gradient)

    # Graphs are captured in the second step.
    for _ in range(3):
        stage.begin_step()
        passes()
        stage.squared_norms()
        stage.apply(1e-3, 0.5)
    stage.begin_step()
    return passes


def compiled(shape: Shape, *, fixed_order: bool, torchao: bool = False) -> Way:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    model = shape.model
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        num_hidden_layers=shape.blocks,
        attn_implementation="sdpa",
        max_position_embeddings=model.sequence,
    )
    layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.blocks))
    layers.to("cuda", torch.bfloat16)
    if torchao:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(layers, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    rotary = LlamaRotaryEmbedding(config).to("cuda")
    fed = torch.randn(shape.microbatch, model.sequence, model.hidden, device="cuda", dtype=torch.bfloat16)
    fed.requires_grad_()
    positions = torch.arange(model.sequence, device="cuda")[None]
    gradient = torch.randn_like(fed) * 1e-3

    def run(x: Tensor) -> Tensor:
        tables = rotary(x, positions)
        for layer in layers:
            made = layer(x, position_embeddings=tables, attention_mask=None)
            x = made[0] if isinstance(made, tuple) else made
        return x

    call = torch.compile(run)

    def passes() -> None:
        torch.use_deterministic_algorithms(fixed_order)
        for _ in range(MICROBATCHES):
            call(fed).backward(gradient)
        torch.use_deterministic_algorithms(True)

    for _ in range(2):
        passes()
    return passes


def products(shape: Shape) -> Way:
    """Forward, data gradient and weight gradient of each projection, and attention both ways."""
    model, rows = shape.model, shape.microbatch * shape.model.sequence
    width = model.hidden // model.heads
    keys = width * model.kv_heads
    pairs = [(model.hidden, model.hidden + 2 * keys), (model.hidden, model.hidden)]
    pairs += [(model.hidden, 2 * model.ffn), (model.ffn, model.hidden)]
    places = [
        tuple(
            torch.randn(*size, device="cuda", dtype=torch.bfloat16)
            for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        for inputs, outputs in pairs
    ]
    query, key, value, grad = (
        torch.randn(
            shape.microbatch, model.sequence, heads, width, device="cuda", dtype=torch.bfloat16
        ).transpose(1, 2)
        for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)
    )

    def microbatch() -> None:
        for _ in range(shape.blocks):
            for x, weight, out in places:
                x @ weight.t()
                out @ weight
                out.t() @ x
            result, sums = attention(query, key, value)
            attention_backward(grad, query, key, value, result, sums)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's
    with torch.cuda.stream(stream):
        microbatch()
    torch.cuda.synchronize()
    # As our stage: launching small kernels takes longer than running them.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        microbatch()

    def passes(_: object = (places, query, key, value, grad)) -> None:
        # As a default: a graph does not keep the tensors that it reads.
        for _ in range(MICROBATCHES):
            graph.replay()

    return passes


def timed(way: Way) -> float:
    """Seconds per microbatch."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / MICROBATCHES


WAYS: dict[str, Callable[[Shape], Way]] = {
    "plain": lambda shape: ours(shape, "off"),
    "plain, any order": lambda shape: ours(shape, "off", fixed_order=False),
    "agoq": lambda shape: ours(shape, "agoq"),
    "fp8": lambda shape: ours(shape, "off", "fp8"),
    "fp8, any order": lambda shape: ours(shape, "off", "fp8", fixed_order=False),
    "fp8, agoq": lambda shape: ours(shape, "agoq", "fp8"),
    "fp8, all products": lambda shape: ours(shape, "off", "fp8", "fp8"),
    "fp8, all products, any order": lambda shape: ours(shape, "off", "fp8", "fp8", fixed_order=False),
    COMPILED: lambda shape: compiled(shape, fixed_order=False),
    "compiled, fixed order": lambda shape: compiled(shape, fixed_order=True),
    "compiled, torchao": lambda shape: compiled(shape, fixed_order=False, torchao=True),
    "products": products,
}


def measure(shape: Shape, chosen: Sequence[str], runs: int) -> dict[str, Any]:
    """Times of each way, in turns with those of `BASES`, which stay in memory; the others come and go."""
    kept: dict[str, Way] = {}
    seconds: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}

    def made(name: str) -> Way | None:
        began = time.perf_counter()
        try:
            way = WAYS[name](shape)
        except Exception as error:  # one way that a library refuses costs not the others
            sys.stderr.write(f"{shape.name}, {name}: {type(error).__name__}: {str(error)[:300]}\n")
            return None
        print(f"{shape.name}, {name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
        return way

    for name in BASES:
        if name in chosen and (way := made(name)) is not None:
            kept[name] = way
    for name in [each for each in chosen if each not in BASES] or [""]:
        turns = dict(kept)
        if name and (way := made(name)) is not None:
            turns[name] = way
        found: dict[str, list[float]] = {each: [] for each in turns}
        for _ in range(runs):
            for each, run in turns.items():
                found[each].append(timed(run))
        for each, times in found.items():
            seconds.setdefault(each, []).extend(times)
        if name in found and COMPILED in found:
            ratios[name] = statistics.median(found[name]) / statistics.median(found[COMPILED])
        turns.clear()
        way = run = None
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "name": shape.name,
        "tokens": shape.microbatch * shape.model.sequence,
        "blocks": shape.blocks,
        "runs": runs,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "of_compiled": ratios,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how fast a stage computes.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="SHAPE")
    arguments = parser.parse_args()
    begun = gpu_report(parser, "compute of a stage")
    fix_order(torch.device("cuda", 0))
    report: dict[str, Any] = {
        **begun,
        "rows": [],
    }
    for shape in (each for each in SHAPES if each.name in arguments.shapes):
        report["rows"].append(measure(shape, arguments.ways, arguments.runs))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(report["rows"][-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
