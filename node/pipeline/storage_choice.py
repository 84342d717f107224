"""In how many bits a stage stores its activations, where the run file allows several (`storage.allow`).

Bits change the run's, so a node does not choose them: the coordinator does, when it places a stage, from the
memory that its node offers. A stage gets the most bits with which nothing has to be computed again or moved;
if there are none, the fewest, and its node plans the rest (`node.pipeline.memory_plan`). What was chosen is
on record before a node learns of it, and stays for as long as the run has as many stages. Torch-free.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil

from node.config.schema import RunConfig, StorageSection
from node.model.storage import AS_COMPUTED, KINDS, Storage, configured
from node.pipeline.device_memory import Devices, Share
from node.pipeline.memory import MEMORY_SHARE, block_bytes, stage_memory
from node.pipeline.memory_plan import least_stage_bytes
from node.pipeline.pack_times import allowed_forms
from node.pipeline.step_history import StepHistory
from wire.errors import ConfigError, RunError

MOST_STORAGES = 128
"""That a run may allow: each is estimated at placement."""
SEPARATOR = "/"
"""Between the forms of the kinds, in the order of `KINDS`, in a storage's name."""


def name_of(storage: Storage) -> str:
    """As on record and in messages: the form of each kind, such as `none/8/none/none`."""
    return SEPARATOR.join(getattr(storage, kind) for kind in KINDS)


def words_of_name(name: str) -> str:
    """As `words_of`, by the storage's name."""
    return words_of(_storage_of(name.split(SEPARATOR)))


def _storage_of(forms: Sequence[str]) -> Storage:
    """`forms`: in the order of `KINDS`."""
    norm_input, ffn_input, attention, attention_output = forms
    return Storage(
        norm_input=norm_input,
        ffn_input=ffn_input,
        attention=attention,
        attention_output=attention_output,
    )


def words_of(storage: Storage) -> str:
    """For people: the kinds that are not kept as computed."""
    forms = {kind: getattr(storage, kind) for kind in KINDS}
    parts = [
        f"{kind} in {form} bits" if form.isdigit() else f"{kind} {form}"
        for kind, form in forms.items()
        if form != AS_COMPUTED
    ]
    return ", ".join(parts) or "all as computed"


@lru_cache(maxsize=16)
def allowed_storages(config: RunConfig) -> tuple[Storage, ...]:
    """What a stage's blocks may store their activations in, the most bits first: the run file's storage
    alone, if nothing else is allowed."""
    base = configured(config.storage)
    forms: dict[str, list[str]] = {kind: [getattr(base, kind)] for kind in KINDS}
    for kind, form in allowed_forms(config.storage):
        if form not in forms[kind]:
            forms[kind].append(form)
    found = [_storage_of(chosen) for chosen in product(*forms.values())]

    def bits(storage: Storage) -> tuple[int, str]:
        # The same order for every node, whatever its devices.
        gpu = Devices(on_cpu=False)
        return -block_bytes(config, Share(config, gpu, storage), storage, gpu), name_of(storage)

    return tuple(sorted(found, key=bits))


def chosen_config(config: RunConfig, storage: Storage) -> RunConfig:
    """As if the run file said that blocks store their activations like this, and allowed nothing else."""
    section = StorageSection(preset="off", **{kind: getattr(storage, kind) for kind in KINDS})
    return replace(config, storage=section) if config.storage.allow else config


def stage_configs(config: RunConfig, plan: "StoragePlan | None") -> tuple[RunConfig, ...] | None:
    """The run file as each stage has it; None without a plan."""
    if plan is None:
        return None
    return tuple(chosen_config(config, storage_named(config, name)) for name in plan.names)


def storage_named(config: RunConfig, name: str) -> Storage:
    """The storage of this name. Raises RunError for one that the run file does not allow."""
    for storage in allowed_storages(config):
        if name_of(storage) == name:
            return storage
    raise RunError(f"storage {name!r} is not among those that this run's file allows (storage.allow)")


@lru_cache(maxsize=MOST_STORAGES * 4)
def kept_bytes(
    config: RunConfig, storage: Storage, stages: int, devices: Devices, windows: int = 0
) -> tuple[int, ...]:
    """What each stage takes in this storage with everything kept and no CUDA graphs, which change no bit."""
    plain = replace(config, training=replace(config.training, cuda_graphs=False))
    found = stage_memory(chosen_config(plain, storage), stages, devices, windows=windows)
    return tuple(stage.total for stage in found)


def choose(
    config: RunConfig, stages: int, stage: int, devices: Devices, memory_bytes: int, windows: int = 0
) -> Storage:
    """The storage with the most bits with which a stage fits in `memory_bytes` with everything kept.

    If none does, the one with the fewest; the run file's where the memory is not known (0).

    Args:
        memory_bytes: of each device of the node.
        windows: as for `node.pipeline.memory.stage_bytes`.
    """
    allowed = allowed_storages(config)
    if memory_bytes == 0 or len(allowed) == 1:
        return configured(config.storage)
    for storage in allowed:
        if offer_needed(config, storage, stages, devices, windows)[stage] <= memory_bytes:
            return storage
    return allowed[-1]


