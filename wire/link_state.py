"""The state of a link that outlives its connections: settings, totals, sender and receiver."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from wire.delivery import Delivery, Service
from wire.figures import FlowFigures, LinkFigures
from wire.frames import PAYLOAD_BYTES, frame_direction, frame_place, pieces_at, run_tag
from wire.line_meter import Line
from wire.link_meter import LinkMeter
from wire.pacing import RECONNECT_SECONDS, Pacer
from wire.spec import Direction, TensorKey
from wire.stream_receiver import Expect, StreamReceiver
from wire.stream_sender import StreamSender
from wire.transfers import TransferKind, TransferLog

MEASURED_PINGS = 8

OnTensor = Callable[[TensorKey, bytearray], None]


class FrameFilter(Protocol):
    """Replaces a frame with the messages to write to the bulk stream, for fault injection. It runs on the
    link's thread and may block it."""

    def __call__(self, frame: bytes, stage: int, peer_stage: int) -> Sequence[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """Both ends of a link need the same `piece_bytes`; the rest may differ."""

    window_bytes: int = 16 * 1024 * 1024
    """The limit for received tensors that are incomplete or not released; one more tensor may exceed it. It
    should exceed rate times round trip: 1 Gbit/s times 100 ms is 12.5 MB."""
    outbox_bytes: int = 1024 * 1024 * 1024
    """The limit for tensors that wait to be sent and acknowledged. A node raises it to what its run needs
    (`node.stage.epoch_links`)."""
    piece_bytes: int = PAYLOAD_BYTES
    """The size of a piece of a tensor. A frame carries one or more."""
    ping_seconds: float = 0.5
    """The seconds between pings on the control stream."""
    silent_seconds: float = 10.0
    """A connection is dropped after this long if its peer is silent or no frame is acknowledged, or later on
    slow links (`wire.delivery`)."""
    connect_seconds: float = 15.0
    """The limit for one attempt to connect."""
    backoff_seconds: float = 0.1
    """The pause after a failed attempt. It doubles each time, up to `max_backoff_seconds`."""
    max_backoff_seconds: float = RECONNECT_SECONDS
    lost_after_seconds: float = 20.0
    """A link that has been down for this long is lost."""
    resend_seconds: float = 10.0
    """After this long, unacknowledged frames are sent again and missing ones requested again."""
    pacer: Pacer | None = None
    """The node's bandwidth limit, shared with everything else it sends."""
    line: Line | None = None
    """Measures what all links of the node carry together."""
    on_relay_left: Callable[[str], None] | None = None
    """Called with the path of a relay that a link has left, once another relay has proved faster."""
    frame_filter: FrameFilter | None = None
    held_out_from: int | None = None
    """Activations from this microbatch number on are of held-out samples and counted separately."""
    on_transfer: Callable[[int, TransferKind, TensorKey, float, float], None] | None = None
    """Called with (peer stage, kind, tensor, start, end); see `wire.transfers`."""

    @property
    def unread_bytes(self) -> int:
        """The HTTP/2 window of a stream. It is larger than `window_bytes`, which is the limit."""
        return 2 * self.window_bytes


@dataclass(kw_only=True)
class LinkState:
    """The state of a link that outlives its connections.

    The event loop and a connection's threads must hold `lock` to use mutable fields.
    """

    epoch: int
    stage: int
    peer_stage: int
    rows: int
    """Identifies the rows of both ends, because a node may change to a seat in another row."""
    settings: LinkSettings
    sender: StreamSender
    receiver: StreamReceiver
    on_tensor: OnTensor
    delivery: Delivery
    session: int = 0
    figures: LinkFigures = field(default_factory=LinkFigures)
    """The figures since the link was created, without codecs of flows. `Link.figures` adds others."""
    processor_seconds: float = 0.0
    """The processor time of the sending thread."""
    frames_sent: int = 0
    frames_received: int = 0
    reconnects: int = 0
    """Connections after the first."""
    service: Service = field(default_factory=Service)
    meter: LinkMeter = field(default_factory=LinkMeter)
    transfers: TransferLog | None = None
    elements: deque[int] = field(default_factory=deque)
    """The number of elements of each queued tensor whose last frame was not sent yet."""
    tensor_bytes: int = 0
    """The bytes of frames sent for the first of these tensors."""
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    """Pending calls, each with the payload bytes that must be acknowledged first."""
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=MEASURED_PINGS))
    lock: threading.RLock = field(default_factory=threading.RLock)
    bulk_wake: threading.Condition = field(init=False)
    """Notified when there may be something to write to the bulk stream."""
    control_wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on the loop when there may be something to write to the control stream."""
    loop: asyncio.AbstractEventLoop | None = None

    def __post_init__(self) -> None:
        self.bulk_wake = threading.Condition(self.lock)

    @property
    def is_between_rows(self) -> bool:
        """Whether the other end has the same stage, in another row."""
        return self.stage == self.peer_stage

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
        rows: int = 0,
    ) -> "LinkState":
        tag, payload_bytes = run_tag(run_id), settings.piece_bytes
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
            rows=rows,
            settings=settings,
            sender=sender,
            receiver=receiver,
            on_tensor=on_tensor,
            delivery=Delivery(settings.silent_seconds),
            meter=LinkMeter(None if settings.line is None else settings.line.sent.carried),
            transfers=None
            if settings.on_transfer is None
            else TransferLog(partial(settings.on_transfer, peer_stage)),
        )

    def open_session(self, session: int) -> None:
        self.session = self.sender.session = self.receiver.session = session

    def wake_control(self) -> None:
        """Make the control stream check for messages to send. Any thread may call it."""
        if self.loop is not None and not self.control_wake.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is over
                self.loop.call_soon_threadsafe(self.control_wake.set)

    def next_frame(self, now: float) -> bytes | None:
        """`StreamSender.next_frame`, with a frame size that suits the line, and of at most a quarter of the
        window, so that the next frame is on its way while the neighbour takes this one."""
        rate, pacer = self.meter.capacity, self.settings.pacer
        if pacer is not None:
            rate = min(rate, pacer.rate)
        piece, window = self.settings.piece_bytes, self.settings.window_bytes
        self.sender.pieces = max(1, min(pieces_at(rate, piece), window // (4 * piece)))
        return self.sender.next_frame(now)

    def after_delivery(self, call: Callable[[], None]) -> None:
        """Make `call` when all tensors queued so far are acknowledged; at once if there are none."""
        with self.lock:
            self.waiting.append((self.sender.sent_bytes, call))
        self.delivered()

    def delivered(self) -> None:
        """Make the calls that are due, without the lock because a call may use another link."""
        while True:
            with self.lock:
                if not self.waiting or self.waiting[0][0] > self.sender.acknowledged_bytes:
                    return
                _, call = self.waiting.popleft()
            call()

    def frame_sent(self, frame: bytes, *, again: bool) -> None:
        """Count a frame. A direction's bytes and elements are counted by whole tensors, so that their ratio
        is always right."""
        place = frame_place(frame)
        direction, first = frame_direction(frame), self.settings.held_out_from
        if direction is Direction.ACTIVATION and first is not None and place.key is not None:
            direction = Direction.HELD_OUT if place.key.microbatch >= first else direction
        self.count(bytes=len(frame))
        self.frames_sent += 1
        if again:
            self._count_flow(direction, len(frame), 0)
            return
        self.tensor_bytes += len(frame)
        if place.is_last:
            self._count_flow(direction, self.tensor_bytes, self.elements.popleft())
            self.tensor_bytes = 0

    def count_processor(self, since: float) -> float:
        """Count the calling thread's processor time since it was `since`. Returns its current value."""
        spent = time.thread_time()
        self.processor_seconds += spent - since
        return spent

    def count(self, **by: int) -> None:
        """Add to figures."""
        self.figures = self.figures.grown(**by)

    def _count_flow(self, direction: Direction, size: int, elements: int) -> None:
        flow = FlowFigures(direction=direction, codec="", bytes=size, elements=elements)
        self.figures += LinkFigures(flows=(flow,))

    def forget(self) -> None:
        """Drop all tensors. The closed link stays to answer a neighbour that ends the epoch later."""
        with self.lock:
            self.waiting.clear()
            self.sender.forget()
            self.receiver.forget()
