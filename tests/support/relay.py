"""A TCP relay for tests: counts bytes, cuts connections, stops forwarding."""

import asyncio
from dataclasses import dataclass, field
from types import TracebackType


@dataclass
class Relayed:
    """One connection through the relay; bytes towards the server and back."""

    up_bytes: int = 0
    down_bytes: int = 0
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    frozen: bool = False
    """What comes is taken and goes nowhere."""

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Relay:
    """`async with Relay(port) as relay:` forwards `relay.port` on loopback to `port`.

    `cut_after` cuts every connection, once, when one of them has carried that many bytes towards the server.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.connections: list[Relayed] = []
        self.cut_after: int | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._target = target
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    @property
    def up_bytes(self) -> int:
        return sum(c.up_bytes for c in self.connections)

    @property
    def down_bytes(self) -> int:
        return sum(c.down_bytes for c in self.connections)

    def cut(self) -> None:
        """Reset every open connection; new ones are accepted."""
        for connection in self.connections:
            connection.cut()

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=5)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        connection = Relayed(writers=[writer])
        self.connections.append(connection)
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
            connection.writers.append(forth)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(connection, reader, forth, upward=True))
                group.create_task(self._copy(connection, back, writer, upward=False))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            connection.cut()
            self._handlers.discard(task)

    async def _copy(
        self,
        connection: Relayed,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        upward: bool,
    ) -> None:
        while data := await reader.read(65536):
            await self.flowing.wait()
            if connection.frozen:
                continue
            if upward:
                connection.up_bytes += len(data)
            else:
                connection.down_bytes += len(data)
            if self.cut_after is not None and connection.up_bytes >= self.cut_after:
                self.cut_after = None
                self.cut()
                return
            writer.write(data)
            await writer.drain()
        writer.close()
