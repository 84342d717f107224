"""Proposes a run file for given machines: the largest model that fits their memory, lines and time, or a
given model, such as a mixture of experts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from node.config.schema import (
    DataSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    StorageSection,
    TrainingSection,
)
from node.model.lora_shapes import FORMS
from node.run_file.loader import toml_value
from node.view.explain import Explanation, explain
from node.view.machines import Machine
from node.view.totals import MOST_PASSES, Totals, better_codecs, better_order, step_seconds, totals
from wire.errors import UserError

DAY = 86400.0
SHAPES = (
    *((4, 256, 4), (6, 384, 6), (8, 512, 8), (12, 768, 12)),
    *((24, 1024, 16), (24, 2048, 16), (32, 2560, 20)),
)
"""Blocks, width and heads, smallest model first."""
RATES = {256: 2e-3, 384: 1.5e-3, 512: 1e-3, 768: 6e-4, 1024: 4e-4, 2048: 3e-4, 2560: 2e-4}
"""The peak learning rate of AdamW, by width."""
MUON_WIDTHS, MUON_RATE = range(768, 1025), 2
"""The widths at which Muon reaches a lower loss than AdamW in as many steps, and the factor of its learning
rate. Measured with one seed at 768 (scripts/results/optimizers.json); one trial at 1024 is not on record."""
TOKENS_A_PARAMETER = 20
"""A larger model is worth its time only if it sees about this many tokens per parameter (Chinchilla's
rule)."""
MOST_TOKENS_A_PARAMETER = 100
"""The run is no longer than this many tokens per parameter."""
BATCH, MICROBATCH, SEQUENCE = 32, 2, 1024
SNAPSHOT_EVERY = "10 min"
PRECISION_NOTES = {
    "float16": "a card here has no bfloat16; steps whose scaled gradients overflow are skipped"
}
OPTIMIZER_NOTES = {
    "adamw": "muon needs fewer steps for models of 768 to 1024 wide, at twice the lr",
    "muon": "fewer steps than adamw, which takes half of this lr",
}
MOST_HELD = 0.9
"""The share of a card's memory that a first run may take."""
MOST_ADVICE = 8
"""The most changes of codecs and of the order that are made one after another."""


@dataclass(frozen=True, kw_only=True)
class FirstRun:
    config: RunConfig
    explanation: Explanation
    machines: tuple[Machine, ...]
    """The machines in the order in which they join, first stage first."""
    totals: Totals


@dataclass(frozen=True, kw_only=True)
class Text:
    path: str = "stdlib"
    tokenizer: str = "bytes"
    vocabulary: int = 256
    tokens: int = 0
    """The number of tokens; 0 if unknown."""


def first_run(machines: Sequence[Machine], *, days: float, text: Text | None = None) -> FirstRun:
    """The largest model that fits the machines, one stage each, and that sees enough tokens in `days`.

    Raises:
        UserError: not even the smallest model fits.
    """
    text = text or Text()
    best: FirstRun | None = None
    for shape in SHAPES:
        config = _fitting(machines, shape, text)
        if config is None:
            continue
        config, placed = _improved(config, machines)
        explained = explain(config)
        seconds = step_seconds(explained, placed)
        steps = max(1, floor(days * DAY / seconds))
        if text.tokens:
            steps = min(steps, most_steps(config, text))
        if best is not None and steps * explained.tokens_per_step < TOKENS_A_PARAMETER * explained.parameters:
            break
        most = ceil(MOST_TOKENS_A_PARAMETER * explained.parameters / explained.tokens_per_step)
        best = _worked_out(_with_steps(config, min(steps, most)), placed)
    if best is None:
        raise UserError(
            f"no model fits {len(machines)} such machines, a stage on each: leave the smallest out, or name "
            "fewer"
        )
    return best


def for_machines(config: RunConfig, machines: Sequence[Machine]) -> FirstRun:
    """A run of the same model by these machines, one stage each. Frozen weights have the most bits that fit,
    and links the codecs that `config explain` would advise.

    Raises:
        UserError: the model does not fit.
    """
    if config.model.layers < len(machines):
        blocks = config.model.layers
        raise UserError(f"{blocks} blocks are too few for {len(machines)} machines: name fewer machines")
    config = replace(config, pipeline=replace(config.pipeline, stages=len(machines), split=()))
    if config.training.precision != "float32":
        config = replace(config, training=replace(config.training, precision=_precision(machines)))
    if config.training.precision == "float16":
        # Blocks add these terms without the loss's scale.
        config = replace(config, model=replace(config.model, balance_loss=0.0, z_loss=0.0))
    forms = FORMS[1:] if config.lora.rank else (config.lora.base,)
    choices = [replace(config, lora=replace(config.lora, base=form)) for form in forms]
    fitting = next((choice for choice in choices if _fits(choice, machines)), choices[-1])
    # A node whose card is too small for kept activations moves them to main memory.
    if not _fits(fitting, machines, activations=False):
        raise UserError(f"the model does not fit {len(machines)} such machines: name more, or larger ones")
    explained = explain(fitting)
    for _ in range(MOST_ADVICE):
        if (other := better_codecs(explained, machines)) is None:
            break
        explained = other
    return _worked_out(explained.config, machines)


