"""Error of each design choice of a codec by itself, on real boundary tensors at equal true bits.

    OMP_NUM_THREADS=1 python -m scripts.experiments.codec_choices

Reads boundaries-step*.safetensors (`activation.*`, `gradient.*`, `tokens`) from `--data`, THINWIRE_DATA or
../shared/data. For every way of coding, the script searches for the quantization step at which a tensor takes
the wanted bits per element, with the 64-byte header and all metadata. Error is the norm of the difference
between tensor and decoded tensor over the norm of the tensor, as the root mean square over the tensors of a
kind. The ways are plain torch and numpy and only count their bits; `trellis-R` really packs.

- Code lengths are -log2 of the probability under a static distribution with the element's known scale
  (normal or Laplace, whichever is shorter for the tensor), or the lengths of Rice codes, or those of the
  12-bit tables of `trellis-R`. *Own histogram*: the entropy of the tensor's own symbols, without its table.
- Scales: mean magnitudes in quarters of an octave, of the tensor, of tiles of 64 (their entropy counted) or
  of rows and columns (as many bits each as their span takes).
- Low rank: singular vectors of the scaled matrix, in 4 or 6 bits; the best of a few ranks.
- Token ids: a row is predicted by the mean of the earlier rows with the same token (for a gradient: the same
  label), times a gain that depends on how many there are. *All others* also uses later rows, which no decoder
  has: an upper bound for any cache of one sequence.
- Trellis: the path of least error through four states, one path per row, as in
  `kernels.trellis.loops.encode`.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from node.lab.results import commit
from scripts.experiments.code_lengths import TILE, histogram_bits, rice_bits, static_bits, table_bits
from scripts.report import RESULTS, add_boundary_data, boundary_files
from wire.codecs.header import HEADER_BYTES
from wire.codecs.registry import codec
from wire.spec import TensorSpec

OUT = RESULTS / "codec_choices.json"
RATES = (4.41, 3.45)
RANKS = ((8, 4), (16, 4), (32, 4), (32, 6), (64, 6))
PRODUCT = "trellis-R"
CLOSE = 2e-3
"""The search ends when the bits per element are at most this far below the wanted rate."""
PATH_NOISE = 0.07
"""Variance that the choice of a path adds to an index (`kernels.trellis.tables`)."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of coding."""

    scales: str = "rows and columns"
    lengths: str = "static"
    low_rank: bool = False
    tokens: str = ""
    trellis: bool = False

    @property
    def name(self) -> str:
        parts = [self.lengths if self.lengths != "static" else "", f"scales of {self.scales}"]
        parts += ["low rank"] if self.low_rank else []
        parts += [f"token ids, {self.tokens}"] if self.tokens else []
        parts += ["trellis"] if self.trellis else []
        return ", ".join(filter(None, parts))


PLAIN = Way()
WAYS = (
    Way(scales="the tensor", lengths="own histogram"),
    Way(scales="the tensor"),
    Way(scales="tiles"),
    PLAIN,
    replace(PLAIN, lengths="12-bit tables"),
    replace(PLAIN, lengths="Rice codes"),
    Way(scales="tiles", lengths="Rice codes"),
    replace(PLAIN, low_rank=True),
    replace(PLAIN, tokens="rows before"),
    replace(PLAIN, tokens="all others"),
    replace(PLAIN, low_rank=True, tokens="rows before"),
    replace(PLAIN, trellis=True),
    replace(PLAIN, low_rank=True, trellis=True),
    replace(PLAIN, low_rank=True, trellis=True, tokens="rows before"),
)


def quarter(scale: torch.Tensor) -> torch.Tensor:
    """log2 in quarters of an octave, rounded; zero counts as a tiny scale."""
    return torch.round(4 * torch.log2(scale.clamp_min(1e-30)))


def scales_of(x: torch.Tensor, which: str) -> tuple[torch.Tensor, float]:
    """The mean magnitude that the sent scales give each element of `[R, C]`, and the bits of the scales."""
    magnitude = x.abs()
    if which == "the tensor":
        return torch.exp2(quarter(magnitude.mean()) / 4).expand_as(x), 16.0
    if which == "tiles":
        found = quarter(magnitude.view(-1, TILE).mean(1))
        _, counts = torch.unique(found, return_counts=True)
        shares = counts.double() / counts.sum()
        bits = float(-(counts * torch.log2(shares)).sum()) + 16
        return torch.exp2(found / 4).repeat_interleave(TILE).view_as(x), bits
    row = quarter(magnitude.mean(1))
    column = quarter((magnitude / torch.exp2(row / 4)[:, None]).mean(0))
    bits = 32.0
    for side in (row, column):
        bits += side.numel() * int(side.max() - side.min()).bit_length()
    return torch.exp2(row / 4)[:, None] * torch.exp2(column / 4), bits


