"""Loss and gradient error caused by packed stored activations: small models, the same text and seeds.

    OMP_NUM_THREADS=1 python -m scripts.experiments.stored_activations --data TEXT

Losses are from the unsplit trainer without codecs, one run for each way and seed: the mean of the last steps,
and the held-out loss of the final weights. The forward pass is the same in every way; only the tensors that
backward reads differ. Gradient errors are measured in the first run's trained model, on one microbatch, one
kind of tensor at a time: the gradient from packed tensors against the one from exact tensors, with the same
upstream gradient, over all blocks (as AGoQ's table 13, arXiv 2605.00539). Each run is written when it ends;
runs that are already there with the same settings are skipped.
"""

import argparse
import itertools
import json
import math
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention.ops import attention, attention_backward
from kernels.blockfloat import reference as blockfloat
from kernels.common import layers
from node.config.schema import (
    DataSection,
    ModelSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.data.data import Corpus
from node.lab.results import commit
from node.model.llama_block import LlamaBlock
from scripts.report import RESULTS
from tests.support.reference_trainer import ReferenceTrainer

OUT = RESULTS / "stored_activations_loss.json"
WAYS: dict[str, dict[str, str]] = {
    "off": {},
    "agoq": {"preset": "agoq"},
    "compact": {"preset": "compact"},
    "compact, attention 6": {"preset": "compact", "attention": "6", "attention_output": "6"},
    "compact, FFN 3": {"preset": "compact", "ffn_input": "3"},
    "all 4": {"preset": "agoq", "attention": "4", "attention_output": "4"},
    "all 4, attention again": {"preset": "agoq", "attention": "4", "attention_output": "recompute"},
}
LAST_STEPS = 20
HELD_OUT_WINDOWS = 128


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure what stored activations cost in loss and gradients."
    )
    parser.add_argument("--data", type=Path, required=True, help="text to train on")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    report = _report(arguments.out, arguments.data, arguments.steps)
    made = {(run["way"], run["seed"]) for run in report["runs"]}
    corpora: dict[int, Corpus] = {}
    for seed, way in itertools.product(arguments.seeds, arguments.ways):
        if (way, seed) in made:
            continue
        config = _config(way, seed, arguments.steps)
        if seed not in corpora:
            corpora[seed] = Corpus.load(
                DataSection(path=str(arguments.data)),
                sequence=config.model.sequence,
                global_batch=config.training.global_batch,
                seed=seed,
            )
        trainer = ReferenceTrainer(config, corpora[seed])
        losses = [step.loss for step in trainer.train(arguments.steps)]
        windows = corpora[seed].validation_windows()
        chosen = np.linspace(0, len(windows) - 1, min(HELD_OUT_WINDOWS, len(windows))).astype(int)
        held_out = trainer.validation_loss(windows[chosen])
        last = sum(losses[-LAST_STEPS:]) / LAST_STEPS
        report["runs"].append(
            {"way": way, "seed": seed, "loss_last": last, "loss_held_out": held_out, "losses": losses}
        )
        print(f"{way}, seed {seed}: last {last:.4f}, held out {held_out:.4f}", flush=True)
        if way == "off" and report["gradients"] is None:
            rows = torch.from_numpy(corpora[seed].batch(trainer.step).astype(np.int64))
            report["gradients"] = gradient_errors(trainer, rows[: config.training.microbatch])
            for row in report["gradients"]:
                print(row, flush=True)
        partial = arguments.out.with_suffix(".partial")
        partial.write_text(json.dumps(report) + "\n", encoding="utf-8")
        partial.replace(arguments.out)
    return 0


def _config(way: str, seed: int, steps: int) -> RunConfig:
    return RunConfig(
        run=RunSection(seed=seed, steps=steps),
        model=ModelSection(layers=4, hidden=128, heads=4, kv_heads=2, ffn=352, vocab=256, sequence=128),
        training=TrainingSection(global_batch=16, microbatch=16, lr=3e-3, warmup_steps=20),
        storage=StorageSection(**WAYS[way]),
    )


def _report(path: Path, data: Path, steps: int) -> dict[str, Any]:
    config = _config("off", 0, steps)
    report: dict[str, Any] = {
        "experiment": "stored_activations_loss",
        "data": {"name": data.name, "sha256": sha256(data.read_bytes()).hexdigest()},
        "settings": {"model": vars(config.model), "training": vars(config.training), "run.steps": steps},
        "ways": WAYS,
        "last_steps": LAST_STEPS,
        "held_out_windows": HELD_OUT_WINDOWS,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit(),
        "gradients": None,
        "runs": [],
    }
    return gone_on_with(path, report, ("data", "settings", "ways", "versions"))


def gone_on_with(path: Path, report: dict[str, Any], same: tuple[str, ...]) -> dict[str, Any]:
    """The report in `path` if these entries of it equal those of `report`; else `report`."""
    if path.exists():
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all(before[key] == json.loads(json.dumps(report[key])) for key in same):
            return before
    return report


# --- gradients -------------------------------------------------------------------------------------------


