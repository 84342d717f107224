"""In how many bits a stage stores its activations, where the run file allows several (`storage.allow`).

Bits change the run's, so a node does not choose them: the coordinator does, when it places a stage. Each node
works out how fast it is with each storage, by the best plan of memory with it (`node.tuning.memory_plan`)
and the times that it measured. A stage gets the storage with which its slowest node is fastest; among equally
fast ones, the one with the most bits. The choice is recorded before any node hears of it, and holds while the
run has as many stages. Torch-free.
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
"""That a run may allow."""
MOST_PLANNED = 16
"""Storages that a node plans with: of more, so many between the most bits and the fewest."""
FREE = 0.01
"""A storage with more bits may take a microbatch this much longer."""
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


def storage_seconds(config: RunConfig, stages: int, stage: int, room: Room) -> dict[str, float]:
    """Seconds of a microbatch on this node with each storage that the run file allows, by storage name.

    Storages with which no plan of memory fits are left out; where the memory is not known (0), all but the
    run file's. Empty if there is nothing to choose.
    """
    allowed = allowed_storages(config)
    if len(allowed) == 1:
        return {}
    if room.memory_bytes == 0:
        allowed = (configured(config.storage),)
    count = min(len(allowed), MOST_PLANNED)
    some = [allowed[place * (len(allowed) - 1) // max(1, count - 1)] for place in range(count)]
    # More microbatches in flight, once links are measured, need memory too.
    share = MEMORY_SHARE if config.pipeline.window == "auto" else 1.0
    room = replace(room, memory_bytes=int(share * room.memory_bytes))
    plans = {name_of(storage): room.plan(chosen_config(config, storage), stages, stage) for storage in some}
    return {name: plan.seconds + plan.moving for name, plan in plans.items() if plan.fits}


def fastest(config: RunConfig, nodes: Sequence[Mapping[str, float]]) -> Storage:
    """The storage with which the slowest of a stage's nodes is fastest; of those within `FREE` of it, the one
    with the most bits. If none fits in all of them, the one with the fewest.

    Args:
        nodes: `storage_seconds` of each.
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
    """What a stage gets whose only node has this memory and these times."""
    if len(allowed_storages(config)) == 1:
        return configured(config.storage)
    return fastest(config, [storage_seconds(config, stages, stage, room)])


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
            listed = ", ".join(f'"{entry}"' for entry in section.allow)
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


def plan_storages(config: RunConfig, stages: Sequence[Sequence[Mapping[str, float]]]) -> StoragePlan:
    """What each stage stores its activations in, the same in all rows.

    Args:
        stages: of each stage, `storage_seconds` of its nodes, one a row.
    """
    return StoragePlan(tuple(name_of(fastest(config, nodes)) for nodes in stages))
