"""Received packed tensors wait here by key between the links and the compute thread.

Receivers are passive: a tensor is stored under its key when it arrives, so the order in which neighbours send
can never block a stage. A link's thread puts, the compute thread takes, and an interruption ends every wait
immediately.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from node.model.labels import BatchPart
from node.schedule.gradient_groups import StepWork
from node.schedule.routing import source_stage, target_stage
from node.stage.sums_kept import KeepSums
from wire.errors import LinkClosedError, LinkError, LinkLostError
from wire.link import Link
from wire.messages import AwaitedSums, HandedOver
from wire.spec import Direction, TensorKey

STALL_SECONDS = 600.0
"""A neighbour that answers pings but sends no tensor for this long counts as stuck."""
WANT_SECONDS = 0.02
"""A tensor that comes within this time is not asked for, because a full window is the exception."""
GONE_SECONDS = 5.0
"""A tensor of a node that is gone, which had arrived, is missing after this long."""
OWN_ROW = -1


class StepInterrupted(Exception):
    """The step must stop because its epoch is over or a link is lost (`cause`)."""

    def __init__(self, reason: str, cause: Exception | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


class NeighbourStuckError(LinkLostError):
    """A neighbour does not send what it should, or does not acknowledge what it gets."""

    def __init__(self, message: str, *, row: int = OWN_ROW, stage: int = -1) -> None:
        """`row`: of a node of the own stage. `stage`: of one of the own row."""
        super().__init__(message)
        self.row, self.stage = row, stage


class RegroupedError(StepInterrupted):
    """The step's groups were redistributed. `Inbox.take_change` returns which row computes which."""


@dataclass(frozen=True, kw_only=True)
class StepChange:
    """Who computes which groups of a step from now on."""

    generation: int
    """The generation in `wire.messages.Begin`."""
    work: StepWork
    audited: tuple[int, ...] = ()
    """Groups of another row that this row computes too, only for their digests."""
    hand_over: Callable[[HandedOver], None] | None = None
    """Called on any thread with groups that no longer depend on this node. None while nothing is handed
    over."""
    keep: KeepSums | None = None
    """As for `GradientSync.begin`, from now on."""
    samples: Mapping[BatchPart, Mapping[int, np.ndarray]] = field(default_factory=dict)
    """The samples of each group that the row also has to compute, by part."""
    has_lost: bool = False
    """Whether the row has lost a node since its work changed last, and with it all groups that it had.
    Another node may have the seat by now, and the row other groups."""

    def after(self, before: "StepChange | None") -> "StepChange":
        """This change and an earlier one that was not taken: samples are fetched only once, and groups that
        the row had before both are lost if either has lost them."""
        if before is None:
            return self
        parts = {*before.samples, *self.samples}
        samples = {part: {**before.samples.get(part, {}), **self.samples.get(part, {})} for part in parts}
        return replace(self, samples=samples, has_lost=self.has_lost or before.has_lost)


