"""Members of a run without a model: `python -m scripts.bench.light_nodes TOKEN FOLDER COUNT EVERY`.

COUNT members in one process, one enrolled every EVERY seconds. They keep a control session by the program's
own client, send heartbeats, take places, compute groups one after the other, save snapshots and follow the
run. To fetch a state takes them as long as a step. Orders come as lines of JSON on stdin: `{"step_seconds":
S}` changes how long a step takes them (the first order lets them end their first step), `{"kill": N, "back":
S}` ends a member without a goodbye and starts it again after so many seconds, and `{"gone": NODE}` lets those
that have a link to it say so. Events go to stdout.
"""

import asyncio
import json
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from node.config.schema import RunConfig
from node.model.units import unit_names
from node.processes.enrol import enrol
from node.run_file.loader import from_json
from node.schedule.gradient_groups import GroupTree
from node.schedule.placement import stage_units
from node.stage.coordinator_client import CoordinatorClient
from node.stage.session import Session
from node.telemetry.clock import TimeKind
from wire import event_loop
from wire.errors import LinkError, ThinwireError
from wire.figures import FlowFigures, LinkFigures
from wire.identity.enrolment import Hardware
from wire.identity.token import JoinToken
from wire.messages import (
    DIGEST_BYTES,
    NODES,
    Abort,
    Applied,
    Begin,
    BoundaryEnd,
    Commit,
    CoordinatorMessage,
    Finish,
    Follow,
    Following,
    FollowStep,
    GroupDigests,
    HandedOver,
    Heartbeat,
    HeartbeatReply,
    HeldLayer,
    Hello,
    PeerSilent,
    Placed,
    Placement,
    Prefetch,
    Ready,
    Restore,
    Seat,
    StateHashes,
    TakeSnapshot,
    UnitHash,
    Validate,
    Vote,
    Welcome,
)
from wire.spec import Direction
from wire.telemetry import DIRECT, Telemetry
from wire.version import PROTOCOL, VERSION

LOSS = 2.0
NORM = 1e-4
"""Every layer unit's squared norm."""
CORES, MEMORY = 4, 8 * 2**30
STEP_BYTES = 4096
LAYER_BYTES = 1024
"""Of a layer's file."""
LEAST_STEP = 0.05
"""Seconds of compute in a step: no real stage is faster."""


