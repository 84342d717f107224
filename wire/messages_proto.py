"""The protobuf form of every control message, derived from its declaration (`wire.declared`).

Fields have the names that they have in `wire/v1/control.proto`. Where the two forms differ:

- A mapping travels as entries: messages whose first fields are the key and whose others are the value.
- A number that may be None has a field `has_NAME` beside it.
- Spans, portions and placed rows travel in columns: a thousand nodes are told of a thousand groups.

Reading checks every value once, and raises `ProtocolViolationError` with the field's name for one that is not
allowed. Whether a message makes sense in the run is for the state machines to decide.

Each class is compiled once, at import: a thousand members send reports twice a second.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, get_args

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from wire.declared import AtMost, Declared, Line, Parsed, Present, Size, Within, declared_fields, line
from wire.errors import ConfigError, ProtocolViolationError
from wire.identity.enrolment import Refusal
from wire.messages import (
    Begin,
    CoordinatorMessage,
    HeldLayer,
    NodeMessage,
    PlacedRow,
    PlacedStage,
    Placement,
    Portion,
    Waiting,
)
from wire.telemetry import MOST_SPANS, SPAN_COLUMNS, SpanColumns, StepSpans
from wire.v1 import control_pb2, enrolment_pb2

Convert = Callable[[Any], Any]


def _refuse(where: str, why: str) -> NoReturn:
    raise ProtocolViolationError(f"{where} {line(why)[:120]}")


# ---- values


class _Way(NamedTuple):
    """How a value travels. None: unchanged."""

    encode: Convert | None = None
    decode: Convert | None = None
    bound: Within | None = None
    """The bounds of a number; `decode` does not check them."""


def _check(bound: Within | None, where: str) -> Callable[[Collection[float]], None]:
    """A check that all of some numbers are within a bound."""
    if bound is None:
        return lambda values: None
    least, most, nan = bound.least, bound.most, bound.nan

    def check(values: Collection[float]) -> None:
        # With a NaN the sum is one, too. Where this fails, the numbers are looked at one by one.
        if not values or (
            least <= min(values) and max(values) <= most and (nan or (total := sum(values)) == total)
        ):
            return
        for value in values:
            if not bound.allows(value):
                _refuse(where, f"cannot be {value}")

    return check


def _scalar(declaration: Declared, where: str) -> _Way:
    """How a number, text, bytes or a member of an enumeration travels."""
    if (size := declaration.mark(Size)) is not None:
        in_hex = declaration.kind is str

        def sized(value: bytes) -> Any:
            if len(value) != size.bytes and (value or not size.or_none):
                _refuse(where, f"cannot have {len(value)} bytes: expected {size.bytes}")
            return value.hex() if in_hex else value

        return _Way(bytes.fromhex if in_hex else None, sized)
    if (text := declaration.mark(Line)) is not None:
        return _Way(None, text.clean())
    members: dict[Any, Any] = {}
    if (parsed := declaration.mark(Parsed)) is not None:
        parse: Convert = parsed.parse
    elif issubclass(declaration.kind, Enum):
        members, parse = {member.value: member for member in declaration.kind}, declaration.kind
    else:
        return _Way(bound=declaration.mark(Within))

    def parsed_value(value: Any) -> Any:
        if value in members:  # much faster than the enumeration's own look-up
            return members[value]
        try:
            return parse(value)
        except (ValueError, ConfigError) as error:
            _refuse(where, f"cannot be {value!r:.40}: {error}")

    return _Way(None, parsed_value)


def _way(declaration: Declared, field: FieldDescriptor, where: str) -> _Way:
    """How the value of a present field travels."""
    if declaration.is_record:
        return _Way(*form_of(declaration.kind, field.message_type))
    if declaration.origin is None:
        return _scalar(declaration, where)
    collection = _tuple if declaration.origin is tuple else _mapping
    encode, decode = collection(declaration, field.message_type, where)
    if (limit := declaration.mark(AtMost)) is None:
        return _Way(encode, decode)

    def limited(entries: Collection[Any]) -> Any:
        if len(entries) > limit.entries:
            _refuse(where, f"cannot have {len(entries)} entries: {limit.entries} at most")
        return decode(entries)

    return _Way(encode, limited)


def _tuple(declaration: Declared, message: Any, where: str) -> tuple[Convert | None, Convert]:
    (entry,) = declaration.entries
    if message is None:
        _, convert, bound = _scalar(entry, where)
        check = _check(bound, where)

        def scalars(values: Iterable[Any]) -> tuple[Any, ...]:
            converted = tuple(values) if convert is None else tuple(map(convert, values))
            check(converted)
            return converted

        return None, scalars
    encode, decode = form_of(entry.kind, message)
    return (lambda values: [encode(value) for value in values]), (
        lambda values: tuple([decode(value) for value in values])
    )


def _mapping(declaration: Declared, entry: Any, where: str) -> tuple[Convert, Convert]:
    (key, keys), (value, others) = parts_of(declaration, entry)
    # By number, or as they are by name.
    items: Convert = (lambda held: held.items()) if key.kind is str else (lambda held: sorted(held.items()))
    if len(keys) == len(others) == 1:
        ((at_key,), (at_value,)) = keys, others
        pair = attrgetter(at_key, at_value)
        way, name = _way(value, entry.fields_by_name[at_value], where), _scalar(key, where).decode
        give, take, check = way.encode or _same, way.decode, _check(way.bound, where)

        def decode(entries: Iterable[Any]) -> dict[Any, Any]:
            pairs = map(pair, entries)
            decoded = dict(pairs) if name is None else {name(at): held for at, held in pairs}
            check(decoded.values())
            return decoded if take is None else {at: take(held) for at, held in decoded.items()}

        return (lambda held: [{at_key: at, at_value: give(item)} for at, item in items(held)]), decode
    key_form = _part(key, entry, keys, where)
    value_form = _part(value, entry, others, where)
    return (
        lambda held: [{**key_form.encode(at), **value_form.encode(item)} for at, item in items(held)],
        lambda entries: {key_form.decode(entry): value_form.decode(entry) for entry in entries},
    )


Part = tuple[Declared, list[str]]
"""A mapping's key or value, and the fields of an entry that hold it."""


