"""A node's measurements of itself, sent to the coordinator (wire form: `telemetry_proto.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wire.spec import Direction, TensorKey

DIRECT = "direct"
TOGETHER = "simultaneous open"
"""Both ends dialled at the same moment, which opens the NAT of each for the other."""
RELAY = "relay"
"""The coordinator's. Of a volunteer's the node id follows: see `relay_path`."""

NOT_TOGETHER = {
    "proxy": "through a proxy nobody can dial at the same moment",
    "families": "one end has IPv4 and the other IPv6, so they cannot dial at the same moment",
    "nat": "dialling at the same moment did not help: one end's NAT has another port for each connection, or "
    "lets nothing in",
}
"""Why a link is not opened by both ends at once: in words, by the word of a report."""


def relay_path(node_id: str) -> str:
    """The path by the relay of a volunteer."""
    return f"{RELAY} {node_id}"


def is_relayed(path: str) -> bool:
    """Whether a link takes a relay, whosever."""
    return path.partition(" ")[0] == RELAY


def known_path(path: str) -> str:
    """`path` if it is one; else empty."""
    known = path in (DIRECT, TOGETHER, RELAY) or path == relay_path(path.removeprefix(f"{RELAY} "))
    return path if known else ""


@dataclass(frozen=True, kw_only=True)
class FlowReport:
    """Frames sent to one neighbour for one direction, and the elements they carried."""

    direction: Direction
    codec: str
    bytes_sent: int
    elements_sent: int


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One neighbour's link. Bytes are everything this program wrote to and read from both sockets."""

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
    """The least of the newest round trips: without time in queues."""
    capacity: float = 0.0
    """Measured bytes a second towards the neighbour; 0 while not known."""
    busy_seconds: float = 0.0
    """Time in which something waited to be sent or acknowledged."""
    queued_bytes: int = 0
    """Bytes that wait to be sent or acknowledged now."""
    flows: tuple[FlowReport, ...] = ()
    peer_replica: int = 0
    """The neighbour's row."""
    path: str = ""
    """`DIRECT`, `TOGETHER`, `RELAY` or a `relay_path`; empty while not known."""
    not_together: str = ""
    """If it is relayed, a key of `NOT_TOGETHER`; empty while not known, and at the end that is dialled."""


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
    """Device memory that torch holds now; 0 without a GPU."""
    gpu_peak_memory_bytes: int = 0
    clock_skew_seconds: float = 0.0
    """The node's wall clock minus the coordinator's."""
    clock_error_seconds: float = 0.0
    """Bound on its error: half the round trip of the measurement; 0 before it is known."""
    relayed_bytes: int = 0
    """Carried for others since the process began."""
    relay_pairs: int = 0
    """Pairs of connections of others that it joins now; a link has two."""
    relay_refused: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a node, from `start` for `seconds` on its own monotonic clock."""

    kind: str
    """A kind of compute-thread time, `pack`, `unpack`, or a part of a transfer."""
    start: float
    seconds: float
    key: TensorKey | None = None
    """The tensor it was for, if any."""
    peer_stage: int = -1
    """The stage a tensor was sent to or came from."""


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """Spans of one stage in one step; more than `MOST_SPANS` come in several messages."""

    epoch: int
    step: int
    stage: int
    clock_offset: float
    """Added to a span's start it gives the coordinator's Unix time."""
    clock_error: float
    """Bound on its error, seconds."""
    dropped: int
    """Spans lost because the ring was full."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class CodecTime:
    """What one codec takes a node, in seconds an element."""

    codec: str
    pack: float
    unpack: float


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """With codecs that are planned: what packing takes this node, as it tried and as its steps showed."""

    times: tuple[CodecTime, ...]


MOST_CODEC_TIMES = 32
"""In one message."""

MOST_SPANS = 2000
"""Spans in one message, which must fit a message of the control connection."""
