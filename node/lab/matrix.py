"""Rates and round trips between regions, from a file.

name = "…"              what it is
source = "…"            who measured it, where it is published
[[pair]]
regions = ["Oregon", "Virginia"]
rtt_ms = 67
mbit = 790
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.lab.shape import LinkShape, Shape
from node.run_file.loader import nearest
from wire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Symmetric: both directions of a pair are alike."""

    name: str
    source: str
    pairs: Mapping[frozenset[str], tuple[float, float]]
    """Two regions -> (Mbit/s, round trip in ms)."""

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted(set().union(*self.pairs)))

    def shape(self, regions: Sequence[str], share: float, closing: bool) -> Shape:
        """Links between neighbours, at a share of the measured rates; `closing` adds the last to the first.

        Raises ConfigError for regions that have no link to their neighbour.
        """
        ends = list(pairwise(regions))
        if closing:
            ends.append((regions[-1], regions[0]))
        links = []
        for pair in ends:
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
