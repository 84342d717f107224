"""Why gradients in few bits cost loss: one model, seven boundaries, a quantizer of gradients for each run.

    python3 -m scripts.experiments.gradient_bias --tokens FOLDER [--ways none plain-3 dither-3 ...]

A Llama-style model of 8 blocks, 1024 wide, trains in one process. After each of the first seven blocks the
gradient that crosses is replaced by its quantized form. Bits are what an ideal entropy coder takes that knows
the scale of each row and column; a controller keeps every boundary's step where the bits meet the rate.
`codec:NAME` packs with a codec of the product instead. `A/G` quantizes activations by way A and gradients by
way G.

FOLDER holds `books-train.npy` and `books-valid.npy`, token ids in uint16. The held-out loss is measured
without quantizers. Runs end with the budget of seconds; each is written when it ends, and the same command
goes on with those that `--out` lacks. Several processes may share a GPU, each with its seeds and its `--out`;
`--join` makes one report of theirs. `gradient_rates.json` is such a report:

    python3 -m scripts.experiments.gradient_bias --tokens FOLDER --steps 400 --held-out 256 --seeds SEED \\
        --ways none codec:trellis-3/codec:dither-3 codec:trellis-4.41/codec:dither-4.41 ... --out SEED.json

A way is a name and a rate:

| name | quantizer |
|---|---|
| plain | uniform, nearest: what is below half a step is lost |
| dither | uniform, with dither that both ends know and that is subtracted: the error has no mean |
| stochastic | rounds up or down by chance: no mean error, twice the noise |
| token | as plain, each row's step in proportion to the row's scale |
| tokendither | both |
| lowrank, lowrankdither | what a low-rank prediction leaves, plain or with dither |
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.common.random_bits import mixed, random_bits
from node.config.schema import ModelSection
from node.lab.results import commit
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.head_loss import head_loss
from node.model.units import unit_names
from scripts.report import RESULTS, write
from wire.codecs import header as wire_header
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

OUT = RESULTS / "gradient_bias.json"
WAYS = ("none", "lowrankdither-3", "dither-3", "plain-3", "dither-2", "lowrank-3", "token-3", "stochastic-3")
SETTINGS = ("layers", "width", "sequence", "vocab", "steps", "batch", "microbatch", "held_out", "lr")
RANK = 32
"""Dimensions of a prediction."""
FACTOR_BITS = 5
SAMPLED = 8
"""Bits are counted on one row in this many."""
DITHERS = 4
CLASSES = 128
LONGEST = 128
ERRORS_EVERY = 8
"""A codec's error is measured on one of so many tensors."""


@dataclass(frozen=True)
class Way:
    """A quantizer and the bits an element that it may take."""

    kind: str
    bits: float

    @classmethod
    def named(cls, name: str) -> "Way | None":
        """None for `none`. SystemExit for an unknown name."""
        if name == "none":
            return None
        kind, _, bits = name.rpartition("-")
        known = ("plain", "dither", "stochastic", "token", "tokendither", "lowrank", "lowrankdither")
        if name.startswith("codec:"):
            return cls(name, 0.0)
        if kind not in known:
            raise SystemExit(f"unknown way {name}: {', '.join(known)} with a rate, codec:NAME or none")
        return cls(kind, float(bits))


