"""File descriptors: this process's limit, and a spare one for when none is left."""

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

NEEDED = 4096
"""The number of descriptors that `doctor` asks for: enough for a coordinator of 200 members under attack, or
a node of many GPUs."""
EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
"""System call errors that mean that descriptors, or memory for them, have run out."""
_MOST = 65536
"""The highest limit to set. More only enlarges tables, and macOS refuses more without reporting a limit."""


def limits() -> tuple[int, int]:
    """(soft, hard) limit on this process's descriptors; `resource.RLIM_INFINITY` for none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> int:
    """Raise the soft limit to the hard one, at most 65,536; return the new limit."""
    soft, hard = limits()
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = limits()
    return _MOST if soft == resource.RLIM_INFINITY else min(soft, _MOST)


PATIENCE_SECONDS, PAUSE_SECONDS = 60.0, 0.1
_never = threading.Event()


def when_there_are_some(work: Callable[[], Result]) -> Result:
    """Do `work`, which opens files, and retry for up to a minute while descriptors have run out.

    Meanwhile, ports drop strangers. Call it on a thread that may block; `work` must be safe to repeat.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return work()
        except OSError as error:
            if error.errno not in EXHAUSTED or time.monotonic() > deadline:
                raise
        _never.wait(PAUSE_SECONDS)


class Spare:
    """A descriptor held in reserve, so that a connection can be accepted and closed when none is left.

    Otherwise the connection would stay in the kernel's queue and wake the event loop endlessly.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give_up(self) -> bool:
        """Close it. Returns whether it was open."""
        if self._descriptor is None:
            return False
        os.close(self._descriptor)
        self._descriptor = None
        return True

    def take_back(self) -> None:
        """Open it again if possible."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
