"""Layers of snapshots between nodes, on the port for neighbours, with mutual TLS, on gRPC's synchronous
stack: a thread a call, so that no byte of a layer passes the event loop.

The requester must hold a certificate of the run and know the file's SHA-256. The coordinator tells the hash
to members only, so it grants access to that one file. A broken transfer resumes from any byte, at any holder.

Summed gradients of newest steps come the same way. They have no hash on record: the requester compares their
norms with those that the run's nodes voted.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from typing import NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from wire.errors import LinkError, ProtocolViolationError
from wire.event_loop import on_thread
from wire.v1 import control_pb2

LAYER_METHOD = "/thinwire.wire.v1.Layers/Get"
CHUNK_BYTES, MOST_CHUNK_BYTES = 64 * 1024, 1024 * 1024
"""Between two chunks training traffic goes first. On a line that takes one in `QUICK_SECONDS` they grow."""
QUICK_SECONDS = 0.005
SILENT_SECONDS = 30.0
"""The longest wait for the next chunk."""
MOST_TRANSFERS, MOST_OF_A_NODE, MOST_CALLS = 4, 2, 8
"""Layers that a node sends at a time, in all and to one other; more wait, up to so many calls of one."""
THREADS = 64
"""Calls that are answered at a time."""
AT_ONCE, AGAIN_SECONDS = 8, 60.0
"""One node needs a file once, and again from where a line broke: it is sent it so often at once, and then
once in so many seconds."""
MOST_COUNTED = 4096
"""Files and askers for which that is counted."""
LEAST_RATE = 10_000.0
"""Bytes a second that a file comes with at least, besides `SILENT_SECONDS`: who sends a byte now and then is
left for another holder."""
YIELD_SECONDS = 0.25
"""The longest that a chunk waits while training traffic is queued."""
_LOOK_SECONDS = 0.01
_WATCH_SECONDS = 1.0
"""Between two looks at what came."""


class NotHeldError(LinkError):
    """The asked node has no such file, or its copy is damaged."""


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """Which file, and from which byte on."""

    step: int
    unit: str
    sha256: str = ""
    offset: int = 0
    sums: bool = False
    """Not a layer's file: the unit's summed gradients of `step`, packed."""


class LayerSource(Protocol):
    """The files that a node holds."""

    def read(self, request: LayerRequest) -> bytes | None:
        """The whole file, if this node has an undamaged copy. Called on a thread."""
        ...

    def is_free(self) -> bool:
        """Whether `pass_through` would not wait. Called on a thread."""
        ...

    async def pass_through(self, size: int) -> None:
        """Wait until `size` bytes may be sent. Called on the event loop."""
        ...


class LayerServer:
    """Answers `LAYER_METHOD`. Create it on the event loop."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._calls, self._served = Counter[str](), Counter[str]()
        """By asking node: those that wait or are served, and those that are served."""
        self._sent: dict[tuple[str, int, str, bool], tuple[float, float]] = {}
        """By asker and file: how much of it was sent, in files, less what time has forgiven until then."""
        self._changed = threading.Condition()
        """Guards what is counted."""

    def serve(self, peer: str, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer one call of node `peer`, whose certificate has been checked, on the call's thread."""
        try:
            asked = control_pb2.PeerLayerRequest.FromString(message)
        except DecodeError:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the request is no message")
        request = LayerRequest(
            step=asked.step, unit=asked.unit, sha256=asked.sha256, offset=asked.offset, sums=asked.sums
        )
        with self._place(peer, context):
            data = self._source.read(request)
            if data is None or request.offset > len(data):
                what = "the gradient of" if request.sums else "layer"
                where = f"{what} {request.unit[:40]!r} of step {request.step}"
                _abort(context, grpc.StatusCode.NOT_FOUND, f"{where} is not held here")
            if not self._may_send(peer, request, 1 - request.offset / max(1, len(data)), time.monotonic()):
                _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "it was sent to you too often")
            view = memoryview(data)
            for start, end in growing_pieces(request.offset, len(data), CHUNK_BYTES, MOST_CHUNK_BYTES):
                if not self._source.is_free():
                    self._pass(end - start, context)
                yield bytes(view[start:end])

    def _pass(self, size: int, context: grpc.ServicerContext) -> None:
        """Wait until `size` bytes may be sent."""
        passing = asyncio.run_coroutine_threadsafe(self._source.pass_through(size), self._loop)
        try:
            _wait(context, lambda seconds: bool(wait([passing], seconds).done))
            passing.result()
        finally:
            passing.cancel()

    @contextlib.contextmanager
    def _place(self, peer: str, context: grpc.ServicerContext) -> Iterator[None]:
        """One of the places for transfers, inside the block."""
        with self._changed:
            refused = self._calls[peer] >= MOST_CALLS
            self._calls[peer] += not refused
        if refused:
            _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "so many layers are on their way to you")
        try:
            _wait(context, lambda seconds: self._enters(peer, seconds))
            try:
                yield
            finally:
                with self._changed:
                    self._served[peer] -= 1
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._calls[peer] -= 1

    def _enters(self, peer: str, seconds: float) -> bool:
        """Whether the node gets a place within so many seconds. Who asks for much must not hold all."""
        served = self._served
        with self._changed:
            free = self._changed.wait_for(
                lambda: served[peer] < MOST_OF_A_NODE and served.total() < MOST_TRANSFERS, seconds
            )
            served[peer] += free
        return free

    def _may_send(self, peer: str, request: LayerRequest, share: float, now: float) -> bool:
        """Whether this share of the file may be sent now; it counts then."""
        file = peer, request.step, request.unit, request.sums
        with self._changed:
            sent, at = self._sent.pop(file, (0.0, now))
            sent = max(0.0, sent - (now - at) / AGAIN_SECONDS)
            may = sent + share <= AT_ONCE
            self._sent[file] = (sent + share if may else sent), now
            if len(self._sent) > MOST_COUNTED:
                del self._sent[next(iter(self._sent))]
        return may


