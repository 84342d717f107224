"""A node's measurements of itself, sent to the coordinator. The fields declare what is allowed in them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from wire.codecs.formats import codec_format
from wire.declared import Amount, AtMost, Count, Finite, Parsed, Seconds
from wire.figures import LinkFigures, StageFigures
from wire.spec import ON_LINKS, Direction, TensorKey

DIRECT = "direct"
TOGETHER = "simultaneous open"
"""Both ends dialled at the same moment, which opens the NAT of each for the other."""
RELAY = "relay"
"""The coordinator's. Of a volunteer's the node id follows: see `relay_path`."""

MOST_CODEC_TIMES = 32
"""One message holds at most so many times of codecs."""

NOT_TOGETHER = {
    "proxy": "through a proxy nobody can dial at the same moment",
    "families": "one end has IPv4 and the other IPv6, so they cannot dial at the same moment",
    "nat": "dialling at the same moment did not help: one end's NAT has another port for each connection, or "
    "lets nothing in",
}
"""Why both ends of a link did not open it at once: the words for each code in a report."""


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


def known_codec(name: str) -> str:
    """`name` if it is a codec's; otherwise raises ConfigError."""
    codec_format(name)
    return name


@dataclass(frozen=True, kw_only=True)
class Telemetry(StageFigures):
    """Totals of one epoch: time since its first step began, and bytes since its links opened.

    The coordinator takes differences.
    """

    epoch: int = 0
    """0 for a node without a stage."""
    links: tuple[LinkFigures, ...] = ()
    """The links on which the node sends."""
    clock_skew_seconds: Finite = 0.0
    """The node's wall clock minus the coordinator's."""
    clock_error_seconds: Seconds = 0.0
    """Bound on its error: half the round trip of the measurement; 0 before it is known."""
    relayed_bytes: Count = 0
    """Carried for others since the process began."""
    relay_pairs: int = 0
    """Pairs of connections of others that it joins now; a link has two."""
    relay_refused: Count = 0
    line_up: Amount = 0.0
    """The bytes per second that all links together send at most, as set or as measured; 0 while not known."""
    line_down: Amount = 0.0
    """The same of what they receive, as seen."""


class Span(NamedTuple):
    """One activity of a node, from `start` for `seconds` on its own monotonic clock."""

    kind: str
    """A kind of compute-thread time, `pack`, `unpack`, or a part of a transfer."""
    start: float
    seconds: float
    key: TensorKey | None = None
    """The tensor it was for, if any."""
    peer_stage: int = -1
    """The stage a tensor was sent to or came from."""


SPAN_COLUMNS = ("kinds", "starts", "lengths", "directions", "microbatches", "boundaries", "steps", "peers")
_TICKS = 1e6
"""Ticks a second: spans travel, and are kept, in whole microseconds."""
_NO_TENSOR = 0
"""Direction of a span without a tensor; others travel as their value plus one."""
_DIRECTIONS = frozenset((_NO_TENSOR, *(direction + 1 for direction in ON_LINKS)))


class SpanColumns(Collection[Span]):
    """Spans as they travel: columns of small numbers, with one entry per span. Each span is made when it
    is read.

    Starts are relative to the previous span's, and kinds are indices of `names`. A run sends hundreds of
    spans per step, and few of them are ever read.
    """

    def __init__(self, epoch: int, names: Sequence[str], columns: Sequence[Sequence[int]]) -> None:
        """
        Args:
            columns: as `SPAN_COLUMNS` names them.

        Raises ValueError for columns of unequal length and for numbers that stand for nothing.
        """
        kinds, directions = columns[0], columns[3]
        if len(columns) != len(SPAN_COLUMNS) or any(len(column) != len(kinds) for column in columns):
            raise ValueError("spans come in equal columns")
        if kinds and not 0 <= min(kinds) <= max(kinds) < len(names):
            raise ValueError("a span has a kind without a name")
        if not _DIRECTIONS.issuperset(directions):
            raise ValueError("a span's direction is none")
        self.epoch = epoch
        """The epoch of all their tensors."""
        self.names = names
        self.columns = columns

    @classmethod
    def of(cls, epoch: int, spans: Iterable[Span]) -> "SpanColumns":
        """The columns of these spans; those that are columns already stay as they are."""
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

    __hash__ = None  # type: ignore[assignment]  # as a list's: columns may be lists


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """The spans of one stage in one step. More than `MOST_SPANS` come in several messages."""

    epoch: int
    step: int
    stage: int
    clock_offset: Finite
    """Added to a span's start it gives the coordinator's Unix time."""
    clock_error: Seconds
    """Bound on its error, seconds."""
    dropped: int
    """Spans lost because the ring was full."""
    spans: Collection[Span]
    """A tuple, or the columns that came."""


@dataclass(frozen=True, kw_only=True)
class CodecTime:
    """How long packing with one codec takes on a node, in seconds per element."""

    codec: Annotated[str, Parsed(known_codec)]
    pack: Seconds
    unpack: Seconds


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """With planned codecs: how long packing takes on this node, in its own trials and in its steps."""

    times: Annotated[tuple[CodecTime, ...], AtMost(MOST_CODEC_TIMES)]


MOST_SPANS = 2000
"""Spans in one message, which must fit a message of the control connection."""
