"""Layers that nodes upload: complete ones count, whichever node sent them; attempts at a step do not mix."""

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from node.config.schema import ModelSection, RunConfig, SnapshotsSection
from node.coordinator import disk as disk_module
from node.coordinator import snapshot_handler
from node.coordinator.disk import Disk, check_room
from node.coordinator.kept_snapshots import SnapshotBook
from node.coordinator.snapshot_handler import (
    MOST_REPEATS,
    Agreement,
    NotDueError,
    SnapshotHandler,
    UploadPermit,
)
from node.coordinator.store import Store
from node.model.chunk import build_chunk
from node.model.units import unit_names
from node.schedule.placement import split_units, stage_units
from node.state.manifest import Manifest, unit_file
from node.state.serialization import deserialize_unit, serialize_unit
from node.state.snapshot import (
    WEIGHTS_FOLDER,
    Checked,
    NewFile,
    SnapshotFolder,
    list_models,
    list_snapshots,
)
from node.state.unit_state import LayerDigest, layout_of, parameters_of, read_tensors
from node.state.weights import CheckpointError
from node.training.optimizer import StageOptimizer
from node.view.totals import snapshots_need
from tests.support.snapshots import unit_hash
from wire.errors import (
    DiskFullError,
    NotYetError,
    ProtocolViolationError,
    RunError,
    UserError,
    WrongLayerError,
)
from wire.messages import CoordinatorMessage, SendLayers, UnitHash

MODEL = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, sequence=8)
CONFIG = RunConfig(model=MODEL)
UNITS = unit_names(MODEL)
SECONDS = 20.0
SEATS = ("node-a",)


def files(seed: int) -> dict[str, bytes]:
    """Every unit's file after an attempt at a step; another seed stands for another rounding."""
    chunks = [build_chunk(MODEL, units, seed, torch.device("cpu")) for units in split_units(MODEL, 1)]
    optimizer = StageOptimizer(chunks, CONFIG.training)
    return {unit: serialize_unit(optimizer.unit_state(unit)) for unit in UNITS}


class Told:
    """The run: keeps what it is told."""

    def __init__(self) -> None:
        self.stored: asyncio.Queue[Manifest] = asyncio.Queue()
        self.damaged: list[tuple[int, int]] = []
        """Steps of those found damaged, each with that of the newest that is whole."""
        self.gone: list[int] = []
        self.failed: list[str] = []
        self.received: list[tuple[int, str]] = []
        self.weights: list[int] = []
        """Steps whose weights are there."""
        self.said: list[str] = []
        self.sent: list[tuple[str, CoordinatorMessage]] = []
        self.disk = Disk(self.said.append, retry_seconds=0.01)
        self.fail = self.failed.append
        self.weights_stored = self.weights.append

    def addresses(self) -> dict[str, str]:
        return {}

    def record(self) -> dict[str, object]:
        return {}

    def send(self, node_id: str, message: CoordinatorMessage) -> None:
        self.sent.append((node_id, message))

    def layer_received(self, step: int, unit: str) -> None:
        self.received.append((step, unit))

    def snapshot_stored(self, manifest: Manifest, where: str, *, is_here: bool) -> None:
        assert is_here and where.endswith(f"{manifest.step:08d}")
        self.stored.put_nowait(manifest)

    def snapshot_gone(self, step: int, why: str) -> None:
        self.gone.append(step)

    def snapshot_lost(self, step: int, whole: int, text: str) -> None:
        self.damaged.append((step, whole))


@contextlib.asynccontextmanager
async def desk_at(directory: Path) -> AsyncIterator[tuple[SnapshotHandler, Told]]:
    told = Told()
    with Store.create(directory, run_id="run-1", config_json="{}", pin=b"p" * 32, now=0.0) as store:
        book = SnapshotBook(
            config=CONFIG, windows=1, directory=directory, run_id="run-1", store=store, disk=told.disk
        )
        handler = SnapshotHandler(book, told)
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            running = group.create_task(handler.run())
            yield handler, told
            running.cancel()


