"""Exchanges layers of snapshots between nodes, on the port for neighbours, with mutual TLS.

The requester must have a certificate of the run and know the file's SHA-256. The coordinator tells the
hash only to members, so the hash grants access to that one file. A broken transfer can resume at any byte,
from any holder.

Summed gradients of the newest steps are exchanged in the same way. They have no hash on record, so the
requester compares their norms and digests with those that the run's nodes voted.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from wire.errors import LinkError, ProtocolViolationError
from wire.v1 import control_pb2

LAYER_METHOD = "/thinwire.wire.v1.Layers/Get"
CHUNK_BYTES, MOST_CHUNK_BYTES = 64 * 1024, 256 * 1024
"""The least and the largest size of a chunk. Training traffic may pass between two chunks, so chunks are
large only while one takes less than `QUICK_SECONDS`."""
QUICK_SECONDS = 0.005
SILENT_SECONDS = 30.0
"""The longest wait for the next chunk."""
MOST_TRANSFERS, MOST_OF_A_NODE = 4, 2
"""How many layers a node sends at a time, in total and to one other node. Further requests wait."""
TURN_SECONDS, HANG_UP_SECONDS = 20.0, 5.0
"""How long a transfer may take while others wait, and how much later its connection ends if it is still on.
The rest can be asked for later. So nobody keeps a place by reading slowly."""
AT_ONCE, AGAIN_SECONDS = 8, 60.0
"""A node gets each file at most `AT_ONCE` times, and then once per `AGAIN_SECONDS`. It needs a file once, and
again after a broken connection."""
LEAST_SHARE = 0.125
"""A request counts as this share of a file at least, because the whole file is read and hashed for it."""
MOST_COUNTED = 4096
"""How many files are counted for each requester. One that asks for more of them within a short time gets
none."""
LEAST_RATE = 10_000.0
"""The least rate of a transfer, in bytes per second, after a grace period. A requester leaves a slower sender
for another holder."""


class NotHeldError(LinkError):
    """The node does not have the file, or its copy is damaged."""


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """The requested file, and the first byte to send."""

    step: int
    unit: str
    sha256: str = ""
    offset: int = 0
    sums: bool = False
    """Whether to send the unit's packed gradient sums of `step` instead of a layer's file."""


class LayerSource(Protocol):
    """The files that a node holds."""

    async def read(self, request: LayerRequest) -> bytes | None:
        """The whole file; None unless this node has an undamaged copy."""
        ...

    async def pass_through(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        ...


@dataclass(eq=False)
class _Transfer:
    """A transfer that has a place."""

    hang_up: Callable[[], None]
    began: float
    ends: asyncio.TimerHandle | None = None
    """Ends it, because another waits for its place."""

    def limit(self) -> None:
        loop, until = asyncio.get_running_loop(), self.began + TURN_SECONDS + HANG_UP_SECONDS
        self.ends = loop.call_later(max(HANG_UP_SECONDS, until - time.monotonic()), self.hang_up)

    @property
    def is_over(self) -> bool:
        return self.ends is not None and time.monotonic() > self.began + TURN_SECONDS


class LayerServer:
    """Answers `LAYER_METHOD`."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._turn = asyncio.Semaphore(MOST_TRANSFERS)
        self._waiting = 0
        """How many requests wait for a place."""
        self._transfers: list[_Transfer] = []
        """Those with a place, the one that has had it longest first."""
        self._turns: dict[str, asyncio.Semaphore] = {}
        """Limits the requests that are served at a time, by requester."""
        self._sent: dict[str, dict[tuple[int, str, bool], tuple[float, float]]] = {}
        """By requester and file: how often the file was sent, decaying over time, and the last update. The
        file asked for last comes last."""

    async def serve(
        self,
        peer: str,
        message: bytes,
        context: "grpc.aio.ServicerContext[Any, Any]",
        hang_up: Callable[[], None],
    ) -> None:
        """Answer a call of node `peer`, whose certificate has been checked. `hang_up` ends its connection."""
        try:
            asked = control_pb2.PeerLayerRequest.FromString(message)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is malformed")
            raise
        request = LayerRequest(
            step=asked.step, unit=asked.unit, sha256=asked.sha256, offset=asked.offset, sums=asked.sums
        )
        # A node with many requests must not occupy all places.
        turn = self._turns.setdefault(peer, asyncio.Semaphore(MOST_OF_A_NODE))
        async with turn, self._place(hang_up) as transfer:
            await self._count(peer, request, LEAST_SHARE, context)
            data = await self._source.read(request)
            if data is None or request.offset > len(data):
                kind = "the gradient of" if request.sums else "layer"
                name = f"{kind} {request.unit[:40]!r} of step {request.step}"
                await context.abort(grpc.StatusCode.NOT_FOUND, f"{name} is not held here")
                raise AssertionError("abort raises")
            share = 1 - request.offset / max(1, len(data))
            await self._count(peer, request, max(0.0, share - LEAST_SHARE), context)
            view = memoryview(data)
            for start, end in growing_pieces(request.offset, len(data), CHUNK_BYTES, MOST_CHUNK_BYTES):
                if transfer.is_over:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others wait for this place")
                await self._source.pass_through(end - start)
                await context.write(bytes(view[start:end]))

    @asynccontextmanager
    async def _place(self, hang_up: Callable[[], None]) -> AsyncIterator[_Transfer]:
        """One of the places for transfers. As many of the longest transfers have a limit as requests wait."""
        self._waiting += 1
        self._limit()
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        transfer = _Transfer(hang_up, time.monotonic())
        self._transfers.append(transfer)
        self._limit()
        try:
            yield transfer
        finally:
            self._transfers.remove(transfer)
            if transfer.ends is not None:
                transfer.ends.cancel()
            self._turn.release()

    def _limit(self) -> None:
        if len(self._transfers) == MOST_TRANSFERS:
            for transfer in self._transfers[: self._waiting]:
                if transfer.ends is None:
                    transfer.limit()

    async def _count(
        self, peer: str, request: LayerRequest, share: float, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> None:
        """Count a share of the file, or end the call if this node asks for it too often."""
        if not self._may_send(peer, request, share, time.monotonic()):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this node has sent it to you too often")

    def _may_send(self, peer: str, request: LayerRequest, share: float, now: float) -> bool:
        """Whether this share of the file may be sent now. If so, it is counted."""
        known, file = self._sent.setdefault(peer, {}), (request.step, request.unit, request.sums)
        if file not in known and len(known) >= MOST_COUNTED:
            oldest = next(iter(known))
            sent, at = known[oldest]
            if now - at < sent * AGAIN_SECONDS:
                return False
            del known[oldest]
        sent, at = known.pop(file, (0.0, now))
        sent = max(0.0, sent - (now - at) / AGAIN_SECONDS)
        may = sent + share <= AT_ONCE
        known[file] = (sent + share if may else sent), now
        return may


def growing_pieces(first: int, end: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of pieces of the bytes from `first` to `end`. A piece has `most` bytes if the previous
    one took less than `QUICK_SECONDS`, otherwise `least`. There is at least one piece."""
    size = least
    while True:
        until, began = min(end, first + size), time.monotonic()
        yield first, until
        if until >= end:
            return
        first, size = until, most if time.monotonic() - began < QUICK_SECONDS else least


async def get_layer(channel: grpc.aio.Channel, request: LayerRequest) -> AsyncIterator[bytes]:
    """The file's bytes from `request.offset` on, as they arrive.

    Raises NotHeldError if the node does not have the file, LinkError when the transfer breaks.
    """
    message = control_pb2.PeerLayerRequest(
        step=request.step,
        unit=request.unit,
        sha256=request.sha256,
        offset=request.offset,
        sums=request.sums,
    ).SerializeToString()
    stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(LAYER_METHOD)
    call, received, began = stub(message), 0, time.monotonic()
    try:
        while True:
            # The least rate also limits the wait for a chunk.
            left = began + 2 * SILENT_SECONDS + received / LEAST_RATE - time.monotonic()
            async with asyncio.timeout(min(SILENT_SECONDS, max(0.0, left))):
                chunk = await call.read()
            if not isinstance(chunk, bytes):  # grpc.aio.EOF
                return
            received += len(chunk)
            yield chunk
    except grpc.aio.AioRpcError as error:
        details = error.details() or error.code().name
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise NotHeldError(details) from None
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise ProtocolViolationError(f"the node refused: {details}") from None
        raise LinkError(f"the connection broke: {details}") from None
    except TimeoutError:
        raise LinkError(
            f"nothing arrived for {SILENT_SECONDS:g} s, or the rate was below {LEAST_RATE / 1000:g} kB/s"
        ) from None
    finally:
        call.cancel()
