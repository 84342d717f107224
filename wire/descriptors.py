"""File descriptors: the limit of this process, and a few in reserve for when none is left."""

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
"""Errors of a system call that mean that descriptors, or the memory behind them, have run out."""
_MOST = 65536
"""The highest limit that is set. More would only make tables larger, and macOS reports no hard limit but
refuses higher values."""


def limits() -> tuple[int, int]:
    """(soft, hard) limit on this process's descriptors; `resource.RLIM_INFINITY` for none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_limit() -> int:
    """Raise the soft limit to the hard one, at most 65,536; returns what holds then."""
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
    """Do `work`, which opens files, again while descriptors have run out, for a minute at most.

    Ports drop strangers meanwhile. Call it on a thread that may wait; `work` must be able to start again.
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
    """One open descriptor to give up, so that a connection can be accepted and closed when none is left.

    Otherwise the connection stays in the kernel's queue, and the port wakes the event loop without end.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def give_up(self) -> bool:
        """Close it; whether there was one."""
        if self._descriptor is None:
            return False
        os.close(self._descriptor)
        self._descriptor = None
        return True

    def take_back(self) -> None:
        """Open it again, if that is possible now."""
        if self._descriptor is None:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
