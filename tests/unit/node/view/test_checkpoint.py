"""The checkpoint of a run's view: reading on from it gives the view of the whole history."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.display.watch import HistoryWatch
from node.telemetry import events, history
from node.telemetry.events import plain_fields, read_value
from node.telemetry.history import HistoryTail, HistoryWriter, highest_step, history_size, read_history
from node.view import checkpoint
from node.view.checkpoint import CHECKPOINT_FILE, read_view
from node.view.view_builder import RunViewBuilder
from tests.support.run_events import BEGAN, NODES, aborted, joined, placed, started, step

KINDS = st.sampled_from(("step", "aborted", "joined", "left", "placed", "started", "snapshot", "finished"))


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few events a file, so that short runs rotate and are indexed often."""
    monkeypatch.setattr(history, "SEGMENT_BYTES", 6000)
    monkeypatch.setattr(history, "INDEX_BYTES", 2000)
    monkeypatch.setattr(history, "INDEX_TIMES", 0)
    monkeypatch.setattr(checkpoint, "SAVE_BYTES", 2000)


def told(kinds: Sequence[str]) -> Iterator[events.Event]:
    yield from (started(), *map(joined, NODES), placed())
    number = 0
    for kind in kinds:
        match kind:
            case "step":
                number += 1
                yield from step(number)
            case "aborted":
                yield aborted(number + 1)
            case "joined":
                yield joined(NODES[number % 3])
            case "left":
                yield events.NodeLeft(node_id=NODES[number % 3], reason="left by itself")
            case "placed":
                number = max(0, number - 2)
                yield placed(2, step=number)
            case "started":
                yield started(first_step=number)
            case "snapshot":
                yield events.SnapshotStored(step=number, path=f"snapshots/{number}", bytes=100)
            case _:
                yield events.RunFinished(reason="stopped", failed=False)


@given(st.lists(KINDS, max_size=60), st.lists(KINDS, max_size=20))
def test_a_restored_builder_goes_on_as_the_one_before(first: list[str], then: list[str]) -> None:
    plain, before = RunViewBuilder(), RunViewBuilder()
    for at, event in enumerate(told(first)):
        plain.apply(event, BEGAN + at)
        before.apply(event, BEGAN + at)
    text = json.dumps(before, default=plain_fields)
    after: RunViewBuilder = read_value(json.loads(text), RunViewBuilder, "state")
    for at, event in enumerate(told(then), 1000):
        plain.apply(event, BEGAN + at)
        after.apply(event, BEGAN + at)
    assert after.view() == plain.view()


def whole_view(directory: Path) -> object:
    builder = RunViewBuilder()
    for entry in read_history(directory):
        builder.apply(entry.event, entry.at)
    return builder.view()


def record(directory: Path, first: int, last: int) -> None:
    """A coordinator's steps from `first` to `last`."""
    now = BEGAN + 10 * first
    writer = HistoryWriter(pytest.fail, lambda: now, index=checkpoint.refresh)
    writer(started(directory, first_step=first - 1))
    for event in (*map(joined, NODES), placed(step=first - 1)):
        writer(event)
    for number in range(first, last + 1):
        for event in step(number):
            now += 2
            writer(event)
        if writer._worker is not None:
            writer._worker.join()
    writer.close()


def test_the_view_of_a_rotated_history_is_that_of_all_its_events(tmp_path: Path) -> None:
    record(tmp_path, 1, 40)
    names = sorted(path.name for path in tmp_path.glob("history-0*"))
    assert len(names) > 3 and all(name.endswith(".jsonl.gz") for name in names[:-1])
    steps = [entry.event.step for entry in read_history(tmp_path) if isinstance(entry.event, events.StepDone)]
    assert steps == list(range(1, 41)) and highest_step(tmp_path) == 40
    position = json.loads((tmp_path / CHECKPOINT_FILE).read_text())["position"]
    assert history_size(tmp_path) - position < 4000
    assert HistoryWatch(tmp_path).view() == whole_view(tmp_path)
    record(tmp_path, 38, 60)
    replayed = [entry.event for entry in read_history(tmp_path) if entry.replayed]
    assert [event.step for event in replayed if isinstance(event, events.StepDone)] == [38, 39, 40]
    assert HistoryWatch(tmp_path).view() == whole_view(tmp_path)


