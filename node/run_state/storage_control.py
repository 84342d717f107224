"""How stages store their activations, if the run file leaves that to the coordinator. Pure.

The choice is made when a run first has this number of stages, and then stays. So a repeated step has the bits
with which it first ran, and a node that takes over a stage stores like the node before it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

from node.config.schema import RunConfig
from node.run_state.actions import Action, RecordPlan
from node.run_state.epoch import Epoch
from node.run_state.stage_assignment import StageBytes
from node.tuning.decisions import StepHistory
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import least_stage_bytes
from node.tuning.storage_choice import (
    StoragePlan,
    chosen_config,
    narrowest,
    plan_storages,
    storage_named,
)

Choose = Callable[[Sequence[Sequence[Mapping[str, float]]]], StoragePlan]
"""As `node.tuning.storage_choice.plan_storages`."""
NeedsOf = Callable[[int, Devices, StoragePlan | None], Sequence[int]]
"""(stages, a node's devices, their plan if known) -> the bytes of each stage on every device."""


class StorageControl:
    """The storages of a run's steps: those on record, and the memory that stages need with them."""

    def __init__(self, choose: Choose | None, needs: NeedsOf, history: StepHistory[StoragePlan]) -> None:
        """`choose` is None if the run file leaves no choice."""
        self._choose = choose
        self._needs = needs
        self.history = history

    def begin(self, epoch: Epoch) -> list[Action]:
        """Give the epoch, which is about to restore, the storages of its step. They are recorded before a
        node receives them."""
        if self._choose is None:
            return []
        records: list[Action] = []
        plan = self.history.at(epoch.step)
        if plan is None or len(plan.names) != epoch.stages:
            plan = self._choose([epoch.storage_seconds(stage) for stage in range(epoch.stages)])
            self.history = self.history.instead(epoch.step, plan)
            records.append(RecordPlan(step=epoch.step, plan=plan))
        epoch.use_storages(plan)
        return records

    def stage_bytes(self, stages: int, devices: Devices) -> Sequence[int]:
        """The least that stages need: with the newest recorded storages if they have this number of stages,
        otherwise with the fewest allowed bits."""
        plan = self.history.changes[-1][1] if self.history.changes else None
        known = plan is not None and len(plan.names) == stages
        return self._needs(stages, devices, plan if known else None)


def no_choice(history: StepHistory[StoragePlan], plain: StageBytes) -> StorageControl:
    """Create the control for a run with its run file's storage. `plain` returns its stages' needs."""
    return StorageControl(None, lambda stages, devices, plan: plain(stages, devices), history)


def storage_control(
    config: RunConfig, windows: int, history: StepHistory[StoragePlan], plain: StageBytes
) -> StorageControl:
    """Create the control for a run.

    Args:
        windows: the number of samples in one pass over the text.
        plain: as for `no_choice`.
    """
    if not config.storage.allow:
        return no_choice(history, plain)

    @functools.lru_cache(64)
    def needs(stages: int, devices: Devices, plan: StoragePlan | None) -> Sequence[int]:
        if plan is None:
            return least_stage_bytes(narrowest(config), stages, devices, windows=windows)
        by_name = {
            name: least_stage_bytes(
                chosen_config(config, storage_named(config, name)), stages, devices, windows=windows
            )
            for name in set(plan.names)
        }
        return tuple(by_name[name][stage] for stage, name in enumerate(plan.names))

    return StorageControl(functools.partial(plan_storages, config), needs, history)