class Inbox:
    """Complete packed tensors by key; those of other rows also by row. Thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, TensorKey], bytearray] = {}
        """Tensors by row (`OWN_ROW` for this row) and key."""
        self._watched: dict[TensorKey, Callable[[bytearray], None]] = {}
        self._awaited: dict[Direction, int] = {}
        """The rows for whose gradients threads wait."""
        self._arrived = threading.Condition()
        self._interruption: StepInterrupted | None = None
        self._change: StepChange | None = None

    def put(self, key: TensorKey, buffer: bytearray, row: int = OWN_ROW) -> None:
        with self._arrived:
            self._buffers[row, key] = buffer
            call = self._watched.pop(key, None) if row == OWN_ROW else None
            self._arrived.notify_all()
        if call is not None:
            call(buffer)

    def watch(self, key: TensorKey, call: Callable[[bytearray], None]) -> None:
        """Call `call` with a tensor that stays here, now or on the thread that puts it."""
        with self._arrived:
            buffer = self._buffers.get((OWN_ROW, key))
            if buffer is None:
                self._watched[key] = call
        if buffer is not None:
            call(buffer)

    def holds(self, key: TensorKey) -> bool:
        with self._arrived:
            return (OWN_ROW, key) in self._buffers

    def take_now(self, key: TensorKey, rows: Iterable[int]) -> bytearray | None:
        """Remove a tensor that is here from one of these rows, the first of them that sent it."""
        with self._arrived:
            sender = next((row for row in rows if (row, key) in self._buffers), None)
            return None if sender is None else self._buffers.pop((sender, key))

    def take(self, key: TensorKey, timeout: float = STALL_SECONDS, row: int = OWN_ROW) -> bytearray:
        """Wait for a tensor and remove it. Raises as `wait_any`."""
        with self._arrived:
            if row != OWN_ROW:
                self._awaited[key.direction] = row
            try:
                self.wait_any((key,), timeout, row)
            finally:
                self._awaited.pop(key.direction, None)
            return self._buffers.pop((row, key))

    @property
    def awaited(self) -> AwaitedSums | None:
        """What is waited for from another row; of several, what that row can send at once."""
        with self._arrived:
            known = self._awaited.items()
            sums = [AwaitedSums(row, of is Direction.SYNC_SUM) for of, row in known]
            return min(sums, key=lambda awaited: awaited.is_total, default=None)

    def comes(
        self, keys: Sequence[TensorKey], timeout: float, row: int = OWN_ROW, *, or_change: bool = False
    ) -> bool:
        """Whether one of these tensors, or with `or_change` other work, arrives within `timeout` seconds.
        Raises StepInterrupted."""
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: (
                    self._stops(row) is not None
                    or any((row, key) in self._buffers for key in keys)
                    or (or_change and self._change is not None)
                ),
                timeout,
            )
            if (stop := self._stops(row)) is not None:
                raise stop
            return arrived

    def wait_any(
        self,
        keys: Sequence[TensorKey],
        timeout: float = STALL_SECONDS,
        row: int = OWN_ROW,
        *,
        or_change: bool = False,
    ) -> None:
        """Wait until one of these tensors is here; with `or_change`, or other work for the row.

        Raises StepInterrupted when the step is interrupted, RegroupedError when announced work ends this
        wait, LinkLostError after `timeout` seconds.
        """
        if not self.comes(keys, timeout, row, or_change=or_change):
            key = keys[0]
            if row != OWN_ROW:
                what = f"no {key.direction.words} came from row {row} within {timeout:g} s"
                raise NeighbourStuckError(what, row=row)
            raise LinkLostError(
                f"no {key.direction.words} of microbatch {key.microbatch} came over boundary "
                f"{key.boundary} within {timeout:g} s: the neighbour's stage is stuck"
            )

    def check(self) -> None:
        """Raise the pending interruption, if any. Called between actions that never wait."""
        with self._arrived:
            if (stop := self._stops(OWN_ROW)) is not None:
                raise stop

    def _stops(self, row: int) -> StepInterrupted | None:
        """The error that ends a wait for a tensor of this row, if any."""
        if self._interruption is not None:
            return self._interruption
        # A row that keeps its groups continues with them.
        if self._change is not None and (row != OWN_ROW or self._change.has_lost):
            return RegroupedError("the step's groups were redistributed")
        return None

    def announce(self, change: StepChange) -> None:
        """Announce a change of the running step's work. Only the newest counts."""
        with self._arrived:
            self._change = change.after(self._change)
            self._arrived.notify_all()

    @property
    def has_change(self) -> bool:
        """Whether a change of the running step's work was announced and not taken."""
        return self._change is not None

    def take_change(self) -> StepChange | None:
        """The newest announced change, which is returned once."""
        with self._arrived:
            change, self._change = self._change, None
            return change

    def forget_before(self, step: int) -> list[TensorKey]:
        """Drop the tensors of earlier steps that nobody took. Returns the keys of those that came from this
        row: their links still hold room for them."""
        with self._arrived:
            old = [place for place in self._buffers if place[1].step < step]
            for place in old:
                del self._buffers[place]
            for key in [key for key in self._watched if key.step < step]:
                del self._watched[key]
        return [key for row, key in old if row == OWN_ROW]

    def interrupt(self, reason: str, cause: Exception | None = None) -> None:
        """End the running step's waits. The first reason counts until `reset`."""
        with self._arrived:
            if self._interruption is None:
                self._interruption = StepInterrupted(reason, cause)
            self._arrived.notify_all()

    def reset(self) -> None:
        """Forget everything, ready for a new epoch."""
        with self._arrived:
            self._buffers.clear()
            self._watched.clear()
            self._interruption = self._change = None


