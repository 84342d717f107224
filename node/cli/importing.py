"""Imports that take seconds."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Modules are imported inside, and stay: Python does not look for garbage among them, which takes a sixth
    of the time that torch takes to load, and does not look at them again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
