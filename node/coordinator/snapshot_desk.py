"""Where nodes hand in the layers of snapshots that were asked for, and fetch those that are stored."""

import asyncio
import hashlib
import time
from pathlib import Path

from node import faults
from node.config.schema import RunConfig
from node.coordinator.records import SnapshotRecord
from node.coordinator.store import Store
from node.model.placement import boundary_cache_bytes
from node.model.units import most_state_bytes, unit_names
from node.training.manifest import Manifest
from node.training.snapshot import SnapshotWriter, prune, read_unit, snapshot_directory
from wire.errors import ProtocolViolationError


class SnapshotDesk:
    """One run's. The disk is worked on in threads."""

    def __init__(
        self, *, config: RunConfig, windows: int, directory: Path, run_id: str, store: Store
    ) -> None:
        """
        Args:
            windows: samples of one pass over the text.
            directory: where the run keeps its snapshots.
        """
        self._config = config
        self._windows = windows
        self._directory = directory
        self._store = store
        self._writer = SnapshotWriter(directory, config, run_id)
        self._wanted: set[int] = set()

    def expect(self, step: int) -> None:
        """Nodes are about to upload the state of `step`."""
        self._wanted.add(step)

    def path(self, step: int) -> Path:
        """The directory of a snapshot."""
        return snapshot_directory(self._directory, step)

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
        return most_state_bytes(self._config.model, unit) + boundary_cache_bytes(self._config, self._windows)

    async def put(self, step: int, unit: str, data: bytes, digest: str) -> Manifest | None:
        """Store a unit's file. The one that completes its snapshot gives the manifest, which is on record.

        Raises RunError when the disk or the database refuses.
        """
        faults.reach_coordinator(faults.Phase.SNAPSHOT, step=step)
        manifest = await asyncio.to_thread(self._writer.put, step, unit, data, digest)
        if manifest is not None:
            await asyncio.to_thread(self._record, manifest)
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
