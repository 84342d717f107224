"""The protobuf form of `telemetry.py`. Parsing rejects values that would harm a reader."""

import functools
import math
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import DecodeError

from wire.codecs.formats import codec_format
from wire.errors import ConfigError, ProtocolViolationError
from wire.identity.names import is_node_id
from wire.made import made
from wire.spec import Direction
from wire.telemetry import (
    MOST_CODEC_TIMES,
    MOST_SPANS,
    SPAN_COLUMNS,
    CodecTime,
    CodecTimes,
    FlowReport,
    LinkReport,
    SpanColumns,
    StepSpans,
    Telemetry,
)
from wire.v1 import control_pb2

LONGEST_SECONDS = 1e9
"""The longest time accepted: no run lasts 30 years."""
MOST = 1e18
"""The most of any other measurement, such as bytes or operations a second; well below 2**63."""
LONGEST_PATH = 40
"""Characters of the name of a link's path."""
LONGEST_LINE = 1000
"""Characters of a text for people; longer text is cut."""

EnumT = TypeVar("EnumT", bound=IntEnum)


def telemetry_to_proto(telemetry: Telemetry) -> control_pb2.Telemetry:
    return control_pb2.Telemetry(
        epoch=telemetry.epoch,
        times=[control_pb2.KindSeconds(kind=k, seconds=s) for k, s in telemetry.times.items()],
        wall_seconds=telemetry.wall_seconds,
        links=[_link_to_proto(link) for link in telemetry.links],
        memory_bytes=telemetry.memory_bytes,
        peak_memory_bytes=telemetry.peak_memory_bytes,
        gpu_memory_bytes=telemetry.gpu_memory_bytes,
        gpu_peak_memory_bytes=telemetry.gpu_peak_memory_bytes,
        clock_skew_seconds=telemetry.clock_skew_seconds,
        clock_error_seconds=telemetry.clock_error_seconds,
        relayed_bytes=telemetry.relayed_bytes,
        relay_pairs=telemetry.relay_pairs,
        relay_refused=telemetry.relay_refused,
        line_up=telemetry.line_up,
        line_down=telemetry.line_down,
    )


def telemetry_from_proto(message: control_pb2.Telemetry) -> Telemetry:
    """Raises `ProtocolViolationError` for an unknown direction or a wrong number."""
    # Written out as `_link_from_proto` is; where a check fails, `_check_telemetry` says which.
    times = {}
    for entry in message.times:
        spent = entry.seconds
        times[_word(entry.kind)] = spent if 0.0 <= spent <= LONGEST_SECONDS else seconds(spent, entry.kind)
    wall, memory, peak = message.wall_seconds, message.memory_bytes, message.peak_memory_bytes
    gpu, gpu_peak = message.gpu_memory_bytes, message.gpu_peak_memory_bytes
    skew, error = message.clock_skew_seconds, message.clock_error_seconds
    relayed, refused = message.relayed_bytes, message.relay_refused
    up, down = message.line_up, message.line_down
    if not (
        0.0 <= wall <= LONGEST_SECONDS
        and 0.0 <= error <= LONGEST_SECONDS
        and memory <= MOST
        and peak <= MOST
        and gpu <= MOST
        and gpu_peak <= MOST
        and relayed <= MOST
        and refused <= MOST
        and 0.0 <= up <= MOST
        and 0.0 <= down <= MOST
        and skew - skew == 0.0
    ):
        _check_telemetry(message)
    return made(
        Telemetry,
        {
            "epoch": message.epoch,
            "times": times,
            "wall_seconds": wall,
            "links": tuple([_link_from_proto(link) for link in message.links]),
            "memory_bytes": memory,
            "peak_memory_bytes": peak,
            "gpu_memory_bytes": gpu,
            "gpu_peak_memory_bytes": gpu_peak,
            "clock_skew_seconds": skew,
            "clock_error_seconds": error,
            "relayed_bytes": relayed,
            "relay_pairs": message.relay_pairs,
            "relay_refused": refused,
            "line_up": up,
            "line_down": down,
        },
    )


