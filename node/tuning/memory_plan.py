"""What the blocks and the optimizer of a stage do so that it fits in a node's memory. Torch-free.

Nothing here changes a bit, so every node decides for itself: a small card and a large one may host stages of
one run. For each kind of tensor that a block keeps for backward there is a choice: it stays on the device,
backward computes it again, or it waits in host memory (`node.model.offload`). A block may also keep its input
alone, here or in host memory, and run again. State may be in host memory too: the optimizer's moments, then
blocks' weights, then their main gradients (`node.tuning.state_moves`).

`plan_stage` takes what adds the least time among what fits (`node.tuning.memory_program`), by the times of
`node.tuning.block_times`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from node.config.schema import RunConfig
from node.schedule.placement import chunk_units, held_blocks, stage_orders
from node.tuning.block_times import BlockTimes, assumed_times
from node.tuning.device_memory import Devices
from node.tuning.memory import stage_bytes, stage_memory, stage_storages
from node.tuning.memory_choice import Choice, MemoryPlan
from node.tuning.memory_stage import PlannedStage

CURVE_POINTS = 24


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
    """Every stage, or `only` one; what they share, such as the schedule, is worked out once."""
    units, orders = chunk_units(config, stages), stage_orders(config, stages)
    storages = stage_storages(config, stages)
    together = held_blocks(config, stages, apart=devices.captures(config.training))
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
        windows: as for `node.tuning.memory.stage_bytes`.
        times: of its card; those of a typical one by default.
    """
    ones = [one for (one,) in _variants(config, stages, devices, windows, stage, times)]
    return _fastest(ones, memory_bytes)


def short_of_memory(config: RunConfig, devices: Devices, memory_bytes: int) -> bool:
    """Whether a node with so much memory may get a stage that does not fit with everything kept."""
    return 0 < memory_bytes < max(stage_bytes(config, config.pipeline.stages, devices))


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
    return one.plan(plan.choices, memory_bytes, state=plan.state)


def _fastest(ones: Sequence[PlannedStage], memory_bytes: int) -> MemoryPlan:
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
    """As for `node.tuning.memory.stage_bytes`."""
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
    config: RunConfig,
    stages: int,
    stage: int,
    devices: Devices,
    times: BlockTimes | None = None,
    *,
    points: int = CURVE_POINTS,
) -> tuple[MemoryPlan, ...]:
    """Plans of a stage from the one that keeps everything to the one that takes least: the fastest for each
    of `points` memories, both ends included."""
    ones = [one for (one,) in _variants(config, stages, devices, only=stage, times=times)]
    everything = ones[0].plan(ones[0].alike(Choice.KEPT))
    least = min((one.least() for one in ones), key=lambda plan: plan.memory.total)
    most, low = everything.memory.total, least.memory.total
    found = [everything]
    for number in range(1, points):
        budget = most - (most - low) * number // (points - 1)
        plan = _fastest(ones, budget)
        if plan.fits and plan.memory.total < found[-1].memory.total:
            found.append(plan)
    # One may be as fast as one that takes more.
    pairs = zip(found, [*found[1:], None], strict=True)
    return tuple(plan for plan, after in pairs if after is None or after.added > plan.added)
