"""Which connections a port keeps while strangers crowd it. A state machine without I/O.

A connection is *silent* until its first byte, then in its *handshake*, and *proven* once a call over it has
shown a certificate of the run. Each phase has a number of places. A newcomer to a full phase replaces the
oldest connection of the group (address, or node if proven) that holds most places. So one crowded address
cannot shut out another, and idle connections never shut out a talking one.
"""

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

SILENT_SECONDS = 5.0
"""From accepting a connection to its first byte."""
PROOF_SECONDS = 10.0
"""From the first byte to the first call with a certificate; gRPC ends a handshake after 5 s."""
MOST_OF_A_NODE = 16
"""Proven connections of one node; it needs two for a link and two for the coordinator."""


class Phase(IntEnum):
    """How far a connection has come."""

    SILENT = 0
    HANDSHAKE = 1
    PROVEN = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Places in each phase. A connection uses one descriptor while silent, then three (see `wire.front`)."""

    silent: int
    handshakes: int
    proven: int = 0
    handshake_seconds: float = PROOF_SECONDS
    """Limit from the first byte to the proof; on a port without proof, for the whole connection."""

    @classmethod
    def of_members(cls, descriptors: int) -> "Limits":
        """For a port of mutual TLS in a process of so many descriptors: at most 0.46 of them."""
        return cls(
            silent=_between(descriptors // 16, 16, 1024),
            handshakes=_between(descriptors // 32, 8, 512),
            proven=_between(descriptors // 10, 16, 8192),
        )

    @classmethod
    def of_strangers(cls, descriptors: int, seconds: float) -> "Limits":
        """For a port that anybody may use for `seconds`: at most 0.16 of the process's descriptors."""
        return cls(
            silent=_between(descriptors // 32, 16, 1024),
            handshakes=_between(descriptors // 24, 8, 512),
            handshake_seconds=seconds,
        )


def _between(value: int, least: int, most: int) -> int:
    return max(least, min(value, most))


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


class Admission:
    """The connections of one port. Methods return the connections to close; these are already forgotten."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = (limits.silent, limits.handshakes, limits.proven)
        self._connections: dict[int, _Connection] = {}
        self._groups: tuple[dict[str, dict[int, None]], ...] = ({}, {}, {})
        """For each phase: connections by group, each the oldest first."""

    def __len__(self) -> int:
        return len(self._connections)

    def count(self, phase: Phase) -> int:
        return sum(map(len, self._groups[phase].values()))

    def accepted(self, number: int, host: str, now: float) -> list[int]:
        """A new connection from `host`; `now` is seconds on any clock."""
        return self._enter(number, _Connection(Phase.SILENT, address_group(host), now))

    def spoke(self, number: int, now: float) -> list[int]:
        """Its first byte arrived."""
        if (connection := self._connections.get(number)) is None or connection.phase is not Phase.SILENT:
            return []
        self.closed(number)
        return self._enter(number, _Connection(Phase.HANDSHAKE, connection.group, now))

    def proved(self, number: int, owner: str, now: float) -> list[int]:
        """A call over it carried the certificate of node `owner`."""
        if (connection := self._connections.get(number)) is None or connection.phase is Phase.PROVEN:
            return []
        self.closed(number)
        return self._enter(number, _Connection(Phase.PROVEN, owner, now))

    def closed(self, number: int) -> None:
        """It ended."""
        if (connection := self._connections.pop(number, None)) is not None:
            groups = self._groups[connection.phase]
            del groups[connection.group][number]
            if not groups[connection.group]:
                del groups[connection.group]

    def expired(self, now: float) -> list[int]:
        """Connections that took too long."""
        seconds = {Phase.SILENT: SILENT_SECONDS, Phase.HANDSHAKE: self._limits.handshake_seconds}
        late = [
            number
            for phase, limit in seconds.items()
            for number in self._of(phase)
            if self._connections[number].since + limit <= now
        ]
        for number in late:
            self.closed(number)
        return late

    def shed(self) -> list[int]:
        """Descriptors have run out: drop the older half of the unproven connections."""
        unproven = sorted(
            (*self._of(Phase.SILENT), *self._of(Phase.HANDSHAKE)),
            key=lambda number: self._connections[number].since,
        )
        dropped = unproven[: -(-len(unproven) // 2)]
        for number in dropped:
            self.closed(number)
        return dropped

    def _enter(self, number: int, connection: _Connection) -> list[int]:
        groups = self._groups[connection.phase]
        dropped: list[int] = []
        own = groups.get(connection.group, {})
        if connection.phase is Phase.PROVEN and len(own) >= MOST_OF_A_NODE:
            dropped.append(next(iter(own)))
        elif self.count(connection.phase) >= self._places[connection.phase] and groups:
            crowd = max(groups, key=lambda group: len(groups[group]))
            dropped.append(next(iter(groups[crowd])))
        for oldest in dropped:
            self.closed(oldest)
        self._connections[number] = connection
        groups.setdefault(connection.group, {})[number] = None
        return dropped

    def _of(self, phase: Phase) -> Iterator[int]:
        for group in self._groups[phase].values():
            yield from group