async def asked(handler: SnapshotHandler, step: int, made: Mapping[str, bytes], *rows: Sequence[str]) -> None:
    """A snapshot is asked for, and all agree what its layers are."""
    await handler.expect(step, rows or [SEATS])
    units = {unit: UnitHash(hashlib.sha256(data).hexdigest()) for unit, data in made.items()}
    handler.agreed(step, Agreement(units=units, alone=()))


async def hand_in(handler: SnapshotHandler, step: int, unit: str, data: bytes, node: str = SEATS[0]) -> None:
    await deliver(handler, handler.permit(node, step, unit), data)


async def deliver(handler: SnapshotHandler, permit: UploadPermit, data: bytes) -> None:
    """As the service does."""
    file = None
    if not permit.is_stored:
        file = await handler.arriving(permit, len(data))
        file.take(data)
    await handler.put(permit, file)


async def test_a_snapshot_that_is_complete_is_told_of_though_its_sender_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that ends while its last layer is being written has its call cancelled."""
    writing, go_on = threading.Event(), threading.Event()
    sync = NewFile.sync

    def slow(file: NewFile) -> None:
        if unit_file(UNITS[-1]) in file.path.name:
            writing.set()
            assert go_on.wait(SECONDS)
        sync(file)

    monkeypatch.setattr(NewFile, "sync", slow)
    async with desk_at(tmp_path) as (handler, told):
        made = files(0)
        await asked(handler, 4, made)
        for unit in UNITS[:-1]:
            await hand_in(handler, 4, unit, made[unit])
        last = asyncio.create_task(hand_in(handler, 4, UNITS[-1], made[UNITS[-1]]))
        assert await asyncio.to_thread(writing.wait, SECONDS)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert told.stored.empty()
        go_on.set()
        assert (await told.stored.get()).step == 4
    assert list_snapshots(tmp_path / "snapshots") == (4,)


async def test_a_repeated_upload_has_nothing_of_the_earlier_attempt(tmp_path: Path) -> None:
    first, second = files(0), files(1)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, first)
        await hand_in(handler, 4, UNITS[0], first[UNITS[0]])
        await asked(handler, 4, second)
        for unit in UNITS[1:]:
            await hand_in(handler, 4, unit, second[unit])
        assert told.stored.empty()
        await hand_in(handler, 4, UNITS[0], second[UNITS[0]])
        manifest = await told.stored.get()
        for unit in UNITS:
            assert manifest.entry(unit).sha256 == hashlib.sha256(second[unit]).hexdigest()
        # Complete is complete: another attempt does not change it.
        await asked(handler, 4, first)
        with pytest.raises(ProtocolViolationError, match="differs from the complete snapshot"):
            await hand_in(handler, 4, UNITS[0], first[UNITS[0]])


async def test_a_full_disk_pauses_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that sends a layer meanwhile is told to send it again, and nothing of it is kept."""
    made, arriving, room = files(0), SnapshotFolder.arriving, threading.Event()

    def full(folder: SnapshotFolder, step: int, unit: str, size: int) -> NewFile:
        if not room.is_set():
            raise DiskFullError("disk full: head.safetensors needs 9 bytes")
        return arriving(folder, step, unit, size)

    monkeypatch.setattr(SnapshotFolder, "arriving", full)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made)
        for unit in UNITS:
            with pytest.raises(NotYetError):
                await hand_in(handler, 4, unit, made[unit])
        waits = asyncio.create_task(told.disk.room())
        await asyncio.sleep(0)
        assert told.stored.empty() and not waits.done() and told.disk.is_full
        room.set()
        await waits
        assert not told.disk.is_full
        while [*(tmp_path / "snapshots").iterdir()]:  # noqa: ASYNC110 - the file of the upload that waited
            await asyncio.sleep(0)
        for unit in UNITS:
            await hand_in(handler, 4, unit, made[unit])
        assert (await told.stored.get()).step == 4
        assert told.failed == []
        assert len(told.said) == 2, "that it pauses, and that it goes on"


