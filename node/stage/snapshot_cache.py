"""Layer files of snapshots on a node's own disk, so that a rollback or a new stage needs no network.

Files are named by step and unit and carry their SHA-256 in front; one that does not fit it counts as absent.
A snapshot's bytes are a function of its step, so files never go stale, only old.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

KEPT_STEPS = 2


class SnapshotCache:
    """Holds the newest steps, at most `limit` bytes. All calls block on the disk: use `asyncio.to_thread`."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    def get(self, step: int, unit: str) -> bytes | None:
        """The unit's file, or None if it is not here whole."""
        try:
            content = self._path(step, unit).read_bytes()
        except OSError:
            return None
        digest, data = content[:32], content[32:]
        return data if hashlib.sha256(data).digest() == digest else None

    def put(self, step: int, unit: str, data: bytes) -> None:
        """Keep a file if there is room. A disk that refuses is no error: the coordinator has the snapshot."""
        path = self._path(step, unit)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._forget_old(step)
            if self._size() + len(data) > self._limit:
                return
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                Path(partial).replace(path)
            except OSError:
                Path(partial).unlink(missing_ok=True)

    def _forget_old(self, newest: int) -> None:
        steps = sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())
        for step in [step for step in steps if step <= newest][:-KEPT_STEPS]:
            shutil.rmtree(self._directory / str(step), ignore_errors=True)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._directory.rglob("*.layer"))

    def _path(self, step: int, unit: str) -> Path:
        return self._directory / str(step) / f"{unit}.layer"
