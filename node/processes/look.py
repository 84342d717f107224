"""Asks a coordinator what it sees of this machine, as the client of `node.coordinator.look_service`."""

import time
from dataclasses import dataclass

import grpc.aio
from cryptography import x509

from node.coordinator.look_service import PADDING, PADDING_SECONDS, PADDINGS
from node.processes.enrol import join_channel
from wire.errors import LinkError
from wire.identity.authority import certificate_to_pem
from wire.identity.token import JoinToken
from wire.v1 import enrolment_pb2
from wire.version import PROTOCOL, VERSION

LOOK_SECONDS = 30.0
"""The most seconds for all messages."""


@dataclass(frozen=True, kw_only=True)
class SeenThere:
    """This machine as the coordinator sees it."""

    host: str = ""
    """The address from which the call came."""
    reached: bool = False
    """Whether its port accepted the coordinator's connection."""
    mapped_reached: bool = False
    """Whether its router's port accepted the coordinator's connection."""
    relayed: bool = False
    relays: tuple[str, ...] = ()
    """host:port of some volunteers that relay."""
    links: tuple[str, ...] = ()
    """The paths of the run's links, in sentences."""
    refusal: str = ""
    """Why a join with this token would be refused; empty if it would not."""
    control_port: int = 0
    """The coordinator's port for admitted nodes; 0: the port that answered."""
    precision: str = ""
    """`training.precision`, as the coordinator reports it."""
    compute: str = ""
    """`training.compute`, as the coordinator reports it."""
    down: float = 0.0
    """Bytes per second from the coordinator."""
    up: float = 0.0
    """Bytes per second to the coordinator."""


async def look(
    token: JoinToken, address: str, authority: x509.Certificate, port: int, mapped_port: int
) -> SeenThere:
    """Ask the coordinator at `address`. Raises LinkError.

    Args:
        port: where this machine listens during the call.
        mapped_port: the router's port that leads there; 0: none.
    """
    request = enrolment_pb2.LookRequest(
        version=VERSION,
        protocol=PROTOCOL,
        run_id=token.run_id,
        token_id=token.token_id,
        secret=token.secret,
        port=port,
        mapped_port=mapped_port,
    )
    try:
        async with join_channel(address, token.run_id, certificate_to_pem(authority)) as channel:
            method: grpc.aio.StreamStreamMultiCallable[enrolment_pb2.LookRequest, enrolment_pb2.LookReply]
            method = channel.stream_stream(
                "/thinwire.wire.v1.Enrolment/Look",
                request_serializer=enrolment_pb2.LookRequest.SerializeToString,
                response_deserializer=enrolment_pb2.LookReply.FromString,
            )
            call = method(timeout=LOOK_SECONDS)
            await call.write(request)
            seen = (await _next(call, "seen")).seen
            began, came = time.monotonic(), 0
            while size := len((await _next(call, "padding")).padding):
                came += size
            down = came / max(1e-6, time.monotonic() - began)
            began, sent = time.monotonic(), 0
            while sent < PADDINGS * len(PADDING) and time.monotonic() - began < PADDING_SECONDS:
                await call.write(enrolment_pb2.LookRequest(padding=PADDING))
                sent += len(PADDING)
            await call.done_writing()
            await _next(call, "done")
            up = sent / max(1e-6, time.monotonic() - began)
            told = {field.name: value for field, value in seen.ListFields()}
            told |= {"relays": tuple(seen.relays), "links": tuple(seen.links)}
            return SeenThere(**told, down=down, up=up)
    except grpc.aio.AioRpcError as error:
        raise LinkError(f"the coordinator did not report what it sees ({error.details()})") from None


async def _next(
    call: "grpc.aio.StreamStreamCall[enrolment_pb2.LookRequest, enrolment_pb2.LookReply]", kind: str
) -> enrolment_pb2.LookReply:
    reply = await call.read()
    if not isinstance(reply, enrolment_pb2.LookReply):
        raise LinkError("the coordinator closed the call before its answer was complete")
    if reply.WhichOneof("body") == "refusal":
        raise LinkError(reply.refusal.message)
    if reply.WhichOneof("body") != kind:
        raise LinkError("the coordinator's answer is out of order")
    return reply
