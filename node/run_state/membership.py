"""The nodes of the run: connected ones, and those that may still reconnect. Pure."""

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from node.run_state.actions import Action, Send
from node.run_state.epoch import Epoch, Phase
from node.run_state.failures import transfer_seconds
from node.run_state.grid import spare_stages
from node.run_state.stage_assignment import Candidate, prefetch_order
from wire.messages import Prefetch

ANSWER_SECONDS = 2.0
"""The seconds to answer, beside its longest recent silence, for a node that a neighbour does not hear."""
MOST_ALARMS, ALARM_SECONDS = 8, 600.0
"""A node's reports that a neighbour is silent do not count while so many of them were wrong in this time.
Else one member could have each neighbour lost that is slow to answer for a moment."""
PACE_KEPT = 0.98
"""The factor by which a node's longest silence shrinks after each further message."""


@dataclass
class Member:
    """A node of the run."""

    address: str
    offer: Candidate
    process_nonce: int
    last_heard: float
    rate: float = 0.0
    """Bytes per second from the coordinator; 0 if unknown."""
    disconnected_at: float | None = None
    pace: float = 0.0
    """Its recent longest silence in seconds."""
    suspected_at: float = -math.inf
    """When a neighbour last did not hear it."""
    asked_at: float | None = None
    """When it was asked whether it is alive; None if it has sent something since."""
    asked_by: str = ""
    """The node that did not hear it."""
    alarms: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_ALARMS))
    """When the newest nodes answered that this one had reported as silent."""
    ask_from: float = -math.inf
    """When it may be asked again: answers beyond a rate would count against it."""
    leaving: bool = False
    prepared_at: float = -inf
    """When it last reported that it cannot take a place yet, before it had one."""
    has_placed: bool = False
    """Whether it has taken a place."""


