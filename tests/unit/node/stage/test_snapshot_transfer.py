"""A node's layers on their way: fetched once, held ready, and sent without piling up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from node.config.join_options import OwnerAllows
from node.config.schema import ModelSection, RunConfig
from node.stage import snapshot_transfer
from node.stage.coordinator_client import CoordinatorClient
from node.stage.layer_peers import LayerPeers, LayerPlace
from node.stage.snapshot_transfer import SnapshotTransfer
from node.stage.state_copy import StateCopy
from node.state.manifest import LayerFile, LayerSource
from node.state.serialization import deserialize_unit, serialize_unit
from node.state.snapshot_cache import SnapshotCache
from node.state.unit_state import weights_file
from node.training.optimizer import StateTensor
from wire.errors import DataError, LinkLostError
from wire.messages import (
    NODES,
    FailureKind,
    HeldLayer,
    NodeMessage,
    Prefetch,
    SendLayers,
    StateHashes,
    StepFailed,
    TakeSnapshot,
)

SECONDS = 20.0
MODEL = ModelSection(layers=1)
NOTHING = OwnerAllows()
UNITS = ("embed", "head")


def state() -> StateCopy:
    tensors = (torch.ones(2), torch.zeros(2))
    return StateCopy(
        (unit, {"parameter.weight": StateTensor(one, one.dtype)})
        for unit, one in zip(UNITS, tensors, strict=True)
    )


class Coordinator:
    """Stands in for the client: `asked` and `stored` in order; transfers wait while `open` is clear."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.stored: list[tuple[int, str]] = []
        self.came: list[tuple[str, bool, int, bytes]] = []
        """Of each layer that is stored: the unit, how it came, and its bytes."""
        self.begun: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        self.open = asyncio.Event()
        self.open.set()
        self.lost = False
        self.files: dict[tuple[int, str], bytes] = {}
        """Layers that are no mere names."""
        self.held: list[str] = []
        self.kept = 0
        """Layers that needed no sending."""

    async def layer(
        self, step: int, unit: str, limit: int, kept: LayerFile | None = None, bad: Collection[str] = ()
    ) -> LayerFile:
        self.asked.append((step, unit))
        self.begun.put_nowait((step, unit))
        if self.lost:
            raise LinkLostError("nobody answers")
        await self.open.wait()
        data = self.files.get((step, unit), f"{step} {unit}".encode())
        if kept is not None and kept.sha256 == sha256(data).hexdigest():
            self.kept += 1
            return kept
        return LayerFile.of(data)

    async def hold_layers(self, held: list[HeldLayer]) -> None:
        self.held += [layer.unit for layer in held]

    async def put_layer(
        self, step: int, unit: str, file: LayerSource, *, weights_alone: bool = False, weights_at: int = 0
    ) -> None:
        self.begun.put_nowait((step, unit))
        if self.lost:
            raise LinkLostError("nobody answers")
        await self.open.wait()
        self.stored.append((step, unit))
        self.came.append((unit, weights_alone, weights_at, file.read(0, file.size)))


class Scene:
    def __init__(
        self,
        directory: Path,
        group: asyncio.TaskGroup,
        model: ModelSection = MODEL,
        allows: OwnerAllows = NOTHING,
        room: int = 10**6,
    ) -> None:
        self.coordinator = Coordinator()
        self.peers = None
        self.cache = SnapshotCache(directory, room)
        self.posted: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.transfer = SnapshotTransfer(
            config=RunConfig(model=model),
            windows=0,
            client=cast(CoordinatorClient, self.coordinator),
            cache=self.cache,
            peers=cast(LayerPeers, self.peers),
            allows=allows,
            pacer=None,
            group=group,
            post=self.posted.put_nowait,
            tell=self.told.put_nowait,
        )

    def failures(self) -> list[NodeMessage]:
        """What was posted besides hashes."""
        posted = [self.posted.get_nowait() for _ in range(self.posted.qsize())]
        return [message for message in posted if not isinstance(message, StateHashes)]

    async def begun(self) -> tuple[int, str]:
        """The next layer that the coordinator is asked for, or to take."""
        async with asyncio.timeout(SECONDS):
            return await self.coordinator.begun.get()