class _Taken:
    """Inputs and upstream gradients of every operation in a plain block."""

    def __init__(self, block: LlamaBlock) -> None:
        self.block = block
        self.tensors: dict[str, Tensor] = {}
        plain = block.qkv

        def qkv(normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            query, key, value = plain(normed)
            self.keep(query=query, key=key, value=value)
            return query, key, value

        block.qkv = qkv  # type: ignore[method-assign]  # only here
        for name in ("attention_norm", "ffn_norm", "gate", "up"):
            getattr(block, name).register_forward_hook(self._hook(name))
        block.attention_output.register_forward_hook(self._hook("attention_output"))
        block.down.register_forward_hook(self._hook("down"))

    def keep(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            tensor.retain_grad()
            self.tensors[name] = tensor

    def _hook(self, name: str) -> Callable[..., None]:
        def keep(_: object, inputs: tuple[Tensor, ...], result: Tensor) -> None:
            self.keep(**{f"{name} in": inputs[0], name: result})

        return keep

    def value(self, name: str) -> Tensor:
        return self.tensors[name].detach()

    def grad(self, name: str) -> Tensor:
        grad = self.tensors[name].grad
        assert grad is not None
        return grad


def gradient_errors(trainer: ReferenceTrainer, rows: Tensor) -> list[dict[str, Any]]:
    """Normalised L2 and mean absolute error of each gradient, by bits."""
    (chunk,) = trainer.chunks
    taken = [_Taken(block) for block in chunk.layers if isinstance(block, LlamaBlock)]
    torch.autograd.backward(chunk.loss(rows[:, :-1], rows[:, 1:]))
    made = []
    for bits in (3, 4, 5, 6, 8):
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
        for block in taken:
            with torch.no_grad():
                for name, found, wanted in _pairs(block, bits):
                    total = sums[name]
                    difference = found.double() - wanted.double()
                    total[0] += float(difference.square().sum())
                    total[1] += float(wanted.double().square().sum())
                    total[2] += float(difference.abs().sum())
                    total[3] += wanted.numel()
        made += [
            {
                "gradient": name,
                "bits": bits,
                "normalised_l2": math.sqrt(error / norm),
                "mean_absolute": absolute / count,
            }
            for name, (error, norm, absolute, count) in sums.items()
        ]
    return made


def _pairs(taken: _Taken, bits: int) -> list[tuple[str, Tensor, Tensor]]:
    """(name, gradient from packed tensors, gradient from exact tensors) of every kind."""
    block = taken.block

    def stored(x: Tensor) -> Tensor:
        return blockfloat.unpack(blockfloat.pack(x, bits), x.shape, bits, torch.float32)

    pairs = []
    for name, projection in (("attention_norm", None), ("ffn_norm", "gate")):
        norm = getattr(block, name)
        x, upstream = taken.value(f"{name} in"), taken.grad(name)
        approximate = stored(x)
        exact = layers.norm_gradient(upstream, x, norm.weight, None, norm.eps)[0]
        pairs.append(
            ("norm", layers.norm_gradient(upstream, approximate, norm.weight, None, norm.eps)[0], exact)
        )
        if projection is not None:
            of_gate = taken.grad(projection).flatten(0, 1).t()
            wide = [layers.norm(v, norm.weight, None, norm.eps).flatten(0, 1) for v in (approximate, x)]
            pairs.append(("weights behind a norm", of_gate @ wide[0], of_gate @ wide[1]))
    gate, up, upstream = taken.value("gate"), taken.value("up"), taken.grad("down in")
    approximate_inputs = stored(gate), stored(up)
    found = layers.swiglu_gradient(upstream, *approximate_inputs)
    pairs += [
        ("SwiGLU", *both) for both in zip(found, layers.swiglu_gradient(upstream, gate, up), strict=True)
    ]
    of_down = taken.grad("down").flatten(0, 1).t()
    inner = [layers.swiglu(*v).flatten(0, 1) for v in (approximate_inputs, (gate, up))]
    pairs.append(("weights behind SwiGLU", of_down @ inner[0], of_down @ inner[1]))

    heads = tuple(taken.value(name) for name in ("query", "key", "value"))
    flat = taken.value("attention_output in")
    of_out = taken.grad("attention_output in")
    split = (heads[0].shape[1], -1)
    of_attended = torch.unflatten(of_out, 2, split).transpose(1, 2)
    attended, sums = attention(*heads)
    exact_heads = attention_backward(of_attended, *heads, attended, sums)
    kept = tuple(_by_tokens(part, stored) for part in heads)
    kept_output = torch.unflatten(stored(flat), 2, split).transpose(1, 2)
    again = attention(*kept)
    for name, outputs in (("kept sums", (kept_output, sums)), ("attention again", again)):
        approximate_heads = attention_backward(of_attended, *kept, *outputs)
        for letter, part, wanted in zip("QKV", approximate_heads, exact_heads, strict=True):
            pairs.append((f"attention {letter}, {name}", part, wanted))
    return pairs


def _by_tokens(heads: Tensor, stored: Callable[[Tensor], Tensor]) -> Tensor:
    """Pack heads in blocks along the channels of a token, as the model does."""
    flat = stored(heads.transpose(1, 2).flatten(2))
    return torch.unflatten(flat, 2, (heads.shape[1], -1)).transpose(1, 2)


if __name__ == "__main__":
    sys.exit(main())
