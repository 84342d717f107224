"""Which blocks of a stage are computed again in backward, so that it fits in a node's memory. Torch-free.

Computing again changes no bit, so every node decides for itself: a small card and a large one may host stages
of one run. A block is one of

    kept        everything that the run's storage keeps for backward
    ffn         without the inputs of SwiGLU or GELU, where they are kept as computed: backward repeats their
                products
    again       only the block's input: backward repeats the block's forward

The blocks of a stage are alike, so a plan is three numbers. `plan_stage` takes the one that computes least
among those that fit: the program that Adacc (Chen et al. 2025, equations 4 to 12) solves by MILP, for the
choices that change no bit, small enough to try all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from node.config.schema import RunConfig
from node.model.storage import AS_COMPUTED, RECOMPUTE, Storage, stored_bytes
from node.model.units import HEAD, block_name, is_block, unit_cost
from node.pipeline.device_memory import Devices, Share
from node.pipeline.memory import StageMemory, stage_memory, stage_storages
from node.pipeline.placement import chunk_units, held_blocks, of_chunk, stage_orders
from node.pipeline.schedule import Order, held_activations


class Choice(StrEnum):
    KEPT = "kept"
    FFN = "ffn"
    AGAIN = "again"


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the blocks of one stage do, in the order of its units, and what that takes."""

    choices: tuple[Choice, ...]
    memory: StageMemory
    added: float
    """Floating-point operations over those of forward and backward with everything kept."""
    fits: bool

    @property
    def again(self) -> int:
        """Blocks that compute something again."""
        return sum(choice is not Choice.KEPT for choice in self.choices)

    def storages(self, base: Storage) -> tuple[Storage, ...]:
        """How each block keeps its activations, where `base` is the run's storage at this stage."""
        forms = {
            Choice.KEPT: base,
            Choice.FFN: replace(base, ffn_input=RECOMPUTE),
            Choice.AGAIN: replace(base, again=True),
        }
        return tuple(forms[choice] for choice in self.choices)


class _Stage:
    """One stage on one kind of node, with the bytes and operations of each choice."""

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
    ) -> None:
        """
        Args:
            units: of each of its chunks.
            order: its actions in a step.
            together: the most block activations that it holds at once, as by `held_blocks`.
            kept: the estimate with everything kept.
        """
        model = config.model
        share = Share(config, devices, storage)
        self._kept = kept
        self.blocks = [sum(map(is_block, own)) for own in units]
        self._held = [held_activations(of_chunk(order, chunk)) for chunk in range(len(units))]
        self._together = together

        def stored(form: Storage) -> int:
            return stored_bytes(model, config.training, form).total // devices.count

        block = share.autograd_keeps() if share.plain else stored(storage)
        self._block = block
        self.bytes = {Choice.KEPT: block, Choice.AGAIN: share.residual}
        forward = unit_cost(model, block_name(0))
        self._flops = {Choice.KEPT: 0.0, Choice.AGAIN: forward}
        # From a norm's input in few bits other values would come.
        if not share.plain and (storage.norm_input, storage.ffn_input) == (AS_COMPUTED, AS_COMPUTED):
            self.bytes[Choice.FFN] = stored(replace(storage, ffn_input=RECOMPUTE))
            self._flops[Choice.FFN] = 2.0 * (2 if model.family == "llama" else 1) * model.hidden * model.ffn
        if config.lora.dropout:
            # Backward would have to draw the microbatch's random bits again.
            del self.bytes[Choice.AGAIN]
        head = unit_cost(model, HEAD) if any(HEAD in own for own in units) else 0.0
        self._whole = 3.0 * (sum(self.blocks) * forward + head)
        self._input = share.residual

    def alike(self, choice: Choice) -> tuple[Choice, ...]:
        """All blocks with this choice."""
        return (choice,) * sum(self.blocks)

    def memory(self, choices: Sequence[Choice]) -> StageMemory:
        """The estimate with these choices, in the order of the stage's blocks."""
        if all(choice is Choice.KEPT for choice in choices):
            return self._kept
        # Between chunks nothing is shared: the estimate with everything kept counts their common peak.
        apart = sum(held * count for held, count in zip(self._held, self.blocks, strict=True))
        saved, first = 0, 0
        for held, count in zip(self._held, self.blocks, strict=True):
            saved += held * sum(self._block - self.bytes[choice] for choice in choices[first : first + count])
            first += count
        kept = self._kept.kept + (apart - self._together) * self._block - saved
        # The block that is computed again, and its input's copy, in backward.
        again = self._block + self._input if Choice.AGAIN in choices else 0
        return replace(self._kept, kept=min(kept, self._kept.kept), working=self._kept.working + again)

    def added(self, choices: Sequence[Choice]) -> float:
        return sum(self._flops[choice] for choice in choices) / self._whole

    def plan(self, choices: tuple[Choice, ...], memory_bytes: int = 0) -> MemoryPlan:
        """These choices on a node with so much memory; 0 is without a limit."""
        memory = self.memory(choices)
        fits = memory_bytes == 0 or memory.total <= memory_bytes
        return MemoryPlan(choices=choices, memory=memory, added=self.added(choices), fits=fits)

    def choices(self) -> Iterator[tuple[Choice, ...]]:
        """One plan for each count of each choice; blocks that more microbatches wait for come first."""
        blocks = sum(self.blocks)
        chunk_of = [chunk for chunk, count in enumerate(self.blocks) for _ in range(count)]
        first = sorted(range(blocks), key=lambda block: -self._held[chunk_of[block]])
        for again in range(blocks + 1) if Choice.AGAIN in self.bytes else (0,):
            for ffn in range(blocks - again + 1) if Choice.FFN in self.bytes else (0,):
                choices = [Choice.KEPT] * blocks
                for number, block in enumerate(first[: again + ffn]):
                    choices[block] = Choice.AGAIN if number < again else Choice.FFN
                yield tuple(choices)


