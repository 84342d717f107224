"""One connection of a link: its bulk and control streams, from the first greeting until either ends.

What outlives a connection (`LinkState`) belongs to the link, which makes connections until it is closed. Each
end starts by naming the lowest frame that it lacks; nothing is written to bulk before the other end has
done so. Then four loops run: read and write, bulk and control.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from google.protobuf.message import DecodeError

from wire.byte_stream import ByteStream, StreamDroppedError
from wire.errors import LinkError, ProtocolViolationError
from wire.frames import FRAME_BYTES, HEADER_BYTES, frame_direction, run_tag
from wire.link_meter import LinkMeter
from wire.pacing import Pacer
from wire.spec import Direction, TensorKey
from wire.stream_receiver import Acknowledge, Expect, StreamReceiver
from wire.stream_sender import StreamSender
from wire.transfers import TransferKind, TransferLog
from wire.v1 import link_pb2

MAX_OPEN_PINGS = 8
MEASURED_PINGS = 8

OnTensor = Callable[[TensorKey, bytearray], None]


class FrameFilter(Protocol):
    """For fault injection: what is written to the bulk stream in place of a frame."""

    async def __call__(self, frame: bytes, stage: int, peer_stage: int) -> Sequence[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Both ends of a link need the same `frame_bytes`; the rest may differ."""

    window_bytes: int = 16 * 1024 * 1024
    """Received tensors that are incomplete or not released may take this much, plus one tensor. It should
    exceed what fits on the wire in one round trip: 1 Gbit/s times 100 ms is 12.5 MB."""
    outbox_bytes: int = 1024 * 1024 * 1024
    """Tensors that wait to be sent and acknowledged may take this much."""
    frame_bytes: int = FRAME_BYTES
    """A frame with its header."""
    ping_seconds: float = 2.0
    """Between pings on the control stream."""
    silent_seconds: float = 10.0
    """A connection whose peer says nothing for this long is given up."""
    connect_seconds: float = 15.0
    """One attempt to connect may take this long."""
    backoff_seconds: float = 0.1
    """Pause after a failed attempt; doubles with each, up to `max_backoff_seconds`."""
    max_backoff_seconds: float = 2.0
    lost_after_seconds: float = 20.0
    """A link that was up and is not back within this time is lost."""
    resend_seconds: float = 10.0
    """Frames are sent or asked for again when nothing is heard of them for this long."""
    pacer: Pacer | None = None
    """Frames wait for it: the bandwidth that the machine's owner allows, shared with whatever else sends."""
    frame_filter: FrameFilter | None = None
    on_transfer: Callable[[int, TransferKind, TensorKey, float, float], None] | None = None
    """Told of each tensor's way, with the peer's stage; see `wire.transfers`."""


@dataclass(kw_only=True)
class LinkStats:
    """Totals of one link since it was made. Bytes are whole messages of both streams, frame headers
    included; gRPC, TLS and TCP add under 1 % for tensors of many frames."""

    bytes_sent: int = 0
    bytes_received: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    direction_bytes_sent: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    """Bytes of frames sent, by what they carry."""
    retransmits: int = 0
    """Frames sent again."""
    rejects: int = 0
    """Damaged frames received and asked for again."""
    stale: int = 0
    """Frames of tensors that nobody expected, dropped."""
    reconnects: int = 0
    rtt_seconds: float = 0.0
    """Smoothed round trip of a ping on the control stream; 0 before the first."""
    least_rtt_seconds: float = 0.0
    """The least round trip of the newest `MEASURED_PINGS`: without what waits in queues before it."""
    busy_seconds: float = 0.0
    """Time in which tensors waited to be sent or acknowledged."""
    capacity: float = 0.0
    """Bytes a second that the link delivers while it is busy; 0 while not known."""


@dataclass(kw_only=True)
class LinkState:
    """What a link keeps across its connections."""

    epoch: int
    stage: int
    peer_stage: int
    settings: LinkSettings
    sender: StreamSender
    receiver: StreamReceiver
    on_tensor: OnTensor
    session: int = 0
    stats: LinkStats = field(default_factory=LinkStats)
    meter: LinkMeter = field(default_factory=LinkMeter)
    transfers: TransferLog | None = None
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_PINGS))
    bulk_wake: asyncio.Event = field(default_factory=asyncio.Event)
    control_wake: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def create(
        cls,
        *,
        run_id: str,
        epoch: int,
        stage: int,
        peer_stage: int,
        settings: LinkSettings,
        expect: Expect,
        on_tensor: OnTensor,
    ) -> "LinkState":
        tag, payload_bytes = run_tag(run_id), settings.frame_bytes - HEADER_BYTES
        sender = StreamSender(
            tag=tag,
            outbox_bytes=settings.outbox_bytes,
            resend_seconds=settings.resend_seconds,
            payload_bytes=payload_bytes,
        )
        receiver = StreamReceiver(
            tag=tag,
            expect=expect,
            window_bytes=settings.window_bytes,
            resend_seconds=settings.resend_seconds,
            repeat_seconds=settings.ping_seconds,
            payload_bytes=payload_bytes,
        )
        return cls(
            epoch=epoch,
            stage=stage,
            peer_stage=peer_stage,
            settings=settings,
            sender=sender,
            receiver=receiver,
            on_tensor=on_tensor,
            transfers=None
            if settings.on_transfer is None
            else TransferLog(partial(settings.on_transfer, peer_stage)),
        )

    def open_session(self, session: int) -> None:
        self.session = self.sender.session = self.receiver.session = session


