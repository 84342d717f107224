"""What a coordinator that starts again needs at once, and what may come later: nodes wait for its answers."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from node.config.schema import CoordinatorSection, DashboardSection, RunConfig
from node.coordinator import main
from node.coordinator.records import StepRecord
from node.dashboard import live
from node.dashboard.feed import Feed
from node.dashboard.live import past_read
from node.telemetry import events
from node.telemetry.history import HISTORY_FILE, Entry, HistoryWriter, history_size
from node.telemetry.view import RunViewBuilder, view
from tests.support.run_events import BEGAN, NODES, done, joined, placed, started, step
from wire.errors import RunError
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

    def __call__(self, directory: Path, *_: object) -> Iterator[Entry]:
        self.asked.set()
        if not self.gate.wait(SECONDS):
            raise AssertionError("whoever waits for the history never came to open the gate")
        yield Entry(at=BEGAN, event=started())


def written(directory: Path, *told: events.Event) -> None:
    writer = HistoryWriter(print, lambda: BEGAN)
    writer(events.RunStarted(**{**vars(started()), "directory": str(directory)}))
    for event in told:
        writer(event)
    writer.close()


def config_in(directory: Path) -> RunConfig:
    text = directory / "text.txt"
    text.write_text("So long as it is long enough. " * 200)
    config = RunConfig(
        coordinator=CoordinatorSection(listen="127.0.0.1:0"), dashboard=DashboardSection(listen="127.0.0.1:0")
    )
    model = replace(config.model, layers=2, hidden=16, heads=2, kv_heads=1, ffn=16, vocab=256, sequence=16)
    return replace(config, model=model, data=replace(config.data, path=str(text)))


def test_ports_answer_while_a_long_history_is_still_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked()
    monkeypatch.setattr(live, "read_history", blocked)
    told: list[events.Event] = []

    async def answered(*_: object) -> int:
        (line,) = (event.line for event in told if isinstance(event, events.JoinLine))
        addresses = JoinToken.parse(line.split()[-1]).addresses
        for address in addresses[:1]:
            _, writer = await asyncio.wait_for(asyncio.open_connection(*split_address(address)), SECONDS)
            writer.close()
        assert await asyncio.to_thread(blocked.asked.wait, SECONDS), "it is read, beside all else"
        blocked.gate.set()
        return 0

    monkeypatch.setattr(main, "_until_done", answered)
    assert main.run_coordinator(config_in(tmp_path), run_dir=tmp_path, emit=told.append, resume=False) == 0


async def test_the_past_comes_late_and_before_what_happened_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [*(joined(node) for node in NODES), placed(), *step(1), *step(2)]
    written(tmp_path, *old)
    end, gate, read = history_size(tmp_path), threading.Event(), live.read_history

    def blocked(directory: Path, end: int | None) -> Iterator[Entry]:
        assert gate.wait(SECONDS)
        return read(directory, end)

    monkeypatch.setattr(live, "read_history", blocked)
    written(tmp_path, *step(3))  # this coordinator's own: it is not counted twice
    feed = Feed(RunViewBuilder(), past_comes=True)
    new = [events.RunStarted(**{**vars(started()), "directory": str(tmp_path)}), *step(3)]
    async with past_read(tmp_path, end, feed):
        for event in new:
            feed.apply(event, BEGAN)
        version, fields = feed.newest()
        assert fields["step"] == 3 and fields["loss_curve"]["steps"] == [3]
        gate.set()
        async with asyncio.timeout(SECONDS):
            await feed.newer(version)
    feed.close()
    first = events.RunStarted(**{**vars(started()), "directory": str(tmp_path)})
    assert feed.view() == view((BEGAN, event) for event in [first, *old, *new])


async def test_a_run_that_ends_does_not_wait_for_its_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def endless(*_: object) -> Iterator[Entry]:
        while True:
            asked.set()
            yield Entry(at=BEGAN, event=done(1))

    monkeypatch.setattr(live, "read_history", endless)
    feed = Feed(RunViewBuilder(), past_comes=True)
    async with asyncio.timeout(SECONDS):
        async with past_read(tmp_path, 0, feed):
            assert await asyncio.to_thread(asked.wait, SECONDS)
    assert feed.view().step == 0


async def test_a_past_that_cannot_be_read_is_told_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    feed = Feed(RunViewBuilder(), past_comes=True)
    feed.apply(done(7), BEGAN)
    version, _ = feed.newest()
    async with asyncio.timeout(SECONDS), past_read(tmp_path, 1, feed):
        await feed.newer(version)
    assert feed.view().step == 7
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize(("told", "untold"), [(1, True), (2, False)])
def test_the_commit_that_nobody_told_of_is_known_from_the_end_of_the_history(
    tmp_path: Path, told: int, untold: bool
) -> None:
    written(tmp_path, *(done(number) for number in range(1, told + 1)))
    assert main._untold(RECORD, main._told(tmp_path)) == (RECORD if untold else None)


def test_with_a_history_that_cannot_be_read_nothing_is_told_again(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).mkdir()
    with pytest.raises(RunError):
        list(live.read_history(tmp_path))
    assert main._untold(replace(RECORD, step=0), main._told(tmp_path)) is None
