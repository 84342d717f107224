"""Compute a cell's figures from the steps of a phase. Has no side effects.

A phase is a part of one run over one shape of the network. A cell's floor comes from the links' payload
rates, the bytes of its own tensors, and the least compute times of its steps and of the run's unthrottled
phase.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from node.lab.calibration import Calibration
from node.lab.network import WireBytes
from node.lab.shape import PAYLOAD_SHARE, Shape
from node.lab.topology import Wire
from node.schedule.floor import Floor, LinkRate, PipelineStep, joints
from node.telemetry.clock import TimeKind
from node.telemetry.costs import bits_per_element, idle_by_stage
from node.telemetry.events import StepCosts, WindowsPlanned


@dataclass(frozen=True, kw_only=True)
class PhaseSteps:
    """The measured steps of a phase, and the bytes that the network counted during them."""

    costs: tuple[StepCosts, ...]
    wires: tuple[WireBytes, ...]
    seconds: float
    """The time between the two readings of the counters."""

    @property
    def step_seconds(self) -> float:
        return statistics.median(step.seconds for step in self.costs)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Compute time of a microbatch by stage, and of a step after its last backward: the least over some
    steps.

    It is the least because no step can be faster than its floor, and a busy machine only adds time.
    """

    forward: tuple[float, ...]
    """Seconds per stage. Half of encoding and decoding counts here, half in `backward`."""
    backward: tuple[float, ...]
    after: float
    """Seconds of the slowest stage's optimizer."""


def compute_times(phases: Sequence[PhaseSteps], microbatches: int) -> Compute:
    """Compute times from the phases of one run, without waits."""
    costs = [step for phase in phases for step in phase.costs]

    def least(stage: int, *kinds: TimeKind) -> float:
        return min(sum(step.stages[stage].seconds.get(kind.value, 0.0) for kind in kinds) for step in costs)

    stages = range(len(costs[0].stages))
    codecs = [least(stage, TimeKind.ENCODE, TimeKind.DECODE) / 2 for stage in stages]
    return Compute(
        forward=tuple((least(i, TimeKind.FORWARD) + codecs[i]) / microbatches for i in stages),
        backward=tuple((least(i, TimeKind.BACKWARD) + codecs[i]) / microbatches for i in stages),
        after=max(least(stage, TimeKind.OPTIMIZER) for stage in stages),
    )


def cell_floor(
    phase: PhaseSteps,
    compute: Compute,
    shape: Shape,
    wires: Sequence[Wire],
    calibration: Calibration,
    *,
    microbatches: int,
    chunks: int,
    head_share: float | None = None,
    slices: int = 1,
) -> Floor:
    """The lower bound on this cell's step time.

    Rates are those of the payload: measured for links, and for interfaces as configured and checked by
    calibration.
    """
    joined = len(joints(len(compute.forward), closes=chunks > 1 or head_share is not None))
    links: tuple[LinkRate, ...] = ()
    interfaces: tuple[LinkRate, ...] = ()
    if wires[0].higher < 0:
        interfaces = tuple(
            LinkRate(
                up=link.up_mbit * 1e6 / 8 * PAYLOAD_SHARE,
                down=link.down_mbit * 1e6 / 8 * PAYLOAD_SHARE,
                latency=link.rtt_ms / 4e3,  # a tensor passes two interfaces
            )
            for link in shape.links
        )
    else:
        links = tuple(
            LinkRate(
                up=calibration.payload_mbit(wire.lower, wire.higher) * 1e6 / 8,
                down=calibration.payload_mbit(wire.higher, wire.lower) * 1e6 / 8,
                latency=calibration.rtt_ms(wire.lower, wire.higher) / 2e3,
            )
            for wire in wires[:joined]
        )
    return PipelineStep(
        microbatches=microbatches,
        forward=compute.forward,
        backward=compute.backward,
        activation_bytes=_tensor_bytes(phase, "activation", microbatches * chunks),
        gradient_bytes=_tensor_bytes(phase, "gradient", microbatches * chunks),
        links=links,
        interfaces=interfaces,
        chunks=chunks,
        head_share=head_share,
        after_seconds=compute.after,
        slices=slices,
    ).floor()


