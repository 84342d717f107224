"""Checks whether a stage's memory plan still holds, from measured steps, and makes another plan if not. Pure.

A plan rests on an estimate of memory and on times that were measured before the run. Between two steps, the
peak of bytes in tensors and the time of a microbatch are compared with the plan. If one is off by more than 5
%, a new plan uses the measurement. The first step with a plan compiles and does not count. The second step is
checked, then the one 2 later, 4 later and so on, and after a change again from the second one (the
exponential back-off of policy evolution in Adacc, Chen et al. 2025). A device that still runs out of memory
gets a plan for a tenth less, until no plan needs less. No plan changes a bit.
"""

from dataclasses import dataclass, replace

from node.config.schema import RunConfig
from node.tuning.block_times import BlockTimes, assumed_times
from node.tuning.memory import FIXED_BYTES
from node.tuning.memory_plan import MemoryPlan, Room, planned_again

OFF = 0.05
"""The relative error of memory or time above which a new plan is made."""
GAIN = 0.01
"""The share of a microbatch's time that a new plan must save if the present one still fits."""
LESS = 0.1
"""The share by which the planned memory is reduced after running out."""
FIRST_LOOK = 2
"""Steps with a plan until the first check."""
MOST_STEPS = 1024
"""The most steps between two checks."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a step used on the device."""

    most_bytes: int = 0
    """The peak of bytes in tensors; 0 if the device does not report it."""
    seconds: float = 0.0
    """The seconds of forward and backward of a microbatch; 0 if unknown."""


class MemoryControl:
    """The memory control of a stage that has been built."""

    def __init__(self, config: RunConfig, stages: int, stage: int, room: Room) -> None:
        """`config`: the run file with the stage's storage."""
        self._config, self._stages, self._stage, self._room = config, stages, stage, room
        self._times: BlockTimes = room.times or assumed_times(config, room.devices)
        self._memory = room.memory_bytes
        """The bytes to plan for: what the node offers, less the error of the estimate."""
        self._most: int | None = None
        """The most bytes to plan for after the device ran out of memory."""
        self._wait = 1
        """Steps between two comparisons with the plan."""
        self._left = FIRST_LOOK
        """Steps until the next comparison."""
        self.plan = room.plan(config, stages, stage)

    def step_done(self, taken: Taken) -> MemoryPlan | None:
        """A step with the present plan used this. Returns a better plan, if there is one."""
        if self._room.memory_bytes == 0:
            return None
        self._left -= 1
        if self._left > 0:
            return None
        plan = self._solved_again(taken)
        if plan is not None:
            self._wait, self._left = 1, FIRST_LOOK
        else:
            self._wait = self._left = min(MOST_STEPS, 2 * self._wait)
        return plan

    def ran_short(self) -> MemoryPlan | None:
        """The device ran out of memory with the present plan. Returns a plan for less, if there is one."""
        total = self.plan.memory.total
        self._most = min(total, self._most or total) - int(LESS * self.plan.memory.own)
        plan = self._planned(self._most)
        if plan.memory.total >= total:
            return None
        self.plan, self._wait, self._left = plan, 1, FIRST_LOOK
        return plan

    def _solved_again(self, taken: Taken) -> MemoryPlan | None:
        memory = replace(self.plan.memory, pages=0)
        planned = memory.total - FIXED_BYTES
        if taken.most_bytes and abs(taken.most_bytes - planned) > OFF * (planned - memory.workspaces):
            self._memory = max(1, self._room.memory_bytes - (taken.most_bytes - planned))
        elif taken.most_bytes:
            self._memory = self._room.memory_bytes
        now = self._as_planned_now()
        if taken.seconds and now.seconds and abs(taken.seconds - now.seconds) > OFF * now.seconds:
            self._times = _scaled(self._times, taken.seconds / now.seconds)
            now = self._as_planned_now()
        if now.fits and now.added == 0:
            return None
        plan = self._planned(self._limit)
        before = self.plan
        same = (plan.choices, plan.state, plan.graphs) == (before.choices, before.state, before.graphs)
        if same or (now.fits and (not plan.fits or plan.added > now.added - GAIN)):
            return None
        self.plan = plan
        return plan

    @property
    def _limit(self) -> int:
        return self._memory if self._most is None else min(self._memory, self._most)

    def _planned(self, memory_bytes: int) -> MemoryPlan:
        room = replace(self._room, memory_bytes=memory_bytes, times=self._times)
        return room.plan(self._config, self._stages, self._stage)

    def _as_planned_now(self) -> MemoryPlan:
        return planned_again(
            self._config,
            self._stages,
            self._stage,
            self._room.devices,
            self._limit,
            self.plan,
            windows=self._room.windows,
            times=self._times,
        )


def _scaled(times: BlockTimes, factor: float) -> BlockTimes:
    """The times with compute slower by this factor; copies stay the same."""
    return replace(
        times,
        forward=factor * times.forward,
        backward=factor * times.backward,
        attention=factor * times.attention,
        attention_output=factor * times.attention_output,
        ffn_input=factor * times.ffn_input,
        packing=tuple(
            replace(times_of, pack=factor * times_of.pack, unpack=factor * times_of.unpack)
            for times_of in times.packing
        ),
    )