async def test_an_upload_that_is_cancelled_as_its_file_fails_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another layer's error has just ended the run."""

    async def fails(*_: object) -> NewFile:
        raise RunError("File too large")

    unread: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: unread.append(error))
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, files(0))
        monkeypatch.setattr(told.disk, "write", fails)
        upload = asyncio.create_task(handler.arriving(handler.permit(SEATS[0], 4, UNITS[0]), 9))
        for _ in range(2):  # the second time the file has failed, and the upload does not know it
            await asyncio.sleep(0)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        del upload
        await asyncio.sleep(0)
        gc.collect()
    assert not unread


async def test_the_disk_takes_several_layers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, together, fsync = files(0), threading.Barrier(2, timeout=SECONDS / 2), os.fsync
    at_once = iter(range(2))

    def meet(file: int) -> None:
        if next(at_once, None) is not None:
            together.wait()
        fsync(file)

    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made)
        monkeypatch.setattr(os, "fsync", meet)
        await asyncio.gather(*(hand_in(handler, 4, unit, made[unit]) for unit in UNITS))
        assert (await told.stored.get()).step == 4 and told.failed == []
    assert list_snapshots(tmp_path / "snapshots") == (4,)


async def test_a_run_that_ends_at_once_waits_for_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise DiskFullError("disk full")

    monkeypatch.setattr(SnapshotFolder, "arriving", full)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, files(0))
        with pytest.raises(NotYetError):
            await hand_in(handler, 4, UNITS[0], files(0)[UNITS[0]])
        told.disk.give_up()
        await told.disk.room()
        with pytest.raises(RunError, match="disk full"):
            await hand_in(handler, 4, UNITS[0], files(0)[UNITS[0]])
        assert told.failed == ["disk full"]


async def test_an_upload_whose_node_leaves_is_not_kept(tmp_path: Path) -> None:
    async with desk_at(tmp_path) as (handler, _):
        await handler.expect(4, [SEATS])
        sender = asyncio.create_task(hand_in(handler, 4, UNITS[0], files(0)[UNITS[0]]))
        while not [*(tmp_path / "snapshots").glob(".*.tmp")]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        sender.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender
        # At once, or when the thread that made the file has said so.
        while [*(tmp_path / "snapshots").iterdir()]:  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_disk_needed_for_snapshots_is_known_before_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, most = snapshots_need(CONFIG)
    assert most == (CONFIG.run.keep_snapshots + 1) * one

    def free(count: int) -> None:
        monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=count))

    free(most)
    assert check_room(CONFIG, tmp_path) is None
    free(most - 1)
    assert "set run.keep_snapshots lower" in str(check_room(CONFIG, tmp_path))
    assert check_room(CONFIG, tmp_path, held=1) is None
    free(2 * one - 1)
    with pytest.raises(UserError, match="two must fit"):
        check_room(CONFIG, tmp_path)
    # Where nodes keep the layers, only the last snapshot comes here, or none.
    kept = replace(CONFIG, snapshots=SnapshotsSection(keep="nodes"))
    free(one)
    assert check_room(kept, tmp_path) is None
    free(one - 1)
    with pytest.raises(UserError, match="the last one must fit"):
        check_room(kept, tmp_path)
    free(0)
    assert check_room(replace(CONFIG, snapshots=replace(kept.snapshots, last_here=False)), tmp_path) is None


