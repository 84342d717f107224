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
from collections.abc import Callable, Sequence
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
from node.coordinator.plan import Past, RunPlan
from node.coordinator.records import PlacedNode, SnapshotRecord, StepOutcome, StepRecord
from node.coordinator.recovery import Recovery
from node.coordinator.store import Store
from node.model.placement import stage_bytes, stage_units
from node.model.units import most_state_bytes, unit_names, unit_parameters
from node.telemetry import events
from node.training.data import Corpus
from node.training.manifest import Manifest
from node.training.schedule import clip_coefficient, learning_rate
from node.training.snapshot import SnapshotWriter, prune, read_unit, snapshot_directory
from wire.errors import ProtocolViolationError, RefusalCode, RunError
from wire.identity.enrolment import Refusal
from wire.messages import Applied, Finish, Heartbeat, Leave, NodeMessage, Ready, Vote, Welcome
from wire.spec import Direction

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 1.0
TICK_SECONDS = 0.25
GOODBYE_SECONDS = 5.0

Emit = Callable[[events.Event], None]
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
    ) -> None:
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
                stage_bytes=functools.partial(stage_bytes, config),
            ),
            self._plan,
            past,
        )
        self._accounting = Accounting()
        self._recovery = Recovery()
        self._writer = SnapshotWriter(self._snapshots, config, run_id)
        self._events: asyncio.Queue[Happening] = asyncio.Queue()
        self._sessions: dict[str, ControlSession] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._wanted_snapshots: set[int] = set()
        self._outcome: Outcome | None = None
        self._step_began = 0.0
        self._commit: RecordCommit | None = None
        """The newest commit that no `StepDone` has followed yet."""
        self._tally = _Tally()

    # ---- running

    async def run(self) -> Outcome:
        """Drive the run until it ends; sessions are closed when this returns."""
        async with asyncio.TaskGroup() as group:
            ticker = group.create_task(self._tick())
            outcome = await self._act()
            ticker.cancel()
        await self._say_goodbye(outcome)
        self._emit(events.RunFinished(reason=outcome.reason, failed=outcome.failed, summary=self._summary()))
    def save(self) -> None:
        """Take a snapshot after this step."""
        self._post(lambda _now: self._machine.save())

        return outcome

    def stop(self, reason: str) -> None:
        """End the run after this step and a snapshot; called again, end it now."""
        self._post(lambda now: self._machine.stop(reason, now))

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
                self._recovery.placed(time.monotonic())
                hosts = zip(action.nodes, action.addresses, strict=True)
                placed = [PlacedNode(stage, node, address) for stage, (node, address) in enumerate(hosts)]
                await asyncio.to_thread(self._store.record_placement, action.epoch, placed)
            case RecordRestored():
                self._restored(action)
            case RecordCommit():
                await self._record_commit(action)
            case StepDone():
                self._finish_step(action.nodes)
            case Announce():
                self._emit(events.Notice(text=action.text))
            case OpenSnapshot():
                self._wanted_snapshots.add(action.step)
            case Aborted():
                self._recovery.interrupted(time.monotonic())
                self._emit(events.StepAborted(epoch=action.epoch, step=action.step + 1, reason=action.reason))
            case Released():
                if (session := self._sessions.get(action.node_id)) is not None:
                    session.close()
                self._emit(events.NodeLeft(node_id=action.node_id, reason=action.reason))
            case Stop():
                self._outcome = Outcome(reason=action.reason, failed=action.failed)

    async def _record_commit(self, commit: RecordCommit) -> None:
        seconds = time.monotonic() - self._step_began
        training, model = self.config.training, self.config.model
        record = StepRecord(
            step=commit.step,
            epoch=commit.epoch,
            loss=commit.loss,
            grad_norm=commit.grad_norm,
            lr=commit.lr,
            clip=commit.clip_coefficient,
            tokens=training.global_batch * model.sequence,
            seconds=seconds,
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
        self._commit = commit
        faults.reach_coordinator(faults.Phase.COMMIT_APPLY, step=commit.step)

    def _restored(self, restored: RecordRestored) -> None:
        commit = self._commit
        if commit is not None and restored.step == commit.step + 1:
            # The epoch that committed it ended before every stage had said so.
            self._finish_step(restored.nodes)
        self._commit = None
        self._accounting.begin_epoch(restored.nodes)
        self._emit(
            events.PlacementMade(epoch=restored.epoch, nodes=restored.nodes, resume_step=restored.step)
        )
        self._tell_recovery(restored.nodes, restored.step)
        self._step_began = time.monotonic()

    def _tell_recovery(self, seats: Sequence[str], step: int) -> None:
        stages = stage_units(self.config, len(seats))
        parameters = (sum(unit_parameters(self.config.model, unit) for unit in units) for units in stages)
        rates = [self._sessions[node].hello.download_rate for node in seats if node in self._sessions]
        # Weights and two moments in float32.
        state_bytes, rate = 3 * 4 * max(parameters), min(rates, default=0.0)
        line = self._recovery.over(step=step, now=time.monotonic(), state_bytes=state_bytes, rate=rate)
        if line is not None:
            self._emit(events.Notice(text=line))

    def _finish_step(self, nodes: Sequence[str]) -> None:
        commit = self._commit
        now = time.monotonic()
        seconds, self._step_began = now - self._step_began, now
        if commit is None:
            return
        self._commit = None
        cost = self._accounting.step(nodes, seconds)
        tokens = self.config.training.global_batch * self.config.model.sequence
        self._tally.add(commit.loss, tokens, seconds)
        self._emit(
            events.StepDone(
                step=commit.step + 1,
                steps=self.config.run.steps,
                loss=commit.loss,
                lr=commit.lr,
                grad_norm=commit.grad_norm,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                idle=cost.idle,
                bits_forward=cost.bits_forward,
                bits_backward=cost.bits_backward,
                up_mbit=cost.up_mbit,
                down_mbit=cost.down_mbit,
            )
        )

    def _summary(self) -> events.RunSummary | None:
        tally, links = self._tally, self._accounting.links
        if tally.steps == 0:
            return None
        return events.RunSummary(
            steps=tally.steps,
            first_loss=tally.first_loss,
            last_loss=tally.last_loss,
            tokens=tally.tokens,
            seconds=tally.seconds,
            tokens_per_second=tally.tokens / tally.seconds,
            link_bytes=links.bytes_sent,
            link_bytes_fp32=4 * links.elements,
            link_bytes_bf16=2 * links.elements,
            bits_forward=links.bits(Direction.ACTIVATION),
            bits_backward=links.bits(Direction.GRADIENT),
            stages=self._accounting.stage_times(),
            snapshot_path=tally.snapshot_path,
            weights_sha256=tally.weights_sha256,
        )

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
            self._accounting.report(node_id, message.telemetry)
        match message:
            case Heartbeat():
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
        return most_state_bytes(self.config.model, unit)

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
            self._emit(
                events.SnapshotStored(step=step, bytes=manifest.total_bytes, path=self._tally.snapshot_path)
            )
            self._post(lambda now: self._machine.snapshot_stored(step, now))

    # ---- inside

    def _record_snapshot(self, manifest: Manifest) -> None:
        directory = snapshot_directory(self._snapshots, manifest.step)
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
        self._tally.snapshot_path = str(directory)
        self._tally.weights_sha256 = manifest.weights_sha256

    def _check_unit(self, unit: str) -> None:
        if unit not in unit_names(self.config.model):
            raise ProtocolViolationError(f"this model has no layer unit {unit[:40]!r}")


@dataclass
class _Tally:
    """What this process has seen of the run."""

    steps: int = 0
    first_loss: float = 0.0
    last_loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    snapshot_path: str = ""
    weights_sha256: str = ""

    def add(self, loss: float, tokens: int, seconds: float) -> None:
        if self.steps == 0:
            self.first_loss = loss
        self.last_loss = loss
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
