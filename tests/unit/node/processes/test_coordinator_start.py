"""What a restarting coordinator reads at once and what later; nodes wait for its answers."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from node.cli.run_output import serve_finished
from node.config.schema import CoordinatorSection, DashboardSection, RunConfig, RunSection, SnapshotsSection
from node.coordinator.coordinator import Coordinator
from node.coordinator.store import SnapshotRecord, StepRecord, Store
from node.dashboard import pages
from node.dashboard.feed import Feed
from node.dashboard.pages import reading_past
from node.model.chunk import build_chunk
from node.processes import coordinator as main
from node.processes.locks import run_lock
from node.run_file.loader import to_json
from node.run_state.actions import Stop
from node.run_state.run_plan import Past
from node.schedule.placement import split_units
from node.state.serialization import serialize_unit
from node.state.snapshot import SnapshotFolder, list_snapshots, read_manifest, snapshot_directory
from node.state.unit_state import PARAMETER_PREFIX, has_weights_alone
from node.telemetry import events
from node.telemetry.history import HISTORY_FILE, Entry, HistoryWriter, history_size, read_history
from node.training.optimizer import StageOptimizer
from node.view import checkpoint
from node.view.view_builder import RunViewBuilder, view
from tests.support.recorded_run import append
from tests.support.run_events import BEGAN, NODES, done, joined, placed, started, step
from wire.errors import RunError, UserError
from wire.identity.names import split_address
from wire.identity.token import JoinToken

SECONDS = 30.0
RECORD = StepRecord(
    step=1, epoch=1, loss=5.5, grad_norm=0.1, lr=1e-3, clip=1.0, tokens=64, seconds=0.2, committed_at=BEGAN
)


class Blocked:
    """A history whose first line does not come before `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.asked = threading.Event()

    def __call__(self, directory: Path, *_: object) -> Iterator[tuple[int, Entry]]:
        self.asked.set()
        if not self.gate.wait(SECONDS):
            raise AssertionError("whoever waits for the history never came to open the gate")
        yield 1, Entry(at=BEGAN, event=started())


def written(directory: Path, *told: events.Event) -> None:
    writer = HistoryWriter(print, lambda: BEGAN)
    writer(started(directory))
    for event in told:
        writer(event)
    writer.close()


def config_in(directory: Path) -> RunConfig:
    text = directory / "text.txt"
    text.write_text("So long as it is long enough. " * 200)
    config = RunConfig(
        coordinator=CoordinatorSection(listen="127.0.0.1:0"), dashboard=DashboardSection(listen="127.0.0.1:0")
    )
    model = replace(config.model, layers=4, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=256, sequence=16)
    return replace(config, model=model, data=replace(config.data, path=str(text)))


def test_ports_answer_while_a_long_history_is_still_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked()
    monkeypatch.setattr(checkpoint, "read_whole_lines", blocked)
    told: list[events.Event] = []

    async def answered(*_: object) -> tuple[int, tuple[str, ...]]:
        (line,) = (event.line for event in told if isinstance(event, events.JoinLine))
        addresses = JoinToken.parse(line.split()[-1]).addresses
        for address in addresses[:1]:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*split_address(address)), SECONDS)
            writer.close()
        assert await asyncio.to_thread(blocked.asked.wait, SECONDS), "it is read, beside all else"
        blocked.gate.set()
        return 0, ()

    monkeypatch.setattr(main, "_until_done", answered)
    assert main.run_coordinator(config_in(tmp_path), run_dir=tmp_path, emit=told.append, resume=False) == 0


async def test_a_late_history_comes_before_newer_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [*(joined(node) for node in NODES), placed(), *step(1), *step(2)]
    written(tmp_path, *old)
    end, gate, read = history_size(tmp_path), threading.Event(), checkpoint.read_whole_lines

    def blocked(directory: Path, start: int, end: int | None) -> Iterator[tuple[int, Entry | None]]:
        assert gate.wait(SECONDS)
        return read(directory, start, end)

    monkeypatch.setattr(checkpoint, "read_whole_lines", blocked)
    written(tmp_path, *step(3))  # this coordinator's own: it is not counted twice
    feed = Feed(RunViewBuilder(), past_comes=True)
    new = [started(tmp_path), *step(3)]
    async with reading_past(tmp_path, end, feed):
        for event in new:
            feed.apply(event, BEGAN)
        version, fields = await feed.newest()
        assert fields["step"] == 3 and fields["loss_curve"]["steps"] == [3]
        gate.set()
        async with asyncio.timeout(SECONDS):
            await feed.newer(version)
    feed.close()
    first = started(tmp_path)
    assert await feed.view() == view((BEGAN, event) for event in [first, *old, *new])


async def test_a_run_that_ends_does_not_wait_for_its_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def endless(*_: object) -> Iterator[tuple[int, Entry]]:
        while True:
            asked.set()
            yield 1, Entry(at=BEGAN, event=done(1))

    monkeypatch.setattr(checkpoint, "read_whole_lines", endless)
    feed = Feed(RunViewBuilder(), past_comes=True)
    async with asyncio.timeout(SECONDS):
        async with reading_past(tmp_path, 0, feed):
            assert await asyncio.to_thread(asked.wait, SECONDS)
    assert (await feed.view()).step == 0


async def test_an_unreadable_history_is_reported_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    feed = Feed(RunViewBuilder(), past_comes=True)
    feed.apply(done(7), BEGAN)
    version, _ = await feed.newest()
    async with asyncio.timeout(SECONDS), reading_past(tmp_path, 1, feed):
        await feed.newer(version)
    assert (await feed.view()).step == 7
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(("told", "unreported"), [(1, True), (2, False)])
def test_the_commit_that_nobody_told_of_is_known_from_the_end_of_the_history(
    tmp_path: Path, told: int, unreported: bool
) -> None:
    written(tmp_path, *(done(number) for number in range(1, told + 1)))
    assert main._unreported(RECORD, main._reported(tmp_path)) == (RECORD if unreported else None)


def test_with_an_unreadable_history_nothing_is_reported_twice(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(RunError):
        list(read_history(tmp_path))
    assert main._unreported(replace(RECORD, step=0), main._reported(tmp_path)) is None


@pytest.mark.parametrize("page", [False, True], ids=["join-port", "page-port"])
def test_a_run_with_a_live_coordinator_is_not_advised_about_ports(page: bool, tmp_path: Path) -> None:
    """The ports that a second one finds taken are, most likely, the first one's."""
    with socket.socket() as taken, run_lock(tmp_path):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = config_in(tmp_path)
        if page:
            config = replace(config, dashboard=DashboardSection(listen=address))
        else:
            config = replace(config, coordinator=CoordinatorSection(listen=address))
        with pytest.raises(UserError, match="another coordinator is running with"):
            main.run_coordinator(config, run_dir=tmp_path, emit=print, resume=True)


def test_a_run_whose_page_is_served_names_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--stay` holds the page's port, which is no reason to give the page another."""
    config = one_with_snapshots(tmp_path, monkeypatch, 40)
    config = replace(config, pipeline=replace(config.pipeline, stages=1))
    with Store.open(tmp_path) as store:
        store.set_config(to_json(config))
    served: list[str] = []

    def serve(directory: Path, host: str, port: int, *_: object) -> None:
        served.append(host)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            page = DashboardSection(listen=f"127.0.0.1:{taken.getsockname()[1]}")
            with pytest.raises(UserError, match=f"process {os.getpid()} still serves its page: end that"):
                main.run_coordinator(
                    replace(config, dashboard=page), run_dir=tmp_path, emit=print, resume=True
                )

    monkeypatch.setattr(pages, "serve_recorded", serve)
    assert serve_finished(tmp_path, print) == 0 and served == ["127.0.0.1"]
    assert main.run_coordinator(config, run_dir=tmp_path, emit=lambda _: None, resume=True) == 0
    with (
        run_lock(tmp_path),
        pytest.raises(UserError, match="another coordinator is running"),
        run_lock(tmp_path),
    ):
        pass


