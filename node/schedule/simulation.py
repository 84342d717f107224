"""Event simulation of a schedule: when every action runs, given compute and transfer times.

The model: a stage computes one action at a time, in its order, as soon as the tensor that it needs has
arrived. Sending never delays computing. Each ordered pair of stages has a connection that carries one tensor
at a time, in the order in which they were produced. A tensor arrives `latency` after its transfer ends. A
`Network` says which parts a tensor passes: links, and interfaces that the links of a
node share. Connections through the same part get equal rates, as with TCP, and what one cannot use goes to
the others (max-min fairness). A boundary between two chunks of the same stage costs nothing.
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
    dependencies,
    has_head_first,
)
from node.schedule.turns import Turns
from wire.errors import ConfigError

ComputeTime = float | Callable[[int, int], float]
"""The seconds of one forward or backward: a constant, or a function of (global chunk, microbatch)."""

TransferTime = float | Callable[[BoundaryTensor], float]
"""The seconds for which one tensor occupies its link: a constant, or a function of the tensor."""


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of an action, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. Times are in seconds."""

    spans: tuple[tuple[Span, ...], ...]
    """Every stage's actions in the order of time."""
    total: float
    """The end of the last action."""
    link_busy: dict[Hashable, float]
    """The time for which each used link carries tensors. Keys are (from stage, to stage), or a `Resource` if
    a network was given."""

    @property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each stage."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)


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

    Whether a schedule finishes does not depend on the times, so one run shows that there is no deadlock.

    Args:
        network: replaces `transfer_time` and `latency`.
        sizes: with a `network`, the bytes of a tensor of each kind.
        swap: a stage whose next action waits may run another one (`node.schedule.turns`), as stages with one
            chunk do.

    Raises:
        ConfigError: there is a deadlock. The error says what each stage waits for.
    """
    known: dict[tuple[Kind, int, int], _Transfer] = {}
    parts: dict[Hashable, int] = {}
    """Numbers of the parts that tensors pass, which are looked up a million times in a plan of windows."""

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
    spans, busy = _Simulation(orders, forward_time, backward_time, transfer, swap).run()
    names = list(parts)
    total = max(of_stage[-1].end for of_stage in spans)
    return Timeline(spans, total, {names[part]: time for part, time in busy.items()})


class _Transfer:
    """A tensor's way through the network."""

    def __init__(self, seconds: Mapping[int, float], size: float, latency: float) -> None:
        """
        Args:
            seconds: the time for which this tensor alone occupies each part of the way, by the part's number.
            size: the size in the unit in which connections share a part.
            latency: the time from the end of the slowest part's service to the arrival.
        """
        self.seconds = seconds
        self.latency = latency
        self.rates = {part: size / time for part, time in seconds.items() if time > 0}
        """The size per second of each part, without parts that take no time."""
        self.alone = max(seconds.values(), default=0.0)
        self.rate = min(self.rates.values(), default=0.0)
        """The rate if no other connection passes its parts."""


@dataclass(slots=True, eq=False)
class _Connection:
    """The tensors that one stage sends to another. The first one is in transfer, with a share of its
    parts."""

    target: int
    waiting: deque[tuple[BoundaryTensor, _Transfer]] = field(default_factory=deque)
    left: float = 0.0
    """The seconds that the first tensor still needs if nothing else is sent."""
    stretch: float = 1.0
    """How much longer each of those seconds takes with the present share of the line."""
    since: float = 0.0
    turn: int = 0
    """It increases when the pace changes, so that an end that was scheduled at an earlier pace is ignored."""


