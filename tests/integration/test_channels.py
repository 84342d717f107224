"""gRPC channels: HTTP/2's flow control on links, and many handshakes at once."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from tests.support.links import SECONDS
from tests.support.pki import new_authority, new_node
from wire.byte_stream import ClientCall
from wire.channels import make_server, open_channel
from wire.identity.credentials import NodeIdentity, mutual_tls
from wire.link import LinkSettings

METHOD = "/test/Unread"
MESSAGE = bytes(256 * 1024)
ROUNDS, AT_ONCE = 4, 16


class _Unread(grpc.GenericRpcHandler):
    """Writes `writes` messages and reads none."""

    def __init__(self, writes: int) -> None:
        self.writes = writes
        self.wrote = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        async def handle(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            for _ in range(self.writes):
                await context.write(MESSAGE)
            self.wrote.set()
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(handle)


def _credentials(node: NodeIdentity) -> grpc.ServerCredentials:
    return mutual_tls(lambda: (node.key_pem, node.certificate_pem), node.ca_pem)


@pytest.mark.parametrize("upward", [True, False])
async def test_http2_buffers_at_most_a_links_window(upward: bool) -> None:
    """With gRPC's default windows the writer would wait for the reader after 64 KiB, or 4 MiB at most."""
    settings = LinkSettings()
    messages = settings.window_bytes // len(MESSAGE)
    authority = new_authority()
    server_node, client_node = new_node(authority), new_node(authority)
    handler = _Unread(0 if upward else messages)
    server = make_server([handler], unread_bytes=settings.unread_bytes)
    port = server.add_secure_port("127.0.0.1:0", _credentials(server_node))
    await server.start()
    name = client_node.server_name(server_node.node_id)
    try:
        async with (
            asyncio.timeout(SECONDS),
            open_channel(
                f"127.0.0.1:{port}",
                identity=client_node,
                server_name=name,
                unread_bytes=settings.unread_bytes,
            ) as channel,
        ):
            call: ClientCall = channel.stream_stream(METHOD)()
            for _ in range(messages if upward else 0):
                await call.write(MESSAGE)
            await handler.wrote.wait()
            call.cancel()
    finally:
        await server.stop(None)


async def test_handshakes_at_the_same_time_never_replace_the_certificate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC frees what it replaces under handshakes that are using it (grpc/grpc#36693)."""
    authority = new_authority()
    server_node, client = new_node(authority), new_node(authority)
    answers: list[object] = []
    make = grpc.dynamic_ssl_server_credentials

    def watched(
        initial: grpc.ServerCertificateConfiguration,
        fetch: Callable[[], grpc.ServerCertificateConfiguration],
        require_client_authentication: bool,
    ) -> grpc.ServerCredentials:
        def fetch_and_note() -> grpc.ServerCertificateConfiguration:
            answers.append(answer := fetch())
            return answer

        return make(initial, fetch_and_note, require_client_authentication)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", watched)
    server = make_server([])
    port = server.add_secure_port("127.0.0.1:0", _credentials(server_node))
    await server.start()

    async def connect() -> None:
        name = client.server_name(server_node.node_id)
        async with (
            asyncio.timeout(SECONDS),
            open_channel(f"127.0.0.1:{port}", identity=client, server_name=name) as channel,
        ):
            await channel.channel_ready()

    try:
        for _ in range(ROUNDS):
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(connect())
    finally:
        await server.stop(0)
    assert len(answers) >= ROUNDS * AT_ONCE
    assert set(answers) == {None}
