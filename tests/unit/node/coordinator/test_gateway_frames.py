"""Frames between the coordinator and its gateways: whole in any pieces, and damaged ones refused early."""

import math
import tracemalloc
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.schema import CoordinatorSection, PipelineSection, RunConfig
from node.coordinator.gateway_frames import (
    HEADER,
    MOST_BYTES,
    FrameReader,
    Kind,
    Opened,
    frame,
    messages_of,
    opened_from_bytes,
    opened_to_bytes,
    sent_waited,
)
from node.coordinator.gateways import gateway_count
from wire.errors import ProtocolViolationError
from wire.messages import Begin, Commit, Validate, Waiting, with_wait
from wire.messages_proto import coordinator_message_from_proto, packed, wait_head
from wire.v1 import control_pb2

BEGIN = Begin(epoch=3, step=8, link_windows=(2, 0, 1), audited=(1,), loss_scale=1024.0)
COMMIT = Commit(epoch=3, step=7, clip_coefficient=0.5, lr=1e-3)


@given(
    st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(max_size=40))),
    st.lists(st.integers(1, 25), min_size=1),
)
def test_frames_come_whole_whatever_the_pieces(
    frames: list[tuple[Kind, int, bytes]], sizes: list[int]
) -> None:
    stream, reader, found, at = b"".join(frame(*one) for one in frames), FrameReader(), [], 0
    while at < len(stream):
        size = sizes[at % len(sizes)]
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == frames


def test_the_largest_frame_passes_and_a_larger_one_is_refused_by_its_header() -> None:
    (whole,) = FrameReader().feed(frame(Kind.SAID, 1, bytes(MOST_BYTES)))
    assert len(whole[2]) == MOST_BYTES
    with pytest.raises(ValueError, match="more than"):
        frame(Kind.SAID, 1, bytes(MOST_BYTES + 1))
    tracemalloc.start()
    try:
        for length, kind in ((MOST_BYTES + 1, Kind.SAID), (2**32 - 1, Kind.SAID), (0, 99)):
            with pytest.raises(ProtocolViolationError, match="no frame has kind"):
                list(FrameReader().feed(HEADER.pack(length, kind, 1)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_opening_carries_who_where_and_what() -> None:
    opened = Opened(node_id="node-aaaaaaaaaa", host="fe80::1", hello=b"\0hello")
    assert opened_from_bytes(opened_to_bytes(opened)) == opened
    for damaged in (b"", b"\x05", b"\x05\x01node-", b"\x01\x01\xff\xff"):
        with pytest.raises(ProtocolViolationError, match="opened wrongly"):
            opened_from_bytes(damaged)
    with pytest.raises(ValueError, match="at most 255"):
        opened_to_bytes(Opened(node_id="n" * 256, host="", hello=b""))


def test_a_frame_that_is_too_short_for_its_sessions_is_refused() -> None:
    for count, payload in (
        (2, bytes(7)),
        (2**32 - 1, bytes(8)),
        (1, bytes(12)),
        (1, bytes(12) + b"\x09head"),
    ):
        with pytest.raises(ProtocolViolationError):
            list(messages_of(count, payload))


@pytest.mark.parametrize(
    "message",
    [
        BEGIN,
        COMMIT,
        replace(COMMIT, then=BEGIN),
        Validate(epoch=1, step=2, number=1, microbatches=4),
    ],
    ids=["begin", "commit", "commit-and-begin", "validate"],
)
def test_each_node_gets_its_own_wait_and_all_else_is_equal(message: Waiting) -> None:
    waits = [0.0, 1.5, math.pi]
    data = sent_waited([7, 8, 9], waits, wait_head(message), packed(message))
    ((kind, count, payload),) = FrameReader().feed(data)
    assert kind == Kind.SEND_WAITED
    found = [
        (number, coordinator_message_from_proto(control_pb2.CoordinatorMessage.FromString(one)))
        for number, one in messages_of(count, payload)
    ]
    assert found == [(7 + at, with_wait(message, seconds)) for at, seconds in enumerate(waits)]


@pytest.mark.parametrize(
    ("setting", "stages", "rows", "cores", "count"),
    [
        ("auto", 32, 4, 64, 0),
        ("auto", 43, 3, 64, 3),
        ("auto", 250, 4, 64, 16),
        ("auto", 250, 4, 16, 8),
        ("auto", 250, 4, 1, 0),
        (2, 4, 1, 2, 2),
        (0, 250, 4, 64, 0),
    ],
)
def test_gateways_grow_with_nodes_and_cores(
    setting: int | Literal["auto"], stages: int, rows: int, cores: int, count: int
) -> None:
    config = RunConfig(
        pipeline=PipelineSection(stages=stages, groups=rows), coordinator=CoordinatorSection(gateways=setting)
    )
    assert gateway_count(config, cores) == count
