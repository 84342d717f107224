"""`status.json`: where a run stands, kept in its directory for `thinwire status`."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from node.telemetry.costs import Work
from node.telemetry.events import (
    DiskRoom,
    Event,
    HeldOutLoss,
    NodeJoined,
    NodeLeft,
    PageServed,
    PlacementMade,
    RunFinished,
    RunStarted,
    SeatLost,
    SnapshotSetAside,
    SnapshotStored,
    StepAborted,
    StepCosts,
    StepDone,
    from_json,
)
from wire.errors import ProtocolViolationError, RunError

STATUS_FILE = "status.json"
WRITE_INTERVAL = 1.0
"""Seconds between writes for steps alone, and for nodes that come and go when there are many; every other
event is written at once."""
MANY = 64
"""Nodes. The file lists all of them, so a thousand that join would write a million lines."""
COORDINATOR_GONE = "its coordinator is gone"
"""Why a run is over whose coordinator died without saying so."""
_REMEDY = "delete it; the coordinator writes a new one"
MOST_LEFT = 3
"""Nodes that left and are kept here; the history has all."""


@dataclass(frozen=True, kw_only=True)
class RunStatus(Event):
    """The state of a run after some events; each field holds the newest event of its kind."""

    event: ClassVar[str] = "status"
    updated: float
    """Unix time of the write."""
    host: str
    process_id: int
    started: RunStarted
    nodes: tuple[NodeJoined, ...] = ()
    """Connected nodes."""
    gone: tuple[NodeLeft, ...] = ()
    """The last nodes that left and have not come back, newest last."""
    placement: PlacementMade | None = None
    step: StepDone | None = None
    held_out: HeldOutLoss | None = None
    aborted: int = 0
    """Number of aborted steps."""
    lost: int = 0
    """Nodes that were lost while steps went on."""
    work: Work = field(default_factory=Work)
    planned: int = 0
    """Number of planned changes of placement."""
    snapshot: SnapshotStored | None = None
    finished: RunFinished | None = None
    page: PageServed | None = None
    paused: str = ""
    """Why the run stands still until somebody does something; empty if it does not."""
    process_start: str = ""
    """Distinguishes the process from a later one with the same id; empty if unknown."""


def after(status: RunStatus, event: Event) -> RunStatus:
    """The status after `event`."""
    if (work := status.work.after(event)) != status.work:
        status = replace(status, work=work)
    match event:
        case NodeJoined():
            nodes, gone = _without(event.node_id, status)
            return replace(status, nodes=(*nodes, event), gone=gone)
        case NodeLeft():
            nodes, gone = _without(event.node_id, status)
            return replace(status, nodes=nodes, gone=(*gone, event)[-MOST_LEFT:])
        case PageServed():
            return replace(status, page=event)
        case PlacementMade():
            return replace(status, placement=event)
        case StepDone():
            return replace(status, step=event)
        case HeldOutLoss():
            return replace(status, held_out=event)
        case StepAborted():
            if event.is_planned:
                return replace(status, planned=status.planned + 1)
            return replace(status, aborted=status.aborted + 1)
        case SeatLost():
            return replace(status, lost=status.lost + 1)
        case SnapshotStored():
            return replace(status, snapshot=event)
        case DiskRoom():
            return replace(status, paused=event.text if event.full else "")
        case SnapshotSetAside():
            damaged = status.snapshot is not None and status.snapshot.step > event.whole
            return replace(status, snapshot=None) if damaged else status
        case RunFinished():
            return replace(status, finished=event)
        case _:
            return status


def _without(node_id: str, status: RunStatus) -> tuple[tuple[NodeJoined, ...], tuple[NodeLeft, ...]]:
    """Connected nodes and nodes that left, both without this one."""
    return (
        tuple(node for node in status.nodes if node.node_id != node_id),
        tuple(node for node in status.gone if node.node_id != node_id),
    )


class StatusWriter:
    """Called with each event of a run; keeps `status.json` in its directory up to date.

    The file is replaced as a whole, so readers never see half of it. It is a convenience, not state of the
    run: a failed write is reported once through `warn`, and the next event tries again.
    """

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._warn = warn
        self._clock = clock
        self._status: RunStatus | None = None
        self._broken = False

    def __call__(self, event: Event) -> None:
        now = self._clock()
        if isinstance(event, RunStarted):
            process = os.getpid()
            self._status = RunStatus(
                updated=now,
                host=socket.gethostname(),
                process_id=process,
                process_start=process_start(process),
                started=event,
            )
        elif self._status is None:
            return
        else:
            self._status = after(self._status, event)
            waits = isinstance(event, StepDone | StepCosts) or (
                isinstance(event, NodeJoined | NodeLeft) and len(self._status.nodes) > MANY
            )
            if waits and 0 <= now - self._status.updated < WRITE_INTERVAL:
                return
        self._status = replace(self._status, updated=now)
        self._write(self._status)

    def _write(self, status: RunStatus) -> None:
        path = Path(status.started.directory) / STATUS_FILE
        partial = path.with_suffix(".json.partial")
        try:
            partial.write_text(status.to_json() + "\n", encoding="utf-8")
            partial.replace(path)
            self._broken = False
        except OSError as error:
            if not self._broken:
                self._broken = True
                self._warn(
                    f"{path} cannot be written ({error.strerror}); until then `thinwire status` is old"
                )


def read_status(directory: Path) -> RunStatus | None:
    """The newest status of the run in `directory`; None before its first event. RunError if unreadable."""
    path = directory / STATUS_FILE
    try:
        status = from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except (ProtocolViolationError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not a run's status ({error}); {_REMEDY}") from None
    if not isinstance(status, RunStatus):
        raise RunError(f"{path} is not a run's status; {_REMEDY}")
    return status


def coordinator_alive(status: RunStatus) -> bool | None:
    """Whether the process that wrote `status` is alive; None if it ran on another machine."""
    if status.host != socket.gethostname():
        return None
    try:
        os.kill(status.process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # owned by another user
    now = process_start(status.process_id)
    return not (now and status.process_start) or now == status.process_start


def coordinator_is_gone(directory: Path) -> bool:
    """Whether the coordinator of the run in `directory` ran on this machine and has ended."""
    try:
        status = read_status(directory)
    except RunError:
        return False  # perhaps written by another version
    return status is not None and coordinator_alive(status) is False


def process_start(process_id: int) -> str:
    """Start time of a local process in clock ticks since boot; empty if unknown."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[19].decode("ascii")
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
