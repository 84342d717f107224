"""Error of INT4 with outlier channels apart against 4-bit block floats, on tensors that blocks store.

    python -m scripts.experiments.outlier_storage --text TEXT

The scheme is Adacc's (section 3.2): the channels whose sum of magnitudes lies more than 3 standard deviations
above the mean channel's are kept in 16 bits, with their numbers; the others are rounded to a multiple of
their group's scale, max / 8, and clipped to -8..7. Groups are of as many neighbours in memory; a scale takes
32 bits as in the paper, or 16 as ours do.

Tensors: those of boundaries-step*.safetensors from `--data`, THINWIRE_DATA or ../shared/data, which are the
residual stream of a model of 124M parameters; and, of two small models trained on `--text`, what goes into
norms and products, what leaves the first product of the feed-forward half, and queries, keys and values.
One is made: normal numbers in which one channel of 100 is 20 times as large, as large pretrained models have
them.

Bits count everything that is kept. Error is the norm of the difference over the norm of the tensor. `against`
is the error over that of our 4-bit blocks at as many bits: a bit more halves theirs, as 5 bits confirm.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import packed_bytes
from node.config.schema import DataSection, ModelSection, RunConfig, RunSection, TrainingSection
from node.data.data import Corpus
from node.lab.results import commit, hardware
from node.model.blocks import Block
from scripts.report import RESULTS, add_boundary_data, boundary_files, write
from tests.support.reference_trainer import ReferenceTrainer

OUT = RESULTS / "outlier_storage.json"
Z_SCORE = 3.0
STEPS = 150
Made = tuple[float, Tensor]
"""Bits an element, and what comes back."""


def outlier_channels(x_tc: Tensor) -> Tensor:
    """Which channels Adacc keeps apart (equation 1): bool [C]."""
    sums = x_tc.double().abs().sum(0)
    return (sums - sums.mean()) / sums.std(correction=0).clamp_min(1e-300) > Z_SCORE


def int4(x_tc: Tensor, group: int, scale_bits: int, *, apart: bool, steps: int = 8) -> Made:
    """Symmetric INT4 in groups of neighbours (equation 2); `apart`: outlier channels are kept as they are.

    `steps`: a group's largest magnitude over its scale; 8 in the paper, which clips it to 7 where it is
    positive.
    """
    outliers = outlier_channels(x_tc) if apart else torch.zeros(x_tc.shape[1], dtype=torch.bool)
    rest = x_tc.float().masked_fill(outliers, 0.0)
    groups = rest.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True) / steps
    if scale_bits == 16:
        scale = scale.bfloat16().float()
    codes = (groups / scale.where(scale > 0, 1.0)).round().clamp(-8, 7)
    back = (codes * scale).view(x_tc.shape)
    back[:, outliers] = x_tc[:, outliers].float()
    kept = int(outliers.sum()) * (16 * x_tc.shape[0] + 16)
    return (4 * x_tc.numel() + scale_bits * len(groups) + kept) / x_tc.numel(), back


def asymmetric_int4(x_tc: Tensor, group: int) -> Made:
    """Equation 3, with the offset and the scale of each group in 32 bits."""
    groups = x_tc.float().reshape(-1, group)
    high, low = groups.amax(1, keepdim=True), groups.amin(1, keepdim=True)
    offset, scale = (high + low) / 2, (high - low) / 16
    codes = ((groups - offset) / scale.where(scale > 0, 1.0)).round().clamp(-8, 7)
    return 4 + 64 / group, (codes * scale + offset).view(x_tc.shape)


def blocks(x_tc: Tensor, bits: int, *, apart: bool = False) -> Made:
    """Our block floats; `apart`: with the same outlier channels kept as they are."""
    outliers = outlier_channels(x_tc) if apart else torch.zeros(x_tc.shape[1], dtype=torch.bool)
    rest = x_tc.float().masked_fill(outliers, 0.0)
    back = blockfloat.unpack(blockfloat.pack(rest, bits), rest.shape, bits, torch.float32)
    back[:, outliers] = x_tc[:, outliers].float()
    kept = int(outliers.sum()) * (16 * x_tc.shape[0] + 16)
    return (8 * packed_bytes(x_tc.shape, bits) + kept) / x_tc.numel(), back


WAYS: dict[str, Callable[[Tensor], Made]] = {
    "ours, 4 bits": lambda x: blocks(x, 4),
    "ours, 5 bits": lambda x: blocks(x, 5),
    "ours, 4 bits, outliers apart": lambda x: blocks(x, 4, apart=True),
    "INT4, groups of 128": lambda x: int4(x, 128, 32, apart=False),
    "INT4, groups of 128, outliers apart": lambda x: int4(x, 128, 32, apart=True),
    "the same, scales of 16 bits, max / 7": lambda x: int4(x, 128, 16, apart=True, steps=7),
    "INT4, a group a token, outliers apart": lambda x: int4(x, x.shape[1], 32, apart=True),
    "asymmetric INT4, groups of 128": lambda x: asymmetric_int4(x, 128),
}


def measured(kind: str, name: str, x: Tensor) -> dict[str, Any]:
    x_tc = x.reshape(-1, x.shape[-1])
    wide = x_tc.double()
    rows: dict[str, Any] = {}
    ours = 0.0
    for way, make in WAYS.items():
        bits, back = make(x_tc)
        error = float((back.double() - wide).norm() / wide.norm())
        ours = ours or error * 2**bits
        rows[way] = {
            "bits": round(bits, 4),
            "error": float(f"{error:.4g}"),
            "against": float(f"{error * 2**bits / ours:.4g}"),
        }
    return {
        "kind": kind,
        "tensor": name,
        "shape": list(x_tc.shape),
        "largest_over_rms": round(float(wide.abs().max() / wide.square().mean().sqrt()), 2),
        "outlier_channels": int(outlier_channels(x_tc).sum()),
        "ways": rows,
    }


def boundary_tensors(files: list[Path]) -> Iterator[tuple[str, str, Tensor]]:
    for file in files:
        step = file.stem.removeprefix("boundaries-")
        for key, x in sorted(load_file(file).items()):
            if key.startswith("activation"):
                yield "residual stream, 124M", f"{step} {key}", x


def made_tensor() -> Tensor:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    x[:, ::100] *= 20
    return x.bfloat16()


def block_tensors(family: str, text: Path) -> Iterator[tuple[str, str, Tensor]]:
    """What the plain blocks of a small trained model hand from one layer to the next, in one microbatch."""
    config = _config(family)
    corpus = Corpus.load(
        DataSection(path=str(text)),
        sequence=config.model.sequence,
        global_batch=config.training.global_batch,
        seed=0,
    )
    trainer = ReferenceTrainer(config, corpus)
    trainer.train(STEPS)
    found: list[tuple[str, str, Tensor]] = []

    def note(kind: str, name: str, module: nn.Module, *, output: bool) -> None:
        def hook(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
            found.append((kind, name, (made if output else given[0]).detach()))

        module.register_forward_hook(hook)

    for chunk in trainer.chunks:
        for unit, layer in zip(chunk.units, chunk.layers, strict=True):
            for name, module in layer.named_modules() if isinstance(layer, Block) else ():
                where = f"{family} {unit} {name}"
                if isinstance(module, nn.Linear):
                    note("input of a product", where, module, output=False)
                    if name.rsplit(".", 1)[-1] in ("gate", "up", "fc"):
                        note("input of the activation", where, module, output=True)
                    elif name.rsplit(".", 1)[-1] in ("q", "k", "v", "qkv"):
                        note("queries, keys, values", where, module, output=True)
                elif not list(module.children()) and list(module.parameters()):
                    note("input of a norm", where, module, output=False)
    trainer.validation_loss(corpus.batch(trainer.step)[: config.training.microbatch])
    yield from found


def _config(family: str) -> RunConfig:
    return RunConfig(
        run=RunSection(seed=0, steps=STEPS),
        model=ModelSection(
            family=family, layers=2, hidden=256, heads=8, kv_heads=8, ffn=768, vocab=256, sequence=128
        ),
        training=TrainingSection(global_batch=16, microbatch=16, lr=1e-3, warmup_steps=20),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="INT4 with outliers apart against 4-bit block floats.")
    add_boundary_data(parser)
    parser.add_argument("--text", type=Path, required=True, help="text to train the small models on")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    rows = [measured(*one) for one in boundary_tensors(boundary_files(parser, arguments.data))]
    for family in ("gpt2", "llama"):
        rows += [measured(*one) for one in block_tensors(family, arguments.text)]
    rows.append(measured("made: channels 20 times as large", "normal", made_tensor()))
    for row in rows:
        print(row["kind"], row["tensor"], *(f"{one['error']:.3f}" for one in row["ways"].values()))
    text = arguments.text
    write(
        arguments.out,
        {
            "experiment": "outlier_storage",
            "text": {"name": text.name, "sha256": sha256(text.read_bytes()).hexdigest()},
            "settings": {"z_score": Z_SCORE, "steps": STEPS, "hidden": 256, "layers": 2},
            "commit": commit(),
            "hardware": hardware(),
            "versions": {
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "results": rows,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
