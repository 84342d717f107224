"""The codecs that a plan chooses from, in order of precision, and what packing with them takes a node. Pure.

`trellis-R` and `dither-R` have the least error for their bytes, and take a processor some tens of nanoseconds
an element. `fixed-6` and `fixed-8` take a tenth of that for a little more bytes and error, so that a slow
processor need not become the bottleneck. Below 6 bits rounding to nearest leaves too much of a gradient out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from node.config.schema import PipelineSection
from wire.codecs.formats import DitherFormat, TrellisFormat
from wire.errors import ConfigError
from wire.telemetry import CodecTime

PLANNED = "auto"
"""The name of a codec that is planned."""
RATES = ("2", "2.5", "3", "3.5", "4", "4.41", "5", "6", "7", "8")
"""Bits an element to choose from: `trellis-R` for activations, `dither-R` for their gradients."""
CHEAP = {"fixed-6": 5.5, "fixed-8": 7.5}
"""Codecs of both kinds of tensor that pack fast, and the bits of `trellis` with about their error."""
FIRST = 4.41
"""Until something is measured, a tensor gets this many bits an element, or the fewest that the run allows."""


def precision(rung: str) -> float:
    """Bits of the `trellis` codec with about this codec's error."""
    return CHEAP.get(rung) or float(rung.removeprefix(TrellisFormat.PREFIX))


def ladder(min_bits: float) -> tuple[str, ...]:
    """The codecs of activations to choose from, the least precise first; `of_gradients` gives those of
    gradients. ConfigError if no rate is left."""
    rates = [float(rate) for rate in RATES if float(rate) >= min_bits]
    if not rates:
        raise ConfigError(f"pipeline.min_bits is {min_bits:g}; it must be at most {RATES[-1]}")
    rungs = [f"{TrellisFormat.PREFIX}{rate:g}" for rate in rates]
    cheap = [codec for codec, bits in CHEAP.items() if bits > rates[0]]
    return tuple(sorted((*rungs, *cheap), key=precision))


def of_gradients(rung: str) -> str:
    """The codec of gradients with this one of activations: at low rates one whose error has no mean."""
    return rung.replace(TrellisFormat.PREFIX, DitherFormat.PREFIX)


def family(codec: str) -> str:
    """Codecs of one way to pack: what slows one of them slows all."""
    return codec.partition("-")[0]


def first_codecs(pipeline: PipelineSection) -> tuple[str, str]:
    """The codecs of activations and gradients until others are planned; the run file's if none ever are."""
    if not pipeline.plans_codecs:
        return pipeline.forward_codec, pipeline.backward_codec
    first = ladder(max(FIRST, pipeline.min_bits))[0]
    return first, of_gradients(first)


def to_time(min_bits: float) -> tuple[str, ...]:
    """Codecs that tell what packing takes a node with any of the run's: the ends of each family."""
    found = []
    for name in (name for rung in ladder(min_bits) for name in dict.fromkeys((rung, of_gradients(rung)))):
        found.append(name)
    by_family: dict[str, list[str]] = {}
    for name in found:
        by_family.setdefault(family(name), []).append(name)
    return tuple(dict.fromkeys(name for names in by_family.values() for name in (names[0], names[-1])))


@dataclass(frozen=True)
class PackingTimes:
    """What packing and unpacking take a node; nothing where nothing is known, as on a GPU.

    What a node says is believed no further than the run's own steps go: see `Lines.believed`.
    """

    times: tuple[CodecTime, ...] = ()
    factor: float = field(default=1.0, kw_only=True)
    """On all times."""

    def of(self, codec: str) -> tuple[float, float]:
        """Seconds an element to pack and to unpack: as known of the codec of its family with the nearest
        number of bits."""
        known = [one for one in self.times if family(one.codec) == family(codec)]
        if not known:
            return 0.0, 0.0
        near = min(known, key=lambda one: (abs(_bits(one.codec) - _bits(codec)), one.codec))
        return self.factor * near.pack, self.factor * near.unpack


def slowest_packing(nodes: Sequence[PackingTimes]) -> PackingTimes:
    """Of nodes that have the same codecs, codec by codec."""
    if len(nodes) == 1:
        return nodes[0]
    names = sorted({one.codec for node in nodes for one in node.times})
    return PackingTimes(tuple(_slowest(name, [node.of(name) for node in nodes]) for name in names))


def _slowest(name: str, times: Iterable[tuple[float, float]]) -> CodecTime:
    pack, unpack = map(max, zip(*times, strict=True))
    return CodecTime(codec=name, pack=pack, unpack=unpack)


def _bits(codec: str) -> float:
    rate = codec.partition("-")[2]
    try:
        return float(rate)
    except ValueError:
        return 0.0
