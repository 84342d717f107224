"""Snapshots whose layers are not at the coordinator, which keeps their manifests and knows where they are.

    RUN/kept/step-00000100.json    the manifest of a complete snapshot
        RUN/kept/step-00000100.url     the object store's folder with its layers, if they are not on nodes
        RUN/kept/holders.json          who held the newest one's layers when it was completed, for people

Nodes report the files on their disks whenever they connect, so the list of holders need not be stored.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from node.config.schema import RunConfig
from node.coordinator.disk import Disk
from node.coordinator.enrolment_service import RateLimits
from node.coordinator.store import SnapshotRecord, Store
from node.model.units import unit_names
from node.run_state.layer_places import LayerPlaces
from node.schedule.placement import most_layer_bytes, stage_units
from node.state.manifest import Manifest, SnapshotDamagedError, UnitEntry
from node.state.object_store import ObjectStore, run_folder, stored_steps
from node.state.snapshot import list_snapshots, write_errors
from node.training.loss_scale import ScaleOf, no_scale
from wire.errors import NotYetError, ProtocolViolationError, RunError, WrongLayerError
from wire.identity.files import write_private
from wire.messages import NODES, CoordinatorMessage, HeldLayer, PlacedStage, Prefetch, Retain, SendLayers

log = logging.getLogger(__name__)

DIRECTORY = "kept"
HOLDERS_FILE = "holders.json"
LOOK_SECONDS = 1.0
DOUBTS_A_SECOND, DOUBTS_AT_ONCE = 1.0, 100.0
"""The rate and burst of one node's doubts about others' copies. For each, another node hashes one."""
RECORD_CHARACTERS = 160_000
"""The record has the newest manifests up to this length, so that it fits a message (`wire.channels`)."""
RECORD_FORMAT = 1
"""The format version of the record that nodes keep for `thinwire recover`."""
_NAME = re.compile(r"step-(\d{8,})\.json")


def kept_manifests(run_directory: Path) -> list[Manifest]:
    """The manifests of the snapshots that nodes hold, oldest first, without damaged ones."""
    manifests = []
    directory = run_directory / DIRECTORY
    for path in sorted(directory.glob("step-*.json")) if directory.is_dir() else []:
        if _NAME.fullmatch(path.name):
            try:
                manifests.append(Manifest.from_json(path.read_bytes(), str(path)))
            except (OSError, SnapshotDamagedError) as error:
                log.warning("%s", error)
    return sorted(manifests, key=lambda manifest: manifest.step)


def write_kept_manifest(run_directory: Path, manifest: Manifest, url: str = "") -> None:
    """Write a manifest to disk, durably; with the object store's folder, if its layers are there.

    Raises RunError, or DiskFullError on a full disk.
    """
    path, data = _manifest_path(run_directory, manifest.step), manifest.to_json().encode()
    with write_errors(path, len(data)):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if url:
            write_private(path.with_suffix(".url"), url.encode())
        else:
            path.with_suffix(".url").unlink(missing_ok=True)
        write_private(path, data)


def set_kept_aside(run_directory: Path, step: int) -> None:
    """Rename a manifest, so that it no longer counts."""
    path = _manifest_path(run_directory, step)
    path.replace(path.with_name(f"{path.name}.damaged"))


def _manifest_path(run_directory: Path, step: int) -> Path:
    return run_directory / DIRECTORY / f"step-{step:08d}.json"


class SnapshotRun(Protocol):
    """The run whose snapshots are kept: the coordinator."""

    def addresses(self) -> Mapping[str, str]:
        """Connected nodes and their addresses, hosts in the order of their stages first."""

    def record(self) -> Mapping[str, object]:
        """What nodes keep of the run besides manifests, for `thinwire recover`."""

    def send(self, node_id: str, message: CoordinatorMessage) -> None: ...

    def layer_received(self, step: int, unit: str) -> None:
        """A node has saved or uploaded a layer."""

    def snapshot_stored(self, manifest: Manifest, where: str, *, is_here: bool) -> None:
        """A snapshot is complete and recorded; `is_here`: in the run directory."""

    def snapshot_lost(self, step: int, whole: int, text: str) -> None:
        """The snapshot of `step` cannot be used. `whole`: the newest usable one, or 0. `text` reports it, and
        is empty if nothing changes."""

    def snapshot_gone(self, step: int, why: str) -> None:
        """The snapshot of `step`, which is under way, will not be complete."""

    def weights_stored(self, step: int) -> None:
        """The weights of the last snapshot are stored here; the optimizer's state follows."""

    def fail(self, reason: str) -> None:
        """The disk or the database fails."""


