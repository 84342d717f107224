"""From the totals that nodes report to what a step and a run cost. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from node.telemetry.clock import WAITS, TimeKind
from node.telemetry.events import StageTimes
from wire.messages import Telemetry
from wire.spec import Direction


@dataclass
class LinkTotals:
    """Sums over all links of a run. Bytes are everything written to both sockets of each link."""

    bytes_sent: int = 0
    direction_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    direction_elements: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))

    def bits(self, direction: Direction) -> float:
        """Bits an element of this kind of tensor took, frames and headers included; 0 before the first."""
        elements = self.direction_elements[direction]
        return 8 * self.direction_bytes[direction] / elements if elements else 0.0

    @property
    def elements(self) -> int:
        return sum(self.direction_elements.values())


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One step, by stage where it is a tuple."""

    idle: tuple[float, ...]
    bits_forward: float
    bits_backward: float
    up_mbit: tuple[float, ...]
    down_mbit: tuple[float, ...]


@dataclass
class _StageTotals:
    node_id: str
    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class Accounting:
    """Takes differences of the nodes' totals, step by step."""

    def __init__(self) -> None:
        self.links = LinkTotals()
        self._stages: list[_StageTotals] = []
        self._latest: dict[str, Telemetry] = {}
        self._counted: dict[str, Telemetry] = {}

    def report(self, node_id: str, telemetry: Telemetry) -> None:
        """A node's newest totals."""
        self._latest[node_id] = telemetry

    def begin_epoch(self, seats: Sequence[str]) -> None:
        """Count from what every stage reported when it was ready; links and processes may be new."""
        for node in seats:
            self._counted[node] = self._latest.get(node, Telemetry())

    def step(self, seats: Sequence[str], seconds: float) -> StepCost:
        """What the step that just ended cost; `seconds` is its wall time at the coordinator."""
        idle: list[float] = []
        up: list[float] = []
        down: list[float] = []
        step_links = LinkTotals()
        for stage, node in enumerate(seats):
            now = self._latest.get(node, Telemetry())
            before = _baseline(now, self._counted.get(node, Telemetry()))
            self._counted[node] = now
            kinds = _difference(now.times, before.times)
            wall = now.wall_seconds - before.wall_seconds
            waiting = sum(kinds.get(kind.value, 0.0) for kind in WAITS)
            idle.append(min(1.0, waiting / wall) if wall > 0 else 0.0)
            while len(self._stages) <= stage:
                self._stages.append(_StageTotals(node_id=node))
            totals = self._stages[stage]
            totals.node_id = node
            totals.wall += wall
            for kind, spent in kinds.items():
                totals.seconds[kind] = totals.seconds.get(kind, 0.0) + spent
            sent = _sent(now) - _sent(before)
            received = _received(now) - _received(before)
            step_links.bytes_sent += sent
            up.append(8e-6 * sent / seconds if seconds > 0 else 0.0)
            down.append(8e-6 * received / seconds if seconds > 0 else 0.0)
            _add_directions(step_links, now, 1)
            _add_directions(step_links, before, -1)
        _merge(self.links, step_links)
        return StepCost(
            idle=tuple(idle),
            bits_forward=step_links.bits(Direction.ACTIVATION),
            bits_backward=step_links.bits(Direction.GRADIENT),
            up_mbit=tuple(up),
            down_mbit=tuple(down),
        )

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Where each stage's time went, over all steps counted."""
        return tuple(
            StageTimes(
                stage=stage, node_id=totals.node_id, wall_seconds=totals.wall, seconds=dict(totals.seconds)
            )
            for stage, totals in enumerate(self._stages)
        )


def _baseline(now: Telemetry, before: Telemetry) -> Telemetry:
    """What `now` is to be counted from: nothing, if its totals began anew since, with links or a process."""
    anew = (
        now.wall_seconds < before.wall_seconds
        or _sent(now) < _sent(before)
        or _received(now) < _received(before)
        or sum(d.elements_sent for d in now.directions) < sum(d.elements_sent for d in before.directions)
    )
    return Telemetry() if anew else before


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    # Only the kinds that there are: a node could name any.
    return {kind.value: now.get(kind.value, 0.0) - before.get(kind.value, 0.0) for kind in TimeKind}


def _sent(telemetry: Telemetry) -> int:
    return sum(link.bytes_sent for link in telemetry.links)


def _received(telemetry: Telemetry) -> int:
    return sum(link.bytes_received for link in telemetry.links)


def _add_directions(totals: LinkTotals, telemetry: Telemetry, sign: int) -> None:
    for report in telemetry.directions:
        totals.direction_bytes[report.direction] += sign * report.bytes_sent
        totals.direction_elements[report.direction] += sign * report.elements_sent


def _merge(into: LinkTotals, other: LinkTotals) -> None:
    into.bytes_sent += other.bytes_sent
    for direction in Direction:
        into.direction_bytes[direction] += other.direction_bytes[direction]
        into.direction_elements[direction] += other.direction_elements[direction]
