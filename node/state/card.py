"""Writes the model card of an exported folder: settings, data, tokens and losses of the run. Torch-free.

It contains no paths of the exporting machine, only the names of files and folders.
"""

import logging
import math
from pathlib import Path

from node.config.schema import DataSection, LoraSection, RunConfig, TrainingSection
from node.model.optimizers import optimizer_words
from node.state.hub import hub_repository
from node.state.manifest import Manifest
from node.telemetry import events
from node.telemetry.format import NO_LABELS, loss_text
from node.telemetry.history import read_history
from node.training.schedule import DECAY_SHARE
from wire.errors import RunError

log = logging.getLogger(__name__)


def model_card(run_directory: Path, manifest: Manifest, config: RunConfig, dtype: str, library: str) -> str:
    """The text of `README.md`.

    Args:
        config: the run file in `manifest`.
        dtype: the dtype of the exported weights.
        library: the library that loads the folder, `transformers` or `peft`.
    """
    model, training, pipeline = config.model, config.training, config.pipeline
    rows = [
        ("started from", _shown(model.from_)),
        *([("adapters", _adapters(config.lora))] if config.lora.rank else []),
        ("steps", str(manifest.step)),
        ("tokens", f"{manifest.step * config.tokens_per_step:,}"),
        ("text", _text(config.data)),
        *([("held-out text", _name(config.data.valid))] if config.data.valid else []),
        ("tokenizer", _name(config.data.tokenizer)),
        ("blocks, width, sequence", f"{model.layers}, {model.hidden}, {model.sequence}"),
        ("batch", f"{training.global_batch} samples"),
        ("learning rate", f"{training.lr:g}"),
        ("schedule", _schedule(training, config.run.steps)),
        ("optimizer", _optimizer(training, config.lora)),
        ("precision", training.precision),
        ("codecs", f"{pipeline.forward_codec}, {pipeline.backward_codec}"),
        ("seed", str(config.run.seed)),
        ("weights here", dtype),
        ("SHA-256 of the weights", manifest.weights_sha256),
        *_losses(run_directory, manifest.step),
    ]
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)
    repository = hub_repository(model.from_)
    base = f"base_model: {repository.name}\n" if repository is not None else ""
    return (
        f"---\nlibrary_name: {library}\n{base}pipeline_tag: text-generation\n---\n\n"
        f"# {' '.join(config.run.name.split())}\n\nTrained with thinwire across several machines.\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _losses(run_directory: Path, step: int) -> list[tuple[str, str]]:
    """The first and the last loss up to a step; the newest and the best held-out loss, if any."""
    losses: dict[int, float] = {}
    held_out: dict[int, events.HeldOutLoss] = {}
    # A step that ran again after a rollback occurs twice; the last one counts.
    try:
        for entry in read_history(run_directory):
            match entry.event:
                case events.StepDone() as done if done.step <= step:
                    losses[done.step] = done.loss
                case events.HeldOutLoss() as measured if measured.step <= step:
                    held_out[measured.step] = measured
                case _:
                    pass
    except RunError as error:
        log.warning("%s; the model card has no losses", error)
        return []
    ends = dict.fromkeys((min(losses), max(losses))) if losses else ()
    rows = [(f"loss of step {end}", loss_text(losses[end])) for end in ends]
    if not held_out:
        return rows
    newest = held_out[max(held_out)]
    finite = [loss for loss in held_out.values() if math.isfinite(loss.uncompressed)]
    best = min(finite, key=lambda loss: loss.uncompressed, default=None)
    trained = "" if newest.loss is None else f", {newest.loss:.4f} with the run's codecs on the links"
    rows += [
        (
            f"held-out loss at step {newest.step}, {newest.samples} samples",
            f"{newest.uncompressed:.4f}{trained}" if newest.samples else NO_LABELS,
        ),
    ]
    if best is not None:
        rows.append(("best held-out loss", f"{best.uncompressed:.4f}, at step {best.step}"))
    return rows


def _text(data: DataSection) -> str:
    sources = data.sources or (data.path,)
    weights = data.weights or (1.0,) * len(sources)
    whole = sum(weights)
    shares = [f" ({100 * weight / whole:.3g} %)" if len(sources) > 1 else "" for weight in weights]
    named = ", ".join(f"{_name(source)}{share}" for source, share in zip(sources, shares, strict=True))
    chat = "; conversations, loss on the assistant's tokens" if data.masks_labels else ""
    apart = "; attention within documents" if data.separate_documents else ""
    return f"{named}{chat}{apart}"


def _schedule(training: TrainingSection, steps: int) -> str:
    warmup = f"{training.warmup_steps} warmup steps, then " if training.warmup_steps else ""
    if training.schedule == "constant":
        return f"{warmup}constant"
    end = f"to {100 * training.min_lr_ratio:.3g} %"
    if training.schedule == "wsd":
        decay = training.decay_steps or max(1, steps // DECAY_SHARE)
        return f"{warmup}constant, then linear {end} over the last {decay} of {steps} steps (wsd)"
    return f"{warmup}{training.schedule} {end} at step {steps}"


def _optimizer(training: TrainingSection, lora: LoraSection) -> str:
    clip = f"gradients clipped to {training.clip:g}" if training.clip else "no clipping"
    return f"{optimizer_words(training, lora)}, {clip}"


def _adapters(lora: LoraSection) -> str:
    where = ", ".join(lora.targets) or "all projections of the blocks"
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}{dropout}, on {where}; base in {lora.base}"


def _name(source: str) -> str:
    return Path(source).name or source


def _shown(source: str) -> str:
    """The checkpoint that the run started from, without the path of a folder."""
    repository = hub_repository(source)
    if repository is not None:
        return str(repository)
    return _name(source) if source else "random weights"


def _cell(value: str) -> str:
    return " ".join(value.split()).replace("|", "\\|")
