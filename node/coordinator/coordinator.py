"""The coordinator of one run: feeds the state machine with what happens, and carries out what it says.

One task (`_act`) takes events in turn, so the machine is never entered twice at once, and every action is
carried out before the next event is looked at: a commit is on disk before a stage hears of it.
"""

import asyncio
import contextlib
import functools
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from node import faults
from node.config.loader import to_json
from node.config.schema import RunConfig
from node.coordinator.accounting import Accounting
from node.coordinator.actions import (
    Aborted,
    Action,
    Announce,
    OpenSnapshot,
    RecordCommit,
    RecordPlacement,
    RecordRestored,
    Released,
    Send,
    StepDone,
    Stop,
)
from node.coordinator.control_service import ControlSession
from node.coordinator.enrolment import EnrolmentDesk
from node.coordinator.machine import RunMachine
from node.coordinator.narrator import Emit, Narrator
from node.coordinator.plan import Past, RunPlan
from node.coordinator.records import PlacedNode, SnapshotRecord, StepOutcome, StepRecord
from node.coordinator.seating import stage_needs
from node.coordinator.store import Store
from node.coordinator.window_plan import Windows, measured, plan_windows
from node.model.memory import Devices, devices_of, most_held
from node.model.placement import boundary_cache_bytes, chunks_of, stage_units
from node.model.units import most_state_bytes, unit_names
from node.telemetry import events
from node.telemetry.trace_files import TraceWriter
from node.telemetry.traced_steps import TracedSteps
from node.training.data import Corpus
from node.training.manifest import Manifest
from node.training.schedule import clip_coefficient, learning_rate
from node.training.snapshot import SnapshotWriter, prune, read_unit, snapshot_directory
from wire.errors import ProtocolViolationError, RefusalCode, RunError
from wire.identity.enrolment import Refusal
from wire.messages import Applied, Finish, Heartbeat, HeartbeatReply, Leave, NodeMessage, Ready, Vote, Welcome
from wire.telemetry import StepSpans

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0
TICK_SECONDS = 0.25
GOODBYE_SECONDS = 5.0
TRACE_SECONDS = 1.0
"""Spans are gathered for so long before they are written."""

Happening = Callable[[float], list[Action]]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    reason: str
    failed: bool


