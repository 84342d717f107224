"""The event loop of every process: uvloop where it is installed (Linux and macOS), else asyncio's own."""

import asyncio
import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


def _import_uvloop() -> ModuleType | None:
    try:
        return importlib.import_module("uvloop")
    except ImportError:
        return None


uvloop = _import_uvloop()
KEPT_BLOCK_BYTES = 16 * 1024 * 1024
"""Larger blocks of memory go back to the system when they are freed."""


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, but on uvloop if it is installed. Ctrl-C cancels `main` and raises
    KeyboardInterrupt."""
    _keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


def _keep_freed_memory() -> None:
    """Have malloc keep the memory of messages. Otherwise a message of 1 MiB and each copy of it take 256 page
    faults, a tenth of a link's processor time and more.

    Once glibc has freed a block that it had mapped, it maps only larger ones, and keeps at most twice as much
    free memory at the end of each arena. Elsewhere this does nothing.
    """
    bytes(KEPT_BLOCK_BYTES)


@functools.cache
def carrier() -> asyncio.AbstractEventLoop:
    """A second loop, on a thread of its own, which passes bytes on so that the process's loop need not."""
    loop = uvloop.new_event_loop() if uvloop else asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="carrier", daemon=True).start()
    return loop


def on_thread(work: Callable[[], Result], name: str) -> "asyncio.Future[Result]":
    """Return or raise what `work` does, on its own thread. The thread may outlive its caller, but never the
    process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(Result, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def loop_name() -> str:
    """The event loop that `run` uses, with its version."""
    return f"uvloop {uvloop.__version__}" if uvloop else "asyncio"
