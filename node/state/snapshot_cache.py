"""Stores layer files of snapshots on a node's disk, for rollbacks, for a new stage, and as the run's copies.

    DIRECTORY/STEP/UNIT.layer    SHA-256 of the rest, then a unit's snapshot file
    DIRECTORY/run.json           what `thinwire recover` needs

Each file is written under a temporary name, synced and renamed. A file that does not match its SHA-256 is
removed and counts as missing. A file may belong to a snapshot that was never completed, after which the run
reached the same step with other bits. So a node asks the coordinator whether its copy is valid.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from node.state.manifest import RECORD_FILE, LayerFile, StoredLayer, is_unit_name
from node.state.snapshot import NewFile
from wire.errors import RunError
from wire.identity.files import sync_directory

KEPT_STEPS = 2
"""How many steps to keep besides those that the coordinator has requested."""
NO_ROOM = "this node's disk space is used up: free some, or join with a larger --max-disk"
FULL = (errno.ENOSPC, errno.EDQUOT)
_SUM = 32


class NoRoomError(RunError):
    """There is no space for a file: the disk is full, or what the owner allows is used up."""


class LayerName(NamedTuple):
    """A file's step and unit, with its size and SHA-256, which are unchecked."""

    step: int
    unit: str
    bytes: int
    sha256: str