class Coordinator:
    """Implements `node.coordinator.control_service.Desk`."""

    def __init__(
        self,
        *,
        config: RunConfig,
        directory: Path,
        run_id: str,
        store: Store,
        desk: EnrolmentDesk,
        corpus: Corpus,
        emit: Emit,
        past: Past,
        untold: StepRecord | None = None,
    ) -> None:
        """`untold` is a step that an earlier coordinator committed and has not told of."""
        self.config = config
        self._directory = directory
        self._snapshots = directory / "snapshots"
        self._store = store
        self._desk = desk
        self._corpus = corpus
        self._emit = emit
        self._config_json = to_json(config)
        pipeline = config.pipeline
        self._machine = RunMachine(
            RunPlan(
                stages=pipeline.stages,
                total_steps=config.run.steps,
                snapshot_every=config.run.snapshot_every,
                silent_seconds=config.coordinator.silent_seconds,
                reconnect_seconds=RECONNECT_SECONDS,
                regroup_seconds=config.coordinator.regroup_seconds,
                min_stages=pipeline.min_stages or pipeline.stages,
                units=functools.partial(stage_units, config),
                stage_bytes=stage_needs(config, corpus.windows),
            ),
            self._plan,
            past,
        )
        self._narrator = Narrator(config, emit, untold)
        self._spans = TraceWriter(directory, 1_000_000 * config.telemetry.trace_mb)
        self._traced = bool(TracedSteps.parse(config.telemetry.trace))
        self._writer = SnapshotWriter(self._snapshots, config, run_id)
        self._events: asyncio.Queue[Happening] = asyncio.Queue()
        self._step_measured = asyncio.Event()
        self._window_work: tuple[int, Callable[[], Windows]] = (0, tuple)
        self._sessions: dict[str, ControlSession] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._wanted_snapshots: set[int] = set()
        self._outcome: Outcome | None = None

    @property
    def accounting(self) -> Accounting:
        """What the run's nodes have reported."""
        return self._narrator.accounting

    # ---- running

    async def run(self) -> Outcome:
        """Drive the run until it ends; sessions are closed when this returns."""
        async with asyncio.TaskGroup() as group:
            planner = group.create_task(self._follow_links())
            ticker = group.create_task(self._tick())
            tracer = group.create_task(self._write_traces())
            outcome = await self._act()
            ticker.cancel()
            tracer.cancel()
            planner.cancel()
        await self._say_goodbye(outcome)
        await asyncio.to_thread(self._spans.write, self._spans.take())
        self._narrator.finished(outcome.reason, failed=outcome.failed)
        return outcome

    def stop(self, reason: str) -> None:
        """End the run after this step and a snapshot; called again, end it now."""
        self._post(lambda now: self._machine.stop(reason, now))

    def save(self) -> None:
        """Take a snapshot after this step."""
        self._post(lambda _now: self._machine.save())

    async def _act(self) -> Outcome:
        while self._outcome is None:
            happening = await self._events.get()
            try:
                for action in happening(time.monotonic()):
                    await self._carry_out(action)
            except (RunError, OSError) as error:
                # The actions after the one that failed build on it: nobody may hear of them.
                for action in self._machine.fail(str(error)):
                    await self._carry_out(action)
                self._outcome = Outcome(reason=str(error), failed=True)
        return self._outcome

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._post(self._machine.tick)
            # The command that evicts writes into the database, from a process of its own.
            for node_id in await asyncio.to_thread(self._store.evicted):
                self._shut_out(node_id)

    def _plan_windows(self, epoch: int, costs: events.StepCosts) -> None:
        """Have windows planned from what a step cost; only the newest step counts."""
        accounting, machine = self._narrator.accounting, self._machine
        stages = len(costs.stages)
        measures = measured(
            costs, accounting.link_report, chunks_of(self.config, stages), self.config.microbatches
        )
        if measures is None or machine.epoch is None or machine.epoch.number != epoch:
            return
        members = [machine.members.get(stage.node_id) for stage in costs.stages]
        memory = [member.offer.memory_bytes if member is not None else 0 for member in members]
        devices = [member.offer.devices if member is not None else Devices() for member in members]
        current = machine.epoch.planned_windows

        def work() -> Windows:
            return plan_windows(
                measures,
                chunks=chunks_of(self.config, stages),
                microbatches=self.config.microbatches,
                most_held=most_held(self.config, stages, memory, self._corpus.windows, devices),
                current=current or (0,) * (stages - 1),
            )

        self._window_work = epoch, work
        self._step_measured.set()

    async def _follow_links(self) -> None:
        """Plan windows on a thread: simulating takes longer than the event loop may be held."""
        while True:
            await self._step_measured.wait()
            self._step_measured.clear()
            epoch, work = self._window_work
            windows = await asyncio.to_thread(work)
            self._post(functools.partial(self._use_windows, epoch, windows))

    def _use_windows(self, epoch: int, windows: Windows, _now: float) -> list[Action]:
        return self._machine.plan_windows(epoch, windows)

    def _shut_out(self, node_id: str) -> None:
        """An evicted node is out before it can complain of being refused."""
        if (session := self._sessions.get(node_id)) is not None:
            session.send(Finish(reason="you were evicted from this run by its operator", failed=True))
            self._post(functools.partial(self._machine.lost, node_id, "it was evicted"))

    async def _say_goodbye(self, outcome: Outcome) -> None:
        """Let every node hear how it ended before the connections close."""
        for node_id, session in self._sessions.items():
            if node_id not in self._machine.members:
                self._turn_away(session, outcome)
            session.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._deserted.wait()

    @staticmethod
    def _turn_away(session: ControlSession, outcome: Outcome) -> None:
        """For a node that the state machine has never seen: it came as the run ended."""
        session.send(Finish(reason=f"the run is over: {outcome.reason}", failed=outcome.failed))

    def _post(self, happening: Happening) -> None:
        self._events.put_nowait(happening)

    def _fail(self, reason: str) -> None:
        self._post(lambda _now: self._machine.fail(reason))

    def _plan(self, step: int, grad_norm: float) -> tuple[float, float]:
        training = self.config.training
        clip = clip_coefficient(grad_norm, training.clip)
        return clip, learning_rate(step, training, self.config.run.steps)

    # ---- actions

    async def _carry_out(self, action: Action) -> None:
        match action:
            case Send():
                if (session := self._sessions.get(action.node_id)) is not None:
                    session.send(action.message)
            case RecordPlacement():
                self._narrator.placed()
                hosts = zip(action.nodes, action.addresses, strict=True)
                placed = [PlacedNode(stage, node, address) for stage, (node, address) in enumerate(hosts)]
                await asyncio.to_thread(self._store.record_placement, action.epoch, placed)
            case RecordRestored():
                rates = {node: session.hello.download_rate for node, session in self._sessions.items()}
                self._narrator.restored(action, rates)
            case RecordCommit():
                await self._record_commit(action)
            case StepDone():
                costs = self._narrator.finish_step()
                if costs is not None and self.config.pipeline.window == "auto":
                    self._plan_windows(action.epoch, costs)
            case Announce():
                self._emit(events.Notice(text=action.text))
            case OpenSnapshot():
                self._wanted_snapshots.add(action.step)
            case Aborted():
                self._narrator.interrupted(action)
            case Released():
                if (session := self._sessions.get(action.node_id)) is not None:
                    session.close()
                self.accounting.forget(action.node_id)
                self._emit(events.NodeLeft(node_id=action.node_id, reason=action.reason))
            case Stop():
                self._outcome = Outcome(reason=action.reason, failed=action.failed)

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
            seconds=self._narrator.step_seconds,
            committed_at=time.time(),
        )
        outcome = await asyncio.to_thread(self._store.record_step, record)
        if outcome is StepOutcome.DIFFERS:
            self._emit(
                events.Notice(
                    text=f"step {commit.step + 1}, run again, gave another loss than before: the machines' "
                    "arithmetic differs, so this run cannot be reproduced bit for bit"
                )
            )
        self._narrator.committed(commit)
        faults.reach_coordinator(faults.Phase.COMMIT_APPLY, step=commit.step)

    # ---- what the control service asks

    async def refusal_for(self, node_id: str) -> Refusal | None:
        member = await asyncio.to_thread(self._store.member, node_id)
        if member is None:
            return Refusal(
                RefusalCode.NOT_A_MEMBER, f"{node_id} is no member of this run: join it with a token first"
            )
        if member.evicted is not None:
            self._shut_out(node_id)
            return Refusal(RefusalCode.EVICTED, f"{node_id} was evicted from this run by its operator")
        return None

    def opened(self, session: ControlSession) -> None:
        node_id, hello = session.node_id, session.hello
        if (older := self._sessions.get(node_id)) is not None:
            if older.hello.process_nonce != hello.process_nonce:
                # If it still runs, it must not come back and throw this one out in turn.
                older.send(Finish(reason="another process has joined as this node", failed=True))
            older.close()
        self._sessions[node_id] = session
        self._deserted.clear()
        session.send(
            Welcome(
                node_id=node_id,
                config_json=self._config_json,
                heartbeat_seconds=self.config.coordinator.heartbeat_seconds,
                windows=self._corpus.windows,
            )
        )
        if self._outcome is not None:
            self._turn_away(session, self._outcome)
            session.close()
            return

        def happening(now: float) -> list[Action]:
            known = self._machine.members.get(node_id)
            if known is None or known.process_nonce != hello.process_nonce:
                self._emit(
                    events.NodeJoined(node_id=node_id, device=hello.hardware.device, address=session.address)
                )
            return self._machine.hello(
                node_id,
                address=session.address,
                memory_bytes=hello.hardware.memory_bytes,
                devices=devices_of(hello.hardware),
                process_nonce=hello.process_nonce,
                epoch=hello.epoch,
                now=now,
            )

        self._post(happening)

    def heard(self, session: ControlSession, message: NodeMessage) -> None:
        node_id = session.node_id
        if self._sessions.get(node_id) is not session:
            return  # a newer session of this node is open, perhaps another process's; it is asked again there
        if isinstance(message, Ready | Applied | Heartbeat):
            self._narrator.report(node_id, message.telemetry)
        match message:
            case StepSpans():
                self._trace(node_id, message)
            case Heartbeat():
                session.answer(HeartbeatReply(sent_at=message.sent_at, at=time.time()))
                self._machine.heard(node_id, time.monotonic())
            case Leave():
                faults.reach_coordinator(faults.Phase.DRAIN)
                self._post(lambda now: self._machine.leave(node_id, now))
            case _:
                if isinstance(message, Vote):
                    faults.reach_coordinator(faults.Phase.VOTING, step=message.step)
                elif isinstance(message, Applied):
                    faults.reach_coordinator(faults.Phase.APPLY, step=message.step)
                self._post(lambda now: self._machine.message(node_id, message, now))

    def _trace(self, node_id: str, spans: StepSpans) -> None:
        """Keep what a stage did in a step, if it is that stage."""
        if self._traced and self.accounting.seats[spans.stage : spans.stage + 1] == (node_id,):
            self._spans.add(node_id, spans)

    async def _write_traces(self) -> None:
        while not self._spans.broken:
            await asyncio.sleep(TRACE_SECONDS)
            await asyncio.to_thread(self._spans.write, self._spans.take())
        log.warning("%s, the run goes on", self._spans.broken)

    def closed(self, session: ControlSession) -> None:
        node_id = session.node_id
        if self._sessions.get(node_id) is session:
            del self._sessions[node_id]
            if not self._sessions:
                self._deserted.set()
            self._post(lambda now: self._machine.disconnected(node_id, now))

    async def renew(self, node_id: str, csr_der: bytes) -> bytes | Refusal:
        return await asyncio.to_thread(self._desk.renew, node_id, csr_der)

    async def batch(self, node_id: str, step: int, *, labels: bool) -> bytes:
        epoch = self._machine.epoch
        entitled = epoch is not None and epoch.seats[-1 if labels else 0] == node_id
        if not entitled or step >= self.config.run.steps:
            raise ProtocolViolationError(f"{node_id} has no business with that batch of step {step}")
        faults.reach_coordinator(faults.Phase.FORWARD, step=step)
        tokens = await asyncio.to_thread(self._corpus.batch, step)
        wanted = tokens[:, 1:] if labels else tokens[:, :-1]
        return np.ascontiguousarray(wanted).astype("<i4").tobytes()

    async def layer(self, node_id: str, step: int, unit: str) -> bytes:
        self._check_unit(unit)
        faults.reach_coordinator(faults.Phase.STATE_FETCH, step=step)
        return await asyncio.to_thread(read_unit, snapshot_directory(self._snapshots, step), unit)

    def upload_limit(self, node_id: str, step: int, unit: str) -> int:
        self._check_unit(unit)
        if node_id not in self._machine.members:
            raise ProtocolViolationError(f"{node_id} is not in the run at present")
        if step not in self._wanted_snapshots:
            raise ProtocolViolationError(f"nobody asked for a snapshot of step {step}")
        cache = boundary_cache_bytes(self.config, self._corpus.windows)
        return most_state_bytes(self.config.model, unit) + cache

    async def store_layer(self, step: int, unit: str, data: bytes, digest: str) -> None:
        faults.reach_coordinator(faults.Phase.SNAPSHOT, step=step)
        try:
            manifest = await asyncio.to_thread(self._writer.put, step, unit, data, digest)
            if manifest is not None:
                await asyncio.to_thread(self._record_snapshot, manifest)
        except RunError as error:
            self._fail(str(error))
            raise
        if manifest is not None:
            path = str(snapshot_directory(self._snapshots, step))
            self._narrator.snapshot_stored(step, manifest.total_bytes, path, manifest.weights_sha256)
            self._post(lambda now: self._machine.snapshot_stored(step, now))

    # ---- inside

    def _record_snapshot(self, manifest: Manifest) -> None:
        self._store.record_snapshot(
            SnapshotRecord(
                step=manifest.step,
                manifest_sha256=hashlib.sha256(manifest.to_json().encode()).hexdigest(),
                bytes=manifest.total_bytes,
                complete=True,
                created=time.time(),
            )
        )
        for step in prune(self._snapshots, self.config.run.keep_snapshots):
            self._store.delete_snapshot(step)

    def _check_unit(self, unit: str) -> None:
        if unit not in unit_names(self.config.model):
            raise ProtocolViolationError(f"this model has no layer unit {unit[:40]!r}")
