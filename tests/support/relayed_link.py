"""Relays, and a link by way of them, both ends in this process."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from tests.support.links import EPOCH, SECONDS, End
from tests.support.pki import RUN_ID
from wire.admission import Limits
from wire.door import Door
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import NodeIdentity
from wire.link import DialledLink, LinkPath, LinkSettings, dial_link
from wire.link_server import AcceptedLink, LinkServer
from wire.relay import PROTOCOL_NAME, Relay
from wire.relay_client import RelayClient
from wire.telemetry import DIRECT, RELAY
from wire.tls_socket import mutual_context


@dataclass
class Served:
    """A relay that listens."""

    identity: NodeIdentity
    relay: Relay
    port: int
    refusals: list[str]

    def client(self, node: NodeIdentity, port: int = 0) -> RelayClient:
        """`port`: of what forwards to the relay."""
        return RelayClient(node, f"127.0.0.1:{port or self.port}", node.server_name(self.identity.node_id))


@contextlib.asynccontextmanager
async def relaying(
    identity: NodeIdentity,
    authority: CertificateAuthority,
    allowed: Sequence[NodeIdentity],
    port: int = 0,
) -> AsyncIterator[Served]:
    """A relay with this certificate, for links between the nodes that are `allowed`."""
    refusals = list[str]()
    context = mutual_context(
        server_side=True,
        key_pem=identity.key_pem,
        certificate_pem=identity.certificate_pem,
        ca_pem=authority.certificate_pem,
        protocol=PROTOCOL_NAME,
    )
    relay, door = Relay(lambda: context, refusals.append), Door(Limits.of_members(1000))
    door.serve_protocol(PROTOCOL_NAME, relay.front)
    relay.allow([node.node_id for node in allowed])
    try:
        yield Served(identity, relay, door.front.listen(f"127.0.0.1:{port}"), refusals)
    finally:
        await door.front.close()
        await relay.close()


@dataclass
class Ends:
    lower: DialledLink
    upper: AcceptedLink
    at_lower: End
    at_upper: End
    server: LinkServer
    """Of the upper."""


@contextlib.asynccontextmanager
async def relayed_link(
    ends: tuple[NodeIdentity, NodeIdentity],
    relays: Sequence[tuple[str, Served, int]],
    length: int,
    settings: LinkSettings,
    *,
    addresses: Sequence[str] = (),
    listen: str = "",
) -> AsyncIterator[Ends]:
    """A link whose both ends know the same relays, the best first.

    Args:
        ends: stage 0, which dials, and stage 1.
        relays: the path's name, the relay, and the port of what forwards to it, or 0.
        length: bytes of each tensor.
        addresses: what stage 0 dials before it tries a relay.
        listen: where stage 1 listens; by default nowhere.
    """
    dialler, taker = ends
    dials, takes = ([served.client(node, port) for _, served, port in relays] for node in ends)
    server = LinkServer(identity=taker, run_id=RUN_ID, settings=settings)
    await server.start(listen)
    at_lower, at_upper = End(), End()
    upper = server.expect_peer(
        epoch=EPOCH,
        stage=1,
        peer_node_id=dialler.node_id,
        peer_stage=0,
        expect=lambda _: length,
        on_tensor=at_upper.on_tensor,
    )
    paths = [LinkPath(name=DIRECT, address=further, shown=further) for further in addresses[1:]]
    paths += [
        LinkPath(
            name=name,
            address=client.local_address(taker.node_id),
            shown=RELAY,
            leave=functools.partial(client.hang_up, taker.node_id),
        )
        for client, (name, *_) in zip(dials, relays, strict=True)
    ]
    lower = dial_link(
        identity=dialler,
        run_id=RUN_ID,
        epoch=EPOCH,
        stage=0,
        peer_node_id=taker.node_id,
        peer_stage=1,
        peer_address=addresses[0] if addresses else "",
        paths=paths,
        expect=lambda _: length,
        on_tensor=at_lower.on_tensor,
        settings=settings,
    )
    at_lower.link, at_upper.link = lower, upper

    def taking(path: str) -> Callable[[socket.socket], None]:
        return lambda connection: server.adopt(connection, path)

    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
            offers = [
                group.create_task(client.offer(dialler.node_id, taking(name)))
                for client, (name, *_) in zip(takes, relays, strict=True)
            ]
            running = [group.create_task(link.run()) for link in (lower, upper)]
            try:
                yield Ends(lower, upper, at_lower, at_upper, server)
            finally:
                for offer in offers:
                    offer.cancel()
                await lower.close()
                await upper.close()
                await asyncio.wait(running)
    finally:
        for client in (*dials, *takes):
            await client.close()
        await server.stop()
