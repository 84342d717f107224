"""One connection of a link: its bulk and control streams, from the first greeting until either ends.

State that outlives a connection (`LinkState`) belongs to the link. Each end first sends the lowest frame
number that it has not received, and writes nothing to bulk before it has the other end's number. Then four
loops run: two read and write control on the event loop, and two read and write bulk, each on its own
thread.
"""

import asyncio
import functools
import math
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from google.protobuf.message import DecodeError

from wire.byte_stream import BulkStream, ByteStream, StreamDroppedError
from wire.errors import LinkError, ProtocolViolationError, leaves
from wire.event_loop import on_thread
from wire.line_meter import SPAN_SECONDS
from wire.link_state import LinkState
from wire.pacing import KEEP_ALIVE, KeepAlive
from wire.stream_receiver import Acknowledge
from wire.v1 import link_pb2

NO_FRAMES = "the control stream goes on and no frame arrives"
MAX_OPEN_PINGS = 8
SUSPECT_SECONDS, SUSPECT_ROUND_TRIPS = 1.0, 4.0
"""A neighbour that has not answered a ping for so long, in seconds and in round trips, may be dead."""
JUST_NOW = 1000
"""Tensors that arrived fewer microseconds ago were complete just now."""


class _Ended(Exception):
    """Cancels the other loops when the connection has ended."""


