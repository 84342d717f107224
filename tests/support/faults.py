"""Inject faults at exact points of a run, inside real processes: for tests and `make soak`.

    THINWIRE_FAULTS=PLAN python -m tests.support.faults PROGRAM ARGUMENTS...

PLAN is a `Plan` as JSON; without it nothing happens. A fault says what happens, in which phase of which
stage, at which step. Each happens `count` times in the whole run, also across restarts: a process first makes
a marker file in the plan's directory, which holds the time.
"""

import errno
import fcntl
import importlib
import json
import logging
import math
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import cast

import torch

from node.telemetry import points
from node.telemetry.points import ANY, At, Phase
from wire.errors import UserError
from wire.frames import frame_place, pack_frame, parse_frame

VARIABLE = "THINWIRE_FAULTS"
log = logging.getLogger(__name__)


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    """kill -9 of the node."""
    STOP = "stop"
    """The node freezes: alive, connected and silent, until somebody sends SIGCONT."""
    HOLD = "hold"
    """In `forward` or `backward`: compute waits while another process has `Plan.gate` locked; all else goes
    on."""
    LEAVE = "leave"
    """Ctrl-C on the node."""
    CUT = "cut"
    """The node's connections to its neighbours are reset."""
    CUT_CONTROL = "cut-control"
    """The node's connections to the coordinator are reset."""
    MEMORY = "memory"
    """An allocation fails."""
    NAN = "nan"
    """A tensor becomes not-a-number: in `forward` an activation, in `backward` a gradient."""

    STALL = "stall"
    """The link carries nothing for `seconds`."""
    DELAY = "delay"
    """A frame and all behind it wait for `seconds`; with a `count`, a slow link."""
    CORRUPT = "corrupt"
    """One bit of a frame flips."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """Two frames are swapped."""
    TRUNCATE = "truncate"
    NONSENSE = "nonsense"
    """A frame with a valid checksum that no correct peer sends."""

    COORDINATOR_KILL = "coordinator-kill"
    DISK_FULL = "disk-full"
    """A write of a snapshot file at the coordinator fails with ENOSPC."""
    TORN_WRITE = "torn-write"
    """kill -9 of the coordinator between a snapshot's temporary file and its rename."""


