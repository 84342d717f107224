"""A node's links: the port that neighbours dial, and the links of the current epoch."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from node.config.schema import RunConfig
from node.pipeline.gradient_groups import model_pieces
from node.pipeline.placement import chunks_of, head_first, stage_units
from node.pipeline.routing import Peer
from node.stage.epoch_task import LinkEvents
from node.stage.inbox import TensorLink
from node.stage.session import IdentityHolder
from wire.codecs.formats import FP32
from wire.errors import LinkLostError, ThinwireError, first_error
from wire.layer_exchange import LayerServer
from wire.link import PATH_SECONDS, Link, LinkPath, LinkSettings, LinkStats, dial_link
from wire.link_server import AcceptedLink, LinkServer
from wire.messages import PlacedStage, Placement
from wire.relay_client import TOGETHER_SECONDS, RelayClient
from wire.spec import TensorKey
from wire.telemetry import RELAY, TOGETHER

OFFER_SECONDS = 2.0
"""A neighbour that should dial this node and has not done so for this long may come by the relay."""
LOOK_SECONDS = 0.5
LINK_SECONDS = 60.0
"""How long the links of a new epoch may take to open; a neighbour may still be ending its last epoch."""


def outbox_bytes(config: RunConfig, stages: int) -> int:
    """The most bytes that a correct stage queues in one link of such a placement.

    These are two steps' tensors in one direction, uncompressed. However far stages run ahead, a step begins
    after the last one has arrived completely, but its acknowledgements may still be missing.
    """
    model, training = config.model, config.training
    boundary = FP32.packed_bytes((training.microbatch, model.sequence, model.hidden))
    # Tensors of a microbatch in one direction: one for each chunk. With two stages those of the ring's other
    # half go the same way: one fewer, or as many with the head on the first stage.
    crossings = 2 * chunks_of(config, stages) - 1 + head_first(config, stages)
    step = config.microbatches * crossings * boundary
    if config.sums_tied_gradients and not head_first(config, stages):
        step += FP32.packed_bytes((model.vocab, model.hidden))
    return 2 * step


def sync_outbox_bytes(config: RunConfig, stages: int, stage: int) -> int:
    """The most bytes that a correct stage queues in the link to another row: two steps' pieces of gradients,
    uncompressed, in each node of the tree that a row may hold, and their sums."""
    pieces = model_pieces(config)
    step = sum(
        FP32.packed_bytes((piece.elements,))
        for unit in stage_units(config, stages)[stage]
        for piece in pieces[unit]
    )
    return 2 * (1 + config.pipeline.groups) * step


def dials(placement: Placement, peer: Peer) -> bool:
    """Whether this node dials the link to `peer`: if one of the two can be dialled, the other does; else the
    lower row or stage. Both find the same, as an epoch's addresses do not change."""
    reachable = bool(placement.stages[placement.stage].address)
    if reachable != bool(_placed(placement, peer).address):
        return not reachable
    return (placement.replica, placement.stage) < peer


def _placed(placement: Placement, peer: Peer) -> PlacedStage:
    row = placement.rows[peer.replica].stages if placement.rows else placement.stages
    return row[peer.stage]


