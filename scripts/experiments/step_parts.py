"""The parts of a step that rows of nodes share, one after the other, from the run's trace."""

import itertools
from pathlib import Path

from node.telemetry.clock import TimeKind
from node.telemetry.trace import PlacedSpan, align
from node.telemetry.trace_files import read_batches

PARTS = ("begin", "fill", "last stage", "drain", "sums")


def step_parts(directory: Path, step: int, stages: int) -> dict[str, float]:
    """Seconds of each of `PARTS`. Each ends when the last row is done with it, so they add up to the step.

    begin: votes, commit, optimizer, the next step's begin; until the first stage computes.
    fill: until the last stage computes.
    last stage: all of its microbatches.
    drain: until the first stage has none left.
    sums: of gradients, between rows, until every stage has them.

    Args:
        directory: the run's.
        step: counted from 0, and not the run's first.

    Raises ValueError if the trace lacks the step or the one before.
    """
    spans = align(read_batches(directory, step - 1, step + 1), step - 1, step).spans
    rows = sorted({one.replica for one in spans})

    def computed(kind: TimeKind, stage: int, of: int) -> list[list[PlacedSpan]]:
        """The spans of each row."""
        return [
            [
                one
                for one in spans
                if (one.replica, one.stage, one.span.kind) == (row, stage, kind)
                and one.span.key is not None
                and one.span.key.step == of
            ]
            for row in rows
        ]

    def begins(stage: int) -> float:
        return max(min(one.start for one in row) for row in computed(TimeKind.FORWARD, stage, step))

    def ends(stage: int, of: int = step) -> float:
        return max(max(one.end for one in row) for row in computed(TimeKind.BACKWARD, stage, of))

    def summed(after: float, until: float) -> float:
        """When the sums of a step are there whose first stage is done at `after`."""
        found = [one.end for one in spans if one.span.kind == TimeKind.SYNC and after < one.end < until]
        return max(found, default=after)

    last = stages - 1
    begun, drained = begins(0), ends(0)
    moments = [
        summed(ends(0, step - 1), begun),
        begun,
        begins(last),
        ends(last),
        drained,
        summed(drained, float("inf")),
    ]
    return dict(zip(PARTS, (b - a for a, b in itertools.pairwise(moments)), strict=True))
