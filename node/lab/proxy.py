"""An HTTP proxy that supports only the method CONNECT: the only way out of one of the lab's networks.

    python -m node.lab.proxy HOST:PORT

It writes "ready" to stdout once it listens.
"""

import asyncio
import base64
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from wire.identity.names import split_address


@dataclass
class HttpProxy:
    port: int = 0
    user: str = ""
    """The user:password that it requires; empty requires none."""
    ports: frozenset[int] | None = None
    """The ports that it connects to; None means all."""
    connected: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    tasks: set["asyncio.Task[object]"] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        stack = contextlib.ExitStack()
        stack.callback(writer.close)
        with stack, contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target = (*head.split("\r\n", 1)[0].split(" "), "", "")[:2]
            answer = self._refusal(method, target, head)
            if answer:
                self.refused.append(target)
                writer.write(f"HTTP/1.1 {answer}\r\n\r\n".encode())
            else:
                await self._connect(target, reader, writer)
            await writer.drain()

    def _refusal(self, method: str, target: str, head: str) -> str:
        wanted = f"proxy-authorization:basic{base64.b64encode(self.user.encode()).decode()}\r\n"
        if self.user and wanted.lower() not in head.replace(" ", "").lower():
            return "407 Proxy Authentication Required"
        try:
            _, port = split_address(target)
        except ValueError:
            return "400 Bad Request"
        if method != "CONNECT" or (self.ports is not None and port not in self.ports):
            return "403 Forbidden"
        return ""

    async def _connect(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_there, to_there = await asyncio.open_connection(*split_address(target))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
            return
        self.connected.append(target)
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: lab\r\n\r\n")
        try:
            await asyncio.gather(_pump(reader, to_there), _pump(from_there, writer))
        finally:
            to_there.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def http_proxy(
    user: str = "", ports: frozenset[int] | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[HttpProxy]:
    """A proxy that serves inside the block. `listen` is host:port."""
    host, _, number = listen.rpartition(":")
    proxy = HttpProxy(user=user, ports=ports)
    server = await asyncio.start_server(proxy.serve, host, int(number))
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        tasks = list(proxy.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports close their sockets in the loop's next turn


async def _main(listen: str) -> None:
    async with http_proxy(listen=listen):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