class Connection:
    """Two streams that end together. `on_change` is called when the connection comes up and when it ends."""

    def __init__(
        self,
        state: LinkState,
        attempt: int,
        on_change: Callable[[], None],
        silent_seconds: float | None = None,
    ) -> None:
        """`silent_seconds`: in place of the link's, where there is another path; four round trips or more."""
        self.attempt = attempt
        self._silent_seconds = silent_seconds
        self.error: LinkError | None = None
        self.finished = asyncio.Event()
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._on_change = on_change
        self._running = False
        self._ended = asyncio.Event()
        self._greeted = asyncio.Event()
        self._ponged = False
        self._heard_at = self._wrote_at = math.inf
        """When the control stream was read last, and when a write that is under way began."""
        self._silence_watch: asyncio.TimerHandle | None = None
        self.on_silent: Callable[[], None] = lambda: None
        """Called when the neighbour may be dead, once in each silence."""
        self._suspected_at = -math.inf
        """When the control stream had been read last, as that was so."""
        self._control_alarm = Alarm(state.control_wake)
        self._pings: dict[int, float] = {}  # nonce -> when it was sent
        self._pongs: list[int] = []  # nonces to answer

    @property
    def up(self) -> bool:
        """Whether both streams are open, the peer's hello has arrived, and it has answered a ping."""
        return self._greeted.is_set() and self._ponged and not self._ended.is_set()

    @property
    def was_up(self) -> bool:
        return self._ponged

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, error: LinkError) -> None:
        """Stop both streams' loops. The first error is kept."""
        if not self._ended.is_set():
            with self._state.lock:
                self.error = error
                self._ended.set()
                self._state.bulk_wake.notify_all()
                self._state.meter.interrupted(now())
                # Or the next one, which nothing was written on, would count as stalled before it is greeted.
                self._state.delivery.connected()
            if not self._running:
                self.finished.set()
            self._on_change()

    async def run(self, bulk: BulkStream, control: ByteStream) -> None:
        """Move frames and messages until the connection ends; `error` says why.

        gRPC takes what is written to bulk from `frames`.
        """
        self._running = True
        self._heard_at = now()
        self._watch_silence()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_control(control))
                group.create_task(self._write_control(control))
                group.create_task(self._carry_bulk(bulk))
                group.create_task(self._stop_when_ended())
        except* _Ended:
            pass
        except* LinkError as failures:
            self.end(_first(failures))
        finally:
            if self._silence_watch is not None:
                self._silence_watch.cancel()
            self.end(StreamDroppedError("the connection was closed"))
            self.finished.set()

    async def _stop_when_ended(self) -> None:
        await self._ended.wait()
        raise _Ended

    # ---- bulk, each direction on a thread of its own

    async def _carry_bulk(self, stream: BulkStream) -> None:
        try:
            await on_thread(functools.partial(self._read_bulk, stream), "bulk-in")
        finally:
            stream.end()

    def _read_bulk(self, stream: BulkStream) -> None:
        state, line = self._state, self._state.settings.line
        before = -math.inf
        while True:
            data = stream.read()
            at = now()
            with state.lock:
                if self._ended.is_set():
                    return
                state.count(bytes_received=len(data))
                if data == KEEP_ALIVE:
                    continue
                state.frames_received += 1
                if line is not None:
                    # A frame after another was carried since that one came; of one after a pause
                    # nobody knows.
                    line.received.carried(len(data), before if at - before < SPAN_SECONDS else at, at)
                    before = at
                due = state.receiver.deadline
                completed = state.receiver.receive(data, at)
                if state.transfers is not None:
                    state.transfers.received(data, completed.key if completed else None, at)
                news_at = state.receiver.deadline
            if completed is not None:
                state.on_tensor(completed.key, completed.buffer)
            if news_at <= at:
                state.wake_control()
            elif news_at < due:
                self._loop.call_soon_threadsafe(self._control_alarm.by, news_at)

    def frames(self) -> Iterator[bytes]:
        """What to write to bulk, in order, until the connection ends. Only one thread calls it, which waits
        here."""
        state, settings, keep_alive = self._state, self._state.settings, KeepAlive()
        spent = time.thread_time()
        while (frame := self._next_frame(keep_alive)) is not None:
            data, again = frame
            if data is KEEP_ALIVE:
                yield data
                with state.lock:
                    state.count(bytes=len(data))
                continue
            if settings.pacer is not None:
                # What other rows get may wait for what neighbours get: their stages stand still without it.
                if state.is_between_rows:
                    seconds = settings.pacer.reserve_behind(len(data), now, self._pass)
                else:
                    seconds = settings.pacer.reserve(len(data), now())
                if seconds is None or not self._pass(seconds):
                    return
            with state.lock:
                state.delivery.written(again=again, now=now())
                state.service.written(len(data), now())
                if state.transfers is not None:
                    state.transfers.sending(data, now())
            if settings.frame_filter is None:
                yield data
            else:
                yield from settings.frame_filter(data, state.stage, state.peer_stage)
            with state.lock:
                if state.transfers is not None:
                    state.transfers.sent(data, now())
                keep_alive.frame_sent(now())
                state.frame_sent(data, again=again)
                spent = state.count_processor(spent)

    def _next_frame(self, keep_alive: KeepAlive) -> tuple[bytes, bool] | None:
        """Wait for a frame, and whether it was sent before, or for a keep-alive; None: the connection has
        ended."""
        state = self._state
        with state.lock:
            while not self._ended.is_set():
                deadline = None
                if self._greeted.is_set():
                    sent_again = state.sender.retransmits
                    frame = state.next_frame(now())
                    if frame is not None:
                        return frame, state.sender.retransmits > sent_again
                    keep_alive_at = keep_alive.due_at(state.figures.least_round_trip_seconds)
                    if keep_alive_at is not None and keep_alive_at <= now():
                        keep_alive.sent(now())
                        return KEEP_ALIVE, False
                    deadlines = [at for at in (state.sender.deadline, keep_alive_at) if at is not None]
                    deadline = min(deadlines, default=None)
                state.bulk_wake.wait(None if deadline is None else max(0.0, deadline - now()))
            return None

    def _pass(self, seconds: float) -> bool:
        """Wait so long; False if the connection ends first."""
        if seconds > 0:
            with self._state.lock:
                self._state.bulk_wake.wait_for(self._ended.is_set, seconds)
        return not self._ended.is_set()

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
        with state.lock:
            state.receiver.reconnect(now())
        ping_at = now()
        while True:
            state.control_wake.clear()
            with state.lock:
                if state.delivery.stalled(now()):
                    raise StreamDroppedError(NO_FRAMES)
                messages = state.receiver.poll(now())
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
            for news in messages:
                if isinstance(news, Acknowledge):
                    acknowledge = acknowledge_to_proto(news, now())
                    await self._write_message(stream, link_pb2.LinkMessage(acknowledge=acknowledge))
                else:
                    await self._write_message(
                        stream, link_pb2.LinkMessage(send_again=link_pb2.SendAgain(sequences=news.sequences))
                    )
            with state.lock:
                deadline = min(ping_at, state.receiver.deadline)
            await self._control_alarm.wait(deadline)

    async def _write_message(self, stream: ByteStream, message: link_pb2.LinkMessage) -> None:
        data = message.SerializeToString()
        self._wrote_at = now()
        await stream.write(data)
        self._wrote_at = math.inf
        with self._state.lock:
            self._state.count(bytes=len(data))

    async def _read_control(self, stream: ByteStream) -> None:
        while True:
            data = await stream.read()
            self._heard_at = now()
            try:
                message = link_pb2.LinkMessage.FromString(data)
            except DecodeError as error:
                raise ProtocolViolationError(
                    "the control stream carries something that is no LinkMessage"
                ) from error
            with self._state.lock:
                self._state.count(bytes_received=len(data))
                self._handle(message)
            self._state.delivered()

    @property
    def _silent_after(self) -> float:
        limit = self._state.settings.silent_seconds
        if self._silent_seconds is None:
            return limit
        return min(limit, max(self._silent_seconds, 4 * self._state.figures.round_trip_seconds))

    def _watch_silence(self) -> None:
        """End the connection once the control stream brings or takes nothing for `_silent_after`. Say sooner
        that the neighbour may be dead.

        One timer in all that time: a timeout of each message costs more than the message.
        """
        limit, since = self._silent_after, min(self._heard_at, self._wrote_at)
        if (left := since + limit - now()) <= 0:
            self.end(StreamDroppedError(f"the neighbour was silent for {limit:g} s"))
            return
        if since > self._suspected_at:
            settings, figures = self._state.settings, self._state.figures
            patience = max(SUSPECT_SECONDS, SUSPECT_ROUND_TRIPS * figures.round_trip_seconds)
            until = since + settings.ping_seconds + patience - now()
            if until <= 0:
                self._suspected_at = since
                self.on_silent()
            else:
                left = min(left, until)
        self._silence_watch = asyncio.get_running_loop().call_later(left, self._watch_silence)

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
                before, told = state.sender.unacknowledged, message.acknowledge
                for arrival in told.arrived:
                    at = now() - 1e-6 * arrival.microseconds_ago
                    self._acknowledged(arrival.next_sequence, told.credit_limit, at)
                self._acknowledged(told.next_sequence, told.credit_limit, now())
                if (left := state.sender.unacknowledged) < before:
                    state.delivery.acknowledged(all_of_it=left == 0, now=now())
                    state.service.acknowledged(all_of_it=left == 0, now=now())
                if state.sender.has_more:
                    state.bulk_wake.notify_all()
            case "send_again":
                state.sender.send_again(list(message.send_again.sequences))
                state.bulk_wake.notify_all()
            case "ping":
                # Keep the newest few: a peer that floods pings gets no more answers than that.
                self._pongs = [*self._pongs[-3:], message.ping.nonce]
                state.control_wake.set()
            case "pong":
                self._measure(message.pong.nonce)
            case _:
                raise ProtocolViolationError("the neighbour sent a control message of an unknown kind")

    def _acknowledged(self, next_sequence: int, credit_limit: int, at: float) -> None:
        """The neighbour has had every frame below since this time, plus its answer's way here."""
        state = self._state
        state.sender.acknowledge(next_sequence, credit_limit)
        state.meter.acknowledged(
            state.sender.acknowledged_bytes, round_trip=state.figures.least_round_trip_seconds, now=at
        )
        if state.transfers is not None:
            state.transfers.acknowledged(next_sequence, at)

    def _greet(self, hello: link_pb2.LinkHello) -> None:
        state = self._state
        theirs = (hello.epoch, hello.stage, hello.session)
        ours = (state.epoch, state.peer_stage, state.session)
        if theirs != ours:
            raise ProtocolViolationError(
                f"the neighbour is at (epoch, stage, session) {theirs}; the placement here says {ours}"
            )
        state.sender.reconnect(hello.next_sequence)
        state.delivery.connected()
        state.service.connected()
        state.meter.interrupted(now())
        self._greeted.set()
        state.bulk_wake.notify_all()
        self._on_change()

    def _measure(self, nonce: int) -> None:
        sent_at = self._pings.pop(nonce, None)
        if sent_at is None:
            return
        state, sample = self._state, now() - sent_at
        before = state.figures.round_trip_seconds
        state.round_trips.append(sample)
        state.figures = replace(
            state.figures,
            round_trip_seconds=0.875 * before + 0.125 * sample if before else sample,
            least_round_trip_seconds=min(state.round_trips),
        )
        if not self._ponged:
            self._ponged = True
            self._on_change()


