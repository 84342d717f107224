"""Attention of a long sequence in chunks on an NVIDIA GPU, against the whole at once:
`python -m scripts.bench.chunks --out PATH`.

One sample with the heads of an 8B model: 32 queries, 8 keys and values, 128 wide, bf16. Forward from the
first chunk to the last, backward the other way; gradients of keys and values are added up in float32.

    chunks of N          ours
    whole                what a stage does without chunks, sums in a fixed order
    whole, any order     the same with the backward that torch prefers
    whole, flash         torch's FlashAttention-2, whose backward adds with atomics

`distance` is that of a way's gradients of keys from those of `whole`, relative.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.ops import attention, attention_backward, chunk_backward
from node.stage.machine_info import fix_order
from scripts.report import gpu_report, version, write

CUDA = torch.device("cuda", 0)
HEADS, KV_HEADS, WIDTH = 32, 8, 128
LENGTHS = (16384, 32768, 65536, 131072)
CHUNK = 8192
Passes = tuple[Callable[[], Any], Callable[[Any], Tensor]]
"""Forward, and backward of what it gave, which gives the gradient of keys."""


def drawn(count: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    made = torch.randn(1, length, count, WIDTH, generator=generator, device=CUDA, dtype=torch.bfloat16)
    return made.transpose(1, 2)


def in_chunks(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, size: int) -> Passes:
    cuts = [(first, min(first + size, key.shape[2])) for first in range(0, key.shape[2], size)]

    def forward() -> list[tuple[Tensor, Tensor]]:
        return [attention(query[:, :, a:b], key[:, :, :b], value[:, :, :b]) for a, b in cuts]

    def backward(made: list[tuple[Tensor, Tensor]]) -> Tensor:
        of_key, of_value = (torch.zeros(key.shape, device=CUDA) for _ in range(2))
        for (a, b), (out, sums) in reversed([*zip(cuts, made, strict=True)]):
            parts = grad[:, :, a:b], query[:, :, a:b], key[:, :, :b], value[:, :, :b], out, sums
            chunk_backward(*parts, of_key[:, :, :b], of_value[:, :, :b])
        return of_key

    return forward, backward


def whole(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, fixed: bool) -> Passes:
    def backward(made: tuple[Tensor, Tensor]) -> Tensor:
        return attention_backward(grad, query, key, value, *made, fixed_order=fixed)[1]

    return lambda: attention(query, key, value), backward


def flash(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> Passes:
    leaves = [part.detach().requires_grad_() for part in (query, key, value)]

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def backward(made: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(False)
        try:
            return torch.autograd.grad(made, leaves, grad)[1]
        finally:
            torch.use_deterministic_algorithms(True)

    return forward, backward


def seconds(passes: Passes, runs: int) -> tuple[float, float]:
    """The medians of forward and backward, after one that is not counted."""
    taken: list[tuple[float, float]] = []
    for _ in range(runs + 1):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        made = passes[0]()
        marks[1].record()
        passes[1](made)
        marks[2].record()
        torch.cuda.synchronize()
        taken.append((marks[0].elapsed_time(marks[1]) / 1e3, marks[1].elapsed_time(marks[2]) / 1e3))
        del made
    forward, backward = (statistics.median(times) for times in zip(*taken[1:], strict=True))
    return forward, backward


def measured(length: int, sizes: list[int], runs: int) -> Iterator[dict[str, Any]]:
    parts = [drawn(count, length, seed) for seed, count in enumerate((HEADS, KV_HEADS, KV_HEADS, HEADS))]
    ways = {
        "whole": whole(*parts, True),
        **{f"chunks of {size}": in_chunks(*parts, size) for size in sizes if size < length},
        "whole, any order": whole(*parts, False),
        "whole, flash": flash(*parts),
    }
    operations = 2.0 * HEADS * WIDTH * length**2
    wanted = ways["whole"][1](ways["whole"][0]()).float()
    for name, passes in ways.items():
        distance = float((passes[1](passes[0]()).float() - wanted).norm() / wanted.norm())
        forward, backward = seconds(passes, runs)
        yield {
            "length": length,
            "way": name,
            "forward_milliseconds": round(1e3 * forward, 2),
            "backward_milliseconds": round(1e3 * backward, 2),
            "forward_teraflops": round(operations / forward / 1e12, 1),
            "backward_teraflops": round(2.5 * operations / backward / 1e12, 1),
            "distance": round(distance, 5),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure attention in chunks.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunks", type=int, nargs="+", default=[CHUNK], help="positions of a chunk")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    begun = gpu_report(parser, "attention in chunks")
    fix_order(CUDA)
    report: dict[str, Any] = {
        **begun,
        "triton": version("triton"),
        "runs": arguments.runs,
        "heads": [HEADS, KV_HEADS, WIDTH],
        "rows": [],
    }
    for length in arguments.lengths:
        for row in measured(length, arguments.chunks, arguments.runs):
            report["rows"].append(row)
            print(row, flush=True)
            write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
