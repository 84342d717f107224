"""How much memory a stage takes on each device of a node, from shapes, before anything is allocated.

What is divided is divided here by the same functions as in the model. Tensor parallelism shares the
projections of blocks and what is computed inside them; embedding, norms and head are whole on every device.
Between blocks each device has its share of the positions. Data parallelism shares a microbatch's samples and
nothing else. How blocks keep their activations belongs here as well, because bits by stage follow from the
estimate.

tests/unit/test_memory.py compares the estimate with what torch allocates on a CPU, and what a block keeps
with what was measured on an H200 (scripts/results/stored_activations.json).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from kernels.fp8_layout import BLOCK
from node.config.schema import ModelSection, RunConfig, TrainingSection
from node.model.placement import chunks_of, held_blocks, stage_cache_bytes, stage_units
from node.model.shard_shapes import check_shards, pieces, shard_shape
from node.model.storage import STAGE_BITS, Storage, configured, storages_by_load, stored_bytes
from node.model.units import EMBED, HEAD, block_name, is_block, parameter_specs
from node.stage.schedule import held_activations, schedule
from wire.errors import RunError
from wire.identity.enrolment import CPU, Hardware

FIXED_BYTES = 256 * 1024 * 1024
"""Interpreter, libraries and packed tensors in flight, of each process."""
TRAVELLING = 4
"""Boundary tensors in float32 that are unpacked ahead, or wait to be packed."""
COMPARED_DEVICES = 8
"""The most of one node that bits by stage look at."""
MEMORY_SHARE = 0.8
"""Of a node's memory that a wider window may fill, as the estimate counts it."""
_GRADIENT_BYTES = 1 + 1 / BLOCK
_MOMENT_BYTES = 1 + 3 / BLOCK
"""In e4m3 (`kernels.fp8`): codes, and a block's exponent, or its scale and power."""
_SNAPSHOT_BYTES = 12
"""Weight and two moments in float32; those in e4m3 are less."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """What computes a stage at one node."""

    count: int = 1
    tensor_parallel: int = 1
    """How many of them share each block."""
    on_cpu: bool = True
    """They compute in main memory, where snapshots are copied too, and with the kernels' references, whose
    intermediate tensors a GPU's kernels do not make."""

    @property
    def rows(self) -> int:
        """How many shares of a microbatch's samples there are."""
        return self.count // self.tensor_parallel

    def captures(self, training: TrainingSection) -> bool:
        """Whether passes are CUDA graphs (`node.stage.captured_passes`)."""
        return training.cuda_graphs and not self.on_cpu and self.count == 1


def devices_of(hardware: Hardware) -> Devices:
    """Those that a node says it has."""
    return Devices(
        count=hardware.devices,
        tensor_parallel=hardware.tensor_parallel,
        on_cpu=hardware.device == CPU,
    )


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes that one stage takes on the device of a node that holds the most (the one that leads)."""

    fixed: int
    """The process, and tensors between it and the network."""
    state: int
    """Weights, gradients, moments, what is summed over devices, and what a codec remembers."""
    snapshot: int
    """A copy of weights and moments on its way to the coordinator, if it is in the same memory."""
    kept: int
    """Activations of all microbatches between forward and backward."""
    working: int
    """The block or head at work, and one gradient in full."""
    applying: int
    """The optimizer at work, or two copies of a tied gradient; nothing is kept then."""

    @property
    def total(self) -> int:
        return self.fixed + self.state + self.snapshot + max(self.kept + self.working, self.applying)


def stage_bytes(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[int, ...]:
    """Bytes that each stage needs on every device of such a node, first stage first.

    Args:
        devices: one CPU by default.
        windows: samples of one pass over the text; they count for a codec with a memory.
    """
    return tuple(stage.total for stage in stage_memory(config, stages, devices, windows=windows))


def stage_memory(
    config: RunConfig, stages: int, devices: Devices | None = None, *, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_bytes`, by what it is for."""
    return _estimate(config, stages, stage_storages(config, stages), devices or Devices(), windows)


