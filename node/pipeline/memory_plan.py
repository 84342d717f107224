"""What the blocks and the optimizer of a stage do so that it fits in a node's memory. Torch-free.

Nothing here changes a bit, so every node decides for itself: a small card and a large one may host stages of
one run. For each kind of tensor that a block keeps for backward there is a choice: it stays on the device,
backward computes it again, or it waits in host memory (`node.model.offload`). A block may also keep its input
alone, here or in host memory, and run again. The optimizer's moments may be in host memory too
(`node.training.host_moments`).

`plan_stage` takes what adds the least time among what fits (`node.pipeline.memory_program`), by the times of
`node.pipeline.block_times`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import mul
from typing import ClassVar

from node.config.schema import RunConfig
from node.model.storage import AS_COMPUTED, KINDS, RECOMPUTE, Storage, StoredBytes, stored_bytes
from node.model.units import HEAD, block_name, is_block, unit_cost
from node.pipeline.block_times import BlockTimes, assumed_times
from node.pipeline.device_memory import RUNS_AT_WORK, RUNS_KEPT, Devices, Share, page_locked
from node.pipeline.memory import StageMemory, block_bytes, stage_memory, stage_storages
from node.pipeline.memory_program import Column, Program, solve, spread
from node.pipeline.placement import chunk_units, held_blocks, of_chunk, stage_orders
from node.pipeline.schedule import Order, held_activations

GRAPHS_GAIN = 0.02
"""The share of a step that CUDA graphs are taken to save."""
CURVE_POINTS = 24
_FROM = {
    "ffn_input": ("norm_input", "ffn_input"),
    "attention": ("norm_input", "attention", "attention_output"),
    "attention_output": ("norm_input", "attention", "attention_output"),
}
"""Kinds that have to be kept as computed for this one to be computed again with the same bits."""
ALL = "all"
"""As `node.model.offload.ALL`."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a block does with what it keeps for backward."""

    KEPT: ClassVar["Choice"]
    FFN: ClassVar["Choice"]
    AGAIN: ClassVar["Choice"]
    MOVED: ClassVar["Choice"]
    INPUT_MOVED: ClassVar["Choice"]
    again: bool = False
    """Keep the block's input alone, and run the block again in backward."""
    recomputed: tuple[str, ...] = ()
    """Kinds (`node.model.storage.KINDS`) that backward computes again."""
    moved: tuple[str, ...] = ()
    """Kinds that wait in host memory, or `all`."""

    def storage(self, base: Storage) -> Storage:
        """How a block keeps its activations, where `base` is the run's storage at this stage."""
        forms = dict.fromkeys(self.recomputed, RECOMPUTE)
        return replace(base, again=self.again, offload=self.moved, **forms)

    def __str__(self) -> str:
        if self.again:
            return "computed again in backward" + (", input in host memory" if self.moved else "")
        parts = [f"{kind} again" for kind in self.recomputed]
        parts += [f"{kind} in host memory" for kind in self.moved]
        return ", ".join(parts) or "kept"


Choice.KEPT = Choice()
Choice.FFN = Choice(recomputed=("ffn_input",))
Choice.AGAIN = Choice(again=True)
Choice.MOVED = Choice(moved=(ALL,))
Choice.INPUT_MOVED = Choice(again=True, moved=(ALL,))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What one stage does, and what that takes."""

    choices: tuple[Choice, ...]
    """Of its blocks, in the order of its units."""
    moments_moved: bool = False
    """The optimizer's moments of matrices are in host memory."""
    graphs: bool = True
    """CUDA graphs stay, if the run has them."""
    memory: StageMemory
    host_bytes: int = 0
    """Host memory that takes."""
    added: float
    """Time over that of forward and backward with everything kept."""
    seconds: float = 0.0
    """Of forward and backward of a microbatch, by the times that it was planned with."""
    fits: bool

    @property
    def again(self) -> int:
        """Blocks that compute something again."""
        return sum(choice.again or bool(choice.recomputed) for choice in self.choices)

    @property
    def moves(self) -> bool:
        """Whether any block's tensors wait in host memory."""
        return any(choice.moved for choice in self.choices)

    def storages(self, base: Storage) -> tuple[Storage, ...]:
        """How each block keeps its activations, where `base` is the run's storage at this stage."""
        return tuple(choice.storage(base) for choice in self.choices)

    def text(self) -> str:
        """What is done to fit, in words; empty if nothing is."""
        counts: dict[str, int] = {}
        for choice in self.choices:
            counts[str(choice)] = counts.get(str(choice), 0) + 1
        parts = [
            f"{count} of {len(self.choices)} blocks: {words}"
            for words, count in counts.items()
            if words != str(Choice.KEPT)
        ]
        return "; ".join(parts + ["the optimizer's moments in host memory"] * self.moments_moved)


