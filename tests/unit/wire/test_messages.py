"""Every control message survives the wire; what no peer sends is refused; text is one harmless line.

Examples and attacks are derived from what the messages declare (`tests.support.declared`).
"""

import functools
import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, get_args

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import each
from tests.support.declared import Record, attacks, drawn, records, strategy
from tests.support.examples import examples
from wire.data_messages import ArrivingFile, as_bytes, data_message, data_or
from wire.declared import LONGEST_LINE
from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Refusal
from wire.identity.names import MOST_NAME
from wire.messages import (
    LONGEST_REASON,
    Abort,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Hello,
    Leave,
    NodeMessage,
    StepFailed,
    Vote,
)
from wire.messages_proto import (
    coordinator_message_from_proto,
    coordinator_message_to_proto,
    form_of,
    node_message_from_proto,
    node_message_to_proto,
)
from wire.telemetry import MOST_SPANS, SpanColumns
from wire.v1 import control_pb2, enrolment_pb2
from wire.v1.control_pb2 import DataChunk, PutLayerChunk


class Side(NamedTuple):
    """One side's messages."""

    around: Any
    """The protobuf message that holds one of them."""
    to_proto: Callable[[Any], Message]
    from_proto: Callable[[Any], Any]
    records: tuple[Record, ...]

    @classmethod
    def of(cls, union: Any, around: Any, *converters: Callable[[Any], Any]) -> "Side":
        kinds = {kind.__name__: kind for kind in get_args(union)}
        bodies = [field.message_type for field in around.DESCRIPTOR.oneofs_by_name["body"].fields]
        records = [Record(kinds[body.name], body) for body in bodies if body.name != "Several"]
        return cls(around, *converters, tuple(records))

    def strategy(self) -> st.SearchStrategy[Any]:
        return st.one_of(*(strategy(one) for one in self.records))

    @functools.cache  # noqa: B019 - there are two
    def samples(self) -> list[bytes]:
        """A message of each class."""
        return [self.to_proto(drawn(strategy(one), 12)[-1]).SerializeToString() for one in self.records]

    def round_trip(self, message: Any) -> Any:
        return self.from_proto(self.around.FromString(self.to_proto(message).SerializeToString()))


NODES = Side.of(NodeMessage, control_pb2.NodeMessage, node_message_to_proto, node_message_from_proto)
COORDINATOR = Side.of(
    CoordinatorMessage,
    control_pb2.CoordinatorMessage,
    coordinator_message_to_proto,
    coordinator_message_from_proto,
)
node_round_trip, coordinator_round_trip = NODES.round_trip, COORDINATOR.round_trip
PARTS = {
    part: None for one in (*NODES.records, *COORDINATOR.records) for part in records(one.kind, one.descriptor)
}
"""All messages and their parts."""


def plain(value: Any) -> Any:
    """To compare: NaN is not equal to itself, and the order of a mapping does not matter."""
    if isinstance(value, Mapping):
        return sorted((repr(key), plain(held)) for key, held in value.items())
    if isinstance(value, SpanColumns):
        return plain(tuple(value))
    if is_dataclass(value):
        return type(value), [(one.name, plain(getattr(value, one.name))) for one in fields(value)]
    return [plain(held) for held in value] if type(value) is tuple else repr(value)


def test_every_message_is_tried() -> None:
    assert {one.kind for one in NODES.records} == set(get_args(NodeMessage))
    assert {one.kind for one in COORDINATOR.records} == set(get_args(CoordinatorMessage))


@given(NODES.strategy())
def test_node_messages_round_trip(message: NodeMessage) -> None:
    assert plain(node_round_trip(message)) == plain(message)


@given(COORDINATOR.strategy())
def test_coordinator_messages_round_trip(message: CoordinatorMessage) -> None:
    assert plain(coordinator_round_trip(message)) == plain(message)


@each("record", PARTS)
def test_no_field_is_lost(record: Record) -> None:
    """Examples differ in every field, and all of them come back."""
    form, kind = form_of(*record), record.kind
    sent = drawn(strategy(record), 10)
    came = [form.decode(parsed(record, form.encode(one))) for one in sent]
    assert list(map(plain, came)) == list(map(plain, sent))
    for name in getattr(kind, "_fields", None) or [one.name for one in fields(kind)]:
        assert len({repr(plain(getattr(one, name))) for one in sent}) > 1, f"{kind.__name__}.{name}"


@each("record", PARTS)
def test_values_just_outside_of_what_a_field_declares_are_refused(record: Record) -> None:
    decode = form_of(*record).decode
    for field, message in attacks(record):
        with pytest.raises(ProtocolViolationError) as refused:
            decode(message)
        assert str(refused.value).startswith(f"{field} ")
        assert str(refused.value).isprintable() and len(str(refused.value)) < 200


