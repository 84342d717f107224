"""Receives the layers of snapshots that the run asked for, and serves stored ones."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from node.coordinator.kept_snapshots import SnapshotBook, SnapshotRun
from node.schedule.placement import stage_units
from node.state.manifest import (
    LayerFile,
    LayerSource,
    Manifest,
    SnapshotDamagedError,
    UnitEntry,
    hash_of,
    unit_file,
)
from node.state.snapshot import (
    WEIGHTS_FOLDER,
    NewFile,
    SnapshotFolder,
    list_snapshots,
    open_layer,
    open_unit,
    read_manifest,
    set_aside,
    set_damaged_aside,
    snapshot_directory,
)
from node.state.start import check_first, read_units
from node.state.unit_state import WEIGHTS, has_weights_first, weights_file, without_head
from node.telemetry import points
from wire.errors import NotYetError, ProtocolViolationError, RunError, ThinwireError, WrongLayerError
from wire.messages import SendLayers, UnitHash

Result = TypeVar("Result")
MOST_WANTED = 3
"""The most incomplete snapshots whose layers are still accepted: two are requested at a time, while nodes may
still upload an older one."""
MOST_REPEATS = 3
"""How often a complete layer may arrive. The answer to its node may have been lost."""
log = logging.getLogger(__name__)

Hosts = dict[str, tuple[str, ...]]
"""The nodes that hold each unit's file in the epoch of the request. The first one uploads it."""


SAME_SUM = 1e-6
"""The relative difference below which sums of squares count as equal: the order of addition may differ."""
DISK_FULL = "the coordinator's disk is full"
AGREE_SECONDS = 600.0
"""The seconds for which an upload waits until its layer's hash is agreed on."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What a snapshot's layers must be."""

    units: Mapping[str, UnitHash]
    alone: Collection[str]
    """Layers that only one node holds. The file must match its report."""


class NotDueError(ProtocolViolationError):
    """An upload for which the run does not wait. Correct nodes send one now and then, because the run has
    moved on or has another coordinator."""


@dataclass(frozen=True, kw_only=True)
class UploadPermit:
    """The permission for one upload. It is valid for the attempt at its step that was current at the
    start."""

    node_id: str
    step: int
    unit: str
    most_bytes: int
    hosts: Hosts
    agreed: asyncio.Future[Agreement | None]
    weights_alone: bool = False
    """Whether the file has only the layer's weights, sent before the complete file."""
    is_stored: bool = False
    """Whether the upload is no longer needed: it is dropped and counts as stored."""


@dataclass(frozen=True, kw_only=True)
class _Upload:
    permit: UploadPermit
    file: NewFile
    entry: UnitEntry
    done: asyncio.Future[None]
    """Resolved when the layer is stored. The sender may have disconnected."""


@dataclass(frozen=True)
class ServedLayer:
    """A unit's file of a complete snapshot, which is read only when it is needed."""

    entry: UnitEntry
    """The manifest's entry for the file."""
    open: Callable[[], Awaitable[LayerSource]]
    """Returns the file, its SHA-256 checked. Raises RunError, or DataError for a checkpoint."""