def now() -> float:
    """Monotonic seconds, the clock of deadlines. uvloop's `loop.time()` is stale and in milliseconds."""
    return time.monotonic()


class Alarm:
    """Waits for an event that only wakes its waiter, at most until a deadline, at which the event is set.

    The event may be set sooner, at an earlier call's deadline, because one timer serves many waits.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, deadline: float | None) -> None:
        """Return once the event is set."""
        if deadline is not None:
            self.by(deadline)
        await self._event.wait()

    def by(self, deadline: float) -> None:
        """Set the event at this time, if not sooner."""
        if deadline >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - now()), self._ring)

    def _ring(self) -> None:
        self._at, self._timer = math.inf, None
        self._event.set()


def acknowledge_to_proto(news: Acknowledge, at: float) -> link_pb2.Acknowledge:
    """The message, sent at this time. The newest tensors have no entry if they were complete just now."""
    arrived = [(entry.next_sequence, min(round(1e6 * (at - entry.at)), 2**32 - 1)) for entry in news.arrived]
    while arrived and arrived[-1][1] < JUST_NOW:
        arrived.pop()
    return link_pb2.Acknowledge(
        next_sequence=news.next_sequence,
        credit_limit=news.credit_limit,
        arrived=[link_pb2.Arrival(next_sequence=end, microseconds_ago=ago) for end, ago in arrived],
    )


async def wait_until(event: asyncio.Event, deadline: float | None) -> None:
    """Wait for the event, until the deadline at most."""
    try:
        async with asyncio.timeout_at(deadline):
            await event.wait()
    except TimeoutError:
        pass


def _first(failures: BaseExceptionGroup[LinkError]) -> LinkError:
    """The error to report: a violation rather than the dropped streams that followed from it."""
    errors = [leaf for leaf in leaves(failures) if isinstance(leaf, LinkError)]
    return next((leaf for leaf in errors if isinstance(leaf, ProtocolViolationError)), errors[0])