def test_bounds_are_attacked() -> None:
    attacked = {field for record in PARTS for field, _ in attacks(record)}
    assert {"Vote.norms", "LinkFigures.capacity", "UnitHash.sha256", "RelayTimes.times"} <= attacked
    assert {"CodecTimes.times", "ProbePeer.peer", "Refusal.code", "Welcome.heartbeat_seconds"} <= attacked


def parsed(record: Record, encoded: dict[str, Any]) -> Message:
    kind = record.descriptor._concrete_class
    message: Message = kind.FromString(kind(**encoded).SerializeToString())
    return message


def columns(count: int, directions: int = 0) -> dict[str, list[int]]:
    names = ("starts", "lengths", "microbatches", "boundaries", "steps", "peers")
    return {**{name: [0] * count for name in names}, "directions": [directions] * count}


@pytest.mark.parametrize("loss", [None, 0.0, -0.0, math.nan, math.inf])
def test_no_loss_differs_from_any_loss(loss: float | None) -> None:
    vote = node_round_trip(Vote(epoch=1, step=0, norms={}, loss=loss))
    assert isinstance(vote, Vote)
    assert repr(vote.loss) == repr(loss)


@each(
    "message",
    [
        control_pb2.NodeMessage(),
        control_pb2.NodeMessage(step_failed=control_pb2.StepFailed(epoch=1)),
        *(
            control_pb2.NodeMessage(step_spans=spans)
            for spans in (
                control_pb2.StepSpans(names=["forward"], kinds=[0]),
                control_pb2.StepSpans(**columns(2), names=["forward"], kinds=[0, 1]),
                control_pb2.StepSpans(**columns(1, directions=9), names=["forward"], kinds=[0]),
                control_pb2.StepSpans(
                    **columns(MOST_SPANS + 1), names=["forward"], kinds=[0] * (MOST_SPANS + 1)
                ),
            )
        ),
    ],
)
def test_impossible_node_messages_are_refused(message: control_pb2.NodeMessage) -> None:
    with pytest.raises(ProtocolViolationError) as refused:
        node_message_from_proto(message)
    assert "\n" not in str(refused.value)


@each(
    "message",
    [
        control_pb2.CoordinatorMessage(),
        control_pb2.CoordinatorMessage(refusal=enrolment_pb2.Refusal(code="because\n" * 99)),
        control_pb2.CoordinatorMessage(placement=control_pb2.Placement(epoch=1)),
        control_pb2.CoordinatorMessage(
            placement=control_pb2.Placement(stage=1, stages=[control_pb2.PlacedStage(node_id="a")])
        ),
        control_pb2.CoordinatorMessage(
            placement=control_pb2.Placement(replica=1, stages=[control_pb2.PlacedStage(node_id="a")])
        ),
        *(
            control_pb2.CoordinatorMessage(
                placement=control_pb2.Placement(stages=[control_pb2.PlacedStage(node_id="a")], **rows)
            )
            for rows in (
                {"row_groups": [0]},
                {"row_nodes": ["a"], "row_lengths": [1], "row_groups": [0]},
                {"row_nodes": ["a"], "row_addresses": ["a:1"], "row_lengths": [2], "row_groups": [0]},
            )
        ),
        *(
            control_pb2.CoordinatorMessage(begin=control_pb2.Begin(**portions))
            for portions in (
                {"portion_groups": [0]},
                {"portion_lengths": [1], "portion_groups": [0]},
                {"portion_rows": [0], "portion_lengths": [2**32 - 1], "portion_groups": [0]},
            )
        ),
    ],
)
def test_impossible_coordinator_messages_are_refused(message: control_pb2.CoordinatorMessage) -> None:
    with pytest.raises(ProtocolViolationError) as refused:
        coordinator_message_from_proto(message)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\nthinwire: all is well\u202e" + "x" * 5000


def test_text_for_people_becomes_one_harmless_line() -> None:
    failed = node_round_trip(
        StepFailed(epoch=1, step=0, kind=FailureKind.INTERNAL, message=HOSTILE, peer_stage=-1)
    )
    left = node_round_trip(Leave(reason=HOSTILE))
    aborted = coordinator_round_trip(Abort(epoch=1, reason=HOSTILE))
    finished = coordinator_round_trip(Finish(reason=HOSTILE, failed=True))
    refused = coordinator_round_trip(Refusal(RefusalCode.EVICTED, HOSTILE))
    assert isinstance(failed, StepFailed) and isinstance(left, Leave)
    assert isinstance(aborted, Abort) and isinstance(finished, Finish) and isinstance(refused, Refusal)
    lines = (failed.message, aborted.reason, finished.reason, refused.message)
    assert {len(text) for text in lines} == {LONGEST_LINE} and len(left.reason) == LONGEST_REASON
    for text in (*lines, left.reason):
        assert text.isprintable()
        assert "thinwire: all is well" in text


