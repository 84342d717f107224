"""A node's links: the port that neighbours dial, and the links of the current epoch."""

import asyncio
import contextlib
import functools
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from socket import socket

from node.config.schema import RunConfig
from node.schedule.gradient_groups import model_pieces
from node.schedule.placement import boundary_bytes, chunks_of, head_first, slices_of, stage_units
from node.schedule.routing import Peer
from node.stage.epoch_task import EpochTask, is_taken, placed_node
from node.stage.session import IdentityHolder
from wire.codecs.formats import FP32
from wire.dialing import connect
from wire.errors import LinkError, ThinwireError, first_error
from wire.figures import LinkFigures
from wire.layer_exchange import LayerServer
from wire.link import PATH_SECONDS, DialledLink, Link, LinkPath, LinkSettings, dial_link
from wire.link_server import AcceptedLink, LinkServer
from wire.messages import PlacedStage, Placement
from wire.peer_probe import ProbeServer
from wire.relay import PROTOCOL_NAME, Relay
from wire.relay_client import TOGETHER_SECONDS, RelayClient
from wire.spec import TensorKey
from wire.telemetry import DIRECT, RELAY, TOGETHER, relay_path
from wire.tls_socket import mutual_context

log = logging.getLogger(__name__)

MEASURED = 3
"""The number of connections to a relay; the fastest gives its round trip."""
OFFER_SECONDS = 2.0
"""If a neighbour that should dial this node has not done so within this time, the relay is offered."""
LOOK_SECONDS = 0.5
_MOST_ROWS = 2**16
"""The most rows: the two rows of a link are encoded in one 32-bit number."""
LINK_SECONDS = 60.0
"""The seconds for a new epoch's links to open. A neighbour may still be ending its previous epoch."""
ENTERING_SECONDS = 25.0
"""A node that enters an epoch names the neighbours to which it has no link after this time, before another
node gets its seat (`node.run_state.newcomers.LATE_SECONDS`)."""


def outbox_bytes(config: RunConfig, stages: int) -> int:
    """The most bytes that a correct stage queues in one link of a pipeline with this many stages.

    These are two steps' tensors in one direction, uncompressed. However far ahead a stage runs, a step begins
    after the previous one has arrived completely, but its acknowledgements may still be missing.
    """
    model, boundary = config.model, boundary_bytes(config, FP32.name)
    # One tensor per microbatch and direction for each chunk. With two stages, the tensors of the ring's other
    # half go the same way: one fewer, or as many with the head on the first stage.
    crossings = 2 * chunks_of(config, stages) - 1 + head_first(config, stages)
    step = config.microbatches * crossings * boundary
    if config.sums_tied_gradients and not head_first(config, stages):
        step += FP32.packed_bytes((model.vocab, model.hidden))
    return 2 * step


def sync_outbox_bytes(config: RunConfig, stages: int, stage: int) -> int:
    """The most bytes that a correct stage queues in the link to another row: two steps' pieces of gradients,
    uncompressed, for each node of the tree that a row may hold, and their sums."""
    # A round's pieces are the same plus a few vectors.
    pieces = model_pieces(config, of_round=config.sync.every > 1)
    step = sum(
        FP32.packed_bytes((piece.elements,))
        for unit in stage_units(config, stages)[stage]
        for piece in pieces[unit]
    )
    return 2 * (1 + config.pipeline.groups) * step


def dials(placement: Placement, peer: Peer) -> bool:
    """Whether this node dials the link to `peer`. If only one of the two can be dialled, the other dials;
    otherwise the lower row or stage does. Both ends agree, because an epoch's addresses do not change."""
    reachable = bool(placement.stages[placement.stage].address)
    if reachable != bool(placed_node(placement, peer).address):
        return not reachable
    return (placement.replica, placement.stage) < peer