def telemetry_from_bytes(data: bytes) -> Telemetry:
    """As `telemetry_from_proto`; bytes that do not parse are a `ProtocolViolationError`, too."""
    try:
        return telemetry_from_proto(control_pb2.Telemetry.FromString(data))
    except DecodeError:
        raise ProtocolViolationError("bytes came that are no report") from None


def _check_telemetry(message: control_pb2.Telemetry) -> None:
    """Raises `ProtocolViolationError` for the first wrong number of a report."""
    seconds(message.wall_seconds, "wall time")
    for link in message.links:
        _link_from_proto(link)
    count(message.memory_bytes, "memory")
    count(message.peak_memory_bytes, "peak memory")
    count(message.gpu_memory_bytes, "a GPU's memory")
    count(message.gpu_peak_memory_bytes, "a GPU's peak memory")
    finite(message.clock_skew_seconds, "a clock's skew")
    seconds(message.clock_error_seconds, "a clock's error")
    count(message.relayed_bytes, "relayed bytes")
    count(message.relay_refused, "refused relays")
    amount(message.line_up, "a line's rate")
    amount(message.line_down, "a line's rate")


def _link_to_proto(link: LinkReport) -> control_pb2.LinkReport:
    flows = [
        control_pb2.FlowReport(
            direction=int(flow.direction),
            codec=flow.codec,
            bytes_sent=flow.bytes_sent,
            elements_sent=flow.elements_sent,
        )
        for flow in link.flows
    ]
    return control_pb2.LinkReport(**{**vars(link), "flows": flows})


def _link_from_proto(link: control_pb2.LinkReport) -> LinkReport:
    # A thousand nodes report thousands of links a step, so the checks are written out here; where one fails,
    # `_check_link` says which.
    sent, received, queued = link.bytes_sent, link.bytes_received, link.queued_bytes
    again, rejects, rate = link.retransmits, link.rejects, link.capacity
    trip, least, busy = link.rtt_seconds, link.least_rtt_seconds, link.busy_seconds
    flows = []
    for flow in link.flows:
        size, elements = flow.bytes_sent, flow.elements_sent
        if size > MOST or elements > MOST:
            _check_link(link)
        direction = _DIRECTIONS.get(flow.direction)
        if direction is None:
            direction = member(Direction, flow.direction)
        fields = {
            "direction": direction,
            "codec": _word(flow.codec),
            "bytes_sent": size,
            "elements_sent": elements,
        }
        flows.append(made(FlowReport, fields))
    if not (
        sent <= MOST
        and received <= MOST
        and queued <= MOST
        and again <= MOST
        and rejects <= MOST
        and 0.0 <= rate <= MOST
        and 0.0 <= trip <= LONGEST_SECONDS
        and 0.0 <= least <= LONGEST_SECONDS
        and 0.0 <= busy <= LONGEST_SECONDS
    ):
        _check_link(link)
    return made(
        LinkReport,
        {
            "peer_stage": link.peer_stage,
            "bytes_sent": sent,
            "bytes_received": received,
            "retransmits": again,
            "rejects": rejects,
            "rtt_seconds": trip,
            "least_rtt_seconds": least,
            "capacity": rate,
            "busy_seconds": busy,
            "queued_bytes": queued,
            "flows": tuple(flows),
            "peer_replica": link.peer_replica,
            "path": _word(link.path)[:LONGEST_PATH],
            "not_together": _word(link.not_together)[:LONGEST_PATH],
        },
    )


_DIRECTIONS = {int(one): one for one in Direction}


def _check_link(link: control_pb2.LinkReport) -> None:
    """Raises ProtocolViolationError for a number that is out of range."""
    count(link.bytes_sent, "bytes sent")
    count(link.bytes_received, "bytes received")
    count(link.retransmits, "retransmits")
    count(link.rejects, "rejects")
    count(link.queued_bytes, "bytes that wait")
    seconds(link.rtt_seconds, "round trip")
    seconds(link.least_rtt_seconds, "least round trip")
    seconds(link.busy_seconds, "busy time")
    amount(link.capacity, "capacity")
    for flow in link.flows:
        count(flow.bytes_sent, "a flow's bytes")
        count(flow.elements_sent, "a flow's elements")