class Roster:
    """The members of the run, in the order in which they joined. Times are seconds on the clock of `now`."""

    def __init__(self, *, silent_seconds: float, reconnect_seconds: float) -> None:
        self.members: dict[str, Member] = {}
        self.stages: dict[str, int] = {}
        """The newest stage that each node hosted. It includes nodes that are gone, which may return with the
        files of that stage."""
        self._silent_seconds = silent_seconds
        self._reconnect_seconds = reconnect_seconds

    def arrived(self, offer: Candidate, *, address: str, process_nonce: int, rate: float, now: float) -> None:
        """A node connected, for the first time or again. Its first offer stays."""
        member = self.members.get(offer.node_id)
        if member is None:
            member = Member(address=address, offer=offer, process_nonce=process_nonce, last_heard=now)
            self.members[offer.node_id] = member
        member.disconnected_at = member.asked_at = None
        member.last_heard = now
        member.rate = rate
        member.address = address

    def heard(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            if member.asked_at is not None and (reporter := self.members.get(member.asked_by)) is not None:
                reporter.alarms.append(now)
            member.pace = max(now - member.last_heard, PACE_KEPT * member.pace)
            member.last_heard, member.asked_at = now, None

    def suspect(self, node_id: str, now: float, *, by: str) -> bool:
        """A neighbour does not hear a member. Returns whether to ask the member if it is alive."""
        member, alarms = self.members[node_id], self.members[by].alarms
        if len(alarms) == MOST_ALARMS and now - alarms[0] <= ALARM_SECONDS:
            return False
        member.suspected_at = now
        if member.disconnected_at is not None or member.asked_at is not None or now < member.ask_from:
            return False
        member.asked_at, member.asked_by, member.ask_from = now, by, now + ANSWER_SECONDS
        return True

    def silenced(self, node_id: str, now: float) -> str | None:
        """Why a member counts as dead if others can do its work: neither a neighbour nor the coordinator
        hears it. None if it counts as alive."""
        member = self.members[node_id]
        if member.disconnected_at is not None:
            is_new = abs(member.disconnected_at - member.suspected_at) <= self._reconnect_seconds
            return "its connections closed" if is_new else None
        patience = max(ANSWER_SECONDS, min(member.pace, self._silent_seconds))
        if member.asked_at is None or now - member.asked_at <= patience:
            return None
        return f"it and its links have been silent for {now - member.last_heard:.1f} s"

    def disconnected(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.disconnected_at = now

    def excuse(self, seconds: float, now: float) -> None:
        """The coordinator received nothing for the last `seconds`: do not count them as silence."""
        for member in self.members.values():
            member.last_heard = min(member.last_heard + seconds, now)
            if member.asked_at is not None:
                member.asked_at = min(member.asked_at + seconds, now)
            if member.disconnected_at is not None:
                member.disconnected_at = min(member.disconnected_at + seconds, now)

    def overdue(self, now: float) -> dict[str, str]:
        """The nodes that count as dead from now on, with the reason for each."""
        dead: dict[str, str] = {}
        for node_id, member in self.members.items():
            gone = member.disconnected_at
            if gone is not None and now - gone > self._reconnect_seconds:
                dead[node_id] = "its connection closed and did not come back"
            elif gone is None and now - member.last_heard > self._silent_seconds:
                dead[node_id] = f"it has been silent for more than {self._silent_seconds:g} s"
        return dead

    def candidates(self) -> list[Candidate]:
        """The nodes that could host a stage: connected ones that are not leaving."""
        return [
            member.offer
            for member in self.members.values()
            if member.disconnected_at is None and not member.leaving
        ]

    def placed(self, hosts: Sequence[str], rows: int) -> None:
        """These nodes have the stages of a grid, row after row."""
        stages = len(hosts) // rows
        for place, node_id in enumerate(hosts):
            if node_id:
                self.stages[node_id] = place % stages

    def kinds(self, hosts: Sequence[str]) -> list[Hashable]:
        """What the bits of each host's results depend on; nothing for ""."""
        offers = [self.members[node].offer if node else None for node in hosts]
        return ["" if offer is None else (offer.kind, offer.devices) for offer in offers]

    def spares(self, hosts: Collection[str]) -> list[str]:
        """Candidates without a stage."""
        return [offer.node_id for offer in self.candidates() if offer.node_id not in hosts]

    def leaving(self, nodes: Iterable[str]) -> list[str]:
        """The members among `nodes` that asked to leave."""
        return [node_id for node_id in nodes if self.members[node_id].leaving]

    def dispensable(self, epoch: Epoch) -> bool:
        """Whether hosts want to leave while every stage has another connected host that stays."""
        going = self.leaving(epoch.hosts)
        stays = {node for node in epoch.hosts if node not in going and self.connected([node])}
        return bool(going) and all(not stays.isdisjoint(epoch.column(stage)) for stage in range(epoch.stages))

    def connected(self, nodes: Iterable[str]) -> bool:
        """Whether all of these members are connected now."""
        return all(self.members[node_id].disconnected_at is None for node_id in nodes)


def loading_seconds(
    epoch: Epoch | None, roster: Roster, sizes: Callable[[int], Sequence[int]]
) -> dict[str, float]:
    """The seconds that each host of the epoch may take to fetch its state, if it has to.

    Args:
        sizes: number of stages -> bytes of each stage's state.
    """
    if epoch is None or epoch.phase is not Phase.RESTORING:
        return {}
    stages, members = sizes(epoch.stages), roster.members
    return {
        node: transfer_seconds(stages[epoch.stage_of(node)], members[node].rate)
        for node in epoch.hosts
        if epoch.loads(node)
    }


def prefetch_first(nodes: Iterable[str], roster: Roster, units: Sequence[Sequence[str]]) -> list[Action]:
    """Before a run's first epoch, let `nodes` fetch the checkpoint's weights of the stages that they will get
    in the order of joining.

    Args:
        units: the layer units of each stage.
    """
    places = {node: place for place, node in enumerate(roster.members)}
    return [
        Send(node_id=node, message=Prefetch(step=0, units=tuple(units[places[node] % len(units)])))
        for node in nodes
        if node in places
    ]


def prefetch(
    nodes: Iterable[str],
    epoch: Epoch | None,
    roster: Roster,
    newest: int,
    units: Callable[[int], Sequence[Sequence[str]]],
) -> list[Action]:
    """Let the spares among `nodes` fetch the newest snapshot, each the stage that it would most likely take.

    Args:
        newest: the snapshot's step; 0 if there is none.
        units: number of stages -> the layer units of each.
    """
    if epoch is None or newest == 0:
        return []
    split = units(epoch.stages)
    stages = spare_stages(roster.spares(epoch.hosts), roster.stages, epoch.stages)
    orders = {node: prefetch_order(stages[node], split) for node in nodes if node in stages}
    return [Send(node_id=node, message=Prefetch(step=newest, units=order)) for node, order in orders.items()]
