"""The figures of a link and of a stage, each one record from the node that counts them to the page.

A record has counters, which its fields mark as `COUNTED`, and facts of a moment, such as a rate, a queue
or a path. Records are added with `+` and subtracted with `-`: this sums or subtracts counters, and takes
the facts of the newer record. A new figure is one field here and one in the message that carries it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeVar, cast

from wire.declared import Amount, Count, Line, Seconds, Text
from wire.made import made
from wire.spec import Direction

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LONGEST_PATH = 40
"""Characters of the name of a link's path."""

COUNTED: Mapping[str, bool] = {"counted": True}
"""The metadata of a field that is a counter: a number, seconds by kind, or flows."""


class Place(NamedTuple):
    """A place in the grid of a run."""

    replica: int
    """The row."""
    stage: int


LinkKey = tuple[Place, Place]
"""(sender, receiver)."""

_place = lru_cache(maxsize=65_536)(Place)
"""The same places come with every report."""


class Counters(NamedTuple):
    """The names of the counters of a record, by their form."""

    numbers: tuple[str, ...]
    by_kind: tuple[str, ...]
    """Mappings from a kind to a number."""
    flows: tuple[str, ...]


_COUNTERS: dict[type, Counters] = {}


def counters_of(kind: "type[Figures]") -> Counters:
    """The counters of a record."""
    found = _COUNTERS.get(kind)
    if found is None:
        declared = fields(cast("type[DataclassInstance]", kind))
        counted = {field.name: field.default for field in declared if "counted" in field.metadata}
        by_kind = tuple(name for name, default in counted.items() if default is MISSING)
        flows = tuple(name for name, default in counted.items() if default == ())
        numbers = tuple(name for name in counted if name not in (*by_kind, *flows))
        found = _COUNTERS[kind] = Counters(numbers, by_kind, flows)
    return found


