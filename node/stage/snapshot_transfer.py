"""A node's part in snapshots: it saves layers, keeps copies, and fetches what it needs."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from node.config.join_options import OwnerAllows
from node.config.schema import RunConfig
from node.model.optimizers import most_state_bytes
from node.model.units import parameter_specs, unit_names
from node.schedule.placement import most_layer_bytes
from node.stage.coordinator_client import CoordinatorClient
from node.stage.following import several
from node.stage.layer_peers import LayerPeers, LayerPlace
from node.stage.state_copy import READERS, ReadLayer, StateCopy, hash_layer, read_layer
from node.state.hub import PREFIX as HUB
from node.state.hub import Repository
from node.state.manifest import LayerFile
from node.state.object_store import ObjectStore, is_below, wrong_url
from node.state.serialization import deserialize_unit
from node.state.snapshot_cache import NO_ROOM, NoRoomError, SnapshotCache
from node.state.start import read_units
from node.state.unit_state import (
    PARAMETER_PREFIX,
    checked_digest,
    has_weights_alone,
    weights_file,
)
from node.telemetry import points
from node.tuning.snapshot_place import is_url
from wire.errors import DataError, LinkError, RunError, ThinwireError, UserError
from wire.messages import (
    MOST_HELD,
    NODES,
    FailureKind,
    HeldLayer,
    NodeMessage,
    Prefetch,
    Retain,
    SendLayers,
    StateHashes,
    StepFailed,
    TakeSnapshot,
    UnitHash,
)
from wire.pacing import Pacer

log = logging.getLogger(__name__)

MOST_ASKED = 4
"""How often the coordinator is asked for a layer's place before a fetch fails."""
STORE_TRIES, STORE_SECONDS = 13, 5.0
"""How often an object store is tried, and the seconds of pause after each failure."""
ROOM_SECONDS, ROOM_RETRY_SECONDS = 40.0, 2.0
"""How long a snapshot waits for space on this node's disk, less than the coordinator waits for its layers,
and the seconds between two looks."""
DOUBT_SECONDS = 30.0
CHUNK_BYTES = 256 * 1024
UPLOADS = 2
"""The layers that are sent to the coordinator at a time. It accepts no more per node."""


