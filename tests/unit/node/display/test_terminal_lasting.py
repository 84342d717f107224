"""The reader of a run's output may disappear; the run goes on."""

import io
import os
from typing import TextIO

import pytest

from node.display.render import make_renderer
from node.telemetry.events import Notice
from tests.support.run_events import done

EVENTS = (Notice(text="first"), done(1), Notice(text="second"))


class Terminal(io.StringIO):
    """A terminal that goes away after so many writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self._left = writes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left == 0:
            raise OSError(5, "Input/output error")
        self._left -= 1
        return super().write(text)


@pytest.fixture
def unread() -> TextIO:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("json", [True, False])
def test_a_closed_output_is_reported_once_and_ends_nothing(
    json: bool, unread: TextIO, caplog: pytest.LogCaptureFixture
) -> None:
    with make_renderer(json=json, stream=unread) as emit:
        for event in EVENTS:
            emit(event)
    unread.close()  # as the process does at its end: what is still in the buffer must not fail again
    assert [record.getMessage() for record in caplog.records] == [
        "the output cannot be written (Broken pipe); the run goes on without it"
    ]


@pytest.mark.parametrize("writes", range(5))
def test_a_terminal_that_is_gone_ends_nothing(
    writes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with make_renderer(json=False, stream=Terminal(writes)) as emit:
        for event in EVENTS:
            emit(event)
    assert len(caplog.records) == 1
