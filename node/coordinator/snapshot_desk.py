"""Where nodes hand in the layers of snapshots that were asked for, and fetch those that are stored."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node import faults
from node.config.schema import RunConfig
from node.coordinator.records import SnapshotRecord
from node.coordinator.store import Store
from node.model.placement import most_layer_bytes
from node.model.units import unit_names
from node.training.manifest import Manifest, UnitEntry
from node.training.snapshot import SnapshotWriter, prune, read_manifest, read_unit, snapshot_directory
from wire.errors import ProtocolViolationError, RunError, ThinwireError


@dataclass(frozen=True, kw_only=True)
class _Upload:
    step: int
    unit: str
    data: bytes
    digest: str
    done: asyncio.Future[None]
    """What its sender waits for, if it still does."""


class SnapshotDesk:
    """One run's. The disk is worked on in threads."""

    def __init__(
        self,
        *,
        config: RunConfig,
        windows: int,
        directory: Path,
        run_id: str,
        store: Store,
        stored: Callable[[Manifest], None],
        failed: Callable[[str], None],
    ) -> None:
        """
        Args:
            windows: samples of one pass over the text.
            directory: where the run keeps its snapshots.
            stored: told of every snapshot that is complete and on record.
            failed: told why the disk or the database refused.
        """
        self._config = config
        self._windows = windows
        self._directory = directory
        self._store = store
        self._writer = SnapshotWriter(directory, config, run_id)
        self._stored = stored
        self._failed = failed
        self._wanted: set[int] = set()
        self._uploads: asyncio.Queue[_Upload] = asyncio.Queue()

    async def run(self) -> None:
        """Store what comes, until cancelled.

        What has come whole is stored, and told of, though its sender be gone meanwhile: it may complete a
        snapshot, which nobody would know of until the same step is uploaded again.
        """
        while True:
            upload = await self._uploads.get()
            try:
                manifest = await asyncio.to_thread(self._store_unit, upload)
            except (ThinwireError, OSError) as error:
                if isinstance(error, RunError):
                    self._failed(str(error))
                if not upload.done.done():
                    upload.done.set_exception(error)
                continue
            if manifest is not None:
                self._stored(manifest)
            if not upload.done.done():
                upload.done.set_result(None)

    async def expect(self, step: int) -> None:
        """Nodes are about to upload the state of `step`, all of it: what came of an earlier attempt goes."""
        await asyncio.to_thread(self._writer.discard, step)
        self._wanted.add(step)

    def path(self, step: int) -> Path:
        """The directory of a snapshot."""
        return snapshot_directory(self._directory, step)

    async def layer_entry(self, step: int, unit: str) -> UnitEntry:
        """What the manifest of a complete snapshot says of a unit's file."""
        self._check_unit(unit)
        manifest = await asyncio.to_thread(read_manifest, self.path(step))
        return manifest.entry(unit)

    async def layer(self, step: int, unit: str) -> bytes:
        """A unit's file of a complete snapshot."""
        self._check_unit(unit)
        faults.reach_coordinator(faults.Phase.STATE_FETCH, step=step)
        return await asyncio.to_thread(read_unit, self.path(step), unit)

    def upload_limit(self, step: int, unit: str) -> int:
        """The most bytes that this upload may have; raises ProtocolViolationError if it is not wanted."""
        self._check_unit(unit)
        if step not in self._wanted:
            raise ProtocolViolationError(f"nobody asked for a snapshot of step {step}")
        return most_layer_bytes(self._config, unit, self._windows)

    async def put(self, step: int, unit: str, data: bytes, digest: str) -> None:
        """Hand a unit's file to `run`, and wait until it is stored.

        Raises RunError when the disk or the database refuses, ProtocolViolationError for what is not that
        unit.
        """
        faults.reach_coordinator(faults.Phase.SNAPSHOT, step=step)
        done = asyncio.get_running_loop().create_future()
        self._uploads.put_nowait(_Upload(step=step, unit=unit, data=data, digest=digest, done=done))
        await done

    def _store_unit(self, upload: _Upload) -> Manifest | None:
        """The manifest, which is on record, if this unit completes its snapshot."""
        manifest = self._writer.put(upload.step, upload.unit, upload.data, upload.digest)
        if manifest is not None:
            self._record(manifest)
        return manifest

    def _record(self, manifest: Manifest) -> None:
        self._store.record_snapshot(
            SnapshotRecord(
                step=manifest.step,
                manifest_sha256=hashlib.sha256(manifest.to_json().encode()).hexdigest(),
                bytes=manifest.total_bytes,
                complete=True,
                created=time.time(),
            )
        )
        for step in prune(self._directory, self._config.run.keep_snapshots):
            self._store.delete_snapshot(step)

    def _check_unit(self, unit: str) -> None:
        if unit not in unit_names(self._config.model):
            raise ProtocolViolationError(f"this model has no layer unit {unit[:40]!r}")
