"""How long a node takes to pack with the codecs that a plan chooses from. All functions are pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from wire.codecs.formats import codec_format, ladder
from wire.telemetry import CodecTime


def of_gradients(name: str) -> str:
    """The codec of gradients that a plan uses together with this codec of activations."""
    return codec_format(name).for_gradients


def to_time(min_bits: float) -> tuple[str, ...]:
    """The codecs to time so that a node's packing time with any of the run's is known: the two ends of each
    family."""
    by_family: dict[str, list[str]] = {}
    for rung in ladder(min_bits):
        for name in dict.fromkeys((rung, of_gradients(rung))):
            by_family.setdefault(codec_format(name).family, []).append(name)
    return tuple(dict.fromkeys(name for names in by_family.values() for name in (names[0], names[-1])))


@dataclass(frozen=True)
class PackingTimes:
    """How long packing and unpacking take on a node. Both are 0 if nothing is known, as on a GPU.

    The run's own steps limit how far a node's report is believed: see `Lines.believed`.
    """

    times: tuple[CodecTime, ...] = ()
    factor: float = field(default=1.0, kw_only=True)
    """A factor of all times."""

    def of(self, codec: str) -> tuple[float, float]:
        """The seconds per element for packing and for unpacking. They are those of the codec of the same
        family with the nearest number of bits."""
        asked = codec_format(codec)
        known = [time for time in self.times if codec_format(time.codec).family == asked.family]
        if not known:
            return 0.0, 0.0
        near = min(
            known,
            key=lambda time: (abs(codec_format(time.codec).precision - asked.precision), time.codec),
        )
        return self.factor * near.pack, self.factor * near.unpack


def slowest_packing(nodes: Sequence[PackingTimes]) -> PackingTimes:
    """The slowest times of nodes that have the same codecs, codec by codec."""
    if len(nodes) == 1:
        return nodes[0]
    slowest = []
    for name in sorted({times.codec for node in nodes for times in node.times}):
        pack, unpack = map(max, zip(*(node.of(name) for node in nodes), strict=True))
        slowest.append(CodecTime(codec=name, pack=pack, unpack=unpack))
    return PackingTimes(tuple(slowest))
