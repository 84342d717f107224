"""TAH-Quant with other tiles, thresholds, splits and widths, beside every codec, on real boundary tensors.

    OMP_NUM_THREADS=1 python -m scripts.experiments.tah_ablation

The settings are those of the paper's ablations (TAH-Quant, section 5.3 and appendices E and F). The paper
reports losses; this script reports errors. Reads boundaries-step*.safetensors (`activation.*`, `gradient.*`
and `tokens`) from `--data`, THINWIRE_DATA or ../shared/data.

Bits are true ones: payload, metadata and the 64-byte header. Error is the norm of the difference over the
norm of the tensor, in fp64. The script first checks that with the default settings its quantizer gives the
values of the `tah` codec bit for bit. `outlier` tensors are the activations with every 96th channel made 20
times larger, as in large pretrained models; the models measured here have no such channels. *Off centre* are
the activations with a share of each tile's standard deviation added to all of the tile: the Hadamard
transform gathers a tile's mean in one element, 8 times as large, so its benefit depends on that share. The
report gives the share in the real tensors (`mean_over_deviation`).
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kernels.common.tiles import floor_to_half, normalised, powers_of_two, step_for, tensor_exponent
from kernels.tah.reference import EPSILON, entropy_bits
from node.lab.results import commit
from scripts.report import RESULTS, add_boundary_data, boundary_files
from wire.codecs.aqsgd import AqsgdCodec, SampleBatch
from wire.codecs.header import HEADER_BYTES
from wire.codecs.registry import codec, codec_names
from wire.codecs.sample_cache import SampleCache
from wire.spec import TensorSpec

OUT = RESULTS / "tah_ablation.json"
RATES = ("2", "2.5", "3", "3.25", "3.45", "4.25", "4.41", "6.25", "8.25")
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of the quantizer; the defaults are those of the `tah` codec."""

    tile: int = 64
    tau: float = 2.0
    high_bits: int = 4
    low_bits: int = 3
    share: float = 0.8
    """Share of the tiles that get `high_bits`."""
    choose: str = "entropy"
    """Which tiles get `high_bits`: those of highest `entropy`, of largest `range`, or `random` ones."""

    @property
    def name(self) -> str:
        split = (
            f"{100 * self.share:g}/{100 - 100 * self.share:g} of {self.high_bits} and {self.low_bits} bits"
        )
        tau = "infinite" if math.isinf(self.tau) else f"{self.tau:g}"
        return f"tile {self.tile}, tau {tau}, {split}, by {self.choose}"

    def bits(self, elements: int) -> float:
        """True bits per element. Flags and pivots that a setting never uses are not counted."""
        tiles = elements // self.tile
        high = round(self.share * tiles)
        codes = self.tile * (high * self.high_bits + (tiles - high) * self.low_bits)
        flag = 0 < high < tiles
        pivot = round(math.log2(self.tile)) if not math.isinf(self.tau) else 0
        return (codes + tiles * (16 + 16 + flag + pivot) + 8 * HEADER_BYTES) / elements


DEFAULT = Setting()
GAPS = 6 * 16
"""Most bytes that the alignment of the codec's sections adds, which are not counted here."""
TABLES: dict[str, list[Setting]] = {
    "tile": [Setting(tile=tile) for tile in (8, 16, 32, 64, 128)],
    "tau": [Setting(tau=tau) for tau in (0.0, 2.0, 4.0, math.inf)],
    "split": [Setting(share=share) for share in (1.0, 0.8, 0.5, 0.0)],
    "choice": [Setting(choose=choose) for choose in ("entropy", "random", "range")],
    "two bits": [
        Setting(high_bits=2, low_bits=3),
        Setting(high_bits=2, share=1.0),
        Setting(high_bits=4, low_bits=2),
    ],
}


def quantize(x: torch.Tensor, setting: Setting) -> torch.Tensor:
    """x `[1, S, C]`, C a multiple of the tile, quantized and back with `kernels.tah.reference`."""
    exponent = tensor_exponent(x)
    y = normalised(x.reshape(-1, setting.tile), powers_of_two(-exponent))
    high = _chosen(y, setting)
    outlier = _outliers(y, setting.tau)
    pivot = y.abs().argmax(1)
    y[outlier] = _hadamard(_swap(y[outlier], pivot[outlier]))
    base = floor_to_half(y.amin(1)).float()
    steps = torch.where(high, 2.0**setting.high_bits - 1, 2.0**setting.low_bits - 1)
    step = step_for(y.amax(1) - base, steps).float()
    codes = y.sub_(base[:, None]).mul_((1.0 / step)[:, None]).round_().clamp_(min=0.0)
    codes = torch.minimum(
        codes, torch.full_like(steps, 2.0 ** max(setting.high_bits, setting.low_bits) - 1)[:, None]
    )
    back = codes.mul_(step[:, None]).add_(base[:, None])
    back[outlier] = _swap(_hadamard(back[outlier]), pivot[outlier])
    for factor in powers_of_two(exponent):
        back.mul_(factor)
    return back.view(x.shape).to(x.dtype)


