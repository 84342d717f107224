"""A node in a run: its session with the coordinator, its compute thread, and the epoch it works on."""

import asyncio
import contextlib
import functools
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch

from node import faults
from node.config.schema import RunConfig
from node.pipeline.device_memory import devices_of
from node.pipeline.memory import stage_bytes
from node.run_file.loader import from_json
from node.stage.batches import Batches
from node.stage.coordinator_client import CoordinatorClient
from node.stage.epoch_links import EpochLinks
from node.stage.epoch_task import EpochTask, State
from node.stage.error_groups import first_error, in_short
from node.stage.executor import StageExecutor
from node.stage.inbox import Inbox
from node.stage.measure import NodeMeter
from node.stage.node_metrics import NodeMetrics
from node.stage.node_settings import IdentityHolder, NodeSettings
from node.stage.out_of_memory import exhausted, ran_out, room
from node.stage.session import Session
from node.stage.snapshot_cache import SnapshotCache
from node.stage.snapshot_transfer import SnapshotTransfer
from node.stage.stage_io import TensorLink
from node.stage.watchdog import StuckError, watch, watched
from node.telemetry.clock import StageClock, TimeKind
from node.telemetry.trace_files import TracedSteps
from wire.errors import DeviceLostError, LinkError, RunError, UserError
from wire.identity.enrolment import Refusal
from wire.link import LinkSettings
from wire.messages import (
    Abort,
    Applied,
    CoordinatorMessage,
    Finish,
    Heartbeat,
    HeartbeatReply,
    Hello,
    NodeMessage,
    Placement,
    Prefetch,
    Welcome,
)
from wire.spec import Direction
from wire.telemetry import Telemetry
from wire.version import PROTOCOL, VERSION

Result = TypeVar("Result")
log = logging.getLogger(__name__)

RENEW_RETRY_SECONDS = 10.0
FIRST_OUTAGE_SECONDS = 60.0
"""How long to look for the coordinator before it has said what the run's limit is."""
END_EPOCH_SECONDS = 30
"""How long the tasks of an epoch that is over may take to end."""
LEAVE_SECONDS = 120.0
"""How long a leaving node waits for the step, the snapshot and the coordinator's goodbye."""


