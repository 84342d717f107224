"""The coordinator's ports. They are opened and checked, and held while a resumed run is being read.

By default one port serves joins, nodes with a certificate and the run's page (`wire.door`). With
`coordinator.one_port = false`, joins use `listen`'s port, and nodes with a certificate use the next one.

Reading a large text and snapshot takes minutes. Nodes that waited for the coordinator's restart would give
up, so the port tells them to keep waiting.
"""

import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import grpc

from node.config.schema import CoordinatorSection
from node.coordinator.control_service import ControlService
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.enrolment_service import JoinPort
from node.coordinator.gateways import Credentials, Gateways
from node.coordinator.layer_service import THREADS, LayerService
from node.coordinator.look_service import Looks
from node.coordinator.sessions import SessionDesk
from node.run_file.addresses import parse_listen
from wire.admission import Limits
from wire.channels import LAYER_MESSAGE_BYTES, NOT_YET, bulk_name, make_server, make_threaded_server
from wire.descriptors import raise_limit
from wire.door import Door
from wire.errors import UserError
from wire.event_loop import on_thread
from wire.front import Front, listen_or_advise, start_behind
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import mutual_tls
from wire.identity.names import (
    JOIN_NAME,
    control_server_name,
    coordinator_server_name,
    join_address,
    session_server_name,
    split_address,
)
from wire.interfaces import default_source, ipv4_addresses, ipv6_addresses
from wire.mirror import make_mirror
from wire.relay import PROTOCOL_NAME, Relay
from wire.tls_socket import mutual_context

log = logging.getLogger(__name__)

ANSWER = "the coordinator is reading its text and its newest snapshot, and continues then"
LIFETIME = timedelta(days=1)
STOP_SECONDS = 2.0
# This process holds the CA's key too, so a short lifetime would protect nothing.
SERVER_LIFETIME = timedelta(days=365)
MOST_OWN = 4
"""The most addresses of this machine in a join token, besides loopback."""
_WAIT_SECONDS = 5.0
_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Ports:
    port: int
    """The port at which nodes join."""
    door: Door | None
    """Chooses between the services of the one port; None with separate ports."""
    relay: Relay | None
    """The relay for nodes with a certificate, if the run file allows it."""
    looks: Looks
    """Answers `thinwire doctor`."""
    gateways: Gateways | None = None
    """The gateways that handle the control sessions, if the coordinator does not."""


@contextlib.asynccontextmanager
async def open_ports(
    settings: CoordinatorSection,
    authority: CertificateAuthority,
    enrolment: EnrolmentHandler,
    control_service: Callable[[Front], ControlService],
    make_gateways: Callable[[SessionDesk, Front], Gateways | None] = lambda desk, own: None,
) -> AsyncIterator[Ports]:
    """Serve joins and nodes with a certificate inside the block. Raises UserError if a port is taken.

    Args:
        control_service: creates the service for nodes with a certificate, given the front that accepts them.
        make_gateways: creates what handles the control sessions in place of that service, if anything does.
    """
    credentials = authority.coordinator_credentials(SERVER_LIFETIME, time.time())
    control, front = make_server([]), Front(Limits.of_members(raise_limit()))
    service = control_service(front)
    service.add_to(control)
    layers = make_threaded_server([], THREADS, message_bytes=LAYER_MESSAGE_BYTES)
    layers_front = Front(Limits.of_members(raise_limit()))
    LayerService(service.handler, service.desk, layers_front).add_to(layers)
    gateways = make_gateways(service.desk, front)
    join = JoinPort(enrolment)
    door = Door(Limits.of_members(raise_limit()))
    relay = _make_relay(credentials, authority) if settings.relay else None
    if relay is not None:
        door.serve_protocol(PROTOCOL_NAME, relay.front)
    mirror = make_mirror()
    door.serve_mirror(mirror)
    host, port = parse_listen(settings.listen)
    try:
        for own, server in ((front, control), (layers_front, layers)):
            await start_behind(own, server, mutual_tls(lambda: credentials, authority.certificate_pem))
        door.serve_name(bulk_name(control_server_name(authority.run_id)), layers_front)
        await join.start(credentials)
        if gateways is not None:
            key, certificate = credentials
            await gateways.start(Credentials(key=key, certificate=certificate, ca=authority.certificate_pem))
            door.serve_name(session_server_name(authority.run_id), gateways.front)
        if not settings.one_port:
            door.serve_other(front)
            beside = join_address(host, port + 1 if port else 0)
            advice = "set [coordinator] listen so that its port and the next are free"
            join.service.control_port = listen_or_advise(door.front, beside, advice)
            port = listen_or_advise(join.front, settings.listen, advice)
        else:
            door.serve_name(JOIN_NAME, join.front)
            door.serve_name(coordinator_server_name(authority.run_id), join.front)
            door.serve_name(control_server_name(authority.run_id), front)
            if gateways is None:
                door.serve_name(session_server_name(authority.run_id), front)
            advice = "set [coordinator] listen to an address of this machine whose port is free"
            # Nodes may dial a different port, which a router or a tunnel forwards to this one.
            join.service.control_port = 0
            port = listen_or_advise(door.front, settings.listen, advice)
        looks = join.service.looks
        door_here = door if settings.one_port else None
        yield Ports(port=port, door=door_here, relay=relay, looks=looks, gateways=gateways)
    finally:
        await door.front.close()
        await mirror.close()
        if gateways is not None:
            await gateways.close()
        if relay is not None:
            await relay.close()
        await join.stop(STOP_SECONDS)
        await control.stop(STOP_SECONDS)
        stopping = layers.stop(0.0)
        await on_thread(lambda: stopping.wait(STOP_SECONDS), "layers-stop")
        await front.close()
        await layers_front.close()


