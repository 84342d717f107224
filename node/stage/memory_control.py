"""Checks whether a stage's memory plan still holds, from measured steps, and makes another plan if not. Pure.

A plan rests on an estimate of memory. Between two steps, the measured peak of bytes in tensors is compared
with it. If it is off by more than 5 %, a new plan uses the measurement. The first step with a plan compiles
and does not count. The second step is checked, then the one 2 later, 4 later and so on, and after a change
again from the second one (the exponential back-off of policy evolution in Adacc, Chen et al. 2025). A device
that still runs out of memory gets a plan for a tenth less, until no plan needs less. No plan changes a bit.

Times are measured once, before the run. Steps come within 10 % of their plan (scripts/results/memory.md),
and a plan by the times of steps would be at most 1.7 % faster.
"""

from dataclasses import replace

from node.config.schema import RunConfig
from node.tuning.memory import FIXED_BYTES
from node.tuning.memory_plan import MemoryPlan, Room

OFF = 0.05
"""The relative error of memory above which a new plan is made."""
GAIN = 0.01
"""The share of a microbatch's time that a new plan must save if the present one still fits."""
LESS = 0.1
"""The share by which the planned memory is reduced after running out."""
FIRST_LOOK = 2
"""Steps with a plan until the first check."""
MOST_STEPS = 1024
"""The most steps between two checks."""


class MemoryControl:
    """The memory control of a stage that has been built."""

    def __init__(self, config: RunConfig, stages: int, stage: int, room: Room) -> None:
        """`config`: the run file with the stage's storage."""
        self._config, self._stages, self._stage, self._room = config, stages, stage, room
        self._memory = room.memory_bytes
        """The bytes to plan for: what the node offers, less the error of the estimate."""
        self._most: int | None = None
        """The most bytes to plan for after the device ran out of memory."""
        self._wait = 1
        """Steps between two comparisons with the plan."""
        self._left = FIRST_LOOK
        """Steps until the next comparison."""
        self.plan = room.plan(config, stages, stage)

    def step_done(self, most_bytes: int) -> MemoryPlan | None:
        """A step with the present plan took this many bytes in tensors at its peak; 0 if the device does not
        report it. Returns a better plan, if there is one."""
        if self._room.memory_bytes == 0 or most_bytes == 0:
            return None
        self._left -= 1
        if self._left > 0:
            return None
        plan = self._solved_again(most_bytes)
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

    def _solved_again(self, most_bytes: int) -> MemoryPlan | None:
        before = self.plan
        memory = replace(before.memory, pages=0)
        planned = memory.total - FIXED_BYTES
        off = most_bytes - planned
        self._memory = self._room.memory_bytes
        if abs(off) > OFF * (planned - memory.workspaces):
            self._memory = max(1, self._memory - off)
        fits = before.memory.total <= self._limit
        if fits and before.added == 0:
            return None
        plan = self._planned(self._limit)
        same = (plan.choices, plan.state, plan.graphs) == (before.choices, before.state, before.graphs)
        if same or (fits and (not plan.fits or plan.added > before.added - GAIN)):
            return None
        self.plan = plan
        return plan

    @property
    def _limit(self) -> int:
        return self._memory if self._most is None else min(self._memory, self._most)

    def _planned(self, memory_bytes: int) -> MemoryPlan:
        room = replace(self._room, memory_bytes=memory_bytes)
        return room.plan(self._config, self._stages, self._stage)
