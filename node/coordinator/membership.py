"""Who is in the run: the nodes that are connected, or were a moment ago. Pure."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from node.coordinator.actions import Action, Send
from node.coordinator.epoch import Epoch
from node.coordinator.stage_assignment import Candidate, prefetch_order
from wire.messages import Prefetch


@dataclass
class Member:
    """A node of the run."""

    address: str
    offer: Candidate
    process_nonce: int
    last_heard: float
    disconnected_at: float | None = None
    leaving: bool = False


class Roster:
    """`members` are in the order in which they came. Times in seconds, on the clock that `now` is of."""

    def __init__(self, *, silent_seconds: float, reconnect_seconds: float) -> None:
        self.members: dict[str, Member] = {}
        self._silent_seconds = silent_seconds
        self._reconnect_seconds = reconnect_seconds

    def arrived(self, offer: Candidate, *, address: str, process_nonce: int, now: float) -> None:
        """A node is here, for the first time or again; what it offers is what it offered first."""
        member = self.members.get(offer.node_id)
        if member is None:
            member = Member(address=address, offer=offer, process_nonce=process_nonce, last_heard=now)
            self.members[offer.node_id] = member
        member.disconnected_at = None
        member.last_heard = now
        member.address = address

    def heard(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.last_heard = now

    def disconnected(self, node_id: str, now: float) -> None:
        if (member := self.members.get(node_id)) is not None:
            member.disconnected_at = now

    def excuse(self, seconds: float, now: float) -> None:
        """For so long, until now, nobody could be heard: it counts as nobody's silence."""
        for member in self.members.values():
            member.last_heard = min(member.last_heard + seconds, now)
            if member.disconnected_at is not None:
                member.disconnected_at = min(member.disconnected_at + seconds, now)

    def overdue(self, now: float) -> dict[str, str]:
        """Nodes that count as dead from now on, and why."""
        dead: dict[str, str] = {}
        for node_id, member in self.members.items():
            gone = member.disconnected_at
            if gone is not None and now - gone > self._reconnect_seconds:
                dead[node_id] = "its connection closed and did not come back"
            elif gone is None and now - member.last_heard > self._silent_seconds:
                dead[node_id] = f"it has been silent for more than {self._silent_seconds:g} s"
        return dead

    def candidates(self) -> list[Candidate]:
        """Who could host a stage: is connected, and wants to stay."""
        return [
            member.offer
            for member in self.members.values()
            if member.disconnected_at is None and not member.leaving
        ]

    def spares(self, seats: Collection[str]) -> list[str]:
        """Candidates without a seat."""
        return [offer.node_id for offer in self.candidates() if offer.node_id not in seats]

    def leaving(self, nodes: Iterable[str]) -> list[str]:
        """Who of these members has asked to go."""
        return [node_id for node_id in nodes if self.members[node_id].leaving]

    def connected(self, nodes: Iterable[str]) -> bool:
        """Whether all of these members are connected at this moment."""
        return all(self.members[node_id].disconnected_at is None for node_id in nodes)


def keep_warm(
    nodes: Iterable[str],
    epoch: Epoch | None,
    roster: Roster,
    newest: int,
    units: Callable[[int], Sequence[Sequence[str]]],
) -> list[Action]:
    """To spares among `nodes`: the newest snapshot, the stage that each would most likely take first.

    Args:
        newest: its step; 0 when there is none.
        units: number of stages -> the layer units of each.
    """
    if epoch is None or newest == 0:
        return []
    spares, split = roster.spares(epoch.seats), units(len(epoch.seats))
    orders = {node: prefetch_order(spares.index(node), split) for node in nodes if node in spares}
    return [Send(node_id=node, message=Prefetch(step=newest, units=order)) for node, order in orders.items()]