@dataclass
class Quantizer:
    """Quantizes one boundary's tensors; what it learns of one is where the next one's step begins."""

    way: Way
    salt: int
    step: float | None = None
    """log2 of the quantization step over the tensor's root mean square."""
    basis: Tensor | None = None
    calls: int = 0
    bits: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        """`x` as the receiver gets it, of the same shape and dtype."""
        self.calls += 1
        if self.way.kind.startswith("codec:"):
            which = codec(self.way.kind.removeprefix("codec:")).salted(mixed(self.salt + 7919 * self.calls))
            # As the two ends do, without the copies through host memory and the checksum of these.
            spec = TensorSpec(x.dtype, tuple(x.shape))
            packed = which.pack(x.contiguous())
            exponent = int(packed[wire_header.EXPONENT].view(torch.int32).item())
            if exponent not in which.exponents:
                raise NonFiniteError(f"a tensor of {self.way.kind} is not finite")
            size = packed.numel() - wire_header.HEADER_BYTES
            got = which.unpack(packed, spec, wire_header.Header(which.parameters, spec, size, exponent))
            self.bits.append(torch.tensor(8.0 * packed.numel() / x.numel()))
            if self.calls % ERRORS_EVERY == 0:
                self.errors.append((got - x).float().norm() / x.float().norm())
            return got
        rows = x.reshape(-1, x.shape[-1]).float()
        unit = rows.square().mean().sqrt().clamp_min(1e-30)
        y = rows / unit
        own = 0.0
        if self.way.kind.startswith("lowrank"):
            prediction = self._prediction(y)
            own = RANK * FACTOR_BITS * (y.shape[0] + y.shape[1]) / y.numel()
        else:
            prediction = None
        left = y if prediction is None else y - prediction
        found = self._quantized(left, own)
        decoded = found if prediction is None else found + prediction
        self.errors.append((decoded - y).norm() / y.norm())
        return (decoded * unit).to(x.dtype).view(x.shape)

    def _quantized(self, y: Tensor, own: float) -> Tensor:
        row = y.abs().mean(1, keepdim=True).clamp_min(1e-6)
        column = (y.abs() / row).mean(0, keepdim=True).clamp_min(1e-6)
        if self.way.kind.startswith("token"):
            decoded = self._stepped(y / row, row * 0 + 1, column, own) * row
            return decoded
        return self._stepped(y, row, column, own)

    def _stepped(self, y: Tensor, row: Tensor, column: Tensor, own: float) -> Tensor:
        """`y` in uniform steps; counts bits on a sample and moves the next call's step to the rate."""
        # Scales of rows and columns, six bits each.
        own += 6 * (y.shape[0] + y.shape[1]) / y.numel()
        sample = slice(self.calls % SAMPLED, None, SAMPLED)
        scale = torch.log2(row[sample] * column)
        if self.step is None:
            self.step = 2.05 - self.way.bits
            for _ in range(8):
                n, dither = self._indices(y[sample], 2.0**self.step, 0)
                self.step += 0.8 * (own + float(self._bits(n, dither, scale)) - self.way.bits)
        n, dither = self._indices(y, 2.0**self.step, self.calls)
        some = None if dither is None else dither[sample]
        bits = own + self._bits(n[sample], some, scale)
        self.bits.append(bits)
        decoded = (n if dither is None or self.way.kind == "stochastic" else n - dither) * 2.0**self.step
        self.step += 0.5 * (float(bits) - self.way.bits)
        return decoded

    def _indices(self, y: Tensor, step: float, call: int) -> tuple[Tensor, Tensor | None]:
        """Indices, and the dither in steps, from -0.5 to 0.5, or None."""
        if "dither" not in self.way.kind and self.way.kind != "stochastic":
            return torch.round(y / step), None
        salt = mixed(self.salt + 7919 * call & 0xFFFFFFFF)
        chance = random_bits(y.numel(), salt, y.device, bits=16).float().add_(0.5).div_(65536).sub_(0.5)
        dither = chance.view(y.shape)
        return torch.round(y / step + dither), dither

    def _bits(self, n: Tensor, dither: Tensor | None, scale: Tensor) -> Tensor:
        """Mean ideal code length of indices whose class and dither the decoder knows."""
        kind = torch.round(4 * (scale - (self.step or 0.0))).long().add_(CLASSES // 2).clamp_(0, CLASSES - 1)
        if dither is not None and self.way.kind != "stochastic":
            # The distribution of n and dither is that of -n and -dither.
            n = torch.where(dither < 0, -n, n)
            kind = kind * DITHERS + (dither.abs() * 2 * DITHERS).long().clamp_(0, DITHERS - 1)
        span = 2 * LONGEST + 1
        whole = kind * span + n.long().clamp_(-LONGEST, LONGEST) + LONGEST
        counts = torch.bincount(whole.view(-1), minlength=CLASSES * DITHERS * span).double().view(-1, span)
        totals = counts.sum(1, keepdim=True).clamp_min(1)
        return -(counts * torch.log2((counts / totals).clamp_min(1e-30))).sum() / n.numel()

    def _prediction(self, y: Tensor) -> Tensor:
        """Rank `RANK`, coefficients in few bits; the space goes on from the call before."""
        row = y.abs().mean(1, keepdim=True).clamp_min(1e-6)
        white = y / row
        if self.basis is None:
            start = torch.Generator(device=y.device).manual_seed(self.salt)
            self.basis = torch.randn(y.shape[1], RANK, device=y.device, generator=start)
        for _ in range(2):
            self.basis, _ = torch.linalg.qr(white.T @ (white @ self.basis))
        image = white @ self.basis
        limit = 2 ** (FACTOR_BITS - 1) - 1
        unit = 3.2 * image.abs().mean(0) / limit
        image = torch.round(image / unit).clamp_(-limit, limit) * unit
        found: Tensor = (image @ self.basis.T) * row
        return found


class _Crossing(torch.autograd.Function):
    """A boundary: what one stage sends is not quite what the next one gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Quantizer | None, back: Quantizer | None) -> Tensor:
        ctx.back = back
        return x.clone() if there is None else there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return (gradient if ctx.back is None else ctx.back(gradient)), None, None


def loss_of(
    chunk: Chunk, rows: Tensor, crossings: Sequence[tuple[Quantizer | None, Quantizer | None]] | None
) -> Tensor:
    """Mean cross-entropy of windows [B, S + 1], through the boundaries if there are any."""
    with compute_precision("bfloat16", rows.device):
        x = chunk.layers[0](rows[:, :-1])
        blocks = list(chunk.layers)[1:-1]
        for number, block in enumerate(blocks):
            x = block(x)
            if crossings is not None and number < len(blocks) - 1:
                x = _Crossing.apply(x, *crossings[number])
        head = chunk.layers[-1]
        return head_loss(head.norm(x).flatten(0, 1), head.output, rows[:, 1:].flatten())


@cache
def _initial(model: ModelSection, seed: int, device: torch.device) -> Chunk:
    """The model before its first step, drawn once for all runs."""
    return build_chunk(model, unit_names(model), seed, device)


def train(name: str, seed: int, model: ModelSection, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: its held-out loss, and the bits and errors of its tensors."""
    device = torch.device(arguments.device)
    chunk = deepcopy(_initial(model, seed, device))
    ways = [Way.named(part) for part in name.split("/")]

    def quantizer(number: int, kind: int) -> Quantizer | None:
        way = ways[kind - 2 if len(ways) > 1 else 0]
        return None if way is None else Quantizer(way, mixed(seed * 4096 + number * 2 + kind + 1))

    boundaries = range(model.layers - 1)
    crossings = [(quantizer(j, 0) if len(ways) > 1 else None, quantizer(j, 1)) for j in boundaries]
    matrices = [p for p in chunk.parameters() if p.ndim >= 2]
    vectors = [p for p in chunk.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    text = np.load(arguments.tokens / "books-train.npy")
    length = model.sequence + 1
    windows = len(text) // length
    order = np.random.default_rng(seed).permutation(windows)
    # All of the run's text is on the device before the clock starts.
    picked = order[np.arange(arguments.steps * arguments.batch) % windows]
    rows = text[: windows * length].reshape(windows, length)[picked].astype(np.int64)
    data = torch.from_numpy(rows).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.monotonic()
    losses = []
    for step in range(arguments.steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / arguments.steps)
        rate = arguments.lr * min(1.0, (step + 1) / 20) * cosine
        for group in optimizer.param_groups:
            group["lr"] = rate
        for piece in range(arguments.batch // arguments.microbatch):
            first = step * arguments.batch + piece * arguments.microbatch
            loss = loss_of(chunk, data[first : first + arguments.microbatch], crossings)
            (loss * (arguments.microbatch / arguments.batch)).backward()
        torch.nn.utils.clip_grad_norm_(chunk.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    trained = torch.stack(losses).tolist()
    seconds = time.monotonic() - began
    kept = np.load(arguments.tokens / "books-valid.npy").astype(np.int64)
    held = kept[: len(kept) // length * length].reshape(-1, length)[: arguments.held_out]
    with torch.no_grad():
        parts = [
            float(loss_of(chunk, torch.from_numpy(held[k : k + 8]).to(device), None)) * len(held[k : k + 8])
            for k in range(0, len(held), 8)
        ]
    row: dict[str, Any] = {
        "way": name,
        "seed": seed,
        "held_out_loss": sum(parts) / len(held),
        "training_loss_last_10": sum(trained[-10:]) / len(trained[-10:]),
        "seconds": round(seconds, 1),
    }
    for kind, side in (("activation", 0), ("gradient", 1)):
        measured = [pair[side] for pair in crossings if pair[side] is not None]
        if measured:
            row[f"{kind}_bits"] = [round(float(torch.stack(q.bits).mean()), 3) for q in measured]
            # A short run of a codec has none.
            row[f"{kind}_error"] = [
                round(float(torch.stack(q.errors[-10:]).mean()), 4) for q in measured if q.errors
            ]
    return row


def joined(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of several with the same settings. SystemExit if they differ."""
    first, *others = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    for other in others:
        if {**other, "runs": []} != {**first, "runs": []}:
            raise SystemExit("these reports are of different settings, machines or commits")
        first["runs"] += other["runs"]
    first["runs"].sort(key=lambda run: run["seed"])
    return dict(first)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what quantizing gradients costs in loss, and why.")
    parser.add_argument("--tokens", type=Path, help="folder of books-*.npy")
    parser.add_argument("--join", type=Path, nargs="+", metavar="REPORT", help="only join these in --out")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--microbatch", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=128, help="held-out sequences")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304, help="a multiple of 64 is much faster on a GPU")
    parser.add_argument("--seconds", type=float, default=240.0, help="no run begins if it might end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.join:
        write(arguments.out, joined(arguments.join))
        return 0
    if arguments.tokens is None:
        parser.error("give --tokens, or --join")
    heads = max(1, arguments.width // 128)
    model = ModelSection(
        layers=arguments.layers,
        hidden=arguments.width,
        heads=heads,
        kv_heads=heads,
        ffn=arguments.width * 11 // 4,
        vocab=arguments.vocab,
        sequence=arguments.sequence,
    )
    on_gpu = arguments.device.startswith("cuda")
    report: dict[str, Any] = {
        "experiment": "gradient_bias",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if on_gpu else "CPU",
        "torch": torch.__version__,
        "settings": {key: getattr(arguments, key) for key in SETTINGS},
        "runs": [],
    }
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text(encoding="utf-8"))
        # Another report is replaced.
        if {**before, "runs": []} == report:
            report = before
    made = {(run["way"], run["seed"]) for run in report["runs"]}
    end = time.monotonic() + arguments.seconds
    longest = 0.0
    for seed in arguments.seeds:
        for name in arguments.ways:
            if (name, seed) in made:
                continue
            began = time.monotonic()
            if began + longest > end:
                print(f"no time for {name}, seed {seed}", flush=True)
                continue
            report["runs"].append(train(name, seed, model, arguments))
            print(json.dumps(report["runs"][-1]), flush=True)
            write(arguments.out, report)
            longest = max(longest, time.monotonic() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
