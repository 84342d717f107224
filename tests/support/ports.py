"""Loopback ports for processes that need a known port, or the same one again."""

import contextlib
import random
import socket

FROM, TO = 20_000, 32_000
"""Below Linux's ephemeral ports: nobody gets one of these by chance between the check and its use, or while a
coordinator is down."""


def free_port(neighbours: int = 0) -> int:
    """A free port, with the next `neighbours` ports free too."""
    while True:
        port = random.SystemRandom().randrange(FROM, TO)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for number in range(port, port + neighbours + 1):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
