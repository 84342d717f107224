"""Exchanges between nodes besides training: a node fetches layers of snapshots from others and measures its
line to them."""

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
from wire.layer_exchange import LayerRequest, NotHeldError, get_layer
from wire.messages import PlacedStage
from wire.pacing import Backoff, BesideTraining
from wire.peer_probe import LineRate, PassThrough, measure_line

log = logging.getLogger(__name__)

ROUNDS, LEAST_PROGRESS = 4, 256 * 1024
"""How often all holders are tried before asking the coordinator again; a time that brought so many bytes does
not count."""
TURN_SECONDS = 30.0
"""After so long, a transfer goes on at the next holder if there is one: nobody can hold it up for longer."""
LEAST_RATE = 125_000.0
"""Gradients are not sent in parts: they have so many bytes a second beyond that time."""


@dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """Where a layer's file can be fetched, as the coordinator reports."""

    step: int
    unit: str
    bytes: int
    sha256: str
    holders: tuple[PlacedStage, ...] = ()
    url: str = ""
    """The URL in an object store."""


class LayersHeld:
    """What this node's port serves to other nodes. Implements `wire.layer_exchange.LayerSource`."""

    def __init__(self, cache: SnapshotCache, sums: SumsKept, line: BesideTraining) -> None:
        """`sums`: gradient sums for nodes that follow the run."""
        self._cache = cache
        self._sums = sums
        self._line = line

    async def read(self, request: LayerRequest) -> bytes | None:
        if request.sums:
            return await asyncio.to_thread(self._sums.read, request.step, request.unit)
        kept = await asyncio.to_thread(self._cache.get, request.step, request.unit)
        return kept.data if kept is not None and kept.sha256 == request.sha256 else None

    async def pass_through(self, size: int) -> None:
        await self._line.pass_through(size)


class LayerPeers:
    """Fetches layers from other nodes. Call everything on the event loop."""

    def __init__(self, identity: LinkIdentity) -> None:
        self._identity = identity
        self.bytes_came: Callable[[int], None] = lambda count: None
        """Called with the size of each received part."""
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def fetch(self, place: LayerPlace, limit: int, bad: set[str]) -> bytes:
        """The file from one or several holders in turn, its SHA-256 checked.

        Args:
            limit: the most bytes that the unit's file may have.
            bad: receives the holders that lack the file or have a damaged one.

        Raises LinkError if no holder sends it, ProtocolViolationError for an impossible size.
        """
        name = f"layer {place.unit} of step {place.step}"
        if place.bytes > limit:
            raise ProtocolViolationError(f"{name} has {place.bytes} bytes, expected at most {limit}")
        trouble = "no node holds it"
        backoff = Backoff(0.2, 2.0)
        data, sources, alone = bytearray(), set[str](), False
        turn, seconds, most = 0, TURN_SECONDS, 0
        while turn < ROUNDS:
            came = most
            for holder in self._order(place.holders, place.unit):
                if holder.node_id in bad:
                    continue
                # If parts of several holders make a damaged file, take the whole file from one holder.
                if alone:
                    data, sources = bytearray(), set()
                before = len(data)
                sources.add(holder.node_id)
                others = [other for other in place.holders if other.node_id not in (*bad, holder.node_id)]
                try:
                    async with asyncio.timeout(seconds if others else None):
                        await self._receive(place, holder, data)
                except TimeoutError:
                    log.info("%s goes on at another node from byte %d", name, len(data))
                except NotHeldError:
                    bad.add(holder.node_id)
                    sources.discard(holder.node_id)
                    del data[before:]
                except LinkError as error:
                    trouble = f"node {holder.node_id}: {error}"
                    log.info("%s breaks off at byte %d: %s", name, len(data), error)
                    await self._hang_up(holder)
                else:
                    if await asyncio.to_thread(_sha256, data) == place.sha256:
                        return await asyncio.to_thread(bytes, data)
                    trouble = f"the file from node {holder.node_id} is damaged"
                    log.warning("%s: %s", name, trouble)
                    if sources == {holder.node_id}:
                        bad.add(holder.node_id)
                    alone, most = True, 0
                    data, sources = bytearray(), set()
                most = max(most, len(data))
            if alone:
                seconds *= 2  # the whole file has to come in one turn
            if all(holder.node_id in bad for holder in place.holders):
                break
            turn = 0 if most >= came + LEAST_PROGRESS else turn + 1
            if turn < ROUNDS:
                await asyncio.sleep(backoff.advance())
        raise LinkError(f"{name} could not be fetched from any holder ({trouble})")

    async def fetch_sums(self, holders: Sequence[PlacedStage], step: int, unit: str, size: int) -> bytes:
        """A unit's packed gradient sum of a step, from the first holder that has it.

        Raises LinkError if no holder has it in the right size.
        """
        trouble = "no node keeps it"
        backoff = Backoff(0.1, 1.0)
        for turn in range(ROUNDS):
            for holder in holders:
                request = LayerRequest(step=step, unit=unit, sums=True)
                data = bytearray()
                seconds = None if holder is holders[-1] else TURN_SECONDS + size / LEAST_RATE
                try:
                    async with asyncio.timeout(seconds):
                        async for chunk in get_layer(self._channel(holder), request):
                            data += chunk
                            if len(data) > size:
                                break
                except TimeoutError:
                    trouble = f"node {holder.node_id} is slow"
                except NotHeldError as error:
                    trouble = str(error)
                except LinkError as error:
                    trouble = f"node {holder.node_id}: {error}"
                    await self._hang_up(holder)
                else:
                    if len(data) == size:
                        return bytes(data)
                    trouble = f"node {holder.node_id} does not send {size} bytes"
            if turn + 1 < ROUNDS:
                await asyncio.sleep(backoff.advance())
        raise LinkError(f"the gradient of {unit} in step {step} could not be fetched ({trouble})")

    async def measure_line(self, peer: PlacedStage, pass_through: PassThrough) -> LineRate | None:
        """Measure the line to a node over a separate connection. None if the node does not answer."""
        name = self._identity.server_name(peer.node_id)
        try:
            async with open_channel(peer.address, identity=self._identity, server_name=name) as channel:
                return await measure_line(channel, pass_through)
        except LinkError as error:
            log.info("node %s: %s", peer.node_id, error)
            return None

    async def _receive(self, place: LayerPlace, holder: PlacedStage, data: bytearray) -> None:
        """Append the missing part of the file."""
        request = LayerRequest(step=place.step, unit=place.unit, sha256=place.sha256, offset=len(data))
        async for chunk in get_layer(self._channel(holder), request):
            if len(data) + len(chunk) > place.bytes:
                raise NotHeldError("it sends more bytes than the file has")
            data += chunk
            self.bytes_came(len(chunk))
        if len(data) < place.bytes:
            raise LinkError(f"it ends at byte {len(data)} of {place.bytes}")

    def _order(self, holders: Sequence[PlacedStage], unit: str) -> list[PlacedStage]:
        """The holders in an order that depends on node and unit, so that all of them serve."""
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
