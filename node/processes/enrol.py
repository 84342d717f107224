"""Enrols a node: from a join token to an identity on disk."""

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509

from node.processes.patience import Patience
from node.telemetry import points
from wire.bootstrap import fetch_authority
from wire.dialing import proxy_options
from wire.errors import (
    LinkError,
    ProtocolViolationError,
    RefusalCode,
    Refused,
    ThinwireError,
    TokenError,
    UserError,
)
from wire.identity.authority import authority_run_id, certificate_to_pem
from wire.identity.credentials import NodeIdentity, load_or_create_key, make_csr, server_name_options
from wire.identity.enrolment import Hardware
from wire.identity.files import write_private
from wire.identity.names import coordinator_server_name, join_address, split_address
from wire.identity.token import JoinToken
from wire.v1 import enrolment_pb2
from wire.version import PROTOCOL, VERSION

log = logging.getLogger(__name__)

_COORDINATOR_FILE = "coordinator.json"
_MESSAGE_BYTES = 64 * 1024
_CONNECT_SECONDS = 5.0
_REPLY_SECONDS = 20.0
# Seconds before each round over the token's addresses. With patience left, longer ones follow.
_ROUNDS = (0.0, 0.5, 1.0, 2.0)
_LATER_ROUND = 5.0
# A stored certificate must be valid for at least this long.
_MARGIN = timedelta(minutes=5)


async def enrol(
    token: JoinToken, directory: Path, hardware: Hardware, patience: Patience | None = None
) -> tuple[NodeIdentity, str]:
    """Become a member of the token's run. Returns the node's identity and the coordinator's control address.

    A valid identity in `directory` is used without sending anything. Otherwise all of the token's addresses
    are asked at once, repeatedly, until one is the coordinator's or the patience ends. If a reply is lost,
    the request is repeated with the same key, so it does not use the token twice.

    Raises:
        Refused: the coordinator refuses, with its reason.
        TokenError: the peer is not the coordinator of the token.
        LinkError: no address answers.
        UserError: `directory` cannot be used, or belongs to another run.
    """
    stored = await asyncio.to_thread(_stored, token, directory)
    if stored is not None:
        return stored
    # No round begins after this time once the patience has ended, because an address may never answer.
    last_start = math.inf if patience is None else time.monotonic() + _CONNECT_SECONDS
    patience = patience or Patience()
    key_pem = await asyncio.to_thread(_usable_key, directory)
    request = enrolment_pb2.JoinRequest(
        version=VERSION,
        protocol=PROTOCOL,
        run_id=token.run_id,
        token_id=token.token_id,
        secret=token.secret,
        csr_der=make_csr(key_pem),
        hardware=enrolment_pb2.Hardware(**asdict(hardware)),
    )
    places = ", ".join(token.addresses)
    why: ThinwireError | None = None
    for wait in itertools.chain(_ROUNDS, itertools.repeat(_LATER_ROUND)):
        if why is not None:
            if patience.left < wait and (wait == _LATER_ROUND or time.monotonic() + wait > last_start):
                raise why
            async with patience.shown(f"no coordinator yet ({why}); asking again"):
                await asyncio.sleep(wait)
        async with patience.shown(f"asking for the coordinator at {places}"):
            granted, failures = await _ask_all(token, key_pem, request)
        if granted is not None:
            identity, address, control_address = granted
            points.reach(points.Phase.ENROLMENT)
            try:
                await asyncio.to_thread(_save, identity, directory, address, control_address)
            except UserError:
                await _withdraw(address, token, identity.ca_pem, request)
                raise
            return identity, control_address
        why = _summary(failures)
        if isinstance(why, TokenError):
            break
    assert why is not None
    raise why


async def _ask_all(
    token: JoinToken, key_pem: bytes, request: enrolment_pb2.JoinRequest
) -> tuple[tuple[NodeIdentity, str, str] | None, list[ThinwireError]]:
    """Join at the first address that is the coordinator's: identity, that address, the control address.

    Otherwise returns None, and each address's error.
    """
    failures: list[ThinwireError] = []
    async with aclosing(authorities(token)) as answers:
        async for address, authority in answers:
            if isinstance(authority, ThinwireError):
                failures.append(authority)
                continue
            try:
                identity, control = await _join_at(address, token, authority, key_pem, request)
            except (LinkError, TokenError) as error:
                failures.append(error)
            else:
                return (identity, address, control), failures
    return None, failures


async def authorities(token: JoinToken) -> AsyncGenerator[tuple[str, x509.Certificate | ThinwireError], None]:
    """Ask all of the token's addresses at once for the certificate of the coordinator's authority. Yields
    each address with the certificate, or with why there is none, in the order of the answers."""

    async def look(address: str) -> tuple[str, x509.Certificate | ThinwireError]:
        try:
            return address, await fetch_authority(address, token.pin, _CONNECT_SECONDS)
        except (LinkError, TokenError) as error:
            return address, error

    looks = [asyncio.create_task(look(address)) for address in token.addresses]
    try:
        for coming in asyncio.as_completed(looks):
            yield await coming
    finally:
        for task in looks:
            task.cancel()
        await asyncio.wait(looks)


