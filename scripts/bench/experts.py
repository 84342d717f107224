"""A routed feed-forward of Qwen3-30B-A3B's shape on an NVIDIA GPU, against transformers:
`python -m scripts.bench.experts --out PATH`.

128 experts, the top 8 of them, hidden 2048, inner 768. Each way routes random logits, multiplies, and sums
the results; backward gives the gradients of tokens and logits, and with `trained` those of the weights:

    bf16, 4 bits           ours, weights as they are or packed
    transformers, ...      `Qwen3MoeExperts` with its fastest way, `grouped_mm`, and its plain loop

Also the rate of each product alone. `--tiles` times other tiles of the products instead; many processes
compile them first. Needs transformers.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.common.matrices import side_by_side
from kernels.experts import ops, triton
from kernels.experts.ops import Order, PackedExperts, Weights
from kernels.experts.triton import Tile
from kernels.layers import ops as layers
from node.stage.machine_info import fix_order
from scripts.report import gpu_report, version, write

CUDA = torch.device("cuda", 0)
EXPERTS, CHOICES, HIDDEN, INNER = 128, 8, 2048, 768
TOKENS = (4096, 8192, 16384)
BITS = 4
CALLS = 5
"""One after the other in a sample."""
COMPILERS = 12
OTHER_TILES = {
    "half": [
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 256, 64, 8, 3),
        Tile(64, 128, 64, 4, 4),
    ],
    "packed": [
        Tile(128, 128, 128, 8, 2),
        Tile(128, 64, 128, 4, 3),
        Tile(128, 64, 128, 8, 3),
        Tile(64, 128, 128, 4, 3),
        Tile(128, 256, 128, 8, 2),
        Tile(128, 128, 128, 8, 3),
    ],
    "packed_back": [
        Tile(128, 128, 64, 8, 2),
        Tile(128, 128, 128, 8, 2),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 128, 32, 8, 4),
        Tile(128, 128, 64, 8, 3),
        Tile(64, 128, 64, 4, 3),
    ],
    "weights": [
        Tile(128, 128, 32, 8, 4),
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 256, 32, 8, 3),
        Tile(128, 256, 64, 8, 3),
    ],
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA, dtype=dtype)


def seconds(work: Callable[[], Any], runs: int) -> float:
    """The median of a call's, of samples of `CALLS` calls without a wait between them."""
    work()
    taken = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / CALLS)
    return statistics.median(taken)


class Case:
    """The tensors of a microbatch, and the weights."""

    def __init__(self, tokens: int) -> None:
        self.x = drawn(tokens, HIDDEN, seed=1).requires_grad_()
        self.logits = drawn(tokens, EXPERTS, seed=2, dtype=torch.float32).requires_grad_()
        self.grad = drawn(tokens, HIDDEN, seed=3)
        self.both = drawn(EXPERTS, 2 * INNER, HIDDEN, seed=4).mul_(HIDDEN**-0.5)
        self.down = drawn(EXPERTS, HIDDEN, INNER, seed=5).mul_(INNER**-0.5)

    def order(self) -> Order:
        return ops.group(ops.route(self.logits.detach(), CHOICES, True)[1], EXPERTS)


