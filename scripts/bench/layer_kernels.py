"""Times and bits of the kernels beside a block's products, on an NVIDIA GPU:
`python -m scripts.bench.layer_kernels --out PATH [--beside EARLIER]`.

Norms, activations, their gradients, the residual sum and the addition to a gradient in e4m3, at the shapes of
`scripts.bench.compute`: with nothing stored and with inputs in 4 bits. For each kernel it records the
microseconds in a CUDA graph, the bytes that the kernel must move, the bytes a second, and a digest of its
results. `--beside` prints each kernel's time over that of an earlier report, and whether the digests are
equal: then a change of the kernel kept its bits. This file also runs in a checkout of an earlier commit.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.blockfloat import ops as blockfloat
from kernels.blockfloat.layout import packed_bytes
from kernels.fp8.ops import accumulate_gradient
from kernels.fp8.reference import Draw, Fp8Gradient
from kernels.layers import ops as layers
from node.stage.machine_info import fix_order
from scripts.bench.compute import SHAPES, Shape
from scripts.bench.gpu_timing import graph_seconds
from scripts.report import gpu_report

CUDA = torch.device("cuda")
EPS = 1e-5
HASHED = 1 << 24
"""Bytes of each result that its digest is of: rows do not depend on one another."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    name: str
    work: Callable[[], Any]
    """Gives what it makes; may change what it reads."""
    bytes_moved: int
    """Read and written, each once."""


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


def digest(made: Any) -> str:
    found = hashlib.sha256()
    for part in [made] if isinstance(made, Tensor) else made:
        if isinstance(part, Tensor):
            flat = part.contiguous().view(-1).view(torch.uint8)
            found.update(flat[:HASHED].cpu().numpy().tobytes())
        elif isinstance(part, (list, tuple)):
            found.update(digest(part).encode())
    return found.hexdigest()[:16]


def norms(tokens: int, hidden: int) -> Iterator[Kernel]:
    x, beside = (drawn(tokens, hidden, seed=seed, dtype=torch.float32) for seed in (1, 2))
    weight, grad = 1 + 0.1 * drawn(hidden, seed=3, dtype=torch.float32), drawn(tokens, hidden, seed=4)
    wide, half, four = x.nbytes, grad.nbytes, packed_bytes(x.shape, 4)
    stored = blockfloat.store(x, 4)
    yield Kernel(
        name="norm",
        work=lambda: layers.norm(x, weight, None, EPS, torch.bfloat16),
        bytes_moved=wide + half,
    )
    yield Kernel(
        name="norm, input stored",
        work=lambda: blockfloat.norm_store(x, weight, None, EPS, 4, torch.bfloat16),
        bytes_moved=wide + half + four,
    )
    yield Kernel(
        name="norm of what is stored",
        work=lambda: blockfloat.norm_from_stored(stored, list(x.shape), weight, None, EPS, 4, torch.bfloat16),
        bytes_moved=half + four,
    )
    yield Kernel(
        name="norm's gradient",
        work=lambda: layers.norm_backward(grad, x, beside, weight, None, EPS)[:2],
        bytes_moved=3 * wide + half,
    )
    yield Kernel(
        name="norm's gradient, stored",
        work=lambda: blockfloat.norm_backward(grad, stored, beside, weight, None, EPS, 4)[:2],
        bytes_moved=2 * wide + half + four,
    )
    yield Kernel(name="residual sum", work=lambda: layers.residual(x, grad), bytes_moved=2 * wide + half)


def activations(tokens: int, ffn: int) -> Iterator[Kernel]:
    gate, up, grad = (drawn(tokens, ffn, seed=seed) for seed in (5, 6, 7))
    # Where exponentials and their inverses leave fp32's range, too.
    gate[0] = torch.linspace(-130, 130, ffn, device=CUDA).bfloat16()
    half, four = gate.nbytes, packed_bytes(gate.shape, 4)
    _, first, second = blockfloat.ffn_store(gate, up, 4)
    yield Kernel(name="SwiGLU", work=lambda: layers.activation(gate, up), bytes_moved=3 * half)
    yield Kernel(
        name="SwiGLU, inputs stored",
        work=lambda: blockfloat.ffn_store(gate, up, 4),
        bytes_moved=3 * half + 2 * four,
    )
    yield Kernel(
        name="SwiGLU's gradient",
        work=lambda: layers.activation_backward(grad, gate, up),
        bytes_moved=6 * half,
    )
    again = grad.clone()
    yield Kernel(
        name="SwiGLU's gradient, stored",
        work=lambda: [blockfloat.ffn_backward(again, first, second, 4), again],
        bytes_moved=4 * half + 2 * four,
    )


def sums(outputs: int, inputs: int) -> Iterator[Kernel]:
    addend = drawn(outputs * inputs, seed=8)
    draw = Draw(torch.tensor([3], device=CUDA), 5)
    for name, salt in (("e4m3 gradient += bf16", None), ("the same, stochastically", draw)):
        main = Fp8Gradient.zeros(addend.numel(), CUDA)

        def work(main: Fp8Gradient = main, salt: Draw | None = salt) -> list[Tensor]:
            accumulate_gradient(main, addend, salt)
            return [main.codes, main.exponents]

        yield Kernel(name=name, work=work, bytes_moved=addend.nbytes + 2 * main.nbytes)


def measured(shape: Shape, runs: int) -> Iterator[dict[str, Any]]:
    tokens, model = shape.microbatch * shape.model.sequence, shape.model
    for kernels in (
        norms(tokens, model.hidden),
        activations(tokens, model.ffn),
        sums(model.ffn, model.hidden),
    ):
        for kernel in kernels:
            bits = digest(kernel.work())
            seconds = statistics.median(graph_seconds([kernel.work] * 4, runs))
            yield {
                "kernel": kernel.name,
                "microseconds": round(1e6 * seconds, 2),
                "bytes": kernel.bytes_moved,
                "gigabytes_per_second": round(kernel.bytes_moved / seconds / 1e9),
                "digest": bits,
            }


def compared(shape: dict[str, Any], earlier: dict[str, Any]) -> Iterator[str]:
    before = {
        row["kernel"]: row for one in earlier["shapes"] if one["name"] == shape["name"] for row in one["rows"]
    }
    for row in shape["rows"]:
        if (old := before.get(row["kernel"])) is not None:
            bits = "equal" if old["digest"] == row["digest"] else "OTHER"
            share = row["microseconds"] / old["microseconds"]
            yield f"{shape['name']}: {row['kernel']}: {share:.2f} of the time, bits {bits}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the kernels beside a block's products.")
    parser.add_argument("--out", type=Path, required=True, help="where the report goes, as JSON")
    parser.add_argument("--beside", type=Path, help="an earlier report to compare with")
    parser.add_argument("--runs", type=int, default=25)
    arguments = parser.parse_args()
    begun = gpu_report(parser, "kernels beside products")
    fix_order(CUDA)
    earlier = None if arguments.beside is None else json.loads(arguments.beside.read_text(encoding="utf-8"))
    report: dict[str, Any] = {**begun, "runs": arguments.runs, "shapes": []}
    for shape in SHAPES:
        one: dict[str, Any] = {"name": shape.name, "rows": []}
        report["shapes"].append(one)
        for row in measured(shape, arguments.runs):
            one["rows"].append(row)
            print(f"{shape.name}: {row}", flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if earlier is not None:
            print(*compared(one, earlier), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
