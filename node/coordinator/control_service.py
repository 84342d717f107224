"""The mutual-TLS port: control sessions, and the calls that transfer batches. `layer_service` transfers
layers.

It decodes a request, asks the `Coordinator`, and encodes the answer. The certificate alone identifies the
caller.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from node.coordinator.coordinator import Coordinator
from node.coordinator.sessions import (
    HELLO_SECONDS,
    LEAST_PROBE_BYTES,
    NO_HELLO,
    NO_MESSAGE,
    Context,
    ControlSession,
    MessageLimits,
    SessionDesk,
    SessionHandler,
    abort,
    check_limits,
    each,
    hello_from,
    written,
)
from node.model.labels import SMALL_BYTES, BatchPart
from node.state.manifest import UnitEntry
from wire.errors import ProtocolViolationError, ThinwireError
from wire.front import Front
from wire.identity.credentials import peer_node_id
from wire.identity.enrolment import Refusal
from wire.messages import MOST_HELD, Hello, PlacedStage
from wire.messages_proto import coordinator_message_to_proto, held_layer_from_proto, node_message_from_proto
from wire.v1 import control_pb2, control_pb2_grpc, enrolment_pb2

MOST_PROBE_BYTES = 16 * 1024 * 1024
TURN_SECONDS = 0.1
"""The seconds between two checks whether a waiting call can be served."""


class ControlService(control_pb2_grpc.CoordinatorServicer):
    def __init__(
        self,
        handler: Coordinator,
        front: Front,
        limits: Callable[[], MessageLimits] | None = None,
        *,
        relays: bool = False,
    ) -> None:
        """
        Args:
            relays: whether nodes that cannot be reached take part through a relay.
            front: what accepts the port's connections.
            limits: creates the limits for one member's messages; None: no limits.
        """
        self.handler = handler
        self._front = front
        self._calls = CallLimit()
        self.desk = SessionDesk(handler, limits, relays=relays)

    def add_to(self, server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_CoordinatorServicer_to_server(self, server)

    async def Session(self, requests: AsyncIterator[control_pb2.NodeMessage], context: Context) -> None:
        node_id = await self._member(context)
        source = self._front.host(context.peer())
        try:
            session = await self.desk.greet(node_id, source, lambda: _hello(requests))
        except DecodeError:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)
        except ProtocolViolationError as error:
            await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            # A slow network must not end the node, so it may try again.
            await abort(context, grpc.StatusCode.UNAVAILABLE, NO_HELLO)
        if isinstance(session, Refusal):
            await context.write(coordinator_message_to_proto(session))
            return
        self.handler.opened(session)
        try:
            await self._serve(session, requests, context)
        finally:
            self.handler.closed(session)

    async def _serve(
        self, session: ControlSession, requests: AsyncIterator[control_pb2.NodeMessage], context: Context
    ) -> None:
        async def read() -> None:
            try:
                async for request in requests:
                    for message in each(request):
                        check_limits(message, self.desk.limits_of(session.node_id))
                        self.handler.heard(session, node_message_from_proto(message))
            except DecodeError:
                self.desk.wrong(session, NO_MESSAGE)
            except ProtocolViolationError as error:
                self.desk.wrong(session, str(error))
            session.close()

        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            while (message := await session.next()) is not None:
                await written(context, self._front, coordinator_message_to_proto(message))
            reader.cancel()

    async def Renew(self, request: control_pb2.RenewRequest, context: Context) -> control_pb2.RenewReply:
        node_id = await self._member(context)
        async with self._turn(node_id, "renew"):
            outcome = await self.handler.renew(node_id, request.csr_der)
        if isinstance(outcome, Refusal):
            refused = enrolment_pb2.Refusal(code=outcome.code.value, message=outcome.message)
            return control_pb2.RenewReply(refusal=refused)
        return control_pb2.RenewReply(certificate_pem=outcome)

    # Replies are written, not yielded: an abandoned generator would keep its call slot.

    async def Probe(self, request: control_pb2.ProbeRequest, context: Context) -> None:
        node_id = await self._member(context)
        size = request.bytes
        if size > MOST_PROBE_BYTES:
            await abort(
                context, grpc.StatusCode.INVALID_ARGUMENT, f"a probe has at most {MOST_PROBE_BYTES} bytes"
            )
        async with self._turn(node_id, "probe", max(size, LEAST_PROBE_BYTES)):
            digest = await asyncio.to_thread(zeros_sha256, size)
            await _write(context, size, digest, zeros(size))

    async def GetBatch(self, request: control_pb2.GetBatchRequest, context: Context) -> None:
        node_id = await self._member(context)
        async with self._turn(node_id, "batch"):
            try:
                part = BatchPart.LABELS if request.labels else BatchPart.INPUTS
                data = await self.handler.batch(
                    node_id,
                    request.step,
                    part=BatchPart.DOCUMENTS if request.documents else part,
                    held_out=request.held_out,
                    groups=tuple(request.groups),
                    steps=max(1, request.steps),
                )
            except ThinwireError as error:
                await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
            # Sending a small batch to a thread costs more than hashing it.
            small = len(data) <= SMALL_BYTES
            digest = hashlib.sha256(data) if small else await asyncio.to_thread(hashlib.sha256, data)
            await _write(context, len(data), digest.hexdigest(), chunks(data))

    async def HoldLayers(
        self, request: control_pb2.HoldLayersRequest, context: Context
    ) -> control_pb2.HoldLayersReply:
        node_id = await self._member(context)
        if (count := len(request.layers) + len(request.missing)) > MOST_HELD:
            why = f"a report of {count} layers, more than {MOST_HELD}"
            self.handler.refused(node_id, why)
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, why)
        missing = [(name.step, name.unit) for name in request.missing]
        try:
            layers = [held_layer_from_proto(layer) for layer in request.layers]
            async with self._turn(node_id, "hold layers"):
                unknown = self.handler.hold_layers(node_id, layers, missing)
        except ThinwireError as error:
            if isinstance(error, ProtocolViolationError):
                self.handler.refused(node_id, str(error))
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return control_pb2.HoldLayersReply(
            unknown=[control_pb2.LayerName(step=step, unit=unit) for step, unit in unknown]
        )

    @asynccontextmanager
    async def _turn(self, node_id: str, kind: str, size: int = 1) -> AsyncIterator[None]:
        """Hold one of the node's slots for calls of this kind inside the block. Further calls wait."""
        async with self._calls.turn(node_id, kind):
            await when_served(self.desk, node_id, kind, size)
            yield

    async def _member(self, context: Context) -> str:
        """The caller's node id, if it may take part in the run; ends the call otherwise."""
        try:
            return await admitted(context, self.handler, self._front)
        except NodeRefusedError as error:
            await abort(context, grpc.StatusCode.PERMISSION_DENIED, str(error))