class SnapshotBook:
    """What a run's snapshots share, wherever their layers are: limits, the database and its disk."""

    def __init__(
        self,
        *,
        config: RunConfig,
        windows: int,
        directory: Path,
        run_id: str,
        store: Store,
        disk: Disk,
        scale_of: ScaleOf = no_scale,
    ) -> None:
        """
        Args:
            windows: the number of samples in one pass over the text.
            directory: the run directory.
            disk: repeats writes if the disk is full.
            scale_of: the loss scale of a step, for manifests.
        """
        self.config = config
        self.windows = windows
        self.directory = directory
        self.run_id = run_id
        self.store = store
        self.disk = disk
        self.scale_of = scale_of
        self.units = unit_names(config.model)

    def most_bytes(self, unit: str) -> int:
        """The most bytes of a unit's file. Raises ProtocolViolationError if there is no such unit."""
        if unit not in self.units:
            raise ProtocolViolationError(f"this model has no layer unit {unit[:40]!r}")
        return most_layer_bytes(self.config, unit, self.windows)

    def record(self, manifest: Manifest) -> None:
        """Record a complete snapshot. Blocks."""
        self.store.record_snapshot(SnapshotRecord.of(manifest, time.time()), manifest.units)

    def held(self, complete: Sequence[int]) -> list[int]:
        """Which of these complete snapshots, oldest first, are kept. Blocks."""
        run = self.config.run
        best = self.store.best_of(complete) if run.keep_best else None
        newest = complete[-max(1, run.keep_snapshots) :]
        return [step for step in complete if step in newest or step == best]


