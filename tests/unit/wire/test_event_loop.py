"""Which event loop a process runs on, and what ends it."""

import asyncio
import os
import platform
import signal
import subprocess
import sys

import pytest

from wire import event_loop


async def _name() -> str:
    return type(asyncio.get_running_loop()).__module__


def test_uvloop_runs_and_returns_the_result() -> None:
    assert event_loop.run(_name()).startswith("uvloop")


def test_without_uvloop_it_is_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "uvloop", None)
    assert event_loop.run(_name()).startswith("asyncio") and event_loop.loop_name() == "asyncio"


@pytest.mark.parametrize("fallback", [False, True])
def test_ctrl_c_cancels_and_raises(monkeypatch: pytest.MonkeyPatch, fallback: bool) -> None:
    if fallback:
        monkeypatch.setattr(event_loop, "uvloop", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    cancelled = []

    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    try:
        with pytest.raises(KeyboardInterrupt):
            event_loop.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert cancelled == [True]


CARRIES = """
import atexit, os, threading
atexit.register(lambda: os._exit("carrier" in {thread.name for thread in threading.enumerate()}))
from wire.event_loop import carrier
carrier()
"""


def test_the_carrier_ends_before_the_interpreter_does() -> None:
    """A timer that came due on its thread after that ended the process by a segmentation fault."""
    assert subprocess.run([sys.executable, "-c", CARRIES], timeout=150).returncode == 0


MESSAGES = """
import asyncio, resource, sys, threading
from wire import event_loop

async def main(): pass

def messages(count):
    for _ in range(count):
        [bytearray(1_000_000) for _ in range(8)]

def measured():
    messages(3)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    messages(20)
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

if sys.argv[1:]:
    event_loop.run(main())
thread = threading.Thread(target=measured)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other systems' malloc decides for itself")
def test_messages_use_memory_again() -> None:
    plain, ours = (
        int(subprocess.check_output([sys.executable, "-c", MESSAGES, *arguments], text=True, timeout=150))
        for arguments in ([], ["run"])
    )
    assert plain > 10_000 and ours < 1000