def parts_of(declaration: Declared, entry: Descriptor) -> tuple[Part, Part]:
    """A mapping's key and value."""
    key, value = declaration.entries
    names = [field.name for field in entry.fields]
    keys = list(declared_fields(key.kind)) if key.is_record else names[:1]
    return (key, keys), (value, [name for name in names if name not in keys])


def _part(declaration: Declared, entry: Descriptor, names: list[str], where: str) -> "Form":
    """How these fields of an entry travel together."""
    if declaration.is_record:
        return form_of(declaration.kind, entry, frozenset(names))
    (name,) = names
    way, value = _way(declaration, entry.fields_by_name[name], where), attrgetter(name)
    give, take, check = way.encode or _same, way.decode or _same, _check(way.bound, where)

    def decode(message: Any) -> Any:
        field = value(message)
        check((field,))
        return take(field)

    return Form(lambda held: {name: give(held)}, decode)


def _same(value: Any) -> Any:
    return value


# ---- messages


class Form(NamedTuple):
    """The two directions of a message."""

    encode: Callable[[Any], dict[str, Any]]
    """The protobuf message's fields, as its constructor takes them."""
    decode: Convert


class _Joint(NamedTuple):
    """A field that travels as several."""

    names: tuple[str, ...]
    encode: Callable[[Any], dict[str, Any]]
    """Takes the whole message."""
    decode: Convert
    """Makes the field's value of the whole protobuf message."""


def _columns_of(message: StepSpans) -> dict[str, Any]:
    columns = SpanColumns.of(message.epoch, message.spans)
    return {"names": columns.names, **dict(zip(SPAN_COLUMNS, columns.columns, strict=True))}