class EpochLinks:
    """Links of one epoch at a time. Call everything on the event loop."""

    def __init__(self, identity: IdentityHolder, settings: LinkSettings, relay_address: str = "") -> None:
        """`relay_address` is the host:port of the coordinator's relay, for runs that have one."""
        self._identity = identity
        name = identity.current.coordinator_name
        self._relay = RelayClient(identity, relay_address, name) if relay_address else None
        self._settings = settings
        self._server = LinkServer(identity=identity, run_id=identity.current.run_id, settings=settings)
        self._links: dict[Peer, Link] = {}

    async def start(self, listen: str) -> int:
        """Listen on `listen`; returns the port. Raises UserError when the address cannot be bound.

        If it is empty, nothing listens, and neighbours come by the relay.
        """
        return await self._server.start(listen)

    async def stop(self) -> None:
        """Close every link and the port."""
        if self._relay is not None:
            await self._relay.close()
        await self._server.stop()

    def serve_layers(self, layers: LayerServer) -> None:
        """From now on answer other nodes that ask for layers of snapshots."""
        self._server.layers = layers

    @property
    def busy(self) -> bool:
        """Whether tensors wait to be sent."""
        return any(link.queued_bytes for link in self._links.values())

    def totals(self) -> dict[Peer, tuple[LinkStats, int]]:
        """By neighbour: the link's totals and its queued bytes."""
        return {peer: (link.stats, link.queued_bytes) for peer, link in self._links.items()}

    @contextlib.asynccontextmanager
    async def open(
        self, placement: Placement, peers: tuple[Peer, ...], config: RunConfig, events: LinkEvents
    ) -> AsyncIterator[Mapping[Peer, TensorLink]]:
        """Links to `peers`, ready (`dials` says who dials). Raises the error of a lost link."""
        stages = len(placement.stages)
        room = max(self._settings.outbox_bytes, outbox_bytes(config, stages))
        if any(peer.replica != placement.replica for peer in peers):
            room = max(room, sync_outbox_bytes(config, stages, placement.stage))
        settings = replace(self._settings, outbox_bytes=room)
        relay = self._relay if config.coordinator.relay else None
        links = {peer: self._make(placement, peer, events, settings, relay) for peer in peers}
        for peer, link in links.items():
            link.lost.add_done_callback(functools.partial(_report_lost, events, peer))
        try:
            async with asyncio.TaskGroup() as group:
                for link in links.values():
                    group.create_task(link.run())
                reachable = bool(placement.stages[placement.stage].address)
                offers = [
                    group.create_task(self._offer(relay, link, reachable, together))
                    for link in links.values()
                    if relay is not None and isinstance(link, AcceptedLink)
                    for together in (False, True)
                ]
                self._links = links
                try:
                    for peer, link in links.items():
                        try:
                            await link.ready(LINK_SECONDS)
                        except LinkLostError as error:
                            events.link_lost(peer, error)
                            raise
                    yield links
                finally:
                    self._links = {}
                    for offer in offers:
                        offer.cancel()
                    for link in links.values():
                        await link.close()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    async def _offer(self, relay: RelayClient, link: AcceptedLink, reachable: bool, together: bool) -> None:
        """Take the neighbour's connections from the relay, or dial `together` with it; if this node is
        reachable, once it needs that."""
        take = functools.partial(self._server.adopt, path=TOGETHER if together else RELAY)
        down_since = time.monotonic()
        while reachable:
            await asyncio.sleep(LOOK_SECONDS)
            if link.up:
                down_since = time.monotonic()
            elif time.monotonic() - down_since > OFFER_SECONDS:
                break
        await relay.offer(link.peer_node_id, take, together=together)

    def _make(
        self,
        placement: Placement,
        peer: Peer,
        events: LinkEvents,
        settings: LinkSettings,
        relay: RelayClient | None,
    ) -> Link:
        other = _placed(placement, peer)

        def expect(key: TensorKey) -> int | None:
            return events.expect(peer, key)

        if dials(placement, peer):
            return dial_link(
                identity=self._identity,
                run_id=self._identity.current.run_id,
                epoch=placement.epoch,
                stage=placement.stage,
                peer_node_id=other.node_id,
                peer_stage=peer.stage,
                peer_address=other.address,
                paths=() if relay is None else _paths_by(relay, other.node_id),
                expect=expect,
                on_tensor=events.arrived,
                settings=settings,
            )
        return self._server.expect_peer(
            epoch=placement.epoch,
            stage=placement.stage,
            peer_node_id=other.node_id,
            peer_stage=peer.stage,
            expect=expect,
            on_tensor=events.arrived,
            settings=settings,
        )


def _paths_by(relay: RelayClient, node_id: str) -> tuple[LinkPath, ...]:
    """The ways to a neighbour with the coordinator's relay, the better first."""
    return (
        LinkPath(
            name=TOGETHER,
            address=relay.local_address(node_id, together=True),
            shown="simultaneous open",
            trouble=lambda: relay.trouble_together.get(node_id, ""),
            seconds=TOGETHER_SECONDS + PATH_SECONDS,
            in_background=True,
        ),
        LinkPath(
            name=RELAY,
            address=relay.local_address(node_id),
            shown="the coordinator's relay",
            trouble=lambda: relay.trouble.get(node_id, ""),
        ),
    )


def _report_lost(events: LinkEvents, peer: Peer, lost: "asyncio.Future[ThinwireError]") -> None:
    if not lost.cancelled():
        events.link_lost(peer, lost.result())
