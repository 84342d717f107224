"""Which directory a node process keeps its key and certificate in.

One process an identity: a second node on the same machine must be somebody else. So a process locks its
directory, and one that names none takes the first that is free.
"""

import fcntl
import os
from pathlib import Path

from wire.errors import UserError
from wire.identity.credentials import default_directory
from wire.identity.files import check_free_or_ours, make_private_directory

MOST_NODES = 64
OURS = ("node.key", "identity.json")
"""Either shows that a directory is a node's."""


class StateDirectory:
    """A locked directory. The lock ends with the process, however it ends."""

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
            raise UserError(f"another node is running with {wanted}: give each a --state-dir of its own")
        return claimed
    for number in range(1, MOST_NODES + 1):
        name = "node" if number == 1 else f"node-{number}"
        try:
            directory = default_directory(run_id, name)
        except RuntimeError:
            raise UserError("this user has no home directory: set HOME, or give --state-dir") from None
        if (claimed := _try_claim(directory)) is not None:
            return claimed
    raise UserError(f"{MOST_NODES} nodes of run {run_id} are running here already: give a --state-dir")


def _try_claim(path: Path) -> StateDirectory | None:
    try:
        check_free_or_ours(path, OURS, "--state-dir")
        make_private_directory(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError as error:
        # Some network file systems have no locks.
        os.close(lock)
        raise _unusable(path, error) from None
    return StateDirectory(path, lock)


def _unusable(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot use {path} for this node's key ({error.strerror}): give --state-dir")
