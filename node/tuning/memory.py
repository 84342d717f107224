"""Estimates the memory that a stage takes on each device of a node, from shapes alone.

`node.tuning.device_memory` gives one device's share of a stage. Bits by stage depend on the estimate, so this
module also decides how blocks store activations.

tests/unit/node/tuning/test_memory.py compares the estimate with torch's allocations on a CPU, and blocks with
measurements on an H200 (scripts/results/stored_activations.json).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

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
"""Interpreter, libraries and packed tensors in flight, for each process."""
CPU_FIXED_BYTES = 512 * 1024 * 1024
"""The fixed bytes of a process in the memory that the stage computes in: with torch's libraries and compiled
codecs.

Source: measurements in scripts/results/explained_steps.json.
"""
COMPILING_BYTES = 80 * 1024 * 1024
"""What compiling adds, if codecs may have to be compiled first."""
CPU_PROCESS_BYTES = 400_000_000
"""The expected size of a CPU's process with torch and its links; measured as above."""
COMPILED_CODEC_BYTES = 73_000_000
"""What compiled codecs from their cache add to `CPU_PROCESS_BYTES`."""
UNRETURNED_STATE, UNRETURNED_STEP = 0.3, 0.7
"""What malloc holds of a CPU's memory besides tensors, as shares of the state's bytes and of a step's.
Measured for processes with 40 to 930 MB of tensors, which took 37 to 376 MB more."""
NUMBERS = 1 << 12
"""Tensors of a single number, such as norms."""
TRAVELLING = 4
"""Boundary tensors in float32, unpacked in advance or waiting to be packed."""
COMPARED_DEVICES = 8
"""The most devices per node that bits by stage consider."""
MEMORY_SHARE = 0.8
"""The share of a node's memory that a wider window may fill."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes that a stage takes on the node's fullest device, its leader."""

    fixed: int
    """The process, and tensors between it and the network."""
    state: int
    """Weights, gradients, moments, buffers of all-reduces and gradient groups, and sample caches."""
    snapshot: int
    """A copy of weights and moments being uploaded, if it is in the same memory."""
    kept: int
    """The activations of all microbatches between forward and backward."""
    working: int
    """The block or head being computed, and its fresh gradients."""
    applying: int
    """The work after the last backward: a tied gradient's exchange, the norm, or the optimizer."""
    captured: bool
    """Passes are CUDA graphs, whose memory is permanent and not shared."""
    workspaces: int = 0
    """Workspaces of products on a GPU."""
    pages: int = 0
    """What a GPU's allocator holds besides the tensors of passes, because pages are partly filled."""
    on_cpu: bool = False
    """Tensors are in memory that malloc manages."""

    @property
    def passes(self) -> int:
        """The peak of forward and backward."""
        return self.kept + self.working + self.pages

    @property
    def total(self) -> int:
        return int(self.total_with(self.state, self.step))

    def total_with(self, state: Any, step: Any) -> Any:
        """The total with another state and another peak of a step, which may be arrays."""
        return self.fixed + state + self.workspaces + self._beside(state, step) + step

    @property
    def own(self) -> int:
        """The part of the total that depends on the stage's size and its plan."""
        return self.total - self.fixed - self.workspaces

    @property
    def step(self) -> int:
        """The peak of passes and of what follows them."""
        passes = self.passes
        return passes + self.applying if self.captured else max(passes, self.applying)

    @property
    def unreturned(self) -> int:
        """What malloc holds of a CPU's memory besides tensors."""
        return int(UNRETURNED_STATE * self.state + UNRETURNED_STEP * self.step) if self.on_cpu else 0

    def _beside(self, state: Any, step: Any) -> Any:
        """Snapshot copies or what malloc holds, whichever is more: the copies use memory that malloc
        holds."""
        held = np.floor(UNRETURNED_STATE * state + UNRETURNED_STEP * step) if self.on_cpu else 0
        return np.maximum(self.snapshot, held)

    def room(self, memory_bytes: float) -> float:
        """The most that `step` may take on a device with this much memory."""
        left = memory_bytes - self.fixed - self.state - self.workspaces
        room = left - self.snapshot
        if self.on_cpu:
            room = min(room, (left - UNRETURNED_STATE * self.state) / (1 + UNRETURNED_STEP))
        return room


