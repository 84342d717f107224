"""Reads a run's view from its history without reading the whole history.

`history-view.json` has a view builder's state, and the position in the history up to which it has read. It is
a cache: every reader continues from it, and a reader that has read `SAVE_BYTES` more writes a new one. During
the run the history's writer does so (`refresh`), so readers parse little more than `INDEX_BYTES` of events,
or `INDEX_TIMES` the checkpoint's size.
"""

import contextlib
import json
import os
import threading
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from node.telemetry.events import plain_fields, read_value
from node.telemetry.history import INDEX_BYTES, Cancelled, first_line, history_size, read_whole_lines
from node.view.view_builder import RunViewBuilder
from wire.errors import ProtocolViolationError
from wire.version import VERSION

CHECKPOINT_FILE = "history-view.json"
SAVE_BYTES = INDEX_BYTES
PROGRESS_BYTES = 64 << 20
"""While a long history without a checkpoint is read, one is saved after every this many bytes, in case the
reader is stopped."""


def read_view(
    directory: Path, end: int | None = None, cancelled: Cancelled = lambda: False
) -> tuple[RunViewBuilder, int]:
    """The run in `directory` after its history, and the position up to which it was read.

    An unfinished last line is not read.

    Args:
        end: stop at lines that begin at this position or later.
        cancelled: asked between lines. If it returns true, the result covers what was read so far.

    Raises:
        RunError: the history cannot be read.
    """
    builder, position = _load(directory, end)
    saved = position
    for after, entry in read_whole_lines(directory, position, end):
        if cancelled():
            break
        if entry is not None:
            builder.apply(entry.event, entry.at)
        position = after
        if position - saved >= PROGRESS_BYTES:
            _save(directory, builder, position)
            saved = position
    if position - saved >= SAVE_BYTES:
        _save(directory, builder, position)
    return builder, position


def refresh(directory: Path, cancelled: Cancelled) -> int:
    """Update the checkpoint to the end of the history. Returns its size in bytes, or 0 without a checkpoint.

    Raises:
        RunError: the history cannot be read.
    """
    read_view(directory, cancelled=cancelled)
    with contextlib.suppress(OSError):
        return (directory / CHECKPOINT_FILE).stat().st_size
    return 0


def _load(directory: Path, end: int | None) -> tuple[RunViewBuilder, int]:
    """The builder and its position from the checkpoint; a new builder and 0 if there is no usable one."""
    try:
        raw = json.loads((directory / CHECKPOINT_FILE).read_bytes())
        position = raw["position"]
        usable = (
            type(position) is int
            and 0 <= position <= (history_size(directory) if end is None else end)
            and (raw["version"], raw["head"]) == (VERSION, _head(directory))
            and {*raw["state"]} == {field.name for field in fields(RunViewBuilder)}
        )
        if usable:
            builder: RunViewBuilder = read_value(raw["state"], RunViewBuilder, "state")
            return builder, position
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ProtocolViolationError):
        pass  # there is no checkpoint, or it is damaged: the history has everything
    return RunViewBuilder(), 0


def _save(directory: Path, builder: RunViewBuilder, position: int) -> None:
    """Save a checkpoint if possible. The directory may be read-only, or its disk full."""
    whole = {
        "version": VERSION,
        "head": _head(directory),
        "position": position,
        "state": builder,
    }
    partial = directory / f"{CHECKPOINT_FILE}.{os.getpid()}-{threading.get_ident()}.partial"
    try:
        # Encoded as a whole: writing piece by piece is many times slower, and slows the run's steps.
        text = json.dumps(whole, separators=(",", ":"), default=plain_fields)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(directory / CHECKPOINT_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _head(directory: Path) -> str:
    """A digest of the history's first line, which differs from run to run."""
    return sha256(first_line(directory)).hexdigest()
