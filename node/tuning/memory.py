"""Estimate the memory that a stage takes on each device of a node, from shapes alone.

`node.tuning.device_memory` gives one device's share of a stage. Bits by stage follow from the estimate, so
how blocks store activations is decided here too.

tests/unit/node/tuning/test_memory.py compares the estimate with what torch allocates on a CPU, and blocks
with measurements on an H200 (scripts/results/stored_activations.json).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from node.config.schema import ModelSection, RunConfig
from node.model.shard_shapes import check_shards
from node.model.storage import (
    AS_COMPUTED,
    RECOMPUTE,
    STAGE_BITS,
    Storage,
    configured,
    storages_by_load,
    stored_bytes,
)
from node.model.units import HEAD, is_block
from node.schedule.gradient_groups import model_pieces, piece_bytes
from node.schedule.placement import (
    held_blocks,
    held_passes,
    longest_slice,
    of_chunk,
    slices_of,
    stage_cache_bytes,
    stage_orders,
    stage_units,
)
from node.schedule.schedule import held_activations
from node.tuning.device_memory import (
    MULTIPROCESSORS,
    RUNS_AT_WORK,
    RUNS_KEPT,
    WORKSPACES,
    Devices,
    Share,
)
from wire.codecs.formats import codec_format
from wire.errors import RunError

FIXED_BYTES = 256 * 1024 * 1024
"""Interpreter, libraries and packed tensors in flight, of each process."""
CPU_FIXED_BYTES = 512 * 1024 * 1024
"""The same where it is in the memory that the stage computes in, with torch's libraries and compiled codecs:
measured (scripts/results/explained_steps.json)."""
COMPILING_BYTES = 80 * 1024 * 1024
"""What compiling adds, where codecs may have to be compiled first."""
CPU_PROCESS_BYTES = 400_000_000
"""What is expected of a CPU's process with torch and its links, measured as above."""
COMPILED_CODEC_BYTES = 73_000_000
"""What compiled codecs, found in their cache, add to `CPU_PROCESS_BYTES`."""
UNRETURNED_STATE, UNRETURNED_STEP = 0.3, 0.7
"""What malloc holds of a CPU's memory beside tensors, over those of the state and of a step: of processes
with 40 to 930 MB of tensors, which took 37 to 376 MB more."""
NUMBERS = 1 << 12
"""Tensors of one number each, such as norms."""
TRAVELLING = 4
"""Boundary tensors in float32, unpacked ahead or waiting to be packed."""
COMPARED_DEVICES = 8
"""The most devices of one node that bits by stage consider."""
MEMORY_SHARE = 0.8
"""The share of a node's memory that a wider window may fill."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that a stage takes on the node's fullest device, its leader."""

    fixed: int
    """The process, and tensors between it and the network."""
    state: int
    """Weights, gradients, moments, buffers of all-reduces and gradient groups, sample caches."""
    snapshot: int
    """A copy of weights and moments being uploaded, if it is in the same memory."""
    kept: int
    """Activations of all microbatches between forward and backward."""
    working: int
    """The block or head being computed, and its fresh gradients."""
    applying: int
    """After the last backward: a tied gradient's exchange, the norm, or the optimizer."""
    captured: bool
    """Passes are CUDA graphs, whose memory is permanent and not shared."""
    workspaces: int = 0
    """That products hold on a GPU."""
    pages: int = 0
    """What a GPU's allocator holds beside the tensors of passes: pages that they fill in part."""
    on_cpu: bool = False
    """Tensors are in memory that malloc gives out."""

    @property
    def passes(self) -> int:
        """Forward and backward, at their peak."""
        return self.kept + self.working + self.pages

    @property
    def total(self) -> int:
        return self.fixed + self.state + self.workspaces + self.beside + self.step

    @property
    def own(self) -> int:
        """Of the total, what the stage takes by its size and its plan."""
        return self.total - self.fixed - self.workspaces

    @property
    def step(self) -> int:
        """Passes and what follows them, at their peak."""
        passes = self.passes
        return passes + self.applying if self.captured else max(passes, self.applying)

    @property
    def unreturned(self) -> int:
        """What malloc holds of a CPU's memory beside tensors."""
        return int(UNRETURNED_STATE * self.state + UNRETURNED_STEP * self.step) if self.on_cpu else 0

    @property
    def beside(self) -> int:
        """Copies for a snapshot lie in what malloc holds, as far as that goes."""
        return max(self.snapshot, self.unreturned)

    def room(self, memory_bytes: float) -> float:
        """What `step` may take on a device with so much memory."""
        left = memory_bytes - self.fixed - self.state - self.workspaces
        room = left - self.snapshot
        if self.on_cpu:
            room = min(room, (left - UNRETURNED_STATE * self.state) / (1 + UNRETURNED_STEP))
        return room


