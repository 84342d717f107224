"""Caches snapshots' layer files on a node's disk, so that a rollback or a new stage needs no network.

    DIRECTORY/TAG/STEP/UNIT.layer    SHA-256 of the rest, then a unit's snapshot file

A file that does not match its SHA-256 counts as absent. A file may belong to a snapshot that was never
completed, after which the run reached the same step with other bits; so the node asks the coordinator whether
its copy is the snapshot's. The tag stands for the config; files of another tag are removed.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

KEPT_STEPS = 2


class LayerFile(NamedTuple):
    """A unit's snapshot file."""

    data: bytes
    sha256: str
    """In hex."""


class SnapshotCache:
    """Holds the newest steps, at most `limit` bytes. All calls block on the disk: use `asyncio.to_thread`."""

    def __init__(self, directory: Path, limit: int, tag: str) -> None:
        self._directory = directory
        self._limit = limit
        self._tag = tag

    def get(self, step: int, unit: str) -> LayerFile | None:
        """The unit's file, or None if it is missing or damaged."""
        path = self._path(step, unit)
        try:
            content = path.read_bytes() if path is not None else b""
        except OSError:
            return None
        digest, data = content[:32], content[32:]
        return LayerFile(data, digest.hex()) if hashlib.sha256(data).digest() == digest else None

    def put(self, step: int, unit: str, data: bytes) -> None:
        """Store a file if there is room. A failing disk is no error: the coordinator has the snapshot."""
        path = self._path(step, unit)
        if path is None:
            return
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._make_room(path, len(data) + 32):
                return
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                Path(partial).replace(path)
            except OSError:
                Path(partial).unlink(missing_ok=True)

    def _make_room(self, path: Path, size: int) -> bool:
        """Remove files of other configs, then older steps, until the file fits."""
        for other in self._directory.iterdir():
            if other.name != self._tag:
                shutil.rmtree(other, ignore_errors=True)
        step = int(path.parent.name)
        names = [entry.name for entry in (self._directory / self._tag).iterdir()]
        steps = sorted(int(name) for name in names if name.isdigit())
        older = [other for other in steps if other < step]
        while older and (len(older) >= KEPT_STEPS or self._size(path) + size > self._limit):
            shutil.rmtree(self._directory / self._tag / str(older.pop(0)), ignore_errors=True)
        return self._size(path) + size <= self._limit

    def _size(self, replaced: Path) -> int:
        """Bytes on disk without the file that will be replaced."""
        files = (path for path in self._directory.rglob("*.layer") if path != replaced)
        return sum(path.stat().st_size for path in files)

    def _path(self, step: int, unit: str) -> Path | None:
        """The file's path; None for a unit whose name is no file name."""
        if not unit.replace(".", "").isalnum() or step < 0:
            return None
        return self._directory / self._tag / str(step) / f"{unit}.layer"
