"""What a stage's time is made of, on an NVIDIA GPU: `python -m scripts.bench.compute_parts --out PATH`.

For each shape of `scripts.bench.compute`:

    kernels     what the device runs in a microbatch, by kernel: our stage (plain, `agoq`, FP8) and compiled
                layers
    products    each matrix product of a block, together or apart: in bf16, with the weight gradient in bf16,
                in float32, or added to a float32 matrix by the product itself; in e4m3 with a scale a tensor
                or a row, with cuBLAS' fast accumulation and without
    attention   forward, and each backward that torch has, beside our own
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention.ops import attention, attention_backward
from node.stage.machine_info import fix_order
from scripts.bench.compute import MICROBATCHES, SHAPES, Shape, compiled, ours
from scripts.bench.gpu_timing import graph_seconds
from scripts.report import gpu_report

Work = Callable[[], Any]


def tried(work: Work, runs: int) -> float | str:
    """Median milliseconds of a call in a graph of four, or why it does not run here."""
    try:
        return round(1e3 * statistics.median(graph_seconds([work] * 4, runs)), 4)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        torch.cuda.synchronize()
        return str(error).strip().split("\n")[0][:160]


def kernels(way: Work) -> list[tuple[str, float, float]]:
    """Kernels of a microbatch: name, calls, milliseconds; most expensive first."""
    from torch.profiler import ProfilerActivity, profile

    way()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        way()
        torch.cuda.synchronize()
    found = [
        (
            event.key[:110],
            round(event.count / MICROBATCHES, 2),
            round(event.self_device_time_total / 1e3 / MICROBATCHES, 4),
        )
        for event in recorded.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda row: -row[2])


def coded(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in e4m3, and its scale: of the whole tensor, or of each row along `dim`."""
    wide = x.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = largest / 448
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def products(shape: Shape, runs: int) -> dict[str, dict[str, float | str]]:
    model, rows = shape.model, shape.microbatch * shape.model.sequence
    keys = model.width * model.kv_heads
    places = {
        "query": (model.hidden, model.q_width),
        "key": (model.hidden, keys),
        "query, key, value": (model.hidden, model.q_width + 2 * keys),
        "attention output": (model.q_width, model.hidden),
        "gate": (model.hidden, model.ffn),
        "gate, up": (model.hidden, 2 * model.ffn),
        "down": (model.ffn, model.hidden),
    }
    found: dict[str, dict[str, float | str]] = {}
    for name, (inputs, outputs) in places.items():
        x, weight, grad = (
            torch.randn(*size, device="cuda", dtype=torch.bfloat16)
            for size in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        works = in_bf16(x, weight, grad)
        for way, dim in (("tensor", None), ("row", 1)):
            for fast in (True, False):
                kind = f"e4m3, a scale a {way}{', fast' if fast else ''}"
                made = in_e4m3(x, weight, grad, dim, fast)
                works |= {f"{part}, {kind}": work for part, work in made.items()}
        found[name] = {key: tried(work, runs) for key, work in works.items()}
    return found


def in_bf16(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Work]:
    wide = torch.zeros(weight.shape, device=x.device)
    half = torch.zeros_like(x)
    return {
        "forward": lambda: x @ weight.t(),
        "data": lambda: grad @ weight,
        "data, added": lambda: half.addmm_(grad, weight),
        "weight": lambda: grad.t() @ x,
        "weight, then added": lambda: wide.add_(grad.t() @ x),
        "weight, float32": lambda: torch.mm(grad.t(), x, out_dtype=torch.float32),
        "weight, added by the product": lambda: torch.addmm(
            wide, grad.t(), x, out_dtype=torch.float32, out=wide
        ),
    }


def in_e4m3(x: Tensor, weight: Tensor, grad: Tensor, dim: int | None, fast: bool) -> dict[str, Work]:
    """The products of codes that are there, second operands transposed as `_scaled_mm` needs them."""

    def scaled(a: Tensor, b: Tensor, dtype: torch.dtype = torch.bfloat16) -> Work:
        first, of_first = coded(a, dim)
        second, of_second = coded(b, dim)
        return lambda: torch._scaled_mm(
            first, second.t(), of_first, of_second.t(), out_dtype=dtype, use_fast_accum=fast
        )

    grad_t, x_t = grad.t().contiguous(), x.t().contiguous()
    return {
        "forward": scaled(x, weight),
        "data": scaled(grad, weight.t().contiguous()),
        "weight": scaled(grad_t, x_t),
        "weight, float32": scaled(grad_t, x_t, torch.float32),
    }


def attentions(shape: Shape, runs: int) -> dict[str, float | str]:
    model, batch = shape.model, shape.microbatch
    query, key, value, grad = (
        torch.randn(batch, model.sequence, heads, model.width, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for heads in (model.heads, model.kv_heads, model.kv_heads, model.heads)
    )
    out, sums = attention(query, key, value)
    found = {
        "forward": tried(lambda: attention(query, key, value), runs),
        "our backward": tried(lambda: attention_backward(grad, query, key, value, out, sums), runs),
    }
    state = torch.zeros(2, dtype=torch.uint64, device="cuda")
    found["cuDNN's backward, no order"] = tried(
        lambda: attention_backward(grad, query, key, value, out, sums, fixed_order=False), runs
    )
    made = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)
    found["FlashAttention-2, forward"] = tried(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True), runs
    )
    for fixed in (True, False):
        torch.use_deterministic_algorithms(fixed)
        found[f"FlashAttention-2's backward, {'fixed' if fixed else 'no'} order"] = tried(
            lambda: torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, made[0], made[1], None, None,
                model.sequence, model.sequence, 0.0, True, state, state,
            ),
            runs,
        )  # fmt: skip
    torch.use_deterministic_algorithms(True)
    return found


PARTS: dict[str, Callable[[Shape, int], Any]] = {
    "products": products,
    "attention": attentions,
    "kernels, off": lambda shape, runs: kernels(ours(shape, "off")),
    "kernels, agoq": lambda shape, runs: kernels(ours(shape, "agoq")),
    "kernels, fp8": lambda shape, runs: kernels(ours(shape, "off", "fp8")),
    "kernels, compiled": lambda shape, runs: kernels(compiled(shape, fixed_order=False)),
}


def measured(report: dict[str, Any], name: str, work: Work) -> None:
    """Put what `work` finds, or its failure, into the report."""
    began = time.perf_counter()
    try:
        report[name] = work()
    except Exception:  # the other parts are still measured
        report[name] = {"failed": traceback.format_exc()[-1500:]}
    print(f"{report['name']}: {name} in {time.perf_counter() - began:.0f} s", flush=True)
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a stage's time is made of.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    arguments = parser.parse_args()
    begun = gpu_report(parser, "parts of a stage's compute")
    fix_order(torch.device("cuda", 0))
    report: dict[str, Any] = {
        **begun,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # torch's
        "shapes": [],
    }
    for shape in SHAPES:
        one: dict[str, Any] = {"name": shape.name}
        report["shapes"].append(one)
        for name in arguments.parts:
            measured(one, name, partial(PARTS[name], shape, arguments.runs))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
