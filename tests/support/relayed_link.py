"""A link over relays alone, both ends in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tests.support.links import EPOCH, End
from tests.support.pki import RUN_ID
from wire.identity.credentials import NodeIdentity
from wire.link import DialledLink, LinkPath, LinkSettings, dial_link
from wire.link_server import LinkServer
from wire.relay_client import RelayClient
from wire.telemetry import RELAY, relay_path


@dataclass
class Ends:
    lower: DialledLink
    at_lower: End = field(default_factory=End)
    at_upper: End = field(default_factory=End)


@contextlib.asynccontextmanager
async def relayed_link(
    ends: tuple[NodeIdentity, NodeIdentity],
    relays: Sequence[tuple[str, NodeIdentity]],
    length: int,
    settings: LinkSettings,
) -> AsyncIterator[Ends]:
    """A link whose both ends know the same relays, the best first.

    Args:
        ends: stage 0, which dials, and stage 1, where nothing listens.
        relays: host:port and identity.
        length: bytes of each tensor.
    """
    dialler, taker = ends
    dials, takes = (
        [RelayClient(node, address, node.server_name(relay.node_id)) for address, relay in relays]
        for node in ends
    )
    server = LinkServer(identity=taker, run_id=RUN_ID, settings=settings)
    await server.start("")
    at_lower, at_upper = End(), End()
    upper = server.expect_peer(
        epoch=EPOCH,
        stage=1,
        peer_node_id=dialler.node_id,
        peer_stage=0,
        expect=lambda _: length,
        on_tensor=at_upper.on_tensor,
    )
    paths = [
        LinkPath(name=relay_path(relay.node_id), address=client.local_address(taker.node_id), shown=RELAY)
        for client, (_, relay) in zip(dials, relays, strict=True)
    ]
    lower = dial_link(
        identity=dialler,
        run_id=RUN_ID,
        epoch=EPOCH,
        stage=0,
        peer_node_id=taker.node_id,
        peer_stage=1,
        paths=paths,
        expect=lambda _: length,
        on_tensor=at_lower.on_tensor,
        settings=settings,
    )
    at_lower.link, at_upper.link = lower, upper

    def taking(path: str) -> Callable[[socket.socket], None]:
        return lambda connection: server.adopt(connection, path)

    try:
        async with asyncio.TaskGroup() as group:
            offers = [
                group.create_task(client.offer(dialler.node_id, taking(path.name)))
                for client, path in zip(takes, paths, strict=True)
            ]
            running = [group.create_task(link.run()) for link in (lower, upper)]
            try:
                yield Ends(lower, at_lower, at_upper)
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
