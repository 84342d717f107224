"""The reports of nodes. If a gateway has checked them, the coordinator keeps only their bytes, because few
are read.

A gateway takes the report out of a message, and adds what the coordinator would otherwise read it for:
whether it continues the node's last report, and what the node spent most time on.
"""

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from node.telemetry.clock import TimeKind
from wire.errors import ProtocolViolationError
from wire.messages import Applied, Heartbeat, Ready, Validated, Vote
from wire.messages_proto import telemetry_from_bytes
from wire.telemetry import Telemetry

log = logging.getLogger(__name__)

NO_REPORT = Telemetry()
Reporting = Vote | Heartbeat | Applied | Ready | Validated
REPORTS = Vote, Heartbeat, Applied, Ready, Validated
"""Messages with a node's totals."""
REPORTING = frozenset(one.__name__.lower() for one in REPORTS)
"""Their kinds on the wire."""
_HEAD = struct.Struct("<BBII")
"""Flags, kind of time, epoch, bytes of the message."""
_COMPARED, _GOES_ON = 1, 2
_TIMES = ("", *(kind.value for kind in TimeKind))
_TIME_AT = {kind: at for at, kind in enumerate(_TIMES)}


def is_continued(before: Telemetry, now: Telemetry) -> bool:
    """Whether the later of two reports has all that the earlier one has: not once a link was opened again, or
    has another codec."""
    if before.epoch != now.epoch or len(before.links) != len(now.links):
        return False
    return all(
        old.bytes <= new.bytes
        and old.ends == new.ends
        and [flow.codec for flow in old.flows] == [flow.codec for flow in new.flows]
        for old, new in zip(before.links, now.links, strict=True)
    )


def longest_kind(before: Telemetry, after: Telemetry) -> str:
    """The kind of time that grew most between two reports of one node's epoch; "" if none did."""
    known = before.seconds if before.epoch == after.epoch else {}
    grown = {kind: seconds - known.get(kind, 0.0) for kind, seconds in after.seconds.items()}
    kind = max(grown, key=lambda one: grown[one], default="")
    return kind if grown.get(kind, 0.0) > 0 else ""


class SealedReport:
    """A report as bytes, until somebody reads it."""

    __slots__ = ("_data", "_opened", "epoch")

    def __init__(self, epoch: int, data: bytes) -> None:
        self.epoch = epoch
        self._data = data
        self._opened: Telemetry | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return len(self._data)

    def opened(self) -> Telemetry:
        """The report, decoded at the first call. An empty one if the bytes cannot be decoded."""
        if self._opened is None:
            try:
                self._opened = telemetry_from_bytes(self._data)
            except ProtocolViolationError as error:
                log.error("a gateway passed on a report that is none: %s", error)
                self._opened = Telemetry(epoch=self.epoch)
        return self._opened


AnyReport = Telemetry | SealedReport


def opened(report: AnyReport) -> Telemetry:
    return report.opened() if isinstance(report, SealedReport) else report


class Newest(Mapping[str, Telemetry]):
    """Each node's newest report. A sealed report is opened when it is read."""

    def __init__(self) -> None:
        self._reports: dict[str, AnyReport] = {}

    def put(self, node_id: str, report: AnyReport) -> None:
        self._reports[node_id] = report

    def drop(self, node_id: str) -> None:
        self._reports.pop(node_id, None)

    def __getitem__(self, node_id: str) -> Telemetry:
        return opened(self._reports[node_id])

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._reports

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)

    def __len__(self) -> int:
        return len(self._reports)


@dataclass(frozen=True, slots=True)
class Reported:
    """A message without its report, and the report."""

    body: bytes
    """The message in protobuf."""
    report: SealedReport
    compared: bool
    """Whether the gateway knew the node's report before; if not, the next two say nothing."""
    goes_on: bool
    longest: str
    """The kind of time that grew most, "" if none did."""


def sealed(body: bytes, data: bytes, report: Telemetry, before: Telemetry | None) -> bytes:
    """The payload of a frame `REPORTED`.

    Args:
        body: the message without its report.
        data: the report in protobuf.
        report: what it says.
        before: the report that the same session sent before.
    """
    flags = longest = 0
    if before is not None:
        flags = _COMPARED | (_GOES_ON if is_continued(before, report) else 0)
        longest = _TIME_AT.get(longest_kind(before, report), 0)
    head = _HEAD.pack(flags, longest, report.epoch, len(body))
    return head + body + data


def reported(payload: bytes) -> Reported:
    """Raises ProtocolViolationError if the payload is too short or names no kind of time."""
    if len(payload) < _HEAD.size:
        raise ProtocolViolationError("a report without its head")
    flags, longest, epoch, size = _HEAD.unpack_from(payload)
    end = _HEAD.size + size
    if end > len(payload) or longest >= len(_TIMES):
        raise ProtocolViolationError("a report whose head says what cannot be")
    return Reported(
        payload[_HEAD.size : end],
        SealedReport(epoch, payload[end:]),
        bool(flags & _COMPARED),
        bool(flags & _GOES_ON),
        _TIMES[longest],
    )
