"""How long a step takes over given lines, and how many microbatches are then in flight. All functions are
pure.

The schedule is simulated (`node.schedule.simulation`) with the machines' lines, each of which is shared by
all links of its machine. Runs reach a measured share of the simulated pace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log10

import numpy as np

from node.schedule.floor import LinkRate, Network, PipelineStep, chunk_shares
from node.schedule.schedule import Kind, Orders, schedule
from node.schedule.simulation import simulate
from node.tuning.window_plan import MARGIN, TOLERANCE
from node.view.machines import Machine

REACHED = 0.96
"""The share of the simulated pace that runs reach: the median of the lab's cells whose nodes have one line
each (scripts/results/lab_gpt2-xl-*-nic*.json, explained_steps.json)."""
ACKNOWLEDGED = ((10.0, 0.040), (100.0, 0.019), (300.0, 0.003))
"""A line's Mbit/s, and the bytes of acknowledgements that it sends back, divided by those of the frames that
it receives. Measured in the same cells. On a slow line each packet is acknowledged separately."""
WINDOWS = (0, 1, 2, 4, 8)
"""The windows that are tried."""
MOST_SIMULATED = 32
"""The most microbatches, or slices, that are simulated. Each further one takes as long as the limiting
resource."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The result of a simulated step."""

    seconds: float
    window: int
    """The microbatches in flight on each link beyond what the schedule holds, in an undisturbed step."""
    widest: int
    """The window that a run plans: with a margin, which is used only when something is delayed."""


@lru_cache(maxsize=64)
def simulated(work: PipelineStep, window: int | None = None) -> Pace:
    """A step with this window, or with the narrowest window that is as good as wider ones."""
    if window is not None:
        return Pace(seconds=_seconds(work, window), window=window, widest=window)
    widths = [width for width in WINDOWS if width < max(1, work.microbatches * work.slices)]
    seconds, least = dict[int, float](), (1 + TOLERANCE) * work.floor().seconds
    for width in widths if len(work.forward) > 1 else widths[:1]:
        seconds[width] = _seconds(work, width)
        if seconds[width] <= least:
            break
    best = min(seconds.values())
    narrowest = next(width for width, reached in seconds.items() if reached <= (1 + TOLERANCE) * best)
    margin = MARGIN if narrowest and work.chunks == 1 else 0
    return Pace(seconds=best, window=narrowest, widest=narrowest + margin)


def acknowledgements(mbit: float) -> float:
    """The bytes sent back per byte received, on a line of this rate in Mbit/s."""
    rates, shares = zip(*ACKNOWLEDGED, strict=True)
    return float(np.interp(log10(min(mbit, 1e6)), [log10(rate) for rate in rates], shares))


def lines_of(machines: Sequence[Machine], loads: Sequence[tuple[float, float]]) -> tuple[LinkRate, ...]:
    """The rate of each machine's line that is left for a step's frames, after headers and acknowledgements.

    Args:
        loads: the bytes that each machine uploads and downloads in a step.
    """
    rates = []
    for machine, (up, down) in zip(machines, loads, strict=True):
        share = acknowledgements(min(machine.up_mbit, machine.down_mbit))
        rates.append(
            LinkRate(
                up=machine.up * (up / (up + share * down) if up else 1.0),
                down=machine.down * (down / (down + share * up) if down else 1.0),
            )
        )
    return tuple(rates)


def _orders(work: PipelineStep, window: int, microbatches: int) -> Orders:
    head_first = work.head_share is not None
    # A window never exceeds the number of all slices.
    width = min(window, microbatches * work.slices)
    stages, slices = len(work.forward), work.slices
    return schedule(stages, work.chunks, microbatches, width, head_first=head_first, slices=slices)


def _seconds(work: PipelineStep, window: int) -> float:
    """The seconds of a step of any length. In its middle, all microbatches take the same time."""
    count = work.microbatches
    most = max(2, max(MOST_SIMULATED, 2 * len(work.forward)) // work.slices)
    if count <= most:
        return _total(work, window, count) + work.after_seconds
    whole, half = (_total(work, window, microbatches) for microbatches in (most, most // 2))
    return whole + (count - most) * (whole - half) / (most - most // 2) + work.after_seconds


def _total(work: PipelineStep, window: int, microbatches: int) -> float:
    stages = len(work.forward)
    shares = [share / work.slices for share in chunk_shares(stages, work.chunks, work.head_share)]
    return simulate(
        _orders(work, window, microbatches),
        lambda chunk, _: work.forward[chunk % stages] * shares[chunk],
        lambda chunk, _: work.backward[chunk % stages] * shares[chunk],
        network=Network(stages, work.links, work.interfaces),
        sizes={
            Kind.FORWARD: work.activation_bytes / work.slices,
            Kind.BACKWARD: work.gradient_bytes / work.slices,
        },
        swap=work.chunks == 1,
    ).total
