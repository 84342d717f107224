"""The coordinator of one run. It feeds events to the state machine and executes the actions that it returns.

One task (`_act`) takes events in turn, so the machine is never entered concurrently. It executes every action
before it looks at the next event, so a commit is on disk before a stage learns of it.
"""

import asyncio
import contextlib
import functools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kernels.common.devices import of_arithmetic
from node.config.schema import RunConfig
from node.coordinator.accounting import Accounting, Answers
from node.coordinator.changes import Changes
from node.coordinator.decisions import record_places, record_plan
from node.coordinator.disk import Disk
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.kept_snapshots import KeptSnapshots, SnapshotBook
from node.coordinator.placing import PlacePlanner
from node.coordinator.planners import LinkPlanner
from node.coordinator.relays import RelayDesk
from node.coordinator.reporter import Emit, Reporter, Tracer
from node.coordinator.reports import NO_REPORT, REPORTS, longest_kind
from node.coordinator.sessions import ControlSession, Sessions
from node.coordinator.snapshot_handler import (
    Agreement,
    NotDueError,
    ServedLayer,
    SnapshotHandler,
    UploadPermit,
)
from node.coordinator.snapshot_uses import SnapshotExports, SnapshotSamples
from node.coordinator.store import (
    EVICTED_WORDS,
    PlacedNode,
    StepOutcome,
    StepRecord,
    Store,
)
from node.data.samples import held_out_samples, packed_parts
from node.data.shards import TrainingData
from node.model.labels import BatchPart, are_labels, steps_at_once, to_bytes
from node.model.units import unit_names
from node.run_file.loader import to_json
from node.run_state.actions import (
    Aborted,
    Action,
    Announce,
    Decide,
    OpenSnapshot,
    RecordCommit,
    RecordHeldOut,
    RecordPlacement,
    RecordPlan,
    RecordRestored,
    RefuseSnapshot,
    Released,
    SeatFilled,
    SeatLost,
    SeatOffered,
    Send,
    SnapshotAgreed,
    SnapshotDropped,
    StepDone,
    Stop,
    costs_last,
    without_old_work,
)
from node.run_state.epoch import Epoch, Phase
from node.run_state.held_out import LOSSLESS
from node.run_state.machine import RunMachine
from node.run_state.run_plan import Past, as_told, run_plan, step_plan
from node.schedule.placement import slices_of
from node.state.manifest import MANIFEST_NAME, LayerSource, Manifest, UnitEntry
from node.state.snapshot import NewFile, list_snapshots
from node.state.weights import CheckpointError
from node.telemetry import events, points
from node.telemetry.costs import group_seconds, mean_step
from node.telemetry.history import EVICTED
from node.tuning.codec_plan import Lines
from node.tuning.device_memory import available_bytes
from node.tuning.places import PlacePlan
from node.tuning.snapshot_place import is_url, snapshot_place
from wire.errors import ProtocolViolationError, RefusalCode, RunError, ThinwireError, WrongLayerError
from wire.figures import Place
from wire.identity.enrolment import Refusal
from wire.messages import (
    NODES,
    Applied,
    BlockTime,
    CoordinatorMessage,
    Finish,
    Heartbeat,
    HeldLayer,
    Leave,
    NodeMessage,
    PeerRate,
    PlacedStage,
    Placement,
    RelayTimes,
    TakeSnapshot,
    Vote,
    Welcome,
)
from wire.telemetry import CodecTimes, StepSpans

TICK_SECONDS = 0.25
STANDSTILL_SECONDS = 2.0
"""A longer time between two ticks means that the process was stopped, its machine was suspended, or its
memory was swapped in."""
GOODBYE_SECONDS = 5.0
MOST_BATCHES = 16
"""How often a node may fetch samples while a step's work does not change, beside held-out ones. It needs each
part once, ahead of the step, and again after a broken connection."""
DROPPED_SECONDS = 60.0
"""The seconds between two notices about documents that are left out of the training data."""

Happening = Callable[[float], list[Action]]