def _make_relay(credentials: tuple[bytes, bytes], authority: CertificateAuthority) -> Relay:
    key_pem, certificate_pem = credentials
    context = mutual_context(
        server_side=True,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=authority.certificate_pem,
        protocol=PROTOCOL_NAME,
    )
    return Relay(lambda: context, lambda why: log.info("the relay refused a connection: %s", why))


def check_ports(settings: CoordinatorSection, page: tuple[str, int] | None = None) -> None:
    """Raise UserError unless the coordinator's ports and the page's are free.

    This is checked before anything is written, so that a failed start leaves no run behind.

    Args:
        page: the page's host and port, if it has its own port.
    """
    host, port = parse_listen(settings.listen)
    free = "whose port is free" if settings.one_port else "whose port and the next are free"
    for number in control_ports(settings) if port else ():
        free_port(host, number, f"set [coordinator] listen to an address of this machine {free}")
    if page is not None and page[1]:
        free = 'to an address of this machine whose port is free, or to "" for no page'
        free_port(*page, f"that is the page's: set [dashboard] listen {free}")


def control_ports(settings: CoordinatorSection) -> tuple[int, ...]:
    """The fixed ports: first the one at which nodes join, last the one for nodes with a certificate."""
    _, port = parse_listen(settings.listen)
    return (port,) if settings.one_port else (port, port + 1)


def free_port(host: str, port: int, advice: str) -> int:
    """The port of this address, or a free one for 0. Raises UserError if this process cannot listen there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # Like gRPC: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except PermissionError:
        raise UserError(
            f"cannot listen at {join_address(host, port)}: ports below 1024 need a privilege, such as "
            f"`sysctl net.ipv4.ip_unprivileged_port_start={port}`; or {advice}"
        ) from None
    except OSError as error:
        raise UserError(f"cannot listen at {join_address(host, port)} ({error.strerror}): {advice}") from None


class _NotYet(grpc.GenericRpcHandler):
    """Answers every call with "not yet"."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        return grpc.stream_stream_rpc_method_handler(_not_yet)


def _not_yet(requests: Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
    # Aborting before the client has sent anything can surface there as an internal error.
    next(requests, None)
    context.abort(NOT_YET, ANSWER)


@contextlib.contextmanager
def nodes_wait(address: str, authority: CertificateAuthority) -> Iterator[None]:
    """Tell nodes that dial `address` to wait. Runs on threads: the event loop starts after reading."""
    credentials = authority.coordinator_credentials(LIFETIME, time.time())
    server = make_threaded_server([_NotYet()], _THREADS)
    try:
        server.add_secure_port(address, mutual_tls(lambda: credentials, authority.certificate_pem))
    except RuntimeError:
        # The port was taken after `check_ports`; the real server reports it.
        yield
        return
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait(_WAIT_SECONDS)


def own_addresses(host: str, port: int) -> tuple[str, ...]:
    """Addresses that reach `host` (perhaps "any") at `port`, the most likely first."""
    return tuple(join_address(name, port) for name in own_hosts(host))


def own_hosts(host: str) -> tuple[str, ...]:
    """`host` itself; for "any", the addresses of the default routes, those of all interfaces, and loopback.

    A socket for "any" serves IPv4 and IPv6 (`wire.front`).
    """
    if host not in ("0.0.0.0", "::"):
        return (host,)
    families = [socket.AF_INET, socket.AF_INET6]
    first = [default_source(family) for family in (families if host == "0.0.0.0" else families[::-1])]
    six = ipv6_addresses()
    first = [host for host in first if ":" not in host or host in six]
    known = [host for host in (*first, *six[:1], *ipv4_addresses(), *six) if host]
    loopback = "::1" if host == "::" else "127.0.0.1"
    return tuple(dict.fromkeys((*list(dict.fromkeys(known))[:MOST_OWN], loopback)))


def where_reached(addresses: Sequence[str]) -> str:
    """A line for the operator with the addresses at which nodes look for the coordinator."""
    hosts = [split_address(address)[0] for address in addresses]
    if all(host in ("127.0.0.1", "::1", "localhost") for host in hosts):
        return (
            "the join line only works on this machine, which has no other address: connect it to a network, "
            "or set coordinator.advertise to the address that other machines reach"
        )
    return (
        f"the join line leads to {', '.join(addresses)}; to be reached from outside these networks, set "
        "coordinator.advertise"
    )