async def _join_at(
    address: str,
    token: JoinToken,
    authority: x509.Certificate,
    key_pem: bytes,
    request: enrolment_pb2.JoinRequest,
) -> tuple[NodeIdentity, str]:
    if (run_id := authority_run_id(authority)) != token.run_id:
        raise TokenError(
            f"{address} serves run {run_id}, not the join token's {token.run_id}: ask for a new token"
        )
    ca_pem = certificate_to_pem(authority)
    try:
        reply = await _call("Join", address, token, ca_pem, request)
    except grpc.aio.AioRpcError as error:
        reason = error.code().name
        raise LinkError(f"{address} did not answer the join request ({reason}): try again") from None
    if reply.WhichOneof("outcome") != "granted":
        raise _refused(reply.refusal)
    granted = reply.granted
    try:
        identity = NodeIdentity(granted.node_id, token.run_id, key_pem, granted.certificate_pem, ca_pem)
        host, port = split_address(address)
        control_address = join_address(host, granted.control_port or port)
        split_address(control_address)
        identity.check_clock(time.time())
    except (ValueError, LinkError) as error:
        await _withdraw(address, token, ca_pem, request)
        if isinstance(error, LinkError):
            raise
        raise ProtocolViolationError(f"{address} granted an unusable identity: {error}") from None
    return identity, control_address


async def _withdraw(
    address: str, token: JoinToken, ca_pem: bytes, request: enrolment_pb2.JoinRequest
) -> None:
    """Give back the use of the token, so that another node can have it. If that fails, it is freed later."""
    with suppress(grpc.aio.AioRpcError):
        await _call("Withdraw", address, token, ca_pem, request)


async def _call(
    method: str, address: str, token: JoinToken, ca_pem: bytes, request: enrolment_pb2.JoinRequest
) -> enrolment_pb2.JoinReply:
    """Call the join port. Raises grpc.aio.AioRpcError."""
    async with join_channel(address, token.run_id, ca_pem) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[enrolment_pb2.JoinRequest, enrolment_pb2.JoinReply]
        call = channel.unary_unary(
            f"/thinwire.wire.v1.Enrolment/{method}",
            request_serializer=enrolment_pb2.JoinRequest.SerializeToString,
            response_deserializer=enrolment_pb2.JoinReply.FromString,
        )
        return await call(request, timeout=_REPLY_SECONDS)


def join_channel(address: str, run_id: str, ca_pem: bytes) -> grpc.aio.Channel:
    """A channel to the join port of a run's coordinator."""
    options: list[tuple[str, int | str]] = [
        *server_name_options(coordinator_server_name(run_id)),
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        *proxy_options(address),
    ]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca_pem), options)


def _refused(message: enrolment_pb2.Refusal) -> Refused:
    try:
        return Refused(RefusalCode(message.code), message.message)
    except ValueError:
        # The code is from a later version, but its message gives the reason.
        return Refused(RefusalCode.BAD_REQUEST, message.message)


def _stored(token: JoinToken, directory: Path) -> tuple[NodeIdentity, str] | None:
    """The identity and control address of an earlier join, if they are valid for this token."""
    identity = NodeIdentity.load(directory)
    if identity is None:
        return None
    if identity.run_id == token.run_id and identity.pin != token.pin:
        # The run was recovered: it has a new authority, and needs this node's layers.
        log.warning("run %s has another certificate authority than before: enrolling again", token.run_id)
        return None
    if identity.run_id != token.run_id:
        raise UserError(
            f"{directory} has an identity of run {identity.run_id} and the join token is for "
            f"{token.run_id}: give each run its own directory"
        )
    if not identity.is_valid(time.time(), _MARGIN):
        return None
    try:
        coordinator = json.loads((directory / _COORDINATOR_FILE).read_bytes())
        # A token with other addresses means that the coordinator has moved, so ask for its control port.
        known = coordinator["join_address"] in token.addresses
        return (identity, str(coordinator["control_address"])) if known else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _usable_key(directory: Path) -> bytes:
    with _explain_disk(directory):
        return load_or_create_key(directory)


def _save(identity: NodeIdentity, directory: Path, address: str, control_address: str) -> None:
    content = {"join_address": address, "control_address": control_address}
    with _explain_disk(directory):
        identity.save(directory)
        write_private(directory / _COORDINATOR_FILE, json.dumps(content).encode())


@contextmanager
def _explain_disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot keep an identity in {directory} ({error.strerror}): give another directory"
        ) from None


def _summary(failures: list[ThinwireError]) -> ThinwireError:
    """Combine the errors of all addresses into one."""
    if len(failures) == 1:
        return failures[0]
    kind = TokenError if all(isinstance(failure, TokenError) for failure in failures) else LinkError
    return kind("no address of the join token leads to its coordinator: " + "; ".join(map(str, failures)))