@lru_cache(maxsize=16)
def stage_storages(config: RunConfig, stages: int) -> tuple[Storage, ...]:
    """How each stage's blocks keep activations, first stage first.

    A function of the run file and the number of stages alone: it decides a run's bits, and every node and the
    coordinator come to the same. With `bits_by_stage` a stage has as much of what `storages_by_load` gives it
    as leaves its estimate at or below the heaviest stage's without: one with few activations may be heaviest
    for its head. That holds for nodes that are alike, CPUs or GPUs, of up to `COMPARED_DEVICES` each, with or
    without CUDA graphs: whether there are any must change no bit.
    """
    base = (configured(config.storage),) * stages
    if not config.storage.bits_by_stage:
        return base
    held = held_blocks(config, stages)
    forms = [base, *(storages_by_load(config.storage, held, bits) for bits in STAGE_BITS)]
    widest = [len(STAGE_BITS)] * stages
    # A codec's memory grows with a text that is not known here: a stage is compared with those that remember
    # as much or more.
    remembered = stage_cache_bytes(config, stages, 1)
    for arranged, devices in _arrangements(config):
        found = _estimate(arranged, stages, base, devices)
        plain = stored_bytes(config.model, config.training, base[0]).total // devices.count
        for stage, own in enumerate(found):
            heaviest = max(f.total for f, r in zip(found, remembered, strict=True) if r >= remembered[stage])
            for number in range(widest[stage], -1, -1):
                storage = forms[number][stage]
                block = stored_bytes(config.model, config.training, storage).total // devices.count
                if replace(own, kept=own.kept + held[stage] * (block - plain)).total <= heaviest:
                    widest[stage] = number
                    break
    return tuple(forms[number][stage] for stage, number in enumerate(widest))


def _arrangements(config: RunConfig) -> list[tuple[RunConfig, Devices]]:
    """Every one of up to `COMPARED_DEVICES` that can compute a stage of this run, with graphs and without."""
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
                gpu = replace(cpu, on_cpu=False)
                found += [(plain, cpu), (plain, gpu)]
                if gpu.captures(graphs.training):
                    found.append((graphs, gpu))
    return found


def _estimate(
    config: RunConfig, stages: int, storages: Sequence[Storage], devices: Devices, windows: int = 0
) -> tuple[StageMemory, ...]:
    """As `stage_memory`, of stages that keep activations so."""
    chunks, held = chunks_of(config, stages), held_blocks(config, stages)
    orders = schedule(stages, chunks, config.microbatches, config.pipeline.first_window)
    caches = stage_cache_bytes(config, stages, windows)
    whole = config.training.microbatch * config.model.sequence
    boundary = 4 * whole * config.model.hidden
    found: list[StageMemory] = []
    for stage, units in enumerate(stage_units(config, stages)):
        storage = storages[stage]
        one = _Share(config, devices, storage_is_off=storage.is_off)
        if storage.is_off:
            block = one.autograd_keeps()
            ends = 1  # its input is the first norm's, and counted there
        else:
            block = stored_bytes(config.model, config.training, storage).total // devices.count
            ends = 2
        in_flight = held_activations(orders[stage])
        kept = held[stage] * block + in_flight * ends * one.residual
        if one.captures:
            # A graph's forward keeps the places of what it needs meanwhile, and of what goes in and out.
            kept += in_flight * (one.block_at_work() + 4 * one.residual)
        # What a step teaches waits beside what is remembered; a snapshot's copy comes on top.
        cache = caches[stage] + caches[stage] // max(windows, 1) * min(config.training.global_batch, windows)
        # A leader that shares a microbatch has it whole too, and cut to pieces.
        travelling = TRAVELLING + (2 if devices.count > 1 else 0)
        found.append(
            StageMemory(
                fixed=FIXED_BYTES + travelling * boundary,
                state=one.state(units) + one.rotary() * chunks + cache,
                snapshot=one.snapshot(units),
                kept=kept,
                working=max(one.block_at_work(), one.head_at_work() if HEAD in units else 0)
                + one.largest_gradient(units),
                applying=one.applying(units, tied_apart=config.model.tied and stages > 1),
            )
        )
    return tuple(found)


