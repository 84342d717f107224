"""A node as a member of a run: its stage, its current epoch, and its part in snapshots."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from node.model.optimizers import state_bytes as unit_bytes
from node.model.units import units_text
from node.schedule.placement import stage_units
from node.schedule.routing import Peer
from node.stage import out_of_memory
from node.stage.coordinator_client import Batches
from node.stage.epoch_links import EpochLinks
from node.stage.epoch_task import EpochTask
from node.stage.executor import StageExecutor
from node.stage.following import Follower
from node.stage.inbox import Inbox
from node.stage.measure import NodeMeter
from node.stage.progress import Progress
from node.stage.session import Session
from node.stage.snapshot_transfer import SnapshotTransfer
from node.stage.state_copy import StateCopy
from node.stage.sums_kept import SumsKept
from node.stage.watchdog import ComputeThread
from node.telemetry import points
from node.telemetry.format import bytes_text
from node.tuning.storage_choice import (
    allowed_storages,
    chosen_config,
    name_of,
    storage_seconds,
    words_of,
)
from wire.errors import MemoryExhaustedError, RunError
from wire.link import Link
from wire.messages import (
    Abort,
    Begin,
    Commit,
    Follow,
    FollowStep,
    Placement,
    Restore,
    Retain,
    SendLayers,
    TakeSnapshot,
    Validate,
)
from wire.telemetry import Telemetry

RunMessage = (
    Placement
    | Restore
    | Begin
    | Commit
    | TakeSnapshot
    | Validate
    | Follow
    | FollowStep
    | Retain
    | SendLayers
    | Abort
)

END_EPOCH_SECONDS = 30
"""The seconds for the tasks of a finished epoch to end."""


class RunMember:
    """Implements `node.stage.epoch_task.Services`. Call everything on the event loop."""

    def __init__(
        self,
        executor: StageExecutor,
        *,
        session: Session,
        batches: Batches,
        links: EpochLinks,
        snapshots: SnapshotTransfer,
        sums: SumsKept,
        compute: ComputeThread,
        meter: NodeMeter,
        group: asyncio.TaskGroup,
        progress: Progress,
    ) -> None:
        """
        Args:
            sums: this node's gradient sums, for nodes that follow the run.
            group: runs the background tasks. Their errors end the node.
            progress: is told what the node is doing.
        """
        self.executor = executor
        self.inbox = Inbox()
        self.progress = progress
        self.batches = batches
        self.post = session.post
        self.compute = compute.run
        self.waited_for_votes = compute.clock.waited_for_votes
        self.count_time, self.step_begins = meter.count_time, meter.step_begins
        self.fetch_layer, self.fetch_weights = snapshots.fetch, snapshots.fetch_weights
        self.uploading = snapshots.uploading
        self.renew_links = links.renew
        self._room = executor.room
        self._snapshots = snapshots
        self._sums = sums
        self._follower = Follower(
            self, snapshots.peers.fetch_sums, group, session.post, progress.tell, sums.keep_bytes
        )
        self.settle = self._follower.settle
        self._session = session
        self._links = links
        self._meter = meter
        self._group = group
        self._tell = progress.tell
        self._running: tuple[EpochTask, asyncio.Task[None]] | None = None
        """The current epoch; None between epochs."""
        self._storage_seconds: dict[tuple[int, int], Mapping[str, float]] = {}
        """Seconds by stage and number of stages, so that a node that returns to a stage answers at once."""
        self._told = (-1, 0, "")
        """The stage, number of stages and storage whose memory plan was shown last."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 between epochs."""
        return 0 if self._running is None else self._running[0].number

    async def handle(self, message: RunMessage) -> None:
        match message:
            case Placement() if message.epoch != self.epoch:
                await self._end_epoch()
                self._begin_epoch(message)
            case Placement():
                self._links.learn_relays(message)
                if self._running is not None:
                    self._running[0].update(message)
            case Abort():
                if self._running is not None and self.epoch == message.epoch:
                    self._tell(f"epoch {message.epoch} is over: {message.reason}")
                    self.progress.idle("waiting for the next placement")
                    await self._end_epoch()
            case Follow():
                if self._running is None:
                    self._follower.follow(message)
            case FollowStep():
                self._follower.committed(message)
            case Retain():
                self._snapshots.retain(message)
            case SendLayers():
                self._snapshots.send(message)
            case _:
                if self._running is not None and self.epoch == message.epoch:
                    if isinstance(message, Restore):
                        self._tell_stored(self._running[0].placement, message)
                    self._running[0].submit(message)

    async def end(self) -> None:
        self._follower.stop()
        await self._end_epoch()

    def exhausted(self, device: torch.device, on_device: str) -> MemoryExhaustedError:
        """The error for a node whose `device` ran out of memory (`out_of_memory.exhausted`)."""
        executor, offered = self.executor, self._room.memory_bytes
        if executor.stage < 0:
            return out_of_memory.exhausted(device, on_device, offered=offered)
        config = executor.storage.config
        wide = replace(config, pipeline=replace(config.pipeline, window=executor.widest_window))
        stage, stages = executor.stage, executor.stages
        need = self._room.plan(wide, stages, stage).memory.total
        return out_of_memory.exhausted(
            device, on_device, offered=offered, stage=stage, stages=stages, need=need
        )

    # ---- services of an epoch

    async def storage_seconds(self, stage: int, stages: int) -> Mapping[str, float]:
        place = stage, stages
        if place not in self._storage_seconds:
            self.progress.doing("planning its memory")
            self._storage_seconds[place] = await asyncio.to_thread(
                storage_seconds, self.executor.config, stages, stage, self._room
            )
        return self._storage_seconds[place]

    def keep_sums(self, *, wanted: bool) -> None:
        self.executor.keep_sums = self._sums.keep if wanted else None
        if not wanted:
            self._sums.clear()

    def applied(self, epoch: int, step: int) -> None:
        for spans in self._meter.step_spans(epoch, step, self.executor.stage):
            self.post(spans)

    def state_bytes(self, units: Collection[str]) -> int:
        return sum(unit_bytes(self.executor.config, unit) for unit in units)

    def take(self, epoch: int, take: TakeSnapshot, state: StateCopy) -> None:
        if self._session.leaving and not take.only_hashes:
            points.reach(points.Phase.DRAIN, stage=self.executor.stage, step=take.step)
        self._snapshots.take(epoch, take, state, stage=self.executor.stage)

    def telemetry(self) -> Telemetry:
        placement = None if self._running is None else self._running[0].placement
        return self._meter.telemetry(
            self._links.figures(),
            self.executor.codec_name,
            stage=-1 if placement is None else placement.stage,
            stages=0 if placement is None else len(placement.stages),
            row=0 if placement is None else placement.replica,
            expert_load=self.executor.expert_load,
        )

    def open_links(
        self, placement: Placement, peers: tuple[Peer, ...], events: EpochTask
    ) -> contextlib.AbstractAsyncContextManager[Mapping[Peer, Link]]:
        return self._links.open(placement, peers, self.executor.config, events)

    # ---- epochs

    def _begin_epoch(self, placement: Placement) -> None:
        self._meter.begin_epoch(placement.epoch)
        epoch = EpochTask(placement, self)
        self._running = epoch, self._group.create_task(epoch.run())
        stage, stages = placement.stage, len(placement.stages)
        units = stage_units(self.executor.config, stages)[stage]
        self._tell(f"stage {stage} of {stages} in epoch {placement.epoch}: {units_text(units)}")
        self.progress.placed(f"stage {stage} of {stages}")

    def _tell_stored(self, placement: Placement, restore: Restore) -> None:
        """Show how this stage fits in memory, once for each stage that the node gets."""
        stage, stages = placement.stage, len(placement.stages)
        name = restore.storages[stage] if len(restore.storages) == stages else ""
        if (stage, stages, name) != self._told:
            self._told = stage, stages, name
            self._group.create_task(self._tell_plan(stage, stages, name))

    async def _tell_plan(self, stage: int, stages: int, name: str) -> None:
        """`name`: the storage that the coordinator chose. Planning many blocks takes a while."""
        config = self.executor.config
        if name:
            storage = next((choice for choice in allowed_storages(config) if name_of(choice) == name), None)
            if storage is None:
                return  # the epoch reports it
            self._tell(f"this stage stores activations as the coordinator chose: {words_of(storage)}")
            config = chosen_config(config, storage)
        plan = await asyncio.to_thread(self._room.plan, config, stages, stage)
        if done := plan.text():
            room = bytes_text(self._room.memory_bytes)
            self._tell(f"to fit in {room}: {done}; about {plan.added:.0%} more time, same bits")

    async def _end_epoch(self) -> None:
        """Stop the epoch's task. Its step ends at the next tensor, before the next epoch's first work."""
        if self._running is None:
            return
        (_, task), self._running = self._running, None
        self.inbox.interrupt("the epoch is over")
        for _ in range(END_EPOCH_SECONDS):
            # Before Python 3.13, a cancellation may be lost if a task group's child fails at the same time.
            task.cancel()
            await asyncio.wait([task], timeout=1)
            if task.done():
                break
        else:
            raise RunError(f"the stage did not stop within {END_EPOCH_SECONDS} s: start this node again")
