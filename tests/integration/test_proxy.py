"""First contact, links and the relay through an HTTP proxy, over real sockets."""

import asyncio
import contextlib

import pytest

from node.lab.proxy import http_proxy
from tests.support.links import SECONDS, content, key, make_pair
from tests.support.pki import new_authority, new_node
from wire import dialing
from wire.bootstrap import fetch_authority
from wire.dialing import ProxyError, connect
from wire.errors import LinkError
from wire.relay_client import RelayClient

pytestmark = pytest.mark.usefixtures("proxies_loopback")


@pytest.fixture
def proxies_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is excepted from every proxy, and here all is on loopback."""
    monkeypatch.setattr(dialing, "_excepted", lambda *_: False)
    for name in ("https_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


async def test_a_link_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with http_proxy("us:p@ss") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://us:p%40ss@127.0.0.1:{proxy.port}")
        async with make_pair(100_000) as pair:
            pair.lower.send(key(0), content(key(0), 100_000))
            await pair.upper_end.until(1)
            assert bytes(pair.upper_end.buffers[key(0)]) == content(key(0), 100_000)
            assert proxy.connected == [f"127.0.0.1:{pair.relay.port}"] * 2 and not proxy.refused


async def test_bytes_that_follow_the_proxys_answer_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server, http_proxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{proxy.port}")
        connection = await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with contextlib.closing(connection):
            data = b""
            while len(data) < 5:
                data += await asyncio.get_running_loop().sock_recv(connection, 5)
            assert data == b"hello"


async def test_what_a_proxy_refuses_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pin = new_authority().pin
    async with http_proxy("us:er") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(LinkError, match="password"):
            await fetch_authority("203.0.113.7:7700", pin)
    async with http_proxy(ports=frozenset({443})) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(LinkError, match=r"only port 443.* 7700"):
            await fetch_authority("203.0.113.7:7700", pin)
        assert proxy.refused == ["203.0.113.7:7700"]
        node, trouble = new_node(new_authority()), "only port 443"
        client = RelayClient(node, "203.0.113.7:7700", "control.run")
        offer = asyncio.create_task(client.offer("node-aaaaaaaaaa", lambda connection: connection.close()))
        async with asyncio.timeout(SECONDS):
            while trouble not in client.trouble.get("node-aaaaaaaaaa", ""):  # noqa: ASYNC110 - bounded, no event
                await asyncio.sleep(0.01)
        offer.cancel()
        await asyncio.wait([offer])
        await client.close()
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    with pytest.raises(ProxyError, match=r"does not answer .*NO_PROXY"):
        await connect("203.0.113.7:7700")


async def test_what_is_no_proxy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n" + bytes(20_000))
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ProxyError, match="did not answer in HTTP"):
            await connect("203.0.113.7:7700")
