"""Fine-tuning a 124M checkpoint, against transformers and peft: losses of the same steps.

    python -m scripts.experiments.fine_tuning [--steps 200] [--stage-steps 40] [--tiny]

A model of GPT-2's smallest shape is trained here from random weights on the standard library's sources, with
byte-pair encoding made from the same text, and saved by transformers. From that folder, in full and with
LoRA, the same steps are taken on this repository's text by the reference trainer and by transformers, with
peft for the adapters: same samples, learning rates, clipping and initial adapters. Then the reference trainer
takes some of the steps as four stages with the `fp32` codec between them, and the losses must have the same
bits.
"""

import argparse
import asyncio
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from node.config.schema import (
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.data.shards import TrainingData, load_data
from node.lab.results import commit, hardware
from node.model.chunk import compute_precision
from node.model.units import unit_names
from node.schedule.placement import split_units
from node.stage.machine_info import fix_order
from node.state.adapters import adapter_config, peft_name
from node.state.families import read_config, tensors, write_config
from node.state.start import read_units
from node.training.schedule import learning_rate
from scripts.report import RESULTS, ROOT, version, write
from tests.support.reference_trainer import ReferenceTrainer
from wire.codecs.registry import codec
from wire.spec import TensorKey, TensorSpec

OUT = RESULTS / "fine_tuning.json"
STAGES = 4
SEED = 11
MODEL = ModelSection(
    family="gpt2",
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=3072,
    vocab=50257,
    sequence=512,
    tied=True,
)
TINY = replace(MODEL, layers=4, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=512, sequence=32)
TRAINED = ("node", "wire", "kernels", "tests", "scripts", "deploy")
"""Folders of the repository that a model is fine-tuned on."""
HELD_OUT = 32
"""Samples."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare fine-tuning with transformers and peft.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage-steps", type=int, default=40, help="steps of the four stages")
    parser.add_argument("--first-steps", type=int, default=300, help="steps that make the checkpoint")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix_order(device)
    with tempfile.TemporaryDirectory() as temporary:
        report = compare(arguments, device, Path(temporary))
    write(arguments.out, report)
    within = all(way["largest_difference"] <= 0.01 for way in report["ways"].values())
    same = all(way["stages_equal_one"] for way in report["ways"].values())
    print(f"within 1 %: {within}; four stages have the bits of one: {same}")
    return 0 if within and same else 1


def compare(arguments: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Make the checkpoint, then fine-tune it in each way."""
    checkpoint = folder / "checkpoint"
    first = make_checkpoint(arguments, device, checkpoint)
    text = folder / "text"
    for name in TRAINED:
        ignored = shutil.ignore_patterns("results", "golden", "__pycache__")
        shutil.copytree(ROOT / name, text / name, ignore=ignored)
    full = fine_tuning(arguments, checkpoint, text, lr=1e-4)
    adapters = LoraSection(rank=8, alpha=16.0, base="float32")
    ways = {"full": full, "LoRA": replace(full, lora=adapters, training=replace(full.training, lr=1e-3))}
    data = load_data(full, folder=folder / "tokens")
    found = {}
    for name, config in ways.items():
        found[name] = fine_tune(config, data, device, arguments)
        print(name, {key: value for key, value in found[name].items() if key != "losses"}, flush=True)
    data.close()
    return {
        "experiment": "fine_tuning",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else hardware(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "python": platform.python_version(),
        "precision": arguments.precision,
        "steps": arguments.steps,
        "runs": 1,
        "samples": full.training.global_batch,
        "sequence": full.model.sequence,
        "checkpoint": first,
        "ways": found,
    }


# ---- the checkpoint


def make_checkpoint(arguments: argparse.Namespace, device: torch.device, folder: Path) -> dict[str, Any]:
    """Train a model from random weights and save it, with its tokenizer, as transformers does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = TINY if arguments.tiny else MODEL
    make_tokenizer(model.vocab, folder)
    batch = 4 if arguments.tiny else 32
    config = RunConfig(
        run=RunSection(steps=arguments.first_steps, seed=SEED),
        model=model,
        data=DataSection(tokenizer=str(folder)),
        training=TrainingSection(
            global_batch=batch,
            microbatch=batch,
            lr=1e-3 if arguments.tiny else 6e-4,
            warmup_steps=min(40, arguments.first_steps),
            precision="bfloat16" if device.type == "cuda" else "float32",
        ),
        pipeline=PipelineSection(stages=1),
    )
    data = load_data(config)
    trainer = ReferenceTrainer(config, data, device=device)
    begun = time.perf_counter()
    steps = trainer.train(arguments.first_steps)
    seconds = time.perf_counter() - begun
    data.close()
    theirs = GPT2LMHeadModel(GPT2Config(**write_config(model, "float32")))
    state = {}
    for unit, parameters in trainer.chunks[0].named_units():
        named = tensors(model, unit)
        for name, value in parameters.items():
            kept = value.detach().float().cpu()
            state[named[name].name] = kept.t() if named[name].transposed else kept
    missing, unknown = theirs.load_state_dict(state, strict=False)
    assert not missing and not unknown, (missing, unknown)
    theirs.save_pretrained(folder)
    return {
        "parameters": sum(value.numel() for value in theirs.parameters()),
        "steps": arguments.first_steps,
        "tokens": arguments.first_steps * config.tokens_per_step,
        "seconds": seconds,
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
    }


def make_tokenizer(vocab: int, folder: Path) -> None:
    """Byte-level BPE of the standard library's sources, as `tokenizer.json`."""
    import tokenizers

    from node.data.text import standard_library_files

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train([str(path) for path in standard_library_files()], trainer)
    folder.mkdir(parents=True)
    bpe.save(str(folder / "tokenizer.json"))


# ---- fine-tuning


def fine_tuning(arguments: argparse.Namespace, checkpoint: Path, text: Path, lr: float) -> RunConfig:
    """A run from the checkpoint on the text, in full."""
    described = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    sequence = (TINY if arguments.tiny else MODEL).sequence
    found = read_config(described, "config.json", sequence)
    return RunConfig(
        run=RunSection(steps=arguments.steps, seed=SEED),
        model=ModelSection(**{**found, "from_": str(checkpoint)}),
        data=DataSection(path=str(text), tokenizer=str(checkpoint)),
        training=TrainingSection(
            global_batch=8,
            microbatch=4,
            lr=lr,
            warmup_steps=min(20, arguments.steps),
            precision=arguments.precision,
        ),
        pipeline=PipelineSection(stages=STAGES, forward_codec="fp32", backward_codec="fp32"),
    )


def fine_tune(
    config: RunConfig, data: TrainingData, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Losses of the same steps by the reference trainer, by transformers and by four stages."""
    weights = asyncio.run(read_units(config.model, unit_names(config.model)))
    windows = data.validation_windows(HELD_OUT)
    trainer = ReferenceTrainer(config, data, device=device)
    trainer.start_from(weights)
    initial = {
        peft_name(config, unit, name): value.detach().clone()
        for unit, parameters in trainer.chunks[0].named_units()
        for name, value in parameters.items()
        if config.lora.rank
    }
    before = trainer.validation_loss(windows)
    begun = time.perf_counter()
    ours = [step.loss for step in trainer.train(config.run.steps)]
    seconds = time.perf_counter() - begun
    after = trainer.validation_loss(windows)
    del trainer
    torch.use_deterministic_algorithms(False)  # transformers need not have a fixed order
    theirs = Theirs(config, device, initial)
    their_before = theirs.held_out(windows)
    begun = time.perf_counter()
    their_losses = [theirs.step(step, data) for step in range(config.run.steps)]
    their_seconds = time.perf_counter() - begun
    their_after = theirs.held_out(windows)
    del theirs
    fix_order(device)
    pairs = [*zip(ours, their_losses, strict=True), (before, their_before), (after, their_after)]
    return {
        "losses": [round(loss, 5) for loss in ours],
        "their_losses": [round(loss, 5) for loss in their_losses],
        "held_out": [before, after],
        "their_held_out": [their_before, their_after],
        "largest_difference": max(abs(own - their) / their for own, their in pairs),
        "last_difference": abs(ours[-1] - their_losses[-1]) / their_losses[-1],
        "seconds": seconds,
        "their_seconds": their_seconds,
        "stage_steps": arguments.stage_steps,
        "stages_equal_one": staged(config, data, device, weights, arguments.stage_steps)
        == ours[: arguments.stage_steps],
    }


def staged(
    config: RunConfig, data: TrainingData, device: torch.device, weights: Mapping[str, Any], steps: int
) -> list[float]:
    """Losses of four stages, every tensor between them through the `fp32` codec."""
    which = codec("fp32")

    def cross(tensor: Tensor, _: TensorKey) -> Tensor:
        return which.decode(which.encode(tensor), TensorSpec(tensor.dtype, tuple(tensor.shape)))

    trainer = ReferenceTrainer(
        config, data, groups=split_units(config.model, STAGES), boundary=cross, device=device
    )
    trainer.start_from(weights)
    return [step.loss for step in trainer.train(steps)]


class Theirs:
    """The same model in transformers, with peft's adapters if the run has adapters."""

    def __init__(self, config: RunConfig, device: torch.device, initial: Mapping[str, Tensor]) -> None:
        """`initial`: adapters by peft's names."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model.from_, dtype=torch.float32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        if config.lora.rank:
            from peft import LoraConfig, get_peft_model

            settings = adapter_config(config)
            for key in ("peft_type", "base_model_name_or_path", "revision", "inference_mode"):
                del settings[key]
            model = get_peft_model(model, LoraConfig(**settings))
            named = dict(model.named_parameters())
            with torch.no_grad():
                for name, value in initial.items():
                    named[name.replace(".weight", ".default.weight")].copy_(value)
        self._model: nn.Module = model.to(device).train()
        self._config, self._device = config, device
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        training = config.training
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [one for one in trained if one.ndim >= 2], "weight_decay": training.weight_decay},
                {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
            ],
            betas=(training.beta1, training.beta2),
            eps=training.eps,
        )
        self._trained = trained

    def step(self, step: int, data: TrainingData) -> float:
        """Take a step; returns its mean loss."""
        config, total = self._config, 0.0
        rows = torch.from_numpy(data.batch(step).astype("int64")).to(self._device)
        for part in rows.chunk(config.microbatches):
            loss = self._loss(part) / config.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._trained, config.training.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, config.training, config.run.steps)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    @torch.no_grad()
    def held_out(self, windows: Any) -> float:
        """Mean loss over windows [n, sequence + 1]."""
        rows = torch.from_numpy(windows.astype("int64")).to(self._device)
        parts = rows.split(self._config.training.microbatch)
        return sum(self._loss(part).item() * len(part) for part in parts) / len(rows)

    def _loss(self, rows: Tensor) -> Tensor:
        with compute_precision(self._config.training.precision, self._device):
            logits = self._model(input_ids=rows[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


if __name__ == "__main__":
    sys.exit(main())