class _Share:
    """What one of a node's devices holds and computes; all sizes in bytes."""

    def __init__(self, config: RunConfig, devices: Devices, *, storage_is_off: bool) -> None:
        self._config = config
        self._model: ModelSection = config.model
        self._training: TrainingSection = config.training
        self._devices = devices
        self._off = storage_is_off
        self._row_tokens = config.training.microbatch * config.model.sequence // devices.rows
        """Of a microbatch, in the row of devices that shares blocks."""
        self._tokens = self._row_tokens // devices.tensor_parallel
        self._half = config.training.precision == "bfloat16"
        self.captures = devices.captures(config.training)
        self._element = 2 if self._half else 4
        """What projections give."""

    @property
    def residual(self) -> int:
        """The hidden states of one microbatch: this device's positions, float32."""
        return 4 * self._tokens * self._model.hidden

    # ---- weights and what belongs to them

    def state(self, units: Sequence[str]) -> int:
        """Weights, gradients and moments of these units."""
        training, devices = self._training, self._devices
        weight = 2 if training.weights == "bfloat16" else 4
        gradient = _GRADIENT_BYTES if training.gradients == "fp8" else 4  # float32, whatever the weights are
        moments = 2 * _MOMENT_BYTES if training.moments == "fp8" else 8
        total = 0.0
        for elements, is_matrix, is_sharded in self._parameters(units):
            total += elements * (weight + gradient + moments if is_matrix else 16)
            if (
                is_matrix
                and training.gradients == "fp8"
                and (devices.rows if is_sharded else devices.count) > 1
            ):
                # What the all-reduce sends and receives.
                total += 2 * _GRADIENT_BYTES * elements
        return int(total) + (self._copies(units) if self.captures else 0)

    def _copies(self, units: Sequence[str]) -> int:
        """Autocast's copies of the projections' weights."""
        if not self._half or self._training.weights == "bfloat16":
            return 0
        projecting = self._parameters([unit for unit in units if unit != EMBED])
        return sum(2 * elements for elements, is_matrix, _ in projecting if is_matrix)

    def snapshot(self, units: Sequence[str]) -> int:
        """A copy of these units' state for a snapshot, whole whatever the share, and a layer as a file."""
        if not self._devices.on_cpu:
            return 0
        sizes = [sum(one[0] for one in _unit_parameters(self._model, unit, 1)) for unit in units]
        return _SNAPSHOT_BYTES * (sum(sizes) + max(sizes))

    def rotary(self) -> int:
        """A chunk's tables of sines and cosines."""
        model = self._model
        return 2 * 4 * model.sequence * model.hidden // model.heads if model.family == "llama" else 0

    def largest_gradient(self, units: Sequence[str]) -> int:
        """One matrix's, as backward makes it, before it is added to the main gradient."""
        half, packed = self._training.weights == "bfloat16", self._training.gradients == "fp8"
        # On a CPU in float32 too: unpacked, added to and packed again; one in bfloat16 as it is added.
        more = (12 if packed else 4 * half) if self._devices.on_cpu else 0
        return ((2 if half else 4) + more) * self._largest_matrix(units)

    def applying(self, units: Sequence[str], *, tied_apart: bool) -> int:
        """What AdamW makes beside its state, or the exchange of a tied gradient's two shares."""
        training = self._training
        largest = self._largest_matrix(units)
        if self._devices.on_cpu:
            # Measured a matrix at a time: a root; all of it in float32; random bits in int64.
            packed = 58 if training.weights == "bfloat16" else 34
            step = (packed if training.moments == "fp8" else 8) * largest
        elif training.moments == "fp8":
            step = 4 * largest  # a norm's unpacked gradient; the kernel itself makes nothing
        else:
            # torch's own for GPUs takes all matrices at once, and makes a root of each.
            step = 4 * sum(elements for elements, _, _ in self._parameters(units))
        if not (tied_apart and (EMBED in units or HEAD in units)):
            return step
        return max(step, 2 * 4 * self._model.vocab * self._model.hidden)

    def _parameters(self, units: Sequence[str]) -> list[tuple[int, bool, bool]]:
        """Of these units, as `_unit_parameters` has them."""
        ranks = self._devices.tensor_parallel
        return [one for unit in units for one in _unit_parameters(self._model, unit, ranks)]

    def _largest_matrix(self, units: Sequence[str]) -> int:
        return max(elements for elements, is_matrix, _ in self._parameters(units) if is_matrix)

    # ---- activations

    def autograd_keeps(self) -> int:
        """Of one block and microbatch, where nothing is packed: each saved tensor counted."""
        model, element, ranks = self._model, self._element, self._devices.tensor_parallel
        llama = model.family == "llama"
        kv_width = model.hidden // model.heads * model.kv_heads if llama else model.hidden
        # Two norms: the input, and what it divides by.
        own = 2 * (4 * model.hidden + (4 if llama else 8))
        if llama and self._devices.on_cpu:
            own += 2 * 4 * model.hidden  # there torch keeps what it scales by the weight
        # The norms' results, of all positions; autocast casts one for each projection that it enters.
        copies = (5 if llama else 2) if self._half and ranks == 1 else 2
        wide = copies * element * model.hidden
        # Inside a block a device has its share of heads and of the feed-forward's width: queries, keys,
        # values, attention's result and log-sum-exp; gate, its SiLU, up and the product, or up and its GELU.
        inside = element * (2 * model.hidden + 2 * kv_width) + 4 * model.heads
        inside += element * (4 if llama else 2) * model.ffn
        # Autocast's copies of weights belong to each microbatch's graph, if they are not made once a step.
        weights = 0 if self.captures else self._copies(["block.0000"])
        return self._tokens * own + self._row_tokens * wide + self._row_tokens * inside // ranks + weights

    def block_at_work(self) -> int:
        """What a block's backward makes beside what it was kept.

        Plain: gradients of two tensors of the feed-forward's width. Packed: they and their inputs, unpacked.
        """
        model, ranks = self._model, self._devices.tensor_parallel
        wide, narrow, element = (2, 2, self._element) if self._off else (4, 4, self._element)
        if self._devices.on_cpu and not self._off:
            # The references compute in float32, on one input of GELU or two of SwiGLU.
            wide, narrow, element = (9 if model.family == "llama" else 6), 2, 4
        made = self._row_tokens * element * (wide * model.ffn // ranks + narrow * model.hidden)
        # Between ranks, what one sends and receives, and both in another order.
        return made + (6 * 4 * self._row_tokens * model.hidden if ranks > 1 else 0)

    def head_at_work(self) -> int:
        """Logits, their logarithms and gradient; the norm's input and result."""
        model = self._model
        logits = (3 * 4 + (2 if self._half else 0)) * model.vocab
        weights = 0 if self.captures else self._copies([HEAD])
        return self._tokens * (logits + 3 * 4 * model.hidden) + weights


def _unit_parameters(model: ModelSection, unit: str, ranks: int) -> tuple[tuple[int, bool, bool], ...]:
    """One device's elements of each parameter, whether it is a matrix, and whether it is a shard."""
    # Blocks have the same shapes, and there may be thousands.
    return _shapes(model, block_name(0) if is_block(unit) else unit, ranks)


@lru_cache(maxsize=64)
def _shapes(model: ModelSection, unit: str, ranks: int) -> tuple[tuple[int, bool, bool], ...]:
    return tuple(
        (
            prod(shard_shape(unit, spec, ranks)),
            len(spec.shape) >= 2,
            ranks > 1 and pieces(unit, spec) is not None,
        )
        for spec in parameter_specs(model, unit)
    )


def most_held(
    config: RunConfig,
    stages: int,
    memory_bytes: Sequence[int],
    windows: int = 0,
    devices: Sequence[Devices] | None = None,
) -> tuple[int, ...]:
    """Chunk activations that each stage has memory for; at least those that window 0 holds.

    Args:
        memory_bytes: of each stage's node, on its smallest device; 0 where it is not known, which leaves
            nothing beyond window 0.
        windows: as for `stage_bytes`.
        devices: of each stage's node.
    """
    # What is kept is linear in what is held, so two windows tell what one activation takes.
    chunks = chunks_of(config, stages)
    nodes = devices or (Devices(),) * stages
    held, needs = [], []
    for window in (0, max(1, config.microbatches)):
        changed = replace(config, pipeline=replace(config.pipeline, window=window))
        held.append(
            [held_activations(order) for order in schedule(stages, chunks, config.microbatches, window)]
        )
        by_node = {node: stage_memory(changed, stages, node, windows=windows) for node in set(nodes)}
        needs.append([by_node[node][stage] for stage, node in enumerate(nodes)])
    most: list[int] = []
    for narrow, wide, least, large, memory in zip(*held, *needs, memory_bytes, strict=True):
        room = MEMORY_SHARE * memory
        spare = room - (least.fixed + least.state + least.snapshot + least.working + least.kept)
        if least.total > room:
            spare = 0
        if config.pipeline.window_gb > 0:
            spare = min(spare, config.pipeline.window_gb * 1e9)
        one = (large.kept - least.kept) / max(1, wide - narrow)
        most.append(wide if one == 0 else narrow + max(0, int(spare // one)))
    return tuple(most)