class SnapshotHandler:
    """The snapshots of one run at the coordinator. Disk work runs on threads."""

    def __init__(self, book: SnapshotBook, run: SnapshotRun) -> None:
        self._book = book
        self._config = book.config
        self._run = run
        self._directory = book.directory / "snapshots"
        self._store = book.store
        self._folder = SnapshotFolder(self._directory, book.config, book.run_id, book.windows, book.scale_of)
        alone = replace(book.config, snapshots=replace(book.config.snapshots, last=WEIGHTS))
        self._weights = SnapshotFolder(
            book.directory / WEIGHTS_FOLDER, alone, book.run_id, book.windows, book.scale_of
        )
        """The weights of the last snapshot, until the complete snapshot is stored."""
        self._ahead: dict[str, UnitEntry] = {}
        """The entries of the layers' weights that arrived in the current attempt."""
        self._wanted: dict[int, Hosts] = {}
        """Requested snapshots by step, in the order of the requests, including complete ones."""
        self._came: Counter[tuple[int, str, str, bool]] = Counter()
        """How often each node's complete layers of a requested step arrived, and how often their weights."""
        self._agreements: dict[int, asyncio.Future[Agreement | None]] = {}
        """What was agreed on, by step, from the request on. None if the snapshot is not taken."""
        self._newest = 0
        """The newest step completed by this process."""
        self._first: dict[str, asyncio.Task[LayerFile]] = {}
        """Units of the run's checkpoint that are being read."""
        self._first_entries: dict[str, UnitEntry] = {}
        self._uploads: asyncio.Queue[_Upload] = asyncio.Queue()
        self._writing = asyncio.Lock()
        self._setting_aside: set[asyncio.Task[None]] = set()
        self._reserving: set[asyncio.Task[NewFile]] = set()
        """What waits for space on the disk. The nodes of these uploads send them again."""

    async def run(self) -> None:
        """Store uploads until cancelled.

        Complete uploads are stored and announced even if the sender has disconnected, because one may
        complete a snapshot.
        """
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    group.create_task(self._store_upload(await self._uploads.get()))
        finally:
            # Those of calls that end with this process.
            self._folder.remove_unfinished()
            self._weights.remove_unfinished()

    async def _store_upload(self, upload: _Upload) -> None:
        try:
            manifest = await self._take_in(upload)
        except Exception as error:  # the waiting sender gets it
            reply = self._error_for(error, upload.permit)
            if not upload.done.done():
                upload.done.set_exception(reply)
            return
        if manifest is not None:
            self._run.snapshot_stored(manifest, str(self.path(manifest.step)), is_here=True)
        if not upload.done.done():
            upload.done.set_result(None)

    async def expect(self, step: int, rows: Sequence[Sequence[str]]) -> None:
        """Nodes will upload the complete state of `step`. Parts of an earlier attempt are discarded.

        Args:
            rows: nodes by stage. The first row uploads. The others hold copies that replace refused layers.
        """
        held = zip(zip(*rows, strict=True), stage_units(self._config, len(rows[0])), strict=True)
        hosts: Hosts = {unit: nodes for nodes, units in held for unit in units}
        before = self._agreements.get(step)
        self._agreements[step] = asyncio.get_running_loop().create_future()
        others = [other for other in self._wanted if other != step]
        # Of the snapshots that never become complete only a few are kept, because each takes disk space.
        old = others[: 1 - MOST_WANTED]
        weights_first = has_weights_first(self._config, step)
        if step not in self._wanted and not old and not weights_first:
            self._wanted[step] = hosts  # nothing to discard, so no wait for the disk
            return
        async with self._writing:
            for other in old:
                await self._forget(other)
            if self._wanted.pop(step, None) is not None:
                await asyncio.to_thread(self._folder.discard, step)
            if weights_first:
                self._ahead.clear()
                await asyncio.to_thread(self._weights.remove, step)
            self._wanted[step] = hosts
            if before is not None and not before.done():
                before.set_result(None)
            self._came = Counter(
                {key: count for key, count in self._came.items() if key[0] in self._wanted and key[0] != step}
            )

    async def refused(self, permit: UploadPermit) -> None:
        """A node uploaded something that is not a layer of this snapshot. Another node with its layers is
        asked; if there is none, what has arrived of the snapshot is removed."""
        async with self._writing:
            if self._wanted.get(permit.step) is permit.hosts and not self._asks_another(permit):
                await self._forget(permit.step)

    def _asks_another(self, permit: UploadPermit) -> bool:
        hosts = permit.hosts
        if hosts[permit.unit][0] != permit.node_id:
            return True  # another layer of this node was refused before
        missing = self._folder.missing(permit.step)
        units = tuple(unit for unit in missing if hosts[unit][0] == permit.node_id)
        if not all(hosts[unit][1:] for unit in units):
            return False
        hosts.update({unit: hosts[unit][1:] for unit in units})
        self._run.send(hosts[permit.unit][0], SendLayers(step=permit.step, units=units))
        for unit in units:
            self._run.layer_received(permit.step, unit)  # nothing waits for this node any more
        return True

    async def _forget(self, step: int) -> None:
        """Accept no more layers of a step, and remove its layers unless it is complete."""
        self._settle(step, None)
        if self._wanted.pop(step, None) is not None and step > self._newest:
            await asyncio.to_thread(self._folder.discard, step, remove=True)

    def agreed(self, step: int, agreement: Agreement) -> None:
        """Set what the layers of `step` must be, as their holders agreed. No other file is stored."""
        self._settle(step, agreement)

    async def drop(self, step: int) -> None:
        """Take no snapshot of `step`. Its uploads count as stored but are dropped."""
        self._settle(step, None)
        if step in self._wanted:
            async with self._writing:
                await asyncio.to_thread(self._folder.discard, step)

    async def refuse(self, step: int) -> None:
        """Set aside a complete snapshot that is not the run's state."""
        async with self._writing:
            self._newest = min(self._newest, step - 1)
            if step in await asyncio.to_thread(list_snapshots, self._directory):
                await asyncio.to_thread(set_aside, self.path(step))
                await asyncio.to_thread(self._store.delete_snapshot, step)

    def _settle(self, step: int, agreement: Agreement | None) -> None:
        if (agreed := self._agreements.get(step)) is not None and not agreed.done():
            agreed.set_result(agreement)

    def path(self, step: int) -> Path:
        return snapshot_directory(self._directory, step)

    async def layer(self, step: int, unit: str) -> "ServedLayer":
        """A unit's file of a complete snapshot."""
        self._book.most_bytes(unit)
        if step > 0:
            manifest = await self._whole(step, lambda: read_manifest(self.path(step)))
            return ServedLayer(manifest.entry(unit), partial(self._stored_layer, step, unit))
        if (entry := self._first_entries.get(unit)) is not None:
            return ServedLayer(entry, partial(self._first_file, unit))
        file = await self._first_layer(unit)
        entry = self._first_entries[unit] = UnitEntry(
            unit=unit, file=unit_file(unit), bytes=file.size, sha256=file.sha256, weights_sha256=""
        )
        return ServedLayer(entry, partial(self._first_file, unit, file))

    async def _stored_layer(self, step: int, unit: str) -> LayerSource:
        points.reach(points.Phase.STATE_FETCH, at=points.At.COORDINATOR, step=step)
        return await self._whole(step, lambda: open_unit(self.path(step), unit))

    async def _first_file(self, unit: str, file: LayerFile | None = None) -> LayerSource:
        points.reach(points.Phase.STATE_FETCH, at=points.At.COORDINATOR, step=0)
        return file or await self._first_layer(unit)

    async def _first_layer(self, unit: str) -> LayerFile:
        """A unit's weights from the checkpoint that the run starts from, as a file. It is read once for all
        requests that come meanwhile."""
        if not self._config.model.from_:
            raise RunError("there is no snapshot of step 0: the run starts from its seed")
        if unit not in self._first:
            reading = self._first[unit] = asyncio.create_task(self._read_first(unit))
            reading.add_done_callback(lambda _: self._first.pop(unit))
        return await asyncio.shield(self._first[unit])

    async def _read_first(self, unit: str) -> LayerFile:
        weights = (await read_units(self._config.model, [unit], as_stored=True))[unit]
        file = await asyncio.to_thread(lambda: LayerFile.of(weights_file(weights)))
        await asyncio.to_thread(self._store.record_first_layer, unit, file.sha256)
        check_first(self._config.model, unit, file.sha256, self._store.first_layers())
        return file

    def permit(self, node_id: str, step: int, unit: str, *, weights_alone: bool = False) -> UploadPermit:
        """Permission to upload a layer, or only its weights before the layer.

        Uploads continue after their epoch ends, so the host of the epoch of the newest request counts. When a
        step is requested again, its state may have other bits, so earlier uploads are dropped.

        Raises:
            NotDueError: the layer was not requested, or another node uploads it.
            ProtocolViolationError: there is no such unit, or it has arrived too often.
        """
        most_bytes = self._book.most_bytes(unit)
        hosts = self._wanted.get(step)
        if hosts is None:
            raise NotDueError(f"no snapshot of step {step} was requested")
        if hosts[unit][0] != node_id:
            raise NotDueError(
                f"layer {unit} of the snapshot of step {step} must come from another node than {node_id}"
            )
        if weights_alone and not has_weights_first(self._config, step):
            raise ProtocolViolationError(f"the weights of step {step} are not sent ahead")
        if self._came[step, unit, node_id, weights_alone] >= MOST_REPEATS:
            raise ProtocolViolationError(f"layer {unit} of step {step} has arrived {MOST_REPEATS} times")
        return UploadPermit(
            node_id=node_id,
            step=step,
            unit=unit,
            most_bytes=most_bytes,
            hosts=hosts,
            agreed=self._agreements[step],
            weights_alone=weights_alone,
            is_stored=step <= self._newest if weights_alone else step < self._newest,
        )

    async def weights_ahead(self, permit: UploadPermit) -> LayerSource:
        """The weights that were sent ahead of a layer, as bytes of its file. Raises NotDueError if none."""
        if (entry := self._ahead.get(permit.unit)) is None:
            raise NotDueError(f"no weights of layer {permit.unit} were sent ahead of step {permit.step}")
        path = snapshot_directory(self._directory.with_name(WEIGHTS_FOLDER), permit.step) / entry.file
        return await asyncio.to_thread(lambda: without_head(open_layer(path, entry)))

    async def arriving(self, permit: UploadPermit, size: int) -> NewFile:
        """A file on the disk for an upload of `size` bytes, which the caller closes unless it passes it to
        `put`. Raises RunError, and NotYetError while the disk is full: its node asks again."""
        disk, folder = self._book.disk, self._weights if permit.weights_alone else self._folder
        if disk.is_full:
            raise NotYetError(DISK_FULL)
        reserving = asyncio.create_task(disk.write(folder.arriving, permit.step, permit.unit, size))
        full = asyncio.create_task(disk.full())
        is_ours = False
        try:
            await asyncio.wait({reserving, full}, return_when=asyncio.FIRST_COMPLETED)
            is_ours = reserving.done()
        finally:
            full.cancel()
            if not is_ours:
                # The upload has ended, or it waits for space and tells the operator.
                self._reserving.add(reserving)
                reserving.add_done_callback(self._drop)
        if not is_ours:
            raise NotYetError(DISK_FULL)
        try:
            return reserving.result()
        except RunError as error:
            raise self._error_for(error, permit) from None

    def _drop(self, reserving: asyncio.Task[NewFile]) -> None:
        """Close a file for which no upload waits any more."""
        self._reserving.discard(reserving)
        if not reserving.cancelled() and reserving.exception() is None:
            reserving.result().close()

    async def put(self, permit: UploadPermit, file: NewFile | None) -> None:
        """Wait until the unit's hash is agreed on, pass its file to `run`, and wait until it is stored. The
        file is closed in any case; None stands for an upload that was not needed.

        Raises RunError when the disk or the database fails, WrongLayerError for a file that differs from the
        agreed one, NotDueError if the step was requested again meanwhile.
        """
        if self._wanted.get(permit.step) is permit.hosts:
            self._came[permit.step, permit.unit, permit.node_id, permit.weights_alone] += 1
        if file is None:
            return
        upload = None
        try:
            upload = await self._checked(permit, file)
        finally:
            if upload is None:
                file.close()
        if upload is None:
            return
        self._uploads.put_nowait(upload)
        # On a full disk, the call would time out. Nothing relies on the layer before it is stored.
        full = asyncio.create_task(self._book.disk.full())
        try:
            await asyncio.wait({upload.done, full}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            full.cancel()
            # If it is not done, nothing waits for it, and its error would be reported as never retrieved.
            upload.done.cancel()
        if not upload.done.cancelled():
            upload.done.result()

    async def _checked(self, permit: UploadPermit, file: NewFile) -> _Upload | None:
        """The upload, if it is the agreed file; None if no snapshot is taken."""
        points.reach(points.Phase.SNAPSHOT, at=points.At.COORDINATOR, step=permit.step)
        if not permit.weights_alone:
            self._run.layer_received(permit.step, permit.unit)
        if (agreement := await self._agreement(permit)) is None:
            return None
        try:
            entry = await asyncio.to_thread(self._examined, permit, file, agreement)
        except Exception as error:  # the sender gets any error
            raise self._error_for(error, permit) from None
        done = asyncio.get_running_loop().create_future()
        return _Upload(permit=permit, file=file, entry=entry, done=done)

    async def _agreement(self, permit: UploadPermit) -> Agreement | None:
        """What this snapshot's layers must be; None if it is not taken."""
        await asyncio.wait([permit.agreed], timeout=AGREE_SECONDS)
        if not permit.agreed.done():
            raise RunError(f"the hash of layer {permit.unit} of step {permit.step} is not agreed on yet")
        agreement = permit.agreed.result()
        if agreement is None and permit.step >= self._newest:
            self._check_current(permit)
        return agreement

    def _examined(self, permit: UploadPermit, file: NewFile, agreement: Agreement) -> UnitEntry:
        """Check that this file is the agreed one. Runs on a thread.

        Raises WrongLayerError, or ProtocolViolationError if no run can continue from the file.
        """
        agreed = agreement.units[permit.unit]
        wrong = WrongLayerError(permit.node_id, permit.step, permit.unit)
        sha256 = agreed.weights_sha256 if permit.weights_alone else agreed.sha256
        folder = self._weights if permit.weights_alone else self._folder
        try:
            try:
                entry, known = folder.check(permit.step, permit.unit, file)
            except ProtocolViolationError:
                if hash_of(file) != sha256:
                    raise wrong from None
                raise
        except OSError as error:
            raise RunError(f"cannot read {file.path} ({error.strerror}); check the disk") from error
        if entry.sha256 != sha256:
            raise wrong
        expected = (agreed.weights, 0.0, 0.0) if permit.weights_alone else agreed[1:4]
        same = all(math.isclose(*pair, rel_tol=SAME_SUM) for pair in zip(known[1:4], expected, strict=True))
        # A run that has gone back stores earlier steps again.
        went_ahead = has_weights_first(self._config, permit.step) and not permit.weights_alone
        ahead = self._ahead.get(permit.unit) if went_ahead else None
        # The only holder of a layer reports both of its hashes, which must be of the same weights.
        same = same and (ahead is None or ahead.weights_sha256 == entry.weights_sha256)
        if permit.unit in agreement.alone and not same:
            raise wrong
        return entry

    async def _take_in(self, upload: _Upload) -> Manifest | None:
        """The recorded manifest, if this unit completes its snapshot."""
        permit, disk = upload.permit, self._book.disk
        try:
            if permit.step < self._newest:
                return None
            self._check_current(permit)
            # Without a turn: a disk takes several files at once sooner than one after the other.
            await asyncio.to_thread(upload.file.sync)
            async with self._writing:
                if permit.step < self._newest:
                    return None
                self._check_current(permit)
                if permit.weights_alone:
                    await self._take_in_weights(upload)
                    return None
                manifest = await disk.write(self._store_unit, upload)
                if manifest is not None:
                    self._newest = max(self._newest, manifest.step)
                    for step in list(self._wanted)[:-MOST_WANTED]:
                        del self._wanted[step]
                    for step in [step for step in self._agreements if step < self._newest]:
                        self._settle(step, None)
                        if step not in self._wanted:
                            del self._agreements[step]
                return manifest
        finally:
            upload.file.close()

    async def _take_in_weights(self, upload: _Upload) -> None:
        step, unit, entry = upload.permit.step, upload.permit.unit, upload.entry
        if unit in self._ahead:
            return  # the answer to its node was lost before
        manifest = await self._book.disk.write(self._weights.place, step, entry, upload.file.path)
        self._ahead[unit] = entry
        if manifest is not None:
            self._run.weights_stored(step)

    def _check_current(self, permit: UploadPermit) -> None:
        if self._wanted.get(permit.step) is not permit.hosts:
            raise NotDueError(
                f"step {permit.step} was requested again during the upload of its layer {permit.unit}"
            )

    async def _whole(self, step: int, read: Callable[[], Result]) -> Result:
        """Run `read` on the snapshot of `step` on a thread. A damaged snapshot is set aside."""
        try:
            return await asyncio.to_thread(read)
        except SnapshotDamagedError:
            # Before the node gets its error, because the step that it fails must run from an older snapshot.
            await self._go_back(step)
            raise

    async def _go_back(self, step: int) -> None:
        """Set a damaged snapshot aside, if there is an older one to return to.

        It is shielded, so that it happens even if the node that found the damage disconnects.
        """
        task = asyncio.create_task(self._set_aside(step))
        self._setting_aside.add(task)
        task.add_done_callback(self._setting_aside.discard)
        await asyncio.shield(task)

    async def _set_aside(self, step: int) -> None:
        async with self._writing:
            complete = await asyncio.to_thread(list_snapshots, self._directory)
            if step not in complete:
                return  # it has been set aside or pruned
            if step < complete[-1]:
                await asyncio.to_thread(set_aside, self.path(step))
                await asyncio.to_thread(self._store.delete_snapshot, step)
                return
            checked = await asyncio.to_thread(set_damaged_aside, self._directory)
            if not checked.damaged:
                return
            news = checked.news() if checked.whole else ""
            self._run.snapshot_lost(step, checked.whole, news)
            if checked.whole:
                # Later steps will be requested again, and must be stored then.
                self._newest = min(self._newest, checked.whole)
                for other, _ in checked.damaged:
                    await asyncio.to_thread(self._store.delete_snapshot, other)

    def _error_for(self, error: Exception, permit: UploadPermit) -> Exception:
        """The error that the sender gets. Failures of the disk or the database end the run."""
        if isinstance(error, ThinwireError | OSError):
            if isinstance(error, RunError):
                self._run.fail(str(error))
            return error
        log.error("layer %s of step %d could not be stored", permit.unit, permit.step, exc_info=error)
        return RunError(
            f"the coordinator could not store layer {permit.unit} of step {permit.step}: see its log"
        )

    def _store_unit(self, upload: _Upload) -> Manifest | None:
        manifest = self._folder.place(upload.permit.step, upload.entry, upload.file.path)
        if manifest is not None:
            self._book.record(manifest)
            for step in [step for step in self._weights.steps() if step <= manifest.step]:
                self._weights.remove(step)
            complete = self._folder.steps()
            held = self._book.held(complete)
            # No run returns to older, incomplete snapshots, whose uploads may never complete.
            self._folder.hold(held)
            for step in {*complete}.difference(held):
                self._store.delete_snapshot(step)
        return manifest
