"""Lets only one process of a machine compile at a time, so that the others find its results in the cache.

Nodes that start together need the same loops at the same time. Compiling all of them takes a core half a
minute. If every process compiled for itself, five processes on two cores would delay the run's first step by
minutes. The turn is a lock on a file beside numba's cache, which the kernel releases when its holder ends.
"""

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Self

WAIT_SECONDS = 60.0
"""A process that waits longer compiles beside the others, because the holder of the lock may have been
stopped."""


class CompileTurn:
    """The turn of one process. Its threads must call all methods under numba's compiler lock.

    It is a context manager, entered for each function that may have to be compiled, also from within another
    one. A turn that is taken meanwhile ends with the outermost context.
    """

    def __init__(self, path: Path) -> None:
        """`path` is the file to lock. It is not deleted."""
        self._path = path
        self._depth = 0
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._forget)

    def __enter__(self) -> Self:
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._end()

    def take(self) -> None:
        """Wait until no other process has the turn. Returns at once if this process has it.

        It never fails: if files cannot be locked, all processes compile at the same time.
        """
        if self._file is not None or self._depth == 0:
            return
        # RuntimeError: a process that is ending cannot start threads.
        with contextlib.suppress(OSError, RuntimeError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            # flock has no timeout, so a thread waits for it, with a descriptor of its own. Both descriptors
            # are of one open file, so the lock is released when both are closed.
            waiting = threading.Thread(target=_lock, args=(os.dup(self._file),), daemon=True)
            waiting.start()
            waiting.join(WAIT_SECONDS)

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _forget(self) -> None:
        """Reset after a fork: the child has its parent's descriptor, but not the thread that compiles."""
        self._depth = 0
        self._end()


def _lock(file: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    os.close(file)