class Figures:
    """Base of the records, which are frozen dataclasses."""

    def __add__(self, newer: Self) -> Self:
        """The sum of both, as in `total`. Sums of pairs are most of the work for a step of many nodes."""
        older, found, counters = vars(self), dict(vars(newer)), counters_of(type(newer))
        for name in counters.numbers:
            found[name] += older[name]
        for name in counters.by_kind:
            found[name] = _sums_by_kind((older[name], found[name]))
        for name in counters.flows:
            found[name] = _flow_sums((older[name], found[name]))
        return made(type(newer), found)

    def __sub__(self, older: "Figures") -> Self:
        """What was added since an older record of the same totals. The codec of a flow may have changed
        since."""
        found, theirs = dict(vars(self)), vars(older)
        counters = counters_of(type(older))
        for name in counters.numbers:
            found[name] -= theirs[name]
        for name in counters.by_kind:
            found[name] = {kind: number - theirs[name].get(kind, 0.0) for kind, number in found[name].items()}
        for name in counters.flows:
            # Totals of a link have one flow of a direction.
            flows = {flow.direction: flow for flow in theirs[name]}
            found[name] = tuple([f - flows[f.direction] if f.direction in flows else f for f in found[name]])
        return made(type(self), found)

    def counters(self, change: Callable[[str, Any], Any]) -> Self:
        """The record with each counting number changed by a function of its field's name and itself."""
        found, counters = dict(vars(self)), counters_of(type(self))
        for name in counters.numbers:
            found[name] = change(name, found[name])
        for name in counters.by_kind:
            found[name] = {kind: change(name, number) for kind, number in found[name].items()}
        for name in counters.flows:
            found[name] = tuple(flow.counters(change) for flow in found[name])
        return made(type(self), found)

    def over(self, count: int) -> Self:
        """The mean of `count` of them, where this is their sum; whole numbers are rounded down."""
        return self.counters(lambda _, value: value // count if isinstance(value, int) else value / count)

    def grown(self, **by: float) -> Self:
        """The record with counters larger by these numbers."""
        found = dict(vars(self))
        for name, number in by.items():
            found[name] += number
        return made(type(self), found)

    def json_fields(self) -> dict[str, Any]:
        """The fields as they are in JSON."""
        return vars(self)


Record = TypeVar("Record", bound=Figures)


def total(records: Sequence[Record]) -> Record:
    """The sum of records, the newest last; there is one at least."""
    if len(records) == 1:
        return records[0]
    rows = [vars(record) for record in records]
    found, counters = dict(rows[-1]), counters_of(type(records[-1]))
    for name in counters.numbers:
        found[name] = sum([row[name] for row in rows])
    for name in counters.by_kind:
        found[name] = _sums_by_kind([row[name] for row in rows])
    for name in counters.flows:
        found[name] = _flow_sums([row[name] for row in rows])
    return made(type(records[-1]), found)


def _sums_by_kind(values: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for value in values:
        for kind, number in value.items():
            sums[kind] = sums.get(kind, 0.0) + number
    return sums


def _flow_sums(several: "Iterable[tuple[FlowFigures, ...]]") -> "tuple[FlowFigures, ...]":
    """One flow of each direction and codec."""
    kinds: dict[tuple[Direction, str], list[FlowFigures]] = {}
    for flows in several:
        for flow in flows:
            kinds.setdefault((flow.direction, flow.codec), []).append(flow)
    return tuple([alike[0] + alike[1] if len(alike) == 2 else total(alike) for alike in kinds.values()])


@dataclass(frozen=True, kw_only=True)
class FlowFigures(Figures):
    """The frames of one kind of tensor in one direction of a link, and the elements that they carried."""

    direction: Direction
    codec: Text
    bytes: Count = field(default=0, metadata=COUNTED)
    elements: Count = field(default=0, metadata=COUNTED)

    @property
    def kind(self) -> str:
        """`direction` in JSON and for people: `activation`, `gradient`, `tied_share`, ..."""
        return _NAMES[self.direction]

    @property
    def bits(self) -> float:
        """Bits an element, frames and headers included; 0 without elements."""
        return 8 * self.bytes / self.elements if self.elements else 0.0

    def json_fields(self) -> dict[str, Any]:
        return {**vars(self), "direction": self.kind}


_NAMES = {direction: direction.name.lower() for direction in Direction}


def flow_sum(links: "Iterable[LinkFigures]", kind: str) -> FlowFigures:
    """What these links sent of one kind of tensor, with any codec."""
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
    """All that `source` wrote to both sockets: whole messages of both streams, frame headers included. gRPC,
    TLS and TCP add under 1 % for tensors of many frames."""
    flows: tuple[FlowFigures, ...] = field(default=(), metadata=COUNTED)
    """Frames of whole tensors, and frames sent again."""
    busy_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    """Time in which tensors waited to be sent or acknowledged."""
    processor_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    """The processor time of the thread that sends, for frames and TLS. If it is busy whenever the link is,
    the program limits the link, and not the line."""
    capacity: Amount = 0.0
    """The bytes per second that the link delivers while it is busy; 0 while not known."""
    round_trip_seconds: Seconds = 0.0
    """Smoothed, of a ping on the control stream; 0 before the first reply."""
    retransmits: Count = field(default=0, metadata=COUNTED)
    """Frames sent again."""
    rejects: Count = field(default=0, metadata=COUNTED)
    """Damaged frames. A node counts those that came to it; in sums they are those that `target` refused."""
    queued_bytes: Count = 0
    """Waiting to be sent or acknowledged now."""
    source_replica: int = 0
    """The row of the stage that sends."""
    target_replica: int = 0
    path: Annotated[str, Line(LONGEST_PATH)] = ""
    """The path of the newest connection: `DIRECT`, `TOGETHER`, `RELAY` or a `relay_path` of `wire.telemetry`;
    empty while not known."""
    not_together: Annotated[str, Line(LONGEST_PATH)] = ""
    """Why the ends of a relayed link could not dial at the same moment, a key of
    `wire.telemetry.NOT_TOGETHER`; empty while not known, and at the end that is dialled."""
    bytes_received: Count = field(default=0, metadata=COUNTED)
    """Read from both sockets."""
    least_round_trip_seconds: Seconds = 0.0
    """The least of the newest round trips: without time in queues."""

    @property
    def ends(self) -> LinkKey:
        return _place(self.source_replica, self.source), _place(self.target_replica, self.target)

    @property
    def held_out_bytes(self) -> int:
        """The part of `bytes` that held-out samples sent."""
        return sum([flow.bytes for flow in self.flows if flow.direction is Direction.HELD_OUT])


@dataclass(frozen=True, kw_only=True)
class StageFigures(Figures):
    """A stage's time and memory."""

    wall_seconds: Seconds = field(default=0.0, metadata=COUNTED)
    seconds: Mapping[Text, Seconds] = field(default_factory=dict, metadata=COUNTED)
    """Seconds by kind (forward, backward, encode, ...); they sum to `wall_seconds`."""
    memory_bytes: Count = 0
    """Resident set of the node's process now."""
    peak_memory_bytes: Count = 0
    gpu_memory_bytes: Count = 0
    """Device memory that torch holds now; 0 without a GPU."""
    gpu_peak_memory_bytes: Count = 0
    expert_load: Amount = 0.0
    """For a mixture, since the epoch began: the tokens of the busiest expert over the mean of the block's
    experts, in the most uneven block; 0 without experts."""
    dead_experts: Count = 0
    """Experts of all blocks that got no token since then."""
    without_kernels: Annotated[str, Line(200)] = ""
    """What the device computes in plain torch, because kernels give wrong results there; empty if there is
    nothing."""

    def time_shares(self, kinds: Iterable[str]) -> dict[str, float]:
        """The shares of `wall_seconds`, 0 to 1, by kind; empty before any time has passed."""
        wall, seconds = self.wall_seconds, self.seconds
        return {kind: seconds.get(kind, 0.0) / wall for kind in kinds} if wall > 0 else {}
