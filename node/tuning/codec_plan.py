"""Plans a codec for each link and direction: the most precise one that hides behind compute. All functions
are pure.

Each boundary tensor occupies its link's direction, and the processors that pack and unpack it, for times that
depend on its codec. The *pace* is the time per microbatch that no plan can beat: the slowest stage's compute
or packing, or the slowest direction. Every other direction may take as long as the pace without cost, so it
gets the most precise codec that fits. So one slow line costs the other directions no precision, and no slow
processor delays the run to save bytes that its lines could carry. A step also has a *ramp*: the first
microbatch's way to the last stage and its gradient's way back, on which every tensor is packed, sent and
unpacked while other stages wait. With few microbatches the ramp is a large part of a step, so precision may
lengthen a step by at most `FREE`.

A plan holds for an epoch. `node.tuning.rate_control` decides when a new plan is worth an epoch.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

from node.config.schema import PipelineSection
from node.schedule.floor import Network
from node.telemetry.events import read_value
from node.tuning.window_plan import StepMeasures, Windows
from wire.codecs.formats import codec_format, ladder
from wire.errors import ConfigError, ProtocolViolationError
from wire.spec import Direction
from wire.telemetry import CodecTime

CAUTION = 1.1
"""Transfers are assumed to take this much longer than measured."""
PACKING_CAUTION = 1.5
"""Packing is assumed to take this much longer than measured, because it shares its node's cores with
compute."""
FREE = 0.02
"""A step may take this much longer for more precision."""

Way = tuple[int, Direction]
"""A boundary's number and the kind of tensor."""


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


