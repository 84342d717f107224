"""A node's measurements of itself, which it sends to the coordinator. The fields declare their limits."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from wire.codecs.formats import codec_format
from wire.declared import Amount, AtMost, Count, Finite, Parsed, Seconds
from wire.figures import LinkFigures, StageFigures
from wire.identity.names import is_node_id
from wire.spec import ON_LINKS, Direction, TensorKey

DIRECT = "direct"
TOGETHER = "simultaneous open"
"""Both ends dialled at the same moment, which opens each one's NAT for the other."""
RELAY = "relay"
"""The coordinator's relay. For a volunteer's relay the node id follows (`relay_path`)."""

MOST_CODEC_TIMES = 32
"""The most codec times in one message."""

NOT_TOGETHER = {
    "proxy": "a simultaneous open does not work through a proxy",
    "families": "one end has IPv4 and the other IPv6, which excludes a simultaneous open",
    "nat": "a simultaneous open failed: one end's NAT uses a different port for each connection, or blocks "
    "incoming packets",
}
"""Why a simultaneous open of a link was not possible, as a message for each code in reports."""


def relay_path(node_id: str) -> str:
    """The name of the path through a volunteer's relay."""
    return f"{RELAY} {node_id}"


def is_relayed(path: str) -> bool:
    """Whether the path goes through a relay, the coordinator's or a volunteer's."""
    return path.partition(" ")[0] == RELAY


def known_path(path: str) -> str:
    """`path` if it is valid, else ""."""
    by = path.removeprefix(f"{RELAY} ")
    return path if path in (DIRECT, TOGETHER, RELAY) or (by != path and is_node_id(by)) else ""


def known_codec(name: str) -> str:
    """`name`, if it is a codec's name. Raises ConfigError otherwise."""
    codec_format(name)
    return name


@dataclass(frozen=True, kw_only=True)
class Telemetry(StageFigures):
    """Totals for one epoch: time since its first step began, and bytes since its links opened. The
    coordinator computes differences.
    """

    epoch: int = 0
    """0 for a node without a stage."""
    links: tuple[LinkFigures, ...] = ()
    """The links on which the node sends."""
    clock_skew_seconds: Finite = 0.0
    """The node's wall clock minus the coordinator's."""
    clock_error_seconds: Seconds = 0.0
    """The bound on its error, half the round trip of the measurement; 0 while unknown."""
    relayed_bytes: Count = 0
    """The bytes that its relay has carried since the process began."""
    relay_pairs: int = 0
    """The pairs of connections that its relay joins now. A link has two."""
    relay_refused: Count = 0
    line_up: Amount = 0.0
    """The most bytes per second that all links together send, as set or as measured; 0 while unknown."""
    line_down: Amount = 0.0
    """The most bytes per second that all links together receive, as measured; 0 while unknown."""


class Span(NamedTuple):
    """One activity of a node, from `start` for `seconds` on its own monotonic clock."""

    kind: str
    """A kind of compute-thread time, `pack`, `unpack`, or a part of a transfer."""
    start: float
    seconds: float
    key: TensorKey | None = None
    """The tensor that it belongs to, if any."""
    peer_stage: int = -1
    """The stage that the tensor was sent to or came from."""


SPAN_COLUMNS = ("kinds", "starts", "lengths", "directions", "microbatches", "boundaries", "steps", "peers")
_TICKS = 1e6
"""Ticks per second: spans are sent and stored in whole microseconds."""
_NO_TENSOR = 0
"""The encoded direction of a span without a tensor. Others are encoded as their value plus one."""
_DIRECTIONS = frozenset((_NO_TENSOR, *(direction + 1 for direction in ON_LINKS)))


class SpanColumns(Collection[Span]):
    """Spans in their encoded form: columns of small numbers, with one entry per span. `Span` objects are
    created on iteration, because a run sends hundreds of spans per step and few are ever read.

    Starts are relative to the previous span's start, and kinds are indices into `names`.
    """

    def __init__(self, epoch: int, names: Sequence[str], columns: Sequence[Sequence[int]]) -> None:
        """
        Args:
            columns: one for each name in `SPAN_COLUMNS`.

        Raises ValueError for columns of unequal length and for invalid numbers.
        """
        kinds, directions = columns[0], columns[3]
        if len(columns) != len(SPAN_COLUMNS) or any(len(column) != len(kinds) for column in columns):
            raise ValueError("the columns of spans have different lengths")
        if kinds and not 0 <= min(kinds) <= max(kinds) < len(names):
            raise ValueError("a span has a kind without a name")
        if not _DIRECTIONS.issuperset(directions):
            raise ValueError("a span has an unknown direction")
        self.epoch = epoch
        """The epoch of all tensors."""
        self.names = names
        self.columns = columns

    @classmethod
    def of(cls, epoch: int, spans: Iterable[Span]) -> "SpanColumns":
        """The columns of these spans; unchanged if they are columns already."""
        if isinstance(spans, cls):
            return spans
        places: dict[str, int] = {}
        rows = []
        before = 0
        for kind, start, seconds, key, peer in spans:
            at = round(_TICKS * start)
            # Round ends, not lengths, so that adjacent spans stay adjacent.
            length = round(_TICKS * (start + seconds)) - at
            place = places.setdefault(kind, len(places))
            if key is None:
                rows.append((place, at - before, length, _NO_TENSOR, 0, 0, 0, peer))
            else:
                tensor = key.direction + 1, key.microbatch, key.boundary, key.step
                rows.append((place, at - before, length, *tensor, peer))
            before = at
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(SPAN_COLUMNS)
        return cls(epoch, tuple(places), columns)

    def __iter__(self) -> Iterator[Span]:
        start = 0
        for kind, ahead, length, direction, microbatch, boundary, step, peer in zip(
            *self.columns, strict=True
        ):
            start += ahead
            key = None
            if direction != _NO_TENSOR:
                key = TensorKey(self.epoch, step, microbatch, boundary, Direction(direction - 1))
            yield Span(self.names[kind], start / _TICKS, length / _TICKS, key, peer)

    def __len__(self) -> int:
        return len(self.columns[0])

    def __contains__(self, span: object) -> bool:
        return any(held == span for held in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpanColumns | tuple) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    __hash__ = None  # type: ignore[assignment]  # unhashable like a list, because columns may be lists


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """The spans of one stage in one step. More than `MOST_SPANS` are sent in several messages."""

    epoch: int
    step: int
    stage: int
    clock_offset: Finite
    """A span's start plus this is the coordinator's Unix time."""
    clock_error: Seconds
    """The bound on the offset's error, in seconds."""
    dropped: int
    """The number of spans lost because the ring buffer was full."""
    spans: Collection[Span]
    """A tuple, or the received columns."""


@dataclass(frozen=True, kw_only=True)
class CodecTime:
    """How long packing with one codec takes on a node, in seconds per element."""

    codec: Annotated[str, Parsed(known_codec)]
    pack: Seconds
    unpack: Seconds


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """How long packing takes on this node, measured in trials and in steps. Sent if codecs are planned."""

    times: Annotated[tuple[CodecTime, ...], AtMost(MOST_CODEC_TIMES)]


MOST_SPANS = 2000
"""The most spans in one message, which must fit the control connection's limit."""