def _stages(
    config: RunConfig, stages: int, devices: Devices, windows: int = 0, only: int | None = None
) -> list[_Stage]:
    """Every stage, or `only` one; what they share, such as the schedule, is worked out once."""
    units, orders = chunk_units(config, stages), stage_orders(config, stages)
    storages = stage_storages(config, stages)
    together = held_blocks(config, stages, apart=devices.captures(config.training))
    kept = stage_memory(config, stages, devices, windows=windows)
    return [
        _Stage(
            config,
            devices,
            storage=storages[stage],
            units=units[stage::stages],
            order=orders[stage],
            together=together[stage],
            kept=kept[stage],
        )
        for stage in (range(stages) if only is None else (only,))
    ]


def plan_stage(
    config: RunConfig, stages: int, stage: int, devices: Devices, memory_bytes: int, *, windows: int = 0
) -> MemoryPlan:
    """The plan that adds the fewest operations among those that fit in `memory_bytes`.

    If none fits, the one that takes least. All is kept where the memory is not known (0).

    Args:
        memory_bytes: of each device of the node.
        windows: as for `node.pipeline.memory.stage_bytes`.
    """
    (one,) = _stages(config, stages, devices, windows, only=stage)
    everything = one.plan(one.alike(Choice.KEPT), memory_bytes)
    if everything.fits:
        return everything
    plans = [one.plan(choices, memory_bytes) for choices in one.choices()]
    fitting = [plan for plan in plans if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: (plan.added, plan.memory.total))
    return min(plans, key=lambda plan: (plan.memory.total, plan.added))


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory of a node, for which it plans its stage."""

    devices: Devices = field(default_factory=Devices)
    memory_bytes: int = 0
    """Of each device; 0 if not known."""
    windows: int = 0
    """As for `node.pipeline.memory.stage_bytes`."""

    def plan(self, config: RunConfig, stages: int, stage: int) -> MemoryPlan:
        """As `plan_stage`."""
        return plan_stage(config, stages, stage, self.devices, self.memory_bytes, windows=self.windows)


def least_stage_bytes(
    config: RunConfig, stages: int, devices: Devices, *, windows: int = 0
) -> tuple[int, ...]:
    """Bytes that each stage needs on every device of such a node when it computes again what it can."""
    # All blocks alike take least: what a choice saves grows with their number.
    return tuple(
        min(one.memory(one.alike(choice)).total for choice in one.bytes)
        for one in _stages(config, stages, devices, windows)
    )


def frontier(config: RunConfig, stages: int, stage: int, devices: Devices) -> tuple[MemoryPlan, ...]:
    """The plans of a stage that no other beats in both memory and operations, the largest first."""
    (one,) = _stages(config, stages, devices, only=stage)
    plans = map(one.plan, one.choices())
    best: list[MemoryPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.added, plan.memory.total)):
        if not best or plan.memory.total < best[-1].memory.total:
            best.append(plan)
    return tuple(best)
