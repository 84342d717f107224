"""Chooses in how many bits a stage stores its activations, if the run file allows several (`storage.allow`).

The choice changes the run's bits, so the coordinator makes it when it places a stage. Each node computes how
fast it is with each storage, from its best memory plan with it (`node.tuning.memory_plan`) and the times that
it measured. A stage gets the storage with which its slowest node is fastest; among equally fast ones, the one
with the most bits. The choice is recorded before any node receives it, and holds while the run has the same
number of stages. This module imports no torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from node.config.schema import RunConfig, StorageSection
from node.model.storage import AS_COMPUTED, KINDS, Storage, configured
from node.tuning.block_times import allowed_forms
from node.tuning.device_memory import Devices, Share
from node.tuning.memory import MEMORY_SHARE, block_bytes, stage_memory
from node.tuning.memory_plan import Room, least_stage_bytes
from wire.errors import ConfigError, RunError

MOST_STORAGES = 128
"""The most storages that a run may allow."""
MOST_PLANNED = 16
"""The most storages that a node plans with. If more are allowed, it takes this many between the most bits and
the fewest."""
FREE = 0.01
"""A storage with more bits may make a microbatch this much longer."""
SEPARATOR = "/"
"""Separates the forms of the kinds, in the order of `KINDS`, in a storage's name."""


def name_of(storage: Storage) -> str:
    """The name of a storage on record and in messages: the form of each kind, such as `none/8/none/none`."""
    return SEPARATOR.join(getattr(storage, kind) for kind in KINDS)


def words_of_name(name: str) -> str:
    """`words_of` for a storage's name."""
    return words_of(_storage_of(name.split(SEPARATOR)))


def _storage_of(forms: Sequence[str]) -> Storage:
    """The storage with these forms, in the order of `KINDS`."""
    norm_input, ffn_input, attention, attention_output = forms
    return Storage(
        norm_input=norm_input,
        ffn_input=ffn_input,
        attention=attention,
        attention_output=attention_output,
    )


def words_of(storage: Storage) -> str:
    """A description for users: the kinds that are not kept as computed."""
    forms = {kind: getattr(storage, kind) for kind in KINDS}
    parts = [
        f"{kind} in {form} bits" if form.isdigit() else f"{kind} {form}"
        for kind, form in forms.items()
        if form != AS_COMPUTED
    ]
    return ", ".join(parts) or "all as computed"


@lru_cache(maxsize=16)
def allowed_storages(config: RunConfig) -> tuple[Storage, ...]:
    """The storages that a stage's blocks may have, the most bits first. Without `storage.allow` it is the run
    file's storage alone."""
    base = configured(config.storage)
    forms: dict[str, list[str]] = {kind: [getattr(base, kind)] for kind in KINDS}
    for kind, form in allowed_forms(config.storage):
        if form not in forms[kind]:
            forms[kind].append(form)
    storages = [_storage_of(chosen) for chosen in product(*forms.values())]

    def bits(storage: Storage) -> tuple[int, str]:
        # The same order for every node, whatever its devices are.
        gpu = Devices(on_cpu=False)
        return -block_bytes(config, Share(config, gpu, storage), storage, gpu), name_of(storage)

    return tuple(sorted(storages, key=bits))


def chosen_config(config: RunConfig, storage: Storage) -> RunConfig:
    """The run file with this storage and no other allowed."""
    section = StorageSection(preset="off", **{kind: getattr(storage, kind) for kind in KINDS})
    return replace(config, storage=section) if config.storage.allow else config


def stage_configs(config: RunConfig, plan: "StoragePlan | None") -> tuple[RunConfig, ...] | None:
    """The run file as each stage has it; None without a plan."""
    if plan is None:
        return None
    return tuple(chosen_config(config, storage_named(config, name)) for name in plan.names)


def storage_named(config: RunConfig, name: str) -> Storage:
    """The storage with this name.

    Raises:
        RunError: the run file does not allow it.
    """
    for storage in allowed_storages(config):
        if name_of(storage) == name:
            return storage
    raise RunError(f"storage {name!r} is not allowed in this run: add it to storage.allow")


@lru_cache(maxsize=MOST_STORAGES * 4)
def kept_bytes(config: RunConfig, storage: Storage, stages: int, devices: Devices) -> tuple[int, ...]:
    """The bytes of each stage with this storage, everything kept and no CUDA graphs, which change no bit."""
    plain = replace(config, training=replace(config.training, cuda_graphs=False))
    memories = stage_memory(chosen_config(plain, storage), stages, devices)
    return tuple(stage.total for stage in memories)


