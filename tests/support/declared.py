"""Examples of control messages, and attacks on them, derived from what their fields declare.

A field that is added to a message is drawn and attacked without a word here. Only a new `Parsed` function
needs a line in `TEXTS`, and a class whose fields must agree with each other one in `AGREED`.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from wire.declared import AtMost, Declared, Line, Parsed, Present, Size, Within, declared_fields
from wire.identity.enrolment import Hardware, at_least_one
from wire.identity.names import clean_name
from wire.messages import Begin, Follow, PlacedRow, PlacedStage, Placement, Portion, node_id
from wire.messages_proto import form_of, parts_of
from wire.spec import ON_LINKS, TensorKey
from wire.telemetry import Span, StepSpans, known_codec

Strategy = st.SearchStrategy[Any]

RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
TEXTS: dict[Callable[[Any], Any], tuple[Strategy, tuple[Any, ...]]] = {
    node_id: (st.from_regex(r"node-[a-z2-7]{10}", fullmatch=True), ("", "node-", "node-" + "a" * 11)),
    known_codec: (st.sampled_from(("fixed-8", "tah")), ("", "fixed-99", "\x1b" * 5000)),
    clean_name: (TEXT.map(clean_name), ()),
    at_least_one: (st.integers(1, 64), ()),
}
"""What each `Parsed` function accepts, and what it refuses."""

MICROSECONDS = st.integers(0, 2**40).map(lambda ticks: ticks / 1e6)
"""Up to 12 days: a stage waits that long for a coordinator or for a lost neighbour."""
NUMBER = st.integers(0, 2**32 - 1)
SPAN = st.builds(
    Span,
    kind=TEXT.filter(str.isprintable),
    start=MICROSECONDS,
    seconds=MICROSECONDS,
    key=st.none()
    | st.builds(TensorKey, st.just(0), NUMBER, NUMBER, NUMBER, st.sampled_from(sorted(ON_LINKS))),
    peer_stage=st.integers(-1, 2**31 - 1),
)
GROUPS = st.lists(NUMBER, max_size=4).map(tuple)
PLACED = st.builds(PlacedStage, node_id=TEXT, address=TEXT)
JOINT = {
    (StepSpans, "spans"): st.lists(SPAN, max_size=5).map(tuple),
    (Begin, "portions"): st.lists(st.builds(Portion, NUMBER, GROUPS), max_size=4).map(tuple),
    (Placement, "rows"): st.lists(st.builds(PlacedRow, node=PLACED, groups=GROUPS), max_size=4).map(tuple),
}
"""Fields that travel as several."""


def _placement(drawn: Placement) -> Placement:
    stages = drawn.stages or (PlacedStage(node_id="node-a", address="10.0.0.1:77"),)
    rows = max(1, len(drawn.rows))
    return replace(drawn, stages=stages, stage=drawn.stage % len(stages), replica=drawn.replica % rows)


def _spans(drawn: StepSpans) -> StepSpans:
    """All of them are of the message's epoch."""
    spans = (span._replace(key=span.key and span.key._replace(epoch=drawn.epoch)) for span in drawn.spans)
    return replace(drawn, spans=tuple(spans))


AGREED: dict[type, Callable[[Any], Any]] = {
    Hardware: lambda drawn: replace(drawn, devices=drawn.devices * drawn.tensor_parallel),
    Follow: lambda drawn: replace(
        drawn, stage=drawn.stage % max(1, drawn.stages), stages=max(1, drawn.stages)
    ),
    Placement: _placement,
    StepSpans: _spans,
}
"""What makes drawn fields agree."""


class Record(NamedTuple):
    """A message, or a part of one, and the protobuf message that holds it."""

    kind: type
    descriptor: Descriptor
    only: frozenset[str] = frozenset()
    """The fields of the protobuf message that are its own; empty: all."""


@functools.cache
def strategy(record: Record) -> Strategy:
    """Any message that correct peers send."""
    drawn = st.builds(
        record.kind,
        **{
            name: JOINT[record.kind, name]
            if (record.kind, name) in JOINT
            else _values(one, record.descriptor.fields_by_name[name])
            for name, one in declared_fields(record.kind).items()
        },
    )
    return drawn.map(AGREED[record.kind]) if record.kind in AGREED else drawn


def _values(one: Declared, field: FieldDescriptor) -> Strategy:
    if one.optional:
        return st.none() | _values(one._replace(optional=False), field)
    if one.origin is tuple:
        (entry,) = one.entries
        return st.lists(_values(entry, field), max_size=3).map(tuple)
    if one.origin is not None:
        entry = field.message_type
        key, value = (_part(part, entry, names) for part, names in parts_of(one, entry))
        return st.dictionaries(key, value, max_size=4)
    if one.is_record:
        return strategy(Record(one.kind, field.message_type))
    return _scalars(one, field)


def _part(one: Declared, entry: Descriptor, names: list[str]) -> Strategy:
    if one.is_record:
        return strategy(Record(one.kind, entry, frozenset(names)))
    (name,) = names
    return _values(one, entry.fields_by_name[name])


