"""Measures the line between two nodes, on the port for neighbours, with mutual TLS.

The requesting node sends a few small messages for the round trip, then a bounded number of bytes, and then
receives as many. The rate is measured over the second half of the bytes, because TCP's slow start affects
the first half. A probe is short: at most `DIRECTION_SECONDS` and `CHUNKS` chunks in each direction. Training
traffic has priority at both ends, and both respect their owners' bandwidth limits.

A node answers one probe at a time, and each other node only a few times per hour, so that nobody can keep
its line busy.
"""

import asyncio
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from wire.errors import LinkError, ProtocolViolationError, first_error

PROBE_METHOD = "/thinwire.wire.v1.Layers/Probe"
CHUNK_BYTES = 64 * 1024
CHUNKS = 32
"""The number of chunks in each direction, 2 MiB in total."""
DIRECTION_SECONDS = 3.0
"""The time limit for sending in each direction."""
PROBE_SECONDS = 12.0
"""The time limit for a probe, including the connection."""
PINGS = 3
PROBES_AN_HOUR = 6
"""How many probes per hour a node answers for each other node."""
MOST_KNOWN = 2048
"""How many nodes' probes are counted."""

_PING, _CHUNK, _SEND = b"p", b"c", b"s"
_ACKNOWLEDGED = b"a"
_COUNT = struct.Struct("<H")

PassThrough = Callable[[int], Awaitable[None]]
"""Waits until this many bytes may be sent."""


@dataclass(frozen=True, kw_only=True)
class LineRate:
    """A measured line. Rates are in bytes per second from and to the requesting node; 0: nothing arrived."""

    round_trip: float
    """The least of `PINGS` round trips, in seconds."""
    up: float
    down: float


def rate_of(arrivals: list[tuple[float, int]]) -> float:
    """The bytes per second from pairs (time, bytes so far), of which the first starts the count."""
    if len(arrivals) < 2 or arrivals[-1][1] <= arrivals[0][1]:
        return 0.0
    end, whole = arrivals[-1]
    began, first = next((arrival for arrival in arrivals if 2 * arrival[1] >= whole), arrivals[0])
    if first == whole:
        began, first = arrivals[0]
    return (whole - first) / max(end - began, 1e-6)


class ProbeServer:
    """Answers `PROBE_METHOD`."""

    def __init__(self, pass_through: PassThrough, clock: Callable[[], float] = time.monotonic) -> None:
        """`pass_through` gives priority to training and respects the owner's limit."""
        self._pass_through = pass_through
        self._clock = clock
        self._busy = False
        self._newest: dict[str, list[float]] = {}
        """The times of each node's requests in the last hour."""

    def refusal(self, node_id: str) -> str | None:
        """Why this node gets no answer now; None if it gets one, and then the probe is counted."""
        if self._busy:
            return "another node is measuring its line to this one"
        now = self._clock()
        known = [at for at in self._newest.pop(node_id, ()) if now - at < 3600.0]
        self._newest[node_id] = known
        if len(self._newest) > MOST_KNOWN:
            del self._newest[next(iter(self._newest))]
        if len(known) >= PROBES_AN_HOUR:
            return f"node {node_id} has measured its line to this one {PROBES_AN_HOUR} times in an hour"
        known.append(now)
        return None

    async def serve(self, node_id: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        """Answer a call of a node whose certificate has been checked."""
        if (why := self.refusal(node_id)) is not None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._busy = True
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._answer(context)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the probe took too long")
        except ProtocolViolationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._busy = False

    async def _answer(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        received = pings = 0
        while isinstance(message := await context.read(), bytes):  # else grpc.aio.EOF
            match message[:1]:
                case b"p" if len(message) == 1 and pings < 2 * PINGS:
                    pings += 1
                    await context.write(_ACKNOWLEDGED)
                case b"c" if len(message) <= 1 + CHUNK_BYTES and received < CHUNKS:
                    received += 1
                    await context.write(_ACKNOWLEDGED)
                case b"s" if len(message) == 1 + _COUNT.size:
                    (count,) = _COUNT.unpack(message[1:])
                    if count > CHUNKS:
                        raise ProtocolViolationError(
                            f"a probe asks for {count} chunks; the limit is {CHUNKS}"
                        )
                    await self._send(context, count)
                    return
                case _:
                    raise ProtocolViolationError("this is not a message of a probe, or one too many")

    async def _send(self, context: "grpc.aio.ServicerContext[Any, Any]", count: int) -> None:
        chunk, began = bytes(CHUNK_BYTES), time.monotonic()
        for _ in range(count):
            await self._pass_through(CHUNK_BYTES)
            if time.monotonic() - began > DIRECTION_SECONDS:
                return
            await context.write(chunk)


async def measure_line(channel: grpc.aio.Channel, pass_through: PassThrough) -> LineRate:
    """Measure the line to the node at the channel's other end. Raises LinkError if it does not answer."""
    stub: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(PROBE_METHOD)
    call = stub()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await _measure(call, pass_through)
    except* (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError, LinkError) as errors:
        raise _as_link_error(first_error(errors)) from None
    finally:
        call.cancel()


async def _measure(call: "grpc.aio.StreamStreamCall[bytes, bytes]", pass_through: PassThrough) -> LineRate:
    trips = []
    for _ in range(1 + PINGS):
        began = time.perf_counter()
        await call.write(_PING)
        if await call.read() != _ACKNOWLEDGED:
            raise LinkError("the line was not measured: unexpected answer from the node")
        trips.append(time.perf_counter() - began)

    async def send() -> None:
        chunk, began = _CHUNK + bytes(CHUNK_BYTES), time.perf_counter()
        for _ in range(CHUNKS):
            await pass_through(CHUNK_BYTES)
            if time.perf_counter() - began > DIRECTION_SECONDS:
                break
            await call.write(chunk)
        await call.write(_SEND + _COUNT.pack(CHUNKS))

    up = [(time.perf_counter(), 0)]
    down: list[tuple[float, int]] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        while isinstance(message := await call.read(), bytes):
            now = time.perf_counter()
            if message == _ACKNOWLEDGED and not down and len(up) <= CHUNKS:
                up.append((now, up[-1][1] + CHUNK_BYTES))
            elif len(down) <= CHUNKS and len(message) == CHUNK_BYTES:
                down = down or [up[-1]]
                down.append((now, len(down) * CHUNK_BYTES))
            else:
                raise LinkError("the line was not measured: unexpected answer from the node")
    if down:
        down[0] = down[0][0], 0
    # The first round trip includes the connection's handshake.
    return LineRate(round_trip=min(trips[1:]), up=rate_of(up), down=rate_of(down))


def _as_link_error(error: Exception) -> LinkError:
    if isinstance(error, LinkError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return LinkError(f"the line was not measured: {error.details() or error.code().name}")
    return LinkError("the line was not measured: the node did not answer in time")
