"""Decides which connections a port keeps when strangers crowd it. A state machine without I/O.

A connection is *silent* until its first byte, then in its *handshake*, and *proven* once a call over it
has shown a certificate of the run. Each phase has a limited number of places. When a phase is full, a new
connection replaces the oldest connection of the group (address, or node if proven) with the most places.
Between equal groups, a stranger loses a place before an address that has shown a certificate. So one
crowded address cannot shut out another, idle connections never shut out one that talks, and returning
members take precedence over strangers.
"""

import ipaddress
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

SILENT_SECONDS = 5.0
"""How long an accepted connection may take to send its first byte."""
PROOF_SECONDS = 10.0
"""The limit from the first byte to the first call with a certificate. gRPC ends a handshake after 5 s."""
MOST_KNOWN = 1024
"""How many addresses that showed a certificate are remembered."""
MOST_OF_A_NODE = 16
"""The most proven connections of one node. It needs two for each link and two for the coordinator."""


class Phase(IntEnum):
    """How far a connection has come."""

    SILENT = 0
    HANDSHAKE = 1
    PROVEN = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The places in each phase. A connection uses one descriptor while silent, then three (see
    `wire.front`)."""

    silent: int
    handshakes: int
    proven: int = 0
    handshake_seconds: float = PROOF_SECONDS
    """The limit from the first byte to the proof; on a port without proof, for the whole connection."""

    @classmethod
    def of_members(cls, descriptors: int) -> "Limits":
        """The limits for a port with mutual TLS in a process with this many descriptors: at most 0.46 of
        them."""
        return cls(
            silent=_between(descriptors // 16, 16, 1024),
            handshakes=_between(descriptors // 32, 8, 512),
            proven=_between(descriptors // 10, 16, 8192),
        )

    @classmethod
    def of_strangers(cls, descriptors: int, seconds: float) -> "Limits":
        """The limits for a port that anybody may use for `seconds`: at most 0.16 of the process's
        descriptors."""
        return cls(
            silent=_between(descriptors // 32, 16, 1024),
            handshakes=_between(descriptors // 24, 8, 512),
            handshake_seconds=seconds,
        )


def _between(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


@lru_cache(maxsize=1024)
def address_group(host: str) -> str:
    """What counts as one address: an IPv4 address, or the /64 of an IPv6 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))


@dataclass(slots=True)
class _Connection:
    phase: Phase
    group: str
    since: float


class _Places:
    """The connections in one phase, by group. Every method takes constant time, so the cost to the port's
    owner grows only with the number of connections that a crowd opens."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: dict[str, dict[int, None]] = {}
        """Connection numbers by group, oldest first."""
        self._by_size: dict[int, dict[str, None]] = {}
        """Groups by their number of connections."""
        self._largest = 0
        self.count = 0

    def __iter__(self) -> Iterator[int]:
        for group in self._groups.values():
            yield from group

    @property
    def full(self) -> bool:
        return self.count >= self._limit

    def of(self, group: str) -> int:
        """The number of connections of this group."""
        return len(self._groups.get(group, ()))

    def oldest(self, group: str) -> int:
        return next(iter(self._groups[group]))

    def crowd(self, known: Container[str]) -> str:
        """A group with the most connections, preferably one that is not in `known`."""
        largest = self._by_size[self._largest]
        for group in largest:
            if group not in known:
                return group
        return next(iter(largest))

    def add(self, number: int, group: str) -> None:
        members = self._groups.setdefault(group, {})
        members[number] = None
        self._resize(group, len(members) - 1, len(members))
        self.count += 1

    def remove(self, number: int, group: str) -> None:
        members = self._groups[group]
        del members[number]
        if not members:
            del self._groups[group]
        self._resize(group, len(members) + 1, len(members))
        self.count -= 1

    def _resize(self, group: str, before: int, after: int) -> None:
        if before:
            del self._by_size[before][group]
            if not self._by_size[before]:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[group] = None
        if after > self._largest or (before == self._largest and before not in self._by_size):
            self._largest = after


class KnownAddresses:
    """The `MOST_KNOWN` newest addresses that showed a certificate of the run."""

    def __init__(self) -> None:
        self._groups: dict[str, None] = {}

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def add(self, group: str) -> None:
        self._groups.pop(group, None)
        self._groups[group] = None
        if len(self._groups) > MOST_KNOWN:
            del self._groups[next(iter(self._groups))]


class Admission:
    """The connections of one port. Methods return connections to close, which are already forgotten."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.known = KnownAddresses()
        """Shared by ports that pass connections on to each other."""
        self._connections: dict[int, _Connection] = {}
        self._places = tuple(map(_Places, (limits.silent, limits.handshakes, limits.proven)))
        """One for each phase."""

    def __len__(self) -> int:
        return len(self._connections)

    def count(self, phase: Phase) -> int:
        return self._places[phase].count

    @property
    def next_out(self) -> int | None:
        """The silent connection that the next new one will replace; None while there is room."""
        silent = self._places[Phase.SILENT]
        return silent.oldest(silent.crowd(self.known)) if silent.full and silent.count else None

    def accepted(self, number: int, host: str, now: float) -> list[int]:
        """Admit a new connection from `host`. `now` is seconds on any clock."""
        return self._enter(number, _Connection(Phase.SILENT, address_group(host), now))

    def spoke(self, number: int, now: float) -> list[int]:
        """Record that the connection's first byte arrived."""
        if (connection := self._connections.get(number)) is None or connection.phase is not Phase.SILENT:
            return []
        self.closed(number)
        return self._enter(number, _Connection(Phase.HANDSHAKE, connection.group, now))

    def proved(self, number: int, owner: str, now: float) -> list[int]:
        """Record that a call over the connection carried the certificate of node `owner`."""
        if (connection := self._connections.get(number)) is None or connection.phase is Phase.PROVEN:
            return []
        self.known.add(connection.group)
        self.closed(number)
        return self._enter(number, _Connection(Phase.PROVEN, owner, now))

    def closed(self, number: int) -> None:
        """Forget a connection that has ended."""
        if (connection := self._connections.pop(number, None)) is not None:
            self._places[connection.phase].remove(number, connection.group)

    def expired(self, now: float) -> list[int]:
        """Drop the connections that took too long."""
        seconds = {Phase.SILENT: SILENT_SECONDS, Phase.HANDSHAKE: self._limits.handshake_seconds}
        late = [
            number
            for phase, limit in seconds.items()
            for number in self._places[phase]
            if self._connections[number].since + limit <= now
        ]
        for number in late:
            self.closed(number)
        return late

    def shed(self) -> list[int]:
        """Drop the older half of the unproven connections, because descriptors have run out."""
        unproven = sorted(
            (*self._places[Phase.SILENT], *self._places[Phase.HANDSHAKE]),
            key=lambda number: self._connections[number].since,
        )
        dropped = unproven[: -(-len(unproven) // 2)]
        for number in dropped:
            self.closed(number)
        return dropped

    def _enter(self, number: int, connection: _Connection) -> list[int]:
        places = self._places[connection.phase]
        dropped: list[int] = []
        if connection.phase is Phase.PROVEN and places.of(connection.group) >= MOST_OF_A_NODE:
            dropped.append(places.oldest(connection.group))
        elif places.full and places.count:
            # A proven connection's group is its node.
            known = self.known if connection.phase is not Phase.PROVEN else ()
            dropped.append(places.oldest(places.crowd(known)))
        for oldest in dropped:
            self.closed(oldest)
        self._connections[number] = connection
        places.add(number, connection.group)
        return dropped