class _Stage:
    """One stage on one kind of node, with the columns of its program."""

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
            units: of each of its chunks.
            order: its actions in a step.
            together: the most block activations that it holds at once, as by `held_blocks`.
            kept: the estimate with everything kept.
            graphs: `config` has CUDA graphs if the run does.
        """
        model, everything = config.model, tuple(unit for own in units for unit in own)
        share = Share(config, devices, storage)
        self._kept, self._times, self._graphs = kept, times, graphs
        self._host = 0 if devices.on_cpu else devices.host_bytes
        self.blocks = [sum(map(is_block, own)) for own in units]
        self._held = [held_activations(of_chunk(order, chunk)) for chunk in range(len(units))]
        self._together = together
        self._share = share
        self._block = block_bytes(config, share, storage, devices)
        self._block_pages = share.pages(self._block, RUNS_KEPT)
        """That a block's tensors fill in part."""
        self._input = share.residual
        work = share.block_at_work() + share.new_gradients(everything)
        self._block_work, self._block_work_pages = work, share.pages(work, RUNS_AT_WORK)
        self._moments = share.moments(everything)
        self._moments_on_host = share.moments_on_host(everything)
        self._streamed = share.applying_streamed(everything)
        self._microbatches = config.microbatches
        self.columns = self._columns(config, devices, storage, share)
        blocks = sum(self.blocks)
        self._forward, self._backward = blocks * times.forward, blocks * times.backward
        head = unit_cost(model, HEAD) / unit_cost(model, block_name(0)) if HEAD in everything else 0.0
        self._whole = (blocks + head) * (times.forward + times.backward)

    def _columns(
        self, config: RunConfig, devices: Devices, storage: Storage, share: Share
    ) -> dict[Choice, Column]:
        """Those that no other beats."""
        found: dict[Choice, Column] = {Choice.KEPT: self._column(self._block)}
        # With dropout, backward would have to draw the microbatch's random bits again.
        if not config.lora.dropout:
            again = self._times.forward
            found[Choice.AGAIN] = self._column(self._input, seconds=again, again=True)
            if self._moves:
                found[Choice.INPUT_MOVED] = self._column(0, [self._input], seconds=again, again=True)
        if share.plain:
            # Autograd's casts of weights would move too, and autocast holds them until forward is over.
            if self._moves and config.training.precision == "float32":
                found[Choice.MOVED] = self._column(0, [self._block])
            return found
        sizes = stored_bytes(config.model, config.training, storage)
        ways = []
        for kind in KINDS:
            fates = ["kept"]
            # From what is in few bits other values would come.
            if kind in _FROM and all(getattr(storage, one) == AS_COMPUTED for one in _FROM[kind]):
                fates.append("again")
            if self._moves and getattr(storage, kind) != RECOMPUTE:
                fates.append("moved")
            ways.append([(kind, fate) for fate in fates])
        for way in product(*ways):
            recomputed = tuple(kind for kind, fate in way if fate == "again")
            moved = tuple(kind for kind, fate in way if fate == "moved")
            choice = Choice(recomputed=recomputed, moved=moved)
            form = choice.storage(storage)
            left = stored_bytes(config.model, config.training, form)
            work = Share(config, devices, form).block_at_work() - share.block_at_work()
            found[choice] = self._column(
                (left.total - sum(_size(left, kind) for kind in moved)) // devices.count,
                [_size(sizes, kind) // devices.count for kind in moved],
                seconds=sum(map(self._times.recomputing, recomputed)),
                working=max(0, work),
            )
        return _unbeaten(found)

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
        again: bool = False,
    ) -> Column:
        return Column(
            kept=kept,
            pages=self._share.pages(kept, 1 if again else RUNS_KEPT),
            moved=sum(moved),
            host=sum(map(page_locked, moved)),
            seconds=seconds,
            working=working,
            again=again,
        )

    def alike(self, choice: Choice) -> tuple[Choice, ...]:
        """All blocks with this choice."""
        return (choice,) * sum(self.blocks)

    def memory(self, choices: Sequence[Choice], moments_moved: bool = False) -> StageMemory:
        """The estimate with these choices, in the order of the stage's blocks, where it peaks."""
        base = self._kept
        if moments_moved:
            base = replace(base, state=base.state - self._moments, applying=self._streamed)
        if all(choice == Choice.KEPT for choice in choices):
            return base
        taken = [self.columns[choice] for choice in choices]
        kept, pages, first = self._base_kept, self._work_pages, 0
        freed: list[tuple[int, int]] = []
        for held, count in zip(self._held, self.blocks, strict=True):
            own = taken[first : first + count]
            kept += held * sum(column.kept for column in own)
            pages += held * sum(column.pages for column in own)
            last = max((place for place, column in enumerate(own) if column.again), default=-1)
            if last >= 0:
                # Of the microbatch that goes backward, what later blocks kept is gone by then.
                later = () if base.captured else own[last + 1 :]
                freed.append((sum(column.kept for column in later), sum(column.pages for column in later)))
            first += count
        beside = 2 * max(column.moved for column in taken) + max(column.working for column in taken)
        places = [replace(base, kept=kept, pages=pages, working=base.working + beside)]
        if freed:
            gone, gone_pages = min(freed, key=sum)
            work, work_pages = (
                (base.working, self._work_pages)
                if base.captured
                else (self._block_work, self._block_work_pages)
            )
            place = replace(
                base,
                kept=kept - gone,
                working=work + self._again + beside,
                pages=pages - gone_pages - self._work_pages + work_pages + self._block_pages,
            )
            places.append(place)
        peak = max(places, key=lambda place: place.kept + place.working + place.pages)
        # Between chunks nothing is shared: the estimate with everything kept counts their common peak.
        return replace(peak, kept=min(peak.kept, self._kept.kept))

    @property
    def _work_pages(self) -> int:
        """Of the pages, those of what is worked on."""
        return self._kept.pages - self._together * self._block_pages

    @property
    def _base_kept(self) -> int:
        """Of what microbatches keep, all but blocks' tensors."""
        return self._kept.kept - self._together * self._block

    @property
    def _again(self) -> int:
        """The block that runs again, and its input's copy."""
        return self._block + self._input

    def host_bytes(self, choices: Sequence[Choice], moments_moved: bool) -> int:
        """Host memory that these take."""
        held = [count for count, blocks in zip(self._held, self.blocks, strict=True) for _ in range(blocks)]
        moved = sum(n * self.columns[one].host for n, one in zip(held, choices, strict=True))
        return moved + (self._moments_on_host if moments_moved else 0)

    def added(self, choices: Sequence[Choice], moments_moved: bool = False) -> float:
        taken = [self.columns[choice] for choice in choices]
        moved, times = sum(column.moved for column in taken), self._times
        seconds = sum(column.seconds for column in taken)
        # Copies hide behind compute, up to a point.
        seconds += max(0.0, moved / times.out_rate - self._forward)
        seconds += max(0.0, moved / times.in_rate - self._backward)
        seconds += self._moments_seconds if moments_moved else 0.0
        return seconds / self._whole + (0.0 if self._graphs else GRAPHS_GAIN)

    @property
    def _moments_seconds(self) -> float:
        """A microbatch's share of their way in and out, which nothing hides."""
        rate = min(self._times.out_rate, self._times.in_rate)
        return self._moments / rate / self._microbatches

    def plan(
        self, choices: tuple[Choice, ...], memory_bytes: int = 0, *, moments_moved: bool = False
    ) -> MemoryPlan:
        """These choices on a node with so much memory; 0 is without a limit."""
        memory = self.memory(choices, moments_moved)
        host = self.host_bytes(choices, moments_moved)
        return MemoryPlan(
            choices=choices,
            moments_moved=moments_moved,
            graphs=self._graphs,
            memory=memory,
            host_bytes=host,
            added=self.added(choices, moments_moved),
            seconds=self._whole * (1 + self.added(choices)),
            fits=(memory_bytes == 0 or memory.total <= memory_bytes) and host <= self._host,
        )

    def best(self, memory_bytes: int) -> MemoryPlan | None:
        """The plan that adds the least time in so much memory; None if none fits."""
        names, columns = tuple(self.columns), tuple(self.columns.values())
        solution = solve(self._program(memory_bytes))
        if solution is None:
            return None
        choices = [names[k] for counts in solution.blocks for k in spread(columns, counts)]
        return self.plan(tuple(choices), memory_bytes, moments_moved=solution.state > 0)

    def least(self) -> MemoryPlan:
        """The plan that takes the least memory, of all blocks alike or, where host memory does not do for
        all, of as many as it does for and the others alike: what a choice saves grows with their number."""
        plans = [
            self.plan(choices, moments_moved=moved)
            for moved in ((False, True) if self._host else (False,))
            for choices in self._alike_or_mixed(self._host - (self._moments_on_host if moved else 0))
        ]
        fitting = [plan for plan in plans if plan.host_bytes <= self._host]
        return min(fitting, key=lambda plan: (plan.memory.total, plan.added))

    def _alike_or_mixed(self, host: int) -> Iterator[tuple[Choice, ...]]:
        names, columns = tuple(self.columns), tuple(self.columns.values())
        # Of those that take no host memory, what leaves least on the device, kept or at work.
        without = [k for k, column in enumerate(columns) if column.host == 0]
        others = {
            min(without, key=lambda k: (columns[k].there, columns[k].working)),
            min(without, key=lambda k: (columns[k].working, columns[k].there)),
            min(without, key=lambda k: columns[k].there + columns[k].working),
        }
        for one, column in enumerate(columns):
            yield self.alike(names[one])
            if column.host == 0 or column.host * sum(map(mul, self._held, self.blocks)) <= host:
                continue
            for other in sorted(others):
                room, found = host, list[Choice]()
                for held, blocks in zip(self._held, self.blocks, strict=True):
                    count = min(blocks, max(0, room) // (held * column.host))
                    room -= count * held * column.host
                    counts = [0] * len(columns)
                    counts[other] += blocks - count
                    counts[one] += count
                    found += [names[k] for k in spread(columns, counts)]
                yield tuple(found)

    def _program(self, memory_bytes: int) -> Program:
        kept, times = self._kept, self._times
        room = memory_bytes - kept.fixed - kept.state - kept.snapshot
        passes = room - self._base_kept - (kept.applying if kept.captured else 0)
        working, pages = kept.working, self._work_pages
        if not kept.captured:
            working, pages = self._block_work, self._block_work_pages
        moments = self._host > 0
        after = [room if kept.captured else room - kept.applying]
        if moments:
            after.append(room + self._moments - (0 if kept.captured else self._streamed))
        # With graphs the step's memory comes on top of theirs.
        freed = self._moments + (kept.applying - self._streamed if kept.captured else 0)
        return Program(
            columns=tuple(self.columns.values()),
            blocks=tuple(self.blocks),
            held=tuple(self._held),
            room=passes - kept.working - self._work_pages,
            room_again=passes - working - pages - self._again - self._block_pages,
            apart=kept.captured,
            forward=self._forward,
            backward=self._backward,
            out_rate=times.out_rate,
            in_rate=times.in_rate,
            host=self._host,
            state_moved=(freed,) if moments else (),
            state_host=(self._moments_on_host,) if moments else (),
            state_seconds=(self._moments_seconds,) if moments else (),
            applying=tuple(after),
        )


def _size(sizes: StoredBytes, kind: str) -> int:
    found: int = getattr(sizes, kind)
    return found


def _unbeaten(columns: dict[Choice, Column]) -> dict[Choice, Column]:
    """Without those that another column is at least as good as in every way."""

    def worth(one: Column) -> tuple[float, ...]:
        return one.kept, one.pages, one.moved, one.host, one.seconds, one.working

    found: dict[Choice, Column] = {}
    # The fewest words first, of equals.
    for choice, column in sorted(columns.items(), key=lambda pair: (worth(pair[1]), len(str(pair[0])))):
        others = [other for other in found.values() if other.again == column.again]
        if not any(all(a <= b for a, b in zip(worth(other), worth(column), strict=True)) for other in others):
            found[choice] = column
    # In the order in which they were made.
    return {choice: column for choice, column in columns.items() if choice in found}


def _stages(
    config: RunConfig,
    stages: int,
    devices: Devices,
    windows: int = 0,
    only: int | None = None,
    times: BlockTimes | None = None,
    *,
    graphs: bool = True,
) -> list[_Stage]:
    """Every stage, or `only` one; what they share, such as the schedule, is worked out once."""
    units, orders = chunk_units(config, stages), stage_orders(config, stages)
    storages = stage_storages(config, stages)
    together = held_blocks(config, stages, apart=devices.captures(config.training))
    kept = stage_memory(config, stages, devices, windows=windows)
    times = times or assumed_times(config, devices)
    return [
        _Stage(
            config,
            devices,
            storage=storages[stage],
            units=units[stage::stages],
            order=orders[stage],
            together=together[stage],
            kept=kept[stage],
            times=times,
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
) -> list[list[_Stage]]:
    """As the run file says, and without CUDA graphs: they keep what they need for good, and their passes
    cannot be ordered with copies to host memory."""
    found = [_stages(config, stages, devices, windows, only, times)]
    if devices.captures(config.training):
        plain = replace(config, training=replace(config.training, cuda_graphs=False))
        found.append(_stages(plain, stages, devices, windows, only, times, graphs=False))
    return found


def plan_stage(
    config: RunConfig,
    stages: int,
    stage: int,
    devices: Devices,
    memory_bytes: int,
    *,
    windows: int = 0,
    times: BlockTimes | None = None,
) -> MemoryPlan:
    """The plan that adds the least time among those that fit in `memory_bytes`.

    If none fits, the one that takes least. All is kept where the memory is not known (0).

    Args:
        memory_bytes: of each device of the node.
        windows: as for `node.pipeline.memory.stage_bytes`.
        times: of its card; those of a typical one by default.
    """
    ones = [one for (one,) in _variants(config, stages, devices, windows, stage, times)]
    return _fastest(ones, memory_bytes)


def planned_again(
    config: RunConfig,
    stages: int,
    stage: int,
    devices: Devices,
    memory_bytes: int,
    plan: MemoryPlan,
    *,
    windows: int = 0,
    times: BlockTimes | None = None,
) -> MemoryPlan:
    """What `plan` does, with the memory and the times of now; other arguments as for `plan_stage`."""
    ones = [one for (one,) in _variants(config, stages, devices, windows, stage, times)]
    one = ones[0] if plan.graphs else ones[-1]
    return one.plan(plan.choices, memory_bytes, moments_moved=plan.moments_moved)


def _fastest(ones: Sequence[_Stage], memory_bytes: int) -> MemoryPlan:
    """Of a stage's variants, as `plan_stage`."""
    everything = ones[0].plan(ones[0].alike(Choice.KEPT), memory_bytes)
    if everything.fits:
        return everything
    plans = [plan for one in ones if (plan := one.best(memory_bytes)) is not None and plan.fits]
    if plans:
        return min(plans, key=lambda plan: plan.added)
    least = min((one.least() for one in ones), key=lambda plan: (plan.memory.total, plan.added))
    return replace(least, fits=least.memory.total <= memory_bytes)


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a node, for which it plans its stage."""

    devices: Devices = field(default_factory=Devices)
    memory_bytes: int = 0
    """Of each device; 0 if not known."""
    windows: int = 0
    """As for `node.pipeline.memory.stage_bytes`."""
    times: BlockTimes | None = None
    """Measured on its card, if they were."""

    def plan(self, config: RunConfig, stages: int, stage: int) -> MemoryPlan:
        """As `plan_stage`."""
        return plan_stage(
            config,
            stages,
            stage,
            self.devices,
            self.memory_bytes,
            windows=self.windows,
            times=self.times,
        )


def least_stage_bytes(
    config: RunConfig, stages: int, devices: Devices, *, windows: int = 0
) -> tuple[int, ...]:
    """Bytes that each stage needs on every device of such a node when it computes again and moves what it
    can."""
    variants = _variants(config, stages, devices, windows)
    return tuple(min(one.least().memory.total for one in ones) for ones in zip(*variants, strict=True))


def frontier(
    config: RunConfig, stages: int, stage: int, devices: Devices, times: BlockTimes | None = None
) -> tuple[MemoryPlan, ...]:
    """Plans of a stage from the one that keeps everything to the one that takes least: the fastest for each
    of some memories between."""
    ones = [one for (one,) in _variants(config, stages, devices, only=stage, times=times)]
    everything = ones[0].plan(ones[0].alike(Choice.KEPT))
    least = min((one.least() for one in ones), key=lambda plan: plan.memory.total)
    most, low = everything.memory.total, least.memory.total
    found = [everything]
    for number in range(1, CURVE_POINTS):
        budget = most - (most - low) * number // (CURVE_POINTS - 1)
        plan = _fastest(ones, budget)
        if plan.fits and plan.memory.total < found[-1].memory.total:
            found.append(plan)
    # One may be as fast as one that takes more.
    pairs = zip(found, [*found[1:], None], strict=True)
    return tuple(plan for plan, after in pairs if after is None or after.added > plan.added)
