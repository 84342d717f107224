"""The history on disk: whole lines, replays marked, secrets left out, damage survived, growth bounded."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from node.telemetry import events, history
from node.telemetry.history import (
    COSTS_SECONDS,
    HISTORY_FILE,
    HistoryTail,
    HistoryWriter,
    highest_step,
    history_size,
    read_history,
)
from tests.support.recorded_run import append
from tests.support.run_events import BEGAN, NODES, aborted, costs, done, joined, placed, started, step
from wire.errors import RunError


class Writing:
    """A writer with a clock that moves when told to."""

    every: ClassVar[list["Writing"]] = []

    def __init__(self, directory: Path) -> None:
        self.every.append(self)
        self.directory = directory
        self.now = BEGAN
        self.warnings: list[str] = []
        self.writer = HistoryWriter(self.warnings.append, lambda: self.now)

    def say(self, *told: events.Event, apart: float = 2.0) -> None:
        for event in told:
            self.writer(event)
            self.now += apart

    def start(self, first_step: int = 0) -> None:
        self.say(started(self.directory, first_step=first_step))

    def open(self) -> None:
        self.start()
        self.say(*(joined(node) for node in NODES), placed())


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Writing.every:
        Writing.every.pop().writer.close()


def lines(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / HISTORY_FILE).read_text().splitlines()]


def test_written_values_are_read_back(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.open()
    writing.say(*step(1), *step(2), aborted(3))
    writing.writer.close()
    entries = list(read_history(tmp_path))
    assert [entry.event.event for entry in entries][:2] == ["run-started", "node-joined"]
    assert entries[0].at == BEGAN and entries[1].at == BEGAN + 2
    assert entries[5].event == costs(1) and entries[6].event == done(1)
    assert not any(entry.replayed for entry in entries)
    assert highest_step(tmp_path) == 2
    assert writing.warnings == []


def test_join_lines_are_secret_and_not_written(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.start()
    writing.say(events.JoinLine(line="thinwire join tw1_x9Zq"))
    text = (tmp_path / HISTORY_FILE).read_text()
    assert "x9Zq" not in text and len(text.splitlines()) == 1


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    Writing(tmp_path).start()
    assert stat.S_IMODE((tmp_path / HISTORY_FILE).stat().st_mode) == 0o600


def test_events_before_the_run_is_open_have_no_place(tmp_path: Path) -> None:
    Writing(tmp_path).say(events.Notice(text="nothing is open"))
    assert list(tmp_path.iterdir()) == []


def test_a_later_coordinator_goes_on_and_marks_what_runs_again(tmp_path: Path) -> None:
    first = Writing(tmp_path)
    first.open()
    first.say(done(1), done(2), done(3))
    second = Writing(tmp_path)
    second.start(first_step=1)
    second.say(done(2), done(3), done(4), done(4))
    marked = [(row["step"], row.get("replayed", False)) for row in lines(tmp_path) if row["event"] == "step"]
    assert marked == [(1, False), (2, False), (3, False), (2, True), (3, True), (4, False), (4, True)]
    assert sum(entry.replayed for entry in read_history(tmp_path)) == 3


@pytest.mark.parametrize("damage", [b'{"at":17', b'{"at":1.0,"event":"step"', b"\xff\xfe\x00"])
def test_a_line_that_a_crash_cut_short_costs_only_itself(tmp_path: Path, damage: bytes) -> None:
    writing = Writing(tmp_path)
    writing.open()
    writing.say(done(1))
    whole = len(lines(tmp_path))
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(damage)
    assert len(list(read_history(tmp_path))) == whole
    again = Writing(tmp_path)
    again.start(first_step=1)
    again.say(done(2))
    assert len(list(read_history(tmp_path))) == whole + 2
    assert highest_step(tmp_path) == 2


def test_lines_of_unknown_kinds_and_shapes_are_skipped(tmp_path: Path) -> None:
    Writing(tmp_path).start()
    odd = [
        '{"at":1.0,"event":"from-the-future"}',
        '{"event":"notice","text":"no time"}',
        "[]",
        "7",
        '"x"',
        "",
    ]
    with (tmp_path / HISTORY_FILE).open("a") as file:
        file.write("".join(line + "\n" for line in odd))
    assert len(list(read_history(tmp_path))) == 1


def test_steps_in_quick_succession_share_a_line_of_costs(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.open()
    for number in range(1, 41):
        writing.say(*step(number), apart=COSTS_SECONDS / 20)
    writing.writer.close()
    rows = [entry.event for entry in read_history(tmp_path)]
    together = [row for row in rows if isinstance(row, events.StepCosts)]
    assert len(together) <= 6, "four seconds of steps"
    assert sum(row.seconds for row in together) == pytest.approx(40.0)
    assert sum(row.links[0].bytes for row in together) == 40_000_000
    assert sum(isinstance(row, events.StepDone) for row in rows) == 40


def test_the_stated_growth_holds(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.open()
    before = (tmp_path / HISTORY_FILE).stat().st_size
    writing.say(*step(1))
    size = (tmp_path / HISTORY_FILE).stat().st_size - before
    assert size <= 400 + 2 * 800, size


@pytest.mark.parametrize("length", [1, 100, 5000])
def test_the_highest_step_is_found_at_the_end_however_long_the_history_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    writing = Writing(tmp_path)
    writing.start()
    writing.say(*(done(number) for number in range(1, length + 1)))
    writing.say(*(done(number) for number in range(max(1, length - 20), length + 1)), placed())
    parsed: list[bytes] = []

    parse = history.parse_line

    def counting(line: bytes) -> history.Entry | None:
        parsed.append(line)
        return parse(line)

    monkeypatch.setattr(history, "parse_line", counting)
    assert highest_step(tmp_path) == length
    assert len(parsed) <= 22, "replays, and the newest that was none"


def test_lines_stay_complete_across_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = Writing(tmp_path)
    writing.start()
    writing.say(done(3), *(events.Notice(text="x" * size) for size in range(40)))
    for size in range(1, 200):
        monkeypatch.setattr(history, "_BLOCK_BYTES", size)
        assert highest_step(tmp_path) == 3


def test_a_step_is_found_by_its_number_and_not_by_its_digits(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.start()
    writing.say(*(done(step) for step in (4, 5, 15, 50, 51)))
    fifth = history.step_done(tmp_path, 5)
    assert fifth is not None and fifth.step == 5
    assert history.step_done(tmp_path, 1) is None


def test_a_full_disk_is_reported_once_and_history_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Only for writing: whoever reads /dev/full never comes to its end. The writer closes it.
        patch.setattr(history, "_open", lambda path: Path("/dev/full").open("a"))  # noqa: SIM115
        writing = Writing(tmp_path)
        writing.open()
        writing.say(*step(1))
        (warning,) = writing.warnings
        assert "No space left on device" in warning and "the run continues" in warning
    assert list(read_history(tmp_path)) == []
    writing.say(*step(2))
    done = [entry.event.step for entry in read_history(tmp_path) if isinstance(entry.event, events.StepDone)]
    assert done == [1, 2]
    writing.say(joined(NODES[0]))
    assert writing.warnings == [warning]


# ---- reading while it grows


def notice(text: str) -> events.Notice:
    return events.Notice(text=text)


def texts(tail: HistoryTail) -> list[str]:
    return [entry.event.text for entry in tail.read() if isinstance(entry.event, events.Notice)]


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    append(tmp_path, 1.0, notice("whole"))
    path = tmp_path / HISTORY_FILE
    line = json.dumps({"at": 2.0, **json.loads(notice("ünfinished").to_json())}, ensure_ascii=False).encode()
    tail = HistoryTail(tmp_path)
    with path.open("ab") as file:
        file.write(line[:-9])
        file.flush()
        assert texts(tail) == ["whole"]
        file.write(line[-9:])
        file.flush()
        assert texts(tail) == []
        file.write(b"\n")
    assert texts(tail) == ["ünfinished"]


def test_lines_that_cannot_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_BYTES", 256)
    append(tmp_path, 1.0, notice("before"))
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(b"\x00\xff not json\n" + b"x" * 2000 + b"\n")
    append(tmp_path, 2.0, notice("after"))
    tail = HistoryTail(tmp_path)
    found = [text for _ in range(20) for text in texts(tail)]
    assert found == ["before", "after"]


@pytest.mark.parametrize("damage", [b"hello\n", b"\0\xff", b'{"text": "a"}\n', b"[]\n"])
def test_a_damaged_history_says_so_and_where(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY_FILE).write_bytes(damage)
    with pytest.raises(RunError, match="damaged at its first line"):
        list(read_history(tmp_path))
    with pytest.raises(RunError, match="damaged at its first line"):
        HistoryTail(tmp_path).read()
    (tmp_path / HISTORY_FILE).unlink()
    append(tmp_path, 1.0, notice("before"))
    size = history_size(tmp_path)
    with (tmp_path / HISTORY_FILE).open("ab") as file:
        file.write(2 * (damage + b"\n"))
    append(tmp_path, 2.0, notice("after"))
    assert len(list(read_history(tmp_path))) == 2 and texts(HistoryTail(tmp_path)) == ["before", "after"]
    (record,) = caplog.records
    assert f"damaged at byte {size}" in record.getMessage()


def test_text_that_is_no_utf8_is_written_and_read(tmp_path: Path) -> None:
    """As the name of a folder may be."""
    writing = Writing(tmp_path)
    writing.start()
    writing.say(notice("the folder \udcff is missing"))
    tail = HistoryTail(tmp_path)
    assert texts(tail) == ["the folder \udcff is missing"] and writing.warnings == []


def test_an_index_is_made_again_once_a_multiple_of_its_own_size_was_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "INDEX_BYTES", 1000)
    made: list[int] = []

    def index(directory: Path, _cancelled: history.Cancelled) -> int:
        made.append(history_size(directory))
        return 5000

    writer = HistoryWriter(pytest.fail, lambda: BEGAN, index=index)
    writer(started(tmp_path))
    while len(made) < 3:
        writer(events.Notice(text="a line of some length"))
        if writer._worker is not None:
            writer._worker.join()
    writer.close()
    first, second, third = made
    assert 1000 <= first < 1200
    assert history.INDEX_TIMES * 5000 <= second - first < history.INDEX_TIMES * 5000 + 200
    assert history.INDEX_TIMES * 5000 <= third - second < history.INDEX_TIMES * 5000 + 200