class SnapshotCache:
    """Stores the layer files of the newest steps, in at most `limit` bytes. Implements
    `node.state.manifest.SnapshotStore`."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._kept: frozenset[int] = frozenset()
        """The steps of complete snapshots, of which the newest are removed only by `hold`."""
        self._making_room = Lock()
        self._coming: dict[Path, int] = {}
        """The files that are being written, with their sizes."""

    def get(self, step: int, unit: str, size: int = sys.maxsize) -> LayerFile | None:
        """See `SnapshotStore.get`. Removes a damaged file."""
        path = self._path(step, unit)
        if path is None:
            return None
        try:
            with path.open("rb", buffering=0) as file:
                digest, data = file.read(_SUM), file.readall()
        except OSError:
            return None
        if hashlib.sha256(data).digest() == digest:
            return LayerFile(data[:size], digest.hex())
        path.unlink(missing_ok=True)
        return None

    def put(self, step: int, unit: str, data: bytes, *, sha256: str = "", durable: bool = True) -> None:
        """See `SnapshotStore.put`. `sha256` is the data's hash, if known. If not `durable`, the file may be
        damaged if the machine stops suddenly."""
        with self.writing(step, unit, len(data)) as file:
            file.write(data)
            file.keep(sha256 or hashlib.sha256(data).hexdigest(), durable=durable).close()

    @contextlib.contextmanager
    def writing(self, step: int, unit: str, size: int) -> Iterator["LayerWriter"]:
        """Write a file of `size` bytes in pieces. It is deleted unless it is kept. Several files may be
        written at a time. Raises NoRoomError if the disk is full, or RunError."""
        path = self._path(step, unit)
        if path is None:
            raise RunError(f"{unit[:40]!r} is not a layer unit")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._making_room:
                if not self._make_room(path, size + _SUM):
                    raise NoRoomError(NO_ROOM)
                self._coming[path] = size + _SUM
            # A full disk must be detected now, not when half of a state has been received.
            with contextlib.closing(NewFile(path.parent, path, size + _SUM)) as file:
                yield LayerWriter(file, path)
        except OSError as error:
            wrong = NoRoomError if error.errno in FULL else RunError
            raise wrong(f"{path} cannot be written ({error.strerror}): free some space") from error
        finally:
            self._coming.pop(path, None)

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes fit in addition to the existing files."""
        return sum(path.stat().st_size for path in self._files()) + size <= self._limit

    def drop(self, step: int, unit: str) -> None:
        """Remove a file that belongs to no snapshot."""
        if (path := self._path(step, unit)) is not None:
            path.unlink(missing_ok=True)

    def steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self._steps())

    def remove(self, step: int) -> None:
        shutil.rmtree(self._directory / str(step), ignore_errors=True)

    def record(self) -> bytes:
        """The record that `hold` stored last. Raises OSError."""
        return (self._directory / RECORD_FILE).read_bytes()

    def hold(self, steps: Collection[int], record: str = "") -> None:
        """See `SnapshotStore.hold`. A disk failure is ignored, because other nodes have copies."""
        self._kept = frozenset(steps)
        newest = max(steps, default=0)
        for step in self.steps():
            if step < newest and step not in self._kept:
                self.remove(step)
        if record:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                path, data = self._directory / RECORD_FILE, record.encode()
                with contextlib.closing(NewFile(self._directory, path, len(data))) as file:
                    file.write(data)
                    os.fsync(file.handle)
                    file.path.replace(path)
                    sync_directory(self._directory)
            except OSError:
                return

    def names(self) -> list[LayerName]:
        """All files, the newest step first. Their contents are not checked."""
        layers = []
        for step, directory in reversed(self._steps()):
            for path in sorted(directory.glob("*.layer")):
                try:
                    with path.open("rb") as file:
                        digest = file.read(_SUM)
                    size = path.stat().st_size - _SUM
                except OSError:
                    continue
                if size >= 0:
                    layers.append(LayerName(step, path.stem, size, digest.hex()))
        return layers

    def _make_room(self, path: Path, size: int) -> bool:
        """Remove foreign folders, then older steps that are not needed, until the file fits."""
        for other in self._directory.iterdir():
            if other.is_dir() and not other.name.isdigit():
                shutil.rmtree(other, ignore_errors=True)
        step = int(path.parent.name)
        older = [other for other in self.steps() if other < step]
        free = [other for other in older if other not in self._kept]
        # The newest complete snapshot stays, whatever the limit.
        last = [other for other in older if other in self._kept and other != max(self._kept)]
        while free and len(free) >= KEPT_STEPS:
            self.remove(free.pop(0))
        given_up = [*free, *last]
        while given_up and self._size(path) + size > self._limit:
            self.remove(given_up.pop(0))
        return self._size(path) + size <= self._limit

    def _steps(self) -> list[tuple[int, Path]]:
        if not self._directory.is_dir():
            return []
        directories = (path for path in self._directory.iterdir() if path.is_dir() and path.name.isdigit())
        return sorted((int(path.name), path) for path in directories)

    def _size(self, replaced: Path) -> int:
        """The bytes on disk or being written, without the file that will be replaced."""
        coming = dict(self._coming)
        sizes = {path: path.stat().st_size for path in self._files()} | coming
        return sum(size for path, size in sizes.items() if path != replaced)

    def _files(self) -> Iterator[Path]:
        for _, directory in self._steps():
            yield from directory.glob("*.layer")

    def _path(self, step: int, unit: str) -> Path | None:
        """The file's path; None for a unit whose name is not a file name."""
        if not is_unit_name(unit) or step < 0:
            return None
        return self._directory / str(step) / f"{unit}.layer"


class LayerWriter:
    """Writes a layer's file. Methods raise OSError."""

    def __init__(self, file: NewFile, path: Path) -> None:
        """`path` is where the complete file is kept."""
        self._file, self._path = file, path
        self._size = -_SUM
        self.write(bytes(_SUM))

    def write(self, piece: bytes | memoryview) -> None:
        self._file.write(piece)
        self._size += len(piece)

    def keep(self, sha256: str, *, durable: bool = True) -> StoredLayer:
        """Move the complete file, which has this SHA-256, to its final path."""
        handle = self._file.handle
        os.ftruncate(handle, _SUM + self._size)
        os.pwrite(handle, bytes.fromhex(sha256), 0)
        if durable:
            os.fsync(handle)
        self._file.path.replace(self._path)
        if durable:
            sync_directory(self._path.parent)
        return StoredLayer(os.dup(handle), self._size, sha256, start=_SUM)
