"""Plans the window (microbatches in flight on each link) from the measured times of a step. All functions are
pure.

The plan simulates the schedule (`node.schedule.simulation`) with the measured times, for windows of
increasing width. If a window is too narrow, stages wait for round trips. If it is too wide, it wastes memory,
and in an interleaved schedule it delays gradients. The smallest window within `TOLERANCE` of the best step
time wins; then each link's window is reduced while that holds. A narrow window can reduce a link's measured
rate, so no window is narrower than the round trip needs. Real steps are less regular than simulated ones, so
each link gets `MARGIN` more if memory allows.

A node's links share its line, so the simulation uses the most that each line was seen to carry. If every link
has a line of its own, nodes receive from both sides at once and the most is the sum, which limits nothing. If
a line is shared and full, a window beyond what fills it only makes its queue longer, with activations ahead
of gradients. So its links get no margin.

A step's result does not depend on its window, so a plan may be late or be lost with the coordinator.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from node.schedule.floor import LinkRate, Network, Resource, ResourceKind, chunk_shares, joints
from node.schedule.schedule import Kind, held_activations, schedule
from node.schedule.simulation import Timeline, simulate
from node.telemetry.clock import TimeKind
from node.telemetry.events import StepCosts
from node.tuning.decisions import GAIN, WATCHED, Trial
from wire.figures import LinkFigures, flow_sum

TOLERANCE = 0.01
"""A narrower window is chosen if its step is at most this much longer than the best one's."""
KEEP = 0.02
"""The window in use is kept if its step is at most this much longer than the plan's."""
CAUTION = 1.1
"""Round trips and transfers are assumed to take this much longer than measured. A window that is too narrow
by one costs far more than one that is too wide."""
MARGIN = 1
"""Extra microbatches in flight on a link beyond what an undisturbed step needs, to compensate for delays.
They are not used with interleaved chunks, where a wide window costs more than memory."""
SAME = 3
"""If this many window widths in a row give exactly the same step time, no schedule waits for the window."""
SOON = 4
"""The number of steps from the first plan of windows to the next."""
MOST_SIMULATED = 96
"""The most microbatches that are simulated. In its middle, a longer step is equally busy."""

Windows = tuple[int, ...]
"""Extra microbatches in flight on each link, first link first; empty for a single stage. If the first stage
has the head, the last entry is for the link from the last stage to the first."""


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    forward: tuple[float, ...]
    """The seconds of a microbatch's forward on each stage, over all its chunks, including half of its
    packing."""
    backward: tuple[float, ...]
    """The same for backward."""
    activation_bytes: float
    """The bytes of a packed activation with its frames; 0 without neighbours."""
    gradient_bytes: float
    """The same for a gradient."""
    links: tuple[LinkRate, ...]
    """As in `node.schedule.floor.PipelineStep`."""
    head_share: float | None = None
    """As in `node.schedule.floor.PipelineStep`."""
    packing: tuple[float, ...] = ()
    """The part of `forward` and `backward` together that each stage's compute waited for packing; empty for
    none."""
    lines: tuple[LinkRate, ...] = ()
    """The most that each stage's machine sends and receives over all its links; empty for no limit."""


