"""A node's first contact with a coordinator: it gets the pinned authority, or an error that says why not."""

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.ports import free_port
from wire.bootstrap import fetch_authority
from wire.errors import LinkError, TokenError
from wire.identity.authority import CertificateAuthority, key_to_pem, read_certificate

DAY = timedelta(hours=24)


@pytest_asyncio.fixture
async def tls_server(tmp_path: Path) -> AsyncIterator[Callable[[tuple[bytes, bytes]], Awaitable[str]]]:
    """Starts a TLS server that shows a certificate and says nothing; gives its address."""
    servers: list[asyncio.Server] = []

    async def start_one(credentials: tuple[bytes, bytes]) -> str:
        (tmp_path / "shown.pem").write_bytes(b"".join(credentials))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "shown.pem")
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start_one
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_a_forged_certificate_is_caught(tls_server: Any) -> None:
    authority = CertificateAuthority.create("run-a", time.time())
    thief = CertificateAuthority("run-a", ec.generate_private_key(ec.SECP256R1()), authority.certificate)
    address = await tls_server(thief.coordinator_credentials(DAY, time.time()))
    with pytest.raises(TokenError, match="forged certificate"):
        await fetch_authority(address, authority.pin)


async def test_a_server_of_another_kind_is_no_coordinator(tls_server: Any) -> None:
    authority = CertificateAuthority.create("run-a", time.time())
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = authority.issue_node(key.public_key(), "node-aaaaaaaaaa", DAY, time.time())
    address = await tls_server((key_to_pem(key), certificate))
    with pytest.raises(TokenError, match="not a coordinator"):
        await fetch_authority(address, authority.pin)


async def test_another_authority_with_a_non_text_name_is_reported(tls_server: Any) -> None:
    authority = CertificateAuthority.create("run-a", time.time())
    der = authority.certificate.public_bytes(serialization.Encoding.DER)
    nameless = read_certificate(der.replace(b"thinwire run", b"\xff" * 12))
    odd = CertificateAuthority("run-a", ec.generate_private_key(ec.SECP256R1()), authority.certificate)
    odd.certificate = Mock(wraps=nameless, subject=authority.certificate.subject)
    address = await tls_server(odd.coordinator_credentials(DAY, time.time()))
    with pytest.raises(TokenError, match="unnamed"):
        await fetch_authority(address, bytes(32))


async def test_what_is_no_address_says_so() -> None:
    with pytest.raises(TokenError, match=r"'a\\x00b:1' is not an address"):
        await fetch_authority("a\0b:1", bytes(32))


@pytest.mark.parametrize(("shift", "line"), [(7200.0, "not valid yet"), (-172800.0, "no longer valid")])
async def test_a_wrong_clock_says_so(tls_server: Any, shift: float, line: str) -> None:
    authority = CertificateAuthority.create("run-a", time.time() + shift)
    address = await tls_server(authority.coordinator_credentials(DAY, time.time() + shift))
    with pytest.raises(LinkError, match=f"{line}: .* set the clock"):
        await fetch_authority(address, authority.pin)


async def test_an_empty_run_says_that_nobody_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LinkError, match="nothing answers"):
        await fetch_authority(f"127.0.0.1:{free_port()}", bytes(32))
    with pytest.raises(LinkError, match=r"nothing answers at a\.\.b:1 "):
        await fetch_authority("a..b:1", bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(LinkError, match=r"127\.0\.0\.1:\d+ within 0\.2 s"):
            await fetch_authority(address, bytes(32), 0.2)


async def test_a_plain_server_says_so() -> None:
    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with pytest.raises(LinkError, match="TLS"):
            await fetch_authority(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", bytes(32))
