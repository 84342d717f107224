"""A node's life with its coordinator: listen, connect, serve the run as a member, leave.

`NodeRuntime` is the session. The coordinator's welcome says which run it is; from it the session builds a
`RunMember`, which holds the stage.
"""

import asyncio
import functools
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from node.config.join_options import OwnerAllows
from node.config.schema import PLANNED, RunConfig
from node.run_file.loader import from_json
from node.schedule.placement import slices_of, stage_units
from node.stage.block_measure import block_seconds, measured_times
from node.stage.coordinator_client import Batches, CoordinatorClient
from node.stage.epoch_links import EpochLinks
from node.stage.executor import StageExecutor
from node.stage.give_way import GiveWay
from node.stage.layer_peers import LayerPeers, LayersHeld
from node.stage.machine_info import cannot_compute
from node.stage.measure import NodeMeter
from node.stage.node_metrics import NodeMetrics
from node.stage.out_of_memory import device_memory_text, exhausted, ran_out
from node.stage.packing_meter import PackingMeter
from node.stage.processes import StageDevices
from node.stage.progress import LOOK_SECONDS, Progress, Reading, Shows, page_address
from node.stage.run_member import RunMember, RunMessage
from node.stage.self_test import prepared, words_of
from node.stage.session import IdentityHolder, Session, renew_certificates, short_reason
from node.stage.snapshot_transfer import SnapshotTransfer, check_store
from node.stage.sums_kept import SumsKept
from node.stage.watchdog import ComputeThread, StuckError
from node.state.snapshot_cache import SnapshotCache
from node.telemetry import points
from node.telemetry.clock import TimeKind
from node.telemetry.trace_files import TracedSteps
from node.tuning.block_times import BlockTimes
from node.tuning.device_memory import devices_of
from node.tuning.memory_plan import Room, short_of_memory
from wire.errors import DeviceLostError, RunError, first_error
from wire.identity.enrolment import Hardware, Refusal
from wire.identity.names import join_address
from wire.interfaces import dialled_from_anywhere
from wire.layer_exchange import LayerServer
from wire.line_meter import Line
from wire.link import LinkSettings
from wire.messages import (
    RELAY_LEFT,
    AskHeartbeat,
    BlockTime,
    CoordinatorMessage,
    Finish,
    Heartbeat,
    HeartbeatReply,
    Hello,
    PeerRate,
    PlacedStage,
    Placement,
    Prefetch,
    ProbePeer,
    RelayFor,
    Relays,
    RelayTimes,
    ShutOut,
    Welcome,
)
from wire.pacing import BesideTraining, Pacer
from wire.peer_probe import ProbeServer
from wire.port_mapping import MappedPort, routers_to_ask
from wire.telemetry import Telemetry, relay_path
from wire.version import PROTOCOL, VERSION

FIRST_OUTAGE_SECONDS = 60.0
"""The seconds to try to reach the coordinator, until its welcome gives the run's limit."""
LEAVE_SECONDS = 120.0
"""The seconds that a leaving node waits for the step, the snapshot and the coordinator's goodbye."""
LEAVE_IDLE_SECONDS = 2.0
"""The seconds that a leaving node without a stage waits. It holds no state."""
MOST_PAUSE = 60.0
"""The most seconds between two heartbeats, even if the coordinator asks for more."""
COMPUTING = TimeKind.FORWARD, TimeKind.BACKWARD, TimeKind.OPTIMIZER
SUMS_PART = 4
"""The divisor that gives the part of the snapshots' disk space for gradients that followers fetch."""


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """The resolved options of one node process."""

    control_address: str
    listen: str
    """host:port for neighbours' connections; empty: do not listen."""
    advertise: str
    name: str = ""
    """The name that its owner chose."""
    devices: StageDevices
    hardware: Hardware
    flops: float
    cache_directory: Path
    cache_bytes: int
    """The most bytes of snapshots on disk."""
    allows: OwnerAllows
    relay_rate: float = 0.0
    """The bytes per second that it relays for others; 0: it does not relay."""
    maps_port: bool = True
    """Whether routers may be asked to forward a port to this node."""
    pacer: Pacer | None = None
    """Limits the bandwidth, if the machine's owner asked for it."""
    give_way: GiveWay | None = None
    """Pauses while other programs use the GPU, if the owner asked for it."""


