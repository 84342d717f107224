"""The figures of a link and of a stage. The same record is used from the node that counts to the page.

A record has counters, whose fields are marked as `COUNTED`, and momentary values, such as a rate, a queue or
a path. `+` and `-` add or subtract counters, and take momentary values from the newer record. A new figure
needs one field here and one in the message that carries it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar, cast

from wire.declared import Amount, Count, Line, Seconds, Text
from wire.frozen import frozen
from wire.spec import Direction

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LONGEST_PATH = 40
"""The most characters of the name of a link's path."""

COUNTED: Mapping[str, bool] = {"counted": True}
"""The metadata of a field that is a counter: a number, a mapping from kind to seconds, or flows."""


class Place(NamedTuple):
    """A stage of a row: a seat in the grid of a run."""

    replica: int
    """The row."""
    stage: int


LinkKey = tuple[Place, Place]
"""(sender, receiver)."""

_place = lru_cache(maxsize=65_536)(Place)
"""Cached, because every report names the same places."""


class Counters(NamedTuple):
    """The names of a record's counters, by type."""

    numbers: tuple[str, ...]
    by_kind: tuple[str, ...]
    """Counters that map a kind to a number."""
    flows: tuple[str, ...]


_COUNTERS: dict[type, Counters] = {}


def counters_of(kind: "type[Figures]") -> Counters:
    counters = _COUNTERS.get(kind)
    if counters is None:
        declared = fields(cast("type[DataclassInstance]", kind))
        counted = {field.name: field.default for field in declared if "counted" in field.metadata}
        by_kind = tuple(name for name, default in counted.items() if default is MISSING)
        flows = tuple(name for name, default in counted.items() if default == ())
        numbers = tuple(name for name in counted if name not in (*by_kind, *flows))
        counters = _COUNTERS[kind] = Counters(numbers, by_kind, flows)
    return counters


