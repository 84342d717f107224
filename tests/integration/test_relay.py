"""A link through a relay: nothing listens at the higher stage, and only members of a placement are joined."""

import asyncio
import contextlib
import os
import socket
from contextlib import AbstractAsyncContextManager

import pytest

from tests.support import relayed_link
from tests.support.links import SECONDS, content, eventually, key, quick
from tests.support.pki import new_authority, new_node
from tests.support.ports import free_port, listening
from tests.support.relayed_link import Ends, Served
from wire import link as link_module
from wire.errors import LinkError
from wire.identity.authority import CertificateAuthority
from wire.relay import TOGETHER
from wire.relay_client import RelayClient
from wire.telemetry import DIRECT, RELAY

LENGTH = 3_000_000
AUTHORITY = new_authority()
LOWER, UPPER, OTHER = new_node(AUTHORITY), new_node(AUTHORITY), new_node(AUTHORITY)


def relaying(
    authority: CertificateAuthority = AUTHORITY, port: int = 0
) -> AbstractAsyncContextManager[Served]:
    """A relay with the certificate of `OTHER`, for `LOWER` and `UPPER`."""
    return relayed_link.relaying(OTHER, authority, (LOWER, UPPER), port)


def linked(served: Served, *addresses: str, listen: str = "") -> AbstractAsyncContextManager[Ends]:
    """A link between two nodes, the higher of which comes by the relay; `addresses` are tried first."""
    relays = [(RELAY, served, 0)]
    return relayed_link.relayed_link(
        (LOWER, UPPER), relays, LENGTH, quick(), addresses=addresses, listen=listen
    )


async def test_tensors_cross_a_relay_both_ways_and_nothing_else_listens() -> None:
    async with relaying() as served:
        before = listening(os.getpid())
        async with linked(served) as ends:
            await ends.lower.ready(SECONDS)
            await ends.upper.ready(SECONDS)
            assert listening(os.getpid()) == before
            assert (ends.lower.path, ends.upper.path) == (RELAY, RELAY)
            for number in range(4):
                ends.lower.send(key(number), content(key(number), LENGTH))
                ends.upper.send(key(number), content(key(number), LENGTH))
            await ends.at_lower.until(4)
            await ends.at_upper.until(4)
            for end in (ends.at_lower, ends.at_upper):
                assert all(bytes(end.buffers[one]) == content(one, LENGTH) for one in end.arrived)
            assert served.relay.pairs == 2
            assert served.relay.totals.bytes > 8 * LENGTH
        await eventually(lambda: served.relay.pairs == 0)
        assert served.relay.totals.bytes > 8 * LENGTH and not served.refusals


async def test_a_relay_that_dies_and_comes_back_loses_nothing() -> None:
    """The same tensors arrive, once each, though every connection through it breaks again and again."""
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(relaying())
        async with linked(served) as ends:
            await ends.lower.ready(SECONDS)
            for number in range(6):
                ends.lower.send(key(number), content(key(number), LENGTH))
                if number % 2 == 0:
                    # The placement changes twice, so the relay drops what it carries.
                    served.relay.allow([])
                    served.relay.allow([LOWER.node_id, UPPER.node_id])
            await ends.at_upper.until(6)
            await stack.aclose()
            await eventually(lambda: not ends.lower.up)
            ends.lower.send(key(6), content(key(6), LENGTH))
            async with relaying(port=served.port):
                await ends.at_upper.until(7)
                assert ends.at_upper.arrived == [key(number) for number in range(7)]
                assert ends.lower._state.reconnects >= 1


async def test_a_direct_path_that_fails_gives_way_to_the_relay() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets it, and it refuses
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with relaying() as served, linked(served, address) as ends:
            assert ends.lower.path == DIRECT
            await ends.lower.ready(SECONDS)
            assert ends.lower.path == RELAY
            assert "refused" in ends.lower.why_not[DIRECT]