def header(tensors: object, data: bytes = b"") -> bytes:
    """A safetensors file with this header, sound or not."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = (
    header({"x": {"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}}, bytes(4)),
    header({"x": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}),
    header({"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, bytes(1)),
    header([]),
)


@pytest.mark.parametrize("data", HOSTILE)
async def test_a_file_that_numpy_refuses_is_its_senders_error(tmp_path: Path, data: bytes) -> None:
    made = files(0)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, {**made, UNITS[0]: data})
        with pytest.raises(ProtocolViolationError, match="cannot be read"):
            await hand_in(handler, 4, UNITS[0], data)
        await asked(handler, 4, made)
        for unit in UNITS:
            await hand_in(handler, 4, unit, made[unit])
        assert (await told.stored.get()).step == 4 and told.failed == []


@pytest.mark.parametrize("alone", [False, True])
async def test_a_layer_that_nobody_agreed_on_replaces_nothing(tmp_path: Path, *, alone: bool) -> None:
    """Another file, no file at all, and sums that are not the file's."""
    made, other = files(0), files(1)
    unit = UNITS[0]
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made)
        for data in (other[unit], b"no file"):
            permit = handler.permit(SEATS[0], 4, unit)
            assert permit is not None
            with pytest.raises(WrongLayerError) as error:
                await deliver(handler, permit, data)
            assert (error.value.node_id, error.value.step, error.value.unit) == (SEATS[0], 4, unit)
        said = {name: unit_hash(load(data)) for name, data in made.items()}
        lie = {**said, unit: said[unit]._replace(weights=2 * said[unit].weights)}
        await handler.expect(4, [SEATS])
        handler.agreed(4, Agreement(units=lie, alone=UNITS if alone else ()))
        if alone:
            with pytest.raises(WrongLayerError):
                await hand_in(handler, 4, unit, made[unit])
        await handler.expect(4, [SEATS])
        waiting = asyncio.create_task(hand_in(handler, 4, unit, made[unit]))
        handler.agreed(4, Agreement(units=said, alone=UNITS if alone else ()))
        await waiting
        for name in UNITS:
            await hand_in(handler, 4, name, made[name])
        assert told.stored.qsize() == 1 and told.failed == []


async def test_a_snapshot_that_is_dropped_or_refused_is_gone(tmp_path: Path) -> None:
    made = files(0)
    async with desk_at(tmp_path) as (handler, told):
        await stored(handler, told, 4)
        await handler.expect(8, [SEATS])
        waiting = asyncio.create_task(hand_in(handler, 8, UNITS[0], made[UNITS[0]]))
        await handler.drop(8)
        await waiting  # nobody is at fault, and nothing is stored
        assert list_snapshots(tmp_path / "snapshots") == (4,)
        await stored(handler, told, 8)
        await handler.refuse(8)
        assert list_snapshots(tmp_path / "snapshots") == (4,)
        await stored(handler, told, 8)


async def test_an_unexpected_error_is_also_counted_for_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = files(0)

    def broken(*_: object) -> Path:
        raise ZeroDivisionError("what nobody foresaw")

    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made)
        with monkeypatch.context() as patch:
            patch.setattr(NewFile, "sync", broken)
            with pytest.raises(RunError, match=f"could not store layer {UNITS[0]} of step 4: see its log"):
                await hand_in(handler, 4, UNITS[0], made[UNITS[0]])
        assert "Traceback" in caplog.text and "what nobody foresaw" in caplog.text
        for unit in UNITS:
            await hand_in(handler, 4, unit, made[unit])
        assert (await told.stored.get()).step == 4 and told.failed == []


async def test_a_disk_error_ends_the_run_even_if_the_sender_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def full(*_: object) -> Path:
        writing.set()
        assert go_on.wait(SECONDS)
        raise RunError("the disk is full")

    monkeypatch.setattr(NewFile, "sync", full)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, files(0))
        sender = asyncio.create_task(hand_in(handler, 4, UNITS[0], files(0)[UNITS[0]]))
        assert await asyncio.to_thread(writing.wait, SECONDS)
        sender.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sender
        again = asyncio.create_task(hand_in(handler, 4, UNITS[0], files(0)[UNITS[0]]))
        go_on.set()
        with pytest.raises(RunError, match="the disk is full"):
            await again
        while len(told.failed) < 2:  # noqa: ASYNC110 - the first sender is gone
            await asyncio.sleep(0)
        assert told.failed == ["the disk is full"] * 2


