"""A stream whose failure ends nothing: whoever reads a run's output may go, and the run goes on."""

import logging
from typing import Any, TextIO, cast

from node.display.terminal import discard

_log = logging.getLogger(__name__)


def lasting(stream: TextIO) -> TextIO:
    """`stream`, which drops all that comes after the first write that fails; that is logged once."""
    return cast(TextIO, _Lasting(stream))


class _Lasting:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._broken:
            try:
                self._stream.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        discard(self._stream)
        _log.warning("the output cannot be written (%s); the run goes on without it", error.strerror or error)