def most_steps(config: RunConfig, text: Text) -> int:
    """The steps of `MOST_PASSES` over the text, at least 1. A pass may leave out one sample at the end."""
    samples = max(1, text.tokens // config.model.sequence - 1)
    return max(1, MOST_PASSES * samples // config.training.global_batch)


def _worked_out(config: RunConfig, machines: Sequence[Machine]) -> FirstRun:
    explained = explain(config)
    return FirstRun(
        config=config,
        explanation=explained,
        machines=tuple(machines),
        totals=totals(explained, machines),
    )


def _improved(config: RunConfig, machines: Sequence[Machine]) -> tuple[RunConfig, Sequence[Machine]]:
    """The run and the order of its machines, with all changes that `config explain` would advise."""
    for _ in range(MOST_ADVICE):
        explained = explain(config)
        if (other := better_codecs(explained, machines)) is not None and _fits(other.config, machines):
            config = other.config
            continue
        order = better_order(explained, machines)
        if order is None or not _fits(order.explanation.config, order.machines):
            break
        config, machines = order.explanation.config, order.machines
    return config, machines


def _fitting(machines: Sequence[Machine], shape: tuple[int, int, int], text: Text) -> RunConfig | None:
    """A model of this shape, stored in few bits if it does not fit otherwise; None if it does not fit at
    all."""
    layers, hidden, heads = shape
    if layers < len(machines):
        return None
    by_muon = hidden in MUON_WIDTHS
    config = RunConfig(
        run=RunSection(name="friends", steps=1000),
        model=ModelSection(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            ffn=ceil(hidden * 8 / 3 / 64) * 64,
            vocab=text.vocabulary,
            sequence=SEQUENCE,
        ),
        data=DataSection(path=text.path, tokenizer=text.tokenizer),
        training=TrainingSection(
            global_batch=BATCH,
            microbatch=MICROBATCH,
            optimizer="muon" if by_muon else "adamw",
            lr=RATES[hidden] * (MUON_RATE if by_muon else 1),
            precision=_precision(machines),
        ),
        pipeline=PipelineSection(stages=len(machines)),
    )
    if _fits(config, machines):
        return config
    few_bits = replace(
        config,
        training=replace(config.training, gradients="fp8", moments="fp8"),
        storage=StorageSection(preset="agoq"),
    )
    # Sums in e4m3 cannot be combined with a scaled loss.
    return few_bits if config.training.precision == "bfloat16" and _fits(few_bits, machines) else None


def _precision(machines: Sequence[Machine]) -> str:
    """The dtype in which all machines compute."""
    if any(machine.on_cpu for machine in machines):
        return "float32"
    return "float16" if any(machine.card.half == "float16" for machine in machines) else "bfloat16"


def _fits(config: RunConfig, machines: Sequence[Machine], *, activations: bool = True) -> bool:
    """Whether each stage fits its machine, with or without the activations that it keeps."""
    needs = [
        (machine, need.cpu if machine.on_cpu else need.gpu)
        for machine, need in zip(machines, explain(config).memory, strict=True)
    ]
    return all(
        need.total - (0 if activations else need.kept) <= MOST_HELD * 1e9 * machine.card.memory_gb
        for machine, need in needs
    )


def _with_steps(config: RunConfig, steps: int) -> RunConfig:
    unit = 10 ** max(0, floor(log10(steps)) - 1)
    steps = max(1, steps // unit * unit)  # two digits, as people write such numbers
    return replace(
        config,
        run=replace(config.run, steps=steps, snapshot_every=SNAPSHOT_EVERY),
        training=replace(config.training, warmup_steps=max(1, min(200, steps // 20))),
    )


def run_file(chosen: FirstRun) -> str:
    """The run file as text, with comments about what was chosen and why."""
    config, split = chosen.config, chosen.config.pipeline.split
    seconds = chosen.totals.seconds
    lines = [
        f"# {chosen.explanation.parameters / 1e6:.3g} million parameters, {config.pipeline.stages} machines;",
        f"# a step takes about {seconds:.3g} s, set by {chosen.totals.floor.binds}.",
        "# `thinwire config explain` shows every value and what the run costs.",
    ]
    if split:
        lines.append(
            '# Let the machines join in this order; or placement = "measured" under [pipeline] finds one:'
        )
        lines += [
            f"#   stage {stage}, {count} block{'s' * (count > 1)}: {machine}"
            for stage, (machine, count) in enumerate(zip(chosen.machines, split, strict=True))
        ]
    sections: dict[str, tuple[object, tuple[str, ...]]] = {
        "run": (config.run, ("name", "steps", "snapshot_every")),
        "model": (config.model, ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "sequence")),
        "data": (config.data, ("path", "tokenizer")),
        "training": (
            config.training,
            (
                *("global_batch", "microbatch", "optimizer", "lr", "warmup_steps"),
                *("precision", "gradients", "moments"),
            ),
        ),
        "storage": (config.storage, ("preset",)),
        "pipeline": (
            config.pipeline,
            ("stages", *(("split",) if split else ()), "forward_codec", "backward_codec"),
        ),
    }
    notes = {
        "snapshot_every": "a failure costs at most this",
        "precision": PRECISION_NOTES.get(config.training.precision, ""),
        "optimizer": OPTIMIZER_NOTES[config.training.optimizer],
        "path": "your text: a file, JSONL, or a folder of them",
        "stages": "one machine each; more that join are spares",
        "split": "blocks of each stage, for machines that join in the order above" if split else "",
        "tokenizer": "bytes, or a tokenizer.json, or a folder with one or with vocab.json and merges.txt",
    }
    for name, (section, keys) in sections.items():
        lines += ["", f"[{name}]"]
        for key in keys:
            line = f"{key} = {toml_value(getattr(section, key))}"
            lines.append(f"{line:<29} # {notes[key]}" if notes.get(key) else line)
    return "\n".join(lines) + "\n"