def test_a_copy_of_a_run_does_not_start_beside_it(tmp_path: Path) -> None:
    """Both would have one identity and one join token's secrets, so nodes could not tell them apart."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    copy.mkdir()
    config = config_in(tmp_path)
    ours = replace(started(original), host=socket.gethostname(), process_id=os.getpid())
    for directory in (original, copy):
        append(directory, BEGAN, ours)
    with pytest.raises(UserError, match=f"copy of {original}.*process {os.getpid()}"):
        main.run_coordinator(config, run_dir=copy, emit=print, resume=True)
    # The run in `copy` is over, so it may go on elsewhere. `tmp_path` has no keys yet.
    append(copy, BEGAN + 1, events.RunFinished(reason="stopped", failed=False))
    for directory in (original, copy):
        with pytest.raises(UserError, match="authority"):
            main.run_coordinator(config, run_dir=directory, emit=print, resume=True)


def test_a_start_that_finds_a_port_taken_writes_nothing(tmp_path: Path) -> None:
    config, directory = config_in(tmp_path), tmp_path / "run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = replace(config, dashboard=DashboardSection(listen=address))
        with pytest.raises(UserError, match="cannot listen at"):
            main.run_coordinator(config, run_dir=directory, emit=print, resume=False)
    assert not directory.exists()


def one_with_snapshots(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *steps: int, config: RunConfig | None = None
) -> RunConfig:
    """A run that has begun, with snapshots of these steps."""
    config = config or config_in(directory)
    monkeypatch.setattr(main, "_until_done", ended)
    assert main.run_coordinator(config, run_dir=directory, emit=lambda _: None, resume=False) == 0
    chunks = [
        build_chunk(config.model, units, 0, torch.device("cpu")) for units in split_units(config.model, 1)
    ]
    optimizer = StageOptimizer(chunks, config.training)
    writer = SnapshotFolder(directory / "snapshots", config, "run")
    with Store.open(directory) as store:
        for step in steps:
            for unit in optimizer.units:
                state = optimizer.unit_state(unit)
                if has_weights_alone(config, step):
                    state = {name: one for name, one in state.items() if name.startswith(PARAMETER_PREFIX)}
                data = serialize_unit(state)
                writer.put(step, unit, data)
            store.record_snapshot(SnapshotRecord(step, "", 1, complete=True, created=BEGAN))
        store.record_step(replace(RECORD, step=steps[-1] + 2))
    return config


async def ended(*_: object) -> tuple[int, tuple[str, ...]]:
    return 0, ()


def test_a_run_goes_on_from_the_newest_snapshot_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_with_snapshots(tmp_path, monkeypatch, 40, 80)
    path = snapshot_directory(tmp_path / "snapshots", 80) / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    for time in range(2):
        told: list[events.Event] = []
        assert main.run_coordinator(config, run_dir=tmp_path, emit=told.append, resume=True) == 0
        (began,) = (event for event in told if isinstance(event, events.RunStarted))
        assert began.first_step == 40
        notices = [event.text for event in told if isinstance(event, events.Notice)]
        warned = (
            f"{path} is damaged: its SHA-256 differs from the manifest's: the snapshot of step 80 is set "
            "aside (as manifest.json.damaged), and the newest intact one is that of step 40"
        )
        assert notices == ([warned] if time == 0 else [])
    assert path.is_file()
    with Store.open(tmp_path) as store:
        assert [record.step for record in store.snapshots()] == [40]


def test_a_run_whose_last_snapshot_has_weights_alone_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended, so that nothing is lost: with more steps it says what to do instead."""
    last = SnapshotsSection(last="weights")
    config = replace(config_in(tmp_path), snapshots=last, run=RunSection(steps=82))
    one_with_snapshots(tmp_path, monkeypatch, 80, 82, config=config)
    assert main.run_coordinator(config, run_dir=tmp_path, emit=lambda _: None, resume=True) == 0
    longer = replace(config, run=replace(config.run, steps=100))
    with pytest.raises(UserError, match=r"thinwire export .* model\.from"):
        main.run_coordinator(longer, run_dir=tmp_path, emit=lambda _: None, resume=True)