@dataclass
class Pace:
    """What all members of a process do the same; the parent changes it by lines on stdin."""

    step_seconds: float = LEAST_STEP
    address: str = ""
    """Where connections are accepted, and closed: others could fetch state there."""
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the run may go on past its first step: until then newcomers make further rows at once."""


@dataclass
class LightNode:
    """One member, over all its sessions. Without a goodbye its `run` may be cancelled and called again."""

    token: JoinToken
    directory: Path
    pace: Pace
    config: RunConfig | None = None
    placement: Placement | None = None
    placed_at: float = 0.0
    held: int = -1
    lineage: int = 0
    steps: int = 0
    """In this epoch."""
    pause: float = 0.0
    """Seconds between heartbeats, as the coordinator answered the newest; 0: as it said at first."""
    begun: Begin | None = None
    """The newest."""
    done: dict[int, float] = field(default_factory=dict)
    """By group of the running step: when the node is done with it."""
    worked: float = 0.0
    """Seconds of this epoch until its votes, without those in which it had nothing to do."""
    working_since: float = 0.0
    """When it began what is not counted yet."""
    seats: list[list[int]] = field(default_factory=list)
    """Rows without a node of its stage, and those that got one within the step."""
    handed: set[int] = field(default_factory=set)
    """Nodes of the tree of groups that it has handed over to those that its stage has now."""
    passed_on: set[int] = field(default_factory=set)
    """Groups of rows without a node of its stage that it has passed on to those."""
    follow: Follow | None = None
    told: list[FollowStep] = field(default_factory=list)
    """Committed since the state that it fetches."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    session: Session | None = None

    async def enrol(self) -> float:
        """Seconds that the enrolment took."""
        began = time.perf_counter()
        self.identity, self.address = await enrol(
            self.token, self.directory, Hardware("light", CORES, MEMORY)
        )
        return time.perf_counter() - began

    async def run(self) -> None:
        """One life: its state is lost at the end."""
        self.held, self.placement, nonce = -1, None, secrets.randbits(63)
        self.begun = self.follow = None
        self.client = CoordinatorClient(self.address, lambda: self.identity, 600.0)
        self.session = session = Session(self.client)

        def hello() -> Hello:
            return Hello(
                version=VERSION,
                protocol=PROTOCOL,
                peer_address=self.pace.address,
                hardware=Hardware("light", CORES, MEMORY),
                flops=1e12,
                download_rate=1e8,
                epoch=0,
                process_nonce=nonce,
            )

        async def handle(message: CoordinatorMessage) -> None:
            self._handle(session, message)

        try:
            await session.run(hello, handle)
        finally:
            self.session = None
            for task in self.tasks:
                task.cancel()
            await session.close()

    def misses(self, node_id: str) -> None:
        """A node is gone. Its neighbours and the nodes of its stage see their links to it closed."""
        if self.session is None or (place := self.placement) is None:
            return
        row, stage = place.replica, place.stage
        linked = {Seat(row, near): node for near, node in enumerate(place.stages) if abs(near - stage) == 1}
        linked |= {Seat(of, stage): placed.node for of, placed in enumerate(place.rows)}
        for seat, node in linked.items():
            if node.node_id == node_id:
                self.session.post(PeerSilent(epoch=place.epoch, stage=seat.stage, replica=seat.row))

    def _handle(self, session: Session, message: CoordinatorMessage) -> None:
        match message:
            case Welcome():
                self.config = _config(message.config_json)
                self._start(self._heartbeats(session, message.heartbeat_seconds))
            case HeartbeatReply():
                self.pause = message.pause
            case Placement() if self.placement is None or message.epoch != self.placement.epoch:
                self.placement, self.placed_at, self.steps = message, time.monotonic(), 0
                self.worked, self.working_since, self.done = 0.0, self.placed_at, {}
                self.begun = None
                if not message.enters:
                    self.follow = None
                session.post(
                    Placed(epoch=message.epoch, held_step=self.held, voted=False, lineage=self.lineage)
                )
            case Placement():
                self.placement = message
            case Abort() if self.placement is not None and message.epoch == self.placement.epoch:
                self.placement = None
            case Restore():
                if self.placement is not None and not self.placement.enters:
                    self.held, self.lineage = message.step, message.lineage
                session.post(Ready(epoch=message.epoch, telemetry=self._telemetry()))
            case Begin():
                self._begin(session, message)
            case Commit():
                self.held, self.steps = message.step + 1, self.steps + 1
                if message.then is not None:
                    self._begin(session, message.then)
                    return
                session.post(Applied(epoch=message.epoch, step=message.step, telemetry=self._telemetry()))
            case TakeSnapshot():
                self._start(self._save(session, message))
            case Prefetch():
                self._start(self._hold(message.step, message.units))
            case Follow():
                self.follow, self.told = message if message.sources else None, []
                if self.follow is not None:
                    self._start(self._fetch(session, message))
            case FollowStep() if self.follow is not None:
                self.told.append(message)
                self._catch_up(session)
            case Validate() | Finish():
                raise LinkError(f"the run sent {type(message).__name__}")

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _heartbeats(self, session: Session, seconds: float) -> None:
        # Members of a process do not beat together.
        await asyncio.sleep(random.uniform(0, seconds))
        while True:
            session.post(Heartbeat(telemetry=self._telemetry(), sent_at=time.monotonic()))
            await asyncio.sleep(self.pause or seconds)

    def _begin(self, session: Session, begin: Begin) -> None:
        """Begin a step, or go on with it with other groups."""
        place = self.placement
        if place is None or place.epoch != begin.epoch or self.config is None:
            return
        if place.enters:
            self.held, self.follow = begin.step, None
        now, rows = time.monotonic(), len(place.rows)
        if self.begun is None or self.begun.step != begin.step:
            self.done, self.handed, self.passed_on = {}, set(), set()
            self.working_since = now
        self.begun = begin
        usual = place.rows[place.replica].groups if rows else tuple(range(self.config.pipeline.groups))
        portions = begin.portions or [(place.replica, usual)]
        own = [group for row, groups in portions for group in groups if row == place.replica]
        ended = max(self.done.values(), default=self.working_since)
        if ended <= now:
            self.worked += max(0.0, ended - self.working_since)
            self.working_since = now
        # As long as others, the row's pipeline fills; then it ends a microbatch after the other.
        length = self.config.microbatches // self.config.pipeline.groups
        fill = len(place.stages) - 1
        each = self.pace.step_seconds / (max(1, len(usual)) * length + fill)
        busy = max([now + fill * each, *self.done.values()])
        for group in own:
            if group not in self.done:
                busy += length * each
                self.done[group] = busy
        self.done = {group: self.done[group] for group in own}
        if begin.hands_over:
            seats = [
                [seat.row for seat in seats if seat.stage == place.stage]
                for seats in (begin.absent, begin.late)
            ]
            gone = {*seats[0]}
            if seats != self.seats:
                self.seats, self.handed, self.passed_on = seats, set(), set()
            tree = _tree(self.config.pipeline.groups)
            runs = [run for row, run in portions if row == place.replica]
            for top in {top for run in runs for top in tree.subtrees(run)} - self.handed:
                self._start(self._hand_over(session, begin, top))
            kept = {group for row, groups in portions if row in gone for group in groups}
            if kept and kept != self.passed_on:
                # Its part of them is a row's part of a row's sums: next to nothing.
                self.passed_on = kept
                session.post(
                    HandedOver(
                        epoch=begin.epoch,
                        step=begin.step,
                        generation=begin.generation,
                        passed_on=tuple(sorted(kept)),
                    )
                )
        # While groups wait for a row, nobody votes.
        if all(row != rows for row, _ in portions) or not rows:
            self._start(self._vote(session, begin, max(self.done.values(), default=now)))

    async def _hand_over(self, session: Session, begin: Begin, top: int) -> None:
        """Hand over a node of the tree of groups once all of them are computed."""
        assert self.config is not None
        groups = _tree(self.config.pipeline.groups).span(top)
        await asyncio.sleep(max(self.done[group] for group in groups) - time.monotonic())
        place = self.placement
        if place is None or self.begun != begin:
            return
        self.handed.add(top)
        share = LOSS / self.config.pipeline.groups
        session.post(
            HandedOver(
                epoch=begin.epoch,
                step=begin.step,
                generation=begin.generation,
                groups=tuple(groups),
                group_losses=dict.fromkeys(groups, share) if place.stage == len(place.stages) - 1 else {},
            )
        )

    async def _vote(self, session: Session, begin: Begin, at: float) -> None:
        await asyncio.sleep(at - time.monotonic())
        await self.pace.open.wait()
        place = self.placement
        if place is None or self.begun != begin or self.config is None:
            return
        now = time.monotonic()
        self.worked += now - self.working_since
        self.working_since = now
        stages, names = len(place.stages), unit_names(self.config.model)
        units = _units(self.config, stages)[place.stage]
        share = LOSS / self.config.pipeline.groups
        groups: dict[int, float] = {}
        if place.stage == stages - 1:
            groups = dict.fromkeys(sorted(self.done), share)
        digests = {}
        if begin.digests:
            for group in (*self.done, *begin.audited):
                checks = group in begin.audited and place.stage == stages - 1
                loss = share if checks else None
                digests[group] = _digests(begin.step, group, place.stage, stages, loss)
        session.post(
            Vote(
                epoch=begin.epoch,
                step=begin.step,
                norms={names.index(unit): NORM for unit in units},
                loss=sum(groups.values()) if groups and self.config.pipeline.groups == 1 else None,
                group_losses=groups if self.config.pipeline.groups > 1 else {},
                digests=digests,
                telemetry=self._telemetry(),
                generation=begin.generation,
            )
        )

    async def _save(self, session: Session, take: TakeSnapshot) -> None:
        """A layer's file has the hash of its name."""
        place = self.placement
        if place is None or place.epoch != take.epoch or self.config is None:
            return
        names = unit_names(self.config.model)
        units = _units(self.config, len(place.stages))[place.stage]
        hashes = {names.index(unit): UnitHash(_digest(take.step, unit), 1.0, 1.0, 1.0) for unit in units}
        session.post(StateHashes(epoch=take.epoch, step=take.step, units=hashes))
        if take.place == NODES:
            await self._hold(take.step, units)

    async def _hold(self, step: int, units: Sequence[str]) -> None:
        layers = [
            HeldLayer(step=step, unit=unit, bytes=LAYER_BYTES, sha256=digest, weights_sha256=digest)
            for unit in units
            for digest in [_digest(step, unit)]
        ]
        await self.client.hold_layers(layers)

    async def _fetch(self, session: Session, order: Follow) -> None:
        await asyncio.sleep(self.pace.step_seconds)
        if self.follow is order:
            self.held, self.lineage = order.step, order.lineage
            session.post(Following(snapshot=order.step, step=self.held))
            self._catch_up(session)

    def _catch_up(self, session: Session) -> None:
        """Apply the steps that are known, once the state is here."""
        for step in self.told if self.follow is not None and self.held >= self.follow.step else ():
            if step.step == self.held:
                self.held += 1
                session.post(Following(snapshot=step.snapshot, step=self.held))

    def _telemetry(self) -> Telemetry:
        """Of an ordinary stage: all kinds of time, and a link to each neighbour. It waits for votes once its
        work is done."""
        if (place := self.placement) is None:
            return Telemetry(memory_bytes=10**8)
        now = time.monotonic()
        wall = now - self.placed_at
        until = min(now, max(self.done.values(), default=0.0))
        worked = self.worked + max(0.0, until - self.working_since)
        near = [stage for stage in (place.stage - 1, place.stage + 1) if 0 <= stage < len(place.stages)]
        return Telemetry(
            epoch=place.epoch,
            seconds={
                **{kind.value: 0.0 for kind in TimeKind},
                TimeKind.FORWARD.value: worked / 3,
                TimeKind.BACKWARD.value: worked * 2 / 3,
                TimeKind.WAIT_VOTES.value: wall - worked,
            },
            wall_seconds=wall,
            links=tuple(self._link(stage, forward=stage > place.stage) for stage in near),
            memory_bytes=10**8,
        )

    def _link(self, stage: int, *, forward: bool) -> LinkFigures:
        flow = FlowFigures(
            direction=Direction.ACTIVATION if forward else Direction.GRADIENT,
            codec="fp32",
            bytes=self.steps * STEP_BYTES,
            elements=self.steps * STEP_BYTES // 4,
        )
        return LinkFigures(
            target=stage,
            bytes=self.steps * STEP_BYTES,
            bytes_received=self.steps * STEP_BYTES,
            retransmits=0,
            rejects=0,
            round_trip_seconds=0.02,
            capacity=1e7,
            flows=(flow,),
            target_replica=0 if self.placement is None else self.placement.replica,
            path=DIRECT,
        )


