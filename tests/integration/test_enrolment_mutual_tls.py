"""Certificates at work: a mutual-TLS port lets in nodes of its own run only, and renewal needs no restart."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.store import Member, Store
from tests.support.pki import new_authority, new_node
from wire.errors import RefusalCode
from wire.identity.authority import CertificateAuthority, csr_public_key, public_key_hash
from wire.identity.credentials import (
    NodeIdentity,
    mutual_tls,
    peer_node_id,
    server_name_options,
)
from wire.identity.enrolment import Hardware, Refusal

DAY = timedelta(hours=24)


@pytest.fixture(scope="module")
def authority() -> CertificateAuthority:
    return new_authority("run-a")


def channel_credentials(identity: NodeIdentity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.certificate_pem)


def server_credentials(current: Callable[[], NodeIdentity]) -> grpc.ServerCredentials:
    return mutual_tls(lambda: (current().key_pem, current().certificate_pem), current().ca_pem)


@asynccontextmanager
async def who_am_i(credentials: grpc.ServerCredentials) -> AsyncIterator[str]:
    """A server that tells each caller the node id it sees; gives its address."""

    async def answer(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return (peer_node_id(context) or "nobody").encode()

    ask: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("test.WhoAmI", {"Ask": ask})])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def ask(address: str, credentials: grpc.ChannelCredentials, server_name: str) -> str:
    # Without a pool of its own a second channel with these arguments would reuse the first one's connection.
    options = [*server_name_options(server_name), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        call: Any = channel.unary_unary("/test.WhoAmI/Ask")
        reply: bytes = await call(b"", timeout=60)
        return reply.decode()


async def test_a_neighbour_is_known_by_its_certificate(authority: CertificateAuthority) -> None:
    server, client = new_node(authority), new_node(authority)
    async with who_am_i(server_credentials(lambda: server)) as address:
        seen = await ask(address, channel_credentials(client), client.server_name(server.node_id))
    assert seen == client.node_id


async def test_another_runs_certificate_is_refused(authority: CertificateAuthority) -> None:
    server = new_node(authority)
    # The same run id does not help: the authority is another one.
    stranger = new_node(new_authority("run-a"))
    with_our_ca = grpc.ssl_channel_credentials(
        authority.certificate_pem, stranger.key_pem, stranger.certificate_pem
    )
    without_certificate = grpc.ssl_channel_credentials(authority.certificate_pem)
    async with who_am_i(server_credentials(lambda: server)) as address:
        for credentials in (with_our_ca, without_certificate, channel_credentials(stranger)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(address, credentials, server.server_name(server.node_id))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_an_ended_certificate_is_refused(authority: CertificateAuthority) -> None:
    server, client = new_node(authority), new_node(authority, lifetime=timedelta(minutes=-1))
    async with who_am_i(server_credentials(lambda: server)) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(address, channel_credentials(client), server.server_name(server.node_id))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_another_node_at_the_neighbours_address_is_refused(authority: CertificateAuthority) -> None:
    expected, impostor, client = (new_node(authority) for _ in range(3))
    async with who_am_i(server_credentials(lambda: impostor)) as address:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(address, channel_credentials(client), client.server_name(expected.node_id))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(address, channel_credentials(client), client.coordinator_name)


async def test_a_renewed_certificate_is_shown_without_a_restart(authority: CertificateAuthority) -> None:
    current = [new_node(authority)]

    async def shown(address: str) -> int:
        context = ssl.create_default_context(cadata=authority.certificate_pem.decode())
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        leaf = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return x509.load_der_x509_certificate(leaf).serial_number

    async with who_am_i(server_credentials(lambda: current[0])) as address:
        for _ in range(3):
            expected = x509.load_pem_x509_certificate(current[0].certificate_pem).serial_number
            assert await shown(address) == expected
            current[0] = new_node(authority)


def test_renewal_is_for_members_and_their_own_key(authority: CertificateAuthority, tmp_path: Path) -> None:
    identity, stranger = new_node(authority), new_node(authority)
    key_hash = public_key_hash(csr_public_key(identity.csr_der()))
    with Store.create(tmp_path, run_id="run-a", config_json="{}", pin=authority.pin, now=0.0) as store:
        handler = EnrolmentHandler(store, authority, DAY, time.time)
        store.set_addresses(["127.0.0.1:7700"])
        member = Member(identity.node_id, key_hash, Hardware("cpu", 2, 1), time.time())
        _, token = store.create_token(time.time(), DAY, 1)
        assert store.admit_token(token.token_id, token.secret, member).refusal is None
        certificate = handler.renew(identity.node_id, identity.csr_der())
        assert isinstance(certificate, bytes)
        assert identity.renewed(certificate).expires_at > identity.expires_at + 80000
        for node_id, csr, code in (
            (stranger.node_id, stranger.csr_der(), RefusalCode.NOT_A_MEMBER),
            (identity.node_id, stranger.csr_der(), RefusalCode.BAD_REQUEST),
            (identity.node_id, b"", RefusalCode.BAD_REQUEST),
        ):
            outcome = handler.renew(node_id, csr)
            assert isinstance(outcome, Refusal) and outcome.code is code and "\n" not in outcome.message
        assert len(store.members()) == 1
