"""Tells from a run's history whether its coordinator is alive."""

import os
import socket
from pathlib import Path

from node.telemetry.events import RunStarted

COORDINATOR_GONE = "no coordinator runs it here"
"""The reason for the end of a run whose coordinator died without recording one, and of a copied run."""


def coordinator_alive(started: RunStarted, directory: Path) -> bool | None:
    """Whether the process that wrote `started` is alive and runs `directory`, which may be a copy of its
    run; None if it ran on another machine."""
    if started.host != socket.gethostname():
        return None
    return _is_alive(started) and copied_from(started, directory) is None


def copied_from(started: RunStarted, directory: Path) -> Path | None:
    """The run's directory that the process that wrote `started` runs here, if `directory` is a copy of it."""
    if started.host != socket.gethostname() or not _is_alive(started):
        return None
    original = Path(f"/proc/{started.process_id}/cwd") / started.directory
    try:
        return None if original.samefile(directory) else original.resolve()
    except OSError:
        return None  # its directory was moved, or this system or its owner does not show it


def _is_alive(started: RunStarted) -> bool:
    """Whether the process of this machine that wrote `started` is alive."""
    try:
        os.kill(started.process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # owned by another user
    start = process_start(started.process_id)
    return not (start and started.process_start and start != started.process_start)


def coordinator_is_gone(started: RunStarted | None, directory: Path) -> bool:
    """Whether the coordinator that wrote `started` ran on this machine, and does not run `directory` now."""
    return started is not None and coordinator_alive(started, directory) is False


def process_start(process_id: int) -> str:
    """The start time of a local process in clock ticks since boot; empty if unknown."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[19].decode("ascii")
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