_CONFIGS: dict[str, RunConfig] = {}
_UNITS: dict[int, list[tuple[str, ...]]] = {}


def _config(text: str) -> RunConfig:
    if text not in _CONFIGS:
        _CONFIGS[text] = from_json(text)
    return _CONFIGS[text]


@lru_cache(maxsize=1)
def _tree(groups: int) -> GroupTree:
    return GroupTree(groups)


def _digest(*of: object) -> str:
    return sha256(repr(of).encode()).hexdigest()


def _digests(step: int, group: int, stage: int, stages: int, loss: float | None) -> GroupDigests:
    """Of what a stage computed for a group, the same in every row."""
    ends = [(stage - 1, received) for received in (True, False) if stage > 0]
    ends += [(stage, received) for received in (False, True) if stage < stages - 1]
    boundaries = {}
    for boundary, received in ends:
        # Activations come from the stage below, gradients from the one above.
        end = BoundaryEnd(boundary, received != (boundary < stage), received)
        digest = bytes.fromhex(_digest(step, group, boundary, end.backward))
        boundaries[end] = digest[:DIGEST_BYTES]
    gradient = bytes.fromhex(_digest(step, group, stage))[:DIGEST_BYTES]
    return GroupDigests(gradient=gradient, boundaries=boundaries, loss=loss)


