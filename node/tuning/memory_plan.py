"""Plans what the blocks and the optimizer of a stage do so that it fits in a node's memory. This module
imports no torch.

No plan changes a bit, so every node decides for itself, and a small card and a large one may host stages of
the same run. Each kind of tensor that a block keeps for backward has three choices: it stays on the device,
backward recomputes it, or it waits in host memory (`node.model.offload`). A block may also keep only its
input, here or in host memory, and run again. State may be in host memory too: first the optimizer's moments,
then blocks' weights, then their main gradients (`node.tuning.state_moves`).

`Room.plan` takes the plan that adds the least time among those that fit (`node.tuning.memory_search`), by
the times of `node.tuning.block_times`.

`PlannedStage` is one stage on one kind of node. It knows the bytes and seconds of each choice, and the peak
memory of choices for all blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, product
from typing import Any, ClassVar, NamedTuple

import numpy as np

from node.config.schema import RunConfig
from node.model.page_locked import page_locked
from node.model.storage import AS_COMPUTED, KINDS, RECOMPUTE, Storage, StoredBytes, stored_bytes
from node.model.units import HEAD, block_name, is_block, unit_cost
from node.schedule.placement import chunk_units, held_blocks, held_passes, of_chunk, stage_orders
from node.schedule.schedule import Order
from node.tuning.block_times import BlockTimes, assumed_times
from node.tuning.device_memory import RUNS_AT_WORK, RUNS_KEPT, Devices, Share
from node.tuning.memory import (
    StageMemory,
    block_bytes,
    pass_model,
    stage_bytes,
    stage_memory,
    stage_storages,
)
from node.tuning.memory_columns import Array, Column, CopyClock, CopyWaits, StateMove, spread
from node.tuning.memory_search import SHARES, Score, search
from node.tuning.state_moves import STAYS, Moved, state_moves

ALL = "all"
"""As `node.model.offload.ALL`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a block does with the tensors that it keeps for backward."""

    KEPT: ClassVar["Choice"]
    AGAIN: ClassVar["Choice"]
    MOVED: ClassVar["Choice"]
    INPUT_MOVED: ClassVar["Choice"]
    again: bool = False
    """Keep only the block's input, and run the block again in backward."""
    recomputed: tuple[str, ...] = ()
    """The kinds (`node.model.storage.KINDS`) that backward recomputes."""
    moved: tuple[str, ...] = ()
    """The kinds that wait in host memory, or `all`."""

    def storage(self, base: Storage) -> Storage:
        """How a block keeps its activations, if the run's storage at this stage is `base`."""
        forms = dict.fromkeys(self.recomputed, RECOMPUTE)
        return replace(base, again=self.again, offload=self.moved, **forms)

    def __str__(self) -> str:
        if self.again:
            return "computed again in backward" + (", input in host memory" if self.moved else "")
        parts = [f"{kind} again" for kind in self.recomputed]
        parts += [f"{kind} in host memory" for kind in self.moved]
        return ", ".join(parts) or "kept"


Choice.KEPT = Choice()
Choice.AGAIN = Choice(again=True)
Choice.MOVED = Choice(moved=(ALL,))
Choice.INPUT_MOVED = Choice(again=True, moved=(ALL,))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    choices: tuple[Choice, ...]
    """The choices of its blocks, in the order of its units."""
    state: Moved = STAYS
    """Which of the optimizer's state, weights and main gradients are in host memory."""
    graphs: bool = True
    """Whether CUDA graphs are used, if the run has them."""
    memory: StageMemory
    host_bytes: int = 0
    """The host memory that the plan uses."""
    added: float
    """The added time, as a share of forward and backward with everything kept."""
    seconds: float = 0.0
    """The seconds of a microbatch's forward and backward, by the times used for planning."""
    moving: float = 0.0
    """A microbatch's share of the seconds for copying state for norms and the optimizer's step."""
    fits: bool

    @property
    def moves(self) -> bool:
        """Whether any block's tensors wait in host memory."""
        return any(choice.moved for choice in self.choices)

    @property
    def streams(self) -> bool:
        """Whether passes fetch weights, codes or gradients from host memory."""
        return self.state.weights + self.state.gradients + self.state.codes > 0

    def storages(self, base: Storage) -> tuple[Storage, ...]:
        """How each block keeps its activations, if the run's storage at this stage is `base`."""
        return tuple(choice.storage(base) for choice in self.choices)

    def text(self) -> str:
        """A description of what is done to fit; empty if everything is kept."""
        counts: dict[str, int] = {}
        for choice in self.choices:
            counts[str(choice)] = counts.get(str(choice), 0) + 1
        parts = [
            f"{count} of {len(self.choices)} blocks: {words}"
            for words, count in counts.items()
            if words != str(Choice.KEPT)
        ]
        state, blocks = self.state, len(self.choices)
        parts += ["the optimizer's moments in host memory"] * bool(state.moments)
        parts += [f"weights of {state.weights} of {blocks} blocks in host memory"] * bool(state.weights)
        parts += [f"gradients of {state.gradients} of {blocks} blocks in host memory"] * bool(state.gradients)
        parts += [f"codes of {state.codes} of {blocks} blocks in host memory"] * bool(state.codes)
        return "; ".join(parts)


