"""Finding a compute thread that does not come back: a driver that hangs, a disk that never answers.

The process still answers pings and says that it lives, so nobody else can tell it from a slow stage. A
thread cannot be ended from outside; the process ends instead, and the run goes on with another node, or with
this one started anew.
"""

import asyncio
from collections.abc import Coroutine

from node.telemetry.clock import WAITS, StageClock, TimeKind
from wire.errors import RunError

STUCK_SECONDS = 300.0
"""Longer than any one forward, backward or optimizer step should take, first compilations included; shorter
than `node.stage.inbox.STALL_SECONDS`, after which the neighbours would be blamed."""
LOOK_SECONDS = 5.0


class StuckError(RunError):
    """The compute thread does not come back, so the process cannot end in good order."""


def check_progress(kind: TimeKind, seconds: float) -> None:
    """Raises StuckError when the compute thread has been at one thing for too long.

    Args:
        kind: what it does now. What it waits for has limits of its own.
        seconds: for how long it has.
    """
    if kind not in WAITS and seconds > STUCK_SECONDS:
        raise StuckError(
            f"the compute thread has been in {kind} for {seconds:.0f} s and does not come back: check the "
            "device's driver and disk, then join again"
        )


async def watch(clock: StageClock) -> None:
    """Look at the clock until cancelled. Raises StuckError."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        check_progress(*clock.running())


async def watched(clock: StageClock, work: Coroutine[object, object, None]) -> None:
    """Wait for `work`, which the compute thread does after what it is at. Raises StuckError."""
    working = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([working], timeout=LOOK_SECONDS))[0]:
            check_progress(*clock.running())
    finally:
        working.cancel()
