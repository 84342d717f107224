"""Token batches for the first stage and labels for the last, fetched ahead of their step."""

import asyncio

import numpy as np

from node.config.schema import RunConfig
from node.stage.coordinator_client import CoordinatorClient
from wire.errors import ProtocolViolationError, ThinwireError


class Batches:
    """A batch is a pure function of its step, so it may be fetched early, and again after an abort."""

    def __init__(self, config: RunConfig, client: CoordinatorClient, group: asyncio.TaskGroup) -> None:
        self._shape = (config.training.global_batch, config.model.sequence)
        self._vocab = config.model.vocab
        self._steps = config.run.steps
        self._client = client
        self._group = group
        self._ahead: dict[tuple[int, bool], asyncio.Task[np.ndarray | None]] = {}

    async def get(self, step: int, *, labels: bool) -> np.ndarray:
        """int64 [global batch, sequence]; the next step's is fetched meanwhile.

        Raises LinkLostError when the coordinator does not answer, ProtocolViolationError for bad ids.
        """
        ahead = self._ahead.pop((step, labels), None)
        for old in [key for key in self._ahead if key[0] <= step and key[1] == labels]:
            self._ahead.pop(old).cancel()
        batch = await ahead if ahead is not None else None
        if batch is None:
            batch = await self._fetch(step, labels)
        if step + 1 < self._steps and (step + 1, labels) not in self._ahead:
            self._ahead[step + 1, labels] = self._group.create_task(self._try_fetch(step + 1, labels))
        return batch

    async def _try_fetch(self, step: int, labels: bool) -> np.ndarray | None:
        """None on failure: whoever needs the batch asks again, and reports it."""
        try:
            return await self._fetch(step, labels)
        except ThinwireError:
            return None

    async def _fetch(self, step: int, labels: bool) -> np.ndarray:
        rows, columns = self._shape
        data = await self._client.batch(step, labels=labels, size=4 * rows * columns)
        ids = np.frombuffer(data, dtype="<i4").astype(np.int64).reshape(rows, columns)
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab:
            raise ProtocolViolationError(
                f"the batch of step {step} has token ids outside 0..{self._vocab - 1}: check the coordinator"
            )
        return ids