def test_a_reader_parses_only_what_came_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 1, 40)
    parsed = []
    parse = history.parse_line
    monkeypatch.setattr(history, "parse_line", lambda line: parsed.append(line) or parse(line))
    read_view(tmp_path)
    assert sum(map(len, parsed)) < 4000 < history_size(tmp_path)


def test_a_tail_follows_over_files_from_any_position(tmp_path: Path) -> None:
    record(tmp_path, 1, 12)
    tail = HistoryTail(tmp_path)
    seen = tail.read()
    while more := tail.read():
        seen += more
    assert seen == list(read_history(tmp_path))
    record(tmp_path, 13, 30)
    while more := tail.read():
        seen += more
    assert seen == list(read_history(tmp_path))


def test_history_before_a_moment_is_that_of_the_moment(tmp_path: Path) -> None:
    record(tmp_path, 1, 9)
    then, view = history_size(tmp_path), whole_view(tmp_path)
    record(tmp_path, 10, 30)
    assert read_view(tmp_path, then)[0].view() == view
    assert read_view(tmp_path)[0].view() == whole_view(tmp_path)


@pytest.mark.parametrize(
    "damage", [b"", b"[" * 100_000, b"{}", b'{"position": -1}', b"\xff", b'{"position": "x", "version": 1}']
)
def test_a_damaged_checkpoint_costs_time_only(tmp_path: Path, damage: bytes) -> None:
    record(tmp_path, 1, 20)
    (tmp_path / CHECKPOINT_FILE).write_bytes(damage)
    assert read_view(tmp_path)[0].view() == whole_view(tmp_path)


def test_a_checkpoint_with_other_fields_is_not_used(tmp_path: Path) -> None:
    record(tmp_path, 1, 20)
    path = tmp_path / CHECKPOINT_FILE
    whole = json.loads(path.read_text())
    del whole["state"]["loss"]  # as a program without this curve wrote it
    path.write_text(json.dumps(whole))
    assert read_view(tmp_path)[0].view() == whole_view(tmp_path)
    del whole["state"]
    path.write_text(json.dumps({**whole, "state": 7}))
    assert read_view(tmp_path)[0].view() == whole_view(tmp_path)


def test_a_checkpoint_of_another_history_is_not_used(tmp_path: Path) -> None:
    record(tmp_path, 1, 20)
    for path in tmp_path.glob("history*.jsonl*"):
        path.unlink()
    record(tmp_path, 3, 40)
    for path in tmp_path.glob("history-view*"):
        path.touch()
    assert read_view(tmp_path)[0].view() == whole_view(tmp_path)


def test_missing_and_half_compressed_files_are_survived(tmp_path: Path) -> None:
    record(tmp_path, 1, 40)
    (tmp_path / CHECKPOINT_FILE).unlink()
    everything = list(read_history(tmp_path))
    first, second = sorted(tmp_path.glob("history-0*"))[:2]
    # As a crash leaves it between the compressed file and the end of the plain one.
    first.with_suffix("").write_bytes(gzip.decompress(first.read_bytes()))
    (tmp_path / (second.name + ".partial")).write_bytes(b"half")
    assert list(read_history(tmp_path)) == everything
    first.with_suffix("").unlink()
    first.unlink()
    left = list(read_history(tmp_path))
    assert 0 < len(left) < len(everything) and left == everything[-len(left) :]
    assert highest_step(tmp_path) == 40
    record(tmp_path, 41, 41)
    assert highest_step(tmp_path) == 41
