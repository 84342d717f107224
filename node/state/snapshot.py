"""Writes and checks snapshots on disk: one safetensors file per layer unit, and a manifest. Torch-free.

    SNAPSHOTS/step-00000100/embed.safetensors
                            block.0000.safetensors ...
                            head.safetensors
                            manifest.json             written last: a snapshot without one is incomplete
                            manifest.json.damaged     its name after a file was found damaged

Each file is written under a temporary name, synced and renamed. These functions read, hash or write whole
files, so call them from a thread, never on the event loop.
"""

import errno
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from io import BufferedReader, FileIO
from pathlib import Path
from threading import Lock

from node.config.schema import RunConfig
from node.model.units import unit_names
from node.state.manifest import (
    DAMAGED_NAME,
    MANIFEST_NAME,
    LayerBytes,
    LayerFile,
    Manifest,
    SnapshotDamagedError,
    StoredLayer,
    UnitEntry,
    pread,
    unit_file,
)
from node.state.unit_state import checked_digest, has_weights_alone
from node.telemetry import points
from node.telemetry.format import bytes_text
from node.training.loss_scale import ScaleOf, no_scale
from wire.descriptors import EXHAUSTED, when_there_are_some
from wire.errors import DiskFullError, ProtocolViolationError, RunError
from wire.identity.files import sync_directory
from wire.messages import UnitHash

WEIGHTS_FOLDER = "weights"
"""The folder, beside `snapshots`, that has the last snapshot's weights until that snapshot is complete."""
MOMENT_SECONDS = 2.0
"""A check that takes longer reports its progress."""
_CHUNK_BYTES = 1 << 20

Tell = Callable[[str], None]
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")


def snapshot_directory(root: Path, step: int) -> Path:
    """The folder of the snapshot taken after `step` optimizer steps."""
    return root / f"step-{step:08d}"


def list_snapshots(root: Path) -> tuple[int, ...]:
    """The steps of complete snapshots, oldest first."""
    return tuple(step for step, directory in _step_directories(root) if is_complete(directory))


def list_models(run_directory: Path) -> dict[int, Path]:
    """The folders with complete weights, by step, oldest first: complete snapshots, and the last step's
    weights if they arrived before its snapshot."""
    roots = run_directory / WEIGHTS_FOLDER, run_directory / "snapshots"
    folders = {step: snapshot_directory(root, step) for root in roots for step in list_snapshots(root)}
    return dict(sorted(folders.items()))


def is_complete(directory: Path) -> bool:
    """Whether a snapshot is complete. A removal deletes the manifest first."""
    return (directory / MANIFEST_NAME).is_file()