class LinksIO:
    """A stage's view of one epoch's links, keyed by the neighbour's stage. Packed tensors are uint8 [n] on
    the CPU. Call it from any thread.

    A link is called on the thread that has a tensor for it, so no tensor waits for the event loop.
    """

    def __init__(
        self,
        *,
        stages: int,
        links: Mapping[int, Link],
        inbox: Inbox,
        over: Callable[[], bool],
        rows: Mapping[int, Link] | None = None,
        missed: Callable[[int], None] = lambda row: None,
    ) -> None:
        """
        Args:
            over: whether the epoch has ended; the inbox then serves the next epoch.
            rows: links to the same stage in other rows, by row.
            missed: called on any thread if what a row's last node said it had handed over is missing or bad.
        """
        self.missed = missed
        self._rows = rows or {}
        self._stages = stages
        self._links = links
        self._inbox = inbox
        self._over = over
        self._neighbours = tuple(links.values())
        """The links to neighbours. Tensors for other rows wait until these have sent what is queued."""
        self._behind: dict[int, Callable[[], None]] = {}
        """The waiting calls for other rows, by number."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Protects the waiting calls."""

    def holds(self, key: TensorKey) -> bool:
        """Whether `take` would not wait."""
        return self._inbox.holds(key)

    def wait_any(self, keys: Sequence[TensorKey], *, or_change: bool = False) -> None:
        """Wait until `holds` is true for one of these keys; with `or_change`, or `has_change`. The first key
        is the next in the order.

        Raises as `Inbox.wait_any`.

        If a neighbour sends several of them, it is asked for the first, which is always sent.
        """
        if self._inbox.comes(keys, WANT_SECONDS, or_change=or_change):
            return
        wanted: dict[int, TensorKey] = {}
        for key in keys:
            wanted.setdefault(source_stage(key, self._stages), key)
        for stage, key in wanted.items():
            self._links[stage].want(key)
        self._inbox.wait_any(keys, or_change=or_change)
        for stage in wanted:
            self._links[stage].want(None)

    def take(self, key: TensorKey) -> Tensor:
        """Wait for the packed tensor under `key`. Raises what `Inbox.take` raises."""
        if not self._inbox.holds(key):
            self._links[source_stage(key, self._stages)].want(key)
        return torch.frombuffer(self._inbox.take(key), dtype=torch.uint8)

    def watch(self, key: TensorKey, call: Callable[[Tensor], None]) -> None:
        """Call with the packed tensor when it arrives, now or on another thread. It can still be taken."""
        self._inbox.watch(key, lambda buffer: call(torch.frombuffer(buffer, dtype=torch.uint8)))

    def take_from_row(self, row: int, key: TensorKey, *, is_gone: bool = False) -> Tensor:
        """Wait for the packed tensor that a row sends under `key`. Raises what `Inbox.take` raises.

        The credit of these tensors is returned on arrival: nothing waits for one to be taken.

        `is_gone`: the row has no node any more, so that the tensor is here, from that node or from one that
        passed it on, unless one of these lied.
        """
        if is_gone:
            if (packed := self.take_of_gone(row, key)) is not None:
                return packed
            if not self._inbox.comes((key,), GONE_SECONDS, row):
                self.missed(row)
        return torch.frombuffer(self._inbox.take(key, row=row), dtype=torch.uint8)

    def take_of_gone(self, row: int, key: TensorKey) -> Tensor | None:
        """The packed tensor of a row that is gone, from it or from another that passed it on; None if it is
        not here."""
        packed = self._inbox.take_now(key, (row, *self._rows))
        return None if packed is None else torch.frombuffer(packed, dtype=torch.uint8)

    @property
    def has_change(self) -> bool:
        """As `Inbox.has_change`."""
        return self._inbox.has_change

    def take_change(self) -> StepChange | None:
        """As `Inbox.take_change`."""
        return self._inbox.take_change()

    def release(self, key: TensorKey) -> None:
        """The packed tensor is unpacked; its memory may be reused."""
        self._links[source_stage(key, self._stages)].release(key)

    def send(self, key: TensorKey, packed: Tensor, elements: int) -> None:
        """Queue a packed tensor without waiting for the network."""
        stage = target_stage(key, self._stages)
        self._send(self._links[stage], key, memoryview(packed.numpy().data), elements, stage=stage)

    def send_to_row(
        self,
        row: int,
        key: TensorKey,
        packed: Tensor,
        elements: int,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """Send to another row after what is queued for neighbours. The last gradients pass through all stages
        first, and only the vote waits for sums. On a shared line, each would slow the other down.

        `arrived`: called on any thread once the other node has the tensor; never if the link ends first.
        """
        payload, link = memoryview(packed.numpy().data), self._rows[row]

        def send() -> None:
            if self._send(link, key, payload, elements, row=row) and arrived is not None:
                link.after_delivery(arrived)

        self._send_behind(send)

    def link_to_row(self, row: int) -> Link:
        """The link to another row; another one once another node has the seat there."""
        return self._rows[row]

    def interrupt(self, error: Exception) -> None:
        """End the current or next wait of `take`, because its tensor may depend on one that was not sent."""
        self._inbox.interrupt(str(error), error)

    def check(self) -> None:
        """Raise if the step was interrupted."""
        self._inbox.check()

    def use(self, links: Mapping[int, Link], rows: Mapping[int, Link]) -> None:
        """Other nodes, or none, have some places: use these links from now on, as in the constructor. What is
        still sent to a place that nobody has goes to its closed link."""
        self._links, self._rows = {**self._links, **links}, {**self._rows, **rows}

    def leave_row(self) -> None:
        """A node of the own row is gone: nothing waits for neighbours any more."""
        with self._lock:
            self._neighbours, behind = (), list(self._behind.values())
            self._behind.clear()
        for send in behind:
            send()

    def _send_behind(self, send: Callable[[], None]) -> None:
        number = next(self._numbers)
        with self._lock:
            self._behind[number], neighbours = send, self._neighbours
        self._after(neighbours, number)

    def _after(self, links: Sequence[Link], number: int) -> None:
        """Send the tensor with this number when these neighbours have received what is queued for them."""
        if links:
            links[0].after_delivery(functools.partial(self._after, links[1:], number))
            return
        with self._lock:
            send = self._behind.pop(number, None)
        if send is not None:
            send()

    def _send(
        self,
        link: Link,
        key: TensorKey,
        payload: memoryview,
        elements: int,
        *,
        row: int = OWN_ROW,
        stage: int = -1,
    ) -> bool:
        """Whether the link has taken the tensor."""
        try:
            link.send(key, payload, elements)
            return True
        except LinkClosedError:
            # The coordinator knows: the epoch is over, or another node has that seat now. What this tensor
            # was for is computed and sent again, or no longer needed.
            pass
        except LinkError as error:
            # A lost link to another row was reported; the coordinator may know that the other end has died.
            is_known = row != OWN_ROW and isinstance(error, LinkLostError)
            # An interrupted step may still send tensors over closed links.
            if not is_known and not self._over():
                is_full = type(error) is LinkError  # the outbox, as nothing of it is acknowledged
                why = NeighbourStuckError(str(error), row=row, stage=stage) if is_full else error
                self._inbox.interrupt(str(error), why)
        return False
