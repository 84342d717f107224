"""AdamW with e4m3 moments: speed, state, and error of its step, beside other packages.

    python -m scripts.bench.optimizer [--elements 67108864] [--tokens DIR] [--train-steps 60]

On a GPU. Times one parameter of `--elements`: this package's kernel, torch's fused AdamW, torchao's AdamWFp8
and bitsandbytes' AdamW8bit where they are installed (else it says so), beside a device-to-device copy. Then
trains the model of `scripts.experiments.convergence` on `--tokens` for a while, with fp32 states, and
packs the moments each way: the figure is the error of the update m / (sqrt(v) + eps), relative to its norm.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.fp8.ops import accumulate_gradient, adamw_step
from kernels.fp8.reference import (
    AdamWStep,
    Fp8Gradient,
    Moment,
    pack_gradient,
    pack_moment,
    unpack_moment,
)
from node.lab.results import commit
from scripts.experiments.convergence import Windows, make_trainer
from scripts.experiments.convergence_runs import Run
from scripts.report import RESULTS, version

OUT = RESULTS / "optimizer.json"
CUDA = torch.device("cuda")
RUNS = 30
EPS = 1e-8


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure AdamW with e4m3 moments.")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--tokens", type=Path, help="folder of books-train.npy, for moments from training")
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    report: dict[str, Any] = {
        "experiment": "optimizer",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton", "torchao", "bitsandbytes")},
        "python": platform.python_version(),
        "elements": arguments.elements,
        "runs": RUNS,
        "speed": speeds(arguments.elements),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.tokens is not None:
        report["train_steps"] = arguments.train_steps
        report["update_error"] = update_errors(trained_moments(arguments.tokens, arguments.train_steps))
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


def timed(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(3):
            way()
    for _ in range(RUNS):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way()
            end.record()
            end.synchronize()
            times[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(of) for name, of in times.items()}


def speeds(elements: int) -> list[dict[str, Any]]:
    """Each way's time, the bytes that it must move, and its share of a copy's bandwidth."""
    gradient32 = torch.randn(elements, device=CUDA) * 1e-3
    gradient16 = gradient32.bfloat16()
    packed = Fp8Gradient.zeros(elements, CUDA)
    pack_gradient(gradient32, packed)
    main_gradient = Fp8Gradient.zeros(elements, CUDA)
    weight32, weight16 = torch.randn(elements, device=CUDA), torch.randn(elements, device=CUDA).bfloat16()
    moments = [Moment.zeros(elements, CUDA) for _ in range(2)]
    how = AdamWStep(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=EPS, weight_decay=0.1, step=3, clip_coefficient=1.0, salt=5
    )
    source, target = (
        torch.empty(1 << 28, dtype=torch.uint8, device=CUDA),
        torch.empty_like(torch.empty(1 << 28, dtype=torch.uint8, device=CUDA)),
    )
    state = sum(moment.nbytes for moment in moments) / elements
    one = packed.nbytes / elements
    ways: dict[str, tuple[Callable[[], object], float, float]] = {
        "copy": (lambda: target.copy_(source), 2 * source.numel() / elements, 0),
        "e4m3 gradient += bf16": (lambda: accumulate_gradient(main_gradient, gradient16), 2 * one + 2, 0),
        "e4m3 gradient += fp32": (lambda: accumulate_gradient(main_gradient, gradient32), 2 * one + 4, 0),
        "AdamW e4m3, fp32 weights and gradients": (
            lambda: adamw_step(weight32, gradient32, *moments, how),
            12 + 2 * state,
            state,
        ),
        "AdamW e4m3, fp32 weights, e4m3 gradients": (
            lambda: adamw_step(weight32, packed, *moments, how),
            8 + one + 2 * state,
            state,
        ),
        "AdamW e4m3, bf16 weights and gradients": (
            lambda: adamw_step(weight16, gradient16, *moments, how),
            6 + 2 * state,
            state,
        ),
        "AdamW e4m3, bf16 weights, e4m3 gradients": (
            lambda: adamw_step(weight16, packed, *moments, how),
            4 + one + 2 * state,
            state,
        ),
        **rivals(elements, gradient32),
    }
    found = timed({name: way for name, (way, _, _) in ways.items()})
    copy_bandwidth = ways["copy"][1] * elements / found["copy"]
    return [
        {
            "way": name,
            "microseconds": found[name],
            "bytes_an_element": moved,
            "state_bytes_a_parameter": kept,
            "share_of_copy": moved * elements / found[name] / copy_bandwidth if moved else None,
        }
        for name, (_, moved, kept) in ways.items()
    ]


def rivals(elements: int, gradient: Tensor) -> dict[str, tuple[Callable[[], object], float, float]]:
    """Optimizers of other packages, each with its own parameter."""
    made: dict[str, tuple[Callable[[], object], float, float]] = {}

    def add(name: str, optimizer: Callable[[list[torch.nn.Parameter]], Any]) -> None:
        parameter = torch.nn.Parameter(torch.randn(elements // 1024, 1024, device=CUDA))
        parameter.grad = gradient.view_as(parameter).clone()
        try:
            chosen = optimizer([parameter])
            chosen.step()
        except Exception as error:  # a rival's error does not end the bench
            print(f"{name} does not run here: {error}", file=sys.stderr)
            return
        state = sum(_bytes(value) for value in chosen.state[parameter].values()) / elements
        made[name] = (chosen.step, 0.0, state)

    add("torch.optim.AdamW, fused", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))
    try:
        from torchao.optim import AdamWFp8

        add("torchao AdamWFp8", lambda p: AdamWFp8(p, lr=1e-3))
    except ImportError as error:
        print(f"torchao is not measured: {error}", file=sys.stderr)
    try:
        import bitsandbytes

        add("bitsandbytes AdamW8bit", lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-3))
    except (ImportError, RuntimeError) as error:
        print(f"bitsandbytes is not measured: {error}", file=sys.stderr)
    return made


def _bytes(value: object) -> int:
    """Bytes of a tensor, or of a subclass that holds several."""
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return 0
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is None:
        return value.numel() * value.element_size()
    return sum(_bytes(getattr(value, name)) for name in flatten()[0])


def trained_moments(tokens: Path, steps: int) -> list[tuple[Tensor, Tensor]]:
    """First and second moments of every matrix after `steps` steps of training in fp32 states."""
    run = Run(suite="pass", forward="fp32", backward="fp32", steps=300)
    text = Windows(np.load(tokens / "books-train.npy", mmap_mode="r"), limit=None, seed=0)
    trainer = make_trainer(run, text, None, CUDA)
    trainer.train(steps)
    moments = []
    for unit in trainer.optimizer.units:
        state = trainer.optimizer.unit_state(unit)
        for name, mean in state.items():
            if name.startswith("exp_avg.") and mean.ndim >= 2:
                square = state[name.replace("exp_avg.", "exp_avg_sq.")]
                moments.append((mean.to(CUDA), square.to(CUDA)))
    return moments


def update_errors(moments: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Relative error of m / (sqrt(v) + eps) over all matrices, by format of the moments."""
    ways: dict[str, Callable[[Tensor, bool], Tensor]] = {
        "e4m3, blocks of 128, expanded": through_expansion,
        "e4m3, blocks of 128": plain_e4m3(128),
        "e4m3, blocks of 256 (as torchao)": plain_e4m3(256),
    }
    try:
        import bitsandbytes.functional as F

        def dynamic(values: Tensor, signed: bool) -> Tensor:
            code = F.create_dynamic_map(signed=signed).to(CUDA)
            packed, state = F.quantize_blockwise(values.contiguous(), code=code, blocksize=256)
            return F.dequantize_blockwise(packed, state)

        ways["bitsandbytes' dynamic 8 bits, blocks of 256"] = dynamic
    except (ImportError, RuntimeError) as error:
        print(f"bitsandbytes is not measured: {error}", file=sys.stderr)
    errors = {}
    for name, way in ways.items():
        wrong = total = 0.0
        for mean, square in moments:
            update = mean / (square.sqrt() + EPS)
            kept = way(mean, True) / (way(square, False).clamp(min=0).sqrt() + EPS)
            wrong += (kept - update).double().square().sum().item()
            total += update.double().square().sum().item()
        errors[name] = (wrong / total) ** 0.5
    return errors


def through_expansion(values: Tensor, signed: bool) -> Tensor:
    moment = Moment.zeros(values.numel(), values.device)
    pack_moment(values.flatten(), moment)
    return unpack_moment(moment).view(values.shape)


def plain_e4m3(block: int) -> Callable[[Tensor, bool], Tensor]:
    def through(values: Tensor, signed: bool) -> Tensor:
        if values.numel() % block:
            return values
        rows = values.reshape(-1, block)
        scale = (rows.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1e-12)
        return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).view(values.shape)

    return through


if __name__ == "__main__":
    sys.exit(main())