def path(x: np.ndarray, step: float) -> np.ndarray:
    """Multiples of a step, `[R, C]`, on each row's path of least error.

    The parities of the earlier elements decide whether an element gets even or odd multiples.
    """
    rows, columns = x.shape
    v = (x / step).T.astype(np.float32)
    far = np.float32(1e30)
    cost = np.full((4, rows), far, dtype=np.float32)
    cost[0] = 0
    decided = np.empty((columns, 4, rows), dtype=bool)
    # Distance to the nearest of the multiples that are 0, 1, 2 and 3 modulo 4.
    for place in range(columns):
        near = [np.abs((v[place] - residue + 2) % 4 - 2) ** 2 for residue in range(4)]
        new = np.empty_like(cost)
        # A state is the quantizer of this element and of the next; 2 * (before ^ following) + current.
        for current in (0, 1):
            for following in (0, 1):
                first = cost[current] + near[2 * following + current]
                second = cost[2 + current] + near[2 * (1 ^ following) + current]
                new[2 * current + following] = np.minimum(first, second)
                decided[place, 2 * current + following] = second < first
        cost = new - new.min(0)
    state = cost.argmin(0)
    found = np.empty((columns, rows), dtype=np.float32)
    everyone = np.arange(rows)
    for place in range(columns - 1, -1, -1):
        current, following = state >> 1, state & 1
        before = decided[place, state, everyone].astype(np.int64)
        residue = 2 * (before ^ following) + current
        found[place] = 4 * np.round((v[place] - residue) / 4) + residue
        state = 2 * before + current
    return found.T


def token_prediction(x: torch.Tensor, ids: torch.Tensor, later: bool) -> tuple[torch.Tensor, float, float]:
    """Prediction of rows from rows with the same token, bits of the gains, and share of predicted rows."""
    same = ids[:, None] == ids[None, :]
    seen = (same & ~torch.eye(len(ids), dtype=torch.bool)) if later else same.tril(-1)
    count = seen.sum(1)
    mean = seen.to(x.dtype) @ x / count.clamp_min(1)[:, None]
    bucket = torch.floor(torch.log2(count.clamp_min(1).float())).long()
    for number in range(int(bucket.max()) + 1):
        some = (bucket == number) & (count > 0)
        if not some.any():
            continue
        gain = (x[some] * mean[some]).sum() / mean[some].square().sum().clamp_min(1e-30)
        mean[some] *= gain.half().to(x.dtype)
    return mean, 16.0 * int(bucket.max() + 1), float((count > 0).double().mean())


@dataclass(frozen=True)
class Singular:
    """Singular value decomposition of a matrix divided by its scales."""

    x: torch.Tensor
    scale: torch.Tensor
    u: torch.Tensor
    s: torch.Tensor
    v: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor) -> "Singular":
        scale, _ = scales_of(x, "rows and columns")
        return Singular(x, scale, *torch.linalg.svd(x / scale, full_matrices=False))

    def prediction(self, step: float) -> tuple[torch.Tensor, float]:
        """The low-rank prediction that gives the fewest bits at this step, and the prediction's own bits."""
        best: tuple[float, torch.Tensor, float] | None = None
        for rank, bits in RANKS:
            sides = []
            for side in (self.u[:, :rank], self.v[:rank].T):
                limit = 2 ** (bits - 1) - 1
                unit = 3.2 * side.abs().mean(0) / limit
                sides.append(torch.round(side / unit).clamp(-limit, limit) * unit)
            found = self.scale * (sides[0] * self.s[:rank] @ sides[1].T)
            own = float(rank * (bits * sum(self.x.shape) + 32) + 4 * sum(self.x.shape))
            left = self.x - found
            size, more = scales_of(left, "rows and columns")
            total = own + more + static_bits(torch.round(left / step), size / step, 0.0, 0.0)
            if best is None or total < best[0]:
                best = total, found, own
        assert best is not None
        return best[1:]


def coded(x: torch.Tensor, way: Way, step: float, fixed: float) -> tuple[float, torch.Tensor]:
    """Bits of a tensor `[R, C]` quantized after its prediction, plus `fixed` bits; and the decoded tensor."""
    scale, more = scales_of(x, way.scales)
    if way.trellis:
        n = torch.from_numpy(path(x.numpy(), step))
        half = (n % 2) / 2
        return fixed + more + static_bits(n / 2 - half, scale / (2 * step), half, PATH_NOISE), n * step
    n = torch.round(x / step)
    if way.lengths == "own histogram":
        bits = histogram_bits(n)
    elif way.lengths == "12-bit tables":
        bits = table_bits(n, scale / step)
    elif way.lengths == "Rice codes":
        bits = rice_bits(n, scale / step, way.scales == "tiles")
        more = 0.0 if way.scales == "tiles" else more
    else:
        bits = static_bits(n, scale / step, 0.0, 0.0)
    return fixed + more + bits, n * step


