"""The event loop of every process: uvloop where it is installed (Linux and macOS), else asyncio's own."""

import asyncio
import atexit
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
"""Larger blocks of memory return to the system when they are freed."""
_END_SECONDS = 5.0


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run`, but on uvloop if it is installed. Ctrl-C cancels `main` and raises
    KeyboardInterrupt."""
    _keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


def _keep_freed_memory() -> None:
    """Make malloc keep the memory of messages. Otherwise a message of 1 MiB and each copy of it cause 256
    page faults, which take a tenth of a link's processor time or more.

    After glibc has freed a mapped block, it maps only larger ones, and keeps up to twice that size free at
    the end of each arena. With other C libraries this has no effect.
    """
    bytes(KEPT_BLOCK_BYTES)


@functools.cache
def carrier() -> asyncio.AbstractEventLoop:
    """A second loop on its own thread, which forwards bytes so that the process's loop need not."""
    loop = uvloop.new_event_loop() if uvloop else asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=run, name="carrier", daemon=True)
    thread.start()

    def end() -> None:
        """Stop it before the interpreter ends: uvloop's timers would use what is gone by then."""
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)

    atexit.register(end)
    return loop


def on_thread(work: Callable[[], Result], name: str) -> "asyncio.Future[Result]":
    """Run `work` on a new thread; the future has its result or exception. The thread may outlive the caller,
    but not the process."""
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