@dataclass(frozen=True, kw_only=True)
class CodecPlan:
    """The codecs of an epoch by boundary, first boundary first."""

    activations: tuple[str, ...]
    gradients: tuple[str, ...]

    @classmethod
    def first(cls, pipeline: PipelineSection, boundaries: int) -> "CodecPlan":
        """The plan of a run whose links have not been measured yet."""
        there, back = pipeline.first_codecs
        return cls(activations=(there,) * boundaries, gradients=(back,) * boundaries)

    @classmethod
    def from_json(cls, text: str) -> "CodecPlan":
        """The plan in `text`.

        Raises:
            ConfigError: `to_json` does not write this.
        """
        try:
            plan: CodecPlan = read_value(json.loads(text), cls, "plan")
            for name in (*plan.activations, *plan.gradients):
                codec_format(name)
        except (ValueError, RecursionError, ProtocolViolationError, ConfigError) as error:
            raise ConfigError(f"a recorded plan of codecs cannot be read ({error})") from None
        return plan

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def boundaries(self) -> int:
        return len(self.activations)

    def name(self, way: Way) -> str:
        """The codec of a tensor.

        Raises:
            KeyError: this kind crosses no boundary.
        """
        boundary, direction = way
        return {Direction.ACTIVATION: self.activations, Direction.GRADIENT: self.gradients}[direction][
            boundary
        ]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """What crosses a pipeline's links."""

    measures: StepMeasures
    """Times and rates. Their byte counts are not used."""
    chunks: int
    shape: tuple[int, ...]
    windows: Windows
    """The widest windows that stages have memory for, in the form of `node.schedule.schedule.schedule`."""
    microbatches: float = math.inf
    """The microbatches of a step in one row. With infinitely many, the ramp counts nothing."""
    microbatch_seconds: float = math.inf
    """The seconds per microbatch in the newest steps, by the coordinator's clock. No stage computes for
    longer."""
    packing: tuple[PackingTimes, ...] = ()
    """The packing times of each stage; empty if packing is free."""

    @property
    def stages(self) -> int:
        return len(self.measures.forward)

    @property
    def boundaries(self) -> int:
        return self.stages * self.chunks - 1 + (self.measures.head_share is not None)

    @property
    def compute_seconds(self) -> float:
        """The compute of the slowest stage, in seconds per microbatch."""
        measures = self.measures
        # The compute thread also waits for the packing thread. With another codec it may not have to.
        waited = measures.packing or (0.0,) * self.stages
        stages = zip(measures.forward, measures.backward, waited, strict=True)
        return min(self.microbatch_seconds, max(there + back - packing for there, back, packing in stages))

    def ends(self, way: Way) -> tuple[int, int]:
        """The sending stage and the receiving stage."""
        boundary, direction = way
        low, high = boundary % self.stages, (boundary + 1) % self.stages
        return (low, high) if direction is Direction.ACTIVATION else (high, low)

    def ways(self) -> list[Way]:
        """Everything that crosses a link, by boundary."""
        kinds = (Direction.ACTIVATION, Direction.GRADIENT)
        return [(j, kind) for j in range(self.boundaries) for kind in kinds if self.stages > 1]

    def transfer(self, way: Way, codec: str) -> tuple[float, float]:
        """The seconds for which one tensor occupies its link, and its latency. Both include `CAUTION`."""
        if (known := self._transfers.get((way, codec))) is not None:
            return known
        network = Network(self.stages, self.measures.links)
        passage = network.passage(*self.ends(way), codec_format(codec).packed_bytes(self.shape))
        seconds = max(passage.seconds.values(), default=0.0)
        cautious = self._transfers[way, codec] = CAUTION * seconds, CAUTION * passage.latency
        return cautious

    @cached_property
    def _transfers(self) -> dict[tuple[Way, str], tuple[float, float]]:
        """Results of `transfer`. A search asks for each of them hundreds of times."""
        return {}

    def busy(self, codecs: Mapping[Way, str]) -> dict[tuple[int, int], float]:
        """The seconds per microbatch for which each direction of a link is occupied."""
        seconds: dict[tuple[int, int], float] = {}
        for way, codec in codecs.items():
            ends = self.ends(way)
            seconds[ends] = seconds.get(ends, 0.0) + self.transfer(way, codec)[0]
        return seconds

    def packs(self, codecs: Mapping[Way, str]) -> tuple[float, ...]:
        """The seconds per microbatch for which each stage packs and unpacks, besides its compute."""
        seconds = [0.0] * self.stages
        if self.packing:
            for way, codec in codecs.items():
                source, target = self.ends(way)
                seconds[source] += self.packing_of(way, codec, source)[0]
                seconds[target] += self.packing_of(way, codec, target)[1]
        return tuple(seconds)

    def packing_of(self, way: Way, codec: str, stage: int) -> tuple[float, float]:
        """The seconds for which a stage packs one tensor and unpacks it. Both include `PACKING_CAUTION`."""
        if not self.packing:
            return 0.0, 0.0
        kind = way[1]
        if (known := self._packings.get((kind, codec, stage))) is not None:
            return known
        elements = PACKING_CAUTION * math.prod(self.shape)
        pack, unpack = self.packing[stage].of(of_gradients(codec) if kind is Direction.GRADIENT else codec)
        seconds = self._packings[kind, codec, stage] = elements * pack, elements * unpack
        return seconds

    @cached_property
    def _packings(self) -> dict[tuple[Direction, str, int], tuple[float, float]]:
        """Results of `packing_of`."""
        return {}

    def believed(self, plan: CodecPlan) -> "Lines":
        """These lines with packing times that fit the steps with this plan: no stage packed for longer than a
        step took."""
        spent = self.packs({way: plan.name(way) for way in self.ways()})
        return replace(
            self,
            packing=tuple(
                replace(times, factor=times.factor * self.microbatch_seconds / seconds)
                if seconds > self.microbatch_seconds
                else times
                for times, seconds in zip(self.packing, spent if self.packing else (), strict=True)
            ),
        )

    def pace(self, codecs: Mapping[Way, str]) -> float:
        """The least seconds per microbatch with these codecs: of compute, packing or the busiest
        direction."""
        return max((self.compute_seconds, *self.busy(codecs).values(), *self.packs(codecs)))

    def ramp(self, codecs: Mapping[Way, str]) -> float:
        """A microbatch's share of the ramp's packing and transfers, in seconds."""
        if math.isinf(self.microbatches):
            return 0.0
        whole = 0.0
        for way, codec in codecs.items():
            source, target = self.ends(way)
            whole += sum(self.transfer(way, codec))
            whole += self.packing_of(way, codec, source)[0] + self.packing_of(way, codec, target)[1]
        return whole / self.microbatches

    def seconds(self, codecs: Mapping[Way, str]) -> float:
        """A microbatch's share of a step, without the ramp's compute, which codecs do not change."""
        return self.pace(codecs) + self.ramp(codecs)

    def round_trip(self, boundary: int, codecs: Mapping[Way, str]) -> float:
        """The seconds from sending an activation until its gradient could return, without compute."""
        there, back = (
            self.transfer((boundary, kind), codecs[boundary, kind])
            for kind in (Direction.ACTIVATION, Direction.GRADIENT)
        )
        return sum(there) + sum(back)

    def window(self, boundary: int) -> int:
        """The number of extra microbatches that may be in flight over this boundary."""
        if self.chunks > 1:
            return max(self.windows, default=0)
        return self.windows[boundary] if boundary < len(self.windows) else 0


def seconds_of(lines: Lines, plan: CodecPlan) -> float:
    """A microbatch's share of a step with these codecs, as `Lines.seconds`."""
    return lines.seconds({way: plan.name(way) for way in lines.ways()})


def plan_codecs(
    lines: Lines, rungs: Sequence[str], may: Callable[[Way, int], bool] = lambda way, rung: True
) -> CodecPlan:
    """The plan with the most precise codec for each direction that lengthens a step by at most `FREE`. If
    every codec costs time, it is the fastest.

    Args:
        rungs: the codecs to choose from, least precise first.
        may: whether a tensor may have this rung. At least one must be allowed for each tensor.
    """
    codecs = _Choice(lines, rungs, may).best() if lines.ways() else {}
    return CodecPlan(
        activations=tuple(codec for (_, kind), codec in codecs.items() if kind is Direction.ACTIVATION),
        gradients=tuple(
            of_gradients(codec) for (_, kind), codec in codecs.items() if kind is Direction.GRADIENT
        ),
    )


