"""What a coordinator must have to itself before a run begins: the run's directory and two ports."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.run_file.validate import parse_listen
from wire.errors import UserError
from wire.identity.files import make_private_directory
from wire.identity.names import join_address

_LOCK_FILE = "lock"


@contextmanager
def sole_coordinator(directory: Path, *, page_only: bool = False) -> Iterator[None]:
    """Hold the run's directory, however the process ends.

    Raises UserError when another coordinator runs with it: both would hand out the same steps.

    Args:
        page_only: the run is over, and its page is served on; who wants to go on with it must end that first.
    """
    make_private_directory(directory)
    descriptor = os.open(directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(_holder(directory, os.read(descriptor, 64))) from None
        os.ftruncate(descriptor, 0)
        if page_only:
            os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def _holder(directory: Path, written: bytes) -> str:
    """Who has the directory, by what its lock says; between two holders it may say nothing yet."""
    if written.isdigit():
        return (
            f"the run in {directory} is over, and process {written.decode()} still serves its page: end that "
            "process first (as `systemctl restart` does), then go on with the run"
        )
    return f"another coordinator is running with {directory}: end it first, or give another directory"


def check_ports(listen: str, page: tuple[str, int] | None = None) -> None:
    """Raise UserError unless the port of `listen` (host:port) and the next can be had, and that of `page`.

    Port 0 always can. Asked before anything is written, so that a failed start leaves no run behind.
    """
    host, port = parse_listen(listen)
    free = "to an address of this machine whose port and the next are free"
    for number in (port, port + 1) if port else ():
        _check_port(host, number, f"set [coordinator] listen {free}")
    if page is not None and page[1]:
        free = 'to an address of this machine whose port is free, or to "" for no page'
        _check_port(*page, f"that is the page's: set [dashboard] listen {free}")


def _check_port(host: str, port: int, advice: str) -> None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # As gRPC does: a port that is only waiting out closed connections is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen at {join_address(host, port)} ({error.strerror}): {advice}") from None
