"""Locks on directories: one coordinator per run, one node process per identity.

A lock is `flock` on a file in the directory. It ends with the process, however the process ends.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wire.errors import UserError
from wire.identity.credentials import default_directory
from wire.identity.files import check_free_or_ours, check_regular_files, make_private_directory

MOST_NODES = 64
"""The most nodes of one run and one user on one machine."""
NODE_FILES = ("node.key", "identity.json")
"""Files of which either shows that a directory is a node's."""


def _lock(directory: Path) -> tuple[int, bool]:
    """The lock file's descriptor, and whether this process now has the lock. Raises OSError."""
    make_private_directory(directory)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    except OSError:
        # Some network file systems do not support locks.
        os.close(descriptor)
        raise
    return descriptor, True


@contextmanager
def run_lock(directory: Path, *, page_only: bool = False) -> Iterator[None]:
    """Lock a run's directory, so that no second coordinator assigns the same steps. Raises UserError.

    Args:
        page_only: whether the run is over and only its page is served. The message to others says so.
    """
    descriptor, ours = _lock(directory)
    try:
        if not ours:
            raise UserError(_holder(directory, os.read(descriptor, 64)))
        os.ftruncate(descriptor, 0)
        if page_only:
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def _holder(directory: Path, written: bytes) -> str:
    """Who holds the run lock. The file has a process id only while a finished run's page is served."""
    if written.isdigit():
        return (
            f"the run in {directory} is over, and process {written.decode()} still serves its page: end that "
            "process first (as `systemctl restart` does), then continue the run"
        )
    return f"another coordinator is running with {directory}: end it first, or give another directory"


class StateDirectory:
    """A node's locked directory."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def release(self) -> None:
        os.close(self._lock)


def claim(run_id: str, wanted: Path | None) -> StateDirectory:
    """Lock `wanted`, or the first free default directory of the run. Raises UserError."""
    if wanted is not None:
        claimed = _try_claim(wanted)
        if claimed is None:
            raise UserError(f"another node is running with {wanted}: give each node its own --state-dir")
        return claimed
    for number in range(1, MOST_NODES + 1):
        name = "node" if number == 1 else f"node-{number}"
        try:
            directory = default_directory(run_id, name)
        except UserError as error:
            raise UserError(f"{error}; or give --state-dir") from None
        if (claimed := _try_claim(directory)) is not None:
            return claimed
    raise UserError(f"{MOST_NODES} nodes of run {run_id} are already running here: give a --state-dir")


def _try_claim(path: Path) -> StateDirectory | None:
    try:
        check_free_or_ours(path, NODE_FILES, "--state-dir")
        check_regular_files(path)
        descriptor, ours = _lock(path)
    except OSError as error:
        raise UserError(
            f"cannot use {path} for this node's key ({error.strerror}): give --state-dir"
        ) from None
    if not ours:
        os.close(descriptor)
        return None
    return StateDirectory(path, descriptor)