def storage_seconds(config: RunConfig, stages: int, stage: int, room: Room) -> dict[str, float]:
    """The seconds of a microbatch on this node with each storage that the run file allows, by storage name.

    Storages with which no memory plan fits are left out. If the memory is unknown (0), only the run file's
    storage is included. The result is empty if there is nothing to choose.
    """
    allowed = allowed_storages(config)
    if len(allowed) == 1:
        return {}
    if room.memory_bytes == 0:
        allowed = (configured(config.storage),)
    count = min(len(allowed), MOST_PLANNED)
    tried = [allowed[place * (len(allowed) - 1) // max(1, count - 1)] for place in range(count)]
    # More microbatches in flight, once links are measured, need memory too.
    share = MEMORY_SHARE if config.pipeline.window == "auto" else 1.0
    room = replace(room, memory_bytes=int(share * room.memory_bytes))
    plans = {name_of(storage): room.plan(chosen_config(config, storage), stages, stage) for storage in tried}
    return {name: plan.seconds + plan.moving for name, plan in plans.items() if plan.fits}


def fastest(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> Storage:
    """The storage with which the slowest of a stage's nodes is fastest. Of those within `FREE` of it, the one
    with the most bits. If none fits in all nodes, the one with the fewest.

    Args:
        nodes: the `storage_seconds` of each node.
    """
    allowed = allowed_storages(config)
    slowest = {
        storage: max(node[name] for node in nodes)
        for storage in allowed
        if all((name := name_of(storage)) in node for node in nodes)
    }
    if not slowest:
        return allowed[-1]
    most = (1 + FREE) * min(slowest.values())
    return next(storage for storage, seconds in slowest.items() if seconds <= most)


def choose(config: RunConfig, stages: int, stage: int, room: Room) -> Storage:
    """The storage of a stage whose only node has this memory and these times."""
    if len(allowed_storages(config)) == 1:
        return configured(config.storage)
    return fastest(config, [storage_seconds(config, stages, stage, room)])


def narrowest(config: RunConfig) -> RunConfig:
    """The run file with the fewest bits that it allows."""
    return chosen_config(config, allowed_storages(config)[-1])


def remedies(
    config: RunConfig, stages: int, devices: Devices, memory_bytes: int, windows: int = 0
) -> list[str]:
    """Changes of the run file with which every stage fits in nodes with this much memory, each with the
    memory that the largest stage then needs; empty if none of them is enough."""

    def need(changed: RunConfig, count: int) -> int:
        return max(least_stage_bytes(narrowest(changed), count, devices, windows=windows))

    changes = []
    blocks = config.model.layers
    for count in range(stages + 1, blocks + 1):
        split = replace(config, pipeline=replace(config.pipeline, stages=count, split=()))
        if blocks % count and count != blocks:
            continue  # as many blocks a stage as with fewer stages
        if (least := need(split, count)) <= memory_bytes:
            changes.append(f"pipeline.stages = {count} ({-(-blocks // count)} blocks a stage, {_gb(least)})")
            break
    wide = {"norm_input:4", "ffn_input:4", "attention:8", "attention_output:8"} - set(config.storage.allow)
    base = configured(config.storage)
    wider = (AS_COMPUTED, "bf16", "8", "6", "5")
    wide = {entry for entry in wide if getattr(base, entry.split(":")[0]) in wider}
    if wide and not config.storage.bits_by_stage:
        section = replace(config.storage, allow=(*config.storage.allow, *sorted(wide)))
        if (least := need(replace(config, storage=section), stages)) <= memory_bytes:
            listed = ", ".join(f'"{entry}"' for entry in section.allow)
            changes.append(f"storage.allow = [{listed}] ({_gb(least)})")
    if config.training.microbatch > 1:
        small = replace(config, training=replace(config.training, microbatch=1))
        if (least := need(small, stages)) <= memory_bytes:
            changes.append(f"training.microbatch = 1 ({_gb(least)})")
    return changes


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


@dataclass(frozen=True)
class StoragePlan:
    names: tuple[str, ...]
    """The names of the stages' storages, from `name_of`; empty if the run file allows nothing but its own."""

    @classmethod
    def from_json(cls, text: str) -> "StoragePlan":
        """The plan in `text`.

        Raises:
            ConfigError: `to_json` did not write this.
        """
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


def plan_storages(config: RunConfig, stages: Sequence[Sequence[Mapping[str, float]]]) -> StoragePlan:
    """The storage of each stage, which is the same in all rows.

    Args:
        stages: for each stage, the `storage_seconds` of its nodes, one per row.
    """
    return StoragePlan(tuple(name_of(fastest(config, nodes)) for nodes in stages))
