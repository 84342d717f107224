"""Ports of loopback for processes that must be told one beforehand, or be found at the same one again."""

import contextlib
import random
import socket

FROM, TO = 20_000, 32_000
"""Below those that Linux gives to outgoing connections and to listeners that take any: nobody gets a port
from here by chance between the look and its use, or while a coordinator is down."""


def free_port(neighbours: int = 0) -> int:
    """A port at which nobody listens, nor at the `neighbours` next ones."""
    while True:
        port = random.SystemRandom().randrange(FROM, TO)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for number in range(port, port + neighbours + 1):
                sockets.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