def stage_bytes(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[int, ...]:
    """Bytes that each stage needs on every device of such a node, first stage first.

    Args:
        devices: one CPU by default.
        windows: samples of one pass over the text; they size a stateful codec's sample cache.
    """
    return tuple(stage.total for stage in stage_memory(config, stages, devices, windows=windows))


@lru_cache(maxsize=64)
def stage_memory(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_bytes`, by purpose."""
    storages, devices = stage_storages(config, stages), devices or Devices()
    held = held_blocks(config, stages, apart=devices.captures(config))
    found = []
    for stage, own in enumerate(_estimate(config, stages, storages, devices, windows)):
        one = Share(config, devices, storages[stage])
        block = one.pages(block_bytes(config, one, storages[stage], devices), RUNS_KEPT)
        found.append(replace(own, pages=held[stage] * block + one.pages(own.working, RUNS_AT_WORK)))
    return tuple(found)


def expected_bytes(config: RunConfig, stages: int, window: int) -> tuple[int, ...]:
    """What each stage's process is expected to take on a CPU with this window, in steps beside which no
    snapshot is sent. `stage_bytes`, by which nodes are admitted and plans made, is a bound: it counts the
    copies of a snapshot too, and a process that compiles its codecs."""
    wide = replace(config, pipeline=replace(config.pipeline, window=window))
    fixed = CPU_PROCESS_BYTES + COMPILED_CODEC_BYTES * _compiles(config)
    ones = stage_memory(wide, stages)
    return tuple(fixed + memory.state + memory.step + memory.unreturned for memory in ones)


def _compiles(config: RunConfig) -> bool:
    return any(codec_format(name).COMPILES for name in config.pipeline.first_codecs)


def block_bytes(config: RunConfig, share: Share, storage: Storage, devices: Devices) -> int:
    """What a block keeps of one microbatch on each device, in tensors."""
    if share.plain:
        return share.autograd_keeps()
    kept = stored_bytes(pass_model(config), config.training, storage).total // devices.count
    # Other forms of keys and values are those that later slices see.
    apart = storage.attention == RECOMPUTE or config.model.qk_norm != "none"
    return kept + (share.past_keys() if apart else 0)


def pass_model(config: RunConfig) -> ModelSection:
    """The model as a pass sees it: samples are as long as the longest slice."""
    return replace(config.model, sequence=longest_slice(config))


@lru_cache(maxsize=16)
def stage_storages(config: RunConfig, stages: int) -> tuple[Storage, ...]:
    """How each stage's blocks store activations, first stage first.

    A function of the run file and the number of stages alone: it decides the run's bits, and every node and
    the coordinator must agree. With `bits_by_stage` a stage gets more bits (`storages_by_load`) as long as
    its estimate stays at or below the heaviest stage's: a stage with few activations may be heaviest for its
    head. That holds for like nodes, CPUs or GPUs, of up to `COMPARED_DEVICES` each, with or without CUDA
    graphs, which must not change bits.
    """
    base = (configured(config.storage),) * stages
    if not config.storage.bits_by_stage:
        return base
    loads = held_blocks(config, stages)
    forms = [base, *(storages_by_load(config.storage, loads, bits) for bits in STAGE_BITS)]
    widest = [len(STAGE_BITS)] * stages
    # A sample cache grows with the text, which is not known here: compare a stage with those whose cache is
    # at least as large.
    remembered = stage_cache_bytes(config, stages, 1)
    for arranged, devices in _arrangements(config):
        found = _estimate(arranged, stages, base, devices)
        held = held_blocks(arranged, stages, apart=devices.captures(arranged))
        plain = stored_bytes(pass_model(config), config.training, base[0]).total // devices.count
        for stage, own in enumerate(found):
            heaviest = max(f.total for f, r in zip(found, remembered, strict=True) if r >= remembered[stage])
            for number in range(widest[stage], -1, -1):
                storage = forms[number][stage]
                block = stored_bytes(pass_model(config), config.training, storage).total // devices.count
                if replace(own, kept=own.kept + held[stage] * (block - plain)).total <= heaviest:
                    widest[stage] = number
                    break
    return tuple(forms[number][stage] for stage, number in enumerate(widest))


def _arrangements(config: RunConfig) -> list[tuple[RunConfig, Devices]]:
    """All nodes of up to `COMPARED_DEVICES` that can compute a stage of this run, with graphs and without."""
    training = config.training
    graphs, plain = (replace(config, training=replace(training, cuda_graphs=on)) for on in (True, False))
    found = []
    for ranks in range(1, COMPARED_DEVICES + 1):
        try:
            check_shards(config, ranks)
        except RunError:
            continue
        for rows in range(1, COMPARED_DEVICES // ranks + 1):
            if config.training.microbatch % rows == 0:
                cpu = Devices(count=rows * ranks, tensor_parallel=ranks)
                # What holds for one multiprocessor and for the most holds in between.
                gpus = [replace(cpu, on_cpu=False, multiprocessors=n) for n in (MULTIPROCESSORS, 1)]
                found += [(plain, devices) for devices in (cpu, *gpus)]
                found += [(graphs, gpu) for gpu in gpus if gpu.captures(graphs)]
    return found


def _estimate(
    config: RunConfig, stages: int, storages: Sequence[Storage], devices: Devices, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_memory`, for stages that store activations this way; of tensors alone, because bits by stage
    follow from it and an allocator must not change bits."""
    captured = devices.captures(config)
    held = held_blocks(config, stages, apart=captured)
    orders = stage_orders(config, stages)
    caches = stage_cache_bytes(config, stages, windows)
    whole = config.training.microbatch * longest_slice(config)
    boundary = 4 * whole * config.model.hidden
    process = CPU_FIXED_BYTES + COMPILING_BYTES * _compiles(config) if devices.on_cpu else FIXED_BYTES
    found: list[StageMemory] = []
    for stage, units in enumerate(stage_units(config, stages)):
        storage = storages[stage]
        one = Share(config, devices, storage)
        block = block_bytes(config, one, storage, devices)
        # The first norm's input is counted as the block's. What is packed lies beside it.
        ends = 1 if one.plain or (storage.norm_input == AS_COMPUTED and not captured) else 2
        if slices_of(config) > 1:
            ends = 0  # as `node.stage.passes` holds neither a slice's input nor its output
        chunks = 1 + max(action.chunk for action in orders[stage])
        by_chunk = [held_passes(config, of_chunk(orders[stage], chunk)) for chunk in range(chunks)]
        in_flight = sum(by_chunk) if captured else held_passes(config, orders[stage])
        kept = held[stage] * block + in_flight * ends * one.residual
        if captured:
            # A graph's forward holds its intermediate tensors, inputs and outputs.
            kept += in_flight * (one.feed_forward_at_work() + 4 * one.residual)
            kept += by_chunk[-1] * one.head_keeps() if HEAD in units else 0
        kept += sum(map(is_block, units)) * one.past_gradients() + one.past_joined()
        # A step's new samples wait beside the cache; a snapshot's copy comes on top.
        last = one.block_work(units)
        # When others are at work, the last block's tensors are gone.
        others = one.block_work(units, last=False) - block if sum(map(is_block, units)) > 1 else 0
        working = max(last, others, one.ends_work(units))
        cache = caches[stage] + caches[stage] // max(windows, 1) * min(config.training.global_batch, windows)
        # A leader that shares a microbatch holds it whole and in pieces.
        travelling = TRAVELLING + (2 if devices.count > 1 else 0)
        found.append(
            StageMemory(
                fixed=process + travelling * boundary,
                state=one.state(units) + one.rotary() * chunks + cache + _group_sums(config, units, one),
                snapshot=one.snapshot(units),
                kept=kept,
                working=working,
                workspaces=0 if devices.on_cpu else WORKSPACES,
                applying=one.applying(units) + NUMBERS,
                captured=captured,
                on_cpu=devices.on_cpu,
            )
        )
    return tuple(found)


def _group_sums(config: RunConfig, units: Sequence[str], share: Share) -> int:
    """Of gradient groups: a group's gradient, or what a round changed, that is being packed and, in main
    memory, packed sums."""
    groups = config.pipeline.groups
    if groups == 1:
        return 0
    kinds = [model_pieces(config, of_round=of_round) for of_round in (False, True)[: config.sync.every]]
    of_kinds = [[piece for unit in units for piece in pieces[unit]] for pieces in kinds]
    elements = max(sum(piece.elements for piece in pieces) for pieces in of_kinds)
    taken = 4 * elements if config.sync.every > 1 else share.gradients(units)
    if not share.on_cpu:
        return taken
    packed = max(sum(map(piece_bytes, pieces)) for pieces in of_kinds)
    # Nodes of the tree without a sibling; other rows' shares of what this row sums up, and their sums.
    nodes = 1 + (groups - 1).bit_length()
    return taken + packed * (nodes + (2 if config.pipeline.most_rows > 1 else 0))


def most_held(
    config: RunConfig,
    stages: int,
    memory_bytes: Sequence[int],
    windows: int = 0,
    devices: Sequence[Devices] | None = None,
    configs: Sequence[RunConfig] | None = None,
) -> tuple[int, ...]:
    """Chunk activations that each stage has memory for; at least those that window 0 holds.

    Args:
        memory_bytes: of each node's smallest device; 0 if unknown, which allows window 0 only.
        windows: as for `stage_bytes`.
        devices: of each stage's node.
        configs: the run file as each stage has it, where the coordinator chose what they store.
    """
    # Memory is linear in the activations held, so two windows give the size of one.
    nodes = devices or (Devices(),) * stages
    held, needs = [], []
    own = list(zip(nodes, configs or (config,) * stages, strict=True))
    for window in (0, max(1, config.microbatches * slices_of(config))):
        held.append([held_activations(order) for order in stage_orders(config, stages, window)])
        by_kind = {
            (node, one): stage_memory(
                replace(one, pipeline=replace(one.pipeline, window=window)), stages, node, windows=windows
            )
            for node, one in set(own)
        }
        needs.append([by_kind[kind][stage] for stage, kind in enumerate(own)])
    most: list[int] = []
    for narrow, wide, least, large, memory in zip(*held, *needs, memory_bytes, strict=True):
        room = least.room(MEMORY_SHARE * memory)
        # Except with CUDA graphs, the optimizer may reuse the memory of activations.
        after = least.applying if least.captured else 0
        spare = room - least.passes - after
        if least.step > room:
            spare = 0
        if config.pipeline.window_gb > 0:
            spare = min(spare, config.pipeline.window_gb * 1e9)
        one = (large.kept + large.pages - least.kept - least.pages) / max(1, wide - narrow)
        most.append(wide if one == 0 else narrow + max(0, int(spare // one)))
    return tuple(most)
