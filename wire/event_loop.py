"""The event loop of every process: uvloop where it is installed (Linux and macOS), else asyncio's own."""

import asyncio
import functools
import importlib
import threading
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")


def _import_uvloop() -> ModuleType | None:
    try:
        return importlib.import_module("uvloop")
    except ImportError:
        return None


uvloop = _import_uvloop()


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on uvloop where there is one. Ctrl-C cancels `main` and raises KeyboardInterrupt."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uvloop else None) as runner:
        return runner.run(main)


@functools.cache
def carrier() -> asyncio.AbstractEventLoop:
    """A second loop, on a thread of its own, which passes bytes on so that the process's loop need not."""
    loop = uvloop.new_event_loop() if uvloop else asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="carrier", daemon=True).start()
    return loop


def loop_name() -> str:
    """The event loop that `run` uses, with its version."""
    return f"uvloop {uvloop.__version__}" if uvloop else "asyncio"
