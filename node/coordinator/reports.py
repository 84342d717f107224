"""Compares the totals that a node reports at different times."""

from wire.messages import Applied, Heartbeat, Ready, Validated, Vote
from wire.telemetry import Telemetry

NO_REPORT = Telemetry()
REPORTS = Vote, Heartbeat, Applied, Ready, Validated
"""Messages with a node's totals."""
REPORTING = frozenset(kind.__name__.lower() for kind in REPORTS)
"""The kinds of these messages on the wire."""


def is_continued(before: Telemetry, now: Telemetry) -> bool:
    """Whether the later of two reports continues the earlier one's totals. It does not if a link was reopened
    or has another codec."""
    if before.epoch != now.epoch or len(before.links) != len(now.links):
        return False
    return all(
        old.bytes <= new.bytes
        and old.ends == new.ends
        and [flow.codec for flow in old.flows] == [flow.codec for flow in new.flows]
        for old, new in zip(before.links, now.links, strict=True)
    )


def longest_kind(before: Telemetry, after: Telemetry) -> str:
    """The kind of time that grew most between two reports of a node's epoch; "" if none did."""
    known = before.seconds if before.epoch == after.epoch else {}
    grown = {kind: seconds - known.get(kind, 0.0) for kind, seconds in after.seconds.items()}
    kind = max(grown, key=lambda name: grown[name], default="")
    return kind if grown.get(kind, 0.0) > 0 else ""