_KINDS = {
    At.NODE: {Kind.KILL, Kind.STOP, Kind.HOLD, Kind.LEAVE, Kind.CUT, Kind.CUT_CONTROL, Kind.MEMORY},
    At.TENSOR: {Kind.NAN},
    At.COORDINATOR: {Kind.COORDINATOR_KILL, Kind.HOLD},
    At.WRITE: {Kind.DISK_FULL},
    At.RENAME: {Kind.TORN_WRITE},
}
"""What may happen at each kind of point."""
_ON_FRAMES = frozenset(
    {Kind.STALL, Kind.DELAY, Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.TRUNCATE, Kind.NONSENSE}
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. `step` counts from 0, as nodes do; snapshots of step s hold the state after s steps."""

    kind: Kind
    phase: Phase
    stage: int = ANY
    step: int = ANY
    skip: int = 0
    """Times the process passes the point before the fault: the n-th microbatch, layer or frame."""
    count: int = 1
    """Times it happens in the run."""
    seconds: float = 0.0
    """Duration of a stall or delay."""

    @property
    def name(self) -> str:
        """Unique in a plan; the stem of the marker files."""
        return "-".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All faults of a run."""

    directory: str
    """An existing directory, shared by all processes of the run."""
    faults: tuple[Fault, ...]
    control_port: int = 0
    """The coordinator's control port, to tell its connections from neighbours'."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Raises UserError."""
        try:
            raw = json.loads(text)
            faults = [
                Fault(**{**fault, "kind": Kind(fault["kind"]), "phase": Phase(fault["phase"])})
                for fault in raw.pop("faults")
            ]
            return cls(faults=tuple(faults), **raw)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{VARIABLE} is no plan of faults ({error}): correct it, or unset it") from None

    def markers(self, fault: Fault) -> list[Path]:
        """A file for each time the fault happened; `fired_at` reads it."""
        return sorted(Path(self.directory).glob(f"{fault.name}.*"))

    def gate(self, fault: Fault) -> Path:
        """The file whose lock (flock) a `hold` fault waits for."""
        return Path(self.directory) / f"gate-{fault.name}"

    @property
    def haste(self) -> Path:
        """Once this file exists, stalls and delays happen and take no time."""
        return Path(self.directory) / "haste"


def fired_at(marker: Path) -> float:
    """When a fault happened, in Unix seconds."""
    return float(marker.read_text())


# ---- installed


def install() -> None:
    """Have the faults that the environment plans happen in this process. Raises UserError."""
    text = os.environ.get(VARIABLE)
    if not text:
        points.hook = points.frame_filter = None
        return
    armed = _Armed(Plan.from_json(text))
    points.hook, points.frame_filter = armed.reached, FrameFaults(armed)


def main() -> int:
    """Install the faults, then run the program that is named first with the remaining arguments."""
    install()
    del sys.argv[0]
    code: int = importlib.import_module(sys.argv[0]).main()
    return code


class FrameFaults:
    """Faults of sent frames, for all links of a process. Implements `wire.link_state.FrameFilter`."""

    def __init__(self, armed: "_Armed") -> None:
        self._armed = armed
        self._held: dict[int, bytes] = {}

    def __call__(self, frame: bytes, stage: int, peer_stage: int) -> Sequence[bytes]:
        key = frame_place(frame).key
        step = key.step if key is not None else 0
        points.reach(Phase.SENDING, stage=stage, step=step)
        frames = [frame]
        if (held := self._held.pop(peer_stage, None)) is not None:
            frames.append(held)
        for fault in self._armed.due(_ON_FRAMES, Phase.SENDING, stage, step):
            match fault.kind:
                case Kind.STALL | Kind.DELAY:
                    time.sleep(0.0 if self._armed.plan.haste.exists() else fault.seconds)
                case Kind.CORRUPT:
                    frames[0] = _flipped(frame, len(frame) // 2)
                case Kind.DUPLICATE:
                    frames.insert(0, frame)
                case Kind.REORDER:
                    frames.remove(frame)
                    self._held[peer_stage] = frame
                case Kind.TRUNCATE:
                    frames[0] = frame[: len(frame) // 2]
                case Kind.NONSENSE:
                    frames[0] = _of_another_session(frame)
        return frames


# ---- inside


@dataclass
class _Armed:
    """The plan, and how often this process passed each fault's point. Used by several threads."""

    plan: Plan
    passed: dict[Fault, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, at: At, phase: Phase, stage: int, step: int, tensor: object) -> None:
        """The hook of `node.telemetry.points`. Raises OSError or MemoryError."""
        if at is At.TENSOR and tensor is None:
            return
        for fault in self.due(_KINDS[at], phase, stage, step):
            _happen(fault, self.plan, tensor)

    def due(self, kinds: Collection[Kind], phase: Phase, stage: int, step: int) -> list[Fault]:
        return [
            fault
            for fault in self.plan.faults
            if fault.kind in kinds
            and fault.phase is phase
            and fault.step in (ANY, step)
            and fault.stage in (ANY, stage)
            and self._is_time(fault)
            and _claim(self.plan, fault)
        ]

    def _is_time(self, fault: Fault) -> bool:
        with self.lock:
            passed = self.passed[fault] = self.passed.get(fault, 0) + 1
        return passed > fault.skip


def _claim(plan: Plan, fault: Fault) -> bool:
    """Whether this process may carry out the fault."""
    # A hard link appears with its content: a kill cannot leave an empty marker.
    written = Path(plan.directory) / f".{os.getpid()}-{threading.get_ident()}"
    written.write_text(repr(time.time()))
    try:
        for number in range(fault.count):
            try:
                os.link(written, Path(plan.directory) / f"{fault.name}.{number}")
            except FileExistsError:
                continue
            return True
        return False
    finally:
        written.unlink()


def _happen(fault: Fault, plan: Plan, tensor: object) -> None:
    log.warning("fault on purpose: %s", fault.name)
    match fault.kind:
        case Kind.KILL | Kind.COORDINATOR_KILL | Kind.TORN_WRITE:
            _signal_self(signal.SIGKILL)
        case Kind.STOP:
            _signal_self(signal.SIGSTOP)
        case Kind.HOLD:
            with plan.gate(fault).open("a") as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
        case Kind.LEAVE:
            _signal_self(signal.SIGINT)
        case Kind.CUT:
            _reset_connections(lambda port: port != plan.control_port)
        case Kind.CUT_CONTROL:
            _reset_connections(lambda port: port == plan.control_port)
        case Kind.MEMORY:
            raise MemoryError(fault.name)
        case Kind.NAN:
            cast(torch.Tensor, tensor).fill_(math.nan)
        case Kind.DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _reset_connections(wanted: Callable[[int], bool]) -> None:
    """Shut down this process's TCP connections whose remote port is `wanted` (Linux)."""
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            # gRPC owns the descriptor: use a copy.
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and wanted(
                    connection.getpeername()[1]
                ):
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile, or listening


def _flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 0x10]) + frame[at + 1 :]


def _of_another_session(frame: bytes) -> bytes:
    (tag,) = struct.unpack_from("<4xQ", frame)
    parsed = parse_frame(frame, tag)
    return pack_frame(replace(parsed, session=parsed.session ^ 1), tag)


if __name__ == "__main__":
    sys.exit(main())
