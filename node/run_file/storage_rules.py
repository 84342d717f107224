"""The rules of `[storage]`, and the errors for names that are not allowed."""

from collections.abc import Iterator, Sequence
from math import prod

from node.config.schema import PipelineSection, RunConfig, StorageSection
from node.model.storage import AS_COMPUTED, FROM_PRESET, KINDS, PRESETS, RECOMPUTE, configured
from node.tuning.block_times import allowed_forms
from node.tuning.storage_choice import MOST_STORAGES
from wire.errors import ConfigError, nearest


def name_problem(key: str, value: str, known: Sequence[str]) -> Iterator[str]:
    if value not in known:
        yield f"{key} {value!r} is unknown{nearest(value, known)}"


def storage_problems(config: RunConfig) -> Iterator[str]:
    """All broken rules of `[storage]`, one line each."""
    yield from _storage(config.storage, config.pipeline)


def _storage(storage: StorageSection, pipeline: PipelineSection) -> Iterator[str]:
    unknown = list(name_problem("storage.preset", storage.preset, tuple(PRESETS)))
    yield from unknown
    known = not unknown
    for kind, forms in KINDS.items():
        wrong = list(name_problem(f"storage.{kind}", getattr(storage, kind), (FROM_PRESET, *forms)))
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
