"""Time what a step's gradient groups cost a GPU beside its passes: pieces one by one, and together.

    python -m scripts.bench.gpu_sync --out FILE [--codecs fp32 fixed-8 ...]

A model of 124 million parameters with four groups by default; gradients are random. `separately` packs and
reads back each piece by itself, with a look from the host at each; `together` is
`tests.support.device_sums.DeviceSums`. Both in turn in one run, on the same gradients, and first compared:
values must be equal to the bit. Seconds are wall time of a whole step's sums, the device waited for.
`--device cpu` with a small model tries the script without a GPU.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.config.schema import ModelSection, PipelineSection, RunConfig, TrainingSection
from node.lab.results import commit, hardware
from node.model.units import parameter_specs, unit_names
from node.schedule.gradient_groups import model_pieces
from node.training.group_sums import GroupSums
from scripts.experiments.convergence import DevicePacking
from scripts.report import RESULTS, write
from tests.support.device_sums import DeviceSums, ModelSums

CODECS = ("fp32", "bf16", "fixed-8", "trellis-4.41")

Gradients = dict[str, dict[str, Tensor]]


def configured(arguments: argparse.Namespace, codec: str) -> RunConfig:
    return RunConfig(
        model=ModelSection(
            layers=arguments.layers,
            hidden=arguments.hidden,
            heads=12,
            kv_heads=12,
            ffn=arguments.ffn,
            vocab=arguments.vocab,
            sequence=1024,
            tied=True,
        ),
        training=TrainingSection(global_batch=8 * arguments.groups, microbatch=8),
        pipeline=PipelineSection(stages=1, window=0, groups=arguments.groups, sync_codec=codec),
    )


def gradients(config: RunConfig, group: int, device: torch.device) -> Gradients:
    """Of one group, as large as a model's early in training, and different for each parameter."""
    generator = torch.Generator(device=device).manual_seed(group)
    found: Gradients = {}
    for number, (unit, pieces) in enumerate(model_pieces(config).items()):
        ends = {name: end for piece in pieces for name, _, end in piece.parts}
        found[unit] = {
            name: torch.randn(end, generator=generator, device=device) * 10.0 ** (-4 - (number + place) % 3)
            for place, (name, end) in enumerate(ends.items())
        }
    return found


def step(sums: ModelSums, given: list[Gradients]) -> Gradients:
    for group, of_group in enumerate(given):
        sums.group_done(group, of_group)
    return dict(sums.finish())


def seconds(work: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def measure(arguments: argparse.Namespace, codec: str, device: torch.device) -> dict[str, Any]:
    config = configured(arguments, codec)
    units = unit_names(config.model)
    given = [gradients(config, group, device) for group in range(arguments.groups)]
    ways: dict[str, Callable[[], ModelSums]] = {
        "separately": lambda: GroupSums(config, units, DevicePacking(), of_round=False),
        "together": lambda: DeviceSums(config, units, of_round=False),
    }
    found = {name: step(make(), given) for name, make in ways.items()}  # compiles too
    for unit, values in found.pop("separately").items():
        for name, value in values.items():
            if not torch.equal(value.view(torch.int32), found["together"][unit][name].view(torch.int32)):
                raise SystemExit(f"{codec}: {name} of {unit} differs")
    del found
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.runs):
        for name, make in ways.items():
            taken[name].append(seconds(lambda make=make: step(make(), given), arguments.wait))
    row = {
        "codec": codec,
        "pieces": sum(len(pieces) for pieces in model_pieces(config).values()),
        "parameters": sum(one.elements for unit in units for one in parameter_specs(config.model, unit)),
        "groups": arguments.groups,
        "runs": arguments.runs,
        "equal": True,
        **{f"{name}_seconds": statistics.median(values) for name, values in taken.items()},
        **{f"{name}_spread_seconds": [min(values), max(values)] for name, values in taken.items()},
    }
    print(
        f"{codec}: {row['pieces']} pieces separately {row['separately_seconds']:.3f} s, "
        f"together {row['together_seconds']:.4f} s",
        flush=True,
    )
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the sums of a step's gradient groups on a GPU.")
    for name, number in (
        ("layers", 12),
        ("hidden", 768),
        ("ffn", 2048),
        ("vocab", 50304),
        ("groups", 4),
        ("runs", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default {number}")
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_sync.json")
    arguments = parser.parse_args()
    on_gpu = arguments.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU, or --device cpu")
    arguments.wait = torch.cuda.synchronize if on_gpu else lambda: None
    report: dict[str, Any] = {
        "bench": "gpu_sync",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if on_gpu else hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": [],
    }
    for codec in arguments.codecs:
        report["rows"].append(measure(arguments, codec, torch.device(arguments.device)))
        write(arguments.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
