"""The bridge between the compute thread and the event loop: packed tensors cross here, and nothing else."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from node.pipeline.routing import source_stage, target_stage
from node.stage.inbox import Inbox
from wire.errors import LinkError
from wire.spec import Direction, TensorKey


class TensorLink(Protocol):
    """What a stage needs of a neighbour's link. All calls on the event loop."""

    def send(self, key: TensorKey, payload: memoryview) -> None: ...

    def want(self, key: TensorKey | None) -> None: ...

    def release(self, key: TensorKey) -> None: ...


class LoopIO:
    """`node.stage.executor.StageIO` over the links of one epoch, which are keyed by the neighbour's stage."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        stages: int,
        links: Mapping[int, TensorLink],
        inbox: Inbox,
        elements_sent: dict[Direction, int],
        over: Callable[[], bool],
    ) -> None:
        """`over`: whether the epoch is, asked on the event loop; the inbox is then the next one's."""
        self._loop = loop
        self._stages = stages
        self._links = links
        self._inbox = inbox
        self._elements_sent = elements_sent
        self._over = over

    def holds(self, key: TensorKey) -> bool:
        return self._inbox.holds(key)

    def wait_any(self, keys: Sequence[TensorKey]) -> None:
        """Called on the compute thread, with keys of different neighbours. Raises as `Inbox.wait_any`."""
        links = [self._links[source_stage(key, self._stages)] for key in keys]
        for link, key in zip(links, keys, strict=True):
            self._loop.call_soon_threadsafe(link.want, key)
        self._inbox.wait_any(keys)
        for link in links:
            self._loop.call_soon_threadsafe(link.want, None)

    def take(self, key: TensorKey) -> Tensor:
        """Called on the compute thread. Raises what `Inbox.take` raises."""
        if not self._inbox.holds(key):
            self._loop.call_soon_threadsafe(self._links[source_stage(key, self._stages)].want, key)
        return torch.frombuffer(self._inbox.take(key), dtype=torch.uint8)

    def release(self, key: TensorKey) -> None:
        self._loop.call_soon_threadsafe(self._links[source_stage(key, self._stages)].release, key)

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        payload = memoryview(packed.numpy().data)
        self._loop.call_soon_threadsafe(self._send, key, payload, elements)

    def interrupt(self, error: Exception) -> None:
        self._inbox.interrupt(str(error), error)

    def check(self) -> None:
        self._inbox.check()

    def _send(self, key: TensorKey, payload: memoryview, elements: int) -> None:
        try:
            self._links[target_stage(key, self._stages)].send(key, payload)
        except LinkError as error:
            # A step that was called off leaves tensors behind, for links that were closed meanwhile.
            if not self._over():
                self._inbox.interrupt(str(error), error)
        else:
            self._elements_sent[key.direction] = self._elements_sent.get(key.direction, 0) + elements
