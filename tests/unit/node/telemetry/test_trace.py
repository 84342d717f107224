"""Traces: which steps, spans that are bounded, a tensor's way over a link, files that survive, one clock."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.cli.main import main
from node.telemetry.clock import SpanRing, StageClock, TimeKind, WorkKind
from node.telemetry.history import HISTORY_FILE
from node.telemetry.trace import align, chrome_trace
from node.telemetry.trace_files import (
    Batch,
    TracedSteps,
    TraceWriter,
    newest_whole_step,
    read_batches,
    segments,
)
from tests.support.run_events import done
from wire.errors import ConfigError
from wire.frames import HEADER_BYTES, Frame, frame_place, pack_frame
from wire.spec import Direction, TensorKey
from wire.telemetry import Span, SpanColumns, StepSpans
from wire.transfers import MOST_OPEN, TransferKind, TransferLog

TAG = 7


def key(microbatch: int = 0, step: int = 4, epoch: int = 1, boundary: int = 0) -> TensorKey:
    return TensorKey(epoch, step, microbatch, boundary, Direction.ACTIVATION)


# ---- which steps


@pytest.mark.parametrize(
    ("text", "traced", "left_out"),
    [("off", [], [0, 1, 99]), ("all", [0, 1, 99], []), ("3:5", [2, 3, 4], [1, 5]), ("1:1", [0], [1])],
)
def test_steps_that_are_traced(text: str, traced: list[int], left_out: list[int]) -> None:
    steps = TracedSteps.parse(text)
    assert all(step in steps for step in traced)
    assert not any(step in steps for step in left_out)
    assert bool(steps) == (text != "off")


@pytest.mark.parametrize("text", ["", "on", "0:3", "5:3", "3", "3:", "-1:2", "1:2:3", "a:b"])
def test_text_that_names_no_steps_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="off, all, or the first and last step as in 3:5"):
        TracedSteps.parse(text)


# ---- spans


def test_a_clock_records_what_ended_with_its_tensor() -> None:
    now = 10.0
    ring = SpanRing()
    clock = StageClock(lambda: now)
    clock.record(ring)
    now = 11.0
    clock.switch(TimeKind.WAIT_UPSTREAM, key(3))
    now = 11.5
    clock.switch(TimeKind.DECODE, key(3))
    clock.switch(TimeKind.FORWARD)  # no time passed: no span
    now = 12.0
    clock.switch(TimeKind.FORWARD)
    spans, dropped = ring.take()
    assert spans == (
        Span("wait-coordinator", 10.0, 1.0),
        Span("wait-upstream", 11.0, 0.5, key(3)),
        Span("forward", 11.5, 0.5),
    )
    assert dropped == 0 and ring.take() == ((), 0)
    assert sum(span.seconds for span in spans) == pytest.approx(sum(clock.snapshot().values()))


def test_work_beside_the_clock_is_a_span_and_not_counted_twice() -> None:
    now = 10.0
    ring = SpanRing()
    clock = StageClock(lambda: now, TimeKind.FORWARD)
    clock.record(ring)
    with pytest.raises(ZeroDivisionError), clock.beside(WorkKind.PACK, key(1)):
        now = 12.0
        _ = 1 / 0
    assert ring.take() == ((Span("pack", 10.0, 2.0, key(1)),), 0)
    assert clock.snapshot()[TimeKind.FORWARD] == 2.0 and clock.snapshot()[TimeKind.ENCODE] == 0.0


def test_the_ring_keeps_the_newest_and_counts_the_rest() -> None:
    ring = SpanRing(most=3)
    for number in range(5):
        ring.record("forward", number, number + 1)
    spans, dropped = ring.take()
    assert [span.start for span in spans] == [2, 3, 4] and dropped == 2


# ---- a tensor's way over a link


def frames(one: TensorKey, sequence: int, sizes: list[int]) -> list[bytes]:
    total = sum(sizes)
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        pack_frame(Frame(1, sequence + index, one, total, offset, bytes(size)), TAG)
        for index, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    ]


class Way:
    def __init__(self) -> None:
        self.told: list[tuple[str, TensorKey, float, float]] = []
        self.log = TransferLog(lambda *told: self.told.append(told))

    def send(self, frame: bytes, start: float, end: float) -> None:
        self.log.sending(frame, start)
        self.log.sent(frame, end)


def test_the_place_of_a_frame() -> None:
    first, last = frames(key(5), 8, [4, 2])
    assert frame_place(first) == (8, key(5), 0, False)
    assert frame_place(last) == (9, key(5), 4, True)
    assert frame_place(b"TW\x01\xee" + bytes(HEADER_BYTES)).key is None


def test_sending_lasts_from_the_first_frame_to_the_last_and_flight_to_the_acknowledgement() -> None:
    way = Way()
    for number, frame in enumerate(frames(key(0), 0, [4, 4, 1])):
        way.send(frame, number, number + 0.5)
    (single,) = frames(key(1), 3, [7])
    way.send(single, 5.0, 5.5)
    way.log.acknowledged(2, 6.0)
    assert len(way.told) == 2, "the last frame of the first tensor is still on its way"
    way.log.acknowledged(4, 7.0)
    assert way.told == [
        (TransferKind.SEND, key(0), 0, 2.5),
        (TransferKind.SEND, key(1), 5.0, 5.5),
        (TransferKind.IN_FLIGHT, key(0), 2.5, 7.0),
        (TransferKind.IN_FLIGHT, key(1), 5.5, 7.0),
    ]


def test_resent_frames_are_not_a_new_transfer() -> None:
    way = Way()
    one = frames(key(0), 0, [4, 1])
    for number, frame in enumerate([*one, *one, one[1]]):
        way.send(frame, number, number + 0.5)
    assert way.told == [(TransferKind.SEND, key(0), 0, 1.5)]


def test_receiving_lasts_from_the_first_frame_to_the_one_that_completes() -> None:
    way = Way()
    first, last = frames(key(2), 0, [4, 1])
    way.log.received(first, None, 3.0)
    way.log.received(last, key(2), 4.0)
    (single,) = frames(key(3), 2, [1])
    way.log.received(single, key(3), 5.0)
    assert way.told == [(TransferKind.RECEIVE, key(2), 3.0, 4.0), (TransferKind.RECEIVE, key(3), 5.0, 5.0)]


def test_damaged_and_short_frames_make_nothing_grow() -> None:
    way = Way()
    way.log.received(b"", None, 1.0)
    way.log.received(b"TW", None, 1.0)
    for number in range(3 * MOST_OPEN):
        way.log.received(frames(key(number), 0, [4, 1])[0], None, 1.0)
    assert len(way.log._receiving) <= MOST_OPEN
    assert way.told == []


# ---- files


def batch(
    step: int, node: str = "a", stage: int = 0, epoch: int = 1, *, spans: int = 3, error: float = 1e-3
) -> Batch:
    return Batch(
        node,
        StepSpans(
            epoch=epoch,
            step=step,
            stage=stage,
            clock_offset=1000.0,
            clock_error=error,
            dropped=0,
            spans=tuple(
                Span("forward", step + n / 10, 0.05, key(n, step, epoch), -1 if n else 2)
                for n in range(spans)
            ),
        ),
    )


def write(writer: TraceWriter, *batches: Batch) -> None:
    for one in batches:
        writer.add(one.node_id, one.spans)
    writer.write(writer.take())


def test_written_values_are_read_back(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10**6)
    write(writer, batch(1), batch(2))
    write(writer, batch(3, "b", 1))
    assert list(read_batches(tmp_path, 2, 3)) == [batch(2), batch(3, "b", 1)]
    assert list(read_batches(tmp_path, 9, 9)) == []
    assert writer.broken == ""


@pytest.mark.parametrize(
    "columns",
    [
        [[0], [1], [1], [0], [0], [0], [0]],
        [[0], [1], [1], [0], [0], [0], [0], []],
        [[1], [1], [1], [0], [0], [0], [0], [-1]],
        [[-1], [1], [1], [0], [0], [0], [0], [-1]],
        [[0], [1], [1], [9], [0], [0], [0], [-1]],
    ],
)
def test_columns_that_stand_for_no_spans_are_refused(columns: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="span"):
        SpanColumns(1, ["forward"], columns)


def test_a_later_coordinator_begins_a_segment_of_its_own(tmp_path: Path) -> None:
    write(TraceWriter(tmp_path, 10**6), batch(1))
    (segment,) = segments(tmp_path / "trace")
    segment.write_bytes(segment.read_bytes()[:-3])  # a crash cut it short
    write(TraceWriter(tmp_path, 10**6), batch(2))
    assert len(segments(tmp_path / "trace")) == 2
    assert list(read_batches(tmp_path, 0, 9)) == [batch(2)]


def test_only_the_damaged_part_is_lost(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10**6)
    write(writer, batch(1))
    (segment,) = segments(tmp_path / "trace")
    with segment.open("ab") as file:
        file.write(gzip.compress(b'{"not": "a batch"}\nnor this\n'))
        file.write(b"and this is no gzip")
    assert list(read_batches(tmp_path, 0, 9)) == [batch(1)]


def test_the_trace_never_exceeds_its_limit_by_more_than_a_segment(tmp_path: Path) -> None:
    limit = 20_000
    writer = TraceWriter(tmp_path, limit)
    for step in range(400):
        write(writer, batch(step, spans=40))
        size = sum(path.stat().st_size for path in segments(tmp_path / "trace"))
        assert size <= limit * 1.3
    kept = [one.spans.step for one in read_batches(tmp_path, 0, 400)]
    assert kept == list(range(kept[0], 400)) and kept[0] > 0, "the oldest are gone, the newest are there"


def test_segments_that_go_while_they_are_read_are_left_out(tmp_path: Path) -> None:
    for step in range(3):
        write(TraceWriter(tmp_path, 10**6), batch(step))
    reading = read_batches(tmp_path, 0, 9)
    assert next(reading) == batch(0)
    segments(tmp_path / "trace")[1].unlink()
    assert list(reading) == [batch(2)]


def test_a_full_disk_ends_only_the_trace(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("in the way")
    writer = TraceWriter(tmp_path, 10**6)
    write(writer, batch(1))
    assert "the trace ends here" in writer.broken
    write(writer, batch(2))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.db").touch()
    write(TraceWriter(run, 10**6), batch(1), batch(2))
    assert main(["trace", str(run), "--steps", "2:3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == str(run / "trace-2-3.json") and said["steps"] == [2, 3]
    slices = [
        event
        for event in json.loads((run / "trace-2-3.json").read_text())["traceEvents"]
        if event["ph"] in "Xb"
    ]
    assert len(slices) == said["spans"] > 0
    assert main(["trace", str(run), "--steps", "2", "--out", str(tmp_path / "trace.json")]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'trace.json'}: ")
    for none in ("3:2", "all", "90"):
        assert main(["trace", str(run), "--steps", none]) == 2


def test_the_command_writes_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says about it goes elsewhere: the output is whole JSON."""
    (tmp_path / "run.db").touch()
    write(TraceWriter(tmp_path, 10**6), batch(1))
    monkeypatch.chdir(tmp_path)
    assert main(["trace", ".", "--steps", "2", "--out", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["traceEvents"]
    assert err.startswith("-: ") and err.count("\n") == 1
    assert not Path("-").exists()


def test_the_newest_step_is_the_newest_that_the_files_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history of a fast run is some steps ahead of its trace."""
    (tmp_path / "run.db").touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert "there is no trace in " in capsys.readouterr().err
    (tmp_path / HISTORY_FILE).write_text(json.dumps({"at": 1.0, **json.loads(done(46).to_json())}) + "\n")
    stages = [batch(40), batch(40, "b", 1), batch(41), batch(41, "b", 1), batch(42)]
    write(TraceWriter(tmp_path, 10**6), *stages)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["stages"], said["rows"]) == ([42, 42], 2, 1)


def placed(epoch: int, step: int, stage: int) -> Batch:
    one = batch(step, "abc"[stage], stage)
    return replace(one, spans=replace(one.spans, epoch=epoch))


@pytest.mark.parametrize(
    ("segments_of", "newest"),
    [
        ([], None),
        ([[(1, 0, 0)]], 0),
        ([[(1, 4, 0), (1, 4, 1), (1, 5, 0)]], 4),
        ([[(1, 4, 0), (1, 4, 1), (1, 5, 1), (1, 5, 0)]], 5),
        # The newest segment has only begun.
        ([[(1, 4, 0), (1, 4, 1)], [(1, 5, 0)]], 4),
        # After a rollback, and then with fewer stages.
        ([[(1, 8, 0), (1, 8, 1), (1, 9, 0), (1, 9, 1), (2, 5, 0), (2, 5, 1)]], 5),
        ([[(1, 8, 0), (1, 8, 1), (1, 9, 0), (1, 9, 1), (2, 5, 0)]], 9),
        ([[(1, 8, 0), (1, 8, 1), (2, 5, 0), (2, 6, 0)]], 6),
    ],
)
def test_a_snapshot_is_complete_once_every_stage_has_sent_it(
    segments_of: list[list[tuple[int, int, int]]], newest: int | None, tmp_path: Path
) -> None:
    for batches in segments_of:
        write(TraceWriter(tmp_path, 10**6), *(placed(*one) for one in batches))
    assert newest_whole_step(tmp_path) == newest


# ---- one clock, one file


def test_a_nodes_best_offset_counts_for_all_its_spans() -> None:
    vague = batch(1, error=0.5)
    sharp = replace(batch(2), spans=replace(batch(2).spans, clock_offset=1000.25, clock_error=0.001))
    aligned = align([vague, sharp], 1, 2)
    assert aligned.spans[0].start == pytest.approx(1001.25)
    assert aligned.clock_error == 0.001


def test_a_step_that_ran_again_is_there_once() -> None:
    aligned = align([batch(1), batch(1, epoch=2), batch(2, epoch=2)], 1, 1)
    assert len(aligned.spans) == 3
    assert {one.span.key.epoch for one in aligned.spans if one.span.key} == {2}


def test_spans_of_other_steps_are_left_out() -> None:
    early = replace(
        batch(1).spans, spans=(Span("receive", 1.9, 0.1, key(0, step=2), 0), Span("optimizer", 1.8, 0.1))
    )
    aligned = align([Batch("a", early), batch(2)], 2, 2)
    assert [one.span.kind for one in aligned.spans] == ["receive", "forward", "forward", "forward"]


def test_transfers_without_a_tensor_are_skipped() -> None:
    odd = replace(batch(2).spans, spans=(Span("in-flight", 1.0, 0.5, None, 1),))
    trace = chrome_trace(align([Batch("a", odd), batch(2)], 2, 2), "run")
    assert trace == chrome_trace(align([batch(2)], 2, 2), "run")
    assert trace["traceEvents"]


def test_tensors_of_slices_are_named_by_their_microbatch() -> None:
    spans = replace(batch(2).spans, spans=(Span("forward", 1.0, 0.5, key(7, step=2)),))
    trace = chrome_trace(align([Batch("a", spans)], 2, 2), "run", slices=3)
    (bar,) = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert bar["name"] == "forward 2.1"
    assert (bar["args"]["microbatch"], bar["args"]["slice"]) == (2, 1)


SECONDS = st.floats(0, 100)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([*TimeKind, *TransferKind, *WorkKind]),
            SECONDS,
            st.floats(0, 1),
            st.none() | st.integers(0, 3),
        ),
        max_size=30,
    )
)
def test_any_spans_make_a_valid_trace(drawn: list[tuple[int, str, float, float, int | None]]) -> None:
    by_stage: dict[int, list[Span]] = defaultdict(list)
    for stage, kind, start, seconds, microbatch in drawn:
        on_link = kind in set(TransferKind)
        tensor = key(microbatch or 0) if microbatch is not None or on_link else None
        by_stage[stage].append(Span(kind, start, seconds, tensor, 1 if on_link else -1))
    batches = [
        Batch(f"node-{stage}", replace(batch(4).spans, stage=stage, spans=tuple(spans)))
        for stage, spans in by_stage.items()
    ]
    trace = json.loads(json.dumps(chrome_trace(align(batches, 4, 4), "run")))
    phases = defaultdict(list)
    for event in trace["traceEvents"]:
        phases[event["ph"]].append(event)
        assert {"pid", "tid", "name"} <= event.keys()
    flights = sum(kind == TransferKind.IN_FLIGHT for _, kind, *_ in drawn)
    assert len(phases["X"]) == len(drawn) - flights
    assert len(phases["b"]) == len(phases["e"]) == flights
    assert sorted(e["id"] for e in phases["s"]) == sorted(e["id"] for e in phases["f"])
    assert all(event["ts"] >= 0 for event in trace["traceEvents"] if "ts" in event)
    named = {(e["pid"], e["tid"]) for e in phases["M"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in phases["X"]} == named


def test_rows_are_processes_of_their_own(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10**6)
    for replica, node in enumerate("ab"):
        writer.add(node, batch(1, node).spans, replica)
    writer.write(writer.take())
    batches = list(read_batches(tmp_path, 1, 1))
    assert [(one.node_id, one.replica) for one in batches] == [("a", 0), ("b", 1)]
    trace = chrome_trace(align(batches, 1, 1), "run")
    named = [one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"]
    assert named == ["row 0, stage 0: a", "row 1, stage 0: b"]
    assert len({one["pid"] for one in trace["traceEvents"]}) == 2
