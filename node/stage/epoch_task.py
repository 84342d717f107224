"""One epoch on a node. It executes the coordinator's commands in order until the epoch ends.

The coordinator repeats commands that a broken connection may have lost. A repeated command is answered
again, but not executed again.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from node.model.labels import BatchPart
from node.schedule.gradient_groups import RowShare, StepWork
from node.schedule.placement import chunks_of
from node.schedule.routing import BETWEEN_ROWS, Peer, neighbours, source_stage
from node.stage.coordinator_client import Batches
from node.stage.early_tensors import Early, EarlyTensors
from node.stage.following import StateServices, load_state
from node.stage.inbox import (
    OWN_ROW,
    Inbox,
    LinksIO,
    NeighbourStuckError,
    RegroupedError,
    StepChange,
    StepInterrupted,
)
from node.stage.out_of_memory import ran_out
from node.stage.state_copy import StateCopy
from node.stage.tensor_transfer import BadTensorError
from node.telemetry import points
from wire.errors import (
    CacheMismatchError,
    DeviceLostError,
    LinkError,
    NonFiniteError,
    ProtocolViolationError,
    Refused,
    RunError,
    ThinwireError,
)
from wire.link import Link
from wire.messages import (
    Applied,
    Begin,
    Commit,
    CoordinatorMessage,
    FailureKind,
    HandedOver,
    NodeMessage,
    PeerSilent,
    Placed,
    PlacedStage,
    Placement,
    Ready,
    Restore,
    StepFailed,
    SumsMissing,
    TakeSnapshot,
    Validate,
    Validated,
    Vote,
)
from wire.spec import TensorKey
from wire.telemetry import Telemetry

Result = TypeVar("Result")
REFUSED_SECONDS = 1.0
"""How long a neighbour that refuses this node's link has to report it before this node does."""


class Services(StateServices, Protocol):
    """What an epoch needs from its node."""

    inbox: Inbox
    batches: Batches

    def post(self, message: NodeMessage) -> None:
        """Queue a message for the coordinator."""
        ...

    async def settle(self) -> None:
        """For a node that followed the run: apply the committed steps that it knows of."""
        ...

    async def storage_seconds(self, stage: int, stages: int) -> Mapping[str, float]:
        """See `node.tuning.storage_choice.storage_seconds`; measured on this node."""
        ...

    def keep_sums(self, *, wanted: bool) -> None:
        """Set whether the next step's summed gradients are kept for nodes that follow the run."""
        ...

    def take(self, epoch: int, take: TakeSnapshot, state: StateCopy) -> None:
        """In the background, report the state's hashes and, unless only hashes are wanted, save it. If it
        cannot be saved, the epoch fails."""
        ...

    def uploading(self, step: int) -> bool:
        """Whether this step's layers are being saved or are already stored."""
        ...

    def applied(self, epoch: int, step: int) -> None:
        """A step's commit is applied: send the spans that were traced during the step."""
        ...

    def waited_for_votes(self, seconds: float) -> None:
        """The coordinator has answered. The node waited this long for other stages."""
        ...

    def count_time(self) -> None:
        """The epoch's first step begins: count time from now on."""
        ...

    def step_begins(self) -> None:
        """A step begins: count its time and its traffic."""
        ...

    def telemetry(self) -> Telemetry: ...

    def open_links(
        self, placement: Placement, peers: tuple[Peer, ...], events: "EpochTask"
    ) -> contextlib.AbstractAsyncContextManager[Mapping[Peer, Link]]:
        """Links to `peers`, ready on entry and closed on exit. Raises LinkError."""
        ...

    def renew_links(self, placement: Placement | None, peers: tuple[Peer, ...]) -> None:
        """Other nodes have taken these places, or without a placement nobody has: replace or drop their links
        in the mapping that `open_links` gave."""
        ...


