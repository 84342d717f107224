"""The open control sessions of a run: one a node, the newest."""

import asyncio
from collections.abc import Iterator

from node.telemetry.events import NodeJoined
from wire.messages import CoordinatorMessage, Finish, Hello

MOST_WAITING = 64
"""Messages that wait to be sent to a node before answers to its heartbeats are left out."""


class ControlSession:
    """One node's open control connection."""

    def __init__(self, node_id: str, hello: Hello, address: str) -> None:
        self.node_id = node_id
        self.hello = hello
        self.address = address
        """host:port where neighbours reach the node."""
        self._outbox: asyncio.Queue[CoordinatorMessage | None] = asyncio.Queue()

    @property
    def joined(self) -> NodeJoined:
        hello = self.hello
        return NodeJoined(
            node_id=self.node_id,
            device=hello.hardware.device,
            address=self.address,
            name=hello.name,
            listens=bool(hello.peer_address),
        )

    def send(self, message: CoordinatorMessage) -> None:
        self._outbox.put_nowait(message)

    def answer(self, message: CoordinatorMessage) -> None:
        """Send a reply, unless the node keeps asking without reading its replies."""
        if self._outbox.qsize() < MOST_WAITING:
            self.send(message)

    def close(self) -> None:
        """End the connection once everything queued has been sent."""
        self._outbox.put_nowait(None)

    async def next(self) -> CoordinatorMessage | None:
        return await self._outbox.get()


class Sessions:
    """Messages to a node without a session are dropped: it is sent what it missed when it reconnects."""

    def __init__(self) -> None:
        self._newest: dict[str, ControlSession] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()

    def __iter__(self) -> Iterator[ControlSession]:
        return iter(self._newest.values())

    def __contains__(self, session: ControlSession) -> bool:
        """False once a newer session of the same node is open."""
        return self._newest.get(session.node_id) is session

    def add(self, session: ControlSession) -> None:
        """Add a session; an older one of the same node is closed."""
        if (older := self._newest.get(session.node_id)) is not None:
            if older.hello.process_nonce != session.hello.process_nonce:
                # Otherwise two live processes of one node would keep closing each other's session.
                older.send(Finish(reason="another process has joined as this node", failed=True))
            older.close()
        self._newest[session.node_id] = session
        self._deserted.clear()

    def remove(self, session: ControlSession) -> None:
        """An added session has ended."""
        del self._newest[session.node_id]
        if not self._newest:
            self._deserted.set()

    def send(self, node_id: str, message: CoordinatorMessage) -> bool:
        """Queue a message; False if the node has no session."""
        session = self._newest.get(node_id)
        if session is not None:
            session.send(message)
        return session is not None

    def close(self, node_id: str) -> None:
        """End a node's session once everything queued has been sent."""
        if (session := self._newest.get(node_id)) is not None:
            session.close()

    async def deserted(self) -> None:
        """Wait until no session is open."""
        await self._deserted.wait()
