"""Tells from a run's history whether its coordinator is alive."""

import os
import socket
from pathlib import Path

from node.telemetry.events import RunStarted

COORDINATOR_GONE = "its coordinator is gone"
"""The reason for the end of a run whose coordinator died without recording one."""


def coordinator_alive(started: RunStarted) -> bool | None:
    """Whether the process that wrote `started` is alive; None if it ran on another machine."""
    if started.host != socket.gethostname():
        return None
    try:
        os.kill(started.process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # owned by another user
    start = process_start(started.process_id)
    return not (start and started.process_start) or start == started.process_start


def coordinator_is_gone(started: RunStarted | None) -> bool:
    """Whether the coordinator that wrote `started` ran on this machine and has ended."""
    return started is not None and coordinator_alive(started) is False


def process_start(process_id: int) -> str:
    """The start time of a local process in clock ticks since boot; empty if unknown."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[19].decode("ascii")
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
