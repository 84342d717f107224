"""Two runs side by side: what differs in their files, and what came of it. Pure.

Losses are compared at equal steps and at equal times. A run's time is that of its steps one after the other,
replayed ones included, so that a night for which it was stopped does not count.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from node.display.render import table_lines
from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.telemetry.events import finite
from node.telemetry.history import Entry
from node.telemetry.units import bytes_text, count_text, duration_text, printable

POINTS = 5
"""Steps and times at which losses are compared, evenly spread; the last is the last that both runs have."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is compared of one run."""

    name: str
    config: Mapping[str, Any]
    """The run file's values, `section.key` by name."""
    steps: tuple[int, ...]
    """Steps done, in order, each as it went last."""
    losses: tuple[float, ...]
    elapsed: tuple[float, ...]
    """Seconds of running until the step was done."""
    tokens: int
    """A step has so many."""
    bytes: int
    """On all links."""
    bits: Mapping[str, float]
    """Bits an element, by kind of tensor."""
    shares: Mapping[str, float]
    """Share of all stages' time, by kind."""

    @property
    def tokens_per_second(self) -> float | None:
        """Over the whole run."""
        seconds = self.elapsed[-1] if self.elapsed else 0.0
        return self.tokens * len(self.steps) / seconds if seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Pairs are of the first and the second run; None where a run has no figure."""

    names: tuple[str, str]
    config: Mapping[str, tuple[Any, Any]]
    """Values that differ."""
    steps: tuple[int, int]
    seconds: tuple[float | None, float | None]
    tokens_per_second: tuple[float | None, float | None]
    bytes: tuple[int, int]
    bits: Mapping[str, tuple[float | None, float | None]]
    shares: Mapping[str, tuple[float | None, float | None]]
    loss_at_step: tuple[tuple[int, float, float], ...]
    """(step, first, second)"""
    loss_at_seconds: tuple[tuple[float, float, float], ...]
    """(seconds of running, first, second): the newest loss that each run had by then."""

    def to_fields(self) -> dict[str, Any]:
        """Plain values for JSON."""
        fields: dict[str, Any] = finite(asdict(self))
        return fields


def record(name: str, config: Mapping[str, Mapping[str, Any]], history: Iterable[Entry]) -> RunRecord:
    """One run's figures out of its history. `config` is the run file, section by section."""
    done: dict[int, tuple[float, float]] = {}
    elapsed, tokens, size = 0.0, 0, 0
    sent: dict[str, list[int]] = {}
    kinds: dict[str, float] = {}
    for entry in history:
        match entry.event:
            case events.RunStarted():
                tokens = entry.event.tokens_per_step
            case events.StepDone() as step:
                elapsed += step.seconds
                done.pop(step.step, None)
                done[step.step] = step.loss, elapsed
            case events.StepCosts() as costs:
                for stage in costs.stages:
                    for kind, seconds in stage.seconds.items():
                        kinds[kind] = kinds.get(kind, 0.0) + seconds
                for link in costs.links:
                    size += link.bytes
                    for flow in link.flows:
                        sums = sent.setdefault(flow.direction, [0, 0])
                        sums[0] += flow.bytes
                        sums[1] += flow.elements
            case _:
                pass
    whole = sum(kinds.values())
    steps = sorted(done)
    return RunRecord(
        name=name,
        config={f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()},
        steps=tuple(steps),
        losses=tuple(done[step][0] for step in steps),
        elapsed=tuple(done[step][1] for step in steps),
        tokens=tokens,
        bytes=size,
        bits={kind: 8 * total / elements for kind, (total, elements) in sent.items() if elements},
        shares={kind: seconds / whole for kind, seconds in kinds.items()} if whole > 0 else {},
    )