def offer_needed(
    config: RunConfig, storage: Storage, stages: int, devices: Devices, windows: int = 0
) -> tuple[int, ...]:
    """What a node has to offer for each stage to get this storage or one with more bits."""
    # More microbatches in flight, once links are measured, need memory too.
    share = MEMORY_SHARE if config.pipeline.window == "auto" else 1.0
    return tuple(ceil(size / share) for size in kept_bytes(config, storage, stages, devices, windows))


def choices_by_offer(
    config: RunConfig, stages: int, stage: int, devices: Devices
) -> list[tuple[Storage, int]]:
    """The storages that a stage may get, the most bits first, each with the least that its node has to
    offer for it; of the last, which a node with less gets too, what keeps everything."""
    found: list[tuple[Storage, int]] = []
    for storage in allowed_storages(config):
        need = offer_needed(config, storage, stages, devices)[stage]
        if not found or need < found[-1][1]:
            found.append((storage, need))
    last = allowed_storages(config)[-1]
    if found[-1][0] != last:
        found.append((last, offer_needed(config, last, stages, devices)[stage]))
    return found


def narrowest(config: RunConfig) -> RunConfig:
    """With the fewest bits that the run file allows."""
    return chosen_config(config, allowed_storages(config)[-1])


def remedies(
    config: RunConfig, stages: int, devices: Devices, memory_bytes: int, windows: int = 0
) -> list[str]:
    """What lets every stage fit in nodes with so much memory, as keys of the run file with the memory that
    the largest stage then needs; empty if none of these is enough."""

    def need(changed: RunConfig, count: int) -> int:
        return max(least_stage_bytes(narrowest(changed), count, devices, windows=windows))

    found = []
    blocks = config.model.layers
    for count in range(stages + 1, blocks + 1):
        split = replace(config, pipeline=replace(config.pipeline, stages=count, split=()))
        if blocks % count and count != blocks:
            continue  # as many blocks a stage as with fewer stages
        if (least := need(split, count)) <= memory_bytes:
            found.append(f"pipeline.stages = {count} ({-(-blocks // count)} blocks a stage, {_gb(least)})")
            break
    wide = {"norm_input:4", "ffn_input:4", "attention:8", "attention_output:8"} - set(config.storage.allow)
    base = configured(config.storage)
    wide = {one for one in wide if getattr(base, one.split(":")[0]) in (AS_COMPUTED, "bf16", "8", "6", "5")}
    if wide and not config.storage.bits_by_stage:
        section = replace(config.storage, allow=(*config.storage.allow, *sorted(wide)))
        if (least := need(replace(config, storage=section), stages)) <= memory_bytes:
            listed = ", ".join(f'"{one}"' for one in section.allow)
            found.append(f"storage.allow = [{listed}] ({_gb(least)})")
    if config.training.microbatch > 1:
        small = replace(config, training=replace(config.training, microbatch=1))
        if (least := need(small, stages)) <= memory_bytes:
            found.append(f"training.microbatch = 1 ({_gb(least)})")
    return found


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


@dataclass(frozen=True)
class StoragePlan:
    """What the stages of a run store their activations in."""

    names: tuple[str, ...]
    """Of each stage, as by `name_of`; empty where the run file allows nothing but its own."""

    @classmethod
    def from_json(cls, text: str) -> "StoragePlan":
        """Raises ConfigError for what `to_json` did not write."""
        try:
            names = json.loads(text)
        except ValueError:
            names = None
        parts = len(KINDS)
        if not isinstance(names, list) or not all(
            isinstance(name, str) and len(name.split(SEPARATOR)) == parts for name in names
        ):
            raise ConfigError(f"a storage plan on record is damaged: {text!r}")
        return cls(tuple(names))

    def to_json(self) -> str:
        return json.dumps(self.names)


class StorageHistory(StepHistory[StoragePlan]):
    """Which plan each step has."""


def plan_storages(
    config: RunConfig, hosts: Sequence[Sequence[tuple[Devices, int]]], windows: int = 0
) -> StoragePlan:
    """What each stage stores its activations in, by what the nodes of each stage offer, one a row: devices
    and the bytes of each. All rows have the same bits, so the node with the least room decides."""
    allowed = allowed_storages(config)
    stages = len(hosts)
    names: list[str] = []
    for stage, nodes in enumerate(hosts):
        chosen = (choose(config, stages, stage, *node, windows=windows) for node in nodes)
        names.append(name_of(allowed[max(allowed.index(storage) for storage in chosen)]))
    return StoragePlan(tuple(names))