@contextlib.asynccontextmanager
async def scene(
    directory: Path, model: ModelSection = MODEL, allows: OwnerAllows = NOTHING, room: int = 10**6
) -> AsyncIterator[Scene]:
    """Leaving it waits for all transfers, so that a test ends with what they have done."""
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        yield Scene(directory, group, model, allows, room)


async def test_a_layer_is_fetched_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        assert await here.transfer.fetch(3, "embed") == b"3 embed"
        assert here.coordinator.kept == 0
        assert await here.transfer.fetch(3, "embed") == b"3 embed"
        assert here.coordinator.kept == 1


async def test_a_layer_of_a_snapshot_that_never_was_is_not_used(tmp_path: Path) -> None:
    """What this node sent was of an attempt that others did not end: the step was come to otherwise."""
    async with scene(tmp_path) as here:
        here.transfer.take(1, TakeSnapshot(epoch=1, step=3), state(), stage=0)
    assert await here.transfer.fetch(3, "head") == b"3 head"
    assert await here.transfer.fetch(3, "head") == b"3 head"
    assert here.coordinator.kept == 1, "the right one is kept in its place"


async def test_tensors_in_flight_and_arrived_are_known(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        assert not here.transfer.uploading(3) and not here.transfer.sending
        here.coordinator.open.clear()
        here.transfer.take(1, TakeSnapshot(epoch=1, step=3), state(), stage=0)
        await here.begun()
        assert here.transfer.uploading(3) and here.transfer.sending
        here.coordinator.open.set()
    assert here.transfer.uploading(3) and not here.transfer.sending
    async with asyncio.TaskGroup() as group:
        lost = Scene(tmp_path, group)
        lost.coordinator.lost = True
        lost.transfer.take(1, TakeSnapshot(epoch=1, step=3), state(), stage=0)
    assert not lost.transfer.uploading(3) and not lost.transfer.sending


async def test_the_oldest_of_three_pending_snapshots_is_dropped(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.open.clear()
        for step in (3, 6, 9):
            here.transfer.take(1, TakeSnapshot(epoch=1, step=step), state(), stage=0)
            assert {await here.begun(), await here.begun()} == {(step, unit) for unit in UNITS}
        here.coordinator.open.set()
    assert sorted(here.coordinator.stored) == [(step, unit) for step in (6, 9) for unit in UNITS]


async def test_a_snapshot_that_is_asked_for_again_starts_over(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.open.clear()
        for epoch in (1, 2):
            here.transfer.take(epoch, TakeSnapshot(epoch=epoch, step=3), state(), stage=0)
            assert {await here.begun(), await here.begun()} == {(3, unit) for unit in UNITS}
        here.coordinator.open.set()
    assert sorted(here.coordinator.stored) == [(3, "embed"), (3, "head")]


@pytest.mark.parametrize(
    ("source", "sent"),
    [
        ("the same folder", 0),
        ("another folder", 1),
        ("no folder", 1),
        ("a hub", 0),
        ("a hub that its owner allows", 0),
        ("a hub that is away", 1),
    ],
)
async def test_weights_come_from_the_own_disk_or_the_hub_before_the_coordinator(
    source: str, sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sent`: whether the coordinator sends them."""
    folder = tmp_path / "model"
    if source != "no folder":
        folder.mkdir()
    weights = {"weight": np.ones(2, np.float32)}
    from_ = f"hf://owner/model@{40 * 'a'}" if "hub" in source else "the coordinator's folder"
    allows = OwnerAllows(
        hub=("owner/other", *(["owner/model"] if "allows" in source else [])),
        model=folder if folder.exists() and "hub" not in source else None,
    )

    async def read(
        model: ModelSection, units: Sequence[str], *, token: bool = True, as_stored: bool = False
    ) -> dict[str, dict[str, np.ndarray]]:
        """No folder but the one that the owner names, and no token but for repositories that they name."""
        assert model.from_ == (from_ if "hub" in source else str(folder))
        assert "hub" not in source or token == ("allows" in source)
        if "away" in source:
            raise DataError("the hub is away")
        return {unit: {"weight": weights["weight"] + ("another" in source)} for unit in units}

    monkeypatch.setattr(snapshot_transfer, "read_units", read)
    async with scene(tmp_path, ModelSection(layers=1, from_=from_), allows) as here:
        here.coordinator.files[0, "head"] = weights_file(weights)
        state = await here.transfer.fetch_weights("head")
        assert state["parameter.weight"].tolist() == [1.0, 1.0]
        assert len(here.coordinator.asked) - here.coordinator.kept == sent
        assert (not here.coordinator.asked) == ("hub" in source and "away" not in source)


async def test_a_row_that_only_says_what_it_holds_keeps_a_copy_for_a_layer_that_is_refused(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as here:
        copied = TakeSnapshot(epoch=1, step=3, place=NODES, only_hashes=True)
        here.transfer.take(1, copied, state(), stage=0)
        # At once: the files may not be on the disk yet.
        here.transfer.send(SendLayers(step=3, units=("head",)))
    said = here.posted.get_nowait()
    assert isinstance(said, StateHashes) and len(said.units) == len(UNITS)
    assert here.coordinator.stored == [(3, "head")]
    for place, room in (("", 10**6), (NODES, 0)):
        async with scene(tmp_path / "another", room=room) as here:
            here.transfer.take(1, replace(copied, place=place), state(), stage=0)
        assert here.posted.get_nowait() == said and here.cache.names() == []


@pytest.mark.parametrize("room", [10**6, 0])
async def test_all_weights_of_the_last_step_go_ahead_of_the_optimizers_state(
    tmp_path: Path, room: int
) -> None:
    tensors = {"exp_avg.weight": torch.zeros(2), "parameter.weight": torch.ones(2), "step": torch.tensor(3)}
    whole = serialize_unit(tensors)
    copy = StateCopy((unit, {n: StateTensor(t, t.dtype) for n, t in tensors.items()}) for unit in UNITS)
    copy.weights_first = True
    async with scene(tmp_path, room=room) as here:
        here.transfer.take(1, TakeSnapshot(epoch=1, step=3), copy, stage=0)
    came = here.coordinator.came
    assert [alone for _, alone, *_ in came] == [True, True, False, False]
    said = here.posted.get_nowait()
    assert isinstance(said, StateHashes)
    ahead, later = ({unit: one for unit, *one in part} for part in (came[:2], came[2:]))
    assert ahead.keys() == later.keys() == {*UNITS}
    for unit in UNITS:
        (_, _, weights), (_, at, rest) = ahead[unit], later[unit]
        found = deserialize_unit(weights)
        assert found.keys() == {"parameter.weight"} and found["parameter.weight"].tolist() == [1.0, 1.0]
        body = weights[8 + int.from_bytes(weights[:8], "little") :]
        assert rest[:at] + body + rest[at:] == whole
    hashes = sha256(whole).hexdigest(), sha256(ahead["head"][2]).hexdigest()
    assert {word.hashes for word in said.units.values()} == {hashes}


async def test_a_layer_that_is_not_stored_fails_the_epoch_once(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.lost = True
        here.transfer.take(4, TakeSnapshot(epoch=4, step=3), state(), stage=0)
    (failure,) = here.failures()
    # Two layers are sent at a time; either may fail first.
    assert failure == StepFailed(
        epoch=4,
        step=3,
        kind=FailureKind.INTERNAL,
        message=failure.message,
    )


async def test_a_snapshot_waits_for_space_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_transfer, "ROOM_RETRY_SECONDS", 0.01)
    async with scene(tmp_path, room=0) as here:
        copy = state()
        here.transfer.take(4, TakeSnapshot(epoch=4, step=3, place=NODES), copy, stage=0)
        async with asyncio.timeout(SECONDS):
            assert "--max-disk" in await here.told.get()
        await asyncio.to_thread(copy.settle, 0.0)
        assert here.transfer.uploading(3) and here.posted.empty()
        here.cache._limit = 10**6
    assert here.failures() == [] and here.told.empty()
    assert {*here.coordinator.held} == {name.unit for name in here.cache.names()} == {*UNITS}


async def test_a_disk_that_stays_full_fails_the_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_transfer, "ROOM_SECONDS", -1.0)
    async with scene(tmp_path, room=0) as here:
        here.transfer.take(4, TakeSnapshot(epoch=4, step=3, place=NODES), state(), stage=0)
    (failure,) = here.failures()
    assert isinstance(failure, StepFailed) and failure.step == 3 and "--max-disk" in failure.message


async def test_a_newer_snapshot_takes_the_place_of_one_that_is_fetched_ahead(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.open.clear()
        here.transfer.prefetch(Prefetch(step=3, units=("embed", "head")))
        assert await here.begun() == (3, "embed")
        here.transfer.prefetch(Prefetch(step=6, units=("head",)))
        here.coordinator.open.set()
    assert here.coordinator.asked == [(3, "embed"), (6, "head")]
    assert "snapshot of step 6" in here.told.get_nowait()
    assert here.told.empty()


@pytest.mark.parametrize("is_done", [True, False])
async def test_weights_that_were_fetched_while_waiting_are_not_sent_again(
    is_done: bool, tmp_path: Path
) -> None:
    async with scene(tmp_path, ModelSection(layers=1, from_="the coordinator's folder")) as here:
        for unit in UNITS:
            here.coordinator.files[0, unit] = weights_file({"weight": np.ones(2, np.float32)})
        here.transfer.prefetch(Prefetch(step=0, units=UNITS))
        async with asyncio.timeout(SECONDS):
            if is_done:
                await here.told.get()
            states = [await here.transfer.fetch_weights(unit) for unit in UNITS]
    assert [list(state) for state in states] == [["parameter.weight"]] * len(UNITS)
    assert here.coordinator.kept == len(UNITS) == len(here.coordinator.asked) / 2


async def test_weights_that_have_no_room_on_the_disk_are_not_fetched_ahead(tmp_path: Path) -> None:
    async with scene(tmp_path, ModelSection(layers=1, from_="a folder there"), room=10**4) as here:
        here.transfer.prefetch(Prefetch(step=0, units=UNITS))
    assert here.coordinator.asked == [] and here.told.empty()


async def test_a_node_that_cannot_prefetch_announces_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.lost = True
        here.transfer.prefetch(Prefetch(step=3, units=("embed", "head")))
    assert here.coordinator.asked == [(3, "embed")] and here.told.empty()
    assert "layer embed of step 3" in caplog.text


async def test_all_that_is_under_way_can_be_stopped(tmp_path: Path) -> None:
    async with scene(tmp_path) as here:
        here.coordinator.open.clear()
        here.transfer.take(1, TakeSnapshot(epoch=1, step=3), state(), stage=0)
        here.transfer.prefetch(Prefetch(step=6, units=("head",)))
        begun = {await here.begun() for _ in (*UNITS, "prefetched")}
        assert begun == {(3, "embed"), (3, "head"), (6, "head")}
        here.transfer.cancel()
    assert here.coordinator.stored == [] and here.told.empty() and not here.failures()


async def test_a_layer_is_here_though_nobody_else_holds_it_any_more(tmp_path: Path) -> None:
    """A holder that sends it and leaves does not make the node late with its state."""
    data, here, doubted = b"a layer", asyncio.Event(), asyncio.Event()

    class Told(Coordinator):
        async def layer(self, step: int, unit: str, *_: object, **__: object) -> LayerPlace:  # type: ignore[override]
            if here.is_set():
                doubted.set()
                await asyncio.Event().wait()
            return LayerPlace(step=step, unit=unit, bytes=len(data), sha256=sha256(data).hexdigest())

    class Peers:
        async def fetch(self, place: LayerPlace, limit: int, bad: set[str]) -> bytes:
            bad.add("node-damaged")
            here.set()
            return data

    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        scene = Scene(tmp_path, group)
        scene.transfer._client = cast(CoordinatorClient, Told())
        scene.transfer.peers = cast(LayerPeers, Peers())
        assert await scene.transfer.fetch(4, "embed") == data
        await doubted.wait()
        scene.transfer.cancel()