async def test_a_layer_is_its_hosts_to_hand_in(tmp_path: Path) -> None:
    """Of the epoch that asked last, over or not; a coordinator that was started again must ask itself."""
    made = files(0)
    async with desk_at(tmp_path) as (handler, told):
        with pytest.raises(NotDueError, match="of step 4"):
            await hand_in(handler, 4, UNITS[0], made[UNITS[0]])
        first, last = stage_units(CONFIG, 2)
        await asked(handler, 4, made, ("node-a", "node-b"))
        for node, foreign in (("node-a", last), ("node-b", first), ("node-spare", UNITS)):
            for unit in foreign:
                with pytest.raises(NotDueError, match="must come from another node"):
                    await hand_in(handler, 4, unit, made[unit], node)
        await hand_in(handler, 4, first[0], made[first[0]], "node-a")
        # Requested again, of other nodes: what is on its way of the earlier attempt is not stored.
        begun = handler.permit("node-b", 4, last[0])
        await asked(handler, 4, made, ("node-b", "node-c"))
        with pytest.raises(NotDueError, match="requested again"):
            data = made[last[0]]
            await deliver(handler, begun, data)
        with pytest.raises(ProtocolViolationError, match="must come from another node"):
            await hand_in(handler, 4, first[0], made[first[0]], "node-a")
        for node, units in (("node-c", last), ("node-b", first)):
            for unit in units:
                await hand_in(handler, 4, unit, made[unit], node)
        assert (await told.stored.get()).step == 4
        # A reply was lost, so that a node hands in again; a few times.
        for _ in range(MOST_REPEATS - 1):
            await hand_in(handler, 4, last[0], made[last[0]], "node-c")
        with pytest.raises(ProtocolViolationError, match="has arrived 3 times"):
            await hand_in(handler, 4, last[0], made[last[0]], "node-c")


async def test_what_came_of_a_refused_attempt_is_removed(tmp_path: Path) -> None:
    made = files(0)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made)
        await hand_in(handler, 4, UNITS[0], made[UNITS[0]])
        begun = handler.permit(SEATS[0], 4, UNITS[1])
        await handler.refused(begun)
        assert list((tmp_path / "snapshots").iterdir()) == []
        with pytest.raises(NotDueError, match="requested again"):
            await deliver(handler, begun, made[UNITS[1]])
        await stored(handler, told, 4)
        await handler.refused(begun)  # a later attempt, or a snapshot that is complete, stays
        assert list_snapshots(tmp_path / "snapshots") == (4,)


async def test_a_refused_layer_is_asked_of_another_row_at_once(tmp_path: Path) -> None:
    """With all that its sender still has to hand in; what has come of others stays."""
    made = files(0)
    first, second = stage_units(CONFIG, 2)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made, ("node-a", "node-b"), ("node-c", "node-d"))
        await hand_in(handler, 4, first[0], made[first[0]], "node-a")
        for unit in second:
            await hand_in(handler, 4, unit, made[unit], "node-b")
        # Two at a time, as nodes do: the next row is asked once, and is no target of the first one's.
        refused = [handler.permit("node-a", 4, first[1]), handler.permit("node-a", 4, first[1])]
        for permit in refused:
            await handler.refused(permit)
        assert told.sent == [("node-c", SendLayers(step=4, units=first[1:]))]
        assert told.received[-len(first[1:]) :] == [(4, unit) for unit in first[1:]], (
            "nobody waits for node-a"
        )
        with pytest.raises(NotDueError):
            handler.permit("node-a", 4, first[1])
        for unit in first[1:]:
            await hand_in(handler, 4, unit, made[unit], "node-c")
        assert (await told.stored.get()).step == 4


async def test_a_layer_that_all_rows_hand_in_wrong_is_given_up(tmp_path: Path) -> None:
    made = files(0)
    async with desk_at(tmp_path) as (handler, told):
        await asked(handler, 4, made, ("node-a",), ("node-b",))
        for node in ("node-a", "node-b"):
            permit = handler.permit(node, 4, UNITS[0])
            with pytest.raises(WrongLayerError):
                await deliver(handler, permit, files(1)[UNITS[0]])
            await handler.refused(permit)
        with pytest.raises(NotDueError, match="was requested"):
            handler.permit("node-b", 4, UNITS[0])
        assert told.sent == [("node-b", SendLayers(step=4, units=UNITS))]


