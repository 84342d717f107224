"""One process of a machine compiles at a time, so that the others find what it has kept.

Nodes that start together need the same loops at the same time. Compiling all of them takes a core half a
minute; if every process did that for itself, five on two cores would keep the run's first step waiting for
minutes. The turn is a lock on a file beside numba's cache, which the kernel frees when its holder ends.
"""

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from typing import Self

WAIT_SECONDS = 60.0
"""A process that waits longer compiles beside the others: the one whose turn it is may have been stopped."""


class CompileTurn:
    """Of one process, whose threads must call all of this under numba's compiler lock.

    As a context manager it is entered for each function that may have to be compiled, also from within
    another one; the turn that was taken meanwhile ends with the outermost.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file to lock; it stays."""
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
        """Wait until no other process has the turn; at once if this one has it. Never fails: where files
        cannot be locked, all compile at once."""
        if self._file is not None or self._depth == 0:
            return
        # A process that ends starts no thread any more.
        with contextlib.suppress(OSError, RuntimeError):
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            # A lock has no limit of time, so that a thread waits for it, with a descriptor of its own. Both
            # are of one open file: the lock is gone when both are closed.
            waiting = threading.Thread(target=_lock, args=(os.dup(self._file),), daemon=True)
            waiting.start()
            waiting.join(WAIT_SECONDS)

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _forget(self) -> None:
        """A forked child has its parent's descriptor, and not the thread that compiles."""
        self._depth = 0
        self._end()


def _lock(file: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    os.close(file)
