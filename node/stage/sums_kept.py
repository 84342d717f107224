"""The packed gradient sums of the newest steps on a node's disk, for nodes that follow the run.

A node that will get a stage loads a snapshot and applies the steps that the run commits meanwhile. For each
of them it needs what every replica of the stage has after sync: the packed sum over all groups.
"""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from node.state.manifest import is_unit_name

KeepSums = Callable[[int, str, Sequence[Tensor]], None]
"""Takes (step, unit, the packed sum over all groups of each of the unit's pieces, uint8 on the CPU)."""


class SumsKept:
    """The sums that one node keeps. A failing or full disk is no error: a follower then finds no sums
    here."""

    def __init__(self, directory: Path, limit: int) -> None:
        """
        Args:
            directory: holds only sums. Files of an earlier process are removed.
            limit: the most bytes. The oldest steps are removed first.
        """
        self._directory = directory
        self._limit = limit
        self._sizes: dict[int, int] = {}
        """Bytes by step, the oldest step first."""
        self._writes: dict[tuple[int, str], Future[None]] = {}
        """The writes of the newest step and the one before."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sums")
        shutil.rmtree(directory, ignore_errors=True)

    def keep(self, step: int, unit: str, packed: Sequence[Tensor]) -> None:
        """Keep a unit's packed sum, uint8 on the CPU in parts; as `keep_bytes`."""
        self.keep_bytes(step, unit, b"".join(part.numpy().tobytes() for part in packed))

    def keep_bytes(self, step: int, unit: str, data: bytes) -> None:
        """Keep a unit's packed sum. Returns before it is on disk.

        Waits until earlier steps are on disk, so that memory holds at most one step.
        """
        for at in [at for at in self._writes if at[0] != step]:
            self._writes.pop(at).exception()
        self._writes[step, unit] = self._thread.submit(self._write, step, unit, data)

    def clear(self) -> None:
        """Remove all sums, because no node follows any more. Returns before all are removed."""
        if self._writes:
            self._writes.clear()
            self._thread.submit(self._drop, None)

    def read(self, step: int, unit: str) -> bytes | None:
        """A unit's packed sum, or None. Blocks on the disk. Any member may ask for any name."""
        if not is_unit_name(unit):
            return None
        if (write := self._writes.get((step, unit))) is not None:
            write.exception()
        try:
            return self._path(step, unit).read_bytes()
        except OSError:
            return None

    def close(self) -> None:
        """Remove everything and end the thread."""
        self.clear()
        self._thread.shutdown()

    # ---- on the thread

    def _write(self, step: int, unit: str, data: bytes) -> None:
        before = self._sizes.pop(step, 0)
        self._sizes[step] = before + len(data)
        while sum(self._sizes.values()) > self._limit:
            oldest = next(iter(self._sizes))
            self._drop(oldest)
            if oldest == step:
                return
        path = self._path(step, unit)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # No fsync, because sums that a crash loses are fetched from another replica.
            partial = path.with_suffix(".tmp")
            partial.write_bytes(data)
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _drop(self, step: int | None) -> None:
        """Remove one step, or all."""
        if step is None:
            self._sizes.clear()
            shutil.rmtree(self._directory, ignore_errors=True)
        else:
            del self._sizes[step]
            shutil.rmtree(self._directory / str(step), ignore_errors=True)

    def _path(self, step: int, unit: str) -> Path:
        return self._directory / str(step) / unit