class Figures:
    """Base class of the records, which are frozen dataclasses."""

    def __add__(self, newer: Self) -> Self:
        """`total` of two records, but faster: with many nodes, most of the work is adding pairs."""
        older, sums, counters = vars(self), dict(vars(newer)), counters_of(type(newer))
        for name in counters.numbers:
            sums[name] += older[name]
        for name in counters.by_kind:
            sums[name] = _sums_by_kind((older[name], sums[name]))
        for name in counters.flows:
            sums[name] = _flow_sums((older[name], sums[name]))
        return frozen(type(newer), sums)

    def __sub__(self, older: "Figures") -> Self:
        """What was counted since an older record of the same totals. A flow's codec may have changed."""
        values, theirs = dict(vars(self)), vars(older)
        counters = counters_of(type(older))
        for name in counters.numbers:
            values[name] -= theirs[name]
        for name in counters.by_kind:
            values[name] = {
                kind: number - theirs[name].get(kind, 0.0) for kind, number in values[name].items()
            }
        for name in counters.flows:
            # Totals of a link have one flow per direction.
            flows = {flow.direction: flow for flow in theirs[name]}
            values[name] = tuple(
                [f - flows[f.direction] if f.direction in flows else f for f in values[name]]
            )
        return frozen(type(self), values)

    def counters(self, change: Callable[[str, Any], Any]) -> Self:
        """The record with `change(field name, number)` in place of each counter's numbers."""
        values, counters = dict(vars(self)), counters_of(type(self))
        for name in counters.numbers:
            values[name] = change(name, values[name])
        for name in counters.by_kind:
            values[name] = {kind: change(name, number) for kind, number in values[name].items()}
        for name in counters.flows:
            values[name] = tuple(flow.counters(change) for flow in values[name])
        return frozen(type(self), values)

    def over(self, count: int) -> Self:
        """The mean of `count` records whose sum this is. Integers are rounded down."""
        return self.counters(lambda _, value: value // count if isinstance(value, int) else value / count)

    def grown(self, **by: float) -> Self:
        """The record with these numbers added to its counters."""
        values = dict(vars(self))
        for name, number in by.items():
            values[name] += number
        return frozen(type(self), values)

    def json_fields(self) -> dict[str, Any]:
        return vars(self)


Record = TypeVar("Record", bound=Figures)


def total(records: Sequence[Record]) -> Record:
    """The sum of one or more records, the newest last."""
    if len(records) == 1:
        return records[0]
    rows = [vars(record) for record in records]
    sums, counters = dict(rows[-1]), counters_of(type(records[-1]))
    for name in counters.numbers:
        sums[name] = sum([row[name] for row in rows])
    for name in counters.by_kind:
        sums[name] = _sums_by_kind([row[name] for row in rows])
    for name in counters.flows:
        sums[name] = _flow_sums([row[name] for row in rows])
    return frozen(type(records[-1]), sums)


def _sums_by_kind(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for value in values:
        for kind, number in value.items():
            sums[kind] = sums.get(kind, 0.0) + number
    return sums


def _flow_sums(several: "Iterable[tuple[FlowFigures, ...]]") -> "tuple[FlowFigures, ...]":
    """The sums of flows by direction and codec."""
    kinds: dict[tuple[Direction, str], list[FlowFigures]] = {}
    for flows in several:
        for flow in flows:
            kinds.setdefault((flow.direction, flow.codec), []).append(flow)
    return tuple([alike[0] + alike[1] if len(alike) == 2 else total(alike) for alike in kinds.values()])


@dataclass(frozen=True, kw_only=True)
class FlowFigures(Figures):
    """The frames of one kind of tensor in one direction of a link, and the number of elements in them."""

    direction: Direction
    codec: Text
    bytes: Count = field(default=0, metadata=COUNTED)
    elements: Count = field(default=0, metadata=COUNTED)

    @property
    def kind(self) -> str:
        """The name of `direction` in JSON and for people: `activation`, `gradient`, `tied_share`, ..."""
        return _NAMES[self.direction]

    @property
    def bits(self) -> float:
        """Bits per element, frames and headers included; 0 without elements."""
        return 8 * self.bytes / self.elements if self.elements else 0.0

    def json_fields(self) -> dict[str, Any]:
        return {**vars(self), "direction": self.kind}


_NAMES = {direction: direction.name.lower() for direction in Direction}


def flow_sum(links: "Iterable[LinkFigures]", kind: str) -> FlowFigures:
    """What these links sent for one kind of tensor, with any codec."""
    flows = [flow for link in links for flow in link.flows if flow.kind == kind]
    return FlowFigures(
        direction=Direction[kind.upper()],
        codec="",
        bytes=sum([flow.bytes for flow in flows]),
        elements=sum([flow.elements for flow in flows]),
    )


@dataclass(frozen=True, kw_only=True)
class LinkFigures(Figures):
    """One direction of a link: what the stage `source` sent to the stage `target`."""

    source: int = 0
    target: int = 0
    bytes: Count = field(default=0, metadata=COUNTED)
    """Everything that `source` wrote to both sockets: whole messages of both streams, frame headers included.
    gRPC, TLS and TCP add less than 1 % for tensors of many frames."""
    flows: tuple[FlowFigures, ...] = field(default=(), metadata=COUNTED)
    """Frames of whole tensors, and retransmitted frames."""
    busy_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    """The time in which tensors waited to be sent or acknowledged."""
    processor_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    """The processor time of the sending thread, for frames and TLS. If that thread is busy whenever the link
    is, the program limits the link, not the line."""
    capacity: Amount = 0.0
    """The bytes per second that the link delivers while it is busy; 0 while not known."""
    round_trip_seconds: Seconds = 0.0
    """The smoothed round trip of pings on the control stream; 0 before the first reply."""
    retransmits: Count = field(default=0, metadata=COUNTED)
    """Retransmitted frames."""
    rejects: Count = field(default=0, metadata=COUNTED)
    """Damaged frames. A node counts those that it received; sums count those that `target` refused."""
    queued_bytes: Count = 0
    """The bytes that wait to be sent or acknowledged now."""
    source_replica: int = 0
    """The row of the stage that sends."""
    target_replica: int = 0
    path: Annotated[str, Line(LONGEST_PATH)] = ""
    """The path of the newest connection: `DIRECT`, `TOGETHER`, `RELAY` or a `relay_path` of `wire.telemetry`;
    empty while unknown."""
    not_together: Annotated[str, Line(LONGEST_PATH)] = ""
    """Why the ends of a relayed link could not open it simultaneously: a key of
    `wire.telemetry.NOT_TOGETHER`. Empty while unknown, and at the end that is dialled."""
    bytes_received: Count = field(default=0, metadata=COUNTED)
    """The bytes read from both sockets."""
    least_round_trip_seconds: Seconds = 0.0
    """The least of the newest round trips, which excludes queueing."""

    @property
    def ends(self) -> LinkKey:
        return _place(self.source_replica, self.source), _place(self.target_replica, self.target)

    @property
    def held_out_bytes(self) -> int:
        """The part of `bytes` for held-out samples."""
        return sum([flow.bytes for flow in self.flows if flow.direction is Direction.HELD_OUT])


@dataclass(frozen=True, kw_only=True)
class StageFigures(Figures):
    """A stage's time and memory."""

    wall_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    seconds: Mapping[Text, Seconds] = field(default_factory=dict, metadata=COUNTED)
    """Seconds by kind (forward, backward, encode, ...); they sum to `wall_seconds`."""
    memory_bytes: Count = 0
    """The current resident set of the node's process."""
    peak_memory_bytes: Count = 0
    gpu_memory_bytes: Count = 0
    """The device memory that torch holds now; 0 without a GPU."""
    gpu_peak_memory_bytes: Count = 0
    expert_load: Amount = 0.0
    """For a mixture, since the epoch began: the busiest expert's tokens over the mean of its block's experts,
    in the most uneven block. 0 without experts."""
    dead_experts: Count = 0
    """The experts in all blocks that got no token since the epoch began."""
    without_kernels: Annotated[str, Line(200)] = ""
    """What the device computes in plain torch because its kernels give wrong results; empty if nothing."""

    def time_shares(self, kinds: Iterable[str]) -> dict[str, float]:
        """The shares of `wall_seconds`, 0 to 1, by kind; empty before any time has passed."""
        wall, seconds = self.wall_seconds, self.seconds
        return {kind: seconds.get(kind, 0.0) / wall for kind in kinds} if wall > 0 else {}
