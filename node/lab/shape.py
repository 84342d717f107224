"""Rates and delays of links, the shaper's parameters for them, and matrices of measured ones.

Rates are nominal: Mbit/s on the wire as the shaper counts them, with the Ethernet header, without checksum
and gaps. TCP's payload gets `PAYLOAD_SHARE` of that. A matrix file gives rates and round trips between
regions:

    name = "…"              a title
    source = "…"            who measured it and where it is published
    [[pair]]
    regions = ["Oregon", "Virginia"]
    rtt_ms = 67
    mbit = 790
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.errors import ConfigError, nearest

MTU = 1500
ETHERNET_BYTES = 14
IP_TCP_BYTES = 20 + 20 + 12
"""IPv4, TCP, and TCP's timestamps, which Linux sends by default."""
PAYLOAD_SHARE = (MTU - IP_TCP_BYTES) / (MTU + ETHERNET_BYTES)
"""1448 of 1514 bytes: the payload of a full packet over the bytes that the shaper counts."""

BURST_SECONDS = 0.004
LEAST_BURST = 3 * 1024
"""Two packets, 4 ms at 6 Mbit/s.

A larger bucket holds a part of a step's bytes, so steps are faster than their floor (32 KiB at 1 Mbit/s: by a
fifth). A bucket of less than 4 ms delivers too little at higher rates (1600 bytes at 100 Mbit/s: 9 % less).
"""
QUEUE_SECONDS = 0.1
"""Length of the shaper's queue in addition to the round trip."""


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """One wire: a link between two stages, or a node's interface."""

    up_mbit: float
    """On a link, the rate from the lower stage to the higher. On an interface, the rate out of the node."""
    down_mbit: float
    rtt_ms: float = 0.0
    """Added to the round trip between two neighbours."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All wires of the pipeline at one setting: links in pipeline order, or interfaces by stage."""

    label: str
    """As in the profile: `100`, `100/20`, `matrix x 0.1`. With a round trip, ` + 20 ms` follows."""
    links: tuple[LinkShape, ...]

    @property
    def busiest_mbit(self) -> float:
        """The slowest rate, by which tables and figures are sorted."""
        return min(min(link.up_mbit, link.down_mbit) for link in self.links)

    @property
    def rtt_ms(self) -> float:
        return max(link.rtt_ms for link in self.links)

    @property
    def most_on_the_way(self) -> float:
        """The most bytes in flight on a full link."""
        return max(125 * max(link.up_mbit, link.down_mbit) * link.rtt_ms for link in self.links)


def uniform(rate: str, rtt_ms: float, wires: int) -> Shape:
    """The same shape for every wire. `rate` is `"100"` or `"100/20"`. Raises ValueError."""
    up, slash, down = rate.partition("/")
    link = LinkShape(up_mbit=float(up), down_mbit=float(down if slash else up), rtt_ms=rtt_ms)
    if not (0 < link.up_mbit < 1e6 and 0 < link.down_mbit < 1e6 and 0 <= rtt_ms <= 10_000):
        raise ValueError(f"{rate!r} and {rtt_ms} ms are no rate and round trip")
    return Shape(label=f"{rate} + {rtt_ms:g} ms" if rtt_ms else rate, links=(link,) * wires)


def burst_bytes(mbit: float) -> int:
    """The size of the shaper's bucket: 4 ms at the rate, and at least `LEAST_BURST`."""
    return max(LEAST_BURST, int(mbit * 1e6 / 8 * BURST_SECONDS))


def queue_bytes(mbit: float, rtt_ms: float) -> int:
    """The size of the shaper's queue: 100 ms and a round trip at the rate, bucket included."""
    return burst_bytes(mbit) + int(mbit * 1e6 / 8 * (QUEUE_SECONDS + rtt_ms / 1e3))


def netem_packets(mbit: float, rtt_ms: float) -> int:
    """The packets that a delay queue must hold so that it never drops what the shaper lets through."""
    return 1000 + int(2 * mbit * 1e6 / 8 * (QUEUE_SECONDS + rtt_ms / 1e3) / MTU)


def shaper_commands(device: str, mbit: float, rtt_ms: float, *, netem: bool) -> list[list[str]]:
    """`tc` arguments that shape what leaves `device`, one list per command. Its old shaper must be removed
    first.

    Args:
        rtt_ms: With `netem`, half of it is the delay of this direction. Otherwise it only sizes the queue.
    """
    rate, burst = f"{round(mbit * 1e6)}bit", str(burst_bytes(mbit))
    add, limit = ["qdisc", "add", "dev", device], str(queue_bytes(mbit, rtt_ms))
    commands = [[*add, "root", "handle", "1:", "tbf", "rate", rate, "burst", burst, "limit", limit]]
    if netem and rtt_ms > 0:
        delay = f"{rtt_ms / 2:g}ms"
        limit = str(netem_packets(mbit, rtt_ms))
        commands.append([*add, "parent", "1:1", "handle", "10:", "netem", "delay", delay, "limit", limit])
    return commands


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Rates and round trips between regions, the same in both directions."""

    name: str
    source: str
    pairs: Mapping[frozenset[str], tuple[float, float]]
    """Two regions -> (Mbit/s, round trip in ms)."""

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted(set().union(*self.pairs)))

    def shape(self, regions: Sequence[str], ends: Sequence[tuple[int, int]], share: float) -> Shape:
        """A link for each pair of stages in `ends`, at a share of the rates between their regions.

        Raises ConfigError for two regions that have no link.
        """
        links = []
        for first, second in ends:
            pair = regions[first], regions[second]
            if frozenset(pair) not in self.pairs:
                raise ConfigError(f"the matrix {self.name!r} has no link between {pair[0]} and {pair[1]}")
            mbit, rtt_ms = self.pairs[frozenset(pair)]
            links.append(LinkShape(up_mbit=share * mbit, down_mbit=share * mbit, rtt_ms=rtt_ms))
        return Shape(label=f"matrix x {share:g}", links=tuple(links))


def read_matrix(path: Path) -> Matrix:
    """Read a matrix file. Raises ConfigError for anything else, in one line that names the file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such matrix file; deploy/lab/ has one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a matrix file: {error}") from None
    known = ("name", "source", "pair")
    for key in raw:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(key, known)}")
    pairs: dict[frozenset[str], tuple[float, float]] = {}
    for entry in raw.get("pair", ()):
        regions, mbit, rtt_ms = _pair(entry, path)
        if regions in pairs:
            raise ConfigError(f"{path}: the pair {' and '.join(sorted(regions))} is listed twice")
        pairs[regions] = mbit, rtt_ms
    name, source = raw.get("name"), raw.get("source")
    if not isinstance(name, str) or not isinstance(source, str) or not pairs:
        raise ConfigError(
            f"{path}: a matrix has a name, a source (who measured it) and at least one [[pair]]"
        )
    return Matrix(name=name, source=source, pairs=pairs)


def _pair(entry: Any, path: Path) -> tuple[frozenset[str], float, float]:
    match entry:
        case {"regions": [str(first), str(second)], "mbit": int() | float(), "rtt_ms": int() | float()} if (
            len(entry) == 3 and first != second and entry["mbit"] > 0 and entry["rtt_ms"] >= 0
        ):
            return frozenset((first, second)), float(entry["mbit"]), float(entry["rtt_ms"])
    raise ConfigError(
        f'{path}: a [[pair]] has regions = ["A", "B"], mbit (above 0) and rtt_ms, and nothing else; '
        f"got {entry}"
    )