async def test_remains_of_older_snapshots_are_removed_with_the_next_complete_one(tmp_path: Path) -> None:
    made = files(0)
    root = tmp_path / "snapshots"

    def on_disk() -> list[str]:
        return sorted(path.name for path in root.iterdir())

    async with desk_at(tmp_path) as (handler, told):
        for partial in (1, 2, 3, 5, 9):
            await asked(handler, partial, made)
            await hand_in(handler, partial, UNITS[0], made[UNITS[0]])
        # Without one that is complete, those of many attempts do not pile up.
        assert on_disk() == ["step-00000003", "step-00000005", "step-00000009"]
        begun = handler.permit(SEATS[0], 5, UNITS[1])
        await asked(handler, 7, made)
        for unit in UNITS:
            await hand_in(handler, 7, unit, made[unit])
        assert (await told.stored.get()).step == 7
        # One that is newer goes on.
        assert on_disk() == ["step-00000007", "step-00000009"]
        # What still comes of older ones is of no use, and no error: that would end its node's epoch.
        assert handler.permit(SEATS[0], 5, UNITS[1]).is_stored
        data = made[UNITS[1]]
        await deliver(handler, begun, data)
        assert on_disk() == ["step-00000007", "step-00000009"]
        for unit in UNITS[1:]:
            await hand_in(handler, 9, unit, made[unit])
        assert (await told.stored.get()).step == 9
        assert list_snapshots(root) == (7, 9)


async def stored(handler: SnapshotHandler, told: Told, step: int) -> None:
    await asked(handler, step, files(0))
    for unit, data in files(0).items():
        await hand_in(handler, step, unit, data)
    assert (await told.stored.get()).step == step


async def served(handler: SnapshotHandler, step: int, unit: str) -> bytes:
    file = await (await handler.layer(step, unit)).open()
    return file.read(0, file.size)


async def test_a_damaged_layer_is_reported_and_an_older_snapshot_is_used(
    tmp_path: Path,
) -> None:
    async with desk_at(tmp_path) as (handler, told):
        await stored(handler, told, 5)
        await stored(handler, told, 7)
        path = handler.path(7) / "head.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        for _ in range(2):
            with pytest.raises(RunError):
                await served(handler, 7, "head")
        assert told.damaged == [(7, 5)] and told.failed == []
        assert list_snapshots(tmp_path / "snapshots") == (5,)
        assert await served(handler, 5, "head")
        # The run comes to steps again that were stored: they are stored again, not let pass.
        await stored(handler, told, 6)
        await stored(handler, told, 7)
        assert await served(handler, 7, "head")


async def test_a_damaged_layer_of_an_older_snapshot_does_not_matter(tmp_path: Path) -> None:
    async with desk_at(tmp_path) as (handler, told):
        await stored(handler, told, 5)
        await stored(handler, told, 7)
        (handler.path(5) / "head.safetensors").unlink()
        with pytest.raises(RunError):
            await served(handler, 5, "head")
        assert told.damaged == [] and list_snapshots(tmp_path / "snapshots") == (7,)


async def test_a_damaged_layer_with_nothing_to_go_back_to(tmp_path: Path) -> None:
    async with desk_at(tmp_path) as (handler, told):
        await stored(handler, told, 7)
        (handler.path(7) / "manifest.json").write_text("{")
        with pytest.raises(RunError):
            await handler.layer(7, "head")
        assert told.damaged == [(7, 0)] and list_snapshots(tmp_path / "snapshots") == (7,)


async def test_a_damaged_layer_is_reported_even_if_its_node_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would go back, again and again, to a snapshot that is aside."""
    began, gate, check = threading.Event(), threading.Event(), snapshot_handler.set_damaged_aside

    def slow(directory: Path) -> Checked:
        began.set()
        assert gate.wait(SECONDS)
        return check(directory)

    monkeypatch.setattr(snapshot_handler, "set_damaged_aside", slow)
    async with desk_at(tmp_path) as (handler, told):
        await stored(handler, told, 5)
        await stored(handler, told, 7)
        (handler.path(7) / "head.safetensors").unlink()
        asking = asyncio.create_task(served(handler, 7, "head"))
        await asyncio.to_thread(began.wait, SECONDS)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() and told.damaged == []
        gate.set()
        await stored(handler, told, 9)
        assert told.damaged == [(7, 5)]


async def test_the_weights_of_the_checkpoint_that_the_run_starts_from_are_served_as_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk_at(tmp_path) as (handler, _):
        with pytest.raises(RunError, match="the run starts from its seed"):
            await handler.layer(0, "head")
        monkeypatch.setattr(handler, "_config", replace(CONFIG, model=replace(MODEL, from_="somewhere")))
        reads: list[str] = []

        async def read(
            model: ModelSection, units: list[str], *, as_stored: bool
        ) -> dict[str, dict[str, np.ndarray]]:
            reads.extend(units)
            return {unit: {"norm.weight": np.full(3, len(unit), np.float32)} for unit in units}

        monkeypatch.setattr(snapshot_handler, "read_units", read)
        for unit in ("head", "embed", "head"):
            layer = await handler.layer(0, unit)
            entry, file = layer.entry, await layer.open()
            data = file.read(0, file.size)
            assert entry.bytes == len(data) and entry.sha256 == hashlib.sha256(data).hexdigest()
            assert deserialize_unit(data)["parameter.norm.weight"].tolist() == 3 * [len(unit)]
        assert reads == ["head", "embed", "head"], "each is read once for its entry and its bytes"


async def test_weights_of_a_checkpoint_that_has_changed_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by this coordinator nor by one that resumes the run."""
    value = 1.0

    async def read(*_: object, as_stored: bool) -> dict[str, dict[str, np.ndarray]]:
        return {"head": {"norm.weight": np.full(3, value, np.float32)}}

    monkeypatch.setattr(snapshot_handler, "read_units", read)
    async with desk_at(tmp_path) as (handler, _):
        monkeypatch.setattr(handler, "_config", replace(CONFIG, model=replace(MODEL, from_="somewhere")))
        await served(handler, 0, "head")
        value = 2.0
        with pytest.raises(CheckpointError, match="head in somewhere"):
            await served(handler, 0, "head")
        value = 1.0
        await served(handler, 0, "head")
        monkeypatch.setattr(handler, "_first_entries", {})
        value = 2.0
        with pytest.raises(CheckpointError, match="head in somewhere"):
            await handler.layer(0, "head")


LAST = CONFIG.run.steps


class Ahead:
    """A layer's file whose weights go ahead of the rest."""

    def __init__(self, data: bytes) -> None:
        tensors = load(data)
        digest = LayerDigest(layout_of(tensors), weights_first=True)
        for name in digest.order:
            digest.add(name, tensors[name])
        assert digest.weights is not None
        self.at, self.hash, self.data = digest.weights_at, digest.hash, data
        end = self.at + digest.weights.bytes - len(digest.weights.head)
        self.weights = digest.weights.head + data[self.at : end]
        self.rest = data[: self.at] + data[end:]
        assert hashlib.sha256(self.weights).hexdigest() == self.hash.weights_sha256


async def send_weights(handler: SnapshotHandler, unit: str, layer: Ahead) -> None:
    permit = handler.permit(SEATS[0], LAST, unit, weights_alone=True)
    await deliver(handler, permit, layer.weights)


async def send_rest(handler: SnapshotHandler, unit: str, layer: Ahead) -> None:
    permit = handler.permit(SEATS[0], LAST, unit)
    ahead = await handler.weights_ahead(permit)
    weights = ahead.read(0, ahead.size)
    await deliver(handler, permit, layer.rest[: layer.at] + weights + layer.rest[layer.at :])