class NodeRuntime:
    """One node process. `run` returns when the run is over for this node. Create it on the event loop."""

    def __init__(self, settings: NodeSettings, identity: IdentityHolder, tell: Shows) -> None:
        """`tell` shows the volunteer what the node is doing."""
        self._settings = settings
        self._identity = identity
        self._tell = tell
        self._metrics = NodeMetrics(
            node_id=identity.node_id, run_id=identity.current.run_id, device=settings.hardware.device
        )
        self._client = CoordinatorClient(
            settings.control_address, lambda: identity.current, FIRST_OUTAGE_SECONDS, settings.pacer
        )
        line = Line(settings.pacer.rate if settings.pacer is not None else 0.0)
        self._compute = ComputeThread()
        self._meter = NodeMeter(self._compute.clock, settings.devices.first, line, self._metrics)
        self._links = EpochLinks(
            identity,
            LinkSettings(
                pacer=settings.pacer,
                line=line,
                frame_filter=points.frame_filter,
                on_transfer=self._meter.transferred,
                on_relay_left=self._relay_left,
            ),
            settings.control_address,
            settings.relay_rate,
        )
        self._beside = BesideTraining(settings.pacer, lambda: self._links.busy)
        self._mapped = MappedPort((), tell)
        self._peers = LayerPeers(identity)
        self.progress = Progress(tell=tell)
        self._client.layer_bytes_came = self._peers.bytes_came = self.progress.came
        self._session = Session(self._client)
        self._tasks: list[asyncio.Task[None]] = []
        self._finish: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        self._measured = asyncio.Event()
        """Set while this node measures nothing on its processor, so that other work may use it."""
        self._measuring = False
        """Whether a line to another node is being measured."""
        self._heartbeat_pause = 0.0
        """The seconds until the next heartbeat, from the coordinator's newest answer; 0: from its welcome."""
        self._sums: SumsKept | None = None
        self._snapshots: SnapshotTransfer | None = None
        self._joining: asyncio.Task[None] | None = None
        """Measures and compiles. `_member` exists once it is done."""
        self._member: RunMember | None = None
        self._packing: PackingMeter | None = None
        """Built when the coordinator's welcome arrives."""
        self._config_json = ""

    async def run(self) -> Finish:
        """Serve until the end of the run. Raises Refused, LinkLostError or RunError.

        After a StuckError, whatever ended the run, the compute thread still runs, so the process does not end
        by itself.
        """
        stuck = broken = False
        devices = self._settings.devices
        try:
            async with asyncio.TaskGroup() as group:
                port = await self._links.start(self._settings.listen)
                self._meter.relay = self._links.relay
                self._tell.now("measuring the line to the coordinator")
                async with asyncio.TaskGroup() as measuring:
                    measuring.create_task(self._map_port(port))
                    rate = measuring.create_task(self._client.measure_download())
                hello = self._hello(port, rate.result())
                session = self._session.run(
                    lambda: replace(
                        hello,
                        epoch=0 if self._member is None else self._member.epoch,
                        mapped_port=self._mapped.outside,
                    ),
                    functools.partial(self._handle, group),
                )
                work = session, renew_certificates(self._identity, self._client), self._mapped.keep()
                watching = self._compute.watch(), devices.watch(), self._show_progress()
                for background in (*work, *watching):
                    self._tasks.append(group.create_task(background))
                await asyncio.wait([self._finish])
                for task in self._tasks:
                    task.cancel()
                await self._session.close()
                if self._snapshots is not None:
                    self._snapshots.cancel()
                if self._member is not None:
                    await self._member.end()
            return self._finish.result()
        except BaseExceptionGroup as errors:
            stuck = errors.subgroup(StuckError) is not None
            reason = self._reason(errors)
            broken = isinstance(reason, (StuckError, DeviceLostError))
            await self._session.farewell(short_reason(reason))
            raise reason from None
        finally:
            await self._session.close()
            if self._member is not None:
                self._member.inbox.interrupt("the node is stopping")
            await self._mapped.close()
            await self._links.stop()
            await self._peers.close()
            await self._client.close()
            try:
                if not stuck:
                    await self._compute.finish()
            except StuckError:
                stuck = broken = True
                raise
            finally:
                close = functools.partial(devices.close, broken=broken)
                await (asyncio.to_thread if stuck else self._compute.run)(close)
                self._compute.shutdown(wait=not stuck)
                if self._sums is not None:
                    await asyncio.to_thread(self._sums.close)

    def leave(self, reason: str) -> None:
        """Ask the coordinator to let this node go. `run` returns then, or after a bounded wait."""
        if self._session.leaving:
            return
        self._session.leave(reason)
        seconds = LEAVE_SECONDS if self.holds_state else LEAVE_IDLE_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._leave_without_goodbye, seconds)

    @property
    def holds_state(self) -> bool:
        """Whether this node has a stage, whose state it must hand in before it leaves."""
        return self._member is not None and self._member.epoch > 0

    def metrics(self) -> bytes:
        """The current body of `GET /metrics`."""
        self._telemetry()
        return self._metrics.render()

    def _leave_without_goodbye(self, waited: float) -> None:
        """End now, unless this node has got a stage or still sends its state to the coordinator."""
        again = self._snapshots is not None and self._snapshots.sending
        if again or (waited < LEAVE_SECONDS and self.holds_state):
            loop = asyncio.get_running_loop()
            loop.call_later(LEAVE_SECONDS, self._leave_without_goodbye, LEAVE_SECONDS)
            return
        if not self.holds_state:
            self._end(Finish(reason="you have left the run; this node held none of its state", failed=False))
            return
        self._end(
            Finish(reason=f"the coordinator did not say goodbye within {LEAVE_SECONDS:g} s", failed=True)
        )

    def _end(self, finish: Finish) -> None:
        if not self._finish.done():
            self._finish.set_result(finish)

    def _reason(self, errors: BaseExceptionGroup[BaseException]) -> BaseException:
        """The first error; or a line about memory if one of the node's devices ran out of it."""
        device, on_device = self._settings.devices.first, None
        if (ended := self._settings.devices.exhausted()) is not None:
            device, on_device = ended
        elif errors.subgroup(ran_out) is not None:
            on_device = device_memory_text(device)
        if on_device is None:
            return first_error(errors)
        if self._member is None:
            return exhausted(device, on_device, offered=self._settings.hardware.memory_bytes)
        return self._member.exhausted(device, on_device)

    # ---- the coordinator's messages

    def _hello(self, port: int, download_rate: float) -> Hello:
        return Hello(
            version=VERSION,
            protocol=PROTOCOL,
            peer_address=self._settings.advertise or (f":{port}" if port else ""),
            hardware=self._settings.hardware,
            flops=self._settings.flops,
            download_rate=download_rate,
            epoch=0,
            process_nonce=secrets.randbits(63),
            name=self._settings.name,
            relay_rate=self._settings.relay_rate if port else 0.0,
            also=self._further_addresses(port),
        )

    def _further_addresses(self, port: int) -> tuple[str, ...]:
        """Addresses that neighbours may dial besides the one that the coordinator sees."""
        host = self._settings.listen.rpartition(":")[0]
        if not port or self._settings.advertise or host not in ("0.0.0.0", "[::]"):
            return ()
        return tuple(join_address(host, port) for host in dialled_from_anywhere())

    async def _handle(self, group: asyncio.TaskGroup, message: CoordinatorMessage) -> None:
        match message:
            case Welcome():
                await self._welcomed(group, message)
            case HeartbeatReply():
                self._meter.sync.answer(sent=message.sent_at, received=time.monotonic(), at=message.at)
                self._heartbeat_pause = min(message.pause, MOST_PAUSE)
            case AskHeartbeat():
                self._heartbeat()
            case Relays():
                self._tasks.append(group.create_task(self._measure_relays(message)))
            case ProbePeer():
                self._tasks.append(group.create_task(self._measure_line(message.peer)))
            case RelayFor():
                if self._links.relay is not None:
                    self._links.relay.allow(message.nodes)
            case ShutOut():
                self._links.shut_out(message.node_ids)
            case Finish():
                self._end(message)
            case Refusal():
                raise message.error()
            case _:
                await self._for_member(message)

    async def _for_member(self, message: RunMessage | Prefetch) -> None:
        """Handle a message for the member. Fetch a stage's weights while the node measures and compiles."""
        if self._joining is None or self._snapshots is None:
            return
        if isinstance(message, Prefetch):
            await self._measured.wait()
            self._snapshots.prefetch(message)
            return
        if isinstance(message, Placement) and (units := self._first_units(message)):
            await self._measured.wait()
            self._snapshots.prefetch(Prefetch(step=0, units=units))
        await asyncio.wait([self._joining])
        if self._member is not None:
            await self._member.handle(message)

    def _first_units(self, placement: Placement) -> tuple[str, ...]:
        """The layer units of a stage that begins with the checkpoint's weights."""
        config = from_json(self._config_json)
        if not config.model.from_ or not (placement.epoch == 1 or config.lora.rank):
            return ()
        return tuple(stage_units(config, len(placement.stages))[placement.stage])

    async def _welcomed(self, group: asyncio.TaskGroup, welcome: Welcome) -> None:
        """Become a member of the run. A welcome after a reconnect must be for the same run."""
        if self._config_json:
            if self._config_json != welcome.config_json:
                raise RunError("the coordinator returned with another run file: join again")
            if self._joining is not None:
                await asyncio.wait([self._joining])
            if self._snapshots is not None and self._member is not None:
                self._snapshots.offer()
                self._member.batches.forget()
            if self._packing is not None:
                self._packing.forget_told()
            return
        self._config_json = welcome.config_json
        config = from_json(welcome.config_json)
        if line := cannot_compute(config.training, self._settings.devices.first):
            raise RunError(line)
        if config.training.precision == PLANNED:
            # The coordinator ends this connection once it has decided, and the next welcome has the result.
            self._tasks.append(group.create_task(self._heartbeats(welcome.heartbeat_seconds)))
            self.progress.idle("waiting for the run's other machines, on which its precision depends")
            return
        if config.sync.every > 1 and self._settings.hardware.devices > 1:
            raise RunError(
                "this run takes local steps ([sync] every), which need one device per node: join each device "
                "as a separate node with `thinwire join --gpus 1`"
            )
        check_store(config.snapshots.keep, self._settings.allows.store)
        traced = TracedSteps.parse(config.telemetry.trace)
        self._meter.trace(traced)
        if traced:
            self._compute.clock.record(self._meter.ring)
        # Before the devices start, which may take long.
        self._tasks.append(group.create_task(self._heartbeats(welcome.heartbeat_seconds)))
        cache = SnapshotCache(self._settings.cache_directory, self._settings.cache_bytes)
        snapshots = self._snapshots = SnapshotTransfer(
            config=config,
            windows=welcome.windows,
            client=self._client,
            cache=cache,
            peers=self._peers,
            allows=self._settings.allows,
            pacer=self._settings.pacer,
            group=group,
            post=self._session.post,
            tell=self._tell,
        )
        self._joining = group.create_task(self._join(group, config, welcome, cache, snapshots))
        self._tasks.append(self._joining)

    async def _join(
        self,
        group: asyncio.TaskGroup,
        config: RunConfig,
        welcome: Welcome,
        cache: SnapshotCache,
        snapshots: SnapshotTransfer,
    ) -> None:
        self.progress.doing("testing the device")
        if words := words_of(await self._compute.run(lambda: self._test_device(config))):
            self._tell(words)
        hardware = self._settings.hardware
        times = None
        on_gpu = self._settings.devices.first.type == "cuda"
        if on_gpu:
            self._measured.set()
        # For most stages main memory suffices, and there is nothing to choose.
        chooses = on_gpu or short_of_memory(config, devices_of(hardware), hardware.memory_bytes)
        if hardware.devices == 1 and chooses:
            # Each of several devices would measure other times and plan another stage.
            self.progress.doing("measuring a block")
            times = await self._compute.run(lambda: measured_times(config, self._settings.devices.first))
        if config.pipeline.measures_places:
            self._links.serve_probes(ProbeServer(self._beside.pass_through))
            self.progress.doing("measuring a block")
            took = await self._compute.run(lambda: self._block_seconds(config, times))
            self._session.post(BlockTime(seconds=took))
        self._measured.set()
        room = Room(
            devices=devices_of(hardware),
            memory_bytes=hardware.memory_bytes,
            windows=welcome.windows,
            times=times,
        )
        self.progress.joined(config.run.steps)
        self.progress.doing("compiling codecs")
        executor = await self._compute.run(lambda: self._make_executor(config, room))
        self._packing = executor.packing
        self._client.outage_seconds = config.coordinator.outage_seconds
        # Outside the snapshots' directory, where unknown entries are removed.
        at = self._settings.cache_directory
        sums = self._sums = SumsKept(at.with_name(f"{at.name}-sums"), self._settings.cache_bytes // SUMS_PART)
        held = LayersHeld(cache, sums, self._beside)
        self._links.serve_layers(LayerServer(held))
        self._member = RunMember(
            executor,
            session=self._session,
            batches=Batches(config, self._client, group),
            links=self._links,
            snapshots=snapshots,
            sums=sums,
            compute=self._compute,
            meter=self._meter,
            group=group,
            progress=self.progress,
        )
        snapshots.offer()
        self._tell(f"joined run {config.run.name} as {welcome.node_id}; waiting for a stage")
        if page := page_address(config, self._settings.control_address):
            self._tell(f"the run's page: {page}")
        self.progress.idle("waiting for a stage")

    def _test_device(self, config: RunConfig) -> tuple[str, ...]:
        """Test the device, on the compute thread."""
        at = self._settings.cache_directory
        return prepared(config, self._settings.devices.first, at.with_name("self_test.json"))

    def _make_executor(self, config: RunConfig, room: Room) -> StageExecutor:
        """Create the executor, on the compute thread."""
        device = self._settings.devices.first
        if device.type == "cuda":
            # Triton launches on the thread's current device, wherever the tensors are.
            torch.cuda.set_device(device)
        model = self._settings.devices.start(config, room)
        executor = StageExecutor(config, device, self._compute.clock, model, room=room)
        executor.give_way = self._settings.give_way
        executor.compile_codecs()
        return executor

    async def _map_port(self, port: int) -> None:
        """Let the router forward a port to this one, where that may help."""
        settings = self._settings
        if port and settings.maps_port and not settings.advertise:
            routers = await routers_to_ask(settings.listen, settings.control_address)
            self._mapped = MappedPort(routers, self._tell)
            await self._mapped.open(port)

    async def _measure_relays(self, message: Relays) -> None:
        others = [relay for relay in message.relays if relay.node_id != self._identity.node_id]
        self._session.post(RelayTimes(times=await self._links.round_trips(others)))

    def _relay_left(self, path: str) -> None:
        relay = path.removeprefix(relay_path(""))
        if relay != path:  # a volunteer's relay
            self._tell(f"a link left the relay of node {relay}: another path is much faster")
            self._session.post(RelayTimes(times={relay: RELAY_LEFT}))

    def _block_seconds(self, config: RunConfig, times: BlockTimes | None) -> float:
        """The seconds of a block, measured on the compute thread. Several devices share a block or the
        microbatch's samples."""
        device, count = self._settings.devices.first, self._settings.hardware.devices
        if times is None:
            return block_seconds(config, device) / count
        return slices_of(config) * (times.forward + times.backward) / count

    async def _measure_line(self, peer: PlacedStage) -> None:
        """Measure the line to a node. The coordinator asks for the next after the answer."""
        line = None
        if not self._measuring:
            self._measuring = True
            try:
                line = await self._peers.measure_line(peer, self._beside.pass_through)
            finally:
                self._measuring = False
        rate = PeerRate(node_id=peer.node_id)
        if line is not None:
            rate = replace(rate, round_trip=line.round_trip, up=line.up, down=line.down)
        self._session.post(rate)

    async def _heartbeats(self, seconds: float) -> None:
        while True:
            # Send the first one now, because its answer also gives the coordinator's clock.
            self._heartbeat()
            if self._packing is not None and (news := self._packing.news()) is not None:
                self._session.post(news)
            await asyncio.sleep(self._heartbeat_pause or seconds)

    def _heartbeat(self) -> None:
        beat = Heartbeat(
            telemetry=self._telemetry(),
            sent_at=time.monotonic(),
            preparing=self._joining is not None and not self._joining.done(),
            awaited=None if self._member is None else self._member.inbox.awaited,
        )
        self._session.post(beat)

    async def _show_progress(self) -> None:
        while True:
            clock = self._compute.clock.snapshot()
            links = self._links.figures().values()
            self.progress.read(
                Reading(
                    computing=sum(clock.get(kind, 0.0) for kind in COMPUTING),
                    sent=sum(link.bytes for link in links),
                    received=sum(link.bytes_received for link in links),
                )
            )
            if any(line := self.progress.line()):
                self._tell.now(*line)
            await asyncio.sleep(LOOK_SECONDS)

    def _telemetry(self) -> Telemetry:
        if self._member is not None:
            return self._member.telemetry()
        return self._meter.telemetry({}, lambda _: "")