def _wait(context: grpc.ServicerContext, comes: Callable[[float], bool]) -> None:
    """Until it `comes` within the seconds given, or the call is over. Who waits longer for a chunk than
    `SILENT_SECONDS` has left."""
    for _ in range(int(SILENT_SECONDS)):
        if comes(1.0):
            return
        if not context.is_active():
            break
    _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "other bytes go first")


def _abort(context: grpc.ServicerContext, status: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(status, message)
    raise AssertionError("abort raises")


def growing_pieces(first: int, end: int, least: int, most: int) -> Iterator[tuple[int, int]]:
    """Where to cut the bytes from `first` to `end`: at least one piece, of `most` bytes after one that went
    within `QUICK_SECONDS`, else of `least`."""
    size = least
    while True:
        until, began = min(end, first + size), time.monotonic()
        yield first, until
        if until >= end:
            return
        first, size = until, most if time.monotonic() - began < QUICK_SECONDS else least


async def get_layer(channel: grpc.Channel, request: LayerRequest, take: Callable[[bytes], None]) -> None:
    """Give `take` the file's bytes from `request.offset` on, as they come, on a thread.

    Raises NotHeldError if the node has no such file, LinkError when the transfer breaks, and what `take`
    raises.
    """
    message = control_pb2.PeerLayerRequest(
        step=request.step,
        unit=request.unit,
        sha256=request.sha256,
        offset=request.offset,
        sums=request.sums,
    ).SerializeToString()
    stub: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(LAYER_METHOD)
    call = stub(message)
    came, latest = 0, time.monotonic()
    began = latest

    def receive() -> None:
        nonlocal came, latest
        for chunk in call:
            take(chunk)
            came, latest = came + len(chunk), time.monotonic()

    receiving = on_thread(receive, "layer")
    try:
        while not receiving.done():
            await asyncio.wait([receiving], timeout=_WATCH_SECONDS)
            at = time.monotonic()
            # Of what is under way the least rate counts, too.
            if at > min(latest + SILENT_SECONDS, began + 2 * SILENT_SECONDS + came / LEAST_RATE):
                raise LinkError(
                    f"nothing came for {SILENT_SECONDS:g} s, or less than {LEAST_RATE / 1000:g} kB/s"
                )
        await receiving
    except grpc.RpcError as error:
        details = error.details() or error.code().name
        if error.code() is grpc.StatusCode.NOT_FOUND:
            raise NotHeldError(details) from None
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            raise ProtocolViolationError(f"the node refused: {details}") from None
        raise LinkError(f"the connection broke: {details}") from None
    finally:
        call.cancel()
        receiving.cancel()


async def yield_to(busy: Callable[[], bool]) -> None:
    """Wait while `busy`, at most `YIELD_SECONDS`, so that a transfer goes on however busy the links are."""
    for _ in range(int(YIELD_SECONDS / _LOOK_SECONDS)):
        if not busy():
            return
        await asyncio.sleep(_LOOK_SECONDS)
