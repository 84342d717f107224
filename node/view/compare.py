"""Compares two runs: the differences between their run files, and their results. All functions are pure.

Losses are compared at equal steps and at equal running time. Running time is the sum of a run's step times,
including replayed steps, so it does not count a night in which the run was stopped.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.telemetry.events import finite
from node.telemetry.history import Entry
from wire.figures import LinkFigures, StageFigures, flow_sum, total

POINTS = 5
"""The number of steps, and of times, at which losses are compared. They are evenly spread up to the last
common one."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    name: str
    config: Mapping[str, Any]
    """The run file's values by `section.key`."""
    steps: tuple[int, ...]
    """The steps that were done, ascending. For a replayed step, the last attempt counts."""
    losses: tuple[float, ...]
    """NaN for a step without labels."""
    elapsed: tuple[float, ...]
    """The running time in seconds until each step was done."""
    tokens: int
    """Tokens per step."""
    bytes: int
    """The bytes on all links."""
    bits: Mapping[str, float]
    """Bits per element, by kind of tensor."""
    shares: Mapping[str, float]
    """The shares of all stages' time, by kind of time."""
    held_out: Mapping[int, float] = field(default_factory=dict)
    """The held-out loss by step, with fp32 on every link."""
    held_out_as_trained: Mapping[int, float] = field(default_factory=dict)
    """The held-out loss by step, with the run's codecs on the links."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The gradient groups of each row in the newest placement; empty for a run with one group."""

    @property
    def tokens_per_second(self) -> float | None:
        """The mean over the whole run."""
        seconds = self.elapsed[-1] if self.elapsed else 0.0
        return self.tokens * len(self.steps) / seconds if seconds > 0 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison. Pairs have the first and the second run's figure; None where a run has none."""

    names: tuple[str, str]
    config: Mapping[str, tuple[Any, Any]]
    """The values that differ."""
    steps: tuple[int, int]
    seconds: tuple[float | None, float | None]
    tokens_per_second: tuple[float | None, float | None]
    bytes: tuple[int, int]
    bits: Mapping[str, tuple[float | None, float | None]]
    shares: Mapping[str, tuple[float | None, float | None]]
    loss_at_step: tuple[tuple[int, float, float], ...]
    """(step, first run's loss, second run's loss)."""
    loss_at_seconds: tuple[tuple[float, float, float], ...]
    """(running time in seconds, first run's loss, second run's loss). A loss is the run's newest at that
    time."""
    held_out_at_step: tuple[tuple[int, float, float], ...] = ()
    """(step, first run's, second run's) held-out loss, with fp32 on every link."""
    held_out_as_trained_at_step: tuple[tuple[int, float, float], ...] = ()
    """(step, first run's, second run's) held-out loss, with each run's codecs on the links."""
    groups: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = ((), ())
    """The gradient groups of each row in the newest placement; empty for a run with one group."""

    def to_fields(self) -> dict[str, Any]:
        """Plain values for JSON."""
        fields: dict[str, Any] = finite(self)
        return fields


def record(name: str, config: Mapping[str, Mapping[str, Any]], history: Iterable[Entry]) -> RunRecord:
    """A run's figures from its history. `config` is the run file, section by section."""
    done: dict[int, tuple[float, float]] = {}
    elapsed, tokens = 0.0, 0
    sent, time = LinkFigures(), StageFigures()
    held_out: dict[int, float] = {}
    as_trained: dict[int, float] = {}
    groups: tuple[tuple[int, ...], ...] = ()
    for entry in history:
        match entry.event:
            case events.RunStarted():
                tokens = entry.event.tokens_per_step
            case events.PlacementMade() as placement:
                groups = placement.groups
            case events.StepDone() as step:
                elapsed += step.seconds
                done.pop(step.step, None)
                done[step.step] = step.loss, elapsed
            case events.HeldOutLoss() as measured:
                if measured.samples:
                    held_out[measured.step] = measured.uncompressed
                if measured.loss is not None:
                    as_trained[measured.step] = measured.loss
            case events.StepCosts() as costs:
                time = total((time, *costs.stages))
                sent = total((sent, *costs.links))
            case _:
                pass
    whole = sum(time.seconds.values())
    kinds = dict.fromkeys(flow.kind for flow in sent.flows)
    steps = sorted(done)
    return RunRecord(
        name=name,
        config={f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()},
        steps=tuple(steps),
        losses=tuple(done[step][0] for step in steps),
        elapsed=tuple(done[step][1] for step in steps),
        tokens=tokens,
        bytes=sent.bytes,
        bits={kind: of_kind.bits for kind in kinds if (of_kind := flow_sum([sent], kind)).elements},
        shares={kind: seconds / whole for kind, seconds in time.seconds.items()} if whole > 0 else {},
        held_out=held_out,
        held_out_as_trained=as_trained,
        groups=groups,
    )