class Estimates(NamedTuple):
    """What several candidates take, one value each. Names are those of `StageMemory` and `MemoryPlan`."""

    kept: Any
    working: Any
    pages: Any
    state: Any
    applying: Any
    total: Any
    host: Any
    seconds: Any
    """The seconds that it adds to a microbatch's passes."""
    moving: Any


_NEVER = 1e15
"""The score of a candidate that does not fit, besides the bytes that it lacks."""
GRAPHS_GAIN = 0.02
"""The share of a step that CUDA graphs are assumed to save."""
_FROM = {
    "ffn_input": ("norm_input", "ffn_input"),
    "attention": ("norm_input", "attention", "attention_output"),
    "attention_output": ("norm_input", "attention", "attention_output"),
}
"""The kinds that must be kept as computed so that recomputing this kind gives the same bits."""


class PlannedStage:
    """A stage, with the columns of its program."""

    def __init__(
        self,
        config: RunConfig,
        devices: Devices,
        *,
        storage: Storage,
        units: Sequence[Sequence[str]],
        order: Order,
        together: int,
        kept: StageMemory,
        times: BlockTimes,
        graphs: bool,
    ) -> None:
        """
        Args:
            units: the units of each of its chunks.
            order: its actions in a step.
            together: the most block activations that it holds at once, as from `held_blocks`.
            kept: the estimate with everything kept.
            graphs: whether CUDA graphs are used, if the run has them.
        """
        model, everything = config.model, tuple(unit for own in units for unit in own)
        share = Share(config, devices, storage)
        self._kept, self._times, self._graphs = kept, times, graphs
        self._units = everything
        self._host = 0 if devices.on_cpu else devices.host_bytes
        self.blocks = [sum(map(is_block, own)) for own in units]
        self._held = [held_passes(config, of_chunk(order, chunk)) for chunk in range(len(units))]
        self._together = together
        self._share = share
        self._block = block_bytes(config, share, storage, devices)
        self._block_pages = share.pages(self._block, RUNS_KEPT)
        """Pages that a block's tensors fill partly, in bytes."""
        self._input = share.residual
        self._inputs = sum(self._held) * self._input
        """The chunks' inputs, which stay on the device if the first block's tensors move."""
        work, others = (share.block_work(everything, last=last) for last in (True, False))
        ends, again = share.ends_work(everything), share.block_again(everything, self._block)
        self._block_work_pages = share.pages(work, RUNS_AT_WORK)
        # While a forward runs, autocast holds a copy of the weights of all blocks. Blocks that run again do
        # not keep their copies.
        self._casts = share.block_copies() if share.holds_copies and not kept.captured else 0
        head_work = share.head_at_work() if HEAD in everything else 0
        self._casting_work = max(3 * self._input, head_work, self._block - self._casts + self._input)
        """The most bytes at work besides these copies: for a kept block, for the head, or for a block that
        runs again, without the copies that other blocks hold too."""
        if kept.captured:
            work = others = ends = kept.working
            self._block_work_pages = self._work_pages
            again = work + self._block + self._input
        self._work = max(work, others if max(self.blocks) > 1 else 0)
        """The most bytes that are at work with a block, besides what blocks keep."""
        self._again_work, self._ends_work = again, ends
        """The most bytes at work with a block that runs again, and with the head."""
        self.state_kinds = state_moves(config, devices, share, everything, times)
        self.columns = self._columns(config, devices, storage, share)
        blocks = sum(self.blocks)
        self._forward, self._backward = blocks * times.forward, blocks * times.backward
        head = unit_cost(model, HEAD) / unit_cost(model, block_name(0)) if HEAD in everything else 0.0
        self._whole = (blocks + head) * (times.forward + times.backward)
        heads = [head if HEAD in own else 0.0 for own in units]
        clocks = [
            CopyClock(
                forward=times.forward,
                backward=times.backward,
                head_forward=own * times.forward,
                head_backward=own * times.backward,
                out_rate=times.out_rate,
                in_rate=times.in_rate,
            )
            for own in heads
        ]
        columns = tuple(self.columns.values())
        self._waits = [
            CopyWaits(clock, columns, count) for clock, count in zip(clocks, self.blocks, strict=True)
        ]
        self._all_kept = list(self.columns).index(Choice.KEPT)
        self._column_arrays = _arrays(Column, columns)
        self._state_arrays = _arrays(StateMove, self.state_kinds)

    def _columns(
        self, config: RunConfig, devices: Devices, storage: Storage, share: Share
    ) -> dict[Choice, Column]:
        """The choices that no other choice beats."""
        columns: dict[Choice, Column] = {Choice.KEPT: self._column(self._block)}
        # The keys and values for later slices stay, whatever happens to a block's own tensors.
        past = share.past_keys()
        # With dropout, backward would have to draw the microbatch's random bits again.
        if not config.lora.dropout:
            again = self._times.forward
            columns[Choice.AGAIN] = self._column(self._input + past, seconds=again, again=True)
            if self._moves:
                columns[Choice.INPUT_MOVED] = self._column(
                    past, [self._input], seconds=again, left=self._inputs, again=True
                )
        if share.plain:
            # Autograd's casts of weights would move too, and autocast holds them until forward is over.
            if self._moves and config.training.precision == "float32":
                columns[Choice.MOVED] = self._column(past, [self._block])
            return columns
        model = pass_model(config)
        sizes = stored_bytes(model, config.training, storage)
        is_apart = self._block > sizes.total // devices.count
        ways = []
        for kind in KINDS:
            fates = ["kept"]
            # Recomputing from values in few bits would give other results.
            if kind in _FROM and all(getattr(storage, kept) == AS_COMPUTED for kept in _FROM[kind]):
                fates.append("again")
            if self._moves and getattr(storage, kind) != RECOMPUTE:
                fates.append("moved")
            ways.append([(kind, fate) for fate in fates])
        for way in product(*ways):
            recomputed = tuple(kind for kind, fate in way if fate == "again")
            moved = tuple(kind for kind, fate in way if fate == "moved")
            choice = Choice(recomputed=recomputed, moved=moved)
            form = choice.storage(storage)
            left = stored_bytes(model, config.training, form)
            work = Share(config, devices, form).block_work(self._units) - share.block_work(self._units)
            left_there = "norm_input" in moved and storage.norm_input == AS_COMPUTED
            columns[choice] = self._column(
                (left.total - sum(_size(left, kind) for kind in moved)) // devices.count
                + past * (is_apart or "attention" in (*recomputed, *moved)),
                [_size(sizes, kind) // devices.count for kind in moved],
                seconds=sum(map(self._times.recomputing, recomputed)),
                working=max(0, work),
                left=self._inputs * left_there,
            )
        return _unbeaten(columns)

    @property
    def _moves(self) -> bool:
        return self._host > 0 and not self._kept.captured

    def _column(
        self,
        kept: int,
        moved: Sequence[int] = (),
        *,
        seconds: float = 0.0,
        working: int = 0,
        left: int = 0,
        again: bool = False,
    ) -> Column:
        return Column(
            kept=kept,
            pages=self._share.pages(kept, 1 if again else RUNS_KEPT),
            moved=sum(moved),
            host=sum(map(page_locked, moved)),
            seconds=seconds,
            working=working,
            left=left,
            again=again,
        )

    def alike(self, choice: Choice) -> tuple[Choice, ...]:
        return (choice,) * sum(self.blocks)

    def estimate(self, counts: Array, state: Array) -> "Estimates":
        """What candidates take: counts of blocks by chunk and column [N, chunks, columns], and parts of each
        kind of state that move [N, kinds]."""
        memory, size, move = self._kept, self._column_arrays, self._state_arrays
        of_state = memory.state - state @ move["freed"] + (state > 0) @ move["there"]
        applying = memory.applying + (state > 0) @ move["applying"]
        held, used = (counts * np.array(self._held)[:, None]).sum(1), (counts > 0).any(1)
        kept, pages = self._base_kept + held @ size["kept"], self._work_pages + held @ size["pages"]
        coming, most, left = ((used * size[name]).max(1) for name in ("moved", "working", "left"))
        beside = left + 2 * coming
        again = (counts * size["again"]).sum(2).max(1)
        again_pages = self._block_work_pages + self._block_pages - self._work_pages
        # By place in the passes: a block at work, the head, a block that runs again, and a head or such a
        # block beside the casts of others.
        runs = np.where(again > 0, 0.0, -np.inf)
        casting = again * self._casts + self._casting_work + (runs if self._casts else -np.inf)
        working = np.stack(
            [
                beside + most + self._work,
                beside + self._ends_work,
                beside + most + self._again_work + runs,
                casting,
            ]
        )
        in_pages = np.stack([pages, pages, pages + again_pages, pages])
        peak = (working + in_pages).argmax(0)[None]
        # Chunks are added up separately. The estimate with everything kept bounds them, as it has their
        # common peak.
        is_kept = counts[:, :, self._all_kept].sum(1) == sum(self.blocks)
        kept = np.where(is_kept, memory.kept, np.minimum(kept, memory.kept))
        working = np.where(is_kept, memory.working, np.take_along_axis(working, peak, 0)[0])
        pages = np.where(is_kept, memory.pages, np.take_along_axis(in_pages, peak, 0)[0])
        passes = kept + working + pages
        step = passes + applying if memory.captured else np.maximum(passes, applying)
        return Estimates(
            kept=kept,
            working=working,
            pages=pages,
            state=of_state,
            applying=applying,
            total=memory.total_with(of_state, step),
            host=held @ size["host"] + state @ move["host"],
            seconds=self._pass_seconds(counts, state),
            moving=state @ move["seconds"],
        )

    def _pass_seconds(self, counts: Array, state: Array) -> Array:
        """The seconds that candidates add to a microbatch's forward and backward."""
        size, move, times = self._column_arrays, self._state_arrays, self._times
        blocks = counts.sum(1)
        again, moved = blocks @ size["seconds"], blocks @ size["moved"]
        waits = sum(waits.seconds(counts[:, chunk]) for chunk, waits in enumerate(self._waits))
        # In total, copies can hide behind compute up to its length. The engines copy in both directions at
        # once.
        forward = np.maximum(moved / times.out_rate, state @ move["forward_in"] / times.in_rate)
        backward = np.maximum(
            (moved + state @ move["backward_in"]) / times.in_rate,
            state @ move["backward_out"] / times.out_rate,
        )
        hidden = np.array([self._forward + 0 * again, self._backward + again])
        waited = np.maximum(np.maximum(0.0, np.stack([forward, backward]) - hidden), waits)
        seconds: Array = again + waited.sum(0)
        return seconds

    @property
    def _work_pages(self) -> int:
        return self._kept.pages - self._together * self._block_pages

    @property
    def _base_kept(self) -> int:
        """What microbatches keep besides blocks' tensors."""
        return self._kept.kept - self._together * self._block

    def plan(self, choices: tuple[Choice, ...], memory_bytes: int = 0, *, state: Moved = STAYS) -> MemoryPlan:
        """The plan of these choices on a node with this much memory. 0 means no limit."""
        names, after = tuple(self.columns), iter(choices)
        chunks = [list(islice(after, count)) for count in self.blocks]
        counts = np.array([[own.count(name) for name in names] for own in chunks], dtype=float)
        moved = np.array(state[: len(self.state_kinds)], dtype=float)
        estimate = Estimates(*(value.item() for value in self.estimate(counts[None], moved[None])))
        memory = replace(
            self._kept,
            kept=int(estimate.kept),
            working=int(estimate.working),
            pages=int(estimate.pages),
            state=int(estimate.state),
            applying=int(estimate.applying),
        )
        graphs = self._graphs_cost
        return MemoryPlan(
            choices=choices,
            state=state,
            graphs=self._graphs,
            memory=memory,
            host_bytes=int(estimate.host),
            added=(estimate.seconds + estimate.moving) / self._whole + graphs,
            seconds=self._whole * (1 + graphs) + estimate.seconds,
            moving=estimate.moving,
            fits=(memory_bytes == 0 or memory.total <= memory_bytes) and estimate.host <= self._host,
        )

    @property
    def _graphs_cost(self) -> float:
        return 0.0 if self._graphs else GRAPHS_GAIN

    def best(self, memory_bytes: int) -> MemoryPlan:
        """The plan that adds the least time in this much memory. If none fits, one that lacks little."""

        def score(counts: Array, state: Array) -> Array:
            found = self.estimate(counts, state)
            lacking = np.maximum(0, found.total - memory_bytes) + np.maximum(0, found.host - self._host)
            scores: Array = np.where(lacking > 0, _NEVER + lacking, found.seconds + found.moving)
            return scores

        return self._searched(score, SHARES, memory_bytes)

    def least(self) -> MemoryPlan:
        """The plan that takes the least memory, and of several the fastest."""

        def score(counts: Array, state: Array) -> Array:
            found = self.estimate(counts, state)
            lacking = np.maximum(0, found.host - self._host)
            share = (found.seconds + found.moving) / self._whole
            scores: Array = np.where(lacking > 0, _NEVER + lacking, found.total + share / (1 + share))
            return scores

        return self._searched(score, 1)

    def _searched(self, score: Score, shares: int, memory_bytes: int = 0) -> MemoryPlan:
        parts = [move.most for move in self.state_kinds]
        counts, state = search(self.blocks, len(self.columns), parts, score, shares)
        choices = self.order(counts.astype(int).tolist())
        return self.plan(choices, memory_bytes, state=Moved(*map(int, state)))

    def order(self, counts: Sequence[Sequence[int]]) -> tuple[Choice, ...]:
        """A choice for every block. `counts` says for each chunk how many of its blocks take each column."""
        names, columns = tuple(self.columns), tuple(self.columns.values())
        return tuple(names[k] for own in counts for k in spread(columns, own))


def _arrays(kind: type[Column] | type[StateMove], of: Sequence[Any]) -> dict[str, Array]:
    """The values of each field, in order."""
    return {field.name: np.array([getattr(one, field.name) for one in of], float) for field in fields(kind)}


def _size(sizes: StoredBytes, kind: str) -> int:
    size: int = getattr(sizes, kind)
    return size


def _unbeaten(columns: dict[Choice, Column]) -> dict[Choice, Column]:
    """The columns without those that another column equals or beats in every respect."""

    def worth(column: Column) -> tuple[float, ...]:
        return column.kept, column.pages, column.moved, column.host, column.seconds, column.working

    unbeaten: dict[Choice, Column] = {}
    # Of equal columns, the one with the shortest description comes first.
    for choice, column in sorted(columns.items(), key=lambda pair: (worth(pair[1]), len(str(pair[0])))):
        others = [other for other in unbeaten.values() if other.again == column.again]
        if not any(all(a <= b for a, b in zip(worth(other), worth(column), strict=True)) for other in others):
            unbeaten[choice] = column
    # Keep the original order.
    return {choice: column for choice, column in columns.items() if choice in unbeaten}


CURVE_POINTS = 24
"""The number of memories that `frontier` tries by default."""


def _stages(
    config: RunConfig,
    stages: int,
    devices: Devices,
    windows: int = 0,
    only: int | None = None,
    times: BlockTimes | None = None,
    *,
    graphs: bool = True,
) -> list[PlannedStage]:
    """Every stage, or only the stage `only`. What they share, such as the schedule, is computed once."""
    units, orders = chunk_units(config, stages), stage_orders(config, stages)
    storages = stage_storages(config, stages)
    together = held_blocks(config, stages, apart=devices.captures(config))
    kept = stage_memory(config, stages, devices, windows=windows)
    times = times or assumed_times(config, devices)
    return [
        PlannedStage(
            config,
            devices,
            storage=storages[stage],
            units=units[stage::stages],
            order=orders[stage],
            together=together[stage],
            kept=kept[stage],
            times=times.of_storage(storages[stage]),
            graphs=graphs,
        )
        for stage in (range(stages) if only is None else (only,))
    ]


def _variants(
    config: RunConfig,
    stages: int,
    devices: Devices,
    windows: int = 0,
    only: int | None = None,
    times: BlockTimes | None = None,
) -> list[list[PlannedStage]]:
    """The stages as the run file has them, and without CUDA graphs: graphs keep their memory permanently, and
    their passes cannot be interleaved with copies to host memory."""
    variants = [_stages(config, stages, devices, windows, only, times)]
    if devices.captures(config):
        plain = replace(config, training=replace(config.training, cuda_graphs=False))
        variants.append(_stages(plain, stages, devices, windows, only, times, graphs=False))
    return variants


def short_of_memory(config: RunConfig, devices: Devices, memory_bytes: int) -> bool:
    """Whether a node with this much memory may get a stage that does not fit with everything kept."""
    return 0 < memory_bytes < max(stage_bytes(config, config.pipeline.stages, devices))


def _fastest(variants: Sequence[PlannedStage], memory_bytes: int) -> MemoryPlan:
    """`Room.plan` for the variants of a stage."""
    everything = variants[0].plan(variants[0].alike(Choice.KEPT), memory_bytes)
    if everything.fits:
        return everything
    plans = [plan for variant in variants if (plan := variant.best(memory_bytes)).fits]
    if plans:
        return min(plans, key=lambda plan: plan.added)
    least = min((variant.least() for variant in variants), key=lambda plan: (plan.memory.total, plan.added))
    return replace(least, fits=least.memory.total <= memory_bytes)


@dataclass(frozen=True, kw_only=True)
class Room:
    devices: Devices = field(default_factory=Devices)
    memory_bytes: int = 0
    """The memory of each device; 0 if unknown."""
    windows: int = 0
    """As for `node.tuning.memory.stage_bytes`."""
    times: BlockTimes | None = None
    """The times measured on its card; None for those of a typical one."""

    def plan(self, config: RunConfig, stages: int, stage: int) -> MemoryPlan:
        """The plan that adds the least time among those that fit.

        If none fits, the plan that takes the least memory. Everything is kept if the memory is unknown.
        """
        variants = _variants(config, stages, self.devices, self.windows, stage, self.times)
        return _fastest([variant for (variant,) in variants], self.memory_bytes)


def least_stage_bytes(
    config: RunConfig, stages: int, devices: Devices, *, windows: int = 0
) -> tuple[int, ...]:
    """The bytes that each stage needs on every device of such a node if it recomputes and moves all it
    can."""
    variants = _variants(config, stages, devices, windows)
    by_stage = zip(*variants, strict=True)
    return tuple(min(stage.least().memory.total for stage in same) for same in by_stage)


def frontier(
    config: RunConfig,
    stages: int,
    stage: int,
    devices: Devices,
    times: BlockTimes | None = None,
    *,
    points: int = CURVE_POINTS,
) -> tuple[MemoryPlan, ...]:
    """The fastest plan of a stage for each of `points` memories, from keeping everything down to the least
    memory. Both ends are included."""
    variants = [variant for (variant,) in _variants(config, stages, devices, only=stage, times=times)]
    everything = variants[0].plan(variants[0].alike(Choice.KEPT))
    least = min((variant.least() for variant in variants), key=lambda plan: plan.memory.total)
    most, low = everything.memory.total, least.memory.total
    plans = [everything]
    for number in range(1, points):
        budget = most - (most - low) * number // (points - 1)
        plan = _fastest(variants, budget)
        if plan.fits and plan.memory.total < plans[-1].memory.total:
            plans.append(plan)
    # A plan is dropped if one with less memory is as fast.
    pairs = zip(plans, [*plans[1:], None], strict=True)
    return tuple(plan for plan, after in pairs if after is None or after.added > plan.added)
