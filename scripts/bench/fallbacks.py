"""What each family of kernels saves: its work on a GPU with Triton's kernels, and in plain torch.

    python -m scripts.bench.fallbacks [--parts tah,storage] [--out PATH]

A node computes a part in plain torch if its device fails the self-test in that part, or if THINWIRE_PLAIN
names it. Each row is the median of a few calls; a call ends before the next one begins.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention import ops as attention
from kernels.attention.reach import EVERYTHING
from kernels.blockfloat import ops as storage
from kernels.blockfloat.layout import packed_bytes
from kernels.common import dispatch
from kernels.experts import ops as experts
from kernels.fp8 import ops as fp8
from kernels.fp8 import products
from kernels.fp8.reference import AdamWStep, Fp8Gradient, Moment
from kernels.layers import ops as layers
from kernels.orthogonal import ops as orthogonal
from node.config.schema import ModelSection
from node.model.chunk import build_chunk, compute_precision
from node.model.storage import PRESETS
from node.model.units import block_name
from node.stage.machine_info import fix_order
from scripts.report import RESULTS, gpu_report, version, write
from wire.codecs.formats import codec_format
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.spec import TensorSpec

OUT = RESULTS / "fallbacks.json"
TOKENS, HIDDEN, INNER, VOCABULARY = 8192, 2048, 8192, 32_000
STAGE_SAMPLES = 8
"""Enough that the GPU, and not the host that launches, sets the pace."""
HALF = torch.bfloat16
DEVICE = torch.device("cuda", 0)
RUNS, LONG_SECONDS = 7, 2.0
"""Calls that are timed; of one that takes longer than that, only one."""

Work = Callable[[], Any]


def drawn(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def codec_works(name: str) -> Iterator[tuple[str, Work]]:
    which, x = codec(name), drawn(8, TOKENS // 8, HIDDEN)
    spec = TensorSpec(x.dtype, tuple(x.shape))
    # Without the checksum, which is made on the host.
    packed = which.pack(x)
    exponent = int(packed[EXPONENT].view(torch.int32).item())
    header = replace(which._header(spec), exponent=exponent)
    yield f"{name}: pack", lambda: which.pack(x)
    yield f"{name}: unpack", lambda: which.unpack(packed, spec, header)


def storage_works() -> Iterator[tuple[str, Work]]:
    x = drawn(TOKENS, HIDDEN)
    packed = storage.store(x, 4)
    yield "4 bits: store", lambda: storage.store(x, 4)
    yield "4 bits: restore", lambda: storage.restore(packed, x.shape, 4, HALF)


def layers_works() -> Iterator[tuple[str, Work]]:
    x, weight, grad = drawn(TOKENS, HIDDEN, dtype=torch.float32), drawn(HIDDEN).float(), drawn(TOKENS, HIDDEN)
    gate, up, above = (drawn(TOKENS, INNER) for _ in range(3))
    logits, labels = drawn(2048, VOCABULARY), torch.zeros(2048, dtype=torch.int64, device=DEVICE)
    heads, table = drawn(4, 32, TOKENS // 4, 64), drawn(TOKENS // 4, 64, dtype=torch.float32)
    yield "norm: forward", lambda: layers.norm(x, weight, None, 1e-5, HALF)
    yield "norm: backward", lambda: layers.norm_backward(grad, x, x, weight, None, 1e-5)
    yield "activation: forward", lambda: layers.activation(gate, up)
    yield "activation: backward", lambda: layers.activation_backward(above, gate, up)
    yield "loss and its gradient", lambda: layers.cross_entropy_(logits, labels, -100, 1.0)
    yield "rotary embedding", lambda: layers.rotate(heads, table, table)


def attention_works() -> Iterator[tuple[str, Work]]:
    query, key, value = (drawn(1, count, 4096, 128) for count in (16, 4, 4))
    out, sums = attention.attention(query, key, value)
    yield "4,096 tokens: forward", lambda: attention.attention(query, key, value)
    yield (
        "4,096 tokens: backward",
        lambda: attention.attention_backward(query, query, key, value, out, sums),
    )
    last = query[:, :, -1024:].contiguous()
    part, of_part = attention.attention(last, key, value)
    onto = torch.zeros(key.shape, device=DEVICE), torch.zeros(value.shape, device=DEVICE)
    yield "the last 1,024 of them as a slice: forward", lambda: attention.attention(last, key, value)
    yield (
        "the last 1,024 of them as a slice: backward",
        lambda: attention.chunk_backward(last, last, key, value, part, of_part, *onto, EVERYTHING),
    )


def experts_works(bits: int) -> Iterator[tuple[str, Work]]:
    """A layer of Qwen3-30B-A3B: 128 experts of which a token has 8."""
    tokens, count, choices, inner = 2048, 128, 8, 768
    x, logits = drawn(tokens, HIDDEN), drawn(tokens, count, dtype=torch.float32)
    weights: experts.Weights = drawn(count, 2 * inner, HIDDEN)
    if bits:
        packed = torch.zeros(count, packed_bytes((2 * inner, HIDDEN), bits), dtype=torch.uint8, device=DEVICE)
        weights = experts.PackedExperts(packed=packed, outputs=2 * inner, inputs=HIDDEN, bits=bits)
    _, chosen = experts.route(logits, choices, True)
    order, grad = experts.group(chosen, count), drawn(tokens * choices, 2 * inner)
    kept = f"in {bits} bits" if bits else "in bfloat16"
    yield f"weights {kept}: forward", lambda: experts.matmul(x, weights, order, None, gathers=True)
    yield f"weights {kept}: input's gradient", lambda: experts.input_gradient(grad, weights, order)


def fp8_works() -> Iterator[tuple[str, Work]]:
    count = TOKENS * HIDDEN
    gradient, addend = Fp8Gradient.zeros(count, DEVICE), drawn(count)
    moments = Moment.zeros(count, DEVICE), Moment.zeros(count, DEVICE)
    parameter, rows = drawn(count), drawn(TOKENS, HIDDEN)
    step = AdamWStep(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, clip_coefficient=1.0, salt=7
    )
    yield "gradients: add", lambda: fp8.accumulate_gradient(gradient, addend)
    yield "AdamW's step", lambda: fp8.adamw_step(parameter, gradient, *moments, step)
    yield "products: code rows", lambda: products.code_rows(rows)


def orthogonal_works() -> Iterator[tuple[str, Work]]:
    matrices = [drawn(HIDDEN, HIDDEN, dtype=torch.float32) for _ in range(4)]
    yield "Muon's step of four matrices", lambda: orthogonal.orthogonal(matrices)


def stage_works() -> Iterator[tuple[str, Work]]:
    """Four blocks of 1B's width, which store in few bits."""
    model = ModelSection(layers=4, hidden=HIDDEN, heads=32, kv_heads=8, ffn=INNER, sequence=2048)
    units = [block_name(index) for index in range(4)]
    chunk = build_chunk(model, units, 3, DEVICE, storage=PRESETS["agoq"])
    x = drawn(STAGE_SAMPLES, 2048, HIDDEN, dtype=torch.float32).requires_grad_()
    above = torch.ones_like(x)

    def step() -> None:
        with compute_precision("bfloat16", DEVICE):
            made = chunk(x)
        torch.autograd.backward(made, above)

    yield "four blocks of a 1B model: forward and backward", step


