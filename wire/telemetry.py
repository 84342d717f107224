"""What a node measures of itself and tells the coordinator (wire form: `telemetry_proto.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wire.spec import Direction, TensorKey


@dataclass(frozen=True, kw_only=True)
class FlowReport:
    """Whole frames sent to one neighbour for one kind of tensor, and the elements they carried."""

    direction: Direction
    codec: str
    bytes_sent: int
    elements_sent: int


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One neighbour's link: everything this program wrote to and read from both sockets, in bytes."""

    peer_stage: int
    bytes_sent: int
    bytes_received: int
    retransmits: int
    """Frames sent again."""
    rejects: int
    """Damaged frames received and asked for again."""
    rtt_seconds: float
    """Smoothed round trip; 0 before the first ping was answered."""
    least_rtt_seconds: float = 0.0
    """The least of the newest ones: without what waits in queues."""
    capacity: float = 0.0
    """Bytes a second that the link was measured to carry to the neighbour; 0 while not known."""
    busy_seconds: float = 0.0
    """Time in which something waited to be sent or acknowledged."""
    queued_bytes: int = 0
    """Waiting now."""
    flows: tuple[FlowReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """Totals of one epoch: time since its first step began, bytes since its links opened.

    The coordinator takes differences.
    """

    epoch: int = 0
    """0 for a node without a stage."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind; they sum to `wall_seconds`."""
    wall_seconds: float = 0.0
    links: tuple[LinkReport, ...] = ()
    memory_bytes: int = 0
    """Resident set of the process now."""
    peak_memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    """What torch holds on the GPU now; 0 without one."""
    gpu_peak_memory_bytes: int = 0
    clock_skew_seconds: float = 0.0
    """The node's wall clock minus the coordinator's."""
    clock_error_seconds: float = 0.0
    """How wrong that may be: half of the round trip that it was taken from; 0 before it is known."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a node did from `start` for `seconds`, on its own monotonic clock."""

    kind: str
    """A kind of time of the compute thread, work beside it (`pack`, `unpack`), or part of a tensor's way."""
    start: float
    seconds: float
    key: TensorKey | None = None
    """The tensor that it was done for, if any."""
    peer_stage: int = -1
    """Where a tensor was sent or came from."""


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """What one stage did in a step, or part of it: more than `MOST_SPANS` come in pieces."""

    epoch: int
    step: int
    stage: int
    clock_offset: float
    """Add it to a span's start to get the coordinator's Unix time."""
    clock_error: float
    """How wrong that may be, seconds."""
    dropped: int
    """Spans that the ring had no room for."""
    spans: tuple[Span, ...]


MOST_SPANS = 2000
"""In one message: it must fit into a message of the control connection, with room."""