class NodeRuntime:
    """Implements `node.stage.epoch_task.Services`; `run` returns when the run is over for this node."""

    executor: StageExecutor
    batches: Batches
    _snapshots: SnapshotTransfer

    def __init__(self, settings: NodeSettings, identity: IdentityHolder, tell: Callable[[str], None]) -> None:
        self.inbox = Inbox()
        self.elements_sent: dict[Direction, int] = {}
        self._settings = settings
        self._identity = identity
        self._metrics = NodeMetrics(
            node_id=identity.node_id, run_id=identity.current.run_id, device=settings.hardware.device
        )
        self._tell = tell
        self._client = CoordinatorClient(
            settings.control_address, lambda: identity.current, FIRST_OUTAGE_SECONDS, settings.pacer
        )
        self._meter = NodeMeter(settings.device, lambda direction: self.executor.codec_name(direction))
        self._links = EpochLinks(
            identity,
            LinkSettings(
                pacer=settings.pacer,
                frame_filter=faults.frame_filter(),
                on_transfer=self._meter.transferred,
            ),
        )
        self._session = Session(self._client, self._hello, self._handle)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._clock = StageClock()
        self._nonce = secrets.randbits(63)
        self._heartbeat_seconds = 0.0
        self._welcome: Welcome | None = None
        self._greeted = asyncio.Event()
        self._epoch: EpochTask | None = None
        self._epoch_task: asyncio.Task[None] | None = None
        self._download_rate = 0.0
        self._finish: Finish | None = None
        self._finished = asyncio.Event()
        self._leaving = False

    async def run(self) -> Finish:
        """Serve until the end of the run. Raises Refused, LinkLostError or RunError.

        After a StuckError, whatever else ended the run, the compute thread still runs, and the process will
        not end by itself.
        """
        stuck = broken = False
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                port = await self._links.start(self._settings.listen)
                self._download_rate = await self._client.measure_download()
                self._peer_address = self._settings.advertise or f":{port}"
                tasks = [
                    group.create_task(self._session.run()),
                    group.create_task(self._heartbeats()),
                    group.create_task(self._renew_certificate()),
                    group.create_task(watch(self._clock)),
                ]
                if self._settings.devices is not None:
                    tasks.append(group.create_task(self._settings.devices.watch()))
                await self._finished.wait()
                for task in tasks:
                    task.cancel()
                await self._session.close()
                if self._welcome is not None:
                    self._snapshots.cancel()
                await self._end_epoch()
            assert self._finish is not None
            return self._finish
        except BaseExceptionGroup as errors:
            stuck = errors.subgroup(StuckError) is not None
            reason = self._reason(errors)
            broken = isinstance(reason, (StuckError, DeviceLostError))
            await self._session.farewell(in_short(reason))
            raise reason from None
        finally:
            await self._session.close()
            self.inbox.interrupt("the node is stopping")
            await self._links.stop()
            await self._client.close()
            try:
                if not stuck:
                    await watched(self._clock, self.compute(lambda: None))
            except StuckError:
                stuck = broken = True
                raise
            finally:
                if self._settings.devices is not None:
                    close = functools.partial(self._settings.devices.close, broken=broken)
                    await (asyncio.to_thread if stuck else self.compute)(close)
                self._pool.shutdown(wait=not stuck)

    def _reason(self, errors: BaseExceptionGroup[BaseException]) -> BaseException:
        """The first of them; or one line, if memory did not suffice on one of the node's devices."""
        settings, first = self._settings, first_error(errors)
        device, there = settings.device, None
        if settings.devices is not None and (ended := settings.devices.exhausted()) is not None:
            device, there = ended
        elif errors.subgroup(ran_out) is not None:
            there = room(device)
        if there is None:
            return first
        offered = settings.hardware.memory_bytes
        if self._welcome is None or self.executor.stage < 0:
            return exhausted(device, there, offered=offered)
        executor = self.executor
        config = executor.config
        wide = replace(config, pipeline=replace(config.pipeline, window=executor.widest_window))
        stages = stage_bytes(
            wide, executor.stages, devices_of(settings.hardware), windows=self._welcome.windows
        )
        stage = executor.stage
        return exhausted(device, there, offered=offered, stage=stage, stages=len(stages), need=stages[stage])

    def leave(self, reason: str) -> None:
        """Ask the coordinator to let this node go; `run` returns once it has, or after a bounded wait."""
        if self._leaving:
            return
        self._leaving = True
        self._session.leave(reason)
        asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._leave_unheard)

    def _leave_unheard(self) -> None:
        """End without a goodbye, but not while this node's state is on its way to the coordinator."""
        if self._welcome is not None and self._snapshots.sending:
            asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._leave_unheard)
            return
        self._end(
            Finish(reason=f"the coordinator did not say goodbye within {LEAVE_SECONDS:g} s", failed=True)
        )

    # ---- services of an epoch

    def post(self, message: NodeMessage) -> None:
        self._session.post(message)
        if isinstance(message, Applied):
            for spans in self._meter.step_spans(message.epoch, message.step, self.executor.stage):
                self._session.post(spans)

    async def compute(self, work: Callable[[], Result]) -> Result:
        def counted() -> Result:
            with self._clock.spent(TimeKind.OPTIMIZER):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._pool, counted)

    async def fetch_layer(self, step: int, unit: str) -> bytes:
        return await self._snapshots.fetch(step, unit)

    def upload(self, epoch: int, step: int, state: State) -> None:
        if self._leaving:
            faults.reach(faults.Phase.DRAIN, stage=self.executor.stage, step=step)
        self._snapshots.upload(epoch, step, state, stage=self.executor.stage)

    def uploading(self, step: int) -> bool:
        return self._snapshots.uploading(step)

    def count_time(self) -> None:
        """Count time from here on; what came before the epoch's first step is nobody's step."""
        self._meter.count_time(self._clock)

    def telemetry(self) -> Telemetry:
        report = self._meter.telemetry(self._clock, self._links.totals(), self.elements_sent)
        epoch = self._epoch
        place = (-1, 0) if epoch is None else (epoch.stage, len(epoch.placement.stages))
        self._metrics.report(report, *place)
        return report

    def metrics(self) -> bytes:
        """What `GET /metrics` answers, up to date."""
        self.telemetry()
        return self._metrics.render()

    def open_links(
        self, task: EpochTask, peers: tuple[int, ...]
    ) -> contextlib.AbstractAsyncContextManager[Mapping[int, TensorLink]]:
        return self._links.open(task, peers, self.executor.config)

    # ---- the session

    def _hello(self) -> Hello:
        return Hello(
            version=VERSION,
            protocol=PROTOCOL,
            peer_address=self._peer_address,
            hardware=self._settings.hardware,
            flops=self._settings.flops,
            download_rate=self._download_rate,
            epoch=self._epoch.number if self._epoch is not None else 0,
            process_nonce=self._nonce,
        )

    async def _handle(self, message: CoordinatorMessage) -> None:
        match message:
            case Welcome():
                await self._greet(message)
            case Placement():
                if self._epoch is None or self._epoch.number != message.epoch:
                    await self._end_epoch()
                    self._begin_epoch(message)
                elif self._epoch is not None:
                    self._epoch.submit(message)
            case Abort():
                if self._epoch is not None and self._epoch.number == message.epoch:
                    self._tell(f"epoch {message.epoch} is over: {message.reason}")
                    await self._end_epoch()
            case HeartbeatReply():
                self._meter.sync.answer(sent=message.sent_at, received=time.monotonic(), at=message.at)
            case Finish():
                self._end(message)
            case Refusal():
                raise message.error()
            case Prefetch():
                self._snapshots.prefetch(message)
            case _:
                if self._epoch is not None and self._epoch.number == message.epoch:
                    self._epoch.submit(message)

    async def _greet(self, welcome: Welcome) -> None:
        if self._welcome is None:
            config = from_json(welcome.config_json)
            traced = TracedSteps.parse(config.telemetry.trace)
            self._meter.trace(traced)
            if traced:
                self._clock.record(self._meter.ring)
            # From here on the node lives, however long its devices take to start.
            self._heartbeat_seconds = welcome.heartbeat_seconds
            self._greeted.set()
            self.executor = await self.compute(lambda: self._make_executor(config, welcome.windows))
            settings, tag = self._settings, hashlib.sha256(welcome.config_json.encode()).hexdigest()[:16]
            self._snapshots = SnapshotTransfer(
                config=config,
                windows=welcome.windows,
                client=self._client,
                cache=SnapshotCache(settings.cache_directory, settings.cache_bytes, tag),
                group=self._group,
                post=self.post,
                tell=self._tell,
            )
            self.batches = Batches(config, self._client, self._group)
            self._client.outage_seconds = config.coordinator.outage_seconds
            self._welcome = welcome
            self._tell(f"joined run {config.run.name} as {welcome.node_id}; waiting for a stage")
        elif self._welcome.config_json != welcome.config_json:
            raise RunError("the coordinator came back with another run file: join again")

    def _make_executor(self, config: RunConfig, windows: int) -> StageExecutor:
        """On the compute thread."""
        if self._settings.device.type == "cuda":
            # Triton launches on the thread's device, wherever the tensors are.
            torch.cuda.set_device(self._settings.device)
        devices = self._settings.devices
        model = None if devices is None else devices.start(config)
        executor = StageExecutor(config, self._settings.device, self._clock, windows=windows, model=model)
        executor.rehearse()
        return executor

    def _begin_epoch(self, placement: Placement) -> None:
        self._meter.begin_epoch(placement.epoch, self.elements_sent)
        self._epoch = EpochTask(placement, self)
        self._epoch_task = self._group.create_task(self._epoch.run())
        self._tell(f"stage {placement.stage} of {len(placement.stages)} in epoch {placement.epoch}")

    async def _end_epoch(self) -> None:
        """Stop the epoch's task; its step ends at the next tensor, before the next epoch's first work."""
        task, self._epoch, self._epoch_task = self._epoch_task, None, None
        if task is None:
            return
        self.inbox.interrupt("the epoch is over")
        for _ in range(END_EPOCH_SECONDS):
            # Before Python 3.13 a cancellation that meets a failing child of a task group may be forgotten.
            task.cancel()
            await asyncio.wait([task], timeout=1)
            if task.done():
                break
        else:
            raise RunError(f"the stage did not let go within {END_EPOCH_SECONDS} s: start this node again")

    def _end(self, finish: Finish) -> None:
        if self._finish is None:
            self._finish = finish
            self._finished.set()

    # ---- in the background

    async def _heartbeats(self) -> None:
        await self._greeted.wait()
        while True:
            # The first one at once: it is also how the node learns what the coordinator's clock says.
            self.post(Heartbeat(telemetry=self.telemetry(), sent_at=time.monotonic()))
            await asyncio.sleep(self._heartbeat_seconds)

    async def _renew_certificate(self) -> None:
        """Renew at a point of the certificate's life that the node id decides; try again until it works.

        Raises LinkError if this machine's clock is wrong: by one far ahead every certificate needs renewal.
        """
        while True:
            await asyncio.sleep(max(RENEW_RETRY_SECONDS, self._identity.current.renewal_time - time.time()))
            try:
                pem = await self._client.renew(self._identity.current.csr_der())
            except LinkError as error:
                log.warning("the certificate was not renewed: %s", error)
                continue
            renewed = self._identity.current.renewed(pem)
            renewed.check_clock(time.time())
            try:
                await asyncio.to_thread(self._identity.replace, renewed)
            except (OSError, UserError) as error:
                # It is in use; a process that starts here finds the one before.
                log.warning("the renewed certificate was not kept on disk: %s", error)
