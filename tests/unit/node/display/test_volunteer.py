"""A volunteer's screen: lines where output is kept, one line that changes in place on a terminal."""

import json
import threading

import pytest

from node.display import volunteer
from node.display.terminal import LIVE_LINE, say
from node.display.volunteer import FIRST_REPEAT_SECONDS, VolunteerScreen


@pytest.fixture(autouse=True)
def no_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIVE_LINE, "shown", False)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_goes_on_is_a_line_when_it_changes_and_then_ever_more_rarely(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    screen = VolunteerScreen(json_lines=False, clock=clock, live=False)
    for second in range(200):
        clock.now = float(second)
        screen.now("enrolling" if second < 3 else "stage 1 of 2", "" if second < 3 else f"step {second}")
    assert capsys.readouterr().out.splitlines() == [
        "enrolling",
        "stage 1 of 2   step 3",
        f"stage 1 of 2   step {3 + FIRST_REPEAT_SECONDS:.0f}",
        f"stage 1 of 2   step {3 + 3 * FIRST_REPEAT_SECONDS:.0f}",
    ]


def test_on_a_terminal_what_goes_on_is_replaced_and_lines_stay(capsys: pytest.CaptureFixture[str]) -> None:
    screen = VolunteerScreen(json_lines=False, live=True)
    screen.now("stage 1 of 2", "step 3")
    screen.now("stage 1 of 2", "step 4")
    screen("you have left the run")
    assert capsys.readouterr().out == (
        "\r\x1b[Kstage 1 of 2   step 3\r\x1b[Kstage 1 of 2   step 4\r\x1b[Kyou have left the run\n"
    )


def test_an_error_is_below_the_line_that_changes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = VolunteerScreen(json_lines=False, live=True)
    screen.now("stage 1 of 2", "step 4")
    say("thinwire: error: gone")
    say("and again")
    said = capsys.readouterr()
    assert said.out.endswith("step 4\n") and said.out.count("\n") == 1
    assert said.err == "thinwire: error: gone\nand again\n"


def test_json_has_an_event_a_line_and_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = VolunteerScreen(json_lines=True, live=True)
    screen("starting")
    screen.now("stage 1 of 2", "step 3")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"event": "node", "text": "starting"},
        {"event": "node", "text": "stage 1 of 2   step 3"},
    ]


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_shows_for_how_long_a_busy_thread_is_at_it(
    live: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volunteer, "TICK_SECONDS", 0.001)
    shown = threading.Event()

    class Shown(VolunteerScreen):
        def _show(self, text: str) -> None:
            super()._show(text)
            shown.set()

    screen = Shown(json_lines=False, clock=Clock(), live=live)
    with screen.seconds_of("loading torch"):
        if live:
            assert shown.wait(60)
    screen("enrolling")
    out = capsys.readouterr().out
    assert out.startswith("\r\x1b[Kloading torch   0 s") is live
    assert out.endswith("\r\x1b[Kenrolling\n" if live else "enrolling\n")