def _chosen(y: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Flags of the tiles that get `high_bits`; ties go to the lower index."""
    tiles = y.shape[0]
    if setting.choose == "entropy":
        _, exponent = torch.frexp(y.abs().amax(1).clamp_min(2.0**-63))
        rank = entropy_bits(torch.ldexp(y.abs(), (14 - exponent)[:, None]).round()).double()
    elif setting.choose == "range":
        rank = (y.amax(1) - y.amin(1)).double()
    else:
        rank = torch.rand(tiles, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    order = torch.sort(rank, descending=True, stable=True).indices
    flags = torch.zeros(tiles, dtype=torch.bool)
    flags[order[: round(setting.share * tiles)]] = True
    return flags


def _outliers(y: torch.Tensor, tau: float) -> torch.Tensor:
    if tau == 0:
        return torch.ones(y.shape[0], dtype=torch.bool)
    if math.isinf(tau):
        return torch.zeros(y.shape[0], dtype=torch.bool)
    magnitude = y.abs()
    threshold = magnitude.amax(1, keepdim=True) / torch.full((1, 1), tau) - EPSILON
    return (magnitude >= threshold).sum(1) == 1


def _swap(y: torch.Tensor, pivot: torch.Tensor) -> torch.Tensor:
    out = y.clone()
    rows = torch.arange(y.shape[0])
    out[:, 0] = y[rows, pivot]
    out[rows, pivot] = y[:, 0]
    return out


def _hadamard(y: torch.Tensor) -> torch.Tensor:
    size, h = y.shape[1], 1
    while h < size:
        pairs = y.view(-1, size // (2 * h), 2, h)
        y = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2).view(
            -1, size
        )
        h *= 2
    return y * (1 / math.sqrt(size))


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """x `[1, S, C]` with every 96th channel 20 times larger."""
    large = x.clone()
    large[:, :, ::96] *= 20
    return large


OFFSETS = (0.25, 0.5, 1.0)
OFFSET_TAUS = (0.0, 2.0, math.inf)
QUANTILES = (0.5, 0.9, 0.99, 1.0)


def off_centre(x: torch.Tensor, share: float) -> torch.Tensor:
    """x `[1, S, C]` in fp32, `share` of each tile's standard deviation added to the tile."""
    tiles = x.float().reshape(-1, DEFAULT.tile)
    return (tiles + share * tiles.std(1, keepdim=True)).reshape(x.shape)


def mean_over_deviation(x: torch.Tensor) -> list[float]:
    """`QUANTILES` of |mean| over standard deviation of x's tiles."""
    tiles = x.float().reshape(-1, DEFAULT.tile)
    found = tiles.mean(1).abs() / tiles.std(1).clamp_min(torch.finfo(torch.float32).tiny)
    return [round(value, 3) for value in torch.quantile(found, torch.tensor(QUANTILES)).tolist()]


def off_centre_rows(tensors: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    """Errors over the norm of the tensors without the offset."""
    for share in OFFSETS:
        moved = [off_centre(x, share) for x in tensors]
        for tau in OFFSET_TAUS:
            setting = Setting(tau=tau)
            found = []
            for x, y in zip(tensors, moved, strict=True):
                error = relative_error(quantize(y, setting), y) * float(y.double().norm() / x.double().norm())
                found.append((setting.bits(x.numel()), error))
            name = f"tau {'infinite' if math.isinf(tau) else f'{tau:g}'}, {share:g} deviations off"
            yield row("tau, tiles off centre", name, "activation", found)


def relative_error(decoded: torch.Tensor, x: torch.Tensor) -> float:
    wide = x.double()
    return float((decoded.double() - wide).norm() / wide.norm())


def row(group: str, name: str, kind: str, tensors: list[tuple[float, float]]) -> dict[str, Any]:
    """(bits, error) of every tensor of a kind: bits are their mean, errors their root mean square."""
    bits = sum(bits for bits, _ in tensors) / len(tensors)
    error = math.sqrt(sum(error * error for _, error in tensors) / len(tensors))
    return {
        "group": group,
        "name": name,
        "kind": kind,
        "tensors": len(tensors),
        "bits_per_element": round(bits, 4),
        "relative_error": float(f"{error:.4g}"),
    }


def check_default(tensors: list[torch.Tensor]) -> None:
    """Check that this file's quantizer with the default settings gives the values and bits of `tah`."""
    tah = codec("tah")
    for x in tensors:
        spec = TensorSpec(x.dtype, tuple(x.shape))
        packed = tah.encode(x)
        if not torch.equal(quantize(x, DEFAULT), tah.decode(packed, spec)):
            raise SystemExit("with the product's settings this quantizer gives other values than `tah`")
        if abs(DEFAULT.bits(x.numel()) * x.numel() - 8 * packed.numel()) > 8 * GAPS:
            raise SystemExit("with the product's settings this quantizer counts other bits than `tah`")


def codec_rows(kind: str, tensors: list[torch.Tensor]) -> Iterator[dict[str, Any]]:
    plain = [name for name in codec_names() if name.startswith(("fixed", "tah"))]
    for name in [*plain, *(f"trellis-{rate}" for rate in RATES)]:
        found = []
        for x in tensors:
            packed = codec(name).encode(x)
            decoded = codec(name).decode(packed, TensorSpec(x.dtype, tuple(x.shape)))
            found.append((8 * packed.numel() / x.numel(), relative_error(decoded, x)))
        yield row("codec", name, kind, found)


def aqsgd_rows(files: list[dict[str, torch.Tensor]], gap: str) -> Iterator[dict[str, Any]]:
    """Compare the activations of the newest file with the oldest's, if both are of the same tokens."""
    first, last = files[0], files[-1]
    names = sorted(name for name in last if name.startswith("activation"))
    if len(files) < 2 or not torch.equal(first["tokens"], last["tokens"]):
        return
    for bits in range(2, 9):
        which = codec(f"aqsgd-{bits}")
        assert isinstance(which, AqsgdCodec)
        found = []
        for name in names:
            cache = SampleCache(1, tuple(last[name].shape[1:]), since=0)
            which.of(SampleBatch(cache, (0,), (False,), 0)).encode(first[name].float())
            cache.commit()
            x = last[name].float()
            packed = which.of(SampleBatch(cache, (0,), (True,), 0)).encode(x)
            cache.commit()
            decoded = cache.recall([0], x.device)
            found.append((8 * packed.numel() / x.numel(), relative_error(decoded, x)))
        yield row("codec with a memory", f"{which.name}, {gap}", "activation", found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Ablations of TAH-Quant on real boundary tensors.")
    add_boundary_data(parser)
    parser.add_argument("--json", type=Path, default=OUT)
    arguments = parser.parse_args()
    files = boundary_files(parser, arguments.data)
    torch.set_num_threads(1)
    contents = [load_file(file) for file in files]
    rows: list[dict[str, Any]] = []
    centres: dict[str, list[list[float]]] = {}
    for kind in ("activation", "gradient", "outlier"):
        source = "activation" if kind == "outlier" else kind
        tensors = [
            x for content in contents for name, x in sorted(content.items()) if name.startswith(source)
        ]
        if kind == "outlier":
            tensors = [with_outliers(x) for x in tensors]
        check_default(tensors)
        for group, settings in TABLES.items():
            for setting in settings:
                found = [(setting.bits(x.numel()), relative_error(quantize(x, setting), x)) for x in tensors]
                rows.append(row(group, setting.name, kind, found))
                print(rows[-1], flush=True)
        if kind != "outlier":
            centres[kind] = [mean_over_deviation(x) for x in tensors]
        made_here = [*(off_centre_rows(tensors) if kind == "activation" else ()), *codec_rows(kind, tensors)]
        for made in made_here:
            rows.append(made)
            print(made, flush=True)
    first, last = (int(file.stem.removeprefix("boundaries-step")) for file in (files[0], files[-1]))
    for made in aqsgd_rows(contents, f"{last - first} steps later"):
        rows.append(made)
        print(made, flush=True)
    report = {
        "experiment": "tah_ablation",
        "commit": commit(),
        "data": [file.name for file in files],
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "runs": 1,
        "seed": SEED,
        "mean_over_deviation": {"quantiles": QUANTILES, **centres},
        "results": rows,
    }
    # One result per line.
    lines = json.dumps(report, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    arguments.json.write_text(lines + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
