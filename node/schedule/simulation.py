"""Event simulation of a schedule: when every action runs, given compute and transfer times.

The model: a stage computes one action at a time, in its order, as soon as the tensor it needs has arrived;
sending never holds up computing. Each ordered pair of stages has a connection that carries one tensor at a
time, first made first sent; a tensor arrives `latency` after its transfer ends. A `Network` says what a
tensor passes: links that are not full duplex, interfaces that the links of a node share. Connections through
the same part get equal rates, as with TCP; what one cannot use goes to the others (max-min fairness). A
boundary between two chunks of the same stage costs nothing.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from node.schedule.floor import Network
from node.schedule.schedule import (
    Action,
    BoundaryTensor,
    Kind,
    Orders,
    check_complete,
    dependencies,
    has_head_first,
)
from node.schedule.turns import Turns
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

    With `swap` a stage whose next action waits may run another one (`node.schedule.turns`), as stages of one
    chunk do.

    With a `network`, `sizes` gives the bytes of a tensor of each kind, and `transfer_time` and `latency` do
    not count.

    Whether a schedule finishes does not depend on the times, so one run shows that there is no deadlock.
    Raises ConfigError for incomplete orders (see `check_complete`) and for a deadlock, with what each stage
    waits for.
    """
    chunks, _ = check_complete(orders)

    known: dict[tuple[Kind, int, int], _Transfer] = {}
    parts: dict[Hashable, int] = {}
    """Numbers of what tensors pass: they are looked up a million times in a plan of windows."""

    def numbered(seconds: Mapping[Any, float]) -> dict[int, float]:
        return {parts.setdefault(part, len(parts)): time for part, time in seconds.items()}

    def alone(tensor: BoundaryTensor, source: int, target: int) -> _Transfer:
        seconds = transfer_time(tensor) if callable(transfer_time) else transfer_time
        return _Transfer(numbered({(source, target): seconds}), 1.0, latency)

    def through(tensor: BoundaryTensor, source: int, target: int) -> _Transfer:
        assert network is not None and sizes is not None
        way = tensor.kind, source, target
        if way not in known:
            size = sizes[tensor.kind]
            passage = network.passage(source, target, size)
            known[way] = _Transfer(numbered(passage.seconds), size, passage.latency)
        return known[way]

    transfer = alone if network is None else through
    spans, busy = _Simulation(orders, chunks, forward_time, backward_time, transfer, swap).run()
    names = list(parts)
    total = max(of_stage[-1].end for of_stage in spans)
    return Timeline(spans, total, {names[part]: time for part, time in busy.items()})


class _Transfer:
    """What a tensor does to the network on its way."""

    def __init__(self, seconds: Mapping[int, float], size: float, latency: float) -> None:
        """
        Args:
            seconds: for which each part of the way, by its number, is occupied by this tensor alone.
            size: in the unit in which connections share a part.
            latency: from the end of the slowest part's service to the arrival.
        """
        self.seconds = seconds
        self.latency = latency
        self.rates = {part: size / time for part, time in seconds.items() if time > 0}
        """Of each part, size a second; without those that take no time."""
        self.alone = max(seconds.values(), default=0.0)
        self.rate = min(self.rates.values(), default=0.0)
        """While no other connection passes its parts."""


@dataclass(slots=True, eq=False)
class _Connection:
    """Tensors that one stage sends to another. The first one is on its way, at a share of its parts."""

    target: int
    waiting: deque[tuple[BoundaryTensor, _Transfer]] = field(default_factory=deque)
    left: float = 0.0
    """Seconds that the first tensor still needs if nothing else is sent."""
    stretch: float = 1.0
    """How much longer each of those seconds takes at the present share of the line."""
    since: float = 0.0
    turn: int = 0
    """Goes up when the pace changes: an end that was scheduled at an earlier pace is ignored."""


