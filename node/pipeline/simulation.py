"""Event simulation of a schedule: when every action runs, given compute and transfer times.

The model: a stage computes one action at a time, in its order, as soon as the tensor it needs has arrived;
sending never holds up computing. Each ordered pair of stages has a link of its own that carries one tensor
at a time, first made first sent; a tensor arrives `latency` after its transfer ends. Or a `Network` says what
a tensor occupies: links that are not full duplex, interfaces that the links of a node share. A boundary
between two chunks of the same stage costs nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from node.pipeline.floor import Network
from node.pipeline.schedule import (
    Action,
    BoundaryTensor,
    Kind,
    Orders,
    check_complete,
    dependencies,
    has_head_first,
)
from node.pipeline.turns import Turns
from wire.errors import ConfigError

ComputeTime = float | Callable[[int, int], float]
"""Seconds of one forward or backward: a constant, or a function of (global chunk, microbatch)."""

TransferTime = float | Callable[[BoundaryTensor], float]
"""Seconds for which one tensor occupies its link: a constant, or a function of the tensor."""


@dataclass(frozen=True, slots=True)
class Span:
    """One action's place in time; seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. Times in seconds."""

    spans: tuple[tuple[Span, ...], ...]
    """Every stage's actions in order of time."""
    total: float
    """The end of the last action."""
    link_busy: dict[Hashable, float]
    """Time for which each used link, named (from stage, to stage), carries tensors; by `Resource` where a
    network was given."""

    @property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each stage."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time of each stage without compute, from the start of the step to the end of its last action."""
        return tuple(self.total - busy for busy in self.busy)

    @property
    def floor(self) -> float:
        """No schedule of the same work can be faster: the busiest stage's compute or link's transfers."""
        return max((*self.busy, *self.link_busy.values()))


def simulate(
    orders: Orders,
    forward_time: ComputeTime,
    backward_time: ComputeTime,
    transfer_time: TransferTime = 0.0,
    latency: float = 0.0,
    *,
    network: Network | None = None,
    sizes: Mapping[Kind, float] | None = None,
    swap: bool = False,
) -> Timeline:
    """Run a schedule in simulated time.

    With `swap` a stage whose next action waits may run another one (`node.pipeline.turns`), as stages of one
    chunk do.

    With a `network`, `sizes` gives the bytes of a tensor of each kind, and `transfer_time` and `latency` do
    not count.

    Whether a schedule finishes does not depend on the times, so one run shows that there is no deadlock.
    Raises ConfigError for incomplete orders (see `check_complete`) and for a deadlock, with what each stage
    waits for.
    """
    chunks, _ = check_complete(orders)

    def alone(tensor: BoundaryTensor, source: int, target: int) -> tuple[Mapping[Hashable, float], float]:
        return {
            (source, target): transfer_time(tensor) if callable(transfer_time) else transfer_time
        }, latency

    def through(tensor: BoundaryTensor, source: int, target: int) -> tuple[Mapping[Hashable, float], float]:
        assert network is not None and sizes is not None
        passage = network.passage(source, target, sizes[tensor.kind])
        return dict(passage.seconds.items()), passage.latency

    passage = alone if network is None else through
    return _Simulation(orders, chunks, forward_time, backward_time, passage, swap).run()


class _Simulation:
    def __init__(
        self,
        orders: Orders,
        chunks: int,
        forward_time: ComputeTime,
        backward_time: ComputeTime,
        passage: Callable[[BoundaryTensor, int, int], tuple[Mapping[Hashable, float], float]],
        swap: bool,
    ) -> None:
        self._orders = orders
        self._turns = [Turns(order, swap=swap) for order in orders]
        self._edges = [
            [
                dependencies(action, stage, len(orders), chunks, head_first=has_head_first(orders))
                for action in order
            ]
            for stage, order in enumerate(orders)
        ]
        self._compute_time = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
        self._passage = passage
        # Events are (time, number, stage, what ends there): a stage's own action, or a tensor on its way to
        # it. The number keeps events of one instant in the order in which they were made.
        self._events: list[tuple[float, int, int, Action | BoundaryTensor]] = []
        self._made = 0
        self._arrived: set[BoundaryTensor] = set()
        self._computing: list[int | None] = [None] * len(orders)
        self._spans: list[list[Span]] = [[] for _ in orders]
        self._link_free: defaultdict[Hashable, float] = defaultdict(float)
        self._link_busy: defaultdict[Hashable, float] = defaultdict(float)

    def run(self) -> Timeline:
        for stage in range(len(self._orders)):
            self._start_next(stage, 0.0)
        while self._events:
            now, _, stage, ended = heappop(self._events)
            if isinstance(ended, Action):
                self._send(ended.kind, stage, now)
                self._computing[stage] = None
            else:
                self._arrived.add(ended)
            self._start_next(stage, now)
        self._refuse_deadlock()
        total = max(spans[-1].end for spans in self._spans)
        return Timeline(tuple(map(tuple, self._spans)), total, dict(self._link_busy))

    def _start_next(self, stage: int, now: float) -> None:
        edges = self._edges[stage]
        if self._computing[stage] is not None:
            return
        place = self._turns[stage].begin(
            lambda place: (needs := edges[place].needs) is None or needs in self._arrived
        )
        if place is None:
            return
        action = self._orders[stage][place]
        time = self._compute_time[action.kind]
        if callable(time):
            time = time(action.chunk * len(self._orders) + stage, action.microbatch)
        self._computing[stage] = place
        self._spans[stage].append(Span(action, now, now + time))
        self._push(now + time, stage, action)

    def _send(self, kind: Kind, stage: int, now: float) -> None:
        """Send the tensor that a stage's finished action makes."""
        place = self._computing[stage]
        assert place is not None, "only what computes can end"
        tensor = self._edges[stage][place].makes
        if tensor is None:
            return
        neighbour = (stage + (1 if kind is Kind.FORWARD else -1)) % len(self._orders)
        if neighbour == stage:
            self._arrived.add(tensor)
            return
        occupied, latency = self._passage(tensor, stage, neighbour)
        # All parts of the path serve a tensor at once, from when the last of them is free.
        start = max((self._link_free[part] for part in occupied), default=now)
        start = max(start, now)
        for part, time in occupied.items():
            self._link_free[part] = start + time
            self._link_busy[part] += time
        self._push(start + max(occupied.values(), default=0.0) + latency, neighbour, tensor)

    def _push(self, time: float, stage: int, ends: Action | BoundaryTensor) -> None:
        heappush(self._events, (time, self._made, stage, ends))
        self._made += 1

    def _refuse_deadlock(self) -> None:
        blocked = ", ".join(
            f"stage {stage} blocked at {order[turns.choices[0]]}"
            for stage, (order, turns) in enumerate(zip(self._orders, self._turns, strict=True))
            if turns.left
        )
        if blocked:
            raise ConfigError(f"the schedule deadlocks: {blocked}; use an order that `schedule` makes")
