"""Checks a run file beyond types: ranges, names, and rules between keys.

`problems` lists every broken rule in a line that says what to change. `validate` raises if there are any.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import Annotated, get_origin, get_type_hints

from kernels.fp8.layout import MULTIPLE
from node.config.schema import (
    PLANNED,
    DataSection,
    LoraSection,
    ModelSection,
    PipelineSection,
    Rule,
    RunConfig,
    RunSection,
    SnapshotsSection,
    StorageSection,
    TelemetrySection,
    TrainingSection,
)
from node.model.families.known import FAMILIES, model_problems
from node.model.lora_shapes import FORMS, projections, targets
from node.model.optimizers import FORMS as MOMENT_FORMS
from node.model.optimizers import OPTIMIZERS
from node.model.storage import AS_COMPUTED, FROM_PRESET, KINDS, PRESETS, RECOMPUTE, configured
from node.run_file.addresses import coordinator_problems, dashboard_problems
from node.schedule.placement import HEADS, head_first, unplaceable
from node.state.object_store import wrong_url
from node.state.unit_state import LASTS
from node.telemetry.format import parse_duration
from node.telemetry.trace_files import TracedSteps
from node.training.loss_scale import LEAST, MOST
from node.training.schedule import SCHEDULES
from node.tuning.block_times import allowed_forms
from node.tuning.snapshot_place import KEEPS, is_url
from node.tuning.storage_choice import MOST_STORAGES
from wire.codecs.formats import Carried, codec_format, ladder, names_that_carry
from wire.errors import CodecError, ConfigError, nearest, shortened
from wire.frames import MAX_TENSOR_BYTES

PRECISIONS = ("float32", "bfloat16", "float16", PLANNED)
WEIGHTS = ("float32", "bfloat16")
COMPUTES = ("precision", "fp8")
STORES = ("float32", "fp8")
FORMATS = ("text", "chat")
ORDERS = ("auto", "whole", "shards")
LOGGERS = ("tensorboard", "wandb")

MOST_SHOWN = 8
"""The most problems of a run file that are named in one message."""
MOST_VALID_SAMPLES = 65_536
MOST_PROMPTS = 16
MOST_PROMPT = 1000
"""The most characters of a prompt. Prompts are part of the page, which every reader loads."""
MAX_NAME = 64
BYTE_VOCABULARY = 256
MAX_MICROBATCHES = 16_384
"""The most microbatches in a step. Estimates list the actions of all stages several times, which takes a
second with this many."""


MOST_OF_ONE = 500
"""The most characters of one problem, which may quote a value of any size."""


def validate(config: RunConfig, where: str) -> None:
    """Raise ConfigError with all problems in one line. `where` names the checked text in the message."""
    if broken := problems(config):
        raise ConfigError(f"{where}: {together(broken)}")


def together(broken: Sequence[str]) -> str:
    """Several problems in one line. Beyond `MOST_SHOWN`, only their number is given."""
    rest = len(broken) - MOST_SHOWN
    shown = (shortened(problem, MOST_OF_ONE) for problem in broken[:MOST_SHOWN])
    return "; also: ".join(shown) + (f" (and {rest} more)" if rest > 0 else "")


def problems(config: RunConfig) -> list[str]:
    """All broken rules, one line each. If a number breaks its own rule, rules that compute with several keys
    are left out: they would divide by it, or take time and memory for it."""
    numbers = list(_numbers(config))
    found = [
        *numbers,
        *_names(config),
        *_run(config.run),
        *_data(config.data, config.pipeline),
        *_path("data.tokenizer", config.data.tokenizer, "be bytes, or name a folder or file"),
        *_path("data.path", config.data.path, "name a file, a folder or stdlib"),
        *_storage(config.storage, config.pipeline),
        *_float16(config),
        *_codecs(config.pipeline, config.data.shift),
        *_snapshots(config.snapshots, config.training),
        *coordinator_problems(config.coordinator),
        *dashboard_problems(config.dashboard, config.coordinator),
        *_telemetry(config.telemetry),
    ]
    if numbers:
        return found
    return [
        *found,
        *_model(config.model, config.data.tokenizer),
        *_held_out(config),
        *_training(config.training, config.run.steps),
        *_compute(config),
        *_lora(config.lora, config),
        *_pipeline(config),
        *_slices(config),
        *_groups(config),
        *_local_steps(config),
        *_audit(config),
        *_tensors(config),
    ]


def _numbers(config: RunConfig) -> Iterator[str]:
    """The numbers that break a rule of their own, in the order of the file."""
    for section, key, rules in _declared():
        value = getattr(getattr(config, section), key)
        broken = (rule for rule in rules if not isinstance(value, str) and not rule.holds(value))
        if (rule := next(broken, None)) is not None:
            yield f"{section}.{key} must be {rule.words}, got {value}"


@cache
def _declared() -> list[tuple[str, str, tuple[Rule, ...]]]:
    """Section, key and rules of every number."""
    return [
        (section, key, hint.__metadata__)
        for section, kind in get_type_hints(RunConfig).items()
        for key, hint in get_type_hints(kind, include_extras=True).items()
        if get_origin(hint) is Annotated
    ]


def _names(config: RunConfig) -> Iterator[str]:
    """Names that are unknown."""
    training = config.training
    for key, value, known in (
        ("model.family", config.model.family, FAMILIES),
        ("data.format", config.data.format, FORMATS),
        ("data.order", config.data.order, ORDERS),
        ("training.schedule", training.schedule, SCHEDULES),
        ("training.optimizer", training.optimizer, OPTIMIZERS),
        ("training.adapter_optimizer", training.adapter_optimizer, OPTIMIZERS),
        ("training.precision", training.precision, PRECISIONS),
        ("training.compute", training.compute, COMPUTES),
        ("training.weight_gradients", training.weight_gradients, COMPUTES),
        ("training.weights", training.weights, WEIGHTS),
        ("training.gradients", training.gradients, STORES),
        ("training.moments", training.moments, MOMENT_FORMS),
        ("pipeline.head", config.pipeline.head, HEADS),
        ("snapshots.last", config.snapshots.last, LASTS),
    ):
        yield from _name(key, value, tuple(known))


def _run(run: RunSection) -> Iterator[str]:
    allowed = run.name.isascii() and run.name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not allowed or run.name.startswith((".", "-")) or len(run.name) > MAX_NAME:
        yield (
            f"run.name {run.name!r} must be 1 to {MAX_NAME} letters, digits, '-', '_' or '.', starting with "
            "a letter, a digit or '_': it names the run directory"
        )
    every = run.snapshot_every
    if isinstance(every, str) and (parse_duration(every) or 0.0) < 1.0:
        yield f'run.snapshot_every must be steps or a time of at least 1s, as in "10 min", got {every!r}'


def _snapshots(snapshots: SnapshotsSection, training: TrainingSection) -> Iterator[str]:
    if is_url(snapshots.keep):
        if (why := wrong_url(snapshots.keep)) is not None:
            yield f"snapshots.keep = {shortened(snapshots.keep)} cannot hold snapshots: {why}"
    else:
        yield from _name("snapshots.keep", snapshots.keep, KEEPS)
    if (snapshots.keep == "nodes" or is_url(snapshots.keep)) and training.export_every:
        yield (
            "training.export_every writes from snapshots at the coordinator: set snapshots.keep to "
            '"coordinator", or training.export_every to 0'
        )


def _audit(config: RunConfig) -> Iterator[str]:
    rate = config.audit.rate
    if rate > 0.0 and config.pipeline.most_rows < 2:
        yield "audit.rate needs rows to compare: set pipeline.groups to 2 or more, pipeline.replicas to auto"
    elif rate > 0.0 and not config.training.deterministic:
        yield "audit.rate compares bits, which training.deterministic = false gives up: leave one of them out"


def _model(model: ModelSection, tokenizer: str) -> Iterator[str]:
    family = FAMILIES.get(model.family)
    if family is not None:
        for key, allowed in family.choices.items():
            yield from _name(f"model.{key}", getattr(model, key), allowed)
        yield from model_problems(model)
    if tokenizer == "bytes" and model.vocab < BYTE_VOCABULARY:
        yield f"model.vocab must be at least {BYTE_VOCABULARY} for byte tokens, got {model.vocab}"


def _compute(config: RunConfig) -> Iterator[str]:
    """What products in FP8 require."""
    model = config.model
    if config.training.compute != "fp8":
        if config.training.weight_gradients == "fp8":
            yield 'training.weight_gradients = "fp8" needs training.compute = "fp8"'
        return
    if config.training.precision != "bfloat16":
        yield (
            'training.compute = "fp8" needs training.precision = "bfloat16", got '
            f"{config.training.precision!r}"
        )
    if config.lora.rank:
        yield (
            'training.compute = "fp8" cannot train adapters: set lora.rank = 0, or '
            'training.compute = "precision"'
        )
    if not model.is_plain:
        yield (
            'training.compute must be "precision" for blocks with norms or activations that plain Llama and '
            "GPT-2 do not have (model.qk_norm, norm_place, norm_offset, activation, query_scale, experts)"
        )
    widths = {"hidden": model.hidden, "ffn": model.ffn, "heads times the width of one": model.q_width}
    if family := FAMILIES.get(model.family):
        widths["kv_heads times the width of one"] = family.kv_width(model)
    for name, width in widths.items():
        if width % MULTIPLE:
            yield f'training.compute = "fp8" needs model.{name} to be a multiple of {MULTIPLE}, got {width}'


def _data(data: DataSection, pipeline: PipelineSection) -> Iterator[str]:
    if data.weights and len(data.weights) != len(data.sources):
        yield f"data.weights has {len(data.weights)} numbers for {len(data.sources)} data.sources"
    if any(not 0 < weight < math.inf for weight in data.weights) or sum(data.weights) == math.inf:
        yield f"data.weights must be finite numbers above 0, got {list(data.weights)}"
    if data.sources and data.path != DataSection.path:
        yield "data.sources takes the place of data.path: name that one among the sources, or leave it out"
    for source in data.sources:
        yield from _path("data.sources", source, "name files or folders")
    if data.format == "chat" and data.tokenizer == "bytes":
        yield 'data.format = "chat" needs a tokenizer with a chat template: set data.tokenizer to its folder'
    if data.response_marker and (data.format != "chat" or data.chat_template):
        yield 'data.response_marker is for data.format = "chat", and takes the place of data.chat_template'
    if data.order == "whole" and (data.sources or data.format == "chat"):
        yield 'data.order = "whole" takes one text source: use "shards" or "auto" for data.sources and chat'
    if len(data.prompts) > MOST_PROMPTS:
        yield f"data.prompts has {len(data.prompts)} texts: give at most {MOST_PROMPTS}"
    for prompt in data.prompts:
        if not 0 < len(prompt) <= MOST_PROMPT or "\0" in prompt:
            yield (
                f"data.prompts must hold texts of 1 to {MOST_PROMPT} characters, none of them zero, "
                f"got one of {len(prompt)}"
            )
    if pipeline.remembers and (data.order == "shards" or data.sources or data.format == "chat"):
        yield (
            f"pipeline.forward_codec: {pipeline.forward_codec} needs every sample's number beforehand: "
            'set data.order = "whole", with one text source'
        )


def _path(key: str, value: str, words: str) -> Iterator[str]:
    if not value or "\0" in value:
        yield f"{key} must {words}" + (", and no path holds a zero character" if value else "")


def _held_out(config: RunConfig) -> Iterator[str]:
    data, microbatch = config.data, config.training.microbatch
    if "\0" in data.valid:
        yield "data.valid must name a file or a folder, and no path holds a zero character"
    if data.valid_every and not microbatch <= data.valid_samples <= MOST_VALID_SAMPLES:
        yield (
            f"data.valid_samples must be from training.microbatch ({microbatch}) to {MOST_VALID_SAMPLES}, "
            f"got {data.valid_samples}"
        )


def _training(training: TrainingSection, steps: int) -> Iterator[str]:
    if training.global_batch % training.microbatch:
        yield (
            f"training.global_batch ({training.global_batch}) must be a multiple of training.microbatch "
            f"({training.microbatch})"
        )
    if training.global_batch // training.microbatch > MAX_MICROBATCHES:
        yield (
            f"training.global_batch ({training.global_batch}) comes to more than {MAX_MICROBATCHES} "
            f"microbatches of training.microbatch ({training.microbatch}) a step: lower it, or raise that"
        )
    if not 0 <= training.decay_steps <= steps:
        yield f"training.decay_steps must be from 0 to run.steps ({steps}), got {training.decay_steps}"
    if not 0 <= training.warmup_steps <= steps:
        yield f"training.warmup_steps must be from 0 to run.steps ({steps}), got {training.warmup_steps}"
    if training.weights == "bfloat16" and (training.precision, training.moments) != ("bfloat16", "fp8"):
        yield (
            'training.weights = "bfloat16" needs training.precision = "bfloat16" and training.moments = '
            f'"fp8", got {training.precision!r} and {training.moments!r}'
        )


def _float16(config: RunConfig) -> Iterator[str]:
    """What a run in float16 requires, and a run that may use float16."""
    training = config.training
    if not LEAST <= training.loss_scale <= MOST or math.frexp(training.loss_scale)[0] != 0.5:
        yield f"training.loss_scale must be a power of two from 1 to {MOST:.0f}, got {training.loss_scale}"
    if training.precision not in ("float16", PLANNED):
        return
    chosen = f'training.precision = "{training.precision}"'
    if training.gradients != "float32":
        yield (
            f'{chosen} needs training.gradients = "float32": sums in e4m3 do not keep what overflows in '
            "float16"
        )
    if config.model.balance_loss or config.model.z_loss:
        yield (
            f"{chosen} needs model.balance_loss and model.z_loss of 0: blocks add these without float16's "
            "scale of the loss"
        )
    if config.sync.every > 1:
        yield f"{chosen} needs sync.every = 1: a step in float16 is skipped by all stages or by none"


def _lora(lora: LoraSection, config: RunConfig) -> Iterator[str]:
    if not lora.rank:
        if lora != LoraSection():
            yield "lora.rank is 0, which trains the whole model: set it, for example to 16, or drop [lora]"
        return
    yield from _name("lora.base", lora.base, FORMS)
    if not list(_model(config.model, config.data.tokenizer)):
        known = projections(config.model)
        for name in lora.targets:
            yield from _name("lora.targets", name, known)
        adapted = targets(config.model, lora)
        yield from FAMILIES[config.model.family].adapter_problems(config.model, adapted, lora.dropout)
        if len(set(lora.targets)) < len(lora.targets):
            yield f"lora.targets names a projection twice: {', '.join(lora.targets)}"
        widest = min(config.model.hidden, config.model.ffn)
        if lora.rank > widest:
            yield f"lora.rank ({lora.rank}) must be at most {widest}, the model's narrowest width"


def _pipeline(config: RunConfig) -> Iterator[str]:
    pipeline, layers = config.pipeline, config.model.layers
    yield from unplaceable(pipeline, _head_first(config))
    if not 0 <= pipeline.min_stages <= pipeline.stages:
        yield (
            f"pipeline.min_stages must be from 0 (wait for every node) to pipeline.stages "
            f"({pipeline.stages}), got {pipeline.min_stages}"
        )
    chunks = pipeline.stages * pipeline.chunks
    shape = f"{pipeline.stages} stages" + (f" x {pipeline.chunks} chunks" if pipeline.chunks > 1 else "")
    if pipeline.chunks > 1 and pipeline.stages < 2:
        yield f"pipeline.chunks = {pipeline.chunks} (interleaved) needs pipeline.stages of at least 2"
    if chunks > layers:
        yield (
            f"{shape} need at least {chunks} blocks, but model.layers is {layers}: lower pipeline.stages "
            "or pipeline.chunks, or raise model.layers"
        )
    split = pipeline.split
    if split and len(split) != chunks:
        yield f"pipeline.split has {len(split)} numbers, but {shape} need {chunks}"
    elif any(blocks < (chunk > 0 or not _head_first(config)) for chunk, blocks in enumerate(split)):
        yield (
            f"pipeline.split must give every chunk at least 1 block, got {list(split)}; the first may have 0 "
            "if its stage also has a tied model's head"
        )
    elif split and sum(split) != layers:
        yield f"pipeline.split adds up to {sum(split)} blocks, but model.layers is {layers}"


def _slices(config: RunConfig) -> Iterator[str]:
    pipeline, count = config.pipeline, config.pipeline.sequence_chunks
    if count == "auto":
        return
    if not 1 <= count <= config.model.sequence:
        yield (
            f"pipeline.sequence_chunks must be from 1 to model.sequence ({config.model.sequence}) or "
            f'"auto", got {count}'
        )
    elif count > 1:
        if config.microbatches * count > MAX_MICROBATCHES:
            yield (
                f"pipeline.sequence_chunks ({count}) of {config.microbatches} microbatches come to more than "
                f"{MAX_MICROBATCHES} parts of a step: lower it"
            )
        if pipeline.chunks > 1:
            yield (
                "pipeline.sequence_chunks above 1 shortens fill and drain without more bytes: set "
                f"pipeline.chunks = 1, not {pipeline.chunks}"
            )
        if pipeline.remembers:
            yield (
                f"pipeline.forward_codec {pipeline.forward_codec} remembers whole samples: set "
                "pipeline.sequence_chunks = 1, or use a codec without a memory"
            )


def _groups(config: RunConfig) -> Iterator[str]:
    pipeline, training = config.pipeline, config.training
    microbatches = training.global_batch // training.microbatch
    if microbatches % pipeline.groups:
        fits = [count for count in range(1, microbatches + 1) if microbatches % count == 0]
        near = [
            max((n for n in fits if n < pipeline.groups), default=0),
            *(n for n in fits if n > pipeline.groups),
        ]
        advice = " or ".join(str(count) for count in near[:2] if count)
        yield (
            f"pipeline.groups ({pipeline.groups}) must divide the {microbatches} microbatches of a step "
            f"(training.global_batch / training.microbatch): take {advice}"
        )


def _local_steps(config: RunConfig) -> Iterator[str]:
    sync, pipeline, training = config.sync, config.pipeline, config.training
    yield from _codec("sync.codec", sync.codec, Carried.SUMS)
    if sync.every == 1:
        return
    if pipeline.groups == 1:
        yield "sync.every above 1 needs gradient groups: set pipeline.groups to 2 or more"
        return
    own = training.global_batch // training.microbatch // pipeline.groups
    if own % sync.every:
        yield (
            f"sync.every ({sync.every}) must divide the {own} microbatches of a gradient group "
            "(training.global_batch / training.microbatch / pipeline.groups)"
        )
    for key in ("weights", "gradients", "moments"):
        if getattr(training, key) != "float32":
            yield f'sync.every above 1 needs training.{key} = "float32", got {getattr(training, key)!r}'
    if config.audit.rate > 0.0:
        yield "audit.rate compares only exact steps: set it to 0, or sync.every to 1"
    if config.sums_tied_gradients and pipeline.stages > 1 and pipeline.head != "first":
        yield (
            'sync.every above 1 needs a tied model\'s head on the first stage: set pipeline.head = "first", '
            "or model.tied = false"
        )


def _head_first(config: RunConfig) -> bool:
    try:
        return head_first(config, config.pipeline.stages)
    except (CodecError, ConfigError):
        return False  # codecs are wrong, and reported elsewhere


def _codecs(pipeline: PipelineSection, shift: bool) -> Iterator[str]:
    if pipeline.plans_codecs:
        yield from _planned_codecs(pipeline)
    for key, what in (("forward_codec", Carried.ACTIVATIONS), ("backward_codec", Carried.GRADIENTS)):
        if getattr(pipeline, key) != PLANNED:
            yield from _codec(f"pipeline.{key}", getattr(pipeline, key), what)
    if pipeline.remembers and pipeline.groups > 1:
        yield (
            f"pipeline.forward_codec: {pipeline.forward_codec} keeps a cache of every sample, which rows do "
            "not share: set pipeline.groups = 1"
        )
    yield from _codec("pipeline.sync_codec", pipeline.sync_codec, Carried.SUMS)
    if pipeline.remembers and shift:
        yield (
            f"pipeline.forward_codec: {pipeline.forward_codec} packs what changed since the same sample was "
            "last sent, so every pass must cut the text alike: set data.shift = false"
        )


def _codec(key: str, name: str, what: Carried) -> Iterator[str]:
    try:
        known = codec_format(name)
    except ConfigError as error:
        yield f"{key}: {error}"
        return
    if what not in known.CARRIES:
        yield f"{key}: {name} does not pack {what.words}: use {names_that_carry(what)}"


def _planned_codecs(pipeline: PipelineSection) -> Iterator[str]:
    for key, other in (("forward_codec", "backward_codec"), ("backward_codec", "forward_codec")):
        if getattr(pipeline, key) != PLANNED:
            yield (
                f"pipeline.{key}: {getattr(pipeline, key)} beside pipeline.{other} = auto: plan codecs "
                f"for both directions of a link or for neither; set pipeline.{key} = auto too"
            )
    try:
        ladder(pipeline.min_bits)
    except ConfigError as error:
        yield str(error)


def _tensors(config: RunConfig) -> Iterator[str]:
    """Tensors between stages must fit into a link message even uncompressed (the `fp32` codec)."""
    model, training = config.model, config.training
    boundary = {"training.microbatch": training.microbatch, "model.sequence": model.sequence}
    sent = [{**boundary, "model.hidden": model.hidden}]
    if config.sums_tied_gradients and not _head_first(config):
        sent.append({"model.vocab": model.vocab, "model.hidden": model.hidden})
    for sizes in sent if config.pipeline.stages > 1 else ():
        size = 4 * prod(sizes.values())
        if size > MAX_TENSOR_BYTES:
            yield (
                f"{' x '.join(sizes)} makes a tensor of {size:,} bytes between stages, and a link carries at "
                f"most {MAX_TENSOR_BYTES:,}: make one of them smaller"
            )


def _telemetry(telemetry: TelemetrySection) -> Iterator[str]:
    try:
        TracedSteps.parse(telemetry.trace)
    except ConfigError as error:
        yield f"telemetry.trace: {error}"
    for logger in telemetry.loggers:
        yield from _name("telemetry.loggers", logger, LOGGERS)


def _name(key: str, value: str, known: Sequence[str]) -> Iterator[str]:
    if value not in known:
        yield f"{key} {value!r} is unknown{nearest(value, known)}"


def _storage(storage: StorageSection, pipeline: PipelineSection) -> Iterator[str]:
    unknown = list(_name("storage.preset", storage.preset, tuple(PRESETS)))
    yield from unknown
    known = not unknown
    for kind, forms in KINDS.items():
        wrong = list(_name(f"storage.{kind}", getattr(storage, kind), (FROM_PRESET, *forms)))
        yield from wrong
        known = known and not wrong
    if not known:
        return
    yield from _allowed(storage)
    chosen = configured(storage)
    if chosen.attention == RECOMPUTE != chosen.attention_output and chosen.norm_input != AS_COMPUTED:
        yield (
            f"storage.attention recompute with storage.attention_output {chosen.attention_output} mixes "
            "queries computed from packed norm inputs with results of others: recompute both, or neither"
        )
    if storage.bits_by_stage and not {"4", "5", "6", "8"} & {chosen.norm_input, chosen.ffn_input}:
        yield (
            "storage.bits_by_stage chooses the bits of norm and FFN inputs, but neither is kept in 4 to 8 "
            "bits: set storage.preset to agoq or compact"
        )
    if storage.bits_by_stage and pipeline.window == "auto":
        yield (
            "storage.bits_by_stage needs pipeline.window to be a number: the bits belong to what a run's "
            'weights follow from, and "auto" is measured'
        )


def _allowed(storage: StorageSection) -> Iterator[str]:
    try:
        forms = allowed_forms(storage)
    except ConfigError as error:
        yield str(error)
        return
    base = configured(storage)
    for kind in dict.fromkeys(kind for kind, _ in forms):
        if getattr(base, kind) == RECOMPUTE:
            yield f"storage.allow names {kind}, which storage.{kind} = recompute does not store at all"
    choices = prod(1 + len({f for k, f in forms if k == kind} - {getattr(base, kind)}) for kind in KINDS)
    if choices > MOST_STORAGES:
        yield f"storage.allow gives {choices} choices a stage, of at most {MOST_STORAGES}: name fewer"
    if forms and storage.bits_by_stage:
        yield "storage.allow and storage.bits_by_stage both choose a stage's bits: set one of them"
