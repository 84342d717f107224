"""The parts of a step of rows, as a trace shows them."""

from pathlib import Path

import pytest

from node.telemetry.trace_files import TraceWriter
from scripts.experiments.step_parts import PARTS, step_parts
from wire.spec import Direction, TensorKey
from wire.telemetry import Span, SpanColumns, StepSpans


def span(kind: str, start: float, end: float, step: int | None = None) -> Span:
    key = None if step is None else TensorKey(1, step, 0, 0, Direction.ACTIVATION)
    return Span(kind, start, end - start, key)


def test_parts_of_a_step_add_up_and_end_with_the_slowest_row(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, 10**6)
    for replica, late in ((0, 0.0), (1, 0.25)):
        spans = {
            (0, 0): [span("forward", 1, 2, 0), span("backward", 3, 4, 0), span("sync", 4, 5 + late)],
            (1, 0): [span("forward", 2, 2.5, 0), span("backward", 2.5, 3, 0), span("sync", 3, 3.5)],
            (0, 1): [
                span("forward", 6 + late, 7, 1),
                span("backward", 9, 10 + late, 1),
                span("sync", 10 + late, 11 + late),
            ],
            (1, 1): [
                span("forward", 7.5 + late, 8, 1),
                span("backward", 8, 8.5 + late, 1),
                span("sync", 9, 10),
            ],
        }
        for (stage, step), several in spans.items():
            columns = SpanColumns.of(1, several)
            sent = StepSpans(
                epoch=1, step=step, stage=stage, clock_offset=0.0, clock_error=0.001, dropped=0, spans=columns
            )
            writer.add(f"node-{replica}-{stage}", sent, replica)
    writer.write(writer.take())
    parts = step_parts(tmp_path, 1, 2)
    assert list(parts) == list(PARTS)
    assert list(parts.values()) == pytest.approx([1.0, 1.5, 1.0, 1.5, 1.0])
