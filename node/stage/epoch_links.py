"""A node's links: the port where neighbours dial, and the links of the epoch that it works on."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from node.config.schema import RunConfig
from node.pipeline.placement import chunks_of
from node.stage.epoch_task import EpochTask
from node.stage.error_groups import first_error
from node.stage.node_settings import IdentityHolder
from node.stage.stage_io import TensorLink
from wire.codecs.forms import FP32
from wire.errors import LinkLostError, ThinwireError
from wire.link import Link, LinkSettings, LinkStats, dial_link
from wire.link_server import LinkServer
from wire.spec import TensorKey

LINK_SECONDS = 60.0
"""How long the links of a new epoch may take to come up; a neighbour may still be ending what it did."""


def outbox_bytes(config: RunConfig, stages: int) -> int:
    """The most that a correct stage has waiting in one link of such a placement, in bytes.

    Two steps' tensors in one direction, uncompressed: however far stages run ahead, a step begins when that
    before has arrived as a whole, though its acknowledgements may still be on their way.
    """
    model, training = config.model, config.training
    boundary = FP32.packed_bytes((training.microbatch, model.sequence, model.hidden))
    # Of a microbatch, one way: an activation or a gradient for each chunk. Where there are two stages, those
    # of the ring's other half, one less, go the same way.
    crossings = 2 * chunks_of(config, stages) - 1
    step = config.microbatches * crossings * boundary
    if model.tied:
        step += FP32.packed_bytes((model.vocab, model.hidden))
    return 2 * step


class EpochLinks:
    """Links of one epoch at a time. Everything is called on the event loop."""

    def __init__(self, identity: IdentityHolder, settings: LinkSettings) -> None:
        self._identity = identity
        self._settings = settings
        self._server = LinkServer(identity=identity, run_id=identity.current.run_id, settings=settings)
        self._links: dict[int, Link] = {}

    async def start(self, listen: str) -> int:
        """Listen on `listen` and give the port. Raises UserError when the address cannot be bound."""
        return await self._server.start(listen)

    async def stop(self) -> None:
        """Close every link and the port."""
        await self._server.stop()

    def totals(self) -> dict[int, tuple[LinkStats, int]]:
        """By the neighbour's stage: the link's totals, and the bytes that wait in it."""
        return {stage: (link.stats, link.queued_bytes) for stage, link in self._links.items()}

    @contextlib.asynccontextmanager
    async def open(
        self, task: EpochTask, peers: tuple[int, ...], config: RunConfig
    ) -> AsyncIterator[Mapping[int, TensorLink]]:
        """Links to the stages `peers`, warm; the lower stage dials. Raises the error of one that is lost."""
        room = max(self._settings.outbox_bytes, outbox_bytes(config, len(task.placement.stages)))
        settings = replace(self._settings, outbox_bytes=room)
        links = {peer: self._make(task, peer, settings) for peer in peers}
        for peer, link in links.items():
            link.lost.add_done_callback(functools.partial(_report_lost, task, peer))
        try:
            async with asyncio.TaskGroup() as group:
                for link in links.values():
                    group.create_task(link.run())
                self._links = links
                try:
                    for peer, link in links.items():
                        try:
                            await link.ready(LINK_SECONDS)
                        except LinkLostError as error:
                            task.link_lost(peer, error)
                            raise
                    yield links
                finally:
                    self._links = {}
                    for link in links.values():
                        await link.close()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    def _make(self, task: EpochTask, peer: int, settings: LinkSettings) -> Link:
        placement = task.placement
        other = placement.stages[peer]

        def expect(key: TensorKey) -> int | None:
            return task.expect(peer, key)

        if placement.stage < peer:
            return dial_link(
                identity=self._identity,
                run_id=self._identity.current.run_id,
                epoch=placement.epoch,
                stage=placement.stage,
                peer_node_id=other.node_id,
                peer_stage=peer,
                peer_address=other.address,
                expect=expect,
                on_tensor=task.arrived,
                settings=settings,
            )
        return self._server.expect_peer(
            epoch=placement.epoch,
            stage=placement.stage,
            peer_node_id=other.node_id,
            peer_stage=peer,
            expect=expect,
            on_tensor=task.arrived,
            settings=settings,
        )


def _report_lost(task: EpochTask, peer: int, lost: "asyncio.Future[ThinwireError]") -> None:
    if not lost.cancelled():
        task.link_lost(peer, lost.result())
