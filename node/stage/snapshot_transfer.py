"""Transfers snapshots' layers between a node and the coordinator: fetch, prefetch, upload."""

import asyncio
import logging
from collections.abc import Callable, Mapping

import numpy as np
import torch

from node import faults
from node.checkpoints.hub import PREFIX as HUB
from node.checkpoints.start import read_units
from node.config.schema import RunConfig
from node.model.units import most_state_bytes, parameter_specs
from node.pipeline.placement import most_layer_bytes
from node.stage.coordinator_client import CoordinatorClient
from node.stage.epoch_task import State
from node.stage.snapshot_cache import SnapshotCache
from node.training.serialization import deserialize_unit, serialize_unit
from node.training.unit_state import PARAMETER_PREFIX
from wire.errors import DataError, ThinwireError
from wire.messages import FailureKind, NodeMessage, Prefetch, StepFailed

log = logging.getLogger(__name__)


class SnapshotTransfer:
    """One node's transfers during a run. Background transfers are tasks of `group`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        windows: int,
        client: CoordinatorClient,
        cache: SnapshotCache,
        group: asyncio.TaskGroup,
        post: Callable[[NodeMessage], None],
        tell: Callable[[str], None],
    ) -> None:
        """
        Args:
            windows: samples of one pass over the text.
            post: queues a message for the coordinator.
            tell: shows a line to the volunteer.
        """
        self._config = config
        self._windows = windows
        self._client = client
        self._cache = cache
        self._group = group
        self._post = post
        self._tell = tell
        self._uploads: dict[int, asyncio.Task[bool]] = {}
        self._prefetching: asyncio.Task[None] | None = None

    async def fetch(self, step: int, unit: str) -> bytes:
        """A layer unit's snapshot file, from this node's disk if that copy is the right one."""
        kept = await asyncio.to_thread(self._cache.get, step, unit)
        limit = most_layer_bytes(self._config, unit, self._windows)
        if step == 0:
            # A checkpoint's weights, whatever of them is trained.
            limit = max(limit, most_state_bytes(parameter_specs(self._config.model, unit)))
        data = await self._client.layer(step, unit, limit, kept)
        if kept is None or data is not kept.data:
            await asyncio.to_thread(self._cache.put, step, unit, data)
        return data

    async def fetch_weights(self, units: tuple[str, ...]) -> State:
        """The units' weights from the run's checkpoint: from the hub or its cache on this node, else from the
        coordinator."""
        model = self._config.model
        if model.from_.startswith(HUB):
            try:
                found = await read_units(model, units)
            except DataError as error:
                log.warning("%s; the coordinator sends these weights", error)
            else:
                return {unit: _as_state(weights) for unit, weights in found.items()}
        return {unit: deserialize_unit(await self.fetch(0, unit)) for unit in units}

    def prefetch(self, wanted: Prefetch) -> None:
        """Fetch a snapshot for a stage that may be assigned to this node; replaces an older prefetch."""
        if self._prefetching is not None:
            self._prefetching.cancel()
        self._prefetching = self._group.create_task(self._prefetch(wanted))

    def upload(self, epoch: int, step: int, state: State, *, stage: int) -> None:
        """Send a snapshot's layers in the background; a failure fails the epoch."""
        running = {old: task for old, task in self._uploads.items() if not task.done()}
        # Cancel an upload of the same step, which may hold other layers or belong to a lost coordinator. Of
        # older steps let only the newest finish: each holds a copy of the state.
        stale = [*sorted(running.keys() - {step})[:-1], *(running.keys() & {step})]
        for old in stale:
            running.pop(old).cancel()
        self._uploads = {**running, step: self._group.create_task(self._upload(epoch, step, state, stage))}

    def uploading(self, step: int) -> bool:
        """Whether this step's layers are being sent or have all arrived."""
        task = self._uploads.get(step)
        return task is not None and (not task.done() or (not task.cancelled() and task.result()))

    @property
    def sending(self) -> bool:
        """Whether any layer is being sent."""
        return any(not task.done() for task in self._uploads.values())

    def cancel(self) -> None:
        """Stop all transfers."""
        for task in [*self._uploads.values(), self._prefetching]:
            if task is not None:
                task.cancel()

    async def _upload(self, epoch: int, step: int, state: State, stage: int) -> bool:
        """Send every layer; whether all arrived. A missing layer fails the epoch: the run may wait for it."""
        if faults.keeps_layers(stage=stage, step=step):
            return True
        for unit, tensors in state.items():
            faults.reach(faults.Phase.SNAPSHOT, stage=stage, step=step)
            data = await asyncio.to_thread(serialize_unit, tensors)
            await asyncio.to_thread(self._cache.put, step, unit, data)
            try:
                await self._client.put_layer(step, unit, data)
            except ThinwireError as error:
                failure = f"layer {unit} of the snapshot of step {step} was not stored: {error}"
                log.warning("%s", failure)
                self._post(StepFailed(epoch=epoch, step=step, kind=FailureKind.INTERNAL, message=failure))
                return False
        return True

    async def _prefetch(self, wanted: Prefetch) -> None:
        for unit in wanted.units:
            try:
                await self.fetch(wanted.step, unit)
            except ThinwireError as error:
                log.warning("layer %s of step %d was not fetched ahead: %s", unit, wanted.step, error)
                return
        self._tell(f"holding the snapshot of step {wanted.step}, ready to take a stage")


def _as_state(weights: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {f"{PARAMETER_PREFIX}{name}": torch.from_numpy(array) for name, array in weights.items()}
