"""The compute thread, and a watchdog that detects when it hangs, in a driver or on a disk that never answers.

The process still answers pings and sends heartbeats, so to others it looks like a slow stage. A thread cannot
be ended from outside, so the process ends. The run continues with another node, or with this one after a
restart.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from node.telemetry.clock import WAITS, StageClock, TimeKind
from wire.errors import RunError

Result = TypeVar("Result")

STUCK_SECONDS = 300.0
"""The most seconds for one activity. They exceed any forward, backward or optimizer step, including first
compilations, but stay below `node.stage.inbox.STALL_SECONDS`, after which the neighbours would be blamed."""
LOOK_SECONDS = 5.0


class StuckError(RunError):
    """The compute thread hangs, so the process cannot end cleanly."""


class ComputeThread:
    """Runs a node's arithmetic, one call at a time, and counts its time. Call it on the event loop."""

    def __init__(self, clock: StageClock | None = None) -> None:
        self.clock = clock or StageClock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` after earlier work. By default, its time counts as the optimizer's."""
        counted = self.clock.spent(TimeKind.OPTIMIZER)(work)
        return await asyncio.get_running_loop().run_in_executor(self._pool, counted)

    async def watch(self) -> None:
        """Check the thread until cancelled. Raises StuckError."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            check_progress(*self.clock.running())

    async def finish(self) -> None:
        """Wait until all submitted work has run. Raises StuckError."""
        working = asyncio.create_task(self.run(lambda: None))
        try:
            while not (await asyncio.wait([working], timeout=LOOK_SECONDS))[0]:
                check_progress(*self.clock.running())
        finally:
            working.cancel()

    def shutdown(self, *, wait: bool) -> None:
        """End the thread. Do not `wait` if it hangs."""
        self._pool.shutdown(wait=wait)


def check_progress(kind: TimeKind, seconds: float) -> None:
    """Raise StuckError when the compute thread has spent too long on one activity.

    Args:
        kind: what the thread is doing. Waits have limits of their own.
        seconds: for how long.
    """
    if kind not in WAITS and seconds > STUCK_SECONDS:
        raise StuckError(
            f"the compute thread has been in {kind} for {seconds:.0f} s and does not return: check the "
            "device's driver and disk, then join again"
        )
