"""A node's control session with the coordinator: kept over broken connections, up to the node's last word."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from node.stage.coordinator_client import CoordinatorClient
from wire.errors import LinkError, LinkLostError, NotYetError, RefusalCode, Refused
from wire.messages import CoordinatorMessage, Hello, Leave, NodeMessage

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 5.0
"""How long a node that must end tries to tell the coordinator why. A connection that is there takes a round
trip for it; one that is not, several."""
CLOSE_SECONDS = 5.0


class Session:
    """Dials again when the connection breaks, for as long as an outage may last. All of it on the event loop.

    The connection outlasts `run`, so that a node whose other tasks have failed can still say so: `close` ends
    it.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        hello: Callable[[], Hello],
        handle: Callable[[CoordinatorMessage], Awaitable[None]],
    ) -> None:
        """
        Args:
            hello: what this node is at the moment, said at the beginning of each connection.
            handle: called with each message, one at a time, while `run` runs.
        """
        self._client = client
        self._hello = hello
        self._handle = handle
        self._outbox: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self._connection: asyncio.Task[None] | None = None
        self._leaving = self._ending = self._closed = False

    def post(self, message: NodeMessage) -> None:
        """Queue a message for the coordinator."""
        self._outbox.put_nowait(message)

    def leave(self, reason: str) -> None:
        """Ask to go, on each connection anew until one brings the coordinator's goodbye."""
        self._leaving = True
        self.post(Leave(reason=reason))

    async def run(self) -> None:
        """Hold the connection until it is closed or this is cancelled.

        Raises LinkLostError or Refused; also what `handle` raises, and then the connection stays.
        """
        loop = asyncio.get_running_loop()
        self._fault: asyncio.Future[Exception] = loop.create_future()
        self._connection = loop.create_task(self._keep())
        either: set[asyncio.Future[Any]] = {self._fault, self._connection}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ending = True
        if self._fault.done():
            raise self._fault.result()
        self._connection.result()

    async def farewell(self, reason: str) -> None:
        """Tell the coordinator why this node ends, for at most `FAREWELL_SECONDS`. After `run`.

        It answers by closing the connection.
        """
        if self._connection is None:
            return
        # What waits to be said is of no use any more.
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self.post(Leave(reason=reason, failed=True))
        await asyncio.wait([self._connection], timeout=FAREWELL_SECONDS)

    async def close(self) -> None:
        """End the connection, if there is one."""
        self._ending = self._closed = True
        if (connection := self._connection) is None:
            return
        connection.cancel()
        await asyncio.wait([connection], timeout=CLOSE_SECONDS)
        if connection.done() and not connection.cancelled():
            connection.exception()  # `run` has told of it, or it is of no interest any more

    # ---- inside

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        last_contact = loop.time()
        delay = 0.1
        was_in = told = False

        def connected() -> None:
            nonlocal last_contact, delay, was_in, told
            last_contact, delay, was_in, told = loop.time(), 0.1, True, False
            if self._leaving and not self._ending:
                self.post(Leave(reason="said before, perhaps unheard"))

        # Python 3.11 forgets a cancellation that meets a failing stream, so the flag is looked at too.
        while not self._closed:
            began = loop.time()
            try:
                await self._client.session(self._hello(), self._outbox, self._heed, connected)
            except (LinkError, Refused) as error:
                # The coordinator looks at each connection whether it can reach this node. If it could before,
                # that may be a matter of moments, as it is with any other connection.
                passing = was_in and isinstance(error, Refused) and error.code is RefusalCode.UNREACHABLE
                if not (passing or isinstance(error, LinkError)):
                    raise
                if self._ending and self._outbox.empty():
                    return  # the last word is said
                if isinstance(error, NotYetError):
                    last_contact = loop.time() + delay  # it is there until it is asked again
                    if not told:
                        log.warning("%s", error)
                        told = True
                elif last_contact >= began:
                    last_contact = loop.time()
                    log.warning("%s; connecting again", error)
                limit = self._client.outage_seconds
                if loop.time() + delay - last_contact > limit:
                    raise LinkLostError(
                        f"the coordinator at {self._client.address} did not answer for {limit:g} s: {error}"
                    ) from None
            await asyncio.sleep(delay)
            delay = min(2 * delay, 2.0)

    async def _heed(self, message: CoordinatorMessage) -> None:
        """A fault of the node's own ends the node, not the connection: that takes the reason along."""
        if self._ending or self._fault.done():
            return
        try:
            await self._handle(message)
        except (LinkError, Refused):
            raise
        except Exception as error:
            self._fault.set_result(error)
