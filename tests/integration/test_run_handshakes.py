"""A port under many handshakes at once: gRPC must not be given reasons to crash."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from tests.support.pki import new_authority, new_node
from wire.channels import listen_mutual_tls, make_server, open_channel

ROUNDS, AT_ONCE = 10, 16


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
    port = listen_mutual_tls(server, "127.0.0.1:0", server_node)
    await server.start()

    async def connect() -> None:
        name = client.server_name(server_node.node_id)
        async with (
            asyncio.timeout(30),
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