class EpochTask:
    """Owns the links and the running step of one placement.

    The links call `expect` and `arrived` on their own threads, everything else is called on the event loop.
    """

    def __init__(self, placement: Placement, services: Services) -> None:
        self.placement = placement
        self.number = placement.epoch
        self.stage = placement.stage
        self._services = services
        self._commands: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self._links: Mapping[Peer, Link] = {}
        self._early = EarlyTensors(services.executor.comes)
        self._asked: tuple[object, ...] | None = None
        """What the newest work was made of, which is needed when a `Begin` comes and when it is used."""
        self._asked_work: StepWork
        self._open = contextlib.AsyncExitStack()
        self._links_open = False
        """Whether this node has begun to open its links."""
        self._placed: Placed | None = None
        self._ready = False
        self._share = RowShare(
            services.executor.config, 0, (range(services.executor.config.pipeline.groups),)
        )
        self._step = -1
        self._running = -1
        """The step whose passes are running; -1 if there is none."""
        self._generation = 0
        """The generation of the newest `Begin` that was given to the passes."""
        self._newest: Begin | None = None
        """The newest `Begin` that was received. It may redistribute the work of the running step."""
        self._absent = {*self._near()} if placement.enters else set[Peer]()
        """Places that were empty then, or that other nodes may be about to take."""
        self._news = asyncio.Event()
        """Set when `_newest` has other work for the running step."""
        self._groups: tuple[int, ...] = ()
        """The groups of the row in that `Begin`."""
        self._sampled: set[int] = set()
        """Groups whose samples are there for the running step."""
        self._io: LinksIO | None = None
        """The connection between tensors and links in the newest step."""
        self._vote: Vote | None = None
        self._validated: Validated | None = None
        self._validates = False
        """Whether a pass over held-out samples is running."""
        self._has_seat = False
        """Whether a node that enters a running epoch has begun its first step."""
        self._failure: StepFailed | None = None
        self._snapshot = (-1, 0)
        self._snapshots_asked: list[TakeSnapshot] = []
        """What was asked for of the state within the running step."""
        self._other_end = Peer(placement.replica, -1)
        """The neighbour whose link was lost first, or the neighbour at fault."""
        self._over = False

    def submit(self, command: CoordinatorMessage) -> None:
        begin = command.then if isinstance(command, Commit) else command
        if isinstance(begin, Begin):
            self._newest = begin
            absent = {*map(Peer._make, begin.absent)}
            if gone := absent - self._absent:
                self._services.renew_links(None, tuple(sorted(gone)))
            self._absent = absent
            self._end_pass()
            self._learn(begin)
            if begin.step == self._running:
                if begin.generation != self._generation:  # otherwise it was sent again
                    self._news.set()
                return  # its vote answers this
        if isinstance(command, TakeSnapshot) and command.step == self._running:
            self._snapshots_asked.append(command)
            self._news.set()
            return
        self._commands.put_nowait(command)

    def update(self, placement: Placement) -> None:
        """Other nodes, or none, have some places of the epoch: replace or drop the links to them during the
        steps, or while this node opens its links. A placement that comes again is answered again."""
        self.placement = replace(placement, enters=self.placement.enters)
        if not placement.renewed:
            self.submit(placement)
        renewed = {*map(Peer._make, placement.renewed)}.intersection(self._near())
        self._absent |= renewed
        self._end_pass()
        if not self._links_open or not renewed:
            return
        self._services.renew_links(self.placement, tuple(sorted(renewed)))
        if self._io is not None:
            self._io.use(*self._own_and_other_rows())

    @property
    def _is_broken(self) -> bool:
        """Whether the own row has an empty seat."""
        return any(peer.replica == self.placement.replica for peer in self._absent)

    def _end_pass(self) -> None:
        """If the own row is broken, end its pass over held-out samples, which another row does."""
        if self._validates and self._is_broken:
            change = StepChange(generation=self._generation, work=self._share.whole, has_lost=True)
            self._services.inbox.announce(change)

    # ---- links

    def expect(self, peer: Peer, key: TensorKey) -> int | None:
        """The exact size in bytes of a tensor that may come from this neighbour, or None."""
        if key.epoch != self.number or not self._may_send(peer, key):
            return None
        # No step begins before every stage is ready.
        if not self._ready:
            return None
        # A neighbour may begin the next step before this stage learns of it.
        follows = self.placement.enters and self._step < 0
        at = self._services.executor.state_step if follows else self._step
        if key.step not in (at, at + 1):
            return None
        return self._services.executor.expected_bytes(key)

    def arrived(self, peer: Peer, key: TensorKey, buffer: bytearray) -> None:
        """A tensor from this neighbour is complete."""
        if peer.replica == self.placement.replica:
            self._services.inbox.put(key, buffer)
            return
        early = Early(peer.replica, key, buffer, self._links.get(peer))
        if not self._early.keeps(early):
            self._take(early)

    def _take(self, tensor: Early) -> None:
        # Pieces of gradients arrive before the compute thread asks for them, each once, and must not use up
        # the link's window. They are copied, because the link reuses a released buffer.
        self._services.inbox.put(tensor.key, bytearray(tensor.buffer), tensor.row)
        tensor.release()

    def _learn(self, begin: Begin) -> None:
        """Take the tensors of other rows that have waited for this work."""
        with contextlib.suppress(ValueError):  # it is refused when its turn comes
            for early in self._early.learn(begin.step, self._work(begin)):
                self._take(early)

    def silent(self, peer: Peer) -> None:
        """This neighbour may have died."""
        if not self._over and not self._is_gone(peer):
            news = PeerSilent(epoch=self.number, stage=peer.stage, replica=peer.replica)
            self._services.post(news)

    def link_lost(self, peer: Peer, error: ThinwireError) -> None:
        """The link to this neighbour has failed."""
        if self._over or self._is_gone(peer):
            return
        is_at_fault = isinstance(error, ProtocolViolationError)
        if self._other_end.stage < 0 or is_at_fault:
            self._other_end = peer
        if is_at_fault:
            # Report now: the other node sees its link close and must not report first.
            self._fail(FailureKind.PEER, str(error))
        self._services.inbox.interrupt(str(error), error)

    # ---- the life of an epoch

    async def run(self) -> None:
        """Execute commands until cancelled. Report a failure, after which the coordinator ends the epoch.

        Raises DeviceLostError, because every later epoch on this node would fail too.
        """
        try:
            async with self._open:
                try:
                    await self._place()
                    while True:
                        await self._execute(await self._commands.get())
                finally:
                    self._over = True
        except StepInterrupted as interruption:
            if isinstance(interruption.cause, ProtocolViolationError):
                self._fail(FailureKind.PEER, str(interruption))
            elif interruption.cause is not None:
                if isinstance(interruption.cause, Refused):
                    # The other end reports what is wrong here, and its report should be first.
                    await asyncio.sleep(REFUSED_SECONDS)
                self._fail_by_link(interruption.cause)
        except NonFiniteError as error:
            self._fail(FailureKind.NON_FINITE, str(error))
        except BadTensorError as error:
            own = Peer(self.placement.replica, source_stage(error.key, len(self.placement.stages)))
            self._other_end = own if error.row is None else Peer(error.row, self.stage)
            self._fail(FailureKind.PEER, str(error))
        except LinkError as error:
            self._fail_by_link(error)
        except DeviceLostError:
            raise
        except CacheMismatchError as error:
            self._services.executor.forget()
            self._fail(FailureKind.INTERNAL, str(error))
        except ThinwireError as error:
            self._fail(FailureKind.INTERNAL, str(error))
        while self._failure is not None:
            # The coordinator repeats the command, so the report was lost.
            await self._commands.get()
            self._services.post(self._failure)

    async def _execute(self, command: CoordinatorMessage) -> None:
        if isinstance(command, Begin | Commit | Validate):
            self._services.waited_for_votes(command.waited_seconds)
        match command:
            case Placement():
                if self._placed is not None:
                    self._services.post(self._placed)
            case Restore():
                if not self._ready:
                    await self._restore(command)
                self._services.post(Ready(epoch=self.number, telemetry=self._services.telemetry()))
            case Begin():
                await self._begin(command)
            case Commit():
                await self._apply(command)
            case Validate():
                await self._validate(command)
            case TakeSnapshot():
                await self._take_snapshot(command)
            case _:
                pass

    async def _place(self) -> None:
        services, executor = self._services, self._services.executor
        stages = len(self.placement.stages)

        try:
            share = self._share = RowShare.of(executor.config, self.placement)
        except ValueError as error:
            raise ProtocolViolationError(f"the coordinator's placement: {error}") from error

        if not self.placement.enters:
            await services.settle()

        def work() -> int:
            # The compute thread has finished with the previous epoch.
            services.inbox.reset()
            return executor.place(self.stage, stages, share)

        held = await services.compute(work)
        self._placed = Placed(
            epoch=self.number,
            held_step=held,
            voted=executor.voted,
            lineage=executor.lineage,
            storages=await services.storage_seconds(self.stage, stages),
        )
        services.post(self._placed)

    async def _restore(self, restore: Restore) -> None:
        services, executor, step = self._services, self._services.executor, restore.step
        # Open links first: their time is limited, and fetching a state may take longer.
        services.progress.doing("connecting to its neighbours")
        placement = self.placement
        self._links_open = True
        peers = tuple(peer for peer in self._near() if is_taken(placement, peer))
        self._links = await self._open.enter_async_context(services.open_links(placement, peers, self))
        if self.placement.enters:
            # It holds a state that followed the run by the steps' sums.
            executor.use_codecs(restore.activation_codecs, restore.gradient_codecs)
            self._ready = True
            return
        missed = restore.missed
        if executor.lineage != restore.lineage:
            executor.forget()
        if missed is not None and executor.state_step == missed.step == step - 1 and executor.voted:
            await services.compute(lambda: executor.apply(missed.lr, missed.clip_coefficient))
        executor.use_storages(restore.storages)
        if executor.state_step != step:
            await load_state(services, step)
        executor.lineage = restore.lineage
        executor.uncompressed = restore.uncompressed
        executor.use_codecs(restore.activation_codecs, restore.gradient_codecs)
        services.progress.doing("waiting for the other stages")
        self._step = step
        self._ready = True

    def _near(self) -> tuple[Peer, ...]:
        """The places that this node has links to: neighbours in its row, and its stage in other rows."""
        config, own = self._services.executor.config, self.placement.replica
        stages = len(self.placement.stages)
        near = neighbours(self.stage, stages, chunks_of(config, stages), config.sums_tied_gradients)
        rows = [row for row in range(len(self.placement.rows)) if row != own]
        return (*(Peer(own, stage) for stage in near), *(Peer(row, self.stage) for row in rows))

    async def _begin(self, begin: Begin) -> None:
        if self.placement.enters and not self._has_seat:
            self._has_seat = True
            await self._services.settle()
            if self._services.executor.state_step != begin.step:
                raise RunError(
                    f"it does not hold the state of step {begin.step}, which it should have followed"
                )
        # Only now: others may have died while the state settled.
        newest, vote = self._newest, self._vote
        if newest is not None and newest.step == begin.step:
            begin = newest
        if vote is None or vote.step != begin.step:
            await self._run_step(begin)
        elif vote.generation != begin.generation:
            await self._run_more(begin)
        else:
            # Send the newest totals, which only grow.
            self._services.post(replace(vote, telemetry=self._services.telemetry()))

    async def _run_step(self, begin: Begin) -> None:
        services, executor, step = self._services, self._services.executor, begin.step
        services.step_begins()
        services.progress.step_begins()
        services.keep_sums(wanted=begin.keep_sums)
        for key in services.inbox.forget_before(step):
            self._release(key)
        for early in self._early.forget_before(step):
            early.release()
        self._step = self._running = step
        self._groups = ()
        change = self._change(begin)
        # Before the samples come: a node that is gone by then may still be in the step's work.
        io = self._io = self._make_io()
        groups = change.work.groups if len(self.placement.rows) > 1 else ()
        self._sampled = {*change.work.groups, *begin.audited}
        samples: dict[BatchPart, np.ndarray] = {}
        for part in executor.needs:
            # With masked labels, all are needed for the weight of groups that the row may get later.
            if not (change.work.groups or (part is BatchPart.LABELS and executor.config.data.masks_labels)):
                continue
            samples[part] = await services.batches.get(step, part, tuple(sorted(groups)), begin.audited)
        if not change.work.groups:
            io.leave_row()

        def attempt() -> Vote | None:
            try:
                executor.hand_over = change.hand_over
                executor.use_windows(begin.link_windows, begin.audited, change.work.groups)
                executor.wants_digests = begin.digests
                return executor.run_step(self.number, step, io, samples, begin.loss_scale, change)
            except Exception as error:  # torch raises several types when memory runs out; others pass
                if not ran_out(error):
                    raise
                failed = error
            # Done here because `error` no longer holds the step's tensors.
            if not executor.model.relieve():
                raise failed
            return None

        await self._voted(attempt)

    def _reports(self) -> Callable[[HandedOver | SumsMissing], None]:
        """Posts what any thread has found out, until the epoch is over."""
        loop = asyncio.get_running_loop()

        def post(message: HandedOver | SumsMissing) -> None:
            if not self._over:
                self._services.post(message)

        def report(message: HandedOver | SumsMissing) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(post, message)

        return report

    async def _run_more(self, begin: Begin, late: StepChange | None = None) -> None:
        """Recompute the vote after the step's groups were redistributed among rows.

        `late`: a change that arrived when the vote was already computed.
        """
        executor = self._services.executor
        self._running = begin.step
        change = (await self._with_samples(self._change(begin))).after(late)
        await self._voted(lambda: executor.vote(change))

    async def _voted(self, attempt: Callable[[], Vote | None]) -> None:
        """Compute the vote and send it. Meanwhile, pass on changes of the work to the compute thread."""
        services, step = self._services, self._running
        computing = asyncio.ensure_future(services.compute(attempt))
        news = asyncio.ensure_future(self._news.wait())
        try:
            while True:
                await asyncio.wait([computing, news], return_when=asyncio.FIRST_COMPLETED)
                if computing.done():
                    break
                self._news.clear()
                news = asyncio.ensure_future(self._news.wait())
                newest = self._newest
                if newest is not None and newest.generation != self._generation:
                    services.inbox.announce(await self._with_samples(self._change(newest)))
                while self._snapshots_asked and services.executor.copies_within_step:
                    await self._take_snapshot(self._snapshots_asked.pop(0), within=True)
        finally:
            if not computing.done():  # the epoch is over, and the computation ends soon
                computing.add_done_callback(lambda done: done.cancelled() or done.exception())
            news.cancel()
            self._running = -1
            self._news.clear()
            for take in self._snapshots_asked:  # before the commit
                self._commands.put_nowait(take)
            self._snapshots_asked.clear()
        vote = computing.result()
        late = services.inbox.take_change()  # `_newest` has the same change
        if vote is None:
            raise RunError("it ran out of memory, and continues with a plan for less")
        points.reach(points.Phase.VOTING, stage=self.stage, step=step)
        self._vote = vote
        newest = self._newest
        if newest is not None and newest.step == step and newest.generation != vote.generation:
            await self._run_more(newest, late)
        else:
            services.post(replace(vote, telemetry=services.telemetry()))

    def _change(self, begin: Begin) -> StepChange:
        """Which row computes which groups in a step."""
        self._generation = begin.generation
        if begin.keep_sums:  # otherwise also of other steps
            self._services.keep_sums(wanted=True)
        try:
            work = self._work(begin)
        except ValueError as error:
            raise ProtocolViolationError(f"the coordinator's begin of a step: {error}") from error
        # A row loses its groups together. Another node may have the seat by now, and the row others.
        has_lost = not set(self._groups).issubset(work.groups)
        self._groups = work.groups
        # A row that lacks a node has no incomplete groups: nothing that it sends is for neighbours.
        is_broken = any(row == self.placement.replica for row, _ in begin.absent)
        if (has_lost or is_broken) and self._io is not None:
            self._io.leave_row()
        return StepChange(
            generation=begin.generation,
            work=work,
            audited=begin.audited,
            keep=self._services.executor.keep_sums,
            hand_over=self._reports() if begin.hands_over else None,
            has_lost=has_lost,
        )

    def _work(self, begin: Begin) -> StepWork:
        """Raises ValueError if the groups are not shared among the rows."""
        asked = self._share, begin.portions, begin.absent, begin.late
        if self._asked != asked:
            absent, late = (
                [row for row, stage in seats if stage == self.stage] for seats in (begin.absent, begin.late)
            )
            self._asked_work = self._share.work(begin.portions, absent, late)
            self._asked = asked
        return self._asked_work

    async def _with_samples(self, change: StepChange) -> StepChange:
        """The change, with the samples of groups that the row has not yet computed in this step."""
        executor, batches = self._services.executor, self._services.batches
        more = tuple(group for group in change.work.groups if group not in self._sampled)
        self._sampled.update(more)
        samples: dict[BatchPart, Mapping[int, np.ndarray]] = {}
        for part in executor.needs if more else ():
            samples[part] = await batches.more(self._step, part, more)
        return replace(change, samples=samples)

    async def _validate(self, command: Validate) -> None:
        services, executor, done = self._services, self._services.executor, self._validated
        if executor.state_step != command.step or self._is_broken:
            return
        if done is None or (done.step, done.number) != (command.step, command.number):
            services.count_time()
            services.progress.doing("measuring the held-out loss")
            rows = command.microbatches * executor.config.training.microbatch
            batches, batch = services.batches, command.number // 2
            samples = {part: await batches.held_out(batch, rows, part) for part in executor.needs}
            io = self._make_io()

            def work() -> float | None:
                return executor.validate(self.number, command.number, command.microbatches, io, samples)

            self._validates = True
            try:
                self._end_pass()
                loss = await services.compute(work)
            except RegroupedError:
                return
            finally:
                self._validates = False
                services.inbox.take_change()
            done = self._validated = Validated(
                epoch=self.number,
                step=command.step,
                number=command.number,
                loss=loss,
                telemetry=services.telemetry(),
            )
        services.post(done)

    def _make_io(self) -> LinksIO:
        links, rows = self._own_and_other_rows()
        report = self._reports()
        return LinksIO(
            stages=len(self.placement.stages),
            links=links,
            rows=rows,
            inbox=self._services.inbox,
            over=lambda: self._over,
            missed=lambda row: report(SumsMissing(epoch=self.number, step=self._step, replica=row)),
        )

    def _own_and_other_rows(self) -> tuple[dict[int, Link], dict[int, Link]]:
        """The links within the row, by stage, and to other rows, by row."""
        own, links = self.placement.replica, self._links.items()
        return (
            {peer.stage: link for peer, link in links if peer.replica == own},
            {peer.replica: link for peer, link in links if peer.replica != own},
        )

    def _may_send(self, peer: Peer, key: TensorKey) -> bool:
        """Whether a tensor with this key may come from this neighbour."""
        stage = source_stage(key, len(self.placement.stages))
        if stage != BETWEEN_ROWS:
            return peer == Peer(self.placement.replica, stage)
        return peer.stage == self.stage and peer.replica != self.placement.replica

    def _release(self, key: TensorKey) -> None:
        """Free the room in a link's window of a tensor of a group that the row had lost."""
        stage = source_stage(key, len(self.placement.stages))
        if (link := self._links.get(Peer(self.placement.replica, stage))) is not None:
            with contextlib.suppress(ValueError):  # the link is a new one
                link.release(key)

    def _is_gone(self, peer: Peer) -> bool:
        """Whether a neighbour will send nothing more, or nothing that this row still needs."""
        newest = self._newest
        if newest is None:
            return not is_taken(self.placement, peer)
        own = self.placement.replica
        is_broken = bool(newest.portions) and all(row != own for row, _ in newest.portions)
        return tuple(peer) in newest.absent or (is_broken and peer.replica == own)

    async def _apply(self, commit: Commit) -> None:
        services, executor = self._services, self._services.executor
        points.reach(points.Phase.COMMIT_APPLY, stage=self.stage, step=commit.step)
        if executor.state_step == commit.step:

            def work() -> None:
                executor.apply(commit.lr, commit.clip_coefficient)
                executor.model.adapt()

            await services.compute(work)
            points.reach(points.Phase.APPLY, stage=self.stage, step=commit.step)
            self._step = commit.step + 1
            services.progress.step_done(commit.step + 1)
            services.applied(self.number, commit.step)
        if commit.then is not None:
            await self._begin(commit.then)
            return
        services.post(Applied(epoch=self.number, step=commit.step, telemetry=services.telemetry()))

    async def _take_snapshot(self, take: TakeSnapshot, *, within: bool = False) -> None:
        """`within`: while the passes of a step run, which do not change the state."""
        services, executor, step = self._services, self._services.executor, take.step
        asked = step, take.attempt
        if executor.state_step != step or (self._snapshot == asked and services.uploading(step)):
            return
        if take.only_hashes and self._snapshot >= asked:
            return
        copy = executor.copy_state
        state = await (asyncio.to_thread(copy) if within else services.compute(copy))
        self._snapshot = asked
        services.take(self.number, take, state)

    def _fail_by_link(self, error: Exception) -> None:
        if isinstance(error, NeighbourStuckError):
            is_own_row = error.row == OWN_ROW
            self._other_end = (
                Peer(self.placement.replica, error.stage) if is_own_row else Peer(error.row, self.stage)
            )
        self._fail(FailureKind.LINK, str(error))

    def _fail(self, kind: FailureKind, message: str) -> None:
        """Report the epoch's first failure. Later ones are consequences of it."""
        if self._failure is not None:
            return
        self._failure = StepFailed(
            epoch=self.number,
            step=max(self._step, 0),
            kind=kind,
            message=message,
            peer_stage=self._other_end.stage,
            peer_replica=self._other_end.replica,
        )
        self._services.post(self._failure)


def placed_node(placement: Placement, peer: Peer) -> PlacedStage:
    """The node in a neighbour's place."""
    own_row = peer.replica == placement.replica
    return placement.stages[peer.stage] if own_row else placement.rows[peer.replica].node


def is_taken(placement: Placement, peer: Peer) -> bool:
    """Whether a node has a neighbour's place."""
    return bool(placed_node(placement, peer).node_id)
