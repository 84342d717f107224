"""A run's events as plain text, live display and summary."""

import io
import json
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.display.render import (
    PLAIN_INTERVAL,
    JsonRenderer,
    LiveRenderer,
    Pace,
    PlainRenderer,
    event_lines,
    make_renderer,
    step_line,
    summary_lines,
)
from node.telemetry.events import (
    Event,
    HeldOutLoss,
    JoinLine,
    NodeJoined,
    NodeLeft,
    NodeReplaced,
    Notice,
    PageServed,
    PlacementMade,
    Recovered,
    RunFinished,
    RunSummary,
    SampleMade,
    SeatFilled,
    SeatLost,
    SnapshotStored,
    StageCost,
    StepAborted,
    StepCosts,
    StepDone,
    TaskScores,
    TokenUses,
    WindowsPlanned,
    from_json,
)
from node.telemetry.format import bytes_text, count_text, duration_text, printable
from node.view.view_builder import view
from tests.support.cases import each
from tests.support.run_events import done, started
from wire.errors import ProtocolViolationError
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

SUMMARY = RunSummary(
    steps=30,
    first_loss=5.5,
    last_loss=2.125,
    tokens=61440,
    seconds=75.0,
    tokens_per_second=819.2,
    link_bytes=12_345_678,
    link_bytes_fp32=80_000_000,
    link_bytes_bf16=40_000_000,
    bits_forward=4.44,
    bits_backward=8.28,
    stages=(
        StageCost(stage=0, node_id="node-a", wall_seconds=75.0, seconds={"forward": 50.0, "encode": 25.0}),
        StageCost(stage=1, node_id="node-b", wall_seconds=70.0, seconds={"forward": 35.0, "encode": 35.0}),
    ),
    snapshot_path="runs/demo-1/snapshots/step-00000030",
    weights_sha256="ab" * 32,
)


def step_done(step: int, loss: float = 5.0, seconds: float = 0.5) -> StepDone:
    made = done(step, steps=30, seconds=seconds)
    return replace(made, loss=loss, tokens_per_second=2048 / seconds, idle=(0.25, 0.5), bits_forward=4.44)