def measured(
    costs: StepCosts,
    chunks: int,
    microbatches: int,
    head_share: float | None = None,
    line_of: Callable[[int], LinkRate] = lambda stage: LinkRate(),
) -> StepMeasures | None:
    """The measured times of a step; None if it was aborted or a stage sent no report.

    Args:
        microbatches: those of the step. Pass the number of slices to get the times of a slice.
        head_share: as in `StepMeasures`.
        line_of: the most that a stage's machine was seen to send and receive.
    """
    stages = len(costs.stages)
    spent = [stage.seconds for stage in costs.stages]
    forward = [seconds.get(TimeKind.FORWARD, 0.0) for seconds in spent]
    backward = [seconds.get(TimeKind.BACKWARD, 0.0) for seconds in spent]
    if costs.aborted or stages == 0 or min(forward) <= 0 or min(backward) <= 0 or costs.seconds <= 0:
        return None
    packing = [seconds.get(TimeKind.ENCODE, 0.0) + seconds.get(TimeKind.DECODE, 0.0) for seconds in spent]
    crossings = microbatches * (stages * chunks - 1 + (head_share is not None))

    def tensor_bytes(direction: str) -> float:
        return flow_sum(costs.links, direction).bytes / crossings if stages > 1 else 0.0

    sent, unknown = {(link.source, link.target): link for link in costs.links}, LinkFigures()

    def link(low: int, high: int) -> LinkRate:
        up, down = sent.get((low, high), unknown), sent.get((high, low), unknown)
        round_trips = [way.least_round_trip_seconds for way in (up, down) if way.least_round_trip_seconds > 0]
        return LinkRate(
            up=up.capacity or math.inf,
            down=down.capacity or math.inf,
            latency=min(round_trips, default=0.0) / 2,
        )

    pairs = joints(stages, closes=chunks > 1 or head_share is not None)
    links = tuple(link(low, high) for low, high in pairs)

    def line(stage: int) -> LinkRate:
        """The line's rate: at least that of each of its links, and at least what all of them carried in this
        step."""
        ends = [(rate.up, rate.down) for rate, (low, _) in zip(links, pairs, strict=True) if low == stage]
        ends += [(rate.down, rate.up) for rate, (_, high) in zip(links, pairs, strict=True) if high == stage]
        out = sum(flow.bytes for flow in costs.links if flow.source == stage) / costs.seconds
        received = sum(flow.bytes for flow in costs.links if flow.target == stage) / costs.seconds
        seen = line_of(stage)
        return LinkRate(
            up=max(seen.up, out, *(up for up, _ in ends if up < math.inf)),
            down=max(seen.down, received, *(down for _, down in ends if down < math.inf)),
        )

    return StepMeasures(
        forward=tuple((x + y / 2) / microbatches for x, y in zip(forward, packing, strict=True)),
        backward=tuple((x + y / 2) / microbatches for x, y in zip(backward, packing, strict=True)),
        activation_bytes=tensor_bytes("activation"),
        gradient_bytes=tensor_bytes("gradient"),
        links=links,
        head_share=head_share,
        packing=tuple(seconds / microbatches for seconds in packing),
        lines=tuple(map(line, range(stages))),
    )