class _Simulation:
    def __init__(
        self,
        orders: Orders,
        chunks: int,
        forward_time: ComputeTime,
        backward_time: ComputeTime,
        transfer: Callable[[BoundaryTensor, int, int], _Transfer],
        swap: bool,
    ) -> None:
        self._orders = orders
        self._turns = [Turns(order, swap=swap) for order in orders]
        head_first = has_head_first(orders)
        self._edges = [
            [dependencies(action, stage, len(orders), chunks, head_first=head_first) for action in order]
            for stage, order in enumerate(orders)
        ]
        self._compute_time = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
        self._transfer = transfer
        # Events are (time, number, stage, what ends there): a stage's own action, a tensor on its way to it,
        # or the turn of a connection whose first tensor has passed. The number keeps events of one instant in
        # the order in which they were made.
        self._events: list[tuple[float, int, int, Action | BoundaryTensor | tuple[_Connection, int]]] = []
        self._made = 0
        self._arrived: set[BoundaryTensor] = set()
        self._computing: list[int | None] = [None] * len(orders)
        self._spans: list[list[Span]] = [[] for _ in orders]
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._users: defaultdict[int, dict[_Connection, float]] = defaultdict(dict)
        """Of each part: the connections that pass it, and their rates alone."""
        self._link_busy: defaultdict[int, float] = defaultdict(float)

    def run(self) -> tuple[tuple[tuple[Span, ...], ...], dict[int, float]]:
        """Every stage's actions, and for how long each part of the network carries tensors."""
        for stage in range(len(self._orders)):
            self._start_next(stage, 0.0)
        while self._events:
            now, _, stage, ended = heappop(self._events)
            if isinstance(ended, Action):
                self._send(ended.kind, stage, now)
                self._computing[stage] = None
            elif isinstance(ended, BoundaryTensor):
                self._arrived.add(ended)
            else:
                self._passed(*ended, now)
                continue
            self._start_next(stage, now)
        self._refuse_deadlock()
        return tuple(map(tuple, self._spans)), dict(self._link_busy)

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
        transfer = self._transfer(tensor, stage, neighbour)
        for part, time in transfer.seconds.items():
            self._link_busy[part] += time
        one = self._connections.setdefault((stage, neighbour), _Connection(neighbour))
        one.waiting.append((tensor, transfer))
        if len(one.waiting) == 1:
            self._begin(one, now)
            self._share(self._sharing(one), now)

    def _begin(self, one: _Connection, now: float) -> None:
        """The first tensor of a connection begins its way."""
        _, transfer = one.waiting[0]
        one.left, one.since = transfer.alone, now
        for part in transfer.rates:
            self._users[part][one] = transfer.rate

    def _passed(self, one: _Connection, turn: int, now: float) -> None:
        """The first tensor of a connection has passed, unless its pace changed since this was scheduled."""
        if turn != one.turn:
            return
        sharing = dict.fromkeys(self._sharing(one))
        tensor, transfer = one.waiting.popleft()
        for part in transfer.rates:
            del self._users[part][one]
        self._push(now + transfer.latency, one.target, tensor)
        if one.waiting:
            self._begin(one, now)
            sharing |= dict.fromkeys(self._sharing(one))
        else:
            del sharing[one]
        self._share(list(sharing), now)

    def _sharing(self, one: _Connection) -> list[_Connection]:
        """This connection, and all whose paces hang on its own: those that pass a part that cannot serve all
        of its users as fast as each goes alone, and so on from them."""
        found = {one: None}
        queue = [one]
        while queue:
            for part, rate in queue.pop().waiting[0][1].rates.items():
                users = self._users[part]
                if len(users) > 1 and sum(users.values()) > rate:
                    queue += (more := [user for user in users if user not in found])
                    found |= dict.fromkeys(more)
        return list(found)

    def _share(self, connections: list[_Connection], now: float) -> None:
        """Give each its share of every part from now on."""
        for one in connections:
            one.left = max(0.0, one.left - (now - one.since) / one.stretch)
            one.since = now
        for one, rate in self._fair_rates(connections):
            alone = one.waiting[0][1].rate
            one.stretch = alone / rate if rate < alone else 1.0
            one.turn += 1
            self._push(now + one.left * one.stretch, one.target, (one, one.turn))

    def _fair_rates(self, connections: list[_Connection]) -> list[tuple[_Connection, float]]:
        """Max-min: the part with least room for each of its users gives them all the same; then the next."""
        if len(connections) == 1:
            return [(one, one.waiting[0][1].rate) for one in connections]
        rates = {one: one.waiting[0][1].rates for one in connections}
        room = {part: rate for parts in rates.values() for part, rate in parts.items()}
        open_ = dict.fromkeys(connections)
        found: list[tuple[_Connection, float]] = []
        while open_:
            users: dict[int, int] = defaultdict(int)
            for one in open_:
                for part in rates[one]:
                    users[part] += 1
            if not users:
                return [*found, *((one, 0.0) for one in open_)]
            tight = min(users, key=lambda part: room[part] / users[part])
            level = room[tight] / users[tight]
            for one in [one for one in open_ if tight in rates[one]]:
                del open_[one]
                found.append((one, level))
                for part in rates[one]:
                    room[part] -= level
        return found

    def _push(self, time: float, stage: int, ends: Action | BoundaryTensor | tuple[_Connection, int]) -> None:
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
