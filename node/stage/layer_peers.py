"""What nodes do with each other besides training: a node fetches layers of snapshots from others, and
measures its line to them."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from node.stage.sums_kept import SumsKept
from node.state.snapshot_cache import SnapshotCache
from wire.channels import LinkIdentity, open_channel
from wire.errors import LinkError, ProtocolViolationError
from wire.layer_exchange import LayerRequest, NotHeldError, get_layer, yield_to
from wire.messages import PlacedStage
from wire.pacing import Backoff, Pacer
from wire.peer_probe import LineRate, PassThrough, measure_line

log = logging.getLogger(__name__)

ROUNDS = 4
"""How often all holders are tried before the coordinator is asked again."""


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Where the coordinator says that a layer's file is."""

    step: int
    unit: str
    bytes: int
    sha256: str
    holders: tuple[PlacedStage, ...] = ()
    url: str = ""
    """The URL in an object store."""


class LayersHeld:
    """What this node's port gives to other nodes. Implements `wire.layer_exchange.LayerSource`."""

    def __init__(
        self, cache: SnapshotCache, sums: SumsKept, pacer: Pacer | None, busy: Callable[[], bool]
    ) -> None:
        """
        Args:
            sums: gradients for nodes that follow the run.
            pacer: the node's bandwidth limit, if it has one.
            busy: whether tensors of the training wait to be sent; these go first.
        """
        self._cache = cache
        self._sums = sums
        self._pacer = pacer
        self._busy = busy

    async def read(self, request: LayerRequest) -> bytes | None:
        if request.sums:
            return await asyncio.to_thread(self._sums.read, request.step, request.unit)
        kept = await asyncio.to_thread(self._cache.get, request.step, request.unit)
        return kept.data if kept is not None and kept.sha256 == request.sha256 else None

    async def pass_through(self, size: int) -> None:
        await yield_to(self._busy)
        if self._pacer is not None:
            await self._pacer.pass_through(size)


class LayerPeers:
    """Fetches layers from other nodes. Call everything on the event loop."""

    def __init__(self, identity: LinkIdentity) -> None:
        self._identity = identity
        self.bytes_came: Callable[[int], None] = lambda count: None
        """Called with the size of each part that arrives."""
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    async def close(self) -> None:
        """End all connections."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def fetch(self, place: LayerPlace, limit: int, bad: set[str]) -> bytes:
        """The file, from one holder or several in turn, its SHA-256 checked.

        Args:
            limit: the most bytes that the unit's file may have.
            bad: gets the holders that have no such file or a damaged one.

        Raises LinkError if no holder gives it, ProtocolViolationError for an impossible size.
        """
        what = f"layer {place.unit} of step {place.step}"
        if place.bytes > limit:
            raise ProtocolViolationError(f"{what} has {place.bytes} bytes, expected at most {limit}")
        trouble = "nobody holds it"
        backoff = Backoff(0.2, 2.0)
        data, sources, alone = bytearray(), set[str](), False
        for turn in range(ROUNDS):
            for holder in self._order(place.holders, place.unit):
                if holder.node_id in bad:
                    continue
                # After a mixture was damaged nobody knows whose part it was: take all of it from one.
                if alone:
                    data, sources = bytearray(), set()
                before = len(data)
                sources.add(holder.node_id)
                try:
                    await self._receive(place, holder, data)
                except NotHeldError:
                    bad.add(holder.node_id)
                    sources.discard(holder.node_id)
                    del data[before:]
                except LinkError as error:
                    trouble = f"node {holder.node_id}: {error}"
                    log.info("%s breaks off at byte %d: %s", what, len(data), error)
                    await self._hang_up(holder)
                else:
                    if await asyncio.to_thread(_sha256, data) == place.sha256:
                        return await asyncio.to_thread(bytes, data)
                    trouble = f"what came from node {holder.node_id} is damaged"
                    log.warning("%s: %s", what, trouble)
                    if sources == {holder.node_id}:
                        bad.add(holder.node_id)
                    alone = True
                    data, sources = bytearray(), set()
            if all(holder.node_id in bad for holder in place.holders):
                break
            if turn + 1 < ROUNDS:
                await asyncio.sleep(backoff.advance())
        raise LinkError(f"{what} could not be fetched from any holder ({trouble})")

    async def fetch_sums(self, holders: Sequence[PlacedStage], step: int, unit: str, size: int) -> bytes:
        """A unit's summed gradients of a step, packed, from the first holder that has them.

        Raises LinkError if none has them in the right size.
        """
        trouble = "nobody keeps them"
        backoff = Backoff(0.1, 1.0)
        for turn in range(ROUNDS):
            for holder in holders:
                request = LayerRequest(step=step, unit=unit, sums=True)
                data = bytearray()
                try:
                    async for chunk in get_layer(self._channel(holder), request):
                        data += chunk
                        if len(data) > size:
                            break
                except NotHeldError as error:
                    trouble = str(error)
                except LinkError as error:
                    trouble = f"node {holder.node_id}: {error}"
                    await self._hang_up(holder)
                else:
                    if len(data) == size:
                        return bytes(data)
                    trouble = f"node {holder.node_id} sends another number of bytes than {size}"
            if turn + 1 < ROUNDS:
                await asyncio.sleep(backoff.advance())
        raise LinkError(f"the gradient of {unit} in step {step} could not be fetched ({trouble})")

    async def measure_line(self, peer: PlacedStage, pass_through: PassThrough) -> LineRate | None:
        """The line to a node, over a connection of its own; None if it does not answer."""
        name = self._identity.server_name(peer.node_id)
        try:
            async with open_channel(peer.address, identity=self._identity, server_name=name) as channel:
                return await measure_line(channel, pass_through)
        except LinkError as error:
            log.info("node %s: %s", peer.node_id, error)
            return None

    async def _receive(self, place: LayerPlace, holder: PlacedStage, data: bytearray) -> None:
        """Append what is missing of the file."""
        request = LayerRequest(step=place.step, unit=place.unit, sha256=place.sha256, offset=len(data))
        async for chunk in get_layer(self._channel(holder), request):
            if len(data) + len(chunk) > place.bytes:
                raise NotHeldError("it sends more than the file has")
            data += chunk
            self.bytes_came(len(chunk))
        if len(data) < place.bytes:
            raise LinkError(f"it ends at byte {len(data)} of {place.bytes}")

    def _order(self, holders: Sequence[PlacedStage], unit: str) -> list[PlacedStage]:
        """Each node begins with another holder for each unit, so that all of them send."""
        if not holders:
            return []
        mark = hashlib.sha256(f"{self._identity.node_id} {unit}".encode()).digest()
        first = int.from_bytes(mark[:4]) % len(holders)
        return [*holders[first:], *holders[:first]]

    def _channel(self, holder: PlacedStage) -> grpc.aio.Channel:
        at = holder.node_id, holder.address
        if at not in self._channels:
            name = self._identity.server_name(holder.node_id)
            self._channels[at] = open_channel(holder.address, identity=self._identity, server_name=name)
        return self._channels[at]

    async def _hang_up(self, holder: PlacedStage) -> None:
        channel = self._channels.pop((holder.node_id, holder.address), None)
        if channel is not None:
            await channel.close()


def _sha256(data: bytearray) -> str:
    return hashlib.sha256(data).hexdigest()
