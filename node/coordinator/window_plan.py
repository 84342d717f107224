"""The adaptive window: how many microbatches stages run ahead, from what a step was measured to take. Pure.

The plan is made by simulating the schedule (`node.stage.schedule_simulation`) with the measured times, for
windows of growing width: too narrow, and stages wait for round trips; too wide, and they hold memory for
nothing (and in an interleaved schedule let gradients wait behind forwards that must come first). The smallest
window within `TOLERANCE` of the best step time wins, then each link's is lowered for as long as that stays
so. Real steps are less even than simulated ones, so each link gets `MARGIN` more where memory allows.

The result of a step does not depend on its window, so a plan may come late, or be lost with the coordinator.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.stage.schedule import Kind, held_activations, schedule
from node.stage.schedule_simulation import simulate
from node.telemetry.clock import TimeKind
from node.telemetry.events import StepCosts
from node.telemetry.floor import LinkRate, Network
from wire.telemetry import LinkReport

TOLERANCE = 0.01
"""A narrower window is taken when its step is at most this much longer than the best one's."""
KEEP = 0.02
"""A window that is in use stays when its step is at most this much longer than the plan's."""
CAUTION = 1.1
"""Round trips and transfers are planned this much longer than measured: a window that is one too narrow costs
far more than one that is one too wide."""
MARGIN = 1
"""More microbatches in flight on a link than an undisturbed step needs: what came late, a packing thread that
had to wait for a core, is made up for by those that are there already. Only where a wide window costs nothing
but memory, so not where chunks are interleaved."""
MOST_SIMULATED = 96
"""Microbatches; a longer step is as busy in its middle."""

Windows = tuple[int, ...]
"""Extra microbatches in flight on each link, the first link first; empty for a single stage."""


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """What one step was measured to take."""

    forward: tuple[float, ...]
    """Seconds of a microbatch's forward on each stage, over all its chunks, with half of its packing."""
    backward: tuple[float, ...]
    activation_bytes: float
    """A packed activation, frames included; 0 without neighbours."""
    gradient_bytes: float
    links: tuple[LinkRate, ...]
    """As `node.telemetry.floor.step_floor` takes them."""


def measured(
    costs: StepCosts,
    link_report: Callable[[int, int], LinkReport | None],
    chunks: int,
    microbatches: int,
) -> StepMeasures | None:
    """What a step was measured to take; None when that is unknown: it was aborted, or a stage is silent.

    Args:
        link_report: the newest report of (source, target), if there is one.
        microbatches: of the step.
    """
    stages = len(costs.stages)
    spent = [stage.seconds for stage in costs.stages]
    forward = [seconds.get(TimeKind.FORWARD, 0.0) for seconds in spent]
    backward = [seconds.get(TimeKind.BACKWARD, 0.0) for seconds in spent]
    if costs.aborted or stages == 0 or min(forward) <= 0 or min(backward) <= 0:
        return None
    packing = [seconds.get(TimeKind.ENCODE, 0.0) + seconds.get(TimeKind.DECODE, 0.0) for seconds in spent]
    crossings = microbatches * (stages * chunks - 1)

    def tensor_bytes(direction: str) -> float:
        flows = (flow for link in costs.links for flow in link.flows if flow.direction == direction)
        return sum(flow.bytes for flow in flows) / crossings if stages > 1 else 0.0

    def link(low: int, high: int) -> LinkRate:
        up, down = link_report(low, high), link_report(high, low)
        round_trips = [report.least_rtt_seconds for report in (up, down) if report is not None]
        return LinkRate(
            up=up.capacity if up is not None and up.capacity > 0 else math.inf,
            down=down.capacity if down is not None and down.capacity > 0 else math.inf,
            latency=min(round_trips, default=0.0) / 2,
        )

    joints = [(stage, stage + 1) for stage in range(stages - 1)]
    if chunks > 1 and stages > 2:
        joints.append((stages - 1, 0))
    return StepMeasures(
        forward=tuple((x + y / 2) / microbatches for x, y in zip(forward, packing, strict=True)),
        backward=tuple((x + y / 2) / microbatches for x, y in zip(backward, packing, strict=True)),
        activation_bytes=tensor_bytes("activation"),
        gradient_bytes=tensor_bytes("gradient"),
        links=tuple(link(low, high) for low, high in joints),
    )


def plan_windows(
    measures: StepMeasures,
    *,
    chunks: int,
    microbatches: int,
    most_held: Sequence[int],
    current: Windows,
) -> Windows:
    """The windows to use from the next step on.

    Args:
        most_held: chunk activations that each stage has memory for. Where not even window 0 fits, that is
            what is planned: the placement was made for it.
        current: the windows in use, kept when they are as good and fit.
    """
    stages = len(measures.forward)
    if stages == 1:
        return ()
    simulated = min(microbatches, MOST_SIMULATED)
    links = [
        LinkRate(
            up=link.up / CAUTION,
            down=link.down / CAUTION,
            latency=link.latency * CAUTION,
            full_duplex=link.full_duplex,
        )
        for link in measures.links
    ]
    network = Network(stages, links)
    sizes = {Kind.FORWARD: measures.activation_bytes, Kind.BACKWARD: measures.gradient_bytes}
    known: dict[Windows, float] = {}

    def seconds(windows: Windows) -> float:
        if windows not in known:
            known[windows] = simulate(
                schedule(stages, chunks, simulated, windows),
                lambda chunk, _: measures.forward[chunk % stages] / chunks,
                lambda chunk, _: measures.backward[chunk % stages] / chunks,
                network=network,
                sizes=sizes,
                swap=chunks == 1,
            ).total
        return known[windows]

    def fits(windows: Windows) -> bool:
        orders = schedule(stages, chunks, microbatches, windows)
        return all(held_activations(o) <= most for o, most in zip(orders, most_held, strict=True))

    even = [(width,) * (stages - 1) for width in _widths(simulated)]
    allowed = [even[0], *(windows for windows in even[1:] if fits(windows))]
    best = min(map(seconds, allowed))
    enough = best * (1 + TOLERANCE)
    found = next(windows for windows in allowed if seconds(windows) <= enough)
    good = len(current) == stages - 1 and fits(current) and seconds(current) <= enough * (1 + KEEP)
    if chunks > 1:
        return current if good else found
    found = _narrowed(found, lambda windows: seconds(windows) <= enough)
    near = all(
        least <= now <= least + 2 * MARGIN for now, least in zip(current, found, strict=False) if least
    )
    return current if good and near else _widened(found, fits)


def _widths(microbatches: int) -> list[int]:
    """Every width up to 8, then a quarter more each time; wider than all microbatches is no wider."""
    widths = [0]
    while widths[-1] < microbatches:
        widths.append(max(widths[-1] + 1, widths[-1] * 5 // 4))
    return [width for width in widths if width <= microbatches]


def _widened(windows: Windows, fits: Callable[[Windows], bool]) -> Windows:
    """`MARGIN` more on each link that needs a window at all, the last link's first, while it fits."""
    for link in reversed(range(len(windows))):
        wider = (*windows[:link], windows[link] + MARGIN, *windows[link + 1 :])
        windows = wider if windows[link] and fits(wider) else windows
    return windows


def _narrowed(windows: Windows, good: Callable[[Windows], bool]) -> Windows:
    """Each link's window lowered, the last link's first: all stages before it hold less by it."""
    for link in reversed(range(len(windows))):
        while windows[link] > 0:
            lower = (*windows[:link], windows[link] - 1, *windows[link + 1 :])
            if not good(lower):
                break
            windows = lower
    return windows
