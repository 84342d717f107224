"""A compute thread that hangs is noticed, one that works or waits is not, and its process ends."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from node.stage import watchdog
from node.stage.inbox import STALL_SECONDS
from node.stage.watchdog import STUCK_SECONDS, ComputeThread, StuckError, check_progress
from node.telemetry.clock import WAITS, StageClock, TimeKind
from tests.support.fault_prefork import Prefork

HANGS = """
import threading
from pathlib import Path
from types import SimpleNamespace
import node.processes.node as main
from node.config.join_options import JoinOptions
from node.stage.watchdog import StuckError

async def serve(*_):
    threading.Thread(target=threading.Event().wait).start()  # never ends, and the interpreter waits for it
    ENDS

main._serve = serve
main._check_machine = lambda: None
main.JoinToken = SimpleNamespace(parse=lambda _: SimpleNamespace(run_id="r"))
main.claim = lambda *_: SimpleNamespace(path=Path("."), release=lambda: print("released", flush=True))
main.run_node("token", JoinOptions(device="cpu"))
"""


@pytest.mark.parametrize("kind", list(TimeKind))
def test_only_work_can_take_too_long(kind: TimeKind) -> None:
    check_progress(kind, STUCK_SECONDS)
    if kind in WAITS:
        check_progress(kind, 100 * STUCK_SECONDS)
    else:
        with pytest.raises(StuckError, match=f"in {kind} for 301 s"):
            check_progress(kind, STUCK_SECONDS + 1)


def test_neighbours_are_blamed_later() -> None:
    assert STUCK_SECONDS + watchdog.LOOK_SECONDS < STALL_SECONDS


async def test_the_clock_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.001)
    now = 0.0
    clock = StageClock(lambda: now)
    clock.switch(TimeKind.FORWARD)
    watching = asyncio.create_task(ComputeThread(clock).watch())
    now = STUCK_SECONDS
    await asyncio.sleep(0.05)
    assert not watching.done()
    now += 1
    with pytest.raises(StuckError):
        async with asyncio.timeout(60):
            await watching


@pytest.mark.parametrize(
    ("ends", "code", "words"),
    [
        ('raise StuckError("stuck for good")', 1, "thinwire: error: stuck for good"),
        # Its volunteer left while a thread compiles.
        ("return main.INTERRUPTED", 130, ""),
    ],
)
def test_the_process_ends_although_its_thread_does_not(
    ends: str, code: int, words: str, prefork: Prefork, tmp_path: Path
) -> None:
    script, complaints = tmp_path / "hangs.py", tmp_path / "stderr"
    script.write_text(HANGS.replace("ENDS", ends))
    with complaints.open("wb") as stderr:
        process = prefork.popen(
            (sys.executable, str(script)), stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert process.stdout is not None
    with process.stdout as said:
        assert said.read() == "released\n"
    assert process.wait(150) == code
    assert complaints.read_text().strip() == words
