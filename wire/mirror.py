"""Tells a client the address that its connection comes from, which shows what a NAT does.

A client sends `REQUEST`, gets `host:port` and a line feed, and the connection ends. Two such answers, from
different machines to connections from one local port, show whether a NAT maps a port in the same way for
every target. Coordinators and relays answer over TCP, so nobody can make a mirror send anything to another
machine.
"""

import asyncio
import socket

from wire.admission import Limits
from wire.descriptors import raise_limit
from wire.dialing import Place, dial_from
from wire.errors import LinkError
from wire.front import Front
from wire.identity.names import join_address, split_address

REQUEST = b"?thinwire\n"
"""The request begins unlike TLS and HTTP."""
ANSWER_SECONDS = 5.0
_MOST_ANSWER = 128


def make_mirror() -> Front:
    """The service, for a `wire.door.Door`. Call it on the event loop."""
    loop = asyncio.get_running_loop()
    return Front(
        Limits.of_strangers(raise_limit(), ANSWER_SECONDS),
        lambda connection: loop.create_task(_answer(connection)),
    )


async def _answer(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with connection:
        data = b""
        while len(data) < len(REQUEST):
            if not (piece := await loop.sock_recv(connection, len(REQUEST) - len(data))):
                return
            data += piece
        if data == REQUEST:
            host, port, *_ = connection.getpeername()
            seen = join_address(str(host).removeprefix("::ffff:"), port)
            await loop.sock_sendall(connection, f"{seen}\n".encode())


async def seen_as(place: Place, own: tuple[str, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    """The local address of a connection to a mirror, and the same end as the mirror sees it.

    Args:
        place: the mirror's address.
        own: the local address, which other connections may use too; port 0 picks a free port.

    Raises LinkError if no mirror answers.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            with await dial_from(place, own) as connection:
                local = connection.getsockname()
                await loop.sock_sendall(connection, REQUEST)
                answer = b""
                while not answer.endswith(b"\n") and len(answer) < _MOST_ANSWER:
                    if not (piece := await loop.sock_recv(connection, _MOST_ANSWER)):
                        break
                    answer += piece
        return (str(local[0]), int(local[1])), split_address(answer.decode("ascii").strip())
    except TimeoutError:
        raise LinkError("no answer in time") from None
    except OSError as error:
        raise LinkError(error.strerror or str(error)) from None
    except ValueError:
        raise LinkError("the answer is not an address") from None
