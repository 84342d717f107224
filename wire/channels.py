"""gRPC channels and servers with mutual TLS, with the options that tensors on slow links need.

Every channel has sockets of its own: bulk data must never share one with small messages.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
import grpc.aio

from wire.dialing import proxy_options
from wire.frames import FRAME_BYTES
from wire.identity.credentials import server_name_options

NOT_YET = grpc.StatusCode.ABORTED
"""Answer of a coordinator that is still loading the run it resumes. gRPC itself never uses it."""
# The largest message is a frame, plus what a message adds to it.
MESSAGE_BYTES = FRAME_BYTES + 4096

HANDSHAKE_SECONDS = 5.0
"""A connection that has not finished its TLS handshake after this long is dropped."""

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Packed tensors do not compress; trying costs nine tenths of the throughput.
    ("grpc.per_message_decompression", 0),
    ("grpc.default_compression_algorithm", int(grpc.Compression.NoCompression)),
)
_CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # Channels with equal options would share one socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # The timeout must exceed the time that a ping may wait behind bulk data.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # By default a second process binds the same port and gets half of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
    ("grpc.max_concurrent_streams", 16),
    # Below the clients' keepalive, or the server hangs up on them for pinging too much.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 30_000),
)


class LinkIdentity(Protocol):
    """The parts of a node's identity that connections use; read at each handshake, so renewals count."""

    @property
    def node_id(self) -> str: ...

    @property
    def ca_pem(self) -> bytes: ...

    @property
    def certificate_pem(self) -> bytes: ...

    @property
    def key_pem(self) -> bytes: ...

    def server_name(self, node_id: str) -> str:
        """The DNS name that the other node's certificate carries."""
        ...


def open_channel(
    address: str, *, identity: LinkIdentity, server_name: str, unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to `address`, on a socket of its own, to the one node whose certificate has `server_name`.
    It goes through the environment's proxy, if that is for this address (see `wire.dialing`).

    Args:
        unread_bytes: how far a stream may run ahead of what was read here; None leaves it to gRPC, which
            widens it past 4 MiB only while the rate it sees grows. On a link that became slower it stays
            there: at a round trip of 100 ms that is 340 Mbit/s.
    """
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.ca_pem,
        private_key=identity.key_pem,
        certificate_chain=identity.certificate_pem,
    )
    options = (
        *_CLIENT_OPTIONS,
        *proxy_options(address),
        *server_name_options(server_name),
        *_flow_control(unread_bytes),
    )
    return grpc.aio.secure_channel(address, credentials, options=options)


def make_server(
    handlers: Sequence[grpc.GenericRpcHandler], *, unread_bytes: int | None = None
) -> grpc.aio.Server:
    """A server with this package's options; `unread_bytes` as for a channel. Call it on the running loop."""
    return grpc.aio.server(handlers=handlers, options=(*_SERVER_OPTIONS, *_flow_control(unread_bytes)))


def make_threaded_server(handlers: Sequence[grpc.GenericRpcHandler], threads: int) -> grpc.Server:
    """A server with this package's options, for use without an event loop."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc")
    return grpc.server(pool, handlers=list(handlers), options=_SERVER_OPTIONS)


def _flow_control(unread_bytes: int | None) -> tuple[tuple[str, int], ...]:
    if unread_bytes is None:
        return ()
    return ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", unread_bytes)
