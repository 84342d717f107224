"""A node's control session with the coordinator: its connection, identity and last message.

The session reconnects when the connection breaks, and it can still report an error that ends the node.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from node.stage.coordinator_client import CoordinatorClient
from node.telemetry.format import printable
from wire.errors import (
    LinkError,
    LinkLostError,
    MemoryExhaustedError,
    NotYetError,
    RefusalCode,
    Refused,
    ThinwireError,
    TokenError,
    UserError,
)
from wire.identity.credentials import NodeIdentity
from wire.messages import LONGEST_REASON, CoordinatorMessage, Hello, Leave, NodeMessage
from wire.pacing import RECONNECT_SECONDS, Backoff

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 5.0
"""The seconds for which a failing node tries to send the reason. It takes one round trip on an open
connection, and several without."""
CLOSE_SECONDS = 5.0
RENEW_RETRY_SECONDS = 10.0


class IdentityHolder:
    """The newest identity. Read it at each dial and each accept, so that a renewal needs no restart."""

    def __init__(
        self,
        identity: NodeIdentity,
        directory: Path,
        join_again: Callable[[], Awaitable[NodeIdentity]] | None = None,
    ) -> None:
        """`join_again` gets a new certificate with the join token after this one has expired."""
        self.current = identity
        self.join_again = join_again
        self._directory = directory

    def replace(self, identity: NodeIdentity) -> None:
        """Use `identity` from now on and save it. Raises OSError or UserError if it cannot be written."""
        self.current = identity
        identity.save(self._directory)

    @property
    def node_id(self) -> str:
        return self.current.node_id

    @property
    def ca_pem(self) -> bytes:
        return self.current.ca_pem

    @property
    def certificate_pem(self) -> bytes:
        return self.current.certificate_pem

    @property
    def key_pem(self) -> bytes:
        return self.current.key_pem

    def server_name(self, node_id: str) -> str:
        return self.current.server_name(node_id)


async def renew_certificates(identity: IdentityHolder, client: CoordinatorClient) -> None:
    """Renew the certificate in time, until cancelled. The time depends on the node id.

    Raises LinkError if this machine's clock is wrong: if it is far ahead, every certificate needs renewal.
    """
    while True:
        await asyncio.sleep(RENEW_RETRY_SECONDS)
        # Look repeatedly, because the event loop's clock stops while the machine is suspended.
        if identity.current.renewal_time > time.time():
            continue
        try:
            if identity.join_again is not None and identity.current.expires_at <= time.time():
                log.warning("%s; joining again with the token", identity.current.ended())
                renewed = await identity.join_again()
            else:
                renewed = identity.current.renewed(await client.renew(identity.current.csr_der()))
        except (LinkError, TokenError) as error:
            log.warning("the certificate was not renewed: %s", error)
            continue
        renewed.check_clock(time.time())
        try:
            await asyncio.to_thread(identity.replace, renewed)
        except (OSError, UserError) as error:
            # This process uses the new certificate; later processes on this machine would find the old one.
            log.warning("the renewed certificate was not saved: %s", error)


class Session:
    """Reconnects after a broken connection until the outage limit. Call everything on the event loop.

    The connection stays open after `run` fails, so that the node can report why; `close` ends it.
    """

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._outbox: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self.post = self._outbox.put_nowait
        """Queues a message for the coordinator."""
        self._connection: asyncio.Task[None] | None = None
        self.leaving = False
        """Whether this node has asked to leave the run."""
        self._ending = self._closed = False

    def leave(self, reason: str) -> None:
        """Ask to leave the run. The request is repeated on each new connection."""
        self.leaving = True
        self.post(Leave(reason=reason))

    async def run(
        self, hello: Callable[[], Hello], handle: Callable[[CoordinatorMessage], Awaitable[None]]
    ) -> None:
        """Keep the connection until it is closed or this is cancelled.

        Args:
            hello: this node's current description, sent at the start of each connection.
            handle: called with one message at a time.

        Raises LinkLostError, Refused, or what `handle` raises; after the latter the connection stays open.
        """
        loop = asyncio.get_running_loop()
        fault: asyncio.Future[Exception] = loop.create_future()

        async def handle_or_end(message: CoordinatorMessage) -> None:
            # An error of the node ends the node but not the connection, which still carries the reason.
            if self._ending or fault.done():
                return
            try:
                await handle(message)
            except (LinkError, Refused):
                raise
            except Exception as error:  # `fault` passes it to `run`
                fault.set_result(error)

        connection = self._connection = loop.create_task(self._keep(hello, handle_or_end))
        either: set[asyncio.Future[Any]] = {fault, connection}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ending = True
        if fault.done():
            raise fault.result()
        connection.result()

    async def farewell(self, reason: str) -> None:
        """Report to the coordinator why this node ends, within `FAREWELL_SECONDS`. Call it after `run`.

        The coordinator answers by closing the connection.
        """
        if self._connection is None:
            return
        # Waiting messages are obsolete.
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self.post(Leave(reason=reason, failed=True))
        await asyncio.wait([self._connection], timeout=FAREWELL_SECONDS)

    async def close(self) -> None:
        self._ending = self._closed = True
        if (connection := self._connection) is None:
            return
        connection.cancel()
        await asyncio.wait([connection], timeout=CLOSE_SECONDS)
        if connection.done() and not connection.cancelled():
            connection.exception()  # `run` has raised it, or nobody needs it

    # ---- inside

    async def _keep(
        self, hello: Callable[[], Hello], handle: Callable[[CoordinatorMessage], Awaitable[None]]
    ) -> None:
        last_contact = time.monotonic()
        backoff = Backoff(0.1, RECONNECT_SECONDS)
        was_in = warned = False

        def connected() -> None:
            nonlocal last_contact, was_in, warned
            backoff.reset()
            last_contact, was_in, warned = time.monotonic(), True, False
            if self.leaving and not self._ending:
                self.post(Leave(reason="repeated after a reconnect"))

        # Python 3.11 loses a cancellation that meets a failing stream, so check the flag too.
        while not self._closed:
            began = time.monotonic()
            try:
                await self._client.session(hello(), self._outbox, handle, connected)
            except (LinkError, Refused) as error:
                # The coordinator checks at each connection whether it can reach this node. If it could
                # before, the failure may be temporary.
                passing = was_in and isinstance(error, Refused) and error.code is RefusalCode.UNREACHABLE
                if not (passing or isinstance(error, LinkError)):
                    raise
                if self._ending and self._outbox.empty():
                    return  # the farewell has been sent
                # Read once, because a busy machine's delay between two lines is no outage.
                now = time.monotonic()
                if isinstance(error, NotYetError):
                    last_contact = now + backoff.seconds  # the coordinator answers, so this is no outage
                    if not warned:
                        log.warning("%s", error)
                        warned = True
                elif last_contact >= began:
                    last_contact = now
                    log.warning("%s; connecting again", error)
                limit = self._client.outage_seconds
                if now + backoff.seconds - last_contact > limit:
                    raise LinkLostError(
                        f"the coordinator at {self._client.address} did not answer for {limit:g} s: {error}"
                    ) from None
            await asyncio.sleep(backoff.advance())


def short_reason(error: BaseException) -> str:
    """Why this node ends, for the coordinator, in one line of at most `LONGEST_REASON` characters.

    A ThinwireError is written for users. For any other error only its type is sent, because its text may hold
    private data.
    """
    match error:
        case MemoryExhaustedError():
            text = error.happened
        case ThinwireError():
            text = str(error)
        case OSError(errno=int(number)):
            text = f"its system refused an operation ({os.strerror(number)})"
        case _:
            text = f"a fault in thinwire ({type(error).__name__})"
    text = printable(text)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
