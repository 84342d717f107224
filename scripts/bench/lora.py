"""LoRA on a stage of a model of Llama 3's 8B shape: memory and tokens/s beside full training.

    python -m scripts.bench.lora [--blocks 4] [--samples 1] [--length 4096] [--steps 4] [--only WORDS]

On a GPU. A stage in the middle of the pipeline takes steps of four microbatches, two in flight, as a node
does (CUDA graphs, autocast to bfloat16), without a network. Each setting runs in a process of its own. It
also counts the stage's bytes in a snapshot, and those of one gradient group as sent to another row, packed;
for the whole model both follow from shapes.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import LoraSection, ModelSection, PipelineSection, RunConfig, TrainingSection
from node.lab.results import commit
from node.model.lora_shapes import trained_specs
from node.model.units import state_bytes, unit_names
from node.schedule.gradient_groups import model_pieces
from node.stage.stage_model import StageModel
from node.training.group_sums import CodecPacking, PieceSums
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_memory
from scripts.report import RESULTS, version

OUT = RESULTS / "lora.json"
MODEL = ModelSection(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, sequence=4096, rope_theta=500000.0
)
AUTOCAST = TrainingSection(global_batch=4, microbatch=1, precision="bfloat16", warmup_steps=0)
SMALL = replace(AUTOCAST, weights="bfloat16", gradients="fp8", moments="fp8")
RANK = 16
SETTINGS: dict[str, tuple[TrainingSection, LoraSection]] = {
    "full, float32 weights and moments": (AUTOCAST, LoraSection()),
    "full, bfloat16 weights, fp8 gradients and moments": (SMALL, LoraSection()),
    **{
        f"LoRA rank {RANK}, base {base}": (AUTOCAST, LoraSection(rank=RANK, base=base))
        for base in ("bf16", "8", "4")
    },
    f"LoRA rank {RANK}, base bf16, dropout": (AUTOCAST, LoraSection(rank=RANK, dropout=0.05)),
}
ORDER = ("f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3")
STAGE = 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure LoRA on a stage of an 8B shape.")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the stage")
    parser.add_argument("--samples", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps, after three that compile and capture"
    )
    parser.add_argument("--only", default="", help="measure settings whose name has these words")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    if arguments.setting is not None:
        found = measure(configured(arguments.setting, arguments), arguments.steps)
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    report: dict[str, Any] = {
        "experiment": "lora",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "model": asdict(MODEL),
        "blocks": arguments.blocks,
        "samples": arguments.samples,
        "length": arguments.length,
        "steps": arguments.steps,
        "settings": {},
    }
    for name in (name for name in SETTINGS if arguments.only in name):
        command = [sys.executable, "-m", "scripts.bench.lora", "--setting", name]
        for key in ("blocks", "samples", "length", "steps"):
            command += [f"--{key}", str(getattr(arguments, key))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stderr, file=sys.stderr)
            return 1
        report["settings"][name] = {**json.loads(done.stdout), **of_the_whole(name)}
        print(name, json.dumps(report["settings"][name]), flush=True)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def configured(setting: str, arguments: argparse.Namespace) -> RunConfig:
    """Three stages; the middle one holds the measured blocks."""
    training, lora = SETTINGS[setting]
    return RunConfig(
        model=replace(MODEL, layers=arguments.blocks + 2, sequence=arguments.length),
        training=replace(training, microbatch=arguments.samples, global_batch=4 * arguments.samples),
        lora=lora,
        pipeline=PipelineSection(stages=3, split=(1, arguments.blocks, 1), window=0),
    )


def measure(config: RunConfig, steps: int) -> dict[str, float]:
    """Bytes and speed of the stage, and what it sends besides activations."""
    device = torch.device("cuda")
    model = StageModel(config, device)
    model.build(STAGE, 3)
    built = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    shape = (config.training.microbatch, config.model.sequence, config.model.hidden)
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(shape, generator=generator, device=device)
    upstream = torch.randn(shape, generator=generator, device=device) * 1e-3

    def step() -> None:
        model.begin_step()
        for action in ORDER:
            microbatch = int(action[1])
            if action[0] == "f":
                model.forward(0, microbatch, hidden.clone())
            else:
                model.backward(0, microbatch, upstream.clone())
        model.squared_norms()
        model.apply(1e-4, 1.0)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) / steps
    devices = Devices(
        on_cpu=False, multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count
    )
    estimate = stage_memory(config, 3, devices)[STAGE]
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    units = model.optimizer.units
    model.begin_step()
    model.forward(0, 0, hidden.clone())
    model.backward(0, 0, upstream.clone())
    sums, pieces = PieceSums(CodecPacking(device)), model_pieces(config)
    gradients = model.take_gradients(units)
    sent = sum(sums.leaf(piece, gradients[unit]).nbytes for unit in units for piece in pieces[unit])
    kept = sum(tensor.nbytes for unit in units for tensor in model.unit_state(unit).values())
    return {
        "seconds_a_step": seconds,
        "tokens_per_second": config.training.global_batch * config.model.sequence / seconds,
        "state_bytes": built,
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "estimated_bytes": estimate.total - estimate.fixed,
        "stage_snapshot_bytes": kept,
        "stage_sync_bytes": sent,
    }


def of_the_whole(setting: str) -> dict[str, int]:
    """Bytes of a snapshot of the 8B model, and of its gradients in float32."""
    training, lora = SETTINGS[setting]
    units = [trained_specs(MODEL, lora, unit) for unit in unit_names(MODEL)]
    return {
        "snapshot_bytes": sum(state_bytes(specs, training.moments) for specs in units),
        "gradient_bytes": sum(4 * spec.elements for specs in units for spec in specs),
    }


if __name__ == "__main__":
    sys.exit(main())
