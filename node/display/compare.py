"""Prints a comparison of two runs: first the differences between the run files, then the figures."""

from collections.abc import Callable, Sequence
from typing import Any

from node.telemetry.format import bytes_text, count_text, duration_text, printable, table_lines
from node.view.compare import Comparison


def comparison_lines(comparison: Comparison) -> list[str]:
    first, second = (printable(name) for name in comparison.names)
    rows = [[key, _value(a), _value(b)] for key, (a, b) in comparison.config.items()]
    lines = ["the run files are the same"]
    if rows:
        lines = ["differences between the run files:", *table_lines(["key", first, second], rows, left=3)]
    speeds = comparison.tokens_per_second
    ratio = f"{speeds[1] / speeds[0]:.2f} x" if speeds[0] and speeds[1] else ""
    figures = [
        ["steps", *map(str, comparison.steps), ""],
        *([["groups of rows", *map(_rows, comparison.groups), ""]] if any(comparison.groups) else []),
        _row("time of steps", comparison.seconds, duration_text),
        [*_row("tokens/s", speeds, count_text)[:3], ratio],
        ["on the links", *map(bytes_text, comparison.bytes), ""],
        *(_row(f"bits, {kind}", pair, "{:.2f}".format) for kind, pair in comparison.bits.items()),
        *(_row(f"time, {kind}", pair, "{:.1%}".format) for kind, pair in comparison.shares.items()),
    ]
    lines += ["", *table_lines(["", first, second, "second / first"], figures, left=1)]
    both: list[tuple[str, str, Sequence[tuple[float, float, float]], Callable[[float], str]]] = [
        ("loss", "step", comparison.loss_at_step, "{:.0f}".format),
        ("loss", "time", comparison.loss_at_seconds, duration_text),
        ("held-out loss, uncompressed,", "step", comparison.held_out_at_step, "{:.0f}".format),
        ("held-out loss as trained", "step", comparison.held_out_as_trained_at_step, "{:.0f}".format),
    ]
    for loss, axis, points, text in both:
        if points:
            rows = [[text(at), f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for at, a, b in points]
            lines += ["", f"{loss} at equal {axis}s:"]
            lines += table_lines([axis, first, second, "difference"], rows, left=0)
    return lines


def _value(value: Any) -> str:
    return "-" if value is None else printable(str(list(value) if isinstance(value, tuple) else value))


def _rows(groups: Sequence[Sequence[int]]) -> str:
    """The groups of each row: `0-1, 2, 3` for three rows, `0` for one row with one group."""
    runs = groups or ((0,),)
    return ", ".join(f"{min(run)}-{max(run)}" if len(run) > 1 else str(*run) for run in runs)


def _row(title: str, pair: Sequence[float | None], text: Callable[[float], str]) -> list[str]:
    return [title, *("-" if value is None else text(value) for value in pair), ""]