class Gated(torch.autograd.Function):
    """SwiGLU of a product's two halves, as stages compute it."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=1)
        return layers.activation(gate, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, dim=1)
        _, parts = layers.activation_backward(grads[0].contiguous(), gate, up)
        return side_by_side(parts)


def ours(case: Case, both: Weights, down: Weights) -> Tensor:
    weights, chosen = ops.route(case.logits, CHOICES, True)
    order = ops.group(chosen, EXPERTS)
    inner: Tensor = Gated.apply(ops.grouped_matmul(case.x, both, order, gathers=True))  # type: ignore[no-untyped-call]
    return ops.combine(ops.grouped_matmul(inner, down, order), weights, order)


def of_transformers(case: Case, implementation: str, trained: bool) -> Callable[[], Tensor]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=EXPERTS, num_experts_per_tok=CHOICES, hidden_size=HIDDEN, moe_intermediate_size=INNER
    )
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config)
    module.gate_up_proj = nn.Parameter(case.both, requires_grad=trained)
    module.down_proj = nn.Parameter(case.down, requires_grad=trained)

    def work() -> Tensor:
        # As `Qwen3MoeTopKRouter` does.
        values, chosen = torch.topk(case.logits.softmax(-1, dtype=torch.float), CHOICES, dim=-1)
        values = (values / values.sum(dim=-1, keepdim=True)).to(case.x.dtype)
        made: Tensor = module(case.x, chosen, values)
        return made

    return work


def ways(case: Case, trained: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    both, down = (part.clone().requires_grad_(trained) for part in (case.both, case.down))
    yield "bf16", lambda: ours(case, both, down)
    if not trained:
        packed = [PackedExperts.of(part, BITS) for part in (case.both, case.down)]
        yield f"{BITS} bits", lambda: ours(case, packed[0], packed[1])
    yield "transformers, grouped_mm", of_transformers(case, "grouped_mm", trained)
    if not trained:
        yield "transformers, eager", of_transformers(case, "eager", trained)


def backward(case: Case, work: Callable[[], Tensor]) -> None:
    work().backward(case.grad)
    case.x.grad = case.logits.grad = None


def measured(tokens: int, runs: int) -> Iterator[dict[str, Any]]:
    case = Case(tokens)
    for trained in (False, True):
        for name, work in ways(case, trained):
            with torch.no_grad():
                forward = None if trained else seconds(work, runs)
            both_ways = seconds(lambda work=work: backward(case, work), runs)
            row = {"tokens": tokens, "way": name, "trained": trained}
            if forward is not None:
                row["forward_milliseconds"] = round(1e3 * forward, 3)
            yield {**row, "both_milliseconds": round(1e3 * both_ways, 3)}
            torch.cuda.empty_cache()


def products(tokens: int) -> Iterator[tuple[str, str, float, Callable[[], Tensor]]]:
    """Each product: its name, the kind of tile, operations, and the work."""
    case = Case(tokens)
    order, x = case.order(), case.x.detach()
    grad, inner = drawn(tokens * CHOICES, 2 * INNER, seed=6), drawn(tokens * CHOICES, INNER, seed=7)
    packed = PackedExperts.of(case.both, BITS)
    operations = 2.0 * tokens * CHOICES * 2 * INNER * HIDDEN
    yield "gate and up", "half", operations, lambda: ops.matmul(x, case.both, order, None, gathers=True)
    yield "down", "half", operations / 2, lambda: ops.matmul(inner, case.down, order, None)
    yield "input's gradient", "half", operations, lambda: ops.input_gradient(grad, case.both, order)
    yield (
        "weights' gradient",
        "weights",
        operations,
        lambda: ops.weight_gradient(grad, x, order, torch.bfloat16, gathers=True),
    )
    yield (
        f"gate and up, {BITS} bits",
        "packed",
        operations,
        lambda: ops.matmul(x, packed, order, None, gathers=True),
    )
    yield (
        f"input's gradient, {BITS} bits",
        "packed_back",
        operations,
        lambda: ops.input_gradient(grad, packed, order),
    )


def rates(tokens: int, runs: int) -> Iterator[dict[str, Any]]:
    for name, _, operations, work in products(tokens):
        took = seconds(work, runs)
        yield {
            "tokens": tokens,
            "product": name,
            "milliseconds": round(1e3 * took, 3),
            "teraflops": round(operations / took / 1e12, 1),
        }


def candidates() -> Iterator[tuple[str, Tile]]:
    room = triton.room(CUDA)
    for field in fields(triton.TILES[room]):
        if field.name in OTHER_TILES:
            for tile in (getattr(triton.TILES[room], field.name), *OTHER_TILES[field.name]):
                yield field.name, tile


def tried(tokens: int, runs: int, chosen: Callable[[int], bool]) -> Iterator[dict[str, Any]]:
    """Each product with each candidate of its kind; a tile that does not fit is named."""
    room = triton.room(CUDA)
    usual, works = triton.TILES[room], [*products(tokens)]
    for number, (kind, tile) in enumerate(candidates()):
        if not chosen(number):
            continue
        triton.TILES[room] = replace(usual, **{kind: tile})
        for name, needs, operations, work in works:
            if needs != kind:
                continue
            row = {"tokens": tokens, "product": name, "tile": str(tile)}
            try:
                took = seconds(work, runs)
            except triton.triton.runtime.errors.OutOfResources as error:
                yield {**row, "refused": str(error)}
                continue
            yield {
                **row,
                "milliseconds": round(1e3 * took, 3),
                "teraflops": round(operations / took / 1e12, 1),
            }
        triton.TILES[room] = usual


def compile_all() -> None:
    """In several processes at once, which leave what they compile in Triton's cache."""
    words = [sys.executable, "-m", "scripts.bench.experts", "--tiles", "--out", "/dev/null", "--compile"]
    running = [
        subprocess.Popen([*words, str(number)], stdout=subprocess.DEVNULL) for number in range(COMPILERS)
    ]
    for process in running:
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a routed feed-forward.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--tiles", action="store_true", help="time other tiles of the products instead")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    begun = gpu_report(parser, "routed feed-forward")
    fix_order(CUDA)
    if arguments.compile is not None:
        for _ in tried(16, 1, lambda number: number % COMPILERS == arguments.compile):
            pass
        return 0
    report: dict[str, Any] = {
        **begun,
        "transformers": version("transformers"),
        "triton": version("triton"),
        "runs": arguments.runs,
        "shape": {"experts": EXPERTS, "choices": CHOICES, "hidden": HIDDEN, "inner": INNER},
    }
    if arguments.tiles:
        compile_all()
    for tokens in arguments.tokens:
        if arguments.tiles:
            parts = {"tiles": tried(tokens, arguments.runs, lambda number: True)}
        else:
            parts = {"products": rates(tokens, arguments.runs), "ways": measured(tokens, arguments.runs)}
        for part, rows in parts.items():
            for row in rows:
                report.setdefault(part, []).append(row)
                print(row, flush=True)
                write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