class EpochLinks:
    """The links of one epoch at a time. Call everything on the event loop."""

    def __init__(
        self,
        identity: IdentityHolder,
        settings: LinkSettings,
        relay_address: str = "",
        relay_rate: float = 0.0,
    ) -> None:
        """
        Args:
            relay_address: host:port of the coordinator's relay, for runs that have one.
            relay_rate: bytes per second that this node relays for others; 0 if it does not.
        """
        self._identity = identity
        self._relay_address = relay_address
        self._clients: dict[str, RelayClient] = {}
        """Clients by the relay's node id, "" for the coordinator."""
        self.relay: Relay | None = None
        """Joins connections of other nodes, once this node listens."""
        self._relay_rate = relay_rate
        self._context = functools.lru_cache(maxsize=1)(_server_context)
        self._settings = settings
        self._server = LinkServer(identity=identity, run_id=identity.current.run_id, settings=settings)
        self._open: _OpenLinks | None = None
        """The links of the current epoch."""

    async def start(self, listen: str) -> int:
        """Listen on `listen` and return the port. Raises UserError if the address cannot be bound.

        If `listen` is empty, the node does not listen, and neighbours connect through the relay.
        """
        if self._relay_rate and listen:
            identity = self._identity
            self.relay = Relay(
                lambda: self._context(identity.key_pem, identity.certificate_pem, identity.ca_pem),
                lambda why: log.info("refused to relay: %s", why),
                self._relay_rate,
            )
        return await self._server.start(listen, self.relay.front if self.relay is not None else None)

    async def stop(self) -> None:
        for client in self._clients.values():
            await client.close()
        await self._server.stop()
        if self.relay is not None:
            await self.relay.close()

    async def round_trips(self, relays: Sequence[PlacedStage]) -> dict[str, float]:
        """The seconds to connect to each relay, the least of a few attempts. Relays that do not answer are
        left out."""
        times: dict[str, float] = {}
        for relay in relays:
            with contextlib.suppress(OSError, TimeoutError, ThinwireError):
                for _ in range(MEASURED):
                    began = time.monotonic()
                    async with asyncio.timeout(PATH_SECONDS):
                        (await connect(relay.address)).close()
                    spent = time.monotonic() - began
                    times[relay.node_id] = min(times.get(relay.node_id, spent), spent)
        return times

    def shut_out(self, nodes: Collection[str]) -> None:
        """Refuse all connections of these nodes from now on."""
        self._server.shut_out = frozenset(nodes)

    def serve_layers(self, layers: LayerServer) -> None:
        """From now on, answer requests of other nodes for layers of snapshots."""
        self._server.layers = layers

    def serve_probes(self, probes: ProbeServer) -> None:
        """From now on, let other nodes measure their line to this node."""
        self._server.probes = probes

    @property
    def busy(self) -> bool:
        """Whether tensors are waiting to be sent, to neighbours that are there."""
        return any(link.up and link.queued_bytes for link in self._links().values())

    def figures(self) -> dict[Peer, LinkFigures]:
        """Figures by neighbour, without the codecs of flows and without rows."""
        return {peer: link.figures for peer, link in self._links().items()}

    def _links(self) -> Mapping[Peer, Link]:
        return self._open.links if self._open is not None else {}

    @contextlib.asynccontextmanager
    async def open(
        self, placement: Placement, peers: tuple[Peer, ...], config: RunConfig, events: EpochTask
    ) -> AsyncIterator[Mapping[Peer, Link]]:
        """Links to `peers`, ready on entry (`dials` says who dials). Raises the error of a lost link."""
        stages = len(placement.stages)
        room = max(self._settings.outbox_bytes, outbox_bytes(config, stages))
        if len(placement.rows) > 1:
            room = max(room, sync_outbox_bytes(config, stages, placement.stage))
        settings = replace(
            self._settings, outbox_bytes=room, held_out_from=config.microbatches * slices_of(config)
        )
        relayed = config.coordinator.relay and bool(self._relay_address)
        try:
            async with asyncio.TaskGroup() as group:
                made = self._open = _OpenLinks(self, placement, events, settings, relayed, group)
                try:
                    for peer in peers:
                        made.make(placement, peer)
                    await made.all_ready()
                    yield made.links
                finally:
                    self._open = None
                    await made.close()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def renew(self, placement: Placement | None, peers: Sequence[Peer]) -> None:
        """Other nodes, or none, have these places of the current epoch: drop the old links and open new ones
        during the steps. A link that does not open is reported as lost. Without a placement, nobody has the
        places."""
        if self._open is not None:
            self._open.renew(placement, peers)

    def learn_relays(self, placement: Placement) -> None:
        """The placement has additional relays. Links use them if they are better than their current path."""
        if (made := self._open) is not None:
            for peer in made.links:
                made.add_paths(peer, self.relays(placement, peer))

    def adopt(self, path: str) -> Callable[[socket], None]:
        """Takes a connection that came by this path."""
        return functools.partial(self._server.adopt, path=path)

    def relays(self, placement: Placement, peer: Peer) -> dict[str, RelayClient]:
        """The relayed paths to a neighbour by the relay's name, the best first."""
        own = self._client("", self._relay_address)
        paths = {TOGETHER: own}
        for relay in placement.relays.get(placed_node(placement, peer).node_id, ()):
            paths[relay_path(relay.node_id)] = self._client(relay.node_id, relay.address)
        return {**paths, RELAY: own}

    def _client(self, node_id: str, address: str) -> RelayClient:
        """The client for a volunteer's relay, or with "" for the coordinator's relay."""
        known = self._clients.get(node_id)
        if known is None:
            identity = self._identity.current
            name = identity.server_name(node_id) if node_id else identity.coordinator_name
            known = self._clients[node_id] = RelayClient(self._identity, address, name)
        known.address = address
        return known

    def make(
        self,
        placement: Placement,
        peer: Peer,
        events: EpochTask,
        settings: LinkSettings,
        relays: Mapping[str, RelayClient],
    ) -> Link:
        """The link to a neighbour, which does not run yet."""
        other = placed_node(placement, peer)

        def expect(key: TensorKey) -> int | None:
            return events.expect(peer, key)

        low, high = sorted((placement.replica, peer.replica))
        rows = _MOST_ROWS * low + high
        if dials(placement, peer):
            return dial_link(
                identity=self._identity,
                run_id=self._identity.current.run_id,
                epoch=placement.epoch,
                stage=placement.stage,
                peer_node_id=other.node_id,
                peer_stage=peer.stage,
                peer_address=other.address,
                paths=[
                    *(
                        LinkPath(name=DIRECT, address=address, shown=address)
                        for address in placement.also.get(other.node_id, ())
                    ),
                    *(_path_by(path, client, other.node_id) for path, client in relays.items()),
                ],
                expect=expect,
                on_tensor=functools.partial(events.arrived, peer),
                settings=settings,
                rows=rows,
            )
        return self._server.expect_peer(
            epoch=placement.epoch,
            stage=placement.stage,
            peer_node_id=other.node_id,
            peer_stage=peer.stage,
            expect=expect,
            on_tensor=functools.partial(events.arrived, peer),
            settings=settings,
            rows=rows,
        )


