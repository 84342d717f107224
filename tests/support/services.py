"""A node without a coordinator, for what works in an epoch or loads a state."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import TypeVar, cast

from torch import Tensor

from node.schedule.routing import Peer
from node.stage.coordinator_client import Batches
from node.stage.epoch_task import EpochTask
from node.stage.executor import StageExecutor
from node.stage.inbox import Inbox
from node.stage.progress import Progress
from node.stage.state_copy import StateCopy
from node.state.serialization import serialize_unit
from wire.errors import ThinwireError
from wire.link import Link
from wire.messages import NodeMessage, Placement, TakeSnapshot
from wire.telemetry import Telemetry

Result = TypeVar("Result")


class FakeServices:
    """Implements `node.stage.epoch_task.Services`; messages for the coordinator land in `said`."""

    def __init__(self, executor: StageExecutor, files: Mapping[str, bytes] | None = None) -> None:
        """`files`: a snapshot's, by unit; by default every unit's has nothing."""
        self.executor = executor
        self.inbox = Inbox()
        self.batches = cast(Batches, None)  # a stage between the first and the last has none
        self.progress = Progress()
        self.said: asyncio.Queue[NodeMessage] = asyncio.Queue()
        self.uploads: list[tuple[int, int]] = []
        self.waited: list[float] = []
        self.arrives = True
        """Whether snapshots' layers are saved."""
        self.linked: list[tuple[Peer, ...]] = []
        self.links: Mapping[Peer, Link] = {}
        self.renewed: list[tuple[Placement | None, tuple[Peer, ...]]] = []
        self.fetched: list[tuple[int, str]] = []
        self.missing: ThinwireError | None = None
        """What fetching a layer raises."""
        self._files = files

    def post(self, message: NodeMessage) -> None:
        self.said.put_nowait(message)

    async def compute(self, work: Callable[[], Result]) -> Result:
        return await asyncio.to_thread(work)

    async def settle(self) -> None:
        pass

    async def storage_seconds(self, stage: int, stages: int) -> Mapping[str, float]:
        return {}

    def keep_sums(self, *, wanted: bool) -> None:
        assert not wanted, "nobody follows"

    async def fetch_layer(self, step: int, unit: str) -> bytes:
        if self.missing is not None:
            raise self.missing
        self.fetched.append((step, unit))
        return serialize_unit({}) if self._files is None else self._files[unit]

    async def fetch_weights(self, unit: str) -> Mapping[str, Tensor]:
        raise AssertionError("there is no checkpoint")

    def state_bytes(self, units: Collection[str]) -> int:
        return len(units)

    def take(self, epoch: int, take: TakeSnapshot, state: StateCopy) -> None:
        self.uploads.append((epoch, take.step))

    def uploading(self, step: int) -> bool:
        return self.arrives

    def applied(self, epoch: int, step: int) -> None:
        pass

    def waited_for_votes(self, seconds: float) -> None:
        self.waited.append(seconds)

    def count_time(self) -> None:
        pass

    def step_begins(self) -> None:
        pass

    def telemetry(self) -> Telemetry:
        return Telemetry()

    @contextlib.asynccontextmanager
    async def open_links(
        self, placement: Placement, peers: tuple[Peer, ...], events: EpochTask
    ) -> AsyncIterator[Mapping[Peer, Link]]:
        self.linked.append(peers)
        try:
            yield self.links
        finally:
            self.linked.append(())

    def renew_links(self, placement: Placement | None, peers: tuple[Peer, ...]) -> None:
        self.renewed.append((placement, peers))