def _units(config: RunConfig, stages: int) -> list[tuple[str, ...]]:
    """The layer units of each stage; all members of a process are of one run."""
    if stages not in _UNITS:
        _UNITS[stages] = [tuple(units) for units in stage_units(config, stages)]
    return _UNITS[stages]


async def members(token: str, folder: Path, count: int, every: float) -> None:
    """Run `count` members in this process; stdin has orders as lines of JSON, stdout gets events."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    pace = Pace(address=f"{host}:{port}")
    nodes = [LightNode(JoinToken.parse(token), folder / str(n), Pace()) for n in range(count)]
    lives: dict[int, asyncio.Task[None]] = {}

    def begin(number: int) -> None:
        lives[number] = asyncio.get_running_loop().create_task(_life(nodes[number]))

    async def join(number: int) -> None:
        nodes[number].pace = pace
        nodes[number].directory.mkdir(parents=True)
        try:
            seconds = await nodes[number].enrol()
        except ThinwireError as error:
            _say(event="refused", reason=str(error))
            return
        _say(event="enrolled", seconds=round(seconds, 4), number=number, node=nodes[number].identity.node_id)
        begin(number)

    async with asyncio.TaskGroup() as group:
        began = time.monotonic()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number * every - time.monotonic()))
            group.create_task(join(number))
    _say(event="all-enrolled")
    async for line in _lines():
        order = json.loads(line)
        pace.step_seconds = order.get("step_seconds", pace.step_seconds)
        pace.open.set()
        if (number := order.get("kill")) is not None and (life := lives.pop(number, None)) is not None:
            life.cancel()
            await asyncio.wait([life])
            asyncio.get_running_loop().call_later(order.get("back", 0.0), begin, number)
        for node in nodes if (gone := order.get("gone")) is not None else ():
            node.misses(gone)
    for life in lives.values():
        life.cancel()


async def _life(node: LightNode) -> None:
    try:
        await node.run()
    except ThinwireError as error:
        _say(event="ended", reason=str(error))


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        yield line.decode()


def _say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    token, folder, count, every = sys.argv[1:]
    event_loop.run(members(token, Path(folder), int(count), float(every)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