def _spans_of(message: control_pb2.StepSpans) -> SpanColumns:
    if len(message.kinds) > MOST_SPANS:
        _refuse("StepSpans.spans", f"cannot have {len(message.kinds)} entries: {MOST_SPANS} at most")
    names = [line(name) for name in message.names]
    try:
        return SpanColumns(message.epoch, names, [list(getattr(message, name)) for name in SPAN_COLUMNS])
    except ValueError as error:
        _refuse("StepSpans.spans", f"cannot be read: {error}")


def _runs(where: str, lengths: Sequence[int], groups: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups in runs of these lengths."""
    held = tuple(groups)
    if (told := sum(lengths)) != len(held):
        _refuse(where, f"cannot have {len(held)} groups in runs of {told}")
    return [held[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]


def _portions_of(message: control_pb2.Begin) -> tuple[Portion, ...]:
    rows, lengths = message.portion_rows, message.portion_lengths
    if len(rows) != len(lengths):
        _refuse("Begin.portions", f"cannot have {len(rows)} rows and {len(lengths)} lengths")
    runs = _runs("Begin.portions", lengths, message.portion_groups)
    # A NamedTuple's own constructor is written in Python, and there may be a thousand portions.
    return tuple(map(tuple.__new__, repeat(Portion), zip(rows, runs, strict=True)))


def _rows_of(message: control_pb2.Placement) -> tuple[PlacedRow, ...]:
    nodes, addresses, lengths = message.row_nodes, message.row_addresses, message.row_lengths
    if not len(nodes) == len(addresses) == len(lengths):
        counts = f"{len(nodes)} nodes, {len(addresses)} addresses and {len(lengths)} lengths"
        _refuse("Placement.rows", f"cannot have {counts}")
    runs = _runs("Placement.rows", lengths, message.row_groups)
    return tuple(
        PlacedRow(node=PlacedStage(node_id=node, address=address), groups=groups)
        for node, address, groups in zip(nodes, addresses, runs, strict=True)
    )


_JOINT: dict[tuple[type, str], _Joint] = {
    (StepSpans, "spans"): _Joint(("names", *SPAN_COLUMNS), _columns_of, _spans_of),
    (Begin, "portions"): _Joint(
        ("portion_rows", "portion_lengths", "portion_groups"),
        lambda begin: {
            "portion_rows": [row for row, _ in begin.portions],
            "portion_lengths": [len(groups) for _, groups in begin.portions],
            "portion_groups": [group for _, groups in begin.portions for group in groups],
        },
        _portions_of,
    ),
    (Placement, "rows"): _Joint(
        ("row_nodes", "row_addresses", "row_lengths", "row_groups"),
        lambda placement: {
            "row_nodes": [row.node.node_id for row in placement.rows],
            "row_addresses": [row.node.address for row in placement.rows],
            "row_lengths": [len(row.groups) for row in placement.rows],
            "row_groups": [group for row in placement.rows for group in row.groups],
        },
        _rows_of,
    ),
}


@functools.cache
def form_of(kind: type, message: Descriptor, only: frozenset[str] = frozenset()) -> Form:
    """The form of a dataclass or a NamedTuple.

    Args:
        only: the fields of the protobuf message that the class holds; empty: all.

    Raises TypeError if the declarations of the two differ in a field.
    """
    there = {field.name: field for field in message.fields if not only or field.name in only}
    plain: dict[str, _Way] = {}
    encode: dict[str, Convert] = {}
    dropped: list[str] = []
    whole_encode: list[Convert] = []
    whole_decode: dict[str, Convert] = {}
    for name, declaration in declared_fields(kind).items():
        where = f"{kind.__name__}.{name}"
        if (joint := _JOINT.get((kind, name))) is None and name not in there:
            raise TypeError(f"{where} has no field in {message.full_name}")
        if joint is not None:
            whole_encode.append(joint.encode)
            whole_decode[name] = joint.decode
            dropped.append(name)
            names = joint.names
        elif declaration.optional and not declaration.is_record:
            part, flag = _part(declaration, message, [name], where), f"has_{name}"
            whole_encode.append(_flagged_fields(name, part.encode, flag))
            whole_decode[name] = _flagged_value(part.decode, flag)
            names = name, flag
        elif declaration.is_record:
            form = form_of(declaration.kind, there[name].message_type)
            encode[name] = _unless_none(form.encode) if declaration.optional else form.encode
            whole_decode[name] = _nested(declaration, there[name], form.decode, where)
            names = (name,)
        else:
            plain[name] = way = _way(declaration, there[name], where)
            if way.encode is not None:
                encode[name] = way.encode
            names = (name,)
        for other in names:
            del there[other]
    if there:
        raise TypeError(f"{kind.__name__} has no field for {', '.join(there)} of {message.full_name}")
    return Form(_encoder(kind, encode, whole_encode, dropped), _decoder(kind, plain, whole_decode))


def _flagged_fields(name: str, encode: Convert, flag: str) -> Convert:
    def fields(held: Any) -> dict[str, Any]:
        value = getattr(held, name)
        return {flag: False} if value is None else {**encode(value), flag: True}

    return fields


def _flagged_value(decode: Convert, flag: str) -> Convert:
    return lambda message: decode(message) if getattr(message, flag) else None


def _unless_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _nested(declaration: Declared, field: Any, convert: Convert, where: str) -> Convert:
    name, value = field.name, attrgetter(field.name)
    required, optional = declaration.mark(Present) is not None, declaration.optional

    @functools.cache
    def absent() -> Any:
        if required:
            _refuse(where, "is missing")
        return None if optional else convert(GetMessageClass(field.message_type)())

    return lambda message: convert(value(message)) if message.HasField(name) else absent()


def _encoder(
    kind: type, converts: Mapping[str, Convert], whole: list[Convert], dropped: list[str]
) -> Callable[[Any], dict[str, Any]]:
    names, converted = tuple(declared_fields(kind)), list(converts.items())
    has_dict = bool(kind.__dictoffset__)

    def encode(held: Any) -> dict[str, Any]:
        values = {**vars(held)} if has_dict else {name: getattr(held, name) for name in names}
        for name, convert in converted:
            values[name] = convert(values[name])
        for more in whole:
            values.update(more(held))
        for name in dropped:
            del values[name]
        return values

    return encode


def _decoder(kind: type, plain: Mapping[str, _Way], whole: Mapping[str, Convert]) -> Convert:
    """The function is written out, as `dataclasses` does: a loop over fields takes twice as long."""
    used: dict[str, Any] = {"kind": kind, "new": kind.__new__, "set_dict": object.__setattr__}
    checks, values = [], []
    for number, name in enumerate(declared_fields(kind)):
        value, way = f"message.{name}", plain.get(name)
        if way is None:
            used[f"convert_{number}"] = whole[name]
            value = f"convert_{number}(message)"
        elif way.decode is not None:
            used[f"convert_{number}"] = way.decode
            value = f"convert_{number}({value})"
        elif way.bound is not None:
            check = _check(way.bound, f"{kind.__name__}.{name}")
            used |= {f"least_{number}": way.bound.least, f"most_{number}": way.bound.most}
            used[f"check_{number}"] = check
            checks.append(f"value_{number} = {value}")
            checks.append(f"if not least_{number} <= value_{number} <= most_{number}: ")
            checks[-1] += f"check_{number}((value_{number},))"
            value = f"value_{number}"
        values.append(f"{name!r}: {value}")
    building = [f"values = {{{', '.join(values)}}}"]
    if kind.__dictoffset__:
        # Its own `__init__` sets field after field through `object.__setattr__`.
        building += ["found = new(kind)", "set_dict(found, '__dict__', values)"]
    else:
        building.append("found = kind(**values)")
    if (contradiction := getattr(kind, "contradiction", None)) is not None:
        used |= {"contradiction": contradiction, "refuse": _refuse, "name": f"{kind.__name__}:"}
        building.append("if why := contradiction(found): refuse(name, why)")
    body = [*checks, *building, "return found"]
    exec("def decode(message):\n " + "\n ".join(body), used)
    decode: Convert = used["decode"]
    return decode


MessageT = TypeVar("MessageT")


class _Messages(Generic[MessageT]):
    """All messages that one side sends, by their name in the `oneof` of the message around them."""

    def __init__(self, union: Any, around: Any, sender: str) -> None:
        kinds = {kind.__name__: kind for kind in get_args(union)}
        fields = {field.message_type.name: field for field in around.oneofs_by_name["body"].fields}
        self._sender = sender
        self._forms = {
            fields[name].name: form_of(kind, fields[name].message_type) for name, kind in kinds.items()
        }
        self._names = {kind: fields[name].name for name, kind in kinds.items()}

    def fields(self, message: MessageT) -> dict[str, Any]:
        """The fields that the constructor of the enclosing message takes."""
        name = self._names[type(message)]
        return {name: self._forms[name].encode(message)}

    def read(self, around: Any) -> MessageT:
        form = self._forms.get(name := around.WhichOneof("body") or "")
        if form is None:
            raise ProtocolViolationError(f"{self._sender} sent an empty control message")
        decoded: MessageT = form.decode(getattr(around, name))
        return decoded


_OF_NODES: _Messages[NodeMessage] = _Messages(NodeMessage, control_pb2.NodeMessage.DESCRIPTOR, "a node")
_OF_THE_COORDINATOR: _Messages[CoordinatorMessage] = _Messages(
    CoordinatorMessage, control_pb2.CoordinatorMessage.DESCRIPTOR, "the coordinator"
)
_REFUSAL = form_of(Refusal, enrolment_pb2.Refusal.DESCRIPTOR)
_HELD = form_of(HeldLayer, control_pb2.HeldLayer.DESCRIPTOR)


def node_message_to_proto(message: NodeMessage) -> control_pb2.NodeMessage:
    return control_pb2.NodeMessage(**_OF_NODES.fields(message))


def node_message_from_proto(message: control_pb2.NodeMessage) -> NodeMessage:
    """Raises `ProtocolViolationError` for an empty message and for a value that its declaration refuses."""
    return _OF_NODES.read(message)


def coordinator_message_to_proto(message: CoordinatorMessage) -> control_pb2.CoordinatorMessage:
    return control_pb2.CoordinatorMessage(**_OF_THE_COORDINATOR.fields(message))


def coordinator_message_from_proto(message: control_pb2.CoordinatorMessage) -> CoordinatorMessage:
    """See `node_message_from_proto`."""
    return _OF_THE_COORDINATOR.read(message)


def refusal_from_proto(message: enrolment_pb2.Refusal) -> Refusal:
    decoded: Refusal = _REFUSAL.decode(message)
    return decoded


def held_layer_from_proto(message: control_pb2.HeldLayer) -> HeldLayer:
    """See `node_message_from_proto`."""
    decoded: HeldLayer = _HELD.decode(message)
    return decoded


# ---- what gateways pass on


KEPT_PACKED = 256
"""How many of the newest messages are kept as bytes."""
_packed: dict[int, tuple[CoordinatorMessage, bytes]] = {}
"""By the identity of the message, in the order in which they came."""


def packed(message: CoordinatorMessage) -> bytes:
    """The message as bytes. The newest are kept: many nodes get the same object, by several gateways."""
    kept = _packed.get(id(message))
    if kept is None:
        kept = message, coordinator_message_to_proto(message).SerializeToString()
        _packed[id(message)] = kept
        if len(_packed) > KEPT_PACKED:
            del _packed[next(iter(_packed))]
    return kept[1]


def wait_head(message: Waiting) -> bytes:
    """The encoded prefix of `waited_seconds` in a message of this kind.

    With the packed double behind it, it can follow `packed(message)`: protobuf merges parts of one field.
    """
    return _WAIT_HEADS[type(message)]


_WAIT_HEADS = {
    kind: control_pb2.CoordinatorMessage(
        **{kind.__name__.lower(): {"waited_seconds": 1.0}}
    ).SerializeToString()[:-8]
    for kind in get_args(Waiting)
}
