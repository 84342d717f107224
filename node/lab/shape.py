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
"""1448 of 1514 bytes: payload over what the shaper counts, in a full packet."""

BURST_SECONDS = 0.004
LEAST_BURST = 3 * 1024
"""Two packets, 4 ms at 6 Mbit/s. A larger bucket holds a part of a step's bytes and lets steps beat their
floor (32 KiB at 1 Mbit/s: a fifth). Less than 4 ms under-delivers at higher rates (1600 bytes at 100 Mbit/s:
9 %)."""
QUEUE_SECONDS = 0.1
"""Length of the shaper's queue, beyond the round trip."""


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """One wire: a link between two stages, or a node's interface."""

    up_mbit: float
    """On a link from the lower stage to the higher; on an interface out of the node."""
    down_mbit: float
    rtt_ms: float = 0.0
    """Added to the round trip between two neighbours."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """All wires of the pipeline at one setting: links in pipeline order, or interfaces by stage."""

    label: str
    """As in the profile: `100`, `100/20`, `matrix x 0.1`; with a round trip ` + 20 ms`."""
    links: tuple[LinkShape, ...]

    @property
    def busiest_mbit(self) -> float:
        """The slowest rate; tables and figures are sorted by it."""
        return min(min(link.up_mbit, link.down_mbit) for link in self.links)

    @property
    def rtt_ms(self) -> float:
        return max(link.rtt_ms for link in self.links)

    @property
    def most_on_the_way(self) -> float:
        """Bytes in flight on a full link, the largest of all links."""
        return max(125 * max(link.up_mbit, link.down_mbit) * link.rtt_ms for link in self.links)


def uniform(rate: str, rtt_ms: float, wires: int) -> Shape:
    """The same shape everywhere. `rate` is `"100"` or `"100/20"`. Raises ValueError."""
    up, slash, down = rate.partition("/")
    link = LinkShape(up_mbit=float(up), down_mbit=float(down if slash else up), rtt_ms=rtt_ms)
    if not (0 < link.up_mbit < 1e6 and 0 < link.down_mbit < 1e6 and 0 <= rtt_ms <= 10_000):
        raise ValueError(f"{rate!r} and {rtt_ms} ms are no rate and round trip")
    return Shape(label=f"{rate}{delay_label(rtt_ms)}", links=(link,) * wires)


def delay_label(rtt_ms: float) -> str:
    return f" + {rtt_ms:g} ms" if rtt_ms else ""


def burst_bytes(mbit: float) -> int:
    """The shaper's bucket: 4 ms at the rate, and at least `LEAST_BURST`."""
    return max(LEAST_BURST, int(mbit * 1e6 / 8 * BURST_SECONDS))


def queue_bytes(mbit: float, rtt_ms: float) -> int:
    """The shaper's queue: 100 ms and a round trip at the rate, bucket included."""
    return burst_bytes(mbit) + int(mbit * 1e6 / 8 * (QUEUE_SECONDS + rtt_ms / 1e3))


def netem_packets(mbit: float, rtt_ms: float) -> int:
    """Packets that a delay queue must hold so that it never drops what the shaper lets through."""
    return 1000 + int(2 * mbit * 1e6 / 8 * (QUEUE_SECONDS + rtt_ms / 1e3) / MTU)


def shaper_commands(device: str, mbit: float, rtt_ms: float, *, netem: bool) -> list[list[str]]:
    """`tc` arguments that shape what leaves `device`, one list a command. Remove its old shaper first.

    Args:
        rtt_ms: with `netem`, half of it is the delay of this direction; else it only sizes the queue.
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
    """Raises ConfigError for anything but a matrix file, in one line that names the file."""
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
            raise ConfigError(f"{path}: the pair {' and '.join(sorted(regions))} is there twice")
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
