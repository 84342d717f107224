"""Layers of snapshots between nodes, on the port for neighbours, with mutual TLS.

The requester must hold a certificate of the run and know the file's SHA-256. The coordinator tells the
hash only to members, so it grants access to that one file. A broken transfer resumes at any byte, from any
holder.

Summed gradients of the newest steps travel in the same way. They have no hash on record, so the requester
compares their norms with those for which the run's nodes voted.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from wire.errors import LinkError, ProtocolViolationError
from wire.v1 import control_pb2

LAYER_METHOD = "/thinwire.wire.v1.Layers/Get"
CHUNK_BYTES, MOST_CHUNK_BYTES = 64 * 1024, 256 * 1024
"""The sizes of a chunk. Between two chunks training traffic goes first. Chunks grow on a line that takes one
in `QUICK_SECONDS`."""
QUICK_SECONDS = 0.005
SILENT_SECONDS = 30.0
"""The longest wait for the next chunk."""
MOST_TRANSFERS, MOST_OF_A_NODE = 4, 2
"""How many layers a node sends at a time, in total and to one other node; further requests wait."""
AT_ONCE, AGAIN_SECONDS = 8, 60.0
"""A node needs a file once, and again if a line breaks. So it gets each file at most this many times at once,
and then once per so many seconds."""
MOST_COUNTED = 4096
"""How many files and askers are counted for that limit."""
LEAST_RATE = 10_000.0
"""The least bytes per second with which a file must come, besides `SILENT_SECONDS`. A sender that is slower
is left for another holder."""
YIELD_SECONDS = 0.25
"""The longest that a chunk waits while training traffic is queued."""
_LOOK_SECONDS = 0.01


class NotHeldError(LinkError):
    """The asked node has no such file, or its copy is damaged."""


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """Which file is wanted, and from which byte on."""

    step: int
    unit: str
    sha256: str = ""
    offset: int = 0
    sums: bool = False
    """Whether the unit's packed, summed gradients of `step` are wanted, and not a layer's file."""


class LayerSource(Protocol):
    """The files that a node holds."""

    async def read(self, request: LayerRequest) -> bytes | None:
        """The whole file, if this node has an undamaged copy."""
        ...

    async def pass_through(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        ...


class LayerServer:
    """Answers `LAYER_METHOD`."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._turn = asyncio.Semaphore(MOST_TRANSFERS)
        self._turns: dict[str, asyncio.Semaphore] = {}
        """By asking node, the requests that wait or are served."""
        self._sent: dict[tuple[str, int, str, bool], tuple[float, float]] = {}
        """By asker and file: how many times the file was sent, in files, less what has been forgiven since,
        and when."""

    async def serve(self, peer: str, message: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Answer one call of node `peer`, whose certificate has been checked."""
        try:
            asked = control_pb2.PeerLayerRequest.FromString(message)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message")
            raise
        request = LayerRequest(
            step=asked.step, unit=asked.unit, sha256=asked.sha256, offset=asked.offset, sums=asked.sums
        )
        # Who asks for much must not hold all places.
        turn = self._turns.setdefault(peer, asyncio.Semaphore(MOST_OF_A_NODE))
        async with turn, self._turn:
            data = await self._source.read(request)
            if data is None or request.offset > len(data):
                what = "the gradient of" if request.sums else "layer"
                where = f"{what} {request.unit[:40]!r} of step {request.step}"
                await context.abort(grpc.StatusCode.NOT_FOUND, f"{where} is not held here")
                raise AssertionError("abort raises")
            if not self._may_send(peer, request, 1 - request.offset / max(1, len(data)), time.monotonic()):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it was sent to you too often")
            view = memoryview(data)
            for start, end in growing_pieces(request.offset, len(data), CHUNK_BYTES, MOST_CHUNK_BYTES):
                await self._source.pass_through(end - start)
                await context.write(bytes(view[start:end]))

    def _may_send(self, peer: str, request: LayerRequest, share: float, now: float) -> bool:
        """Whether this share of the file may be sent now; it counts then."""
        file = peer, request.step, request.unit, request.sums
        sent, at = self._sent.pop(file, (0.0, now))
        sent = max(0.0, sent - (now - at) / AGAIN_SECONDS)
        may = sent + share <= AT_ONCE
        self._sent[file] = (sent + share if may else sent), now
        if len(self._sent) > MOST_COUNTED:
            del self._sent[next(iter(self._sent))]
        return may


def growing_pieces(first: int, end: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Where to cut the bytes from `first` to `end`. A piece has `most` bytes after one that took less than
    `QUICK_SECONDS`, else `least`. There is at least one piece."""
    size = least
    while True:
        until, began = min(end, first + size), time.monotonic()
        yield first, until
        if until >= end:
            return
        first, size = until, most if time.monotonic() - began < QUICK_SECONDS else least


async def get_layer(channel: grpc.aio.Channel, request: LayerRequest) -> AsyncIterator[bytes]:
    """The file's bytes from `request.offset` on, as they come.

    Raises NotHeldError if the node has no such file, LinkError when the transfer breaks.
    """
    message = control_pb2.PeerLayerRequest(
        step=request.step,
        unit=request.unit,
        sha256=request.sha256,
        offset=request.offset,
        sums=request.sums,
    ).SerializeToString()
    stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(LAYER_METHOD)
    call, came, began = stub(message), 0, time.monotonic()
    try:
        while True:
            # Of what is under way the least rate counts, too.
            left = began + 2 * SILENT_SECONDS + came / LEAST_RATE - time.monotonic()
            async with asyncio.timeout(min(SILENT_SECONDS, max(0.0, left))):
                chunk = await call.read()
            if not isinstance(chunk, bytes):  # grpc.aio.EOF
                return
            came += len(chunk)
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
            f"nothing came for {SILENT_SECONDS:g} s, or less than {LEAST_RATE / 1000:g} kB/s"
        ) from None
    finally:
        call.cancel()


async def yield_to(busy: Callable[[], bool]) -> None:
    """Wait while `busy`, at most `YIELD_SECONDS`, so that a transfer goes on however busy the links are."""
    for _ in range(int(YIELD_SECONDS / _LOOK_SECONDS)):
        if not busy():
            return
        await asyncio.sleep(_LOOK_SECONDS)