class _Choice:
    """A search for one plan, one direction at a time. All tensors of a direction change together, so that
    none pays for the others."""

    def __init__(self, lines: Lines, rungs: Sequence[str], may: Callable[[Way, int], bool]) -> None:
        self._lines = lines
        self._rungs = rungs
        self._allowed = {way: [r for r in range(len(rungs)) if may(way, r)] for way in lines.ways()}
        self._directions: dict[tuple[int, int], list[Way]] = {}
        for way in self._allowed:
            self._directions.setdefault(lines.ends(way), []).append(way)

    def best(self) -> dict[Way, str]:
        chosen = self._shortest()
        pace = self._lines.pace(self._names(chosen))
        chosen = self._covered(self._raised(chosen, pace), pace)
        return {way: self._rungs[chosen[way]] for way in self._allowed}

    def _shortest(self) -> dict[Way, int]:
        """The best single codec for all, and then the best one for each direction in turn, until nothing
        improves."""
        rungs = range(len(self._rungs))
        chosen = min(({way: self._of(way, rung) for way in self._allowed} for rung in rungs), key=self._cost)
        cost, before = self._cost(chosen), None
        while cost != before:
            before = cost
            for ways in self._ways():
                for rung in rungs:
                    other = chosen | {way: self._of(way, rung) for way in ways}
                    if (other_cost := self._cost(other)) < cost:
                        chosen, cost = other, other_cost
        return chosen

    def _cost(self, chosen: Mapping[Way, int]) -> tuple[float, float]:
        """The seconds of a microbatch, then the sum of all work of lines and processors in it. The sum
        decides if two of them are equally slow, because a change of one alone then gains nothing yet."""
        lines, names = self._lines, self._names(chosen)
        return lines.seconds(names), sum((*lines.busy(names).values(), *lines.packs(names)))

    def _raised(self, chosen: dict[Way, int], allowed: float) -> dict[Way, int]:
        """Raise precision while a step takes at most `FREE` longer, the least precise direction first."""
        most_ramp = (1 + FREE) * (allowed + self._lines.ramp(self._names(chosen))) - allowed
        open_ = list(self._ways())
        while open_:
            ways = min(open_, key=lambda ways: max(chosen[way] for way in ways))
            for rung in range(1 + min(chosen[way] for way in ways), len(self._rungs)):
                higher = chosen | {way: max(chosen[way], self._of(way, rung)) for way in ways}
                if higher != chosen and self._fits(higher, ways, allowed, most_ramp):
                    chosen = higher
                    break
            else:
                open_.remove(ways)
        return chosen

    def _covered(self, chosen: dict[Way, int], allowed: float) -> dict[Way, int]:
        """Choose fewer bytes where the window does not cover the round trip, the slower direction first."""
        lines = self._lines
        for boundary in range(lines.boundaries):
            pair = [(boundary, kind) for kind in (Direction.ACTIVATION, Direction.GRADIENT)]
            most = max(lines.window(boundary) * allowed, allowed)
            while lines.round_trip(boundary, self._names(chosen)) > most:
                lower = {way: rung for way in pair if (rung := self._lower(way, chosen, allowed)) is not None}
                if not lower:
                    break
                slower = max(lower, key=lambda way: lines.transfer(way, self._rungs[chosen[way]])[0])
                chosen = chosen | {slower: lower[slower]}
        return chosen

    def _lower(self, way: Way, chosen: Mapping[Way, int], allowed: float) -> int | None:
        """The most precise rung with fewer bytes that packing has time for."""
        now = self._bytes(chosen[way])
        fewer = [rung for rung in self._allowed[way] if self._bytes(rung) < now]
        return next((r for r in reversed(fewer) if self._packs({**chosen, way: r}, allowed)), None)

    def _fits(self, chosen: Mapping[Way, int], ways: Sequence[Way], allowed: float, most_ramp: float) -> bool:
        """Whether a plan within `allowed` is still within it after these tensors changed, with a ramp within
        `most_ramp`."""
        wire = sum(self._lines.transfer(way, self._rungs[chosen[way]])[0] for way in ways)
        in_time = wire <= allowed and self._packs(chosen, allowed)
        return in_time and self._lines.ramp(self._names(chosen)) <= most_ramp

    def _packs(self, chosen: Mapping[Way, int], allowed: float) -> bool:
        return max(self._lines.packs(self._names(chosen))) <= allowed

    def _of(self, way: Way, rung: int) -> int:
        """A tensor's rung if its direction has this one: the highest allowed rung up to it."""
        allowed = self._allowed[way]
        return max((step for step in allowed if step <= rung), default=allowed[0])

    def _bytes(self, rung: int) -> int:
        return codec_format(self._rungs[rung]).packed_bytes(self._lines.shape)

    def _names(self, chosen: Mapping[Way, int]) -> dict[Way, str]:
        return {way: self._rungs[rung] for way, rung in chosen.items()}

    def _ways(self) -> Iterator[list[Way]]:
        return iter(self._directions.values())
