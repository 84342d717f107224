"""The parts of a step of rows, as a trace shows them, and the least time that each can take."""

from pathlib import Path

import pytest

from node.telemetry.trace_files import TraceWriter
from scripts.experiments.paced_row_ways import WAYS, allowed_seconds, least_parts
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


@pytest.mark.parametrize("rows", [1, 2])
def test_what_parts_take_at_least_is_what_the_simulated_step_takes(rows: int) -> None:
    config = WAYS["as it is"].config(rows, 32)
    measured = {"rows": rows, "rate_mbit": 100.0, "round_trip_ms": 50.0, "sync_bytes": 1_000_000 * (rows - 1)}
    measured |= {"activation_bytes": 300_000, "gradient_bytes": 500_000}
    least = least_parts(config, measured, 1.0)
    assert sum(least.values()) == pytest.approx(allowed_seconds(config, measured, 1.0))
    assert least["sums"] == pytest.approx(0.105 if rows == 2 else 0.0)
    assert least["fill"] == pytest.approx(3 * (0.020 + 0.024 + 0.025))


def test_chunks_shorten_fill_and_drain_where_links_are_fast() -> None:
    measured = {"rows": 2, "rate_mbit": 1000.0, "round_trip_ms": 0.0, "sync_bytes": 0}
    measured |= {"activation_bytes": 300_000, "gradient_bytes": 500_000}
    as_it_is, chunks = (
        allowed_seconds(WAYS[name].config(2, 32), measured, 1.0) for name in ("as it is", "2 chunks a stage")
    )
    assert as_it_is - chunks == pytest.approx(0.09, abs=0.02)