async def test_a_neighbour_that_does_not_answer_at_its_first_address_is_dialled_at_the_other() -> None:
    port = free_port()
    async with (
        relaying() as served,
        linked(served, f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}", listen=f"127.0.0.1:{port}") as ends,
    ):
        await ends.lower.ready(SECONDS)
        assert ends.lower.path == DIRECT and served.relay.pairs == 0


async def test_a_better_path_is_taken_when_nothing_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour's port opens while the relay carries the link: no tensor is lost or sent again."""
    monkeypatch.setattr(link_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(link_module, "LONGEST_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(link_module, "PATIENCE_SECONDS", 0.0)
    address = f"127.0.0.1:{free_port()}"
    async with relaying() as served, linked(served, address) as ends:
        await ends.lower.ready(SECONDS)
        assert ends.lower.path == RELAY
        ends.lower.send(key(0), content(key(0), LENGTH))
        await ends.at_upper.until(1)
        assert ends.server._door is not None
        ends.server._door.front.listen(address)
        await eventually(lambda: ends.lower.path == DIRECT and ends.lower.up and ends.upper.up)
        await eventually(lambda: served.relay.pairs == 0)
        for number in (1, 2):
            ends.lower.send(key(number), content(key(number), LENGTH))
            ends.upper.send(key(number), content(key(number), LENGTH))
        await ends.at_upper.until(3)
        await ends.at_lower.until(2)
        assert ends.at_upper.arrived == [key(number) for number in range(3)]
        assert ends.lower.figures.path == ends.upper.figures.path == DIRECT
        assert ends.lower._state.reconnects == 0
        assert ends.lower.figures.retransmits == ends.upper.figures.retransmits == 0


async def test_two_that_dial_at_the_same_moment_learn_each_others_addresses() -> None:
    """Over loopback no NAT holds a packet back, so the two only learn where to dial."""
    async with relaying() as served:
        clients = served.client(LOWER), served.client(UPPER)
        peers = UPPER.node_id, LOWER.node_id
        found = await asyncio.gather(
            *(client._ask(TOGETHER, peer, SECONDS) for client, peer in zip(clients, peers, strict=True))
        )
        own = [f"127.0.0.1:{asking.getsockname()[1]}" for asking, _ in found]
        assert [there for _, there in found] == own[::-1]
        for asking, _ in found:
            asking.close()
        await eventually(lambda: served.relay.waiting == 0)
        assert (served.relay.totals.told, served.relay.totals.joined) == (1, 0)


async def ask(client: RelayClient, peer: str) -> str:
    """Offer a connection to a peer and say what is wrong with that."""
    offer = asyncio.create_task(client.offer(peer, lambda connection: connection.close()))
    try:
        await eventually(lambda: bool(client.trouble.get(peer)))
        return client.trouble[peer]
    finally:
        offer.cancel()
        await asyncio.wait([offer])
        await client.close()


async def test_a_node_without_a_stage_or_of_another_run_is_refused() -> None:
    async with relaying() as served:
        assert "knows no link" in await ask(served.client(OTHER), UPPER.node_id)
        assert "knows no link" in await ask(served.client(UPPER), OTHER.node_id)
        assert served.relay.totals.refused == len(served.refusals) >= 2
        outsider = new_node(new_authority())
        refusal = await ask(served.client(outsider), UPPER.node_id)
        assert "cannot be used" in refusal
        assert served.relay.totals.joined == 0
    async with relaying(new_authority()) as served:
        assert "cannot be used" in await ask(served.client(UPPER), LOWER.node_id)


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"]
)
async def test_strangers_and_half_requests_keep_no_member_out(words: bytes) -> None:
    async with relaying() as served:
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
                one.sendall(words)
            async with linked(served) as ends:
                await ends.lower.ready(SECONDS)


async def test_a_relay_that_is_gone_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        client = RelayClient(UPPER, address, UPPER.server_name(OTHER.node_id))
        assert address in await ask(client, LOWER.node_id)
        with pytest.raises(LinkError, match="cannot be used"):
            await client._ask(b"D", LOWER.node_id, 1.0)