class _Ended(Exception):
    """Stops the loops of a connection that has ended."""


class Connection:
    """Two streams that live and die together. `on_change` is called when it comes up and when it ends."""

    def __init__(self, state: LinkState, attempt: int, on_change: Callable[[], None]) -> None:
        self.attempt = attempt
        self.error: LinkError | None = None
        self.finished = asyncio.Event()
        self._state = state
        self._on_change = on_change
        self._running = False
        self._ended = asyncio.Event()
        self._greeted = asyncio.Event()
        self._ponged = False
        self._pings: dict[int, float] = {}  # nonce -> when it was sent
        self._pongs: list[int] = []  # nonces to answer

    @property
    def up(self) -> bool:
        """Both streams are open, the other end's greeting is here and it has answered a ping."""
        return self._greeted.is_set() and self._ponged and not self._ended.is_set()

    @property
    def was_up(self) -> bool:
        return self._ponged

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, error: LinkError) -> None:
        """Stop both streams' loops. The first reason given stays."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()
            self._state.meter.interrupted(now())
            if not self._running:
                self.finished.set()
            self._on_change()

    async def run(self, bulk: ByteStream, control: ByteStream) -> None:
        """Move frames and messages until the connection ends; `error` then says why."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_control(control))
                group.create_task(self._write_control(control))
                group.create_task(self._read_bulk(bulk))
                group.create_task(self._write_bulk(bulk))
                group.create_task(self._stop_when_ended())
        except* _Ended:
            pass
        except* LinkError as failures:
            self.end(_first(failures))
        finally:
            self.end(StreamDroppedError("the connection was closed"))
            self.finished.set()

    async def _stop_when_ended(self) -> None:
        await self._ended.wait()
        raise _Ended

    # ---- bulk

    async def _read_bulk(self, stream: ByteStream) -> None:
        state = self._state
        while True:
            data = await stream.read()
            state.stats.bytes_received += len(data)
            state.stats.frames_received += 1
            completed = state.receiver.receive(data, now())
            if state.transfers is not None:
                state.transfers.received(data, completed.key if completed else None, now())
            if state.receiver.deadline <= now():
                state.control_wake.set()
            if completed is not None:
                state.on_tensor(completed.key, completed.buffer)

    async def _write_bulk(self, stream: ByteStream) -> None:
        state = self._state
        await self._greeted.wait()
        while True:
            state.bulk_wake.clear()
            frame = state.sender.next_frame(now())
            if frame is None:
                await wait_until(state.bulk_wake, state.sender.deadline)
                continue
            if state.settings.pacer is not None:
                await state.settings.pacer.pass_through(len(frame))
            if state.transfers is not None:
                state.transfers.sending(frame, now())
            if state.settings.frame_filter is None:
                await stream.write(frame)
            else:
                for piece in await state.settings.frame_filter(frame, state.stage, state.peer_stage):
                    await stream.write(piece)
            if state.transfers is not None:
                state.transfers.sent(frame, now())
            state.stats.bytes_sent += len(frame)
            state.stats.frames_sent += 1
            state.stats.direction_bytes_sent[frame_direction(frame)] += len(frame)

    # ---- control

    async def _write_control(self, stream: ByteStream) -> None:
        state = self._state
        hello = link_pb2.LinkHello(
            epoch=state.epoch,
            stage=state.stage,
            session=state.session,
            next_sequence=state.receiver.next_sequence,
        )
        await self._write_message(stream, link_pb2.LinkMessage(hello=hello))
        state.receiver.reconnect(now())
        ping_at = now()
        while True:
            state.control_wake.clear()
            if now() >= ping_at:
                nonce = secrets.randbits(64)
                while len(self._pings) >= MAX_OPEN_PINGS:
                    del self._pings[next(iter(self._pings))]
                self._pings[nonce] = now()
                ping_at = now() + state.settings.ping_seconds
                await self._write_message(stream, link_pb2.LinkMessage(ping=link_pb2.Ping(nonce=nonce)))
            while self._pongs:
                pong = link_pb2.Pong(nonce=self._pongs.pop(0))
                await self._write_message(stream, link_pb2.LinkMessage(pong=pong))
            for news in state.receiver.poll(now()):
                if isinstance(news, Acknowledge):
                    acknowledge = link_pb2.Acknowledge(
                        next_sequence=news.next_sequence, credit_limit=news.credit_limit
                    )
                    await self._write_message(stream, link_pb2.LinkMessage(acknowledge=acknowledge))
                else:
                    await self._write_message(
                        stream, link_pb2.LinkMessage(send_again=link_pb2.SendAgain(sequences=news.sequences))
                    )
            await wait_until(state.control_wake, min(ping_at, state.receiver.deadline))

    async def _write_message(self, stream: ByteStream, message: link_pb2.LinkMessage) -> None:
        data = message.SerializeToString()
        try:
            async with asyncio.timeout(self._state.settings.silent_seconds):
                await stream.write(data)
        except TimeoutError as error:
            raise self._silence() from error
        self._state.stats.bytes_sent += len(data)

    async def _read_control(self, stream: ByteStream) -> None:
        while True:
            try:
                async with asyncio.timeout(self._state.settings.silent_seconds):
                    data = await stream.read()
            except TimeoutError as error:
                raise self._silence() from error
            self._state.stats.bytes_received += len(data)
            try:
                message = link_pb2.LinkMessage.FromString(data)
            except DecodeError as error:
                raise ProtocolViolationError("the control stream carries what is no LinkMessage") from error
            self._handle(message)

    def _silence(self) -> LinkError:
        return StreamDroppedError(f"the neighbour was silent for {self._state.settings.silent_seconds:g} s")

    def _handle(self, message: link_pb2.LinkMessage) -> None:
        state = self._state
        kind = message.WhichOneof("body")
        if (kind == "hello") == self._greeted.is_set():
            when = "twice" if kind == "hello" else "before hello"
            raise ProtocolViolationError(f"the neighbour said {kind} {when}")
        match kind:
            case "hello":
                self._greet(message.hello)
            case "acknowledge":
                state.sender.acknowledge(message.acknowledge.next_sequence, message.acknowledge.credit_limit)
                state.meter.acknowledged(
                    state.sender.acknowledged_bytes, round_trip=state.stats.least_rtt_seconds, now=now()
                )
                if state.transfers is not None:
                    state.transfers.acknowledged(message.acknowledge.next_sequence, now())
                state.bulk_wake.set()
            case "send_again":
                state.sender.send_again(list(message.send_again.sequences))
                state.bulk_wake.set()
            case "ping":
                # A correct peer waits for its pings' answers; one that floods gets only the newest answered.
                self._pongs = [*self._pongs[-3:], message.ping.nonce]
                state.control_wake.set()
            case "pong":
                self._measure(message.pong.nonce)
            case _:
                raise ProtocolViolationError("the neighbour sent a control message of an unknown kind")

    def _greet(self, hello: link_pb2.LinkHello) -> None:
        state = self._state
        theirs = (hello.epoch, hello.stage, hello.session)
        ours = (state.epoch, state.peer_stage, state.session)
        if theirs != ours:
            raise ProtocolViolationError(
                f"the neighbour is at (epoch, stage, session) {theirs}; the placement here says {ours}"
            )
        state.sender.reconnect(hello.next_sequence)
        state.meter.interrupted(now())
        self._greeted.set()
        state.bulk_wake.set()
        self._on_change()

    def _measure(self, nonce: int) -> None:
        sent_at = self._pings.pop(nonce, None)
        if sent_at is None:
            return
        sample, stats = now() - sent_at, self._state.stats
        stats.rtt_seconds = sample if stats.rtt_seconds == 0 else 0.875 * stats.rtt_seconds + 0.125 * sample
        self._state.round_trips.append(sample)
        stats.least_rtt_seconds = min(self._state.round_trips)
        if not self._ponged:
            self._ponged = True
            self._on_change()


def now() -> float:
    """The event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


async def wait_until(event: asyncio.Event, deadline: float | None) -> None:
    """Until the event or the deadline, whichever is first."""
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        pass


def _first(failures: BaseExceptionGroup[LinkError]) -> LinkError:
    """The one to report: a violation rather than the dropped streams that it caused."""
    leaves: list[LinkError] = []
    pending: list[BaseException] = [failures]
    while pending:
        failure = pending.pop(0)
        if isinstance(failure, BaseExceptionGroup):
            pending.extend(failure.exceptions)
        elif isinstance(failure, LinkError):
            leaves.append(failure)
    return next((leaf for leaf in leaves if isinstance(leaf, ProtocolViolationError)), leaves[0])