EVENTS: tuple[Event, ...] = (
    started(),
    PageServed(url="http://192.0.2.7:7702/", key_file="runs/demo-1/operator.key"),
    JoinLine(line="thinwire join tw1_abc"),
    TokenUses(left=2),
    NodeJoined(node_id="node-a", device="cpu", address="127.0.0.1:5"),
    NodeJoined(node_id="node-n", device="cpu", address="127.0.0.1:6", name="Anas 4090"),
    NodeLeft(node_id="node-a", reason="Ctrl-C"),
    TaskScores(step=7, limit=2, scores={"piqa": {"acc": 0.5, "acc_stderr": 0.25, "f1,strict": 1.0}}),
    SampleMade(step=7, prompt="The sea", text=" is\n\x1b[2J deep"),
    PlacementMade(epoch=2, nodes=("node-a", "node-b"), resume_step=7),
    step_done(8),
    StepAborted(epoch=2, step=9, reason="node-b went away"),
    SeatLost(epoch=2, step=9, node_id="node-b", row=1, stage=1, reason="gone", groups=(2, 3), takers=(0, 0)),
    SeatFilled(epoch=2, step=11, node_id="node-c", row=1, stage=1),
    SnapshotStored(step=10, bytes=1_500_000, path="runs/demo-1/snapshots/step-00000010"),
    HeldOutLoss(step=10, loss=2.5, uncompressed=2.25, samples=64, best=True, seconds=0.5),
    Notice(text="something"),
    NodeReplaced(text="node node-a is shut out: it lied", node_id="node-a"),
    Recovered(text="back at step 6 in 4 s", step=6, seconds=4.0),
    WindowsPlanned(
        epoch=2,
        step=41,
        windows=(2, 1),
        forward=(0.1, 0.2, 0.1),
        backward=(0.2, 0.4, 0.2),
        activation_bytes=1e6,
        gradient_bytes=2e6,
        round_trips=(0.1, 0.0),
        rates_up=(1e6, 2e6),
        rates_down=(0.0, 2e6),
        lines_up=(3e6, 3e6, 0.0),
        lines_down=(3e6, 3e6, 0.0),
    ),
    StepCosts(
        step=7,
        seconds=2.0,
        aborted=False,
        stages=(StageCost(stage=0, node_id="node-a", wall_seconds=2.0, seconds={"forward": 2.0}),),
        links=(
            LinkFigures(
                source=0,
                target=1,
                bytes=1000,
                flows=(FlowFigures(direction=Direction.ACTIVATION, codec="tah", bytes=900, elements=1600),),
                busy_seconds=0.5,
                capacity=1e6,
                round_trip_seconds=0.02,
                retransmits=1,
                rejects=0,
                queued_bytes=64,
            ),
        ),
    ),
    RunFinished(reason="out of memory", failed=True),
    RunFinished(reason="all steps done", failed=False, summary=SUMMARY),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_every_event_survives_its_line(event: Event) -> None:
    line = event.to_json()
    assert "\n" not in line
    assert json.loads(line)["event"] == event.event
    assert from_json(line) == event


def test_every_kind_is_covered() -> None:
    assert {type(event) for event in EVENTS} | {type(EVENTS[0])} >= {
        kind for kind in Event.__subclasses__() if kind.__module__ == "node.telemetry.events"
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_diverged_loss_is_valid_json_and_reads_as_nan(loss: float) -> None:
    line = step_done(1, loss=loss).to_json()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    event = from_json(line)
    assert isinstance(event, StepDone)
    assert math.isnan(event.loss)


@given(st.text())
def test_any_text_stays_on_its_line(text: str) -> None:
    line = Notice(text=text).to_json()
    assert "\n" not in line and "\r" not in line
    assert from_json(line) == Notice(text=text)


@each(
    ("line", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "no known kind"),
        ("3", "no known kind"),
        ("{}", "no known kind"),
        ('{"event": 3}', "no known kind"),
        ('{"event": ["step"]}', "no known kind"),
        ('{"event": "stepp"}', "no known kind"),
        ('{"event": "notice"}', "notice has no text"),
        ('{"event": "notice", "text": 3}', "notice.text has the wrong type"),
        ('{"event": "snapshot", "step": true, "bytes": 1, "path": ""}', "snapshot.step has the wrong type"),
        ('{"event": "placement", "epoch": 1, "nodes": [1], "resume_step": 0}', "placement.nodes"),
        ('{"event": "placement", "epoch": 1, "nodes": "ab", "resume_step": 0}', "placement.nodes"),
        (
            '{"event": "run-finished", "reason": "", "failed": false, "summary": {}}',
            "summary has no bits_backward, ",
        ),
    ],
)
def test_other_lines_are_refused(line: str, words: str) -> None:
    with pytest.raises(ProtocolViolationError, match=words) as caught:
        from_json(line)
    assert "\n" not in str(caught.value)


def test_a_line_of_a_later_version_says_what_this_one_knows() -> None:
    line = RunFinished(reason="done", failed=False, summary=SUMMARY).to_json()
    fields = json.loads(line)
    fields["of_a_later_version"] = {"any": ["thing"]}
    fields["summary"]["of_a_later_version"] = None
    fields["summary"]["stages"][0]["of_a_later_version"] = 1
    assert from_json(json.dumps(fields)) == from_json(line)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def plain(events: Iterable[tuple[float, Event]]) -> list[str]:
    """The plain renderer's lines for events at given times."""
    stream, now = io.StringIO(), [0.0]
    with PlainRenderer(stream, clock=lambda: now[0]) as emit:
        for at, event in events:
            now[0] = at
            emit(event)
    return stream.getvalue().splitlines()


def test_plain_output_is_text_without_escapes() -> None:
    lines = plain((float(at), event) for at, event in enumerate(EVENTS))
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "  thinwire join tw1_abc" in lines
    assert "joined: node-a (cpu) at 127.0.0.1:5" in lines
    assert 'joined: node-n "Anas 4090" (cpu) at 127.0.0.1:6' in lines
    assert "left: node-a: Ctrl-C" in lines
    assert "placed (epoch 2): 0 node-a, 1 node-b; from step 7" in lines
    assert "step 9 aborted and runs again: node-b went away" in lines
    assert "snapshot of step 10: 1.5 MB in runs/demo-1/snapshots/step-00000010" in lines
    assert "failed: out of memory" in lines
    assert lines[-len(summary_lines(SUMMARY)) :] == summary_lines(SUMMARY)


def test_a_step_that_compiled_does_not_count_in_the_time_left() -> None:
    pace = Pace()
    pace.add(step_done(1, seconds=30.0))
    pace.add(step_done(2))
    assert step_line(step_done(2), pace).endswith("eta 14 s")


def test_fast_steps_are_thinned_out_and_the_last_is_shown() -> None:
    times = [(0.01 * step, step_done(step)) for step in range(1, 31)]
    assert [line.split()[1] for line in plain(times)] == ["1/30", "30/30"]
    slow = [(PLAIN_INTERVAL * step, step_done(step)) for step in range(1, 31)]
    assert len(plain(slow)) == 30


def test_the_summary_compares_with_fp32_and_bf16_and_says_where_time_went() -> None:
    lines = summary_lines(SUMMARY)
    assert lines[:4] == [
        "steps       30, 61.4k tokens in 1m15s, 819 tokens/s",
        "loss        5.5000 first, 2.1250 last",
        "on the wire 12.3 MB; FP32 takes 80 MB (6.5x), BF16 40 MB (3.2x)",
        "bits        4.44 per activation element, 8.28 per gradient element, headers included",
    ]
    assert [line.split() for line in lines[-3:]] == [
        ["stage", "node", "forward", "encode", "seconds"],
        ["0", "node-a", "66.7", "33.3", "75.0"],
        ["1", "node-b", "50.0", "50.0", "70.0"],
    ]


def test_a_run_without_links_is_shown_too() -> None:
    alone = RunSummary(**{**vars(SUMMARY), "link_bytes": 0, "stages": SUMMARY.stages[:1]})
    assert not any(line.startswith(("on the wire", "bits")) for line in summary_lines(alone))
    assert step_line(StepDone(**{**vars(step_done(3)), "idle": (0.5,)}), Pace())


def test_names_stand_beside_ids() -> None:
    told = [
        NodeJoined(node_id="node-a", device="cpu", address="x", name="Ana's 4090"),
        PlacementMade(epoch=1, nodes=("node-a", "node-b"), resume_step=0),
        NodeLeft(node_id="node-a", reason="gone"),
    ]
    lines = [
        'placed (epoch 1): 0 node-a "Ana\'s 4090", 1 node-b; from step 0',
        'left: node-a "Ana\'s 4090": gone',
    ]
    assert plain([(0.0, event) for event in told])[1:] == lines
    assert [event.text for event in view(enumerate(told)).events[1:]] == lines


def test_the_estimate_follows_the_newest_steps() -> None:
    pace = Pace()
    for step in range(1, 21):
        pace.add(step_done(step, seconds=1.0 if step < 3 else 2.0))
    assert pace.eta(step_done(20)) == "20 s"


def test_many_stages_show_their_range() -> None:
    wide = StepDone(**{**vars(step_done(3)), "idle": tuple(stage / 100 for stage in range(12))})
    assert "idle 0 to 11%" in step_line(wide, Pace())


def test_strings_from_other_machines_cannot_drive_the_terminal() -> None:
    hostile = "cpu\x1b]0;owned\x07\x1b[2J\r\nfinished: all steps done\u202e"
    events = (
        NodeJoined(node_id="node-a", device=hostile, address=hostile, name=hostile),
        NodeLeft(node_id="node-a", reason=hostile),
        StepAborted(epoch=1, step=1, reason=hostile),
        Notice(text=hostile),
        RunFinished(reason=hostile, failed=True),
    )
    stream = Terminal()
    with LiveRenderer(stream) as emit:
        for event in events:
            emit(event)
    for text in (*plain((0.0, event) for event in events), stream.getvalue().replace("\x1b[?25", "")):
        assert "\x1b]0" not in text and "\x1b[2J" not in text and "\x07" not in text and "\u202e" not in text
    assert sum(len(event_lines(event)) for event in events) == 6


def test_the_live_display_shows_rows_and_keeps_the_join_line_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    token = "tw1_" + "x" * 200
    stream = Terminal()
    with make_renderer(json=False, stream=stream) as emit:
        assert isinstance(emit, LiveRenderer)
        emit(JoinLine(line=f"thinwire join {token}"))
        emit(PlacementMade(epoch=1, nodes=("node-a", "node-b"), resume_step=0))
        emit(step_done(1))
        emit(step_done(30))
        emit(RunFinished(reason="all steps done", failed=False, summary=SUMMARY))
    text = stream.getvalue()
    assert token in text
    for words in ("step 30/30", "loss 5.0000", "node-b", "50%", "up Mbit/s", "bits 4.44 out", "\x1b["):
        assert words in text
    assert text.endswith("\n".join(summary_lines(SUMMARY)) + "\n")


def test_no_color_leaves_out_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with make_renderer(json=False, stream=stream) as emit:
        emit(step_done(30))
    assert "\x1b[9" not in stream.getvalue() and "\x1b[3" not in stream.getvalue()


def test_the_cursor_is_restored_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), make_renderer(json=False, stream=stream) as emit:
        emit(step_done(1))
        raise KeyboardInterrupt
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert stream.getvalue().count(hidden) == 1
    assert stream.getvalue().rindex(shown) > stream.getvalue().rindex(hidden)


def test_the_renderer_fits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_renderer(json=False, stream=Terminal()), PlainRenderer)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_renderer(json=False, stream=Terminal()), LiveRenderer)
    assert isinstance(make_renderer(json=False, stream=io.StringIO()), PlainRenderer)
    assert isinstance(make_renderer(json=True, stream=Terminal()), JsonRenderer)


@each(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(999), "999 B"),
        (bytes_text(1532), "1.53 kB"),
        (bytes_text(999_600), "1 MB"),
        (bytes_text(3.5e18), "3500 PB"),
        (count_text(12), "12"),
        (count_text(18_437), "18.4k"),
        (count_text(1.5e9), "1.5G"),
        (duration_text(0), "0 s"),
        (duration_text(0.0116), "11.6 ms"),
        (duration_text(0.9999), "1 s"),
        (duration_text(59.9), "1m00s"),
        (duration_text(75), "1m15s"),
        (duration_text(3599.7), "1h00m"),
        (duration_text(7800), "2h10m"),
        (duration_text(200_000), "2d07h"),
        (printable("a\nb\tc\x1b"), "a b c "),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected
