"""Layers that nodes hand in: what has come whole counts, whoever sent it; attempts at a step do not mix."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from node.config.schema import ModelSection, RunConfig
from node.coordinator.snapshot_desk import SnapshotDesk
from node.coordinator.store import Store
from node.model.chunk import build_chunk
from node.model.split import split_units
from node.model.units import unit_names
from node.training.manifest import Manifest
from node.training.optimizer import StageOptimizer
from node.training.serialization import serialize_unit
from node.training.snapshot import SnapshotWriter, list_snapshots
from wire.errors import ProtocolViolationError, RunError

MODEL = ModelSection(layers=1, hidden=16, heads=2, kv_heads=1, ffn=24, vocab=31, sequence=8)
CONFIG = RunConfig(model=MODEL)
UNITS = unit_names(MODEL)
SECONDS = 20.0


def files(seed: int) -> dict[str, bytes]:
    """Every unit's file after an attempt at a step; another seed stands for another rounding."""
    chunks = [build_chunk(MODEL, units, seed, torch.device("cpu")) for units in split_units(MODEL, 1)]
    optimizer = StageOptimizer(chunks, CONFIG.training)
    return {unit: serialize_unit(optimizer.unit_state(unit)) for unit in UNITS}


class Told:
    """What the desk tells the run."""

    def __init__(self) -> None:
        self.stored: asyncio.Queue[Manifest] = asyncio.Queue()
        self.failed: list[str] = []


@contextlib.asynccontextmanager
async def desk_at(directory: Path) -> AsyncIterator[tuple[SnapshotDesk, Told]]:
    told = Told()
    with Store.create(directory, run_id="run-1", config_json="{}", pin=b"p" * 32, now=0.0) as store:
        desk = SnapshotDesk(
            config=CONFIG,
            windows=1,
            directory=directory / "snapshots",
            run_id="run-1",
            store=store,
            stored=told.stored.put_nowait,
            failed=told.failed.append,
        )
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            running = group.create_task(desk.run())
            yield desk, told
            running.cancel()


async def hand_in(desk: SnapshotDesk, step: int, unit: str, data: bytes) -> None:
    await desk.put(step, unit, data, hashlib.sha256(data).hexdigest())


async def test_a_snapshot_that_is_complete_is_told_of_though_its_sender_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that ends while its last layer is being written has its call cancelled."""
    writing, go_on = threading.Event(), threading.Event()
    put = SnapshotWriter.put

    def slow(writer: SnapshotWriter, step: int, unit: str, data: bytes, digest: str) -> Manifest | None:
        if unit == UNITS[-1]:
            writing.set()
            assert go_on.wait(SECONDS)
        return put(writer, step, unit, data, digest)

    monkeypatch.setattr(SnapshotWriter, "put", slow)
    async with desk_at(tmp_path) as (desk, told):
        await desk.expect(4)
        made = files(0)
        for unit in UNITS[:-1]:
            await hand_in(desk, 4, unit, made[unit])
        last = asyncio.create_task(hand_in(desk, 4, UNITS[-1], made[UNITS[-1]]))
        assert await asyncio.to_thread(writing.wait, SECONDS)
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        assert told.stored.empty()
        go_on.set()
        assert (await told.stored.get()).step == 4
    assert list_snapshots(tmp_path / "snapshots") == (4,)


async def test_a_step_that_is_uploaded_anew_has_nothing_of_the_earlier_attempt(tmp_path: Path) -> None:
    first, second = files(0), files(1)
    async with desk_at(tmp_path) as (desk, told):
        await desk.expect(4)
        await hand_in(desk, 4, UNITS[0], first[UNITS[0]])
        await desk.expect(4)
        for unit in UNITS[1:]:
            await hand_in(desk, 4, unit, second[unit])
        assert told.stored.empty()
        await hand_in(desk, 4, UNITS[0], second[UNITS[0]])
        manifest = await told.stored.get()
        for unit in UNITS:
            assert manifest.entry(unit).sha256 == hashlib.sha256(second[unit]).hexdigest()
        # Complete is complete: another attempt does not change it.
        await desk.expect(4)
        with pytest.raises(ProtocolViolationError, match="differs from the complete snapshot"):
            await hand_in(desk, 4, UNITS[0], first[UNITS[0]])


async def test_a_refusal_is_its_senders_and_the_next_upload_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files(0)
    async with desk_at(tmp_path) as (desk, told):
        await desk.expect(4)
        with pytest.raises(ProtocolViolationError, match="damaged on the way"):
            await desk.put(4, UNITS[0], made[UNITS[0]], "0" * 64)
        assert told.failed == []

        def full(*_: object) -> Manifest | None:
            raise RunError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(SnapshotWriter, "put", full)
            with pytest.raises(RunError, match="the disk is full"):
                await hand_in(desk, 4, UNITS[0], made[UNITS[0]])
        assert told.failed == ["the disk is full"]
        for unit in UNITS:
            await hand_in(desk, 4, unit, made[unit])
        assert (await told.stored.get()).step == 4