def held_by_nodes(run_directory: Path) -> str:
    """Advice on fetching a snapshot that is not at the coordinator; empty if nodes hold none."""
    kept = sorted((run_directory / "kept").glob("step-*.json"))
    held = [path for path in kept if not path.with_suffix(".url").is_file()]
    if not held:
        return ""
    step = int(held[-1].stem.partition("-")[2])
    return (
        f"; the run's nodes hold the snapshot of step {step}: stop the run and continue with `thinwire "
        f"resume {shlex.quote(str(run_directory))} snapshots.keep=coordinator`, which stores the next one "
        "here"
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete snapshot.

    Raises:
        SnapshotDamagedError: it is cut short, is for another step than its folder, or the disk has lost it.
        RunError: there is none, or it has another format.
    """
    try:
        text = when_there_are_some((directory / MANIFEST_NAME).read_bytes)
    except OSError as error:
        if error.errno == errno.EIO:
            raise SnapshotDamagedError(
                f"cannot read the manifest of {directory} ({error.strerror})"
            ) from error
        raise RunError(f"no complete snapshot in {directory} ({error.strerror}); use an older one") from error
    manifest = Manifest.from_json(text, str(directory))
    if directory.name.startswith("step-") and directory != snapshot_directory(
        directory.parent, manifest.step
    ):
        raise SnapshotDamagedError(f"{directory} contains the snapshot of step {manifest.step}")
    return manifest


def read_unit(directory: Path, unit: str) -> bytes:
    """A unit's file from a complete snapshot, after checking its SHA-256.

    Raises:
        SnapshotDamagedError: the file is missing or unreadable, or does not match the manifest.
        RunError: there is no such unit or complete snapshot, or this user may not read it.
    """
    entry = read_manifest(directory).entry(unit)
    path = directory / entry.file
    with reading(path):
        if path.stat().st_size != entry.bytes:  # a pipe's is 0, and reading it may never end
            raise damaged(path)
        data = when_there_are_some(path.read_bytes)
    if sha256(data).hexdigest() != entry.sha256:
        raise damaged(path)
    return data


def open_unit(directory: Path, unit: str) -> StoredLayer:
    """As `read_unit`, but the file is open and not in memory."""
    entry = read_manifest(directory).entry(unit)
    return open_layer(directory / entry.file, entry)


def open_layer(path: Path, entry: UnitEntry) -> StoredLayer:
    """The open file of a manifest's entry. Raises the errors of `read_unit`."""
    with reading(path):
        if path.stat().st_size != entry.bytes:  # a pipe's is 0, and reading it may never end
            raise damaged(path)
        with _opened(path) as file:
            if file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise damaged(path)
            return StoredLayer(os.dup(file.fileno()), entry.bytes, entry.sha256)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a unit's file to those of `read_unit`."""
    try:
        yield
    except PermissionError as error:
        raise RunError(f"cannot read {path} ({error.strerror}); make it readable for this user") from error
    except OSError as error:
        if error.errno in EXHAUSTED:
            raise RunError(f"cannot read {path} ({error.strerror}); raise this process's limits") from error
        raise SnapshotDamagedError(f"cannot read {path} ({error.strerror})") from error


def damaged(path: Path) -> SnapshotDamagedError:
    """The error for a unit's file that differs from its manifest."""
    return SnapshotDamagedError(f"{path} is damaged: its SHA-256 differs from the manifest's")


def set_aside(directory: Path) -> None:
    """Rename a damaged snapshot's manifest, so that it no longer counts. Its files stay until pruned.

    Raises:
        RunError: the manifest cannot be renamed.
    """
    manifest = directory / MANIFEST_NAME
    try:
        manifest.rename(directory / DAMAGED_NAME)
        sync_directory(directory)
    except OSError as error:
        raise RunError(f"cannot rename {manifest} ({error.strerror}); check its permissions") from error


def discard_incomplete(root: Path, below: int | None = None) -> tuple[int, ...]:
    """Remove incomplete snapshots, only those of steps before `below` if given. Returns their steps."""
    complete = set(list_snapshots(root))
    removed = []
    for step, directory in _step_directories(root):
        if below is not None and step >= below:
            break
        if step in complete or _is_aside(directory):
            for leftover in directory.glob(".*.tmp"):
                _remove(leftover)
        else:
            _remove(directory)
            removed.append(step)
    return tuple(removed)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of checking a run's snapshots."""

    whole: int
    """The step of the newest undamaged snapshot; 0 if there is none."""
    damaged: tuple[tuple[int, str], ...]
    """The step and the damage of each newer snapshot, newest first."""

    def news(self) -> str:
        """A line about the snapshots that were set aside."""
        damage = "; ".join(text for _, text in self.damaged)
        steps = ", ".join(str(step) for step, _ in self.damaged)
        which = f"the snapshot of step {steps} is" if len(self.damaged) == 1 else f"the snapshots {steps} are"
        aside = f"{which} set aside (as {DAMAGED_NAME})"
        return f"{damage}: {aside}, and the newest intact one is that of step {self.whole}"


def set_damaged_aside(root: Path, tell: Tell = lambda _: None) -> Checked:
    """Find the newest undamaged snapshot of a run and set newer ones aside.

    If all are damaged, none is set aside, because without a snapshot the run would start from the beginning.

    Args:
        tell: called with a line about the check if it takes long.

    Raises:
        RunError: a file may not be read or renamed, or another version wrote it.
    """
    damage: list[tuple[int, str]] = []
    for step in reversed(list_snapshots(root)):
        try:
            check_snapshot(snapshot_directory(root, step), tell)
        except SnapshotDamagedError as error:
            damage.append((step, error.what))
            continue
        for other, _ in damage:
            set_aside(snapshot_directory(root, other))
        return Checked(whole=step, damaged=tuple(damage))
    return Checked(whole=0, damaged=tuple(damage))


def check_snapshot(directory: Path, tell: Tell = lambda _: None) -> None:
    """Compare every file of a complete snapshot with its manifest.

    Raises:
        SnapshotDamagedError: for the first file that is missing, unreadable or different.
        RunError: a file may not be read, or another version wrote it.
    """
    manifest = read_manifest(directory)
    began, told = time.monotonic(), False
    for entry in manifest.units:
        path, digest, size = directory / entry.file, sha256(), 0
        with reading(path), _opened(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if not told and time.monotonic() - began > MOMENT_SECONDS:
                    tell(f"checking the snapshot of step {manifest.step}: {bytes_text(manifest.total_bytes)}")
                    told = True
        if size != entry.bytes or digest.hexdigest() != entry.sha256:
            raise damaged(path)


def _opened(path: Path) -> BufferedReader:
    return when_there_are_some(lambda: path.open("rb"))


class SnapshotFolder:
    """The coordinator's store: collects the units of snapshots as stages upload them. The last unit completes
    a snapshot. Implements `node.state.manifest.SnapshotStore`.

    Units may arrive in any order, on several threads, and for several steps at once. Call `discard` before a
    step is uploaded again, so that no snapshot mixes units of two attempts.
    """

    def __init__(
        self, root: Path, config: RunConfig, run_id: str, windows: int = 1, scale_of: ScaleOf = no_scale
    ) -> None:
        """
        Args:
            windows: the number of samples in one pass over the text.
            scale_of: returns the loss scale after a step.
        """
        self._root = root
        self._scale_of = scale_of
        self._run = config
        self._windows = windows
        self._run_id = run_id
        self._units = unit_names(config.model)
        self._entries: dict[int, dict[str, UnitEntry]] = {}
        self._lock = Lock()
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Remove the files of `arriving` that were not placed. Raises RunError."""
        for leftover in self._root.glob(".*.tmp"):
            _remove(leftover)

    def get(self, step: int, unit: str, size: int) -> LayerFile:
        """See `SnapshotStore.get`. Raises the errors of `read_unit`."""
        return LayerFile.of(read_unit(snapshot_directory(self._root, step), unit)[:size])

    def steps(self) -> tuple[int, ...]:
        return list_snapshots(self._root)

    def remove(self, step: int) -> None:
        with self._lock:
            self._remove(step)

    def hold(self, steps: Collection[int], record: str = "") -> None:
        """See `SnapshotStore.hold`. Also removes incomplete snapshots older than the newest of `steps`, and
        damaged ones older than all of them. Ignores `record`, as the database is in the same directory."""
        newest, oldest = max(steps, default=0), min(steps, default=0)
        with self._lock:
            for step, directory in _step_directories(self._root):
                if step not in steps and step < (oldest if _is_aside(directory) else newest):
                    self._remove(step)
            discard_incomplete(self._root, below=newest)

    def _remove(self, step: int) -> None:
        directory = snapshot_directory(self._root, step)
        self._entries.pop(step, None)
        # The manifest first, so that an interrupted removal leaves an incomplete snapshot, not a damaged one.
        for path in (directory / MANIFEST_NAME, directory):
            if path.exists():
                _remove(path)

    def put(self, step: int, unit: str, data: bytes) -> Manifest | None:
        """Store one unit. A repeated upload replaces the earlier one.

        Args:
            step: the number of optimizer steps taken.
            data: the result of `serialize_unit`.

        Returns:
            The manifest, if all units of the step are stored; else None.

        Raises:
            ProtocolViolationError: a run cannot resume from the unit. Nothing is stored.
            RunError: the disk is full or cannot be written. No partial file is left.
        """
        entry, _ = self.check(step, unit, LayerFile(data, ""))
        with closing(self.arriving(step, unit, len(data))) as file:
            file.take(data)
            file.sync()
            return self.place(step, entry, file.path)

    def arriving(self, step: int, unit: str, size: int) -> "NewFile":
        """A file for a unit of `size` bytes, which the disk has room for. `sync` it before `place`.

        It is in no snapshot's folder, so that one may be removed meanwhile. Raises RunError as `put` does.
        """
        path = snapshot_directory(self._root, step) / unit_file(unit)
        with write_errors(path, size):
            return when_there_are_some(lambda: _new_file(self._root, path, size, step))

    def place(self, step: int, entry: UnitEntry, written: Path) -> Manifest | None:
        """Move a unit's file, written and synced, into the snapshot of `step`. Returns and raises what `put`
        does."""
        directory = snapshot_directory(self._root, step)
        with self._lock:
            if (directory / MANIFEST_NAME).exists():
                manifest = read_manifest(directory)
                if manifest.entry(entry.unit) == entry:
                    return manifest
                raise ProtocolViolationError(
                    f"upload of unit {entry.unit} differs from the complete snapshot in {directory}; refused"
                )
            with write_errors(directory / entry.file, entry.bytes):
                when_there_are_some(lambda: _move(written, directory / entry.file, step))
            entries = self._entries.setdefault(step, {})
            entries[entry.unit] = entry
            if len(entries) < len(self._units):
                return None
            units = [entries[unit] for unit in self._units]
            manifest = Manifest.of(self._run_id, step, self._run, units, self._scale_of(step))
            _write(directory / MANIFEST_NAME, manifest.to_json().encode(), step)
            # If this snapshot was damaged, all its files have been written again.
            (directory / DAMAGED_NAME).unlink(missing_ok=True)
            del self._entries[step]
            return manifest

    def discard(self, step: int, *, remove: bool = False) -> None:
        """Forget the units of a step whose snapshot is incomplete. With `remove`, delete their files too.

        Raises:
            RunError: the files cannot be removed.
        """
        with self._lock:
            self._entries.pop(step, None)
            directory = snapshot_directory(self._root, step)
            if remove and directory.is_dir() and not is_complete(directory) and not _is_aside(directory):
                _remove(directory)

    def missing(self, step: int) -> tuple[str, ...]:
        """The units of a step's snapshot that have not arrived yet, in model order."""
        with self._lock:
            return tuple(unit for unit in self._units if unit not in self._entries.get(step, {}))

    def check(self, step: int, unit: str, file: LayerBytes) -> tuple[UnitEntry, UnitHash]:
        """The manifest's entry for a unit's file, and its hash. Thread-safe.

        Raises ProtocolViolationError if a run cannot resume from the unit.
        """
        if unit not in self._units:
            raise ProtocolViolationError(f"upload of unit {unit!r}, which this model does not have; refused")
        alone = has_weights_alone(self._run, step)
        try:
            digest = checked_digest(self._run, self._windows, unit, file, weights_alone=alone)
        except RunError as error:
            raise ProtocolViolationError(
                f"upload of unit {unit} does not fit this model ({error}); refused"
            ) from error
        entry = UnitEntry(
            unit=unit,
            file=unit_file(unit),
            bytes=digest.bytes,
            sha256=digest.hash.sha256,
            weights_sha256=digest.weights_sha256,
        )
        return entry, digest.hash


class NewFile:
    """A file that is written in parts, under a temporary name. Its methods block."""

    def __init__(self, directory: Path, path: Path, size: int) -> None:
        """Reserves `size` bytes in `directory`. `path` is the name that it will have. Raises OSError."""
        self._final, self.size = path, size
        self._file: FileIO | None = None
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{path.name}.", suffix=".tmp")
        self.path, self._file = Path(temporary), FileIO(handle, "r+b")
        try:
            _reserve(handle, directory, size)
        except OSError:
            self.close()
            raise

    def take(self, data: bytes | memoryview) -> None:
        """Append the next part. Raises RunError."""
        with write_errors(self._final, self.size):
            self.write(data)

    def write(self, data: bytes | memoryview) -> None:
        """As `take`, but raises OSError."""
        left = memoryview(data)
        while left:
            left = left[self._open.write(left) :]

    def read(self, offset: int, size: int) -> bytes:
        """As `LayerBytes.read`, but raises OSError."""
        return pread(self.handle, offset, size)

    def sync(self) -> None:
        """Make what was written durable. Raises RunError."""
        with write_errors(self._final, self.size):
            os.fsync(self.handle)

    def close(self) -> None:
        """Close the file, and remove it unless it has its final name."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self.path.unlink(missing_ok=True)

    __del__ = close

    @property
    def handle(self) -> int:
        """The descriptor of the open file."""
        return self._open.fileno()

    @property
    def _open(self) -> FileIO:
        assert self._file is not None, "the file is open"
        return self._file


def _new_file(directory: Path, path: Path, size: int, step: int) -> NewFile:
    """A file of the snapshot of `step`. Raises OSError."""
    points.reach(points.Phase.SNAPSHOT, at=points.At.WRITE, step=step)
    return NewFile(directory, path, size)


def _reserve(handle: int, directory: Path, size: int) -> None:
    """Give a new file its size, on a disk with room for it. Raises OSError."""
    try:
        return os.posix_fallocate(handle, 0, size)
    except AttributeError:  # macOS has no such call
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    if size > shutil.disk_usage(directory).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(handle, size)


def _step_directories(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    entries = when_there_are_some(lambda: list(root.iterdir()))
    matches = ((_STEP_DIRECTORY.fullmatch(path.name), path) for path in entries if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def _is_aside(directory: Path) -> bool:
    return (directory / DAMAGED_NAME).exists() and not (directory / MANIFEST_NAME).exists()


def _remove(path: Path) -> None:
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot remove {path} ({error.strerror}); check its permissions") from error


def _write(path: Path, data: bytes, step: int) -> None:
    """Write `data` to `path` atomically and durably. Creates the directory if needed."""
    with write_errors(path, len(data)):
        when_there_are_some(lambda: _write_file(path, data, step))


def _write_file(path: Path, data: bytes, step: int) -> None:
    with closing(_new_file(path.parent, path, len(data), step)) as file:
        file.take(data)
        file.sync()
        _move(file.path, path, step)


def _move(temporary: Path, path: Path, step: int) -> None:
    """Give a synced file its name. Creates the directory if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    points.reach(points.Phase.SNAPSHOT, at=points.At.RENAME, step=step)
    temporary.replace(path)
    # Sync the rename, and the directory itself in case it is new.
    sync_directory(path.parent)
    sync_directory(path.parent.parent)


@contextmanager
def write_errors(path: Path, size: int) -> Iterator[None]:
    """Convert OSError to DiskFullError or another RunError while a file of `size` bytes is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                f"disk full: {path.name} needs {size} bytes in {path.parent}; free some space"
            ) from error
        raise RunError(
            f"cannot write {path} ({error.strerror}); check that the run directory can be written"
        ) from error