def stage_bytes(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[int, ...]:
    """The bytes that each stage needs on every device of such a node, first stage first.

    Args:
        devices: one CPU by default.
        windows: the samples of one pass over the text. They determine the size of a stateful codec's sample
            cache.
    """
    return tuple(stage.total for stage in stage_memory(config, stages, devices, windows=windows))


@lru_cache(maxsize=64)
def stage_memory(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_bytes`, split by purpose."""
    storages, devices = stage_storages(config, stages), devices or Devices()
    held = held_blocks(config, stages, apart=devices.captures(config))
    estimates = []
    for stage, own in enumerate(_estimate(config, stages, storages, devices, windows)):
        share = Share(config, devices, storages[stage])
        block = share.pages(block_bytes(config, share, storages[stage], devices), RUNS_KEPT)
        estimates.append(replace(own, pages=held[stage] * block + share.pages(own.working, RUNS_AT_WORK)))
    return tuple(estimates)


def expected_bytes(config: RunConfig, stages: int, window: int) -> tuple[int, ...]:
    """The bytes that each stage's process is expected to take on a CPU with this window, in steps during
    which no snapshot is sent. `stage_bytes`, by which nodes are admitted and plans made, is an upper bound:
    it also counts snapshot copies, and a process that compiles its codecs."""
    wide = replace(config, pipeline=replace(config.pipeline, window=window))
    fixed = CPU_PROCESS_BYTES + COMPILED_CODEC_BYTES * _compiles(config)
    ones = stage_memory(wide, stages)
    return tuple(fixed + memory.state + memory.step + memory.unreturned for memory in ones)


def _compiles(config: RunConfig) -> bool:
    return any(codec_format(name).COMPILES for name in config.pipeline.first_codecs)


def block_bytes(config: RunConfig, share: Share, storage: Storage, devices: Devices) -> int:
    """The bytes of tensors that a block keeps of one microbatch on each device."""
    if share.plain:
        return share.autograd_keeps()
    kept = stored_bytes(pass_model(config), config.training, storage).total // devices.count
    # Later slices read keys and values in another form than backward, so these are kept in addition.
    apart = storage.attention == RECOMPUTE or config.model.qk_norm != "none"
    return kept + (share.past_keys() if apart else 0)


def pass_model(config: RunConfig) -> ModelSection:
    """The model as a pass sees it: samples are as long as the longest slice."""
    return replace(config.model, sequence=longest_slice(config))


@lru_cache(maxsize=16)
def stage_storages(config: RunConfig, stages: int) -> tuple[Storage, ...]:
    """How each stage's blocks store activations, first stage first.

    It depends only on the run file and the number of stages, because it determines the run's bits, and every
    node and the coordinator must agree. With `bits_by_stage` a stage gets more bits (`storages_by_load`) as
    long as its estimate does not exceed the heaviest stage's: a stage with few activations may be the
    heaviest because of its head. This holds for stages on equal nodes, CPUs or GPUs, with up to
    `COMPARED_DEVICES` each, with or without CUDA graphs, which must not change bits.
    """
    base = (configured(config.storage),) * stages
    if not config.storage.bits_by_stage:
        return base
    loads = held_blocks(config, stages)
    forms = [base, *(storages_by_load(config.storage, loads, bits) for bits in STAGE_BITS)]
    widest = [len(STAGE_BITS)] * stages
    # A sample cache grows with the text, whose size is unknown here. So a stage is compared with those whose
    # cache is at least as large.
    remembered = stage_cache_bytes(config, stages, 1)
    for arranged, devices in _arrangements(config):
        estimates = _estimate(arranged, stages, base, devices)
        held = held_blocks(arranged, stages, apart=devices.captures(arranged))
        plain = stored_bytes(pass_model(config), config.training, base[0]).total // devices.count
        for stage, own in enumerate(estimates):
            caches = zip(estimates, remembered, strict=True)
            heaviest = max(other.total for other, cache in caches if cache >= remembered[stage])
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
    arranged = []
    for ranks in range(1, COMPARED_DEVICES + 1):
        try:
            check_shards(config, ranks)
        except RunError:
            continue
        for rows in range(1, COMPARED_DEVICES // ranks + 1):
            if config.training.microbatch % rows == 0:
                cpu = Devices(count=rows * ranks, tensor_parallel=ranks)
                # A result that holds for one multiprocessor and for the maximum holds in between.
                gpus = [replace(cpu, on_cpu=False, multiprocessors=n) for n in (MULTIPROCESSORS, 1)]
                arranged += [(plain, devices) for devices in (cpu, *gpus)]
                arranged += [(graphs, gpu) for gpu in gpus if gpu.captures(graphs)]
    return arranged


def _estimate(
    config: RunConfig, stages: int, storages: Sequence[Storage], devices: Devices, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_memory`, for stages that store activations as `storages` says. It counts tensors only: bits
    by stage follow from it, and an allocator must not change bits."""
    captured = devices.captures(config)
    held = held_blocks(config, stages, apart=captured)
    orders = stage_orders(config, stages)
    caches = stage_cache_bytes(config, stages, windows)
    whole = config.training.microbatch * longest_slice(config)
    boundary = 4 * whole * config.model.hidden
    process = CPU_FIXED_BYTES + COMPILING_BYTES * _compiles(config) if devices.on_cpu else FIXED_BYTES
    estimates: list[StageMemory] = []
    for stage, units in enumerate(stage_units(config, stages)):
        storage = storages[stage]
        share = Share(config, devices, storage)
        block = block_bytes(config, share, storage, devices)
        # The first norm's input is counted as the block's. A packed copy is kept in addition to the input.
        ends = 1 if share.plain or (storage.norm_input == AS_COMPUTED and not captured) else 2
        if slices_of(config) > 1:
            ends = 0  # as `node.stage.passes` holds neither a slice's input nor its output
        chunks = 1 + max(action.chunk for action in orders[stage])
        by_chunk = [held_passes(config, of_chunk(orders[stage], chunk)) for chunk in range(chunks)]
        in_flight = sum(by_chunk) if captured else held_passes(config, orders[stage])
        kept = held[stage] * block + in_flight * ends * share.residual
        if captured:
            # A graph's forward holds its intermediate tensors, inputs and outputs.
            kept += in_flight * (share.feed_forward_at_work() + 4 * share.residual)
            kept += by_chunk[-1] * share.head_keeps() if HEAD in units else 0
        kept += share.past_work(sum(map(is_block, units)))
        # A step's new samples wait besides the cache. A snapshot's copy is added to both.
        last = share.block_work(units)
        # When other blocks are at work, the last block's tensors are freed.
        others = share.block_work(units, last=False) - block if sum(map(is_block, units)) > 1 else 0
        working = max(last, others, share.ends_work(units))
        cache = caches[stage] + caches[stage] // max(windows, 1) * min(config.training.global_batch, windows)
        # A leader that shares a microbatch holds it whole and in pieces.
        travelling = TRAVELLING + (2 if devices.count > 1 else 0)
        estimates.append(
            StageMemory(
                fixed=process + travelling * boundary,
                state=share.state(units)
                + share.rotary() * chunks
                + cache
                + _group_sums(config, units, share),
                snapshot=share.snapshot(units),
                kept=kept,
                working=working,
                workspaces=0 if devices.on_cpu else WORKSPACES,
                applying=share.applying(units) + NUMBERS,
                captured=captured,
                on_cpu=devices.on_cpu,
            )
        )
    return tuple(estimates)


def _group_sums(config: RunConfig, units: Sequence[str], share: Share) -> int:
    """The memory of gradient groups: the group's gradient, or the change of a round, that is being packed,
    and packed sums if they are in the same memory."""
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
    # Nodes of the tree without a sibling; other rows' shares of what this row sums, and their sums.
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
    """The number of chunk activations that each stage has memory for; at least those that window 0 holds.

    Args:
        memory_bytes: the memory of each node's smallest device; 0 if unknown, which allows window 0 only.
        windows: as for `stage_bytes`.
        devices: the devices of each stage's node.
        configs: the run file as each stage has it, if the coordinator chose what stages store.
    """
    # Memory is linear in the activations held, so two windows give the size of one activation.
    nodes = devices or (Devices(),) * stages
    held, needs = [], []
    own = list(zip(nodes, configs or (config,) * stages, strict=True))
    for window in (0, max(1, config.microbatches * slices_of(config))):
        held.append([held_activations(order) for order in stage_orders(config, stages, window)])
        by_kind = {
            (node, stored): stage_memory(
                replace(stored, pipeline=replace(stored.pipeline, window=window)),
                stages,
                node,
                windows=windows,
            )
            for node, stored in set(own)
        }
        needs.append([by_kind[kind][stage] for stage, kind in enumerate(own)])
    most: list[int] = []
    for narrow, wide, least, large, memory in zip(*held, *needs, memory_bytes, strict=True):
        room = least.room(MEMORY_SHARE * memory)
        # Without CUDA graphs, the optimizer may reuse the memory of activations.
        after = least.applying if least.captured else 0
        spare = room - least.passes - after
        if least.step > room:
            spare = 0
        if config.pipeline.window_gb > 0:
            spare = min(spare, config.pipeline.window_gb * 1e9)
        each = (large.kept + large.pages - least.kept - least.pages) / max(1, wide - narrow)
        most.append(wide if each == 0 else narrow + max(0, int(spare // each)))
    return tuple(most)