class KeptSnapshots:
    """The snapshots of one run that are not at the coordinator. Call everything on the event loop; disk work
    runs on threads."""

    def __init__(self, book: SnapshotBook, told_config: RunConfig, run: SnapshotRun) -> None:
        """`told_config`: the config without what nodes may not know, for manifests."""
        self._book = book
        self._config = book.config
        self._run_directory = directory = book.directory
        self._told_config = told_config
        self._run = run
        self._units = book.units
        self._places = LayerPlaces(self._units)
        self._missed: dict[tuple[int, int], tuple[float, float]] = {}
        """By step, when nodes that need it first and last asked for a layer that no connected node holds. If
        others say that they hold it, by epoch too; otherwise with epoch 0."""
        self._contested: dict[int, int] = {}
        """By step, the first epoch in which a node got no good copy of a layer that others say they hold."""
        self._gone: dict[int, float] = {}
        """By step of an incomplete snapshot: the time since which no node that saved one of its layers is
        connected."""
        self._doubts = RateLimits(DOUBTS_A_SECOND, DOUBTS_AT_ONCE)
        """By node that doubts."""
        self._changed = asyncio.Event()
        holders, urls = _read_holders(directory), stored_steps(directory)
        for manifest in kept_manifests(directory):
            self._places.load(manifest.step, manifest.units, holders, urls.get(manifest.step, ""))

    def __contains__(self, step: int) -> bool:
        """Whether nodes hold, or are saving, the layers of `step`."""
        return step in self._places

    @property
    def complete(self) -> tuple[int, ...]:
        """Steps of complete snapshots, oldest first."""
        return self._places.complete

    async def run(self) -> None:
        """Request copies and complete snapshots, until cancelled."""
        while True:
            self._changed.clear()
            try:
                await self._complete()
            except RunError as error:
                self._run.fail(str(error))
            for ask in self._places.asks(tuple(self._run.addresses()), time.monotonic()):
                self._run.send(ask.node_id, Prefetch(step=ask.step, units=ask.units, keep=True))
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # ---- saving

    def place(self, step: int) -> str:
        """Where the layers of `step` are saved: `NODES`, or a folder in an object store."""
        return self._places.url(step) or NODES

    def expect(self, step: int, rows: Sequence[Sequence[str]], url: str = "") -> None:
        """The nodes of these rows, by stage, will save the state of `step`: on their disks, or in the named
        object store. There the first row saves it, and other rows replace refused layers."""
        makers: dict[str, list[str]] = {unit: [] for unit in self._units}
        for nodes in rows:
            for node, units in zip(nodes, stage_units(self._config, len(nodes)), strict=True):
                for unit in units:
                    makers[unit].append(node)
        self._places.expect(step, makers, time.monotonic(), run_folder(url, self._book.run_id) if url else "")

    def agreed(self, step: int, hashes: Mapping[str, str]) -> list[tuple[str, str]]:
        """See `LayerPlaces.agreed`."""
        self._changed.set()
        wrong = self._places.agreed(step, hashes)
        for node_id, _ in wrong:
            self._ask_others(node_id, step)
        return wrong

    def drop(self, step: int) -> None:
        """Take no snapshot of `step`."""
        if step in self._places.under_way:
            self._places.drop(step)

    async def refuse(self, step: int) -> None:
        """Discard a complete snapshot, which is not the run's state or is an old one."""
        url = self._places.url(step)
        self._places.drop(step)
        await asyncio.to_thread(self._remove, step, url)

    def hold(
        self, node_id: str, layers: Sequence[HeldLayer], missing: Sequence[tuple[int, str]]
    ) -> list[tuple[int, str]]:
        """A node reports files on its disk, and requested ones that it lacks. Returns files of no snapshot.

        Raises WrongLayerError if a layer that it was to save differs from the agreed one.
        """
        known = set(self._known())
        unknown = []
        for file in layers:
            if file.bytes > self._book.most_bytes(file.unit):
                self._ask_others(node_id, file.step)
                raise ProtocolViolationError(f"layer {file.unit} cannot have {file.bytes} bytes")
            if self._places.held(node_id, file):
                if file.weights_sha256:  # else it is not complete
                    self._run.layer_received(file.step, file.unit)
            elif self._places.is_wrong(node_id, file):
                self._ask_others(node_id, file.step)
                raise WrongLayerError(node_id, file.step, file.unit)
            elif file.step in self._places or file.step not in known:
                unknown.append((file.step, file.unit))
        for step, unit in missing:
            self._book.most_bytes(unit)
            self._places.lost(node_id, step, unit, time.monotonic())
        self._changed.set()
        return unknown

    # ---- fetching

    def where(
        self, node_id: str, step: int, unit: str, bad: Sequence[str], *, epoch: int
    ) -> tuple[UnitEntry, list[PlacedStage], str]:
        """A layer's entry, the present nodes that hold it, and the object store's folder with it.

        Args:
            bad: nodes whose copy was damaged or missing, which check theirs again.
            epoch: the epoch that waits for this node to load the snapshot; 0 if none does. Else any member
                could have it given up, by saying that all copies are damaged.

        Raises NotYetError while holders may still return, RunError when none did.
        """
        self._book.most_bytes(unit)
        addresses = self._run.addresses()
        for other in bad:
            taken = self._doubts.take(node_id, time.monotonic())
            if taken and self._places.doubted(other, step, unit, by=node_id):
                log.warning("node %s found no good copy of layer %s at node %s", node_id, unit, other)
                self._run.send(other, Prefetch(step=step, units=(unit,), keep=True))
        entry = self._places.entry(step, unit)
        holders = self._places.holders(step, unit)
        reachable = [node for node in holders if node in addresses and node != node_id]
        others = [PlacedStage(node_id=node, address=addresses[node]) for node in reachable if node not in bad]
        if entry is None:
            raise RunError(f"layer {unit} of step {step} was not saved yet")
        url = self._places.url(step)
        if not url and not others and node_id not in holders:
            self._wait_for(step, unit, holders, epoch, is_here=bool(reachable))
        return entry, others, url

    def message(self) -> Retain:
        """The message that tells nodes what to keep."""
        manifests = [self._manifest(step).to_json() for step in self._places.complete]
        while len(manifests) > 1 and sum(map(len, manifests)) > RECORD_CHARACTERS:
            del manifests[0]
        urls = {step: url for step in self._places.complete if (url := self._places.url(step))}
        record = {
            **self._run.record(),
            "format": RECORD_FORMAT,
            "run_id": self._book.run_id,
            "manifests": manifests,
            "urls": urls,
        }
        steps = (*self._places.complete, *self._places.under_way, *self._known())
        return Retain(steps=tuple(sorted({*steps})), record=json.dumps(record) if manifests else "")

    # ---- inside

    @property
    def _patience(self) -> float:
        """How long a node that holds a layer may be away."""
        return self._config.coordinator.regroup_seconds + self._config.coordinator.silent_seconds

    def _ask_others(self, node_id: str, step: int) -> None:
        """Refuse what a node saved. In an object store, another row is asked to save its own copy."""
        for other, units in self._places.others(node_id, step).items():
            self._run.send(other, SendLayers(step=step, units=units, place=self._places.url(step)))
            for unit in units:
                self._run.layer_received(step, unit)  # nothing waits for the first node any more

    def _wait_for(self, step: int, unit: str, holders: Sequence[str], epoch: int, *, is_here: bool) -> None:
        """No present node has a good copy of the layer: wait a while, then continue from an older snapshot if
        there is one and this one is needed now.

        Args:
            is_here: whether present nodes say that they hold it. Then the node that needs it may be wrong and
                fails in this epoch. In the next one the snapshot is given up.
        """
        now = time.monotonic()
        missed = step, epoch if is_here else 0
        since, last = self._missed.get(missed, (now, now))
        if epoch:
            since = since if now - last < self._patience else now
            self._missed[missed] = since, now
        holder = " or ".join(f"node {node}" for node in holders) or "a node that has not returned"
        what = f"layer {unit} of the snapshot of step {step} is held by {holder}"
        if not epoch or now - since < self._patience:
            raise NotYetError(f"{what}, which is not here yet")
        if is_here and self._contested.setdefault(step, epoch) == epoch:
            raise RunError(f"{what}, and could not be fetched")
        present = set(self._run.addresses())
        places = self._places
        older = {other for other in places.complete if not places.missing(other, present)} | {*self._known()}
        if whole := [other for other in older if other < step]:
            self._run.snapshot_lost(
                step, max(whole), f"{what}, which is not here: continuing from step {max(whole)}"
            )
            self._places.drop(step)
        raise RunError(f"{what}, which is not here: start it again")

    async def _complete(self) -> None:
        present = self._run.addresses()
        for step in self._places.under_way:
            if step not in self._places:
                continue
            self._look_gone(step, present)
            if not self._places.is_whole(step, present, time.monotonic()):
                continue
            manifest = self._manifest(step)
            holders = {unit: self._places.holders(step, unit) for unit in self._units}
            await self._book.disk.write(self._write, manifest, holders)
            if self._places.entries(step) != manifest.units:
                continue  # it was requested again meanwhile
            self._places.completed(step)
            self._missed.clear()
            self._contested.clear()
            await self._prune()
            retain = self.message()
            if url := self._places.url(step):
                await asyncio.to_thread(_hold, url, retain)
            for node_id in self._run.addresses():
                self._run.send(node_id, retain)
            self._run.snapshot_stored(manifest, url or "the state directories of its nodes", is_here=False)

    def _look_gone(self, step: int, present: Collection[str]) -> None:
        """Give up a snapshot if a node saved a layer and was gone before another one had a copy. A node that
        starts again still has its file."""
        gone, now = self._places.gone(step, present), time.monotonic()
        if not gone:
            self._gone.pop(step, None)
        elif now - self._gone.setdefault(step, now) >= self._patience:
            del self._gone[step]
            self._run.snapshot_gone(step, f"no node that has its layer {gone[0]} is here")

    def _write(self, manifest: Manifest, holders: Mapping[str, Sequence[str]]) -> None:
        write_kept_manifest(self._run_directory, manifest, self._places.url(manifest.step))
        text = json.dumps({"step": manifest.step, "holders": holders}, indent=1)
        try:
            write_private(self._run_directory / DIRECTORY / HOLDERS_FILE, text.encode())
        except OSError as error:
            log.warning("the holders of step %d were not recorded: %s", manifest.step, error)
        self._book.record(manifest)

    async def _prune(self) -> None:
        held = await asyncio.to_thread(self._book.held, self._places.complete)
        for step in self._places.complete:
            if step not in held:
                await self.refuse(step)

    def _remove(self, step: int, url: str) -> None:
        path = _manifest_path(self._run_directory, step)
        path.unlink(missing_ok=True)
        path.with_suffix(".url").unlink(missing_ok=True)
        self._book.store.delete_snapshot(step)
        if url:
            try:
                ObjectStore(url).remove(step)
            except RunError as error:
                log.warning("the snapshot of step %d was not removed: %s", step, error)

    def _manifest(self, step: int) -> Manifest:
        book = self._book
        entries = self._places.entries(step)
        return Manifest.of(book.run_id, step, self._told_config, entries, book.scale_of(step))

    def _known(self) -> tuple[int, ...]:
        """The steps of the snapshots at the coordinator."""
        return list_snapshots(self._run_directory / "snapshots")


def _hold(url: str, retain: Retain) -> None:
    """Save the record. A failure here is harmless, because nodes keep it too."""
    try:
        ObjectStore(url).hold(retain.steps, retain.record)
    except RunError as error:
        log.warning("%s", error)


def _read_holders(run_directory: Path) -> dict[str, list[str]]:
    """The holders of the newest snapshot, by unit; only used to name absent ones."""
    try:
        holders = json.loads((run_directory / DIRECTORY / HOLDERS_FILE).read_bytes())["holders"]
        return {str(unit): [str(node) for node in nodes] for unit, nodes in holders.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
