"""Reports that a gateway took out of messages: the same costs, and whose fault damage is."""

from dataclasses import replace

import pytest

from node.coordinator.accounting import Accounting
from node.coordinator.reports import REPORTING, Newest, SealedReport, reported, sealed
from tests.unit.node.coordinator.test_accounting import EPOCH, SEATS, totals
from wire.errors import ProtocolViolationError
from wire.messages import Applied, Heartbeat, NodeMessage, Ready, Validated, Vote
from wire.messages_proto import node_message_from_proto, node_message_to_proto, split_report
from wire.telemetry import Telemetry
from wire.v1 import control_pb2

VOTE = Vote(epoch=EPOCH, step=4, norms={0: 0.5, 7: 2.0}, loss=1.25, telemetry=totals(2))


def passed_on(message: NodeMessage, before: Telemetry | None = None) -> bytes:
    """The payload that a gateway makes of what a node sent."""
    proto = control_pb2.NodeMessage.FromString(node_message_to_proto(message).SerializeToString())
    kind = proto.WhichOneof("body")
    assert kind in REPORTING
    return sealed(*split_report(proto, kind), before)


@pytest.mark.parametrize(
    "message",
    [
        VOTE,
        Heartbeat(telemetry=totals(2), sent_at=3.5),
        Applied(epoch=EPOCH, step=4, telemetry=totals(2)),
        Ready(epoch=EPOCH, telemetry=totals(2)),
        Validated(epoch=EPOCH, step=4, number=1, loss=0.5, telemetry=totals(2)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_message_and_its_report_come_apart_and_whole(
    message: Vote | Heartbeat | Applied | Ready | Validated,
) -> None:
    found = reported(passed_on(message))
    rest = node_message_from_proto(control_pb2.NodeMessage.FromString(found.body))
    assert rest == replace(message, telemetry=Telemetry())
    assert (found.report.epoch, found.compared) == (EPOCH, False)
    assert found.report.opened() == totals(2) and found.report.opened() is found.report.opened()


def test_a_gateway_says_what_changed_since_the_report_before() -> None:
    found = reported(passed_on(VOTE, totals(1)))
    assert (found.compared, found.goes_on, found.longest) == (True, True, "forward")
    reopened = replace(VOTE, telemetry=totals(0.5))
    found = reported(passed_on(reopened, totals(1)))
    assert (found.compared, found.goes_on, found.longest) == (True, False, "")
    invented = replace(VOTE, telemetry=Telemetry(epoch=EPOCH, seconds={"napping": 9.0}))
    assert reported(passed_on(invented, totals(1))).longest == ""


def test_sealed_reports_cost_what_open_ones_do() -> None:
    open_books, sealed_books = Accounting({"tah"}), Accounting({"tah"})
    newest: dict[str, Telemetry] = {}
    found = []
    for steps in (0.0, 1.0, 1.5, 0.5, 2.0):  # links were opened again before the fourth
        for stage, node in enumerate(SEATS):
            report = totals(steps, stage=stage)
            open_books.report(node, report, 10.0)
            one = reported(passed_on(replace(VOTE, telemetry=report), newest.get(node)))
            sealed_books.report(node, one.report, 10.0, one.goes_on if one.compared else None)
            newest[node] = report
        if not steps:
            open_books.begin_epoch(EPOCH, SEATS)
            sealed_books.begin_epoch(EPOCH, SEATS)
        if steps == 2.0:
            found = [books.step(7, 1.0) for books in (open_books, sealed_books)]
    assert found[0] == found[1] and found[0].links[0].bytes == 1500 + 500 + 1500
    assert dict(sealed_books.newest) == dict(open_books.newest) == newest


def test_bytes_that_are_no_report_say_nothing() -> None:
    newest = Newest()
    newest.put("a", SealedReport(3, b"\xff"))
    assert "a" in newest and list(newest) == ["a"] and len(newest) == 1
    assert newest["a"] == Telemetry(epoch=3)
    newest.drop("a")
    newest.drop("a")
    assert "a" not in newest


@pytest.mark.parametrize("payload", [b"", bytes(9), b"\0\xff" + bytes(8), bytes(6) + b"\x01\0\0\0"])
def test_a_gateway_that_sends_no_report_is_wrong(payload: bytes) -> None:
    with pytest.raises(ProtocolViolationError, match="a report w"):
        reported(payload)


def test_a_report_with_impossible_numbers_is_its_nodes_fault() -> None:
    with pytest.raises(ProtocolViolationError, match=r"Telemetry\.wall_seconds"):
        passed_on(replace(VOTE, telemetry=Telemetry(wall_seconds=-1.0)))
