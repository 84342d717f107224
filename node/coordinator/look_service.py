"""What the coordinator can see of the holder of a join token, for `thinwire doctor`. Nothing is stored.

The coordinator dials only the holder's own address, as for a node that joins.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from wire.dialing import knock
from wire.identity.enrolment import Hardware, JoinRequest, Refusal
from wire.v1 import enrolment_pb2 as pb

REACH_SECONDS = 4.0
"""The seconds for an attempt to dial back."""
MOST_RELAYS = 3
"""The most relays in a reply."""
MOST_SENTENCES, MOST_CHARACTERS = 20, 1000
"""The most sentences and characters of a reply about the run's links. A reply has at most 64 KiB."""
PADDING = bytes(60_000)
"""A message for measuring a rate."""
PADDINGS = 32
PADDING_SECONDS = 4.0
"""The seconds for sending them. On a slow line, fewer are sent."""
MOST_AT_ONCE = 4

Context = grpc.aio.ServicerContext[Any, Any]


class Looks:
    """The method `Look` of the join port."""

    def __init__(
        self,
        first: Callable[[AsyncIterator[pb.LookRequest]], Awaitable[pb.LookRequest | None]],
        refuse: Callable[[JoinRequest, str], Awaitable[Refusal | None]],
        would_refuse: Callable[[str, bytes], str],
        source: Callable[[str], str],
        control_port: Callable[[], int],
    ) -> None:
        """
        Args:
            first: returns a call's first request. Raises `TimeoutError` if it does not arrive in time.
            refuse: returns why a gRPC peer holds no token. Raises `TimeoutError` if it asks too often.
            would_refuse: returns why a token (id, secret) would not admit a node. It blocks.
            source: returns the IP address of gRPC's peer.
            control_port: the port that admitted nodes use next; 0: the same port.
        """
        self.relays: Callable[[], list[str]] = list
        """Returns host:port of volunteers that relay, the fastest first."""
        self.relayed = False
        """Whether the coordinator relays."""
        self.links: Callable[[], Awaitable[list[str]]] = _no_links
        """Returns the paths of the run's links, in sentences."""
        self.precision = self.compute = ""
        """The keys of `[training]` that decide what a device must support to join."""
        self._first = first
        self._refuse = refuse
        self._would_refuse = would_refuse
        self._source = source
        self._control_port = control_port
        self._asking: set[str] = set()
        """Tokens whose holders are being answered."""

    async def look(
        self, requests: AsyncIterator[pb.LookRequest], context: Context
    ) -> AsyncIterator[pb.LookReply]:
        """Answer one call. The join port ends its connection after a while, and with it the call."""
        try:
            first = await self._first(requests)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no request arrived")
        except DecodeError:
            first = None
        if first is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not a request")
        source, token = self._source(context.peer()), first.token_id
        request = JoinRequest(
            version=first.version,
            protocol=first.protocol,
            run_id=first.run_id,
            token_id=token,
            secret=first.secret,
            csr_der=b"",
            hardware=Hardware(device="", cores=0, memory_bytes=0),
        )
        try:
            refusal = await self._refuse(request, context.peer())
        except TimeoutError:
            refusal = None
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests: ask again later")
        if refusal is not None:
            yield pb.LookReply(refusal=pb.Refusal(code=refusal.code, message=refusal.message))
            return
        if token in self._asking or len(self._asking) >= MOST_AT_ONCE:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others ask: ask again later")
        self._asking.add(token)
        try:
            yield pb.LookReply(seen=await self._seen(first, source))
            began = time.monotonic()
            for _ in range(PADDINGS):
                yield pb.LookReply(padding=PADDING)
                if time.monotonic() - began > PADDING_SECONDS:
                    break
            yield pb.LookReply(padding=b"")
            async for more in requests:
                if not more.padding:
                    break
            yield pb.LookReply(done=True)
        finally:
            self._asking.discard(token)

    async def _seen(self, first: pb.LookRequest, source: str) -> pb.Seen:
        refusal, reached, mapped = await asyncio.gather(
            asyncio.to_thread(self._would_refuse, first.token_id, first.secret),
            _reached(source, first.port),
            _reached(source, first.mapped_port),
        )
        links = await self.links()
        return pb.Seen(
            host=source,
            reached=reached,
            mapped_reached=mapped,
            relayed=self.relayed,
            relays=self.relays()[:MOST_RELAYS],
            links=[sentence[:MOST_CHARACTERS] for sentence in links[:MOST_SENTENCES]],
            refusal=refusal,
            control_port=self._control_port(),
            precision=self.precision,
            compute=self.compute,
        )


async def _no_links() -> list[str]:
    return []


async def _reached(host: str, port: int) -> bool:
    """Whether the address accepts a connection."""
    if not 0 < port < 1 << 16:
        return False
    try:
        async with asyncio.timeout(REACH_SECONDS):
            await knock((host,), port)
    except OSError:  # includes TimeoutError
        return False
    return True