class _Simulation:
    def __init__(
        self,
        orders: Orders,
        forward_time: ComputeTime,
        backward_time: ComputeTime,
        transfer: Callable[[BoundaryTensor, int, int], _Transfer],
        swap: bool,
    ) -> None:
        self._orders = orders
        self._turns = [Turns(order, swap=swap) for order in orders]
        head_first = has_head_first(orders)
        chunks = 1 + max(action.chunk for action in orders[0]) - head_first
        self._edges = [
            [dependencies(action, stage, len(orders), chunks, head_first=head_first) for action in order]
            for stage, order in enumerate(orders)
        ]
        self._compute_time = {Kind.FORWARD: forward_time, Kind.BACKWARD: backward_time}
        self._transfer = transfer
        # Events are (time, number, stage, what ends): a stage's own action, a tensor on its way to it, or the
        # turn of a connection whose first tensor has passed. The number keeps events of the same time in the
        # order in which they were created.
        self._events: list[tuple[float, int, int, Action | BoundaryTensor | tuple[_Connection, int]]] = []
        self._made = 0
        self._arrived: set[BoundaryTensor] = set()
        self._computing: list[int | None] = [None] * len(orders)
        self._spans: list[list[Span]] = [[] for _ in orders]
        self._connections: dict[tuple[int, int], _Connection] = {}
        self._users: defaultdict[int, dict[_Connection, float]] = defaultdict(dict)
        """For each part, the connections that pass it, with their rates alone."""
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
        """Send the tensor that a stage's finished action produced."""
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
        connection = self._connections.setdefault((stage, neighbour), _Connection(neighbour))
        connection.waiting.append((tensor, transfer))
        if len(connection.waiting) == 1:
            self._begin(connection, now)
            self._share(self._sharing(connection), now)

    def _begin(self, connection: _Connection, now: float) -> None:
        """Start the transfer of a connection's first tensor."""
        _, transfer = connection.waiting[0]
        connection.left, connection.since = transfer.alone, now
        for part in transfer.rates:
            self._users[part][connection] = transfer.rate

    def _passed(self, connection: _Connection, turn: int, now: float) -> None:
        """End the transfer of a connection's first tensor, unless its pace changed after this was
        scheduled."""
        if turn != connection.turn:
            return
        sharing = dict.fromkeys(self._sharing(connection))
        tensor, transfer = connection.waiting.popleft()
        for part in transfer.rates:
            del self._users[part][connection]
        self._push(now + transfer.latency, connection.target, tensor)
        if connection.waiting:
            self._begin(connection, now)
            sharing |= dict.fromkeys(self._sharing(connection))
        else:
            del sharing[connection]
        self._share(list(sharing), now)

    def _sharing(self, connection: _Connection) -> list[_Connection]:
        """This connection and all whose pace depends on its own: those that share a part which cannot serve
        all its users at the rate each has alone, and so on from them."""
        sharing = {connection: None}
        queue = [connection]
        while queue:
            for part, rate in queue.pop().waiting[0][1].rates.items():
                users = self._users[part]
                if len(users) > 1 and sum(users.values()) > rate:
                    queue += (more := [user for user in users if user not in sharing])
                    sharing |= dict.fromkeys(more)
        return list(sharing)

    def _share(self, connections: list[_Connection], now: float) -> None:
        """Give each connection its share of every part from now on."""
        for connection in connections:
            connection.left = max(0.0, connection.left - (now - connection.since) / connection.stretch)
            connection.since = now
        for connection, rate in self._fair_rates(connections):
            alone = connection.waiting[0][1].rate
            connection.stretch = alone / rate if rate < alone else 1.0
            connection.turn += 1
            self._push(
                now + connection.left * connection.stretch, connection.target, (connection, connection.turn)
            )

    def _fair_rates(self, connections: list[_Connection]) -> list[tuple[_Connection, float]]:
        """Max-min fair rates: the part with the least room per user gives all its users the same rate; then
        the next part."""
        if len(connections) == 1:
            return [(connection, connection.waiting[0][1].rate) for connection in connections]
        rates = {connection: connection.waiting[0][1].rates for connection in connections}
        room = {part: rate for parts in rates.values() for part, rate in parts.items()}
        open_ = dict.fromkeys(connections)
        fair: list[tuple[_Connection, float]] = []
        while open_:
            users: dict[int, int] = defaultdict(int)
            for connection in open_:
                for part in rates[connection]:
                    users[part] += 1
            if not users:
                return [*fair, *((connection, 0.0) for connection in open_)]
            tight = min(users, key=lambda part: room[part] / users[part])
            level = room[tight] / users[tight]
            for connection in [connection for connection in open_ if tight in rates[connection]]:
                del open_[connection]
                fair.append((connection, level))
                for part in rates[connection]:
                    room[part] -= level
        return fair

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
