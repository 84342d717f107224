"""Loopback ports for processes that need a known port, or the same one again."""

import contextlib
import random
import socket
from pathlib import Path

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


def listening(pid: int) -> set[str]:
    """Local addresses (in the kernel's hexadecimal) of a process's listening TCP sockets. Linux only."""
    process = Path(f"/proc/{pid}")
    inodes = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            _, address, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and inode in inodes:
                found.add(address)
    return found
