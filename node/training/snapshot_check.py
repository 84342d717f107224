"""Which snapshot a run goes on from: the newest whose files are all what its manifest says. Torch-free.

It reads whole snapshots, which may be large: call it from a thread, or before anything is served.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from node.telemetry.format import bytes_text
from node.training.manifest import DAMAGED_NAME, SnapshotDamagedError
from node.training.snapshot import (
    damaged,
    list_snapshots,
    read_manifest,
    reading,
    set_aside,
    snapshot_directory,
)

MOMENT_SECONDS = 2.0
"""After so long a check says what it is at."""
_CHUNK_BYTES = 1 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a look at a run's snapshots found."""

    whole: int
    """The step of the newest whole one; 0 if none is."""
    damaged: tuple[tuple[int, str], ...]
    """Step of each newer one, newest first, and what is wrong with it."""

    def news(self) -> str:
        """A line on those that were set aside."""
        found = "; ".join(what for _, what in self.damaged)
        steps = ", ".join(str(step) for step, _ in self.damaged)
        which = f"the snapshot of step {steps} is" if len(self.damaged) == 1 else f"the snapshots {steps} are"
        aside = f"{which} set aside (as {DAMAGED_NAME})"
        return f"{found}: {aside}, and the newest that is whole is that of step {self.whole}"


def set_damaged_aside(root: Path, tell: Tell = lambda _: None) -> Checked:
    """Find the newest whole snapshot of a run and set those aside that are newer.

    If none is whole they all stay: without any, the run would begin anew as if it had never been.

    Args:
        tell: hears what is being checked, if that takes longer than a moment.

    Raises:
        RunError: a file may not be read or renamed, or another version wrote it.
    """
    found: list[tuple[int, str]] = []
    for step in reversed(list_snapshots(root)):
        try:
            check_snapshot(snapshot_directory(root, step), tell)
        except SnapshotDamagedError as error:
            found.append((step, error.what))
            continue
        for other, _ in found:
            set_aside(snapshot_directory(root, other))
        return Checked(whole=step, damaged=tuple(found))
    return Checked(whole=0, damaged=tuple(found))


def check_snapshot(directory: Path, tell: Tell = lambda _: None) -> None:
    """Compare every file of a complete snapshot with its manifest.

    Raises:
        SnapshotDamagedError: at the first that is missing, unreadable or another.
        RunError: a file may not be read, or another version wrote it.
    """
    manifest = read_manifest(directory)
    began, told = time.monotonic(), False
    for entry in manifest.units:
        path, digest, size = directory / entry.file, sha256(), 0
        with reading(path), path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if not told and time.monotonic() - began > MOMENT_SECONDS:
                    tell(f"checking the snapshot of step {manifest.step}: {bytes_text(manifest.total_bytes)}")
                    told = True
        if size != entry.bytes or digest.hexdigest() != entry.sha256:
            raise damaged(path)