def test_a_snapshot_that_is_not_the_one_on_record_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_with_snapshots(tmp_path, monkeypatch, 40, 80)
    with Store.open(tmp_path) as store:
        record = SnapshotRecord(80, "", 1, complete=True, created=BEGAN)
        manifest = read_manifest(snapshot_directory(tmp_path / "snapshots", 80))
        assert store.is_on_record(manifest), "runs of an earlier version have no layers on record"
        agreed = [replace(entry, sha256="0" * 64) for entry in manifest.units]
        store.record_snapshot(record, agreed)
        assert not store.is_on_record(manifest)
    told: list[events.Event] = []
    assert main.run_coordinator(config, run_dir=tmp_path, emit=told.append, resume=True) == 0
    (began,) = (event for event in told if isinstance(event, events.RunStarted))
    assert began.first_step == 40 and list_snapshots(tmp_path / "snapshots") == (40,)


def test_snapshots_that_are_gone_are_reported_and_the_run_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_with_snapshots(tmp_path, monkeypatch, 40, 80)
    snapshot_directory(tmp_path / "snapshots", 80).rename(tmp_path / "elsewhere")
    told: list[events.Event] = []
    assert main.run_coordinator(config, run_dir=tmp_path, emit=told.append, resume=True) == 0
    (began,) = (event for event in told if isinstance(event, events.RunStarted))
    assert began.first_step == 40
    (notice,) = (event.text for event in told if isinstance(event, events.Notice))
    assert "the snapshot of step 80 is not in" in notice
    (tmp_path / "snapshots").rename(tmp_path / "all")
    with pytest.raises(UserError, match=r"step 80 .*put it back"):
        main.run_coordinator(config, run_dir=tmp_path, emit=told.append, resume=True)


