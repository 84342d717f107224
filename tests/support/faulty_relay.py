"""Relays that spoil what passes: in front of one relay, or of a coordinator's one port, or as a volunteer's
process:

python -m tests.support.faulty_relay join TOKEN --relay 200 ...
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from node.cli.main import main as thinwire
from tests.support.relay import Relay as Forwarder
from tests.support.relay import Relayed
from wire import splice
from wire.client_hello import read_client_hello
from wire.relay import PROTOCOL_NAME

READ_BYTES = 16384
SLOW_SECONDS, VERY_SLOW_SECONDS = 0.02, 2.0
TRICKLE = 2000
"""Bytes a second."""
THROTTLED = 2_000_000
"""Bytes a second."""
LAZY = ("stalls", "stalls upward", "stalls downward", "trickles")
"""Of a relay that carries every byte and makes the run wait."""
FAULTS = ("delays", "throttles", "drops", "repeats", "reorders", "corrupts", "freezes", "dies")


@dataclass
class Spoiler:
    """What a fault does to bytes that pass one way."""

    fault: str
    _held: bytes = b""

    async def spoil(self, data: bytes) -> bytes:
        """What passes on in the place of `data`."""
        match self.fault:
            case "drops":
                return data[: len(data) // 2]
            case "repeats":
                return data + data
            case "reorders":
                data, self._held = (b"", data) if not self._held else (data + self._held, b"")
            case "corrupts":
                return data[:-1] + bytes([data[-1] ^ 1])
            case "delays":
                await asyncio.sleep(SLOW_SECONDS)
            case "stalls":
                await asyncio.sleep(VERY_SLOW_SECONDS)
            case "trickles":
                await asyncio.sleep(len(data) / TRICKLE)
            case "throttles":
                await asyncio.sleep(len(data) / THROTTLED)
        return data


class Faulty(Forwarder):
    """Forwards to a relay and spoils what passes after the first `AFTER` bytes of a connection."""

    AFTER = 100_000

    def __init__(self, target: int, fault: str) -> None:
        super().__init__(target)
        self.fault = fault
        self.spoilt = 0

    async def _copy(
        self,
        connection: Relayed,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        upward: bool,
    ) -> None:
        fault, _, way = self.fault.partition(" ")
        passed, spoiler = 0, Spoiler(fault if way in ("", "upward" if upward else "downward") else "")
        while data := await reader.read(READ_BYTES):
            passed += len(data)
            if passed > self.AFTER:
                self.spoilt += 1
                if self.fault == "dies":
                    self.die()
                    return
                if self.fault == "freezes":
                    self.flowing.clear()
                data = await spoiler.spoil(data)
            await self.flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    def die(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()


@dataclass
class Spoilt:
    """What befell relayed connections so far."""

    port: int = 0
    to_come: list[str] = field(default_factory=lambda: list(FAULTS))


class FaultyPort(Forwarder):
    """Forwards to a coordinator's one port and spoils connections to its relay, by one fault after the other:
    whichever has carried `AFTER` bytes one way, since it began or since its last fault, has the next."""

    AFTER = 50_000

    def __init__(self, target: int, spoilt: Spoilt) -> None:
        super().__init__(target)
        self._spoilt = spoilt
        self._relayed: set[int] = set()

    async def _copy(
        self,
        connection: Relayed,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        upward: bool,
    ) -> None:
        if upward:
            hello = await self._hello(reader)
            if _asks_the_relay(hello):
                self._relayed.add(id(connection))
            writer.write(hello)
        passed, spoiler = 0, Spoiler("")
        while data := await reader.read(READ_BYTES):
            passed += len(data)
            if passed > self.AFTER and id(connection) in self._relayed and self._spoilt.to_come:
                passed, spoiler = 0, Spoiler(self._spoilt.to_come.pop(0))
                if spoiler.fault == "dies":
                    connection.cut()
                    return
                if spoiler.fault == "freezes":
                    await asyncio.Event().wait()  # until the connection ends
            writer.write(await spoiler.spoil(data))
            await writer.drain()
        writer.close()

    async def _hello(self, reader: asyncio.StreamReader) -> bytes:
        """The connection's bytes up to the end of its client hello; what came, if it is none."""
        data = b""
        with contextlib.suppress(ValueError):
            while isinstance(wanted := read_client_hello(data), int):
                if not (piece := await reader.read(wanted - len(data))):
                    break
                data += piece
        return data


def _asks_the_relay(hello: bytes) -> bool:
    try:
        found = read_client_hello(hello)
    except ValueError:
        return False
    return not isinstance(found, int) and PROTOCOL_NAME in found.protocols


@contextlib.contextmanager
def faulty_port(target: int) -> Iterator[Spoilt]:
    """A `FaultyPort` in a thread of its own, inside the block."""
    spoilt, there = Spoilt(), threading.Event()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with FaultyPort(target, spoilt) as port:
            spoilt.port = port.port
            there.set()
            await over.wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=work, name="faulty port")
    thread.start()
    try:
        there.wait()
        yield spoilt
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


# ---- a volunteer's process

CARRIED = 60_000
"""Bytes that a pair's connection carries well, both ways together. A step of the smallest model has 20 kB, so
at least one step is seen to come this way."""


def trickle() -> None:
    """This process's relay joins connections, and from `CARRIED` bytes on it carries `TRICKLE` a second."""
    readable: Callable[[splice._Way], None] = splice._Way._readable

    def late(way: splice._Way) -> None:
        if way._pipe.carried < CARRIED:
            readable(way)
            return
        way._most = TRICKLE
        way._loop.remove_reader(way.source)
        way._loop.call_later(1.0, pass_on, way)

    def pass_on(way: splice._Way) -> None:
        if not way._over:
            readable(way)
        if not way._over and not way.held:
            way.read()

    splice._TURNS = 1
    splice._Way._readable = late  # type: ignore[method-assign]


def main() -> int:
    trickle()
    return thinwire()


if __name__ == "__main__":
    sys.exit(main())