def spans_to_proto(spans: StepSpans) -> control_pb2.StepSpans:
    columns = SpanColumns.of(spans.epoch, spans.spans)
    return control_pb2.StepSpans(
        epoch=spans.epoch,
        step=spans.step,
        stage=spans.stage,
        clock_offset=spans.clock_offset,
        clock_error=spans.clock_error,
        dropped=spans.dropped,
        names=columns.names,
        **dict(zip(SPAN_COLUMNS, columns.columns, strict=True)),
    )


def spans_from_proto(message: control_pb2.StepSpans) -> StepSpans:
    """Raises `ProtocolViolationError` for columns of unequal length and for numbers out of range."""
    if len(message.kinds) > MOST_SPANS:
        raise ProtocolViolationError(f"a message has {MOST_SPANS} spans at most, not {len(message.kinds)}")
    names = [line(name) for name in message.names]
    try:
        spans = SpanColumns(message.epoch, names, [list(getattr(message, one)) for one in SPAN_COLUMNS])
    except ValueError as error:
        raise ProtocolViolationError(str(error)) from None
    return StepSpans(
        epoch=message.epoch,
        step=message.step,
        stage=message.stage,
        clock_offset=finite(message.clock_offset, "a clock's offset"),
        clock_error=seconds(message.clock_error, "a clock's error"),
        dropped=message.dropped,
        spans=spans,
    )


def codec_times_to_proto(message: CodecTimes) -> control_pb2.CodecTimes:
    return control_pb2.CodecTimes(times=[control_pb2.CodecTime(**vars(one)) for one in message.times])


def codec_times_from_proto(message: control_pb2.CodecTimes) -> CodecTimes:
    if len(message.times) > MOST_CODEC_TIMES:
        raise ProtocolViolationError(f"{len(message.times)} codecs were timed, {MOST_CODEC_TIMES} at most")
    try:
        for one in message.times:
            codec_format(one.codec)
    except ConfigError as error:
        raise ProtocolViolationError(f"a time is of no codec: {line(str(error))}") from None
    return CodecTimes(
        times=tuple(
            CodecTime(
                codec=one.codec,
                pack=seconds(one.pack, "a time of packing"),
                unpack=seconds(one.unpack, "a time of unpacking"),
            )
            for one in message.times
        )
    )


# ---- checks of single values


def node_id(text: str) -> str:
    """`text` if it is a node's id; otherwise raises `ProtocolViolationError`."""
    if not is_node_id(text):
        raise ProtocolViolationError("a measurement is of no node")
    return text


def member(kind: type[EnumT], value: int) -> EnumT:
    """The member of an enumeration, or `ProtocolViolationError`."""
    try:
        return kind(value)
    except ValueError:
        raise ProtocolViolationError(f"{kind.__name__} has no value {value}") from None


def amount(value: float, what: str, most: float = MOST) -> float:
    """`value` if it lies between 0 and `most`; otherwise raises `ProtocolViolationError`."""
    if not 0.0 <= value <= most:
        raise ProtocolViolationError(f"{line(what)} cannot be {value}")
    return value


def count(value: int, what: str) -> int:
    """A measured whole number."""
    amount(value, what)
    return value


def seconds(value: float, what: str) -> float:
    """A measured time."""
    return amount(value, what, LONGEST_SECONDS)


def finite(value: float, what: str) -> float:
    """A number of either sign."""
    if not math.isfinite(value):
        raise ProtocolViolationError(f"{what} cannot be {value}")
    return value


def line(text: str) -> str:
    """`text` as one line, with characters that could harm a terminal replaced."""
    text = text[:LONGEST_LINE]
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


_word = functools.lru_cache(maxsize=1024)(line)
"""The same, of words that come again and again."""
