"""Mutated control messages of both directions: a message, a refusal, and nothing else; nothing grows."""

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from google.protobuf.message import DecodeError, Message

from tests.support.examples import examples
from wire.coordinator_messages_proto import coordinator_message_from_proto, coordinator_message_to_proto
from wire.errors import ProtocolViolationError, RefusalCode
from wire.identity.enrolment import Hardware, Refusal
from wire.messages import (
    Abort,
    Applied,
    Begin,
    BoundaryEnd,
    Commit,
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
    Placed,
    PlacedStage,
    Placement,
    Prefetch,
    Ready,
    Restore,
    Retain,
    SendLayers,
    ShutOut,
    StateHashes,
    StepFailed,
    TakeSnapshot,
    UnitHash,
    Vote,
    Welcome,
)
from wire.node_messages_proto import node_message_from_proto, node_message_to_proto
from wire.spec import Direction, TensorKey
from wire.telemetry import FlowReport, LinkReport, Span, StepSpans, Telemetry
from wire.v1 import control_pb2

MUTATIONS = examples(50_000)
"""For each direction."""

TELEMETRY = Telemetry(
    epoch=3,
    times={"forward": 1.5, "wait-upstream": 0.25},
    wall_seconds=1.75,
    links=(
        LinkReport(
            peer_stage=1,
            bytes_sent=10**9,
            bytes_received=77,
            retransmits=3,
            rejects=1,
            rtt_seconds=0.02,
            flows=(
                FlowReport(direction=Direction.GRADIENT, codec="tah", bytes_sent=99, elements_sent=10**6),
            ),
        ),
    ),
    peak_memory_bytes=10**10,
)
SPANS = StepSpans(
    epoch=3,
    step=41,
    stage=1,
    clock_offset=1.7e9,
    clock_error=1e-4,
    dropped=0,
    spans=(
        Span("forward", 10.0, 0.5, TensorKey(3, 41, 0, 1, Direction.ACTIVATION)),
        Span("send", 10.5, 0.25, TensorKey(3, 41, 0, 1, Direction.ACTIVATION), 2),
        Span("wait-upstream", 10.75, 1.0),
    ),
)
DIGESTS = GroupDigests(gradient=bytes(16), boundaries={BoundaryEnd(0, True, False): bytes(16)}, loss=0.5)
COMMIT = Commit(epoch=3, step=41, clip_coefficient=0.5, lr=1e-3)
FROM_NODES = [
    node_message_to_proto(message).SerializeToString()
    for message in (
        Hello(
            version="0.1.0",
            protocol=1,
            peer_address="10.0.0.1:77",
            hardware=Hardware("cpu", 8, 2**34),
            flops=1e12,
            download_rate=1e7,
            epoch=3,
            process_nonce=2**60,
        ),
        Placed(epoch=3, held_step=-1, voted=True),
        Ready(epoch=3, telemetry=TELEMETRY),
        Vote(
            epoch=3,
            step=41,
            norms={0: 1.0, 1: 2.5, 7: 1e-9},
            loss=3.25,
            group_losses={1: 0.5},
            digests={1: DIGESTS},
            telemetry=TELEMETRY,
        ),
        Applied(epoch=3, step=41, telemetry=TELEMETRY),
        StepFailed(epoch=3, step=41, kind=FailureKind.PEER, message="damaged frame", peer_stage=2),
        Heartbeat(telemetry=TELEMETRY),
        Leave(reason="cuda:0 ran out of memory", failed=True),
        Following(snapshot=40, step=42, failed="no source"),
        StateHashes(epoch=3, step=40, units={2: UnitHash("ab" * 32, 3.0, 2.0, 1.0)}),
        SPANS,
    )
]
FROM_THE_COORDINATOR = [
    coordinator_message_to_proto(message).SerializeToString()
    for message in (
        Welcome(node_id="n" * 20, config_json='{"run": {}}', heartbeat_seconds=2.0),
        Placement(
            epoch=3,
            stage=1,
            stages=(PlacedStage(node_id="a", address="h:1"), PlacedStage(node_id="b", address="h:2")),
        ),
        Restore(epoch=3, step=42, missed=COMMIT, uncompressed=True),
        Begin(epoch=3, step=41),
        replace(COMMIT, then=Begin(epoch=3, step=42, link_windows=(1, 2))),
        TakeSnapshot(epoch=3, step=42, place="nodes"),
        Retain(steps=(20, 40), record='{"run": 1}'),
        SendLayers(step=40, units=("embed",)),
        ShutOut(node_ids=("node-a",)),
        Prefetch(step=40, units=("embed", "block.0000")),
        Follow(step=40, stage=1, stages=2, lineage=3, sources=(PlacedStage(node_id="a", address="h:1"),)),
        FollowStep(snapshot=40, step=41, clip_coefficient=0.5, lr=1e-3, norms={2: 1.5}),
        HeartbeatReply(sent_at=12.5, at=1.7e9),
        Abort(epoch=3, reason="node b is gone"),
        Finish(reason="all steps are done", failed=False),
        Refusal(RefusalCode.NOT_A_MEMBER, "join first"),
    )
]


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


def attack(
    samples: list[bytes], parse: Callable[[bytes], Message], convert: Callable[[Message], object], seed: int
) -> Tally:
    rng, tally = random.Random(seed), Tally()
    for number in range(MUTATIONS):
        data = mutate(samples[number % len(samples)], samples, rng)
        try:
            convert(parse(data))
            tally.messages += 1
        except DecodeError:
            tally.no_messages += 1  # gRPC's parser, before this program's; the sessions' test shows the rest
        except ProtocolViolationError as error:
            assert len(str(error)) < 1200 and "\n" not in str(error)
            tally.refused += 1
    return tally


DIRECTIONS = [
    pytest.param(FROM_NODES, control_pb2.NodeMessage.FromString, node_message_from_proto, id="nodes"),
    pytest.param(
        FROM_THE_COORDINATOR,
        control_pb2.CoordinatorMessage.FromString,
        coordinator_message_from_proto,
        id="coordinator",
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("samples", "parse", "convert"), DIRECTIONS)
def test_a_mutated_message_is_a_message_or_refused(
    samples: list[bytes], parse: Callable[[bytes], Message], convert: Callable[[Message], object]
) -> None:
    tally = attack(samples, parse, convert, seed=1)
    assert tally.messages + tally.refused + tally.no_messages == MUTATIONS
    # Each outcome is well tried, or the test would show little.
    assert min(tally.messages, tally.no_messages) > MUTATIONS // 10
    assert tally.refused > MUTATIONS // 200


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("samples", "parse", "convert"), DIRECTIONS)
def test_nothing_is_kept_of_mutated_messages(
    samples: list[bytes],
    parse: Callable[[bytes], Message],
    convert: Callable[[Message], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "MUTATIONS", 2_000)
    attack(samples, parse, convert, seed=2)  # whatever is made once is made now
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        attack(samples, parse, convert, seed=3)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 64 * 1024


@pytest.mark.parametrize(("samples", "parse", "convert"), DIRECTIONS)
def test_the_messages_themselves_parse(
    samples: list[bytes], parse: Callable[[bytes], Message], convert: Callable[[Message], object]
) -> None:
    assert len({type(convert(parse(data))) for data in samples}) == len(samples)
