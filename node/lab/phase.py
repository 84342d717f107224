"""Measure the phases of one run: change the links, discard some steps, measure the next."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import TextIO

from node.lab.figures import PhaseSteps
from node.lab.network import Network, WireBytes
from node.lab.processes import RunProcesses, Step
from node.lab.shape import Shape
from wire.errors import RunError

RECORD = 0.03
"""While TCP still speeds up, a step is faster than all before it by at least this share."""


class Phases:
    """Measures one phase after the other.

    Args:
        warmup_steps: The steps discarded after each change of the links.
        warmup_round_trips: Steps are discarded for at least this many round trips, and then until a step is
            no faster than all before it. TCP finds its rate in round trips, not in steps.
        spare_steps: Steps of the run beyond the planned ones. They replace steps that ran while links
            changed, and extra warm-up steps.
        step_seconds: Time limit of a step.
        log: Receives the events of all steps.
    """

    def __init__(
        self,
        network: Network,
        processes: RunProcesses,
        *,
        warmup_steps: int,
        warmup_round_trips: int,
        spare_steps: int,
        step_seconds: float,
        log: TextIO,
    ) -> None:
        self._network = network
        self._processes = processes
        self._warmup = warmup_steps
        self._round_trips = warmup_round_trips
        self._spare = spare_steps
        self._step_seconds = step_seconds
        self._log = log

    async def measure(self, shape: Shape | None, count: int) -> tuple[PhaseSteps, list[Step]]:
        """Change the links, discard steps, and measure `count` more. Also returns all steps of the phase.

        Raises RunError if more steps ran while the links changed than there are warm-up and spare steps.
        """
        await asyncio.to_thread(self._network.shape, shape)
        shaped = time.monotonic()
        label = shape.label if shape else None
        steps = [await self._next(label, "warmup") for _ in range(self._warmup)]
        settling = self._round_trips * shape.rtt_ms / 1e3 if shape else 0.0
        while settling and self._spare > 0 and (steps[-1].at < shaped + settling or _still_faster(steps)):
            self._spare -= 1
            steps.append(await self._next(label, "warmup"))
        while True:
            before, since = await asyncio.to_thread(self._network.counters), time.monotonic()
            step = await self._processes.next_step(self._step_seconds)
            if step.at - step.done.seconds >= shaped:
                break
            if self._spare == 0:
                raise RunError(
                    f"steps of {step.done.seconds:.2g} s passed while the links changed, so what was "
                    f"measured belongs to no setting, and the run has no spare steps left: raise "
                    f"lab.warmup_steps (now {self._warmup})"
                )
            self._spare -= 1
            self._write(step, label, "warmup")
            steps.append(step)
        self._write(step, label, "measured")
        measured = [step, *[await self._next(label, "measured") for _ in range(count - 1)]]
        self._log.flush()
        seconds = time.monotonic() - since
        after = await asyncio.to_thread(self._network.counters)
        if shape is not None:
            await asyncio.to_thread(self._network.check, shape)
        phase = PhaseSteps(
            costs=tuple(step.costs for step in measured),
            wires=tuple(
                WireBytes(late.up - early.up, late.down - early.down)
                for early, late in zip(before, after, strict=True)
            ),
            seconds=seconds,
        )
        return phase, [*steps, *measured]

    async def _next(self, label: str | None, kind: str) -> Step:
        step = await self._processes.next_step(self._step_seconds)
        self._write(step, label, kind)
        return step

    def _write(self, step: Step, label: str | None, kind: str) -> None:
        for event in (step.costs, step.done):
            line = {"at": step.at, "shape": label, "kind": kind}
            self._log.write(json.dumps({**line, **json.loads(event.to_json())}) + "\n")


def _still_faster(steps: Sequence[Step]) -> bool:
    *before, newest = (step.done.seconds for step in steps)
    return newest < (1 - RECORD) * min(before, default=0.0)