def test_a_node_that_does_not_announce_its_end_asks_to_leave() -> None:
    """As one did before it could say so."""
    plain = control_pb2.NodeMessage(leave=control_pb2.Leave(reason="asked to"))
    assert node_message_from_proto(plain) == Leave(reason="asked to", failed=False)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("Ana's 4090", "Ana's 4090"),
        ("\x1b[2J Ana\r\n\u202e left: node-b\x00", "[2J Ana left: node-b"),
        ('a" (cpu) "b', "a' (cpu) 'b"),
        ("n" * 10_000, "n" * MOST_NAME),
        (" \t\n ", ""),
    ],
)
def test_the_name_of_a_node_is_one_bounded_line_whatever_it_sends(sent: str, shown: str) -> None:
    hello = node_message_from_proto(control_pb2.NodeMessage(hello=control_pb2.Hello(name=sent)))
    assert isinstance(hello, Hello)
    assert hello.name == shown


def test_devices_that_do_not_fill_rows_are_refused() -> None:
    message = enrolment_pb2.Hardware(device="cpu", cores=1, devices=3, tensor_parallel=2)
    with pytest.raises(ProtocolViolationError, match=r"3 devices .* groups of 2"):
        node_message_from_proto(control_pb2.NodeMessage(hello=control_pb2.Hello(hardware=message)))
    unsaid = enrolment_pb2.Hardware(device="cpu", cores=1)
    hello = node_message_from_proto(control_pb2.NodeMessage(hello=control_pb2.Hello(hardware=unsaid)))
    assert isinstance(hello, Hello)
    assert (hello.hardware.devices, hello.hardware.tensor_parallel) == (1, 1)


def mutate(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One to four of: flipped bits, bytes replaced, cut, repeated, inserted; two messages spliced."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + rng.randint(1, 8)]
            case 4:
                changed[at:at] = rng.randbytes(rng.randint(1, 12))
            case 5:
                changed += changed[: 4096 - len(changed)]
            case _:
                changed[at:] = rng.choice(others)[rng.randrange(8) :]
    return bytes(changed)


@dataclass
class Tally:
    messages: int = 0
    refused: int = 0
    no_messages: int = 0


def attack(side: Side, seed: int) -> Tally:
    samples = side.samples()
    rng, tally = random.Random(seed), Tally()
    for number in range(MUTATIONS):
        data = mutate(samples[number % len(samples)], samples, rng)
        try:
            side.from_proto(side.around.FromString(data))
            tally.messages += 1
        except DecodeError:
            tally.no_messages += 1  # gRPC's parser, before this program's; the sessions' test shows the rest
        except ProtocolViolationError as error:
            assert len(str(error)) < 1200 and "\n" not in str(error)
            tally.refused += 1
    return tally


MUTATIONS = examples(50_000)
"""For each direction."""


def both_sides(test: Callable[..., None]) -> Callable[..., None]:
    sides = {"nodes": NODES, "coordinator": COORDINATOR}
    return pytest.mark.parametrize("side", sides.values(), ids=sides.keys())(test)


@pytest.mark.timeout(600)
@both_sides
def test_a_mutated_message_is_a_message_or_refused(side: Side) -> None:
    tally = attack(side, seed=1)
    assert tally.messages + tally.refused + tally.no_messages == MUTATIONS
    # Each outcome is well tried, or the test would show little.
    assert min(tally.messages, tally.no_messages) > MUTATIONS // 10
    assert tally.refused > MUTATIONS // 200


# ---- messages that hold bytes alone are those of protobuf


FIELD = PutLayerChunk.DATA_FIELD_NUMBER
parse = data_or(PutLayerChunk.FromString, FIELD)


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 1 << 20, 1 << 21])
def test_bytes_alone_are_written_as_protobuf_writes_them(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for message, field in ((PutLayerChunk(data=data), FIELD), (DataChunk(data=data), 1)):
        written = data_message(field, data)
        assert written == as_bytes(written) == as_bytes(message)
    read = parse(data_message(FIELD, data))
    assert isinstance(read, memoryview) and read == data


@pytest.mark.parametrize(
    "message",
    [
        PutLayerChunk(),
        PutLayerChunk(step=3, unit="embed", total_bytes=9, data=b"abc"),
        PutLayerChunk(data=b"abc", weights_at=7),
        PutLayerChunk(unit="embed"),
    ],
)
def test_other_messages_are_read_by_protobuf(message: PutLayerChunk) -> None:
    assert parse(as_bytes(message)) == message


def test_bytes_that_are_no_message_are_refused() -> None:
    whole = data_message(FIELD, bytes(1000))
    for damaged in (whole[:-1], whole + b"\xff", whole[:2]):
        with pytest.raises(DecodeError):
            parse(damaged)


def test_a_file_arrives_in_parts_or_ends_early() -> None:
    data = bytes(range(256)) * 100
    for came in (len(data), 300, 0):
        file = ArrivingFile(len(data))
        file.take(data[: came // 2])
        file.take(memoryview(data)[came // 2 : came])
        assert file.size == came
        assert file.read() == (data[:came], hashlib.sha256(data[:came]).hexdigest())