async def test_the_model_of_the_last_step_is_there_before_the_optimizers_state(tmp_path: Path) -> None:
    layers = {unit: Ahead(data) for unit, data in files(0).items()}
    async with desk_at(tmp_path) as (handler, told):
        with pytest.raises(ProtocolViolationError, match="are not sent ahead"):
            await asked(handler, 4, files(0))
            handler.permit(SEATS[0], 4, UNITS[0], weights_alone=True)
        await handler.expect(LAST, [SEATS])
        handler.agreed(LAST, Agreement(units={unit: one.hash for unit, one in layers.items()}, alone=()))
        for unit in UNITS:
            assert told.weights == []
            await send_weights(handler, unit, layers[unit])
        await send_weights(handler, UNITS[0], layers[UNITS[0]])  # again: the answer was lost
        assert told.weights == [LAST] and told.received == [], "whole layers are waited for"
        model = list_models(tmp_path)[LAST]
        assert model.parent == tmp_path / WEIGHTS_FOLDER and list_snapshots(tmp_path / "snapshots") == ()
        for unit in UNITS:
            found = parameters_of(read_tensors((model / f"{unit}.safetensors").read_bytes()))
            whole = parameters_of(load(layers[unit].data))
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in whole.items()
            }
            await send_rest(handler, unit, layers[unit])
        assert (await told.stored.get()).step == LAST
        for unit in UNITS:
            assert await served(handler, LAST, unit) == layers[unit].data
        assert list_models(tmp_path) == {LAST: handler.path(LAST)} and not model.exists()


async def test_only_weights_that_were_agreed_on_go_ahead(tmp_path: Path) -> None:
    right, wrong = ({unit: Ahead(data) for unit, data in files(seed).items()} for seed in (0, 1))
    async with desk_at(tmp_path) as (handler, told):
        await handler.expect(LAST, [SEATS])
        handler.agreed(LAST, Agreement(units={unit: one.hash for unit, one in right.items()}, alone=()))
        with pytest.raises(WrongLayerError):
            await send_weights(handler, UNITS[0], wrong[UNITS[0]])
        with pytest.raises(NotDueError):
            await send_rest(handler, UNITS[0], right[UNITS[0]])
        await send_weights(handler, UNITS[0], right[UNITS[0]])
        wrong[UNITS[0]].rest = right[UNITS[0]].rest[:-4] + bytes([0, 0, 128, 63])
        with pytest.raises(WrongLayerError):
            await send_rest(handler, UNITS[0], wrong[UNITS[0]])
        assert told.weights == [] and told.stored.empty()


async def test_who_holds_a_layer_alone_cannot_hand_in_other_weights_ahead_of_it(tmp_path: Path) -> None:
    right, other = (Ahead(files(seed)[UNITS[0]]) for seed in (0, 1))
    said = right.hash._replace(weights=other.hash.weights, weights_sha256=other.hash.weights_sha256)
    async with desk_at(tmp_path) as (handler, _):
        await handler.expect(LAST, [SEATS])
        handler.agreed(LAST, Agreement(units={UNITS[0]: said}, alone=[UNITS[0]]))
        await send_weights(handler, UNITS[0], other)
        with pytest.raises(WrongLayerError):
            await deliver(handler, handler.permit(SEATS[0], LAST, UNITS[0]), right.data)


async def test_another_attempt_at_the_last_step_begins_without_the_weights_of_the_one_before(
    tmp_path: Path,
) -> None:
    first, second = ({unit: Ahead(data) for unit, data in files(seed).items()} for seed in (0, 1))
    async with desk_at(tmp_path) as (handler, told):
        for layers in (first, second):
            await handler.expect(LAST, [SEATS])
            assert list_models(tmp_path) == {}
            units = {unit: one.hash for unit, one in layers.items()}
            handler.agreed(LAST, Agreement(units=units, alone=()))
            for unit in UNITS:
                await send_weights(handler, unit, layers[unit])
        assert told.weights == [LAST, LAST]
        for unit in UNITS:
            await send_rest(handler, unit, second[unit])
        assert await served(handler, LAST, UNITS[0]) == second[UNITS[0]].data