class SnapshotTransfer:
    """One node's transfers during a run. Background transfers are tasks of `group`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        windows: int,
        client: CoordinatorClient,
        cache: SnapshotCache,
        peers: LayerPeers,
        allows: OwnerAllows,
        pacer: Pacer | None,
        group: asyncio.TaskGroup,
        post: Callable[[NodeMessage], None],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            windows: the number of samples in one pass over the text.
            pacer: the node's bandwidth limit, if it has one.
            post: queues a message for the coordinator.
            tell: shows the volunteer a line of text.
        """
        self._config = config
        self._windows = windows
        self._client = client
        self._cache = cache
        self.peers = peers
        self._allows = allows
        self._pacer = pacer
        self._group = group
        self._post = post
        self._tell = tell
        self._uploads: dict[int, asyncio.Task[bool]] = {}
        self._prefetching: asyncio.Task[None] | None = None
        self._ahead = Prefetch(step=0, units=())
        """The layers that the running prefetch fetches."""
        self._others: set[asyncio.Task[None]] = set()
        """Tasks that keep requested copies, send layers, and offer files."""
        self._turns = WeakValueDictionary[tuple[int, str], asyncio.Lock]()
        """The locks of the layers that are being fetched."""
        self._keeping: set[tuple[int, str]] = set()
        self._told_full = False
        """Whether the volunteer was told that the disk is full, since a layer last had space."""
        self._retained: tuple[int, ...] = ()
        """The snapshots that the run needs."""
        self._witnessed: StateHashes | None = None
        """The hashes that were reported last. They are repeated on each new connection, because a broken
        connection may lose them."""
        self._witnessing: tuple[int, asyncio.Task[None]] | None = None
        """The newest step whose layers were hashed, or are being hashed."""

    # ---- fetching

    async def fetch(self, step: int, unit: str) -> bytes:
        """A layer unit's snapshot file: this node's copy if it is the right one, otherwise from the nodes
        that hold it or from the coordinator."""
        return (await self._fetch(step, unit))[0]

    async def fetch_weights(self, unit: str) -> Mapping[str, torch.Tensor]:
        """A unit's weights from the run's checkpoint, in float32: from the hub or its cache on this node's
        disk, otherwise from the folder that the owner named, otherwise from the coordinator.

        The hub gets this user's token only for repositories that the owner named, because a stranger chooses
        the run's checkpoint.
        """
        model = self._config.model
        if model.from_.startswith(HUB):
            try:
                token = Repository.parse(model.from_).name in self._allows.hub
                async with self._turn(0, unit):
                    return _as_state((await read_units(model, (unit,), token=token))[unit])
            except DataError as error:
                log.warning("%s; the coordinator sends these weights", error)
        file = await self.fetch(0, unit)
        return await asyncio.to_thread(_in_float32, file)

    def prefetch(self, wanted: Prefetch) -> None:
        """Fetch layers that a stage may need which this node may get, and drop an older fetch of other
        layers; or keep copies of layers, beside everything else."""
        if wanted.keep:
            units = [unit for unit in wanted.units if (wanted.step, unit) not in self._keeping]
            self._keeping.update((wanted.step, unit) for unit in units)
            self._beside(self._keep(wanted.step, units))
            return
        if self._prefetching is not None:
            if self._ahead.step == wanted.step and {*wanted.units} <= {*self._ahead.units}:
                return
            self._prefetching.cancel()
        self._ahead = wanted
        self._prefetching = self._group.create_task(self._prefetch(wanted))

    # ---- saving

    def take(self, epoch: int, take: TakeSnapshot, state: StateCopy, *, stage: int) -> None:
        """In the background, report the hashes of a snapshot's layers and, unless only hashes are wanted,
        save the layers where `take` says. Each layer is read once. If one is not saved, the epoch fails."""
        step = take.step
        if take.only_hashes:
            self._witnessing = step, self._beside(self._witness(epoch, take, state))
            return
        running = {old: task for old, task in self._uploads.items() if not task.done()}
        # Cancel an upload of the same step, which may have other layers or be for a lost coordinator. Of
        # older steps let only the newest finish, because each takes memory.
        stale = [*sorted(running.keys() - {step})[:-1], *(running.keys() & {step})]
        for old in stale:
            running.pop(old).cancel()
        task = self._group.create_task(self._save(epoch, take, state, stage))
        self._uploads = {**running, step: task}

    def uploading(self, step: int) -> bool:
        """Whether this step's layers are being saved or have all been saved."""
        task = self._uploads.get(step)
        return task is not None and (not task.done() or (not task.cancelled() and task.result()))

    @property
    def sending(self) -> bool:
        """Whether any layer is being saved, or sent on request."""
        return bool(self._others) or any(not task.done() for task in self._uploads.values())

    # ---- what the coordinator asks of this node's disk

    def retain(self, wanted: Retain) -> None:
        """Keep these snapshots and remove older ones."""
        self._retained = wanted.steps
        self._beside(asyncio.to_thread(self._cache.hold, wanted.steps, wanted.record))

    def send(self, wanted: SendLayers) -> None:
        """Send layers on this node's disk to the coordinator."""
        self._beside(self._send(wanted))

    def offer(self) -> None:
        """Tell the coordinator which files are on this node's disk, and repeat what it may have missed."""
        if self._witnessed is not None:
            self._post(self._witnessed)
        self._beside(self._offer())

    def cancel(self) -> None:
        for task in [*self._uploads.values(), *self._others, self._prefetching]:
            if task is not None:
                task.cancel()

    # ---- inside

    async def _witness(self, epoch: int, take: TakeSnapshot, state: StateCopy) -> None:
        with contextlib.closing(state):
            turn = asyncio.Semaphore(READERS)

            async def read(unit: str) -> UnitHash:
                async with turn:
                    return await asyncio.to_thread(self._hash_layer, take, state, unit)

            self._say_hashes(epoch, take.step, state.units, await asyncio.gather(*map(read, state.units)))

    def _hash_layer(self, take: TakeSnapshot, state: StateCopy, unit: str) -> UnitHash:
        """The hash of a layer. Its file stays on disk if `take` says so and there is space. Blocks."""
        if take.place == NODES:
            try:
                with self._cache.writing(take.step, unit, state.digest(unit).bytes) as file:
                    layer = read_layer(state, unit, file, None)
            except RunError:
                if state.is_done(unit):
                    raise
            else:
                layer.file.close()
                return layer.hash
        return hash_layer(state, unit)

    def _say_hashes(self, epoch: int, step: int, units: Sequence[str], hashes: Sequence[UnitHash]) -> None:
        names = unit_names(self._config.model)
        numbered = dict(zip(map(names.index, units), hashes, strict=True))
        self._witnessed = StateHashes(epoch=epoch, step=step, units=numbered)
        self._post(self._witnessed)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(_quietly(work))
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    async def _fetch(self, step: int, unit: str) -> tuple[bytes, bool]:
        """The file, and whether the snapshot's copies are kept by nodes."""
        async with self._turn(step, unit):
            return await self._fetch_alone(step, unit)

    def _turn(self, step: int, unit: str) -> asyncio.Lock:
        """The lock under which a layer is fetched. A second fetch then finds the file on this node's disk."""
        return self._turns.setdefault((step, unit), asyncio.Lock())

    async def _fetch_alone(self, step: int, unit: str) -> tuple[bytes, bool]:
        kept = await asyncio.to_thread(self._cache.get, step, unit)
        if kept is None and step == 0:
            kept = await self._of_folder(unit)
        limit = most_layer_bytes(self._config, unit, self._windows)
        if step == 0:
            # The checkpoint has all weights, even those that are not trained.
            limit = max(limit, most_state_bytes(parameter_specs(self._config.model, unit)))
        bad, trouble = set[str](), ""
        for _ in range(MOST_ASKED):
            answer = await self._client.layer(step, unit, limit, kept, bad)
            if isinstance(answer, LayerFile):
                if answer is not kept:
                    await self._keep_copy(step, unit, answer)
                return answer.data, False
            if kept is not None and kept.sha256 == answer.sha256:
                data = kept.data
            else:
                try:
                    get = self._get(answer, limit) if answer.url else self.peers.fetch(answer, limit, bad)
                    data = await get
                except (LinkError, RunError) as error:
                    trouble = str(error)
                    if answer.url:
                        await asyncio.sleep(STORE_SECONDS)
                    continue
                await self._keep_copy(step, unit, LayerFile(data, answer.sha256))
            if bad:
                self._beside(self._doubt(step, unit, limit, bad))
            return data, not answer.url
        raise LinkError(trouble)

    async def _doubt(self, step: int, unit: str, limit: int, bad: Collection[str]) -> None:
        """Have nodes check their copies. Nothing waits for that: the coordinator may answer only when another
        holder is back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DOUBT_SECONDS):
                await self._client.layer(step, unit, limit, None, bad)

    async def _of_folder(self, unit: str) -> LayerFile | None:
        """A unit's weights from the folder that this machine's owner named.

        The coordinator compares their SHA-256 with the run's.
        """
        if not self._config.model.from_ or self._allows.model is None:
            return None
        model = replace(self._config.model, from_=str(self._allows.model.absolute()))
        try:
            weights = (await read_units(model, [unit], as_stored=True))[unit]
        except DataError as error:
            log.warning("%s; the coordinator sends these weights", error)
            return None
        data = await asyncio.to_thread(weights_file, weights)
        return await asyncio.to_thread(LayerFile.of, data)

    async def _save(self, epoch: int, take: TakeSnapshot, state: StateCopy, stage: int) -> bool:
        """Read and save every layer. Returns whether all are saved. A missing layer fails the epoch, because
        the run may wait for it."""
        step, reading, sending = take.step, asyncio.Semaphore(READERS), asyncio.Semaphore(UPLOADS)
        hashes: dict[str, UnitHash] = {}
        failures: list[str] = []
        room_until = asyncio.get_running_loop().time() + ROOM_SECONDS
        went_ahead, all_weights_are_there = set[str](), asyncio.Event()

        async def save(unit: str) -> None:
            points.reach(points.Phase.SNAPSHOT, stage=stage, step=step)
            async with reading:
                try:
                    layer = await self._read(take, state, unit, room_until)
                finally:
                    state.done(unit)
            with contextlib.closing(layer.file):
                hashes[unit] = layer.hash
                if len(hashes) == len(state.units):
                    # No layer is stored before its hash is agreed on.
                    self._say_hashes(epoch, step, state.units, [hashes[name] for name in state.units])
                if state.weights_first and not take.place:
                    if layer.weights is not None:
                        async with sending:
                            await self._client.put_layer(step, unit, layer.weights, weights_alone=True)
                    went_ahead.add(unit)
                    if len(went_ahead) == len(state.units):
                        all_weights_are_there.set()
                    await all_weights_are_there.wait()
                async with sending:
                    await self._hand_in(take, unit, layer)

        async def attempt(unit: str) -> None:
            try:
                await save(unit)
            except ThinwireError as error:
                failures.append(f"layer {unit} of the snapshot of step {step} was not stored: {error}")
                raise

        with contextlib.closing(state):
            try:
                async with asyncio.TaskGroup() as group:
                    for unit in state.units:
                        group.create_task(attempt(unit))
            except* ThinwireError:
                failure = failures[0]
                log.warning("%s", failure)
                if not self._is_obsolete(step):
                    kind = FailureKind.INTERNAL
                    self._post(StepFailed(epoch=epoch, step=step, kind=kind, message=failure))
        return not failures

    def _is_obsolete(self, step: int) -> bool:
        """Whether a newer snapshot is complete, so that this one is not needed and its files are removed."""
        return step not in self._retained and step < max(self._retained, default=0)

    async def _read(self, take: TakeSnapshot, state: StateCopy, unit: str, room_until: float) -> ReadLayer:
        """Read a layer as soon as it has a place, while the run goes on. Raises RunError."""
        while True:
            try:
                layer = await asyncio.to_thread(self._read_layer, take, state, unit)
            except NoRoomError as error:
                if state.is_done(unit) or asyncio.get_running_loop().time() > room_until:
                    raise
                if not self._told_full:
                    self._told_full = True
                    self._tell(f"{error}; the snapshot of step {take.step} waits for it")
                await asyncio.sleep(ROOM_RETRY_SECONDS)
            else:
                self._told_full = False
                return layer

    def _read_layer(self, take: TakeSnapshot, state: StateCopy, unit: str) -> ReadLayer:
        """A layer, on this node's disk if there is space, otherwise in memory. Blocks. Raises NoRoomError if
        the layer belongs on the disk, and the disk is full."""
        to_nodes = bool(take.place) and not is_url(take.place)
        size = state.digest(unit).bytes
        reports = self._windows if take.place else None
        try:
            with self._cache.writing(take.step, unit, size) as file:
                return read_layer(state, unit, file, reports)
        except RunError:
            if to_nodes or state.is_done(unit):
                raise
        return read_layer(state, unit, None, reports)

    async def _hand_in(self, take: TakeSnapshot, unit: str, layer: ReadLayer) -> None:
        step, file = take.step, layer.file
        if is_url(take.place):
            await self._put(take.place, step, unit, await asyncio.to_thread(file.read, 0, file.size))
        if not take.place:
            rest, at = (file, 0) if layer.rest is None else (layer.rest, layer.weights_at)
            return await self._client.put_layer(step, unit, rest, weights_at=at)
        held = HeldLayer(
            step=step,
            unit=unit,
            bytes=file.size,
            sha256=file.sha256,
            weights_sha256=layer.weights_sha256,
        )
        await self._client.hold_layers([held])

    async def _keep_copy(self, step: int, unit: str, file: LayerFile) -> None:
        """Keep a file on this node's disk if there is space."""
        put = partial(self._cache.put, step, unit, file.data, sha256=file.sha256, durable=False)
        with contextlib.suppress(RunError):
            await asyncio.to_thread(put)

    async def _put(self, url: str, step: int, unit: str, data: bytes) -> None:
        """Store a layer in the run's object store. Retry a failing store for about a minute."""
        check_store(url, self._allows.store)
        if self._pacer is not None:
            for offset in range(0, len(data), CHUNK_BYTES):
                await self._pacer.pass_through(min(CHUNK_BYTES, len(data) - offset))
        for turn in range(STORE_TRIES):
            try:
                store = await asyncio.to_thread(ObjectStore, url)
                return await asyncio.to_thread(store.put, step, unit, data)
            except RunError as error:
                if turn + 1 == STORE_TRIES:
                    raise
                log.warning("%s; trying again", error)
                await asyncio.sleep(STORE_SECONDS)

    async def _get(self, place: LayerPlace, limit: int) -> bytes:
        """A layer from the run's object store, its SHA-256 checked. Raises RunError."""
        check_store(place.url, self._allows.store)
        store = await asyncio.to_thread(ObjectStore, place.url)
        file = await asyncio.to_thread(store.get, place.step, place.unit, min(limit, place.bytes) + 1)
        if file.sha256 != place.sha256:
            raise RunError(f"layer {place.unit} of step {place.step} is damaged in {place.url}")
        return file.data

    async def _prefetch(self, wanted: Prefetch) -> None:
        if wanted.step == 0:
            await self._prefetch_weights(wanted.units)
            return
        for unit in wanted.units:
            try:
                data, is_held = await self._fetch(wanted.step, unit)
                if is_held:
                    await self._hold(wanted.step, unit, data)
            except ThinwireError as error:
                log.warning("layer %s of step %d was not fetched ahead: %s", unit, wanted.step, error)
                return
        self._tell(f"holding the snapshot of step {wanted.step}, ready to take a stage")

    async def _prefetch_weights(self, units: Sequence[str]) -> None:
        """Prefetch weights from the hub into its cache, otherwise to this node's disk, unless they are in a
        local folder."""
        model = self._config.model
        if not model.from_.startswith(HUB):
            most = 4 * sum(spec.elements for unit in units for spec in parameter_specs(model, unit))
            if not await asyncio.to_thread(self._cache.has_room, most):
                return  # a stage would fetch them again anyway

        async def fetch(unit: str) -> None:
            await self.fetch_weights(unit)

        try:
            await several(() if self._allows.model is not None else units, fetch)
        except ThinwireError as error:
            log.warning("the checkpoint's weights were not fetched ahead: %s", error)
            return
        self._tell("holding weights of the checkpoint, ready to take a stage")

    async def _keep(self, step: int, units: list[str]) -> None:
        """Keep copies, and report those that cannot be kept, so that another node is asked."""
        for unit in units:
            try:
                data, _ = await self._fetch(step, unit)
                await self._hold(step, unit, data)
            except ThinwireError as error:
                log.warning("this node cannot keep a copy of layer %s of step %d: %s", unit, step, error)
                with contextlib.suppress(ThinwireError):
                    await self._client.hold_layers([], [(step, unit)])
            finally:
                self._keeping.discard((step, unit))

    async def _hold(self, step: int, unit: str, data: bytes) -> None:
        """Report a copy on this node's disk to the coordinator if a stage can start from it."""
        kept = await asyncio.to_thread(self._cache.get, step, unit)
        if kept is None:
            raise RunError(NO_ROOM)
        held = await asyncio.to_thread(self._held, step, unit, LayerFile(data, ""))
        for unknown in await self._client.hold_layers([held]):
            await asyncio.to_thread(self._cache.drop, *unknown)

    def _held(self, step: int, unit: str, file: LayerFile) -> HeldLayer:
        """The report of a file, after checking that a stage can start from it. Raises RunError."""
        alone = has_weights_alone(self._config, step)
        digest = checked_digest(self._config, self._windows, unit, file, weights_alone=alone)
        return HeldLayer(
            step=step,
            unit=unit,
            bytes=digest.bytes,
            sha256=digest.hash.sha256,
            weights_sha256=digest.weights_sha256,
        )

    async def _send(self, wanted: SendLayers) -> None:
        if self._witnessing is not None and self._witnessing[0] == wanted.step:
            await asyncio.wait([self._witnessing[1]])  # its files may still be being written
        for unit in wanted.units:
            if (kept := await asyncio.to_thread(self._cache.get, wanted.step, unit)) is None:
                await self._client.hold_layers([], [(wanted.step, unit)])
            elif wanted.place:
                held = await asyncio.to_thread(self._held, wanted.step, unit, kept)
                await self._put(wanted.place, wanted.step, unit, kept.data)
                await self._client.hold_layers([held])
            else:
                await self._client.put_layer(wanted.step, unit, kept)

    async def _offer(self) -> None:
        names = await asyncio.to_thread(self._cache.names)
        for first in range(0, len(names), MOST_HELD):
            layers = [HeldLayer(**name._asdict()) for name in names[first : first + MOST_HELD]]
            for step, unit in await self._client.hold_layers(layers):
                await asyncio.to_thread(self._cache.drop, step, unit)
        # Then check the hashes of the remaining layers; damaged ones are removed.
        for name in await asyncio.to_thread(self._cache.names):
            if await asyncio.to_thread(self._cache.get, name.step, name.unit) is None:
                log.warning("this node's copy of layer %s of step %d is damaged", name.unit, name.step)
                await self._client.hold_layers([], [(name.step, name.unit)])


def check_store(url: str, allowed: str) -> None:
    """Raise UserError if `url` is an object store that this machine's owner has not allowed."""
    if not is_url(url):
        return
    if (why := wrong_url(url)) is not None:
        raise UserError(f"{url[:200]} cannot hold snapshots: {why}")
    if not is_below(url, allowed):
        raise UserError(
            f"this run stores its snapshots in {url}, with the credentials of each machine's environment: "
            f"join with --store {url} to allow it"
        )


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """Ignore a failure, because the coordinator then asks another node."""
    try:
        await work
    except ThinwireError as error:
        log.warning("%s", error)


def _in_float32(file: bytes) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in deserialize_unit(file).items()}


def _as_state(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {f"{PARAMETER_PREFIX}{name}": torch.from_numpy(array) for name, array in weights.items()}
