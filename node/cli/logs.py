"""Logs: one line each on stderr, apart from the results on stdout."""

import logging
import os
import sys


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable at run time
    """Writes to what `sys.stderr` is at that moment: the live display puts itself in front of it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up_logging() -> None:
    """Log INFO and above to stderr; `THINWIRE_LOG=debug` (or warning, error) sets another level.

    Call it before grpc is imported: gRPC's core reads its own verbosity once, and tells users of every
    connection that a peer closed.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    level = os.environ.get("THINWIRE_LOG", "info").upper()
    if level not in logging.getLevelNamesMapping():
        level = "INFO"
    logging.basicConfig(level=level, handlers=[handler])