def _scalars(one: Declared, field: FieldDescriptor) -> Strategy:
    """Of a number, text, bytes or an enumeration; of one entry if there are several."""
    if (parsed := one.mark(Parsed)) is not None:
        return TEXTS[parsed.parse][0]
    if (size := one.mark(Size)) is not None:
        drawn = st.binary(min_size=size.bytes, max_size=size.bytes)
        return drawn.map(bytes.hex) if one.kind is str else drawn
    if (line := one.mark(Line)) is not None:
        return TEXT.filter(str.isprintable).map(lambda text: text[: line.most])
    bound = one.mark(Within)
    if one.kind is int:
        least, most = RANGES[field.type]
        return st.integers(least, most) if bound is None else st.integers(bound.least, bound.most)
    if one.kind is float:
        if bound is None:
            return st.floats()
        return st.floats(bound.least, bound.most) | st.just(math.nan if bound.nan else bound.least)
    if issubclass(one.kind, Enum):
        return st.sampled_from(one.kind)
    return {bool: st.booleans(), str: TEXT}[one.kind]


def drawn(from_: Strategy, count: int) -> list[Any]:
    """So many examples, the same in every run; the first is the smallest."""
    found: list[Any] = []

    @seed(1)
    @settings(
        max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(from_)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


def records(kind: type, descriptor: Descriptor) -> Iterator[Record]:
    """A message and all its parts."""
    yield from _records(Record(kind, descriptor), set())


def _records(record: Record, seen: set[Record]) -> Iterator[Record]:
    if record in seen:
        return
    seen.add(record)
    yield record
    for name, one in declared_fields(record.kind).items():
        if (record.kind, name) in JOINT:
            continue
        message = record.descriptor.fields_by_name[name].message_type
        if one.origin is tuple:
            inner = [(one.entries[0], frozenset[str]())]
        elif one.origin is not None:
            inner = [(part, frozenset(names)) for part, names in parts_of(one, message)]
        else:
            inner = [(one, frozenset[str]())]
        for part, only in inner:
            if part.is_record:
                yield from _records(Record(part.kind, message, only), seen)
            elif part.origin is tuple and part.entries[0].is_record:
                (name_of,) = only
                yield from _records(
                    Record(part.entries[0].kind, message.fields_by_name[name_of].message_type), seen
                )


def attacks(record: Record) -> Iterator[tuple[str, Message]]:
    """Protobuf messages with a value just outside of what a field declares, with that field's name."""
    valid = form_of(*record).encode(drawn(strategy(record), 1)[0])
    for name, one in declared_fields(record.kind).items():
        if (record.kind, name) in JOINT:
            continue
        field = record.descriptor.fields_by_name[name]
        for value in _outside(one, field):
            message = GetMessageClass(record.descriptor)(**valid)
            message.ClearField(name)
            if value is not None:
                message.MergeFrom(GetMessageClass(record.descriptor)(**{name: value}))
            if one.optional and not one.is_record:
                setattr(message, f"has_{name}", True)
            yield f"{record.kind.__name__}.{name}", message


def _outside(one: Declared, field: FieldDescriptor) -> Iterator[Any]:
    """As the constructor of the protobuf message takes them; None: the field is not there."""
    if (limit := one.mark(AtMost)) is not None:
        yield [{}] * (limit.entries + 1)
    if one.mark(Present) is not None:
        yield None
    if one.origin is tuple and not one.entries[0].is_record:
        yield from ([value] for value in _outside(one.entries[0], field))
    elif one.origin is not None and one.origin is not tuple:
        entry = field.message_type
        (key, keys), (value, others) = parts_of(one, entry)
        good = {} if key.is_record else {keys[0]: drawn(_values(key, entry.fields_by_name[keys[0]]), 1)[0]}
        for part, names in ((key, keys), (value, others)):
            if not part.is_record:
                outside = _outside(part, entry.fields_by_name[names[0]])
                yield from ([{**good, names[0]: bad}] for bad in outside)
    elif one.origin is None and not one.is_record:
        yield from _outside_scalar(one, field)


def _outside_scalar(one: Declared, field: FieldDescriptor) -> Iterator[Any]:
    if (parsed := one.mark(Parsed)) is not None:
        yield from TEXTS[parsed.parse][1]
    elif (size := one.mark(Size)) is not None:
        yield from (bytes(size.bytes - 1), bytes(size.bytes + 1))
    elif (bound := one.mark(Within)) is not None and one.kind is int:
        least, most = RANGES[field.type]
        yield from (value for value in (bound.least - 1, bound.most + 1, most) if least <= value <= most)
    elif bound is not None:
        beyond = (math.nextafter(bound.least, -math.inf), math.nextafter(bound.most, math.inf))
        yield from (value for value in (*beyond, math.inf, -math.inf, math.nan) if not bound.allows(value))
    elif issubclass(one.kind, Enum):
        values = [member.value for member in one.kind]
        yield from ("because\n" * 99,) if isinstance(values[0], str) else ({0, max(values) + 1} - set(values))