def test_a_resumed_run_knows_the_norms_of_the_steps_before_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_with_snapshots(tmp_path, monkeypatch, 40)
    norms = {step: {0: step + 0.5, 1: 2.0} for step in range(38, 42)}
    with Store.open(tmp_path) as store:
        for step, found in norms.items():
            store.record_step(replace(RECORD, step=step), found)
    begun: list[Past] = []
    reopen = main._reopen

    def noted(*given: Any, **named: Any) -> main._Run:
        run = reopen(*given, **named)
        begun.append(run.past)
        return run

    monkeypatch.setattr(main, "_reopen", noted)
    assert main.run_coordinator(config, run_dir=tmp_path, emit=lambda _: None, resume=True) == 0
    (past,) = begun
    assert [one.norms for one in past.newest] == [norms[38], norms[39]]


def test_a_run_without_a_complete_snapshot_is_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = one_with_snapshots(tmp_path, monkeypatch, 80)
    (snapshot_directory(tmp_path / "snapshots", 80) / "head.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"no snapshot .*head") as why:
            main.run_coordinator(config, run_dir=tmp_path, emit=print, resume=True)
        assert "\n" not in str(why.value)


# ---- who asks for the end, and how often


class Asked:
    """In a coordinator's place: each of these happens, then its run is over."""

    def __init__(self, *happen: Callable[["Asked"], object]) -> None:
        self._happen = happen
        self.stops: list[bool] = []
        """Whether it was to be at once."""
        self._stop = asyncio.Event()
        self.changes = SimpleNamespace(applied=())
        self.bug: Exception | None = None

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        self.stops.append(at_once)
        self._stop.set()

    async def run(self) -> Stop:
        for happens in self._happen:
            self._stop.clear()
            happens(self)
            async with asyncio.timeout(SECONDS):
                await self._stop.wait()
        return Stop(reason="", failed=False)


def page(asked: Asked) -> None:
    asked.stop("stopped by the operator")


def ctrl_c(_: Asked) -> None:
    signal.raise_signal(signal.SIGINT)


def terminated(_: Asked) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("happen", "at_once"),
    [
        ((page, ctrl_c), [False, False]),
        ((page, page, terminated), [False, False, False]),
        ((ctrl_c, page, ctrl_c), [False, False, True]),
        ((terminated, ctrl_c), [False, True]),
    ],
)
async def test_only_a_second_signal_ends_a_run_at_once(
    happen: tuple[Callable[[Asked], object], ...], at_once: list[bool]
) -> None:
    """The notice after the first Ctrl-C holds, whatever was asked for on the page before."""
    asked, told = Asked(*happen), list[events.Event]()
    assert await main._until_done(cast(Coordinator, asked), told.append) == (main.INTERRUPTED, ())
    assert asked.stops == at_once
    assert told == [events.Notice(text=main.STOPPING)]