WORKS: dict[str, list[Callable[[], Iterator[tuple[str, Work]]]]] = {
    **{codec_format(name).KERNELS: [partial(codec_works, name)] for name in ("tah", "fixed-8")},
    "trellis": [partial(codec_works, "trellis-4.41"), partial(codec_works, "dither-3")],
    "storage": [storage_works, stage_works],
    "layers": [layers_works, stage_works],
    "attention": [attention_works, stage_works],
    "experts": [partial(experts_works, 0), partial(experts_works, 4)],
    "fp8": [fp8_works],
    "orthogonal": [orthogonal_works],
}
"""By part of the kernels."""


@contextmanager
def without(part: str) -> Iterator[None]:
    """Compute without the kernels of `part`."""
    owner: Any = dispatch
    owner._withdrawn.add(part)
    try:
        yield
    finally:
        owner._withdrawn.discard(part)


def seconds(work: Work) -> float:
    """Median of a call, after one that compiles."""
    took: list[float] = []
    work()
    while len(took) < RUNS and sum(took) < LONG_SECONDS:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def rows(part: str) -> Iterator[dict[str, Any]]:
    for works in WORKS[part]:
        for name, work in works():
            kernels = seconds(work)
            with without(part):
                plain = seconds(work)
            yield {"part": part, "work": name, "seconds": kernels, "plain_seconds": plain}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time each family of kernels against plain torch.")
    parser.add_argument("--parts", default=",".join(WORKS), help="of the kernels, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if unknown := set(given.parts.split(",")) - set(WORKS):
        parser.error(f"no kernels are called {', '.join(sorted(unknown))}: {', '.join(WORKS)} are")
    report = gpu_report(parser, "kernels and plain torch")
    fix_order(DEVICE)
    report |= {
        "triton": version("triton"),
        "runs": RUNS,
        "shapes": {"tokens": TOKENS, "hidden": HIDDEN, "inner": INNER, "vocabulary": VOCABULARY},
        "rows": [],
    }
    for part in given.parts.split(","):
        for row in rows(part):
            report["rows"].append(row)
            print(
                f"{part}, {row['work']}: {row['seconds'] * 1e3:.3f} ms, "
                f"{row['plain_seconds'] * 1e3:.3f} ms plain",
                flush=True,
            )
        write(given.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
