"""gRPC channels and servers with mutual TLS, and with the options that tensors on slow links need.

Every channel has its own sockets, because bulk data must never share one with small messages.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
import grpc.aio

from wire.dialing import proxy_options
from wire.event_loop import on_thread
from wire.frames import FRAME_BYTES, MOST_FRAME_BYTES
from wire.identity.credentials import server_name_options

NOT_YET = grpc.StatusCode.ABORTED
"""The status from a coordinator that is still loading the run it resumes. gRPC itself never uses it."""
# The largest message is a frame and the message's own overhead.
MESSAGE_BYTES, BULK_MESSAGE_BYTES = FRAME_BYTES + 4096, MOST_FRAME_BYTES + 4096
LAYER_MESSAGE_BYTES = 1024 * 1024 + 4096
"""A piece of a layer's file, plus what its message adds."""
BULK_THREADS = 64
"""The most bulk streams that a node serves at a time; each has a thread."""

HANDSHAKE_SECONDS = 5.0
"""A connection that has not finished its TLS handshake after this long is dropped."""

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    # Packed tensors do not compress, and trying to costs nine tenths of the throughput.
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
    # Must be below the clients' keepalive, or the server hangs up on them for pinging too often.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 30_000),
)


class LinkIdentity(Protocol):
    """The parts of a node's identity that connections use. They are read at each handshake, so a renewed
    certificate takes effect."""

    @property
    def node_id(self) -> str: ...

    @property
    def ca_pem(self) -> bytes: ...

    @property
    def certificate_pem(self) -> bytes: ...

    @property
    def key_pem(self) -> bytes: ...

    def server_name(self, node_id: str) -> str:
        """The DNS name in the other node's certificate."""
        ...


def open_channel(
    address: str, *, identity: LinkIdentity, server_name: str, unread_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to `address` on its own socket. The peer's certificate must name `server_name`.
    It uses the environment's proxy if that applies to this address (see `wire.dialing`).

    Args:
        unread_bytes: how many bytes a stream may send ahead of what was read here. None leaves this to
            gRPC, which raises it past 4 MiB only while the measured rate grows. If a link once became
            slower, it stays there, which limits the link to 340 Mbit/s at a round trip of 100 ms.
    """
    credentials, options = _to(address, identity, server_name)
    return grpc.aio.secure_channel(
        address, credentials, options=(*options, *_messages(MESSAGE_BYTES), *_flow_control(unread_bytes))
    )


class BulkChannel:
    """A channel of gRPC's synchronous stack, which moves bytes on threads that do not hold the GIL.

    Call the methods on the event loop; `channel` may be used from any thread.
    """

    def __init__(
        self, address: str, *, identity: LinkIdentity, server_name: str, unread_bytes: int | None = None
    ) -> None:
        """Like `open_channel`; the other end's door recognizes bulk streams by `bulk_name`."""
        credentials, options = _to(address, identity, bulk_name(server_name))
        limits = (*_messages(BULK_MESSAGE_BYTES), *_flow_control(unread_bytes))
        self.channel = grpc.secure_channel(address, credentials, options=(*options, *limits))

    async def ready(self) -> None:
        """Wait until it is connected. The caller sets a time limit."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def changed(state: grpc.ChannelConnectivity) -> None:
            if state is grpc.ChannelConnectivity.READY:
                loop.call_soon_threadsafe(ready.set)

        self.channel.subscribe(changed, try_to_connect=True)
        try:
            await ready.wait()
        finally:
            self.channel.unsubscribe(changed)

    async def close(self) -> None:
        """Cancel its calls and wait for them to end."""
        await on_thread(self.channel.close, "bulk-close")


def bulk_name(server_name: str) -> str:
    """The form of a node's name that selects its bulk streams. Host names ignore case: the certificate
    matches."""
    return server_name.upper()


def _to(
    address: str, identity: LinkIdentity, server_name: str
) -> tuple[grpc.ChannelCredentials, tuple[tuple[str, int | str], ...]]:
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.ca_pem,
        private_key=identity.key_pem,
        certificate_chain=identity.certificate_pem,
    )
    return credentials, (*_CLIENT_OPTIONS, *proxy_options(address), *server_name_options(server_name))


def serves(method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> grpc.GenericRpcHandler:
    """For a server that answers the method `/SERVICE/NAME` with `handler`."""
    _, service, name = method.split("/")
    return grpc.method_handlers_generic_handler(service, {name: handler})


def make_server(
    handlers: Sequence[grpc.GenericRpcHandler], *, unread_bytes: int | None = None
) -> grpc.aio.Server:
    """A server with this package's options; `unread_bytes` as for a channel. Call it on the running loop."""
    options = (*_SERVER_OPTIONS, *_messages(MESSAGE_BYTES), *_flow_control(unread_bytes))
    return grpc.aio.server(handlers=handlers, options=options)


def make_threaded_server(
    handlers: Sequence[grpc.GenericRpcHandler],
    threads: int,
    *,
    message_bytes: int = MESSAGE_BYTES,
    unread_bytes: int | None = None,
) -> grpc.Server:
    """A server with this package's options, that answers each call on a thread."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="grpc")
    options = (*_SERVER_OPTIONS, *_messages(message_bytes), *_flow_control(unread_bytes))
    return grpc.server(pool, handlers=list(handlers), options=options)


def _messages(most: int) -> tuple[tuple[str, int], ...]:
    return ("grpc.max_send_message_length", most), ("grpc.max_receive_message_length", most)


def _flow_control(unread_bytes: int | None) -> tuple[tuple[str, int], ...]:
    if unread_bytes is None:
        return ()
    return ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", unread_bytes)