class Coordinator:
    """Implements `node.coordinator.sessions.SessionHandler` and `SnapshotRun`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: Path,
        run_id: str,
        store: Store,
        enrolment: EnrolmentHandler,
        corpus: TrainingData,
        emit: Emit,
        past: Past,
        unreported: StepRecord | None = None,
    ) -> None:
        """`unreported` is a step that an earlier coordinator committed but did not report."""
        self.config = config
        self._directory = directory
        self._store = store
        self._enrolment = enrolment
        self._corpus = corpus
        self._emit = emit
        told_config = as_told(config)
        self._config_json = to_json(told_config)
        self._held_out = held_out_samples(config, corpus)
        self._unlabelled: set[int] = set()
        """Steps without labels that count, among those whose labels a node has fetched."""
        plan = run_plan(config, corpus.windows, len(self._held_out), self._held_out.label_weight)
        plan = replace(plan, unlabelled=self._unlabelled)
        self._machine = RunMachine(plan, step_plan(config), past)
        self._reporter = Reporter(config, emit, unreported)
        self._tracer = Tracer(config.telemetry, directory, self._places)
        self._disk = Disk(lambda text: emit(events.DiskRoom(text=text, full=self._disk.is_full)))
        self._last_epoch = past.last_epoch
        self._corpus_sha256 = corpus.fingerprint()
        book = SnapshotBook(
            config=config,
            windows=corpus.windows,
            directory=directory,
            run_id=run_id,
            store=store,
            disk=self._disk,
            scale_of=past.scale_of,
        )
        self._snapshots = SnapshotHandler(book, self)
        self._kept = KeptSnapshots(book, told_config, self)
        self._exports = SnapshotExports(config, directory)
        self._samples = SnapshotSamples(config, directory, emit, available_bytes())
        self._link_planner: LinkPlanner | None = None
        self._place_planner: PlacePlanner | None = None
        if config.pipeline.measures_places:
            self._place_planner = PlacePlanner(
                config,
                samples=corpus.windows,
                past=past,
                members=lambda: self._machine.members,
                send=self.send,
                move=self._move,
                tell=lambda text: emit(events.Notice(text=text)),
            )
        if config.pipeline.window == "auto" or config.pipeline.plans_codecs:
            self._link_planner = LinkPlanner(
                config,
                samples=corpus.windows,
                line=self.accounting.line,
                use_windows=lambda epoch, plan: self._post(lambda _: self._machine.plan_windows(epoch, plan)),
                use_lines=self._use_lines,
                emit=emit,
            )
        self._planners = [each for each in (self._place_planner, self._link_planner) if each is not None]
        self._events: asyncio.Queue[Happening] = asyncio.Queue()
        self._post = self._events.put_nowait
        self._sessions = Sessions(config.coordinator)
        self._answers = Answers()
        self.relays = RelayDesk(self._sessions.send, config.coordinator.relay)
        self._outcome: Stop | None = None
        self.exit_code = RunError.exit_code
        """The exit code of the command if the run fails."""
        self._dropped: Mapping[str, int] = {}
        """Documents left out of the training data, by reason, as in the newest notice."""
        self._fetched: dict[str, tuple[tuple[int, int, int], int]] = {}
        """For each node: the epoch, step and generation in which it last fetched samples, and how often."""
        self._came: set[str] = set()
        """Nodes that have joined since the database was last updated."""
        self.bug: Exception | None = None
        """The unexpected error that ended the run, if there was one."""
        go_on = functools.partial(self._machine.stop, at_once=False, soon=True)
        self.changes = Changes(config, directory, emit, lambda why: self._post(lambda _now: go_on(why)))

    @property
    def accounting(self) -> Accounting:
        """The reports of the run's nodes."""
        return self._reporter.accounting

    def _places(self) -> Mapping[str, Place]:
        return {node: place for place, node in self.accounting.places().items()}

    # ---- running

    async def run(self) -> Stop:
        """Drive the run until it ends. Sessions are closed when this returns."""
        watching = self._tick(), self._watch_members(), self._watch_data(), self.changes.watch()
        writing = self._tracer.run(), self._snapshots.run(), self._exports.run(), self._kept.run()
        async with asyncio.TaskGroup() as group:
            others = self._samples.run(), *(planner.run() for planner in self._planners)
            beside = [group.create_task(task) for task in (*watching, *writing, *others)]
            outcome = await self._act()
            await self._exports.finish()
            for task in beside:
                task.cancel()
        self._say_dropped()
        await self._say_goodbye()
        await self._tracer.write()
        done = self._machine.newest_snapshot >= self.config.run.steps
        if self.changes.apply(over=done or outcome.failed):
            return outcome
        if done:
            await self._samples.finish()
        resume = "" if done else f"thinwire resume {shlex.quote(str(self._directory))}"
        self._reporter.finished(outcome.reason, failed=outcome.failed, resume=resume)
        return outcome

    def stop(self, reason: str, *, at_once: bool = False) -> None:
        """End the run after this step and a snapshot, or, with `at_once`, now. May be called repeatedly."""
        if at_once:
            self._disk.give_up()
        self._samples.give_up()
        self.changes.drop()
        self._post(lambda _now: self._machine.stop(reason, at_once=at_once))

    def save(self) -> None:
        """Take a snapshot after this step."""
        self._post(lambda _now: self._machine.save())

    async def _act(self) -> Stop:
        while self._outcome is None:
            happening = await self._events.get()
            await self._disk.room()
            try:
                for action in costs_last(without_old_work(happening(time.monotonic()))):
                    await self._carry_out(action)
            except (RunError, OSError) as error:
                # The remaining actions depend on the one that failed, so no node may receive them.
                for action in self._machine.fail(str(error)):
                    await self._carry_out(action)
                self._outcome = Stop(reason=str(error), failed=True)
        return self._outcome

    async def _tick(self) -> None:
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            before, looked = looked, time.monotonic()
            # Messages that arrived meanwhile are read after this tick: the silence was the coordinator's.
            is_excused = self._disk.is_full or looked - before > STANDSTILL_SECONDS
            unseen = looked - before if is_excused else 0.0
            self._post(functools.partial(self._look, looked, unseen))

    def _look(self, at: float, unseen: float, _now: float) -> list[Action]:
        """Handle a tick with the time at which it came: it may have waited in the queue during a
        standstill."""
        return self._machine.tick(at, unseen=unseen)

    async def _watch_members(self) -> None:
        """Shut out evicted nodes, and record which nodes have used tokens.

        It is separate from `_tick`, which must be late only if nothing else runs either.
        """
        while True:
            await asyncio.sleep(TICK_SECONDS)
            # `thinwire evict` writes to the database from its own process. A failed read is repeated at the
            # next look; other users of the database end the run with a goodbye.
            with contextlib.suppress(RunError):
                if self._came:
                    came = tuple(self._came)
                    await asyncio.to_thread(self._store.claim, came)
                    self._came.difference_update(came)
                evicted = await asyncio.to_thread(self._store.evicted)
                self._sessions.shut_out({*evicted, *self._machine.quarantined})
                for node_id in evicted:
                    self._shut_out(node_id)

    async def _watch_data(self) -> None:
        """Report what is left out of the training data: soon, and again as more of it is read."""
        while True:
            self._say_dropped()
            await asyncio.sleep(DROPPED_SECONDS)

    def _say_dropped(self) -> None:
        if (reasons := self._corpus.dropped) != self._dropped:
            self._dropped = reasons
            self._emit(events.DataDropped.of(reasons))

    def _use_costs(self, number: int, costs: events.StepCosts) -> None:
        """Plan windows and codecs and share groups by the costs of steps, unless their epoch is over."""
        epoch, members = self._machine.epoch, self._machine.members
        if epoch is None or epoch.number != number:
            return
        steps = range(costs.step - costs.steps, costs.step)
        length, slices = self.config.microbatches // self.config.pipeline.groups, slices_of(self.config)
        if any(map(epoch.was_uneven, steps)):
            # Some rows compute more, or less, than their groups: plans need other steps.
            if len(steps) == 1 and (counts := epoch.computed(steps[0])):
                uneven = group_seconds(costs, counts, length, slices)
                self._post(lambda _now: self._machine.uneven_speeds(uneven))
            return
        nodes = [members[node].offer for node in epoch.hosts]
        mean = mean_step(costs) if self._planners else costs
        for planner in self._planners:
            planner.step_done(epoch, nodes, mean)
        if epoch.rows > 1:
            seconds = group_seconds(costs, [len(own) for own in epoch.groups], length, slices)
            self._post(lambda now: self._machine.row_speeds(seconds, costs.seconds / len(steps), now))

    def _use_lines(self, number: int, lines: Lines, seconds: float) -> None:
        def happening(_now: float) -> list[Action]:
            if (epoch := self._machine.epoch) is not None and epoch.number == number:
                self._machine.codecs.measured(epoch, lines, seconds)
            return []

        self._post(happening)

    async def _next_is(self, step: int) -> None:
        """All stages hold the state of `step`, so that step is next."""
        if self._place_planner is not None:
            await self._place_planner.next_is(step)

    async def _move(self, plan: PlacePlan, what: str) -> None:
        """Record a plan of places. The coordinator that continues the run applies it."""
        await self._disk.write(record_places, self._store, plan)
        self.changes.move([f"pipeline.split={','.join(map(str, plan.grid.split))}"], what)

    def _decide(self) -> None:
        """Choose a precision that all present nodes support, for the coordinator that continues the run."""
        hardware = [session.hello.hardware for session in self._sessions]
        without = [card.device for card in hardware if not of_arithmetic(card.arithmetic).bfloat16]
        precision = "float16" if without else "bfloat16"
        why = f"{without[0]} has no bfloat16" if without else f"all {len(hardware)} machines have it"
        self.changes.move([f"training.precision={precision}"], f"the run computes in {precision}: {why}")

    def _shut_out(self, node_id: str) -> None:
        """Tell an evicted node the reason before it can report an error."""
        finish = Finish(reason=f"you were {EVICTED_WORDS}", failed=True)
        if self._sessions.send(node_id, finish):
            self._post(functools.partial(self._machine.lost, node_id, EVICTED))

    async def _say_goodbye(self) -> None:
        """Tell every node how the run ended before the connections close."""
        for session in self._sessions:
            if session.node_id not in self._machine.members:
                # It connected as the run ended, so the state machine does not know it.
                session.send(self._machine.goodbye)
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._sessions.deserted()

    def fail(self, reason: str, exit_code: int = RunError.exit_code) -> None:
        self.exit_code = exit_code
        self._post(lambda _now: self._machine.fail(reason))

    # ---- actions

    async def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                self.send(action.node_id, action.message)
            case Decide():
                self._decide()
            case RecordPlacement():
                self._reporter.placed()
                self.relays.placed(action.nodes, action.addresses, len(action.groups))
                await self._record_placement(action.epoch, action.nodes, action.addresses, len(action.groups))
            case SeatOffered():
                self.relays.offered(action.nodes, action.addresses, action.rows)
            case SeatFilled():
                await self._record_placement(action.epoch, action.nodes, action.addresses, action.rows)
                self._reporter.seat_filled(action)
            case RecordRestored():
                rates = {session.node_id: session.hello.download_rate for session in self._sessions}
                self._reporter.restored(action, rates)
                await self._next_is(action.step)
            case RecordPlan():
                await self._disk.write(record_plan, self._store, action)
                self._reporter.planned(action)
            case RecordCommit():
                await self._record_commit(action)
            case RecordHeldOut():
                await self._record_held_out(action)
            case StepDone():
                now = self._machine.epoch
                costs = self._reporter.finish_step(goes_on=now is not None and now.phase is Phase.STEPPING)
                await self._next_is(action.step + 1)
                if costs is not None:
                    self._use_costs(action.epoch, costs)
            case Announce():
                self._reporter.announced(action)
            case OpenSnapshot():
                if (asking := self._machine.epoch) is not None:
                    await self._open_snapshot(action.step, asking)
            case SnapshotAgreed():
                self._snapshot_agreed(action)
            case SnapshotDropped():
                self._kept.drop(action.step)
                await self._snapshots.drop(action.step)
            case RefuseSnapshot():
                await self._refuse_snapshot(action)
            case Aborted():
                self._reporter.interrupted(action)
            case SeatLost():
                self._reporter.seat_lost(action)
            case Released():
                self._sessions.close(action.node_id)
                self.accounting.forget(action.node_id)
                self._emit(events.NodeLeft(node_id=action.node_id, reason=action.reason))
            case Stop():
                self._outcome = action

    async def _record_placement(
        self, epoch: int, nodes: Sequence[str], addresses: Sequence[str], rows: int
    ) -> None:
        stages = len(nodes) // rows
        placed = [
            PlacedNode(place % stages, node, address, place // stages)
            for place, (node, address) in enumerate(zip(nodes, addresses, strict=True))
        ]
        await self._disk.write(self._store.record_placement, epoch, placed)

    async def _open_snapshot(self, step: int, epoch: Epoch) -> None:
        # Layers do not use the relay: a node that others cannot reach uploads its layers here.
        reachable = self.addresses().keys() >= {*epoch.snapshot_nodes}
        place = snapshot_place(self.config, step, [session.hello.download_rate for session in self._sessions])
        # Other rows hold the same state, and a second one saves its own copy. So two copies need no transfer,
        # and a refused layer can be replaced. Rows of the same kind have layers with the same bits.
        kinds = epoch.kinds_of
        second = [
            row
            for row in map(epoch.row, epoch.proven_rows)
            if row != epoch.snapshot_nodes
            and all(
                kinds[node] == kinds[other] for node, other in zip(row, epoch.snapshot_nodes, strict=True)
            )
        ][:1]
        to_nodes, rows = reachable and place == NODES, [epoch.snapshot_nodes, *second]
        if is_url(place):
            self._kept.expect(step, rows, place)
        elif to_nodes:
            self._kept.expect(step, rows)
        else:
            await self._snapshots.expect(step, rows)
        copy = replace(epoch.taken_snapshot, place=NODES, only_hashes=not to_nodes)
        for node in (node for row in second for node in row):
            self.send(node, copy)

    def _snapshot_agreed(self, action: SnapshotAgreed) -> None:
        names = unit_names(self.config.model)
        units = {names[unit]: known for unit, known in action.units.items()}
        alone = [names[unit] for unit in action.alone]
        self._snapshots.agreed(action.step, Agreement(units=units, alone=alone))
        wrong = self._kept.agreed(action.step, {unit: known.sha256 for unit, known in units.items()})
        for node_id, unit in wrong:
            self._wrong_layer(WrongLayerError(node_id, action.step, unit))

    def _wrong_layer(self, error: WrongLayerError) -> None:
        self._post(lambda now: self._machine.wrong_layer(error.node_id, error.step, error.unit, now))

    async def _refuse_snapshot(self, action: RefuseSnapshot) -> None:
        step = action.step
        if step in self._kept.complete:
            await self._kept.refuse(step)
        else:
            await self._snapshots.refuse(step)
        stored = list_snapshots(self._directory / "snapshots")
        whole = max((other for other in (*self._kept.complete, *stored) if other < step), default=0)
        text = (
            f"the snapshot of step {step} is set aside: {action.reason}; the newest left is of step {whole}"
        )
        self.snapshot_lost(step, whole, text)

    def send(self, node_id: str, message: CoordinatorMessage) -> None:
        """Add what the state machine does not know: the place of a snapshot's layers, relays, waits."""
        if isinstance(message, TakeSnapshot) and message.step in self._kept and not message.only_hashes:
            message = replace(message, place=self._kept.place(message.step))
        elif isinstance(message, Placement):
            message = self.relays.with_relays(node_id, message)
        self._sessions.send(node_id, message, self._answers.waited(node_id, message))

    def record(self) -> dict[str, object]:
        epoch = self._machine.epoch
        number = self._last_epoch if epoch is None else epoch.number
        return {"corpus_sha256": self._corpus_sha256, "epoch": number}

    def addresses(self) -> dict[str, str]:
        """Connected nodes that others can reach, and their addresses; hosts first, in the order of stages."""
        where = {session.node_id: session.address for session in self._sessions if session.address}
        hosts = self._machine.epoch.hosts if self._machine.epoch is not None else ()
        return {node: where[node] for node in (*hosts, *where) if node in where}

    async def _record_commit(self, commit: RecordCommit) -> None:
        training, model = self.config.training, self.config.model
        record = StepRecord(
            step=commit.step,
            epoch=commit.epoch,
            loss=commit.loss,
            grad_norm=commit.grad_norm,
            lr=commit.lr,
            clip=commit.clip_coefficient,
            tokens=training.global_batch * model.sequence,
            seconds=self._reporter.step_seconds,
            committed_at=time.time(),
        )
        outcome = await self._disk.write(self._store.record_step, record, commit.norms)
        if outcome is StepOutcome.DIFFERS:
            self._emit(
                events.Notice(
                    text=f"step {commit.step + 1} was repeated with a different loss: its stages, codecs or "
                    "machines have changed, so this run cannot be reproduced bit for bit"
                )
            )
        self._reporter.committed(record)
        points.reach(points.Phase.COMMIT_APPLY, at=points.At.COORDINATOR, step=commit.step)

    async def _record_held_out(self, held_out: RecordHeldOut) -> None:
        held_out = replace(held_out, samples=self._held_out.labelled)
        if self.config.pipeline.forward_codec == LOSSLESS:
            held_out = replace(held_out, loss=held_out.uncompressed)
        values = held_out.step, held_out.loss, held_out.uncompressed, held_out.samples
        await self._disk.write(self._store.record_held_out, *values, time.time())
        self._reporter.held_out(held_out)

    # ---- what the control service asks

    async def refusal_for(self, node_id: str) -> Refusal | None:
        if (why := self._machine.quarantined.get(node_id)) is not None:
            return Refusal(RefusalCode.EVICTED, f"{node_id} is shut out: {why}")
        member = await asyncio.to_thread(self._store.member, node_id)
        if member is None:
            return Refusal(
                RefusalCode.NOT_A_MEMBER, f"{node_id} is not a member of this run: join it with a token first"
            )
        if member.evicted is not None:
            self._shut_out(node_id)
            return Refusal(RefusalCode.EVICTED, f"{node_id} was {EVICTED_WORDS}")
        return None

    def opened(self, session: ControlSession) -> None:
        node_id, hello = session.node_id, session.hello
        self._sessions.add(session)
        self._came.add(node_id)
        session.send(
            Welcome(
                node_id=node_id,
                config_json=self._config_json,
                heartbeat_seconds=self.config.coordinator.heartbeat_seconds,
                windows=self._corpus.windows,
            )
        )
        if (retain := self._kept.message()).steps:
            session.send(retain)
        if self._outcome is not None:
            session.send(self._machine.goodbye)
            session.close()
            return
        self.relays.opened(session)

        def happening(now: float) -> list[Action]:
            known = self._machine.members.get(node_id)
            if known is None or known.process_nonce != hello.process_nonce:
                self._reporter.joined(session.joined)
            return self._machine.hello(
                session.offer,
                address=session.address,
                process_nonce=hello.process_nonce,
                epoch=hello.epoch,
                rate=hello.download_rate,
                now=now,
            )

        self._post(happening)

    def heard(self, session: ControlSession, message: NodeMessage) -> None:
        node_id, longest = session.node_id, ""
        if session not in self._sessions:
            return  # a newer session of this node is open, perhaps another process's, which is asked again
        if isinstance(message, REPORTS):
            before = self.accounting.newest.get(node_id, NO_REPORT)
            self.accounting.report(node_id, message.telemetry, self._reporter.epoch_seconds)
            if isinstance(message, Heartbeat):
                longest = longest_kind(before, message.telemetry)
            else:
                self._answers.came(node_id, time.monotonic())
        match message:
            case StepSpans():
                self._tracer.add(node_id, message)
            case BlockTime() | PeerRate():
                if self._place_planner is not None:
                    self._place_planner.heard(node_id, message)
            case CodecTimes():
                if self._link_planner is not None:
                    self._link_planner.heard(node_id, message)
            case RelayTimes():
                for relay in self.relays.plan.measured(node_id, message.times):
                    text = f"node {node_id} left the relay of node {relay}: another path is much faster"
                    self._emit(events.Notice(text=text))
            case Heartbeat():
                session.answer(self._sessions.reply(message.sent_at))
                prepares, awaited = message.preparing, message.awaited
                self._machine.heard(node_id, time.monotonic(), longest, preparing=prepares, awaited=awaited)
            case Leave(failed=True):
                # Immediately: the node does not return, so there is nothing to wait for.
                why = f"it ended: {message.reason}" if message.reason else "it ended without a reason"
                self._post(functools.partial(self._machine.lost, node_id, why))
            case Leave():
                points.reach(points.Phase.DRAIN, at=points.At.COORDINATOR)
                self._post(lambda now: self._machine.leave(node_id, now))
            case _:
                if isinstance(message, Vote):
                    points.reach(
                        points.Phase.APPLY, at=points.At.COORDINATOR, step=message.step - 1
                    )  # its commit is applied too
                    points.reach(points.Phase.VOTING, at=points.At.COORDINATOR, step=message.step)
                elif isinstance(message, Applied):
                    points.reach(points.Phase.APPLY, at=points.At.COORDINATOR, step=message.step)
                self._post(functools.partial(self._machine.message, node_id, message))

    def refused(self, node_id: str, why: str) -> None:
        self._post(lambda now: self._machine.refused(node_id, why, now))

    def closed(self, session: ControlSession) -> None:
        node_id = session.node_id
        if session in self._sessions:
            self._sessions.remove(session)
            self.relays.closed(node_id)
            self._post(functools.partial(self._machine.disconnected, node_id))

    async def renew(self, node_id: str, csr_der: bytes) -> bytes | Refusal:
        return await asyncio.to_thread(self._enrolment.renew, node_id, csr_der)

    async def batch(
        self,
        node_id: str,
        step: int,
        *,
        part: BatchPart,
        held_out: bool = False,
        groups: Sequence[int] = (),
        steps: int = 1,
    ) -> bytes:
        """The rows of a step, or of some of its gradient groups in the given order; with `steps`, of that
        many consecutive steps, concatenated.

        Raises ProtocolViolationError if the node's stage does not need it.
        """
        epoch, count = self._machine.epoch, self.config.pipeline.groups
        size, wanted = self.config.training.global_batch, range(step, step + steps)
        most = steps_at_once(part, size * len(groups or range(count)) // count, self.config.model.sequence)
        past, most = (len(self._held_out), 1) if held_out else (self.config.run.steps * size, most)
        useless = epoch is None or not epoch.may_fetch(node_id, part) or self._fetches_too_often(node_id)
        # Each group once: a member must neither end the run nor fill its memory.
        useless |= len(groups) > count or len(set(groups)) < len(groups) or not set(groups) <= {*range(count)}
        if useless or steps > most or wanted[-1] * size >= past:
            raise ProtocolViolationError(f"{node_id} does not need that batch of step {step}")
        if held_out:
            return to_bytes(part, self._held_out[step * size : (step + 1) * size].part(part))
        for at in wanted:
            points.reach(points.Phase.FORWARD, at=points.At.COORDINATOR, step=at)
        try:
            packed = await asyncio.to_thread(packed_parts, self._corpus, wanted, part, groups, count)
        except Exception as error:
            # Whatever the error, the run cannot continue without the step's samples.
            if isinstance(error, ThinwireError):
                self.fail(str(error), error.exit_code)
                raise
            what = " ".join(f"the training data cannot be read ({type(error).__name__}: {error})".split())
            if self.bug is None:
                self.bug = error
                self.fail(what)
            raise RunError(what) from None
        if part is BatchPart.LABELS and not groups:
            counts = are_labels(packed, steps)
            self._unlabelled.update(at for at, some in zip(wanted, counts, strict=True) if not some)
        return packed

    def _fetches_too_often(self, node_id: str) -> bool:
        """Count a node's request for samples."""
        epoch = self._machine.epoch
        at = (0, 0, 0) if epoch is None else (epoch.number, epoch.step, epoch.generation)
        before, count = self._fetched.get(node_id, (at, 0))
        count = count + 1 if before == at else 1
        self._fetched[node_id] = at, count
        passes = -(-len(self._held_out) // self.config.training.global_batch)
        return count > MOST_BATCHES + 2 * len(BatchPart) * passes

    def layer_holders(
        self, node_id: str, step: int, unit: str, bad: Sequence[str]
    ) -> tuple[UnitEntry, list[PlacedStage], str] | None:
        """See `KeptSnapshots.where`; None if the coordinator has the layer itself."""
        if step not in self._kept or self._snapshots.path(step).joinpath(MANIFEST_NAME).exists():
            return None
        epoch = self._machine.epoch
        waits = epoch.number if epoch is not None and epoch.needs_state(node_id, step) else 0
        return self._kept.where(node_id, step, unit, bad, epoch=waits)

    def hold_layers(
        self, node_id: str, layers: Sequence[HeldLayer], missing: Sequence[tuple[int, str]]
    ) -> list[tuple[int, str]]:
        """See `KeptSnapshots.hold`."""
        try:
            return self._kept.hold(node_id, layers, missing)
        except WrongLayerError as error:
            self._wrong_layer(error)
            raise

    async def layer(self, step: int, unit: str) -> ServedLayer:
        """A unit's file in a complete snapshot."""
        with self._checkpoint_whole():
            layer = await self._snapshots.layer(step, unit)

        async def opened() -> LayerSource:
            with self._checkpoint_whole():
                return await layer.open()

        return ServedLayer(layer.entry, opened)

    @contextlib.contextmanager
    def _checkpoint_whole(self) -> Iterator[None]:
        """A node that cannot read its part of the run's checkpoint asks here. If that is damaged, no step can
        begin, and the run ends with the names of the tensor and the file."""
        try:
            yield
        except CheckpointError as error:
            self.fail(str(error), error.exit_code)
            raise

    def upload_permit(
        self, node_id: str, step: int, unit: str, *, weights_alone: bool = False
    ) -> UploadPermit:
        """See `SnapshotHandler.permit`."""
        if node_id not in self._machine.members:
            raise NotDueError(f"{node_id} is not in the run now")
        return self._snapshots.permit(node_id, step, unit, weights_alone=weights_alone)

    async def weights_ahead(self, permit: UploadPermit) -> LayerSource:
        return await self._snapshots.weights_ahead(permit)

    async def arriving(self, permit: UploadPermit, size: int) -> NewFile:
        return await self._snapshots.arriving(permit, size)

    async def store_layer(self, permit: UploadPermit, file: NewFile | None) -> None:
        """See `SnapshotHandler.put`."""
        try:
            await self._snapshots.put(permit, file)
        except WrongLayerError as error:
            # First, because a snapshot that waits for a node that is shut out is not taken.
            await self._snapshots.refused(permit)
            self._wrong_layer(error)
            raise

    async def layer_refused(self, permit: UploadPermit, why: str) -> None:
        """A node uploaded something that cannot be the requested layer."""
        self._post(lambda now: self._machine.layer_refused(permit.node_id, permit.step, why, now))
        await self._snapshots.refused(permit)

    def layer_received(self, step: int, unit: str) -> None:
        self._post(lambda now: self._machine.layer_received(step, unit, now))

    def snapshot_stored(self, manifest: Manifest, where: str, *, is_here: bool) -> None:
        self._reporter.snapshot_stored(manifest.step, manifest.total_bytes, where, manifest.weights_sha256)
        if is_here:
            self._exports.stored(manifest.step)
        self._samples.stored(manifest.step, is_here=is_here)
        self._post(lambda now: self._machine.snapshot_stored(manifest.step, now))

    def snapshot_gone(self, step: int, why: str) -> None:
        self._post(lambda now: self._machine.snapshot_gone(step, why, now))

    def weights_stored(self, step: int) -> None:
        self._emit(events.ModelStored.of(step, self._directory))
        self._exports.stored(step)

    def snapshot_lost(self, step: int, whole: int, text: str) -> None:
        if text:
            self._emit(events.SnapshotSetAside(text=text, step=step, whole=whole))
        self._post(lambda _now: self._machine.snapshot_damaged(step, whole))