class NodeRefusedError(ThinwireError):
    """The caller may not take part in the run."""


async def admitted(context: Context | grpc.ServicerContext, handler: SessionHandler, front: Front) -> str:
    """The caller's node id. `front`: what accepted the connection. Raises NodeRefusedError."""
    node_id = peer_node_id(context)
    if node_id is None:
        raise NodeRefusedError("the certificate names no node")
    front.prove(context.peer(), node_id)
    if (refusal := await handler.refusal_for(node_id)) is not None:
        raise NodeRefusedError(refusal.message)
    return node_id


async def when_served(desk: SessionDesk, node_id: str, kind: str, size: int = 1) -> None:
    """Wait until the node's limits allow a call of this kind."""
    limits = desk.limits_of(node_id)
    while limits is not None and not limits.serves(kind, size, time.monotonic()):  # noqa: ASYNC110
        await asyncio.sleep(TURN_SECONDS)


def place_chunk(entry: UnitEntry, holders: Sequence[PlacedStage], url: str) -> control_pb2.DataChunk:
    placed = [control_pb2.PlacedStage(**vars(holder)) for holder in holders]
    place = control_pb2.LayerPlace(holders=placed, url=url)
    return control_pb2.DataChunk(total_bytes=entry.bytes, sha256=entry.sha256, place=place)


async def _hello(requests: AsyncIterator[control_pb2.NodeMessage]) -> Hello:
    """The first message of a session. Raises TimeoutError if none comes, ProtocolViolationError if it is not
    a hello."""
    async with asyncio.timeout(HELLO_SECONDS):
        first = await anext(requests, None)
    if first is None:
        raise TimeoutError
    return hello_from(first)


async def _write(context: Context, size: int, digest: str, pieces: Iterator[bytes]) -> None:
    """Reply with data, piece by piece as the transport takes them."""
    await context.write(control_pb2.DataChunk(data=next(pieces), total_bytes=size, sha256=digest))
    for piece in pieces:
        await context.write(control_pb2.DataChunk(data=piece))


CHUNK_BYTES = 256 * 1024
MOST_CALLS = 2
"""The concurrent calls of one kind and node: inputs and labels, two snapshots, or a needed and a prefetched
layer."""
_ZEROS = bytes(CHUNK_BYTES)


@dataclass
class _Slots:
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_CALLS))
    users: int = 0
    """The number of calls that have a slot or wait for one."""


class CallLimit:
    """Limits each node's calls of one kind; further calls wait. Kinds are independent: an upload over a slow
    link takes minutes while a step waits for its batch.
    """

    def __init__(self) -> None:
        self.slots: dict[tuple[str, str], _Slots] = {}
        """By node and kind, of those with calls."""

    @asynccontextmanager
    async def turn(self, node_id: str, kind: str) -> AsyncIterator[None]:
        """Hold a slot inside the block."""
        slots = self.slots.setdefault((node_id, kind), _Slots())
        slots.users += 1
        try:
            async with slots.free:
                yield
        finally:
            slots.users -= 1
            if slots.users == 0:
                del self.slots[node_id, kind]


def chunks(data: bytes) -> Iterator[bytes]:
    """Yields at least one chunk. Chunks are copied one at a time."""
    yield data[:CHUNK_BYTES]
    for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def zeros(size: int) -> Iterator[bytes]:
    """Chunks of `size` zero bytes; at least one, all the same object."""
    yield _ZEROS[:size]
    for start in range(CHUNK_BYTES, size, CHUNK_BYTES):
        yield _ZEROS[: size - start]


def zeros_sha256(size: int) -> str:
    """The digest of `size` zero bytes."""
    digest = hashlib.sha256()
    whole, rest = divmod(size, CHUNK_BYTES)
    for _ in range(whole):
        digest.update(_ZEROS)
    digest.update(_ZEROS[:rest])
    return digest.hexdigest()