def cell_figures(
    phase: PhaseSteps, shape: Shape, wires: Sequence[Wire], *, tokens_per_step: int, losses: Sequence[float]
) -> dict[str, Any]:
    """A cell's figures, without its floor."""
    seconds = sorted(step.seconds for step in phase.costs)
    rates = [tokens_per_step / value for value in seconds]
    return {
        "measured_steps": len(seconds),
        "step_seconds": {"median": statistics.median(seconds), "least": seconds[0], "most": seconds[-1]},
        "tokens_per_second": {
            "median": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
        },
        "losses": list(losses),
        "idle": [statistics.fmean(shares) for shares in zip(*map(idle_by_stage, phase.costs), strict=True)],
        "stage_seconds": stage_seconds(phase),
        "bits_forward": statistics.fmean(bits_per_element(step, "activation") for step in phase.costs),
        "bits_backward": statistics.fmean(bits_per_element(step, "gradient") for step in phase.costs),
        "wires": wire_figures(phase, shape, wires),
    }


def stage_seconds(phase: PhaseSteps) -> list[dict[str, float]]:
    """Each stage's seconds per step by kind of work, averaged over the measured steps."""
    stages = range(len(phase.costs[0].stages))
    return [
        {
            kind.value: statistics.fmean(
                step.stages[stage].seconds.get(kind.value, 0.0) for step in phase.costs
            )
            for kind in TimeKind
        }
        for stage in stages
    ]


def wire_figures(phase: PhaseSteps, shape: Shape, wires: Sequence[Wire]) -> list[dict[str, Any]]:
    """Each direction of each wire: the kernel's bytes, the program's bytes, and the share of the rate used.

    `overhead` is the bytes that the kernel counted divided by the bytes that the program wrote to its
    sockets, minus 1. It consists of TCP's, TLS's and gRPC's headers and the acknowledgements of the other
    direction.
    """
    figures = []
    for wire, counted, link in zip(wires, phase.wires, shape.links, strict=True):
        for upward in (True, False):
            wire_bytes = counted.up if upward else counted.down
            own = sum(
                cost.bytes
                for step in phase.costs
                for cost in step.links
                if _passes(wire, cost.source, cost.target, upward)
            )
            asked = link.up_mbit if upward else link.down_mbit
            sender, receiver = (wire.lower, wire.higher) if upward else (wire.higher, wire.lower)
            figures.append(
                {
                    "wire": wire.name,
                    "sender": sender,
                    "receiver": receiver,
                    "asked_mbit": asked,
                    "wire_bytes": wire_bytes,
                    "own_bytes": own,
                    "overhead": wire_bytes / own - 1 if own else None,
                    "use": wire_bytes * 8e-6 / phase.seconds / asked if phase.seconds > 0 else 0.0,
                }
            )
    return figures


def transfer_seconds(phase: PhaseSteps, shape: Shape, wires: Sequence[Wire]) -> float:
    """Seconds that a step's bytes take over the busiest direction of `shape`, without compute.

    Args:
        phase: Steps with the same codecs, over any shape.
    """
    figures = wire_figures(phase, shape, wires)
    busiest = max(8e-6 * each["own_bytes"] / each["asked_mbit"] for each in figures)
    return float(busiest) / len(phase.costs)


def floor_figures(floor: Floor, phase: PhaseSteps, compute: Compute) -> dict[str, Any]:
    """The floor, what binds it, and the floor as a share of the measured step time."""
    return {
        "seconds": floor.seconds,
        "share": floor.share(phase.step_seconds),
        "binds": str(floor.binds),
        "compute": asdict(compute),
    }


def plans_of(plans: Sequence[WindowsPlanned], first: int, last: int) -> list[WindowsPlanned]:
    """The plans that steps `first` to `last` may have used.

    These are the newest plan from before the steps, and all up to the one made from the last step but one.
    """
    before = [plan for plan in plans if plan.step < first]
    return [*before[-1:], *(plan for plan in plans if first <= plan.step < last)]


def plan_figures(plan: WindowsPlanned) -> dict[str, Any]:
    """The windows, and the values that they were planned from."""
    return {key: value for key, value in asdict(plan).items() if key not in ("epoch", "replica")}


def _passes(wire: Wire, source: int, target: int, upward: bool) -> bool:
    """Whether data that `source` sends to `target` goes over this wire in this direction."""
    if wire.higher < 0:
        return (source if upward else target) == wire.lower
    return (source, target) == ((wire.lower, wire.higher) if upward else (wire.higher, wire.lower))


def _tensor_bytes(phase: PhaseSteps, direction: str, tensors: int) -> float:
    """Bytes of one tensor in frames. The busiest link carries `tensors` of them per step."""
    sums: dict[tuple[int, int], int] = {}
    for step in phase.costs:
        for link in step.links:
            for flow in link.flows:
                if flow.kind == direction:
                    way = (link.source, link.target)
                    sums[way] = sums.get(way, 0) + flow.bytes
    return max(sums.values(), default=0) / (len(phase.costs) * tensors)