def plan_windows(
    measures: StepMeasures,
    *,
    chunks: int,
    microbatches: int,
    most_held: Sequence[int],
    current: Windows,
    slices: int = 1,
) -> Windows:
    """The windows to use from the next step on.

    Args:
        most_held: the number of chunk activations that each stage has memory for. Window 0 is the minimum
            even if it does not fit, because the placement was made for it.
        current: the windows in use. They are kept if they are as good and fit.
        slices: the slices of each microbatch. `measures` are then those of a slice.
    """
    stages = len(measures.forward)
    if stages == 1:
        return ()
    head_first = measures.head_share is not None
    links = stages - 1 + head_first

    def fits(windows: Windows) -> bool:
        orders = schedule(stages, chunks, microbatches, windows, head_first=head_first, slices=slices)
        return all(held_activations(o) <= most for o, most in zip(orders, most_held, strict=True))

    simulated = min(microbatches, max(1, MOST_SIMULATED // slices))
    even = [(width,) * links for width in _widths(simulated * slices)]
    allowed = [even[0], *(windows for windows in even[1:] if fits(windows))]
    steps = _Steps(measures, allowed, chunks=chunks, microbatches=simulated, slices=slices)
    good = len(current) == links and fits(current) and steps.near_best(current, KEEP)
    if chunks > 1:
        return current if good else steps.smallest_even()
    fast = _Steps(_with_fast_links(measures), allowed, chunks=chunks, microbatches=simulated, slices=slices)

    def suits(windows: Windows) -> bool:
        return fits(windows) and steps.near_best(windows)

    planned = _raised(steps.smallest(), fast.smallest(), suits)
    full = steps.full_lines(planned)
    wanted = tuple(
        least if not least or full & {link, (link + 1) % stages} else least + MARGIN
        for link, least in enumerate(planned)
    )
    # A window in use may be a margin wider than what is wanted, except on a full line.
    near = all(
        least <= now <= 2 * most - least
        for now, least, most in zip(current, planned, wanted, strict=False)
        if least
    )
    return current if good and near else _raised(planned, wanted, suits)


class WindowControl:
    """Decides when the windows of an epoch's rows change. On a steady line there are only two plans.

    The first plan uses the first measured step. The second uses `SOON` steps with the first plan's windows,
    and for each time and rate their median. After that the windows stay. There is another plan only if the
    last change made steps shorter by `KEEP`, or if for `WATCHED` steps the step time differs by
    `decisions.GAIN` from the time when the windows settled. Windows that make steps longer are reverted.
    """

    def __init__(self, current: Windows, *, is_known: bool = False) -> None:
        """
        Args:
            current: the windows in use, the same for all rows.
            is_known: an earlier epoch with such steps had these windows. They then stay until the second
                plan.
        """
        self._trial = Trial(current)
        self._rows: list[Sequence[StepMeasures]] = []
        """The rows' measures of each step that is watched."""
        self._is_first = not is_known
        self._settled = 0.0
        """A step's usual seconds when the windows settled; 0 until they have."""

    def step_done(
        self,
        rows: Sequence[StepMeasures],
        seconds: float,
        plan: Callable[[Sequence[StepMeasures]], Windows],
    ) -> Windows | None:
        """Record a step and what each row measured. Returns new windows if they change.

        Args:
            plan: `plan_windows` of each row, from its measures.
        """
        self._rows.append(rows)
        if self._is_first:
            self._is_first = False
            self._rows.clear()
            return self._changed(plan(rows), None)
        usual = self._trial.step_done(seconds, WATCHED if self._settled else SOON)
        if usual is None:
            return None
        watched = [middle(row) for row in zip(*self._rows[1:], strict=True)]
        self._rows.clear()
        if (before := self._trial.judged()) is not None:
            windows, seconds_before = before
            if usual > (1 + GAIN) * seconds_before:
                self._settled = seconds_before
                return self._changed(windows, None)
            if usual > (1 - KEEP) * seconds_before:
                self._settled = usual
        if self._settled and abs(usual - self._settled) <= GAIN * self._settled:
            return None
        changed = self._changed(plan(watched), usual)
        self._settled = usual if changed is None else 0.0
        return changed

    def _changed(self, windows: Windows, usual: float | None) -> Windows | None:
        if windows == self._trial.current:
            return None
        self._trial.change(windows, usual)
        return windows


Combine = Callable[[Sequence[float]], float]


def middle(steps: Sequence[StepMeasures]) -> StepMeasures:
    """The median of each time and rate over a row's steps in one epoch."""
    return combined(steps, median_low, median_low)


def combined(measures: Sequence[StepMeasures], longer: Combine, shorter: Combine) -> StepMeasures:
    """Several measures of the same stages and links as one.

    Args:
        longer: combines times, sizes and latencies.
        shorter: combines rates, and the part of times that is packing.
    """

    def times(of: Callable[[StepMeasures], Sequence[float]], combine: Combine = longer) -> tuple[float, ...]:
        return tuple(map(combine, zip(*map(of, measures), strict=True)))

    def rates(of: Callable[[StepMeasures], Sequence[LinkRate]]) -> tuple[LinkRate, ...]:
        return tuple(
            LinkRate(
                up=shorter([rate.up for rate in links]),
                down=shorter([rate.down for rate in links]),
                latency=longer([rate.latency for rate in links]),
            )
            for links in zip(*map(of, measures), strict=True)
        )

    return replace(
        measures[0],
        forward=times(lambda each: each.forward),
        backward=times(lambda each: each.backward),
        activation_bytes=longer([each.activation_bytes for each in measures]),
        gradient_bytes=longer([each.gradient_bytes for each in measures]),
        links=rates(lambda each: each.links),
        packing=times(lambda each: each.packing, shorter),
        lines=rates(lambda each: each.lines),
    )


class _Steps:
    """Simulated step times by window, at measured rates with `CAUTION`. It tells which windows are enough.

    Args:
        allowed: even windows, smallest first.
    """

    def __init__(
        self,
        measures: StepMeasures,
        allowed: Sequence[Windows],
        *,
        chunks: int,
        microbatches: int,
        slices: int,
    ) -> None:
        self._slices = slices
        self._measures = measures
        self._allowed = allowed
        self._chunks = chunks
        self._microbatches = microbatches
        links = [
            LinkRate(
                up=link.up / CAUTION,
                down=link.down / CAUTION,
                latency=link.latency * CAUTION,
            )
            for link in measures.links
        ]
        lines = [LinkRate(up=line.up / CAUTION, down=line.down / CAUTION) for line in measures.lines]
        self._network = Network(len(measures.forward), links, lines)
        self._known: dict[Windows, Timeline] = {}
        self._enough = self._best() * (1 + TOLERANCE)

    def near_best(self, windows: Windows, beyond: float = 0.0) -> bool:
        """Whether a step takes at most `TOLERANCE` plus `beyond` longer than with the best allowed window."""
        return self._seconds(windows) <= self._enough * (1 + beyond)

    def smallest_even(self) -> Windows:
        return next(filter(self.near_best, self._allowed))

    def smallest(self) -> Windows:
        """The smallest even window, then with each link's window reduced, last link first: then all stages
        before the link hold fewer activations."""
        windows = self.smallest_even()
        for link in reversed(range(len(windows))):
            while windows[link] > 0:
                lower = (*windows[:link], windows[link] - 1, *windows[link + 1 :])
                if not self.near_best(lower):
                    break
                windows = lower
        return windows

    def full_lines(self, windows: Windows) -> frozenset[int]:
        """The stages whose line is busy for longer than any stage computes."""
        step = self._timeline(windows)
        computes = max(step.busy)
        return frozenset(
            part.stage
            for part, busy in step.link_busy.items()
            if isinstance(part, Resource) and part.kind is ResourceKind.INTERFACE and busy >= computes
        )

    def _best(self) -> float:
        """The least step time. When wider windows change nothing any more, no wider ones are tried."""
        least, newest, same = math.inf, math.nan, 1
        for windows in self._allowed:
            seconds = self._seconds(windows)
            least, same, newest = min(least, seconds), same + 1 if seconds == newest else 1, seconds
            if same == SAME:
                break
        return least

    def _seconds(self, windows: Windows) -> float:
        return self._timeline(windows).total

    def _timeline(self, windows: Windows) -> Timeline:
        if windows not in self._known:
            measures, chunks = self._measures, self._chunks
            stages, share = len(measures.forward), measures.head_share
            shares = chunk_shares(stages, chunks, share)
            self._known[windows] = simulate(
                schedule(
                    stages,
                    chunks,
                    self._microbatches,
                    windows,
                    head_first=share is not None,
                    slices=self._slices,
                ),
                lambda chunk, _: measures.forward[chunk % stages] * shares[chunk],
                lambda chunk, _: measures.backward[chunk % stages] * shares[chunk],
                network=self._network,
                sizes={
                    Kind.FORWARD: measures.activation_bytes,
                    Kind.BACKWARD: measures.gradient_bytes,
                },
                swap=chunks == 1,
            )
        return self._known[windows]


def _with_fast_links(measures: StepMeasures) -> StepMeasures:
    """The same measures with unlimited link rates, so that windows depend only on round trips.

    If a window is too narrow for the round trip, the link is idle at times. TCP then has only a few tensors
    to carry and does not reach the link's rate. The link is measured as slow as the window makes it, and a
    plan by that rate alone would keep the window narrow. Lines keep their measured rates: the maximum over
    many moments is no average, and it grows with the window as long as the line has room.
    """
    return replace(
        measures, links=tuple(replace(link, up=math.inf, down=math.inf) for link in measures.links)
    )


def _widths(microbatches: int) -> list[int]:
    """All widths up to 8, then a quarter more each time, up to the number of microbatches."""
    widths = [0]
    while widths[-1] < microbatches:
        widths.append(max(widths[-1] + 1, widths[-1] * 5 // 4))
    return [width for width in widths if width <= microbatches]


def _raised(windows: Windows, wanted: Windows, suits: Callable[[Windows], bool]) -> Windows:
    """Raise each link's window to what is wanted, last link first, or to the widest below it that suits.

    Not every wider window suits: changing one link's window changes the order of work, which can make another
    stage wait.
    """
    for link in reversed(range(len(windows))):
        for width in range(wanted[link], windows[link], -1):
            wider = (*windows[:link], width, *windows[link + 1 :])
            if suits(wider):
                windows = wider
                break
    return windows