def compare(first: RunRecord, second: RunRecord) -> Comparison:
    keys = dict.fromkeys((*first.config, *second.config))
    both = {key: (first.config.get(key), second.config.get(key)) for key in keys}
    return Comparison(
        names=(first.name, second.name),
        config={key: pair for key, pair in both.items() if pair[0] != pair[1]},
        steps=(len(first.steps), len(second.steps)),
        seconds=(max(first.elapsed, default=None), max(second.elapsed, default=None)),
        tokens_per_second=(first.tokens_per_second, second.tokens_per_second),
        bytes=(first.bytes, second.bytes),
        bits=_pairs(first.bits, second.bits),
        shares=_pairs(first.shares, second.shares),
        loss_at_step=_at_steps(first, second),
        loss_at_seconds=_at_seconds(first, second),
        held_out_at_step=_both(first.held_out, second.held_out),
        held_out_as_trained_at_step=_both(first.held_out_as_trained, second.held_out_as_trained),
        groups=(first.groups, second.groups),
    )


def _at_steps(first: RunRecord, second: RunRecord) -> tuple[tuple[int, float, float], ...]:
    mine = dict(zip(first.steps, first.losses, strict=True))
    return _both(mine, dict(zip(second.steps, second.losses, strict=True)))


def _both(mine: Mapping[int, float], other: Mapping[int, float]) -> tuple[tuple[int, float, float], ...]:
    """(step, mine, other) at some of the steps that have a loss in both runs."""
    steps = [step for step in mine.keys() & other.keys() if not math.isnan(mine[step] + other[step])]
    return tuple((step, mine[step], other[step]) for step in _spread(sorted(steps)))


def _at_seconds(first: RunRecord, second: RunRecord) -> tuple[tuple[float, float, float], ...]:
    mine, other = _by_seconds(first), _by_seconds(second)
    if not mine or not other:
        return ()
    begin = max(mine[0][0], other[0][0])
    end = min(max(first.elapsed), max(second.elapsed))
    if end < begin:
        return ()
    times = dict.fromkeys(begin + (end - begin) * point / (POINTS - 1) for point in range(POINTS))
    return tuple((at, _loss_at(mine, at), _loss_at(other, at)) for at in times)


def _by_seconds(run: RunRecord) -> list[tuple[float, float]]:
    """(running time, loss) of the steps that have a loss, in the order of time."""
    pairs = zip(run.elapsed, run.losses, strict=True)
    return sorted((at, loss) for at, loss in pairs if not math.isnan(loss))


def _loss_at(order: Sequence[tuple[float, float]], at: float) -> float:
    """The loss of the newest step that was done at that time."""
    return order[bisect_right(order, (at, math.inf)) - 1][1]


def _spread(values: Sequence[int]) -> list[int]:
    """At most `POINTS` of the values, evenly spread and including the last."""
    count = min(POINTS, len(values))
    return list(dict.fromkeys(values[len(values) * (i + 1) // count - 1] for i in range(count)))


def _pairs(
    first: Mapping[str, float], second: Mapping[str, float]
) -> dict[str, tuple[float | None, float | None]]:
    known = [kind.value for kind in TimeKind]
    keys = sorted({*first, *second}, key=lambda key: (known.index(key) if key in known else -1, key))
    return {key: (first.get(key), second.get(key)) for key in keys}