def compare(first: RunRecord, second: RunRecord) -> Comparison:
    """Both runs side by side."""
    keys = dict.fromkeys((*first.config, *second.config))
    both = {key: (first.config.get(key), second.config.get(key)) for key in keys}
    return Comparison(
        names=(first.name, second.name),
        config={key: pair for key, pair in both.items() if pair[0] != pair[1]},
        steps=(len(first.steps), len(second.steps)),
        seconds=(_last(first.elapsed), _last(second.elapsed)),
        tokens_per_second=(first.tokens_per_second, second.tokens_per_second),
        bytes=(first.bytes, second.bytes),
        bits=_pairs(first.bits, second.bits),
        shares=_pairs(first.shares, second.shares),
        loss_at_step=_at_steps(first, second),
        loss_at_seconds=_at_seconds(first, second),
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """As text: the differences in the run files, then the figures."""
    first, second = (printable(name) for name in comparison.names)
    rows = [[key, _value(a), _value(b)] for key, (a, b) in comparison.config.items()]
    lines = (
        ["what differs in the run files:", *table_lines(["key", first, second], rows, left=3)] if rows else []
    )
    if not rows:
        lines = ["the run files are the same"]
    figures = [
        ["steps", *map(str, comparison.steps)],
        ["time of steps", *(_shown(seconds, duration_text) for seconds in comparison.seconds)],
        [
            "tokens/s",
            *(_shown(rate, count_text) for rate in comparison.tokens_per_second),
            *_ratio(comparison),
        ],
        ["on the links", *map(bytes_text, comparison.bytes)],
        *(
            [f"bits, {kind}", *(_shown(bits, "{:.2f}".format) for bits in pair)]
            for kind, pair in comparison.bits.items()
        ),
        *(
            [f"time, {kind}", *(_shown(share, "{:.1%}".format) for share in pair)]
            for kind, pair in comparison.shares.items()
        ),
    ]
    lines += ["", *_table(["", first, second, "second / first"], figures)]
    both: list[tuple[str, Sequence[tuple[float, float, float]], Callable[[float], str]]] = [
        ("step", comparison.loss_at_step, "{:.0f}".format),
        ("time", comparison.loss_at_seconds, duration_text),
    ]
    for what, points, text in both:
        if points:
            rows = [[text(at), f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}"] for at, a, b in points]
            lines += ["", f"loss at equal {what}s:"]
            lines += table_lines([what, first, second, "difference"], rows, left=0)
    return lines


# ---- inside


def _at_steps(first: RunRecord, second: RunRecord) -> tuple[tuple[int, float, float], ...]:
    losses = (
        dict(zip(first.steps, first.losses, strict=True)),
        dict(zip(second.steps, second.losses, strict=True)),
    )
    common = sorted(losses[0].keys() & losses[1].keys())
    return tuple((step, losses[0][step], losses[1][step]) for step in _spread(common))


def _at_seconds(first: RunRecord, second: RunRecord) -> tuple[tuple[float, float, float], ...]:
    if not first.steps or not second.steps:
        return ()
    begin = max(first.elapsed[0], second.elapsed[0])
    end = min(max(first.elapsed), max(second.elapsed))
    if end < begin:
        return ()
    times = dict.fromkeys(begin + (end - begin) * point / (POINTS - 1) for point in range(POINTS))
    return tuple((at, _loss_at(first, at), _loss_at(second, at)) for at in times)


def _loss_at(run: RunRecord, at: float) -> float:
    """Of the newest step that was done by then."""
    order = sorted(zip(run.elapsed, run.losses, strict=True))
    return order[bisect_right(order, (at, math.inf)) - 1][1]


def _spread(values: Sequence[int]) -> list[int]:
    """At most `POINTS` of them, evenly spread, the last one always."""
    count = min(POINTS, len(values))
    return list(dict.fromkeys(values[len(values) * (i + 1) // count - 1] for i in range(count)))


def _pairs(
    first: Mapping[str, float], second: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    known = [kind.value for kind in TimeKind]
    keys = sorted({*first, *second}, key=lambda key: (known.index(key) if key in known else -1, key))
    return {key: (first.get(key), second.get(key)) for key in keys}


def _last(values: Sequence[float]) -> float | None:
    return max(values) if values else None


def _value(value: Any) -> str:
    return "-" if value is None else printable(str(list(value) if isinstance(value, tuple) else value))


def _shown(value: float | None, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _ratio(comparison: Comparison) -> list[str]:
    first, second = comparison.tokens_per_second
    return [f"{second / first:.2f} x"] if first and second else []


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return table_lines(header, [[*row, *[""] * (len(header) - len(row))] for row in rows], left=1)
