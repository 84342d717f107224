"""What a run's text comes to: tokens, samples and passes, and what a codec with a memory keeps of them."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from node.config.schema import RunConfig
from node.pipeline.placement import boundary_cache_bytes, chunks_of, stage_cache_bytes
from node.telemetry.units import bytes_text, count_text
from node.training.data import Corpus
from wire.codecs.forms import AqsgdForm, form
from wire.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What `aqsgd-b` keeps once it has seen every sample. Bytes."""

    stages: tuple[int, ...]
    """Main memory of each stage, first stage first; every snapshot being sent holds a copy of half of it."""
    snapshot: int
    """What a snapshot grows by: each boundary once."""
    first_pass_bits: float
    """Bits an element of the first pass, header included."""


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """The text as a run sees it; all numbers are 0 if it could not be read, and `problem` says why."""

    tokens: int = 0
    """To train on."""
    held_out: int = 0
    samples: int = 0
    """Of one pass."""
    passes: float = 0.0
    """What all steps together see."""
    memory: Memory | None = None
    problem: str = ""


def text_plan(config: RunConfig, tell: Callable[[str], None]) -> TextPlan:
    """Read the run's text, if it is on this machine. Raises ConfigError for tokens beyond the vocabulary."""
    training = config.training
    try:
        corpus = Corpus.load(
            config.data,
            sequence=config.model.sequence,
            global_batch=training.global_batch,
            seed=config.run.seed,
            vocab=config.model.vocab,
            tell=tell,
        )
    except DataError as error:
        return TextPlan(problem=str(error))
    return TextPlan(
        tokens=len(corpus.training),
        held_out=len(corpus.validation),
        samples=corpus.windows,
        passes=config.run.steps * training.global_batch / corpus.windows,
        memory=_memory(config, corpus.windows),
    )


def text_lines(config: RunConfig, plan: TextPlan) -> list[str]:
    """For a terminal."""
    if plan.problem:
        return [f"text     not read: {plan.problem}"]
    lines = [
        f"text     {count_text(plan.tokens)} tokens to train on, {count_text(plan.held_out)} held out; "
        f"{count_text(plan.samples)} samples a pass, so {config.run.steps} steps are {plan.passes:.3g} passes"
    ]
    if (memory := plan.memory) is not None:
        stages = ", ".join(bytes_text(count) for count in memory.stages)
        lines.append(
            f"memory   {config.pipeline.forward_codec} keeps up to {stages} of activations at the stages, "
            f"of {config.pipeline.cache_gb:g} GB allowed; a snapshot grows by {bytes_text(memory.snapshot)}; "
            f"the first pass takes {memory.first_pass_bits:.3g} bits an element"
        )
    return lines


def _memory(config: RunConfig, windows: int) -> Memory | None:
    if not config.pipeline.remembers:
        return None
    found = form(config.pipeline.forward_codec)
    assert isinstance(found, AqsgdForm), "the only codec with a memory"
    stages, model = config.pipeline.stages, config.model
    shape = (config.training.microbatch, model.sequence, model.hidden)
    boundaries = stages * chunks_of(config, stages) - 1
    return Memory(
        stages=stage_cache_bytes(config, stages, windows),
        snapshot=boundaries * boundary_cache_bytes(config, windows),
        first_pass_bits=8 * found.first_pass_bytes(shape) / prod(shape),
    )
