"""Where the coordinator can be reached, and its control port while a resumed run is still being read.

Reading a large text and snapshot takes minutes. Nodes that waited out the coordinator's restart would give up
by then, so the port tells them to keep waiting.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import grpc

from wire.channels import NOT_YET, make_threaded_server
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import mutual_tls
from wire.identity.names import join_address

ANSWER = "the coordinator reads its text and its newest snapshot, and goes on after that"
LIFETIME = timedelta(days=1)
STOP_SECONDS = 5.0
_THREADS = 4


class _NotYet(grpc.GenericRpcHandler):
    """Answers every call."""

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
        # Taken since `check_ports`; the real server reports it.
        yield
        return
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait(STOP_SECONDS)


def own_addresses(host: str, port: int) -> tuple[str, ...]:
    """Addresses that reach `host` (perhaps "any") at `port`, the most likely first."""
    return tuple(join_address(name, port) for name in own_hosts(host))


def own_hosts(host: str) -> tuple[str, ...]:
    """`host` itself, or for "any" the address of the default route and loopback."""
    if host not in ("0.0.0.0", "::"):
        return (host,)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    outside = "2001:db8::1" if host == "::" else "192.0.2.1"
    loopback = "::1" if host == "::" else "127.0.0.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only selects the source address.
            probe.connect((outside, 9))
            own = probe.getsockname()[0]
        except OSError:
            own = loopback
    return tuple(dict.fromkeys((own, loopback)))
