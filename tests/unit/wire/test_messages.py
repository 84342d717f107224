"""Every control message survives the wire; what no peer sends is refused; text is one harmless line."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import each
from wire.coordinator_messages_proto import coordinator_message_from_proto, coordinator_message_to_proto
from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Hardware, Refusal
from wire.identity.names import MOST_NAME, clean_name
from wire.messages import (
    LONGEST_REASON,
    Abort,
    Applied,
    Begin,
    BlockTime,
    BoundaryEnd,
    Commit,
    CoordinatorMessage,
    FailureKind,
    Finish,
    Follow,
    Following,
    FollowStep,
    GroupDigests,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leave,
    NodeMessage,
    PeerRate,
    Placed,
    PlacedRow,
    PlacedStage,
    Placement,
    Prefetch,
    ProbePeer,
    Ready,
    RelayFor,
    Relays,
    RelayTimes,
    Restore,
    Retain,
    SendLayers,
    ShutOut,
    StateHashes,
    StepFailed,
    TakeSnapshot,
    UnitHash,
    Validate,
    Validated,
    Vote,
    Welcome,
)
from wire.node_messages_proto import node_message_from_proto, node_message_to_proto
from wire.spec import Direction, TensorKey
from wire.telemetry import (
    MOST_CODEC_TIMES,
    MOST_SPANS,
    CodecTime,
    CodecTimes,
    FlowReport,
    LinkReport,
    Span,
    StepSpans,
    Telemetry,
)
from wire.telemetry_proto import LONGEST_LINE, LONGEST_PATH, LONGEST_SECONDS, MOST
from wire.v1 import control_pb2, enrolment_pb2

NUMBER = st.integers(0, 2**32 - 1)
COUNT = st.integers(0, 2**64 - 1)
MEASURED = st.integers(0, int(MOST))
AMOUNT = st.floats(0, LONGEST_SECONDS)
NODE_ID = st.from_regex(r"node-[a-z2-7]{10}", fullmatch=True)
ANY_FLOAT = st.floats()
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
LINE = st.text(st.characters(codec="utf-8"), max_size=40).filter(str.isprintable)

HARDWARE = st.builds(
    lambda device, cores, memory, rows, ranks: Hardware(
        device, cores, memory, devices=rows * ranks, tensor_parallel=ranks
    ),
    LINE,
    NUMBER,
    COUNT,
    st.integers(1, 64),
    st.integers(1, 64),
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
FLOWS = st.lists(
    st.builds(
        FlowReport,
        direction=st.sampled_from(Direction),
        codec=LINE,
        bytes_sent=MEASURED,
        elements_sent=MEASURED,
    ),
    max_size=4,
).map(tuple)
TELEMETRY = st.builds(
    Telemetry,
    epoch=NUMBER,
    times=st.dictionaries(LINE, AMOUNT, max_size=8),
    wall_seconds=AMOUNT,
    links=st.lists(
        st.builds(
            LinkReport,
            peer_stage=NUMBER,
            bytes_sent=MEASURED,
            bytes_received=MEASURED,
            retransmits=MEASURED,
            rejects=MEASURED,
            rtt_seconds=AMOUNT,
            least_rtt_seconds=AMOUNT,
            capacity=AMOUNT,
            busy_seconds=AMOUNT,
            queued_bytes=MEASURED,
            flows=FLOWS,
            peer_replica=NUMBER,
            not_together=LINE.filter(lambda text: len(text) <= LONGEST_PATH),
        ),
        max_size=3,
    ).map(tuple),
    memory_bytes=MEASURED,
    peak_memory_bytes=MEASURED,
    gpu_memory_bytes=MEASURED,
    gpu_peak_memory_bytes=MEASURED,
    clock_skew_seconds=FINITE,
    clock_error_seconds=AMOUNT,
    relayed_bytes=MEASURED,
    relay_pairs=NUMBER,
    relay_refused=MEASURED,
    line_up=AMOUNT,
    line_down=AMOUNT,
)
MICROSECONDS = st.integers(0, 2**40).map(lambda ticks: ticks / 1e6)
"""Up to 12 days: a stage waits that long for a coordinator or for a lost neighbour."""
SPANS = st.integers(0, 2**32 - 1).flatmap(
    lambda epoch: st.builds(
        StepSpans,
        epoch=st.just(epoch),
        step=NUMBER,
        stage=NUMBER,
        clock_offset=FINITE,
        clock_error=AMOUNT,
        dropped=NUMBER,
        spans=st.lists(
            st.builds(
                Span,
                kind=LINE,
                start=MICROSECONDS,
                seconds=MICROSECONDS,
                key=st.none()
                | st.builds(
                    TensorKey,
                    epoch=st.just(epoch),
                    step=NUMBER,
                    microbatch=NUMBER,
                    boundary=NUMBER,
                    direction=st.sampled_from(Direction),
                ),
                peer_stage=st.integers(-1, 2**31 - 1),
            ),
            max_size=5,
        ).map(tuple),
    )
)


PLACE = st.builds(PlacedStage, node_id=TEXT, address=TEXT)


def _placements(stages: int) -> st.SearchStrategy[Placement]:
    row = st.lists(PLACE, min_size=stages, max_size=stages).map(tuple)
    rows = st.lists(
        st.builds(PlacedRow, node=PLACE, groups=st.lists(NUMBER, max_size=3).map(tuple)), max_size=3
    ).map(tuple)
    return rows.flatmap(
        lambda placed: st.builds(
            Placement,
            epoch=NUMBER,
            stage=st.integers(0, stages - 1),
            stages=row,
            replica=st.integers(0, max(0, len(placed) - 1)),
            rows=st.just(placed),
            relays=st.dictionaries(TEXT, st.lists(PLACE, max_size=3).map(tuple), max_size=3),
            also=st.dictionaries(TEXT, st.lists(TEXT, max_size=2).map(tuple), max_size=3),
        )
    )


DIGEST = st.binary(min_size=16, max_size=16)
DIGESTS = st.builds(
    GroupDigests,
    gradient=DIGEST,
    boundaries=st.dictionaries(
        st.builds(BoundaryEnd, NUMBER, st.booleans(), st.booleans()), DIGEST, max_size=4
    ),
    loss=st.none() | ANY_FLOAT,
)
BEGIN = st.builds(
    Begin,
    epoch=NUMBER,
    step=NUMBER,
    keep_sums=st.booleans(),
    audited=st.lists(NUMBER, max_size=3).map(tuple),
)
COMMIT = st.builds(
    Commit, epoch=NUMBER, step=NUMBER, clip_coefficient=AMOUNT, lr=AMOUNT, then=st.none() | BEGIN
)
NODE_MESSAGES: dict[type, st.SearchStrategy[NodeMessage]] = {
    Hello: st.builds(
        Hello,
        version=TEXT,
        protocol=NUMBER,
        peer_address=TEXT,
        hardware=HARDWARE,
        flops=AMOUNT,
        download_rate=AMOUNT,
        epoch=NUMBER,
        process_nonce=COUNT,
        name=TEXT.map(clean_name),
        relay_rate=AMOUNT,
        mapped_port=NUMBER,
        also=st.lists(TEXT, max_size=2).map(tuple),
    ),
    Placed: st.builds(Placed, epoch=NUMBER, held_step=st.integers(-(2**63), 2**63 - 1), voted=st.booleans()),
    Ready: st.builds(Ready, epoch=NUMBER, telemetry=TELEMETRY),
    Vote: st.builds(
        Vote,
        epoch=NUMBER,
        step=NUMBER,
        norms=st.dictionaries(NUMBER, AMOUNT | st.sampled_from([math.inf, math.nan]), max_size=8),
        loss=st.none() | ANY_FLOAT,
        group_losses=st.dictionaries(NUMBER, ANY_FLOAT, max_size=4),
        digests=st.dictionaries(NUMBER, DIGESTS, max_size=3),
        telemetry=TELEMETRY,
    ),
    Validated: st.builds(
        Validated,
        epoch=NUMBER,
        step=NUMBER,
        number=NUMBER,
        loss=st.none() | ANY_FLOAT,
        telemetry=TELEMETRY,
    ),
    Applied: st.builds(Applied, epoch=NUMBER, step=NUMBER, telemetry=TELEMETRY),
    StepFailed: st.builds(
        StepFailed,
        epoch=NUMBER,
        step=NUMBER,
        kind=st.sampled_from(FailureKind),
        message=LINE,
        peer_stage=st.integers(-1, 2**31 - 1),
        peer_replica=st.integers(-1, 2**31 - 1),
    ),
    Heartbeat: st.builds(Heartbeat, telemetry=TELEMETRY, sent_at=FINITE),
    Following: st.builds(Following, snapshot=NUMBER, step=NUMBER, failed=LINE),
    StateHashes: st.builds(
        StateHashes,
        epoch=NUMBER,
        step=NUMBER,
        units=st.dictionaries(
            NUMBER,
            st.builds(
                UnitHash,
                sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
                weights=AMOUNT,
                moments=AMOUNT,
                squares=AMOUNT,
            ),
            max_size=4,
        ).map(lambda units: dict(sorted(units.items()))),
    ),
    Leave: st.builds(Leave, reason=LINE, failed=st.booleans()),
    StepSpans: SPANS,
    RelayTimes: st.builds(RelayTimes, times=st.dictionaries(NODE_ID, AMOUNT)),
    BlockTime: st.builds(BlockTime, seconds=AMOUNT),
    CodecTimes: st.builds(
        CodecTimes,
        times=st.lists(
            st.builds(CodecTime, codec=st.sampled_from(("fixed-8", "tah")), pack=AMOUNT, unpack=AMOUNT),
            max_size=MOST_CODEC_TIMES,
        ).map(tuple),
    ),
    PeerRate: st.builds(PeerRate, node_id=NODE_ID, round_trip=AMOUNT, up=AMOUNT, down=AMOUNT),
}
COORDINATOR_MESSAGES: dict[type, st.SearchStrategy[CoordinatorMessage]] = {
    Welcome: st.builds(
        Welcome,
        node_id=TEXT,
        config_json=TEXT,
        heartbeat_seconds=st.floats(0, exclude_min=True, allow_infinity=False),
    ),
    Placement: st.integers(1, 4).flatmap(lambda stages: _placements(stages)),
    Restore: st.builds(
        Restore, epoch=NUMBER, step=NUMBER, missed=st.none() | COMMIT, uncompressed=st.booleans()
    ),
    Begin: BEGIN,
    Follow: st.integers(1, 4).flatmap(
        lambda stages: st.builds(
            Follow,
            step=NUMBER,
            stage=st.integers(0, stages - 1),
            stages=st.just(stages),
            lineage=NUMBER,
            sources=st.lists(st.builds(PlacedStage, node_id=TEXT, address=TEXT), max_size=3).map(tuple),
        )
    ),
    FollowStep: st.builds(
        FollowStep,
        snapshot=NUMBER,
        step=NUMBER,
        clip_coefficient=AMOUNT,
        lr=AMOUNT,
        norms=st.dictionaries(NUMBER, st.floats(0, allow_nan=False), max_size=5),
    ),
    Commit: COMMIT,
    TakeSnapshot: st.builds(TakeSnapshot, epoch=NUMBER, step=NUMBER, place=LINE),
    Retain: st.builds(Retain, steps=st.lists(NUMBER, max_size=5).map(tuple), record=TEXT),
    SendLayers: st.builds(SendLayers, step=NUMBER, units=st.lists(TEXT, max_size=5).map(tuple)),
    ShutOut: st.builds(ShutOut, node_ids=st.lists(LINE, max_size=5).map(tuple)),
    Validate: st.builds(Validate, epoch=NUMBER, step=NUMBER, number=NUMBER, microbatches=NUMBER),
    Prefetch: st.builds(
        Prefetch, step=NUMBER, units=st.lists(TEXT, max_size=5).map(tuple), keep=st.booleans()
    ),
    HeartbeatReply: st.builds(HeartbeatReply, sent_at=FINITE, at=FINITE, pause=AMOUNT),
    Relays: st.builds(Relays, relays=st.lists(PLACE, max_size=3).map(tuple)),
    ProbePeer: st.builds(ProbePeer, peer=PLACE),
    RelayFor: st.builds(RelayFor, nodes=st.lists(TEXT, max_size=5).map(tuple)),
    Abort: st.builds(Abort, epoch=NUMBER, reason=LINE),
    Finish: st.builds(Finish, reason=LINE, failed=st.booleans()),
    Refusal: st.builds(Refusal, code=st.sampled_from(RefusalCode), message=LINE),
}


def node_round_trip(message: NodeMessage) -> NodeMessage:
    parsed = control_pb2.NodeMessage.FromString(node_message_to_proto(message).SerializeToString())
    return node_message_from_proto(parsed)


def coordinator_round_trip(message: CoordinatorMessage) -> CoordinatorMessage:
    data = coordinator_message_to_proto(message).SerializeToString()
    return coordinator_message_from_proto(control_pb2.CoordinatorMessage.FromString(data))


def test_every_message_is_tried() -> None:
    assert set(NODE_MESSAGES) == set(get_args(NodeMessage))
    assert set(COORDINATOR_MESSAGES) == set(get_args(CoordinatorMessage))


@given(st.one_of(*NODE_MESSAGES.values()))
def test_node_messages_round_trip(message: NodeMessage) -> None:
    # By text: NaN is not equal to itself, and the order of units does not matter.
    assert _text(node_round_trip(message)) == _text(message)


@given(st.one_of(*COORDINATOR_MESSAGES.values()))
def test_coordinator_messages_round_trip(message: CoordinatorMessage) -> None:
    assert coordinator_round_trip(message) == message


def _text(message: NodeMessage) -> str:
    if isinstance(message, Vote):
        return repr(
            (
                message.epoch,
                message.step,
                sorted(message.norms.items()),
                message.loss,
                sorted(message.group_losses.items()),
                [
                    (group, one.gradient, sorted(one.boundaries.items()), one.loss)
                    for group, one in sorted(message.digests.items())
                ],
            )
        )
    return repr(message)


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
        control_pb2.NodeMessage(
            heartbeat=control_pb2.Heartbeat(
                telemetry=control_pb2.Telemetry(
                    links=[control_pb2.LinkReport(flows=[control_pb2.FlowReport(direction=9)])]
                )
            )
        ),
        control_pb2.NodeMessage(
            vote=control_pb2.Vote(digests=[control_pb2.GroupDigests(gradient=bytes(15))])
        ),
        control_pb2.NodeMessage(
            vote=control_pb2.Vote(norms=[control_pb2.UnitNorm(unit=0, squared_norm=-1e-9)])
        ),
        *(
            control_pb2.NodeMessage(state_hashes=control_pb2.StateHashes(units=[one]))
            for one in (
                control_pb2.UnitHash(sha256=bytes(31)),
                control_pb2.UnitHash(sha256=bytes(33)),
                control_pb2.UnitHash(sha256=bytes(32), weights=-1.0),
                control_pb2.UnitHash(sha256=bytes(32), moments=math.inf),
                control_pb2.UnitHash(sha256=bytes(32), squares=math.nan),
            )
        ),
        *(
            control_pb2.NodeMessage(ready=control_pb2.Ready(telemetry=telemetry))
            for value in (-1.0, math.nan, math.inf, 1e300)
            for telemetry in (
                control_pb2.Telemetry(wall_seconds=value),
                control_pb2.Telemetry(times=[control_pb2.KindSeconds(kind="forward", seconds=value)]),
                control_pb2.Telemetry(links=[control_pb2.LinkReport(rtt_seconds=value)]),
                control_pb2.Telemetry(links=[control_pb2.LinkReport(capacity=value)]),
                control_pb2.Telemetry(clock_error_seconds=value),
            )
        ),
        *(
            control_pb2.NodeMessage(heartbeat=control_pb2.Heartbeat(telemetry=telemetry))
            for value in (int(MOST) + 1, 2**64 - 1)
            for telemetry in (
                *(
                    control_pb2.Telemetry(**{name: value})
                    for name in (
                        "memory_bytes",
                        "peak_memory_bytes",
                        "gpu_memory_bytes",
                        "gpu_peak_memory_bytes",
                    )
                ),
                *(
                    control_pb2.Telemetry(links=[control_pb2.LinkReport(**{name: value})])
                    for name in ("bytes_sent", "bytes_received", "retransmits", "rejects", "queued_bytes")
                ),
                *(
                    control_pb2.Telemetry(
                        links=[control_pb2.LinkReport(flows=[control_pb2.FlowReport(**{name: value})])]
                    )
                    for name in ("bytes_sent", "elements_sent")
                ),
            )
        ),
        control_pb2.NodeMessage(heartbeat=control_pb2.Heartbeat(sent_at=math.nan)),
        control_pb2.NodeMessage(ready=control_pb2.Ready(telemetry={"clock_skew_seconds": math.inf})),
        *(
            control_pb2.NodeMessage(step_spans=spans)
            for spans in (
                control_pb2.StepSpans(clock_offset=math.nan),
                control_pb2.StepSpans(names=["forward"], kinds=[0]),
                control_pb2.StepSpans(**columns(2), names=["forward"], kinds=[0, 1]),
                control_pb2.StepSpans(**columns(1, directions=9), names=["forward"], kinds=[0]),
                control_pb2.StepSpans(
                    **columns(MOST_SPANS + 1), names=["forward"], kinds=[0] * (MOST_SPANS + 1)
                ),
            )
        ),
        *(
            control_pb2.NodeMessage(hello=control_pb2.Hello(flops=flops, download_rate=rate))
            for flops, rate in ((-1.0, 1.0), (1.0, math.nan))
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
        control_pb2.CoordinatorMessage(
            placement=control_pb2.Placement(
                stages=[control_pb2.PlacedStage(node_id="a")], rows=[control_pb2.PlacedRow(groups=[0])]
            )
        ),
        control_pb2.CoordinatorMessage(commit=control_pb2.Commit(lr=math.nan)),
        control_pb2.CoordinatorMessage(commit=control_pb2.Commit(clip_coefficient=-1.0)),
        control_pb2.CoordinatorMessage(restore=control_pb2.Restore(missed=control_pb2.Commit(lr=math.inf))),
        control_pb2.CoordinatorMessage(welcome=control_pb2.Welcome(heartbeat_seconds=0.0)),
        control_pb2.CoordinatorMessage(welcome=control_pb2.Welcome(heartbeat_seconds=math.nan)),
        control_pb2.CoordinatorMessage(heartbeat_reply=control_pb2.HeartbeatReply(at=math.inf)),
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
    with pytest.raises(ProtocolViolationError, match="3 devices cannot be rows of 2"):
        node_message_from_proto(control_pb2.NodeMessage(hello=control_pb2.Hello(hardware=message)))
    unsaid = enrolment_pb2.Hardware(device="cpu", cores=1)
    hello = node_message_from_proto(control_pb2.NodeMessage(hello=control_pb2.Hello(hardware=unsaid)))
    assert isinstance(hello, Hello)
    assert (hello.hardware.devices, hello.hardware.tensor_parallel) == (1, 1)
