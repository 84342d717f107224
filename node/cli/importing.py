"""Speeds up imports that take seconds."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules in this context without garbage collection, which takes a sixth of the time to load
    torch. Modules stay loaded, so later collections skip their objects too."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