def at_rate(
    x: torch.Tensor, way: Way, rate: float, predicted: Callable[[Way, float], tuple[torch.Tensor, float]]
) -> tuple[float, float]:
    """Bits per element and relative error of a tensor `[R, C]` at the step that gives the wanted rate."""
    left, fixed = x, 0.0
    # The first pass estimates the step; the second chooses its prediction for that step.
    for _ in range(2):
        step = float(left.square().mean().sqrt()) * 2.0 ** (2.05 - rate)
        prediction, fixed = predicted(way, step)
        left = x - prediction
    step /= 2 if way.trellis else 1
    best: tuple[float, torch.Tensor] | None = None
    for _ in range(10):
        bits, decoded = coded(left, way, step, fixed + 8 * HEADER_BYTES)
        off = bits / x.numel() - rate
        if off <= 0 and (best is None or bits > best[0]):
            best = bits, decoded
            if off > -CLOSE:
                break
        # Doubling the step saves about one bit per element; at few bits the curve has jumps.
        step *= 2.0 ** (off + CLOSE / 4)
    if best is None or best[0] / x.numel() < rate - 10 * CLOSE:
        raise SystemExit(f"no step gives {way.name} {rate} bits an element")
    error = (left - best[1]).double().norm() / x.double().norm()
    return best[0] / x.numel(), float(error)


def predictor(
    x: torch.Tensor, ids: torch.Tensor | None
) -> Callable[[Way, float], tuple[torch.Tensor, float]]:
    """A function from the quantization step to a way's prediction of x and the prediction's bits."""

    @cache
    def by_tokens(which: str) -> tuple[torch.Tensor, float]:
        if not which:
            return torch.zeros_like(x), 0.0
        assert ids is not None
        return token_prediction(x, ids, which == "all others")[:2]

    @cache
    def singular(which: str) -> Singular:
        return Singular.of(x - by_tokens(which)[0])

    @cache
    def both(which: str, step: float) -> tuple[torch.Tensor, float]:
        (first, bits), (second, more) = by_tokens(which), singular(which).prediction(step)
        return first + second, bits + more

    return lambda way, step: both(way.tokens, step) if way.low_rank else by_tokens(way.tokens)


def tensors(files: Sequence[Path]) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor | None]]:
    """File, kind, fp32 `[R, C]` and the token ids of the rows, or None if the file has none."""
    for file in files:
        found = load_file(file)
        for name, x in sorted(found.items()):
            kind = name.split(".")[0]
            if kind in ("activation", "gradient"):
                ids = found.get("tokens")
                rows = x.reshape(-1, x.shape[-1]).float()
                own = None if ids is None else (ids[:, :-1] if kind == "activation" else ids[:, 1:]).flatten()
                # Gradients lie near 1e-5: scale them away from fp32's lower end.
                yield file.name, kind, rows / rows.abs().max(), own


def product(x: torch.Tensor, rate: float) -> tuple[float, float]:
    """Bits per element and relative error of `trellis-R`."""
    which, spec = codec(f"trellis-{rate}"), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    error = (which.decode(packed, spec) - x).double().norm() / x.double().norm()
    return 8 * packed.numel() / x.numel(), float(error)


def measure(files: Sequence[Path], ways: tuple[Way, ...] = WAYS) -> dict[str, Any]:
    """Results by way, file, kind and rate, and the share of rows whose token occurs earlier."""
    found: dict[tuple[str, str, str, float], list[tuple[float, float]]] = {}
    shares = []
    for file, kind, x, ids in tensors(files):
        if ids is not None:
            shares.append(token_prediction(x, ids, False)[2])
        predicted = predictor(x, ids)
        for rate in RATES:
            for way in ways:
                if ids is not None or not way.tokens:
                    key = way.name, file, kind, rate
                    found.setdefault(key, []).append(at_rate(x, way, rate, predicted))
            found.setdefault((PRODUCT, file, kind, rate), []).append(product(x, rate))
        print(file, kind, flush=True)
    rows = [
        {
            "way": name,
            "file": file,
            "kind": kind,
            "rate": rate,
            "tensors": len(all_of),
            "bits_per_element": round(sum(bits for bits, _ in all_of) / len(all_of), 4),
            "relative_error": float(f"{math.sqrt(sum(e * e for _, e in all_of) / len(all_of)):.4g}"),
        }
        for (name, file, kind, rate), all_of in found.items()
    ]
    return {"rows_with_their_token_before": sum(shares) / len(shares) if shares else None, "results": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description="Ways of coding boundary tensors, at equal true bits.")
    add_boundary_data(parser)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    started = time.monotonic()
    report = {
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **measure(boundary_files(parser, arguments.data)),
        "seconds": 0.0,
    }
    report["seconds"] = round(time.monotonic() - started)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in report["results"]:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
