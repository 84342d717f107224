"""An HTTP proxy in this process: it knows CONNECT alone, and notes who was connected where."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class HttpProxy:
    port: int = 0
    user: str = ""
    """user:password that it wants; empty: none."""
    ports: frozenset[int] | None = None
    """Ports that it connects to; None: all."""
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
            method, target, _ = head.split("\r\n", 1)[0].split(" ")
            host, _, port = target.rpartition(":")
            wanted = f"Proxy-Authorization: Basic {base64.b64encode(self.user.encode()).decode()}\r\n"
            if self.user and wanted.replace(" ", "").lower() not in head.replace(" ", "").lower():
                writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                self.refused.append(target)
            elif method != "CONNECT" or (self.ports is not None and int(port) not in self.ports):
                writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                self.refused.append(target)
            else:
                there = await asyncio.open_connection(host.strip("[]"), int(port))
                self.connected.append(target)
                writer.write(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
                try:
                    await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
                finally:
                    there[1].transport.abort()
            await writer.drain()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def http_proxy(user: str = "", ports: frozenset[int] | None = None) -> AsyncIterator[HttpProxy]:
    proxy = HttpProxy(user=user, ports=ports)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
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