class _OpenLinks:
    """The links of an epoch between its first placement and its end."""

    def __init__(
        self,
        node: EpochLinks,
        placement: Placement,
        events: EpochTask,
        settings: LinkSettings,
        relayed: bool,
        group: asyncio.TaskGroup,
    ) -> None:
        """`relayed`: whether neighbours can meet at relays. `group` runs the links."""
        self._node = node
        self._events = events
        self._settings = settings
        self._relayed = relayed
        self._group = group
        self._reachable = bool(placement.stages[placement.stage].address)
        self.links: dict[Peer, Link] = {}
        self._clients: dict[Peer, dict[str, RelayClient]] = {}
        """The relayed paths to each neighbour."""
        self._offers: dict[Peer, list[asyncio.Task[None]]] = {}
        """Tasks that accept a neighbour's connections on relayed paths."""
        self._naming = group.create_task(self._name_unopened()) if placement.enters else None

    def make(self, placement: Placement, peer: Peer) -> Link:
        """Run a new link to a neighbour."""
        clients = self._node.relays(placement, peer) if self._relayed else {}
        link = self._node.make(placement, peer, self._events, self._settings, clients)
        self.links[peer], self._clients[peer] = link, clients
        link.lost.add_done_callback(functools.partial(self._report_lost, peer, link))
        link.on_silent = functools.partial(self._events.silent, peer)
        self._group.create_task(link.run())
        if isinstance(link, AcceptedLink):
            self._accept(peer, link, clients)
        return link

    async def all_ready(self) -> None:
        """Wait until all links are open. Raises the error of one that does not open."""
        opened: dict[Peer, Link] = {}
        # `renew` may replace links meanwhile, or drop them.
        while waits := [peer for peer, link in self.links.items() if opened.get(peer) is not link]:
            peer = waits[0]
            link = self.links[peer]
            if (error := await self._ready(peer, link)) is not None:
                raise error
            opened[peer] = link

    def renew(self, placement: Placement | None, peers: Sequence[Peer]) -> None:
        """See `EpochLinks.renew`."""
        for peer in peers:
            for task in self._offers.pop(peer, ()):
                task.cancel()
            if (old := self.links.pop(peer, None)) is not None:
                self._group.create_task(old.close())
            self._clients.pop(peer, None)
            if placement is not None and is_taken(placement, peer):
                self._group.create_task(self._ready(peer, self.make(placement, peer)))

    def add_paths(self, peer: Peer, paths: Mapping[str, RelayClient]) -> None:
        """Use those of the relayed paths to a neighbour that are new."""
        known, link = self._clients[peer], self.links[peer]
        new = {name: client for name, client in paths.items() if name not in known}
        known |= new
        if isinstance(link, DialledLink) and new:
            link.add_paths([_path_by(name, client, link.peer_node_id) for name, client in new.items()])
        elif isinstance(link, AcceptedLink):
            self._accept(peer, link, new)

    async def close(self) -> None:
        for task in chain.from_iterable(self._offers.values()):
            task.cancel()
        if self._naming is not None:
            self._naming.cancel()
        for link in self.links.values():
            await link.close()

    async def _ready(self, peer: Peer, link: Link) -> LinkError | None:
        """Wait until a link is open. If it does not open, report it as lost and return the error, unless it
        has been replaced."""
        try:
            await link.ready(LINK_SECONDS)
        except LinkError as error:
            if self.links.get(peer) is link:
                self._events.link_lost(peer, error)
                return error
        return None

    def _accept(self, peer: Peer, link: AcceptedLink, paths: Mapping[str, RelayClient]) -> None:
        for path, client in paths.items():
            offering = self._group.create_task(self._offer(client, link, path))
            self._offers.setdefault(peer, []).append(offering)

    async def _offer(self, relay: RelayClient, link: AcceptedLink, path: str) -> None:
        """Accept the neighbour's connections on this path; if this node is reachable, only once they are
        needed."""
        down_since = time.monotonic()
        while self._reachable:
            await asyncio.sleep(LOOK_SECONDS)
            if link.up:
                down_since = time.monotonic()
            elif time.monotonic() - down_since > OFFER_SECONDS:
                break
        await relay.offer(link.peer_node_id, self._node.adopt(path), together=path == TOGETHER)

    async def _name_unopened(self) -> None:
        await asyncio.sleep(ENTERING_SECONDS)
        for peer, link in self.links.items():
            if not link.up:
                self._events.silent(peer)

    def _report_lost(self, peer: Peer, link: Link, lost: "asyncio.Future[ThinwireError]") -> None:
        if not lost.cancelled() and self.links.get(peer) is link:
            self._events.link_lost(peer, lost.result())


def _path_by(name: str, relay: RelayClient, node_id: str) -> LinkPath:
    together = name == TOGETHER
    trouble = relay.trouble_together if together else relay.trouble
    return LinkPath(
        name=name,
        address=relay.local_address(node_id, together=together),
        shown="the coordinator's relay" if name == RELAY else name,
        trouble=lambda: trouble.get(node_id, ""),
        leave=functools.partial(relay.hang_up, node_id, together=together),
        seconds=TOGETHER_SECONDS + PATH_SECONDS if together else PATH_SECONDS,
        in_background=together,
    )


def _server_context(key_pem: bytes, certificate_pem: bytes, ca_pem: bytes) -> ssl.SSLContext:
    return mutual_context(
        server_side=True,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=ca_pem,
        protocol=PROTOCOL_NAME,
    )
