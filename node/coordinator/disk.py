"""If the disk is full, the run pauses until there is space, and nothing that its nodes hold is lost."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from node.config.schema import RunConfig
from node.telemetry.format import bytes_text
from node.view.totals import snapshots_need
from wire.errors import DiskFullError, UserError

Result = TypeVar("Result")

RETRY_SECONDS = 2.0
"""The seconds between two attempts to write to a full disk."""


class Disk:
    """Repeats writes that fail because the disk is full. Call it on the event loop."""

    def __init__(self, tell: Callable[[str], None], retry_seconds: float = RETRY_SECONDS) -> None:
        """`tell` shows the operator a line. Before it is called, `is_full` is updated."""
        self._tell = tell
        self._retry_seconds = retry_seconds
        self._room = asyncio.Event()
        self._room.set()
        self._full = asyncio.Event()
        self._given_up = asyncio.Event()

    async def room(self) -> None:
        """Wait until the disk is not full, or until `give_up`."""
        if not self._room.is_set():
            await self._room.wait()

    async def full(self) -> None:
        await self._full.wait()

    @property
    def is_full(self) -> bool:
        return self._full.is_set()

    def give_up(self) -> None:
        """The run ends now, so writes fail from now on."""
        self._given_up.set()
        self._full.clear()
        self._room.set()

    async def write(self, attempt: Callable[..., Result], *what: object) -> Result:
        """Call `attempt` on a thread until it succeeds. Raises DiskFullError after `give_up`, and other
        errors immediately."""
        reported = False
        while True:
            try:
                result = await asyncio.to_thread(attempt, *what)
            except DiskFullError as error:
                if self._given_up.is_set():
                    raise
                is_news = not self._full.is_set()
                self._room.clear()
                self._full.set()
                if is_news:
                    reported = True
                    self._tell(f"paused: {error}; the run continues when there is space")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._retry_seconds):
                        await self._given_up.wait()
                continue
            if reported:
                self._full.clear()
                self._room.set()
                self._tell("the disk has space again: the run continues")
            return result


def check_room(config: RunConfig, directory: Path, *, held: int = 0) -> str | None:
    """A line for the operator if all snapshots that the run keeps may not fit on the disk.

    Args:
        held: the bytes of the run's existing snapshots.

    Raises UserError if there is no space for the newest snapshot and the one after it, or for the last one
    if nodes or a store keep the others.
    """
    each, all_of_them = snapshots_need(config)
    least = min(2 * each, all_of_them)
    free = shutil.disk_usage(directory).free + held
    if free < least:
        count = "two" if least > each else "the last one"
        raise UserError(
            f"a snapshot of this run takes {bytes_text(each)}, and {count} must fit on the disk of "
            f"{directory}, which has {bytes_text(free)}: free {bytes_text(least - free)}, or give another "
            "--run-dir"
        )
    if free < all_of_them:
        return (
            f"the run keeps up to {bytes_text(all_of_them)} of snapshots on the disk of {directory}, "
            f"which has {bytes_text(free)}: free some space, or set run.keep_snapshots lower"
        )
    return None
