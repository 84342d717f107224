"""Plan a codec for each link and direction: the most bits that hide behind compute. Pure.

Each boundary tensor serves its link's direction for a time that its codec sets. The *pace* is the time a
microbatch that no plan can beat: the slowest stage's compute, or the slowest direction at the fewest bits
that the run allows. Every other direction may take as long as the pace for free, so it gets the most bits
that fit: then one slow line costs the others no precision.

A plan holds for an epoch. `RateControl` decides when another is worth one, from times that the coordinator
itself measures: what a volunteer reports of its compute or its line can choose a worse plan only for as many
steps as `RateControl` watches. `RateHistory` is the record that a replay follows, whatever is measured then.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from node.config.schema import PipelineSection
from node.pipeline.floor import Network
from node.pipeline.step_history import StepHistory
from node.pipeline.window_plan import StepMeasures, Windows
from wire.codecs.formats import DitherFormat, TrellisFormat, codec_format
from wire.errors import ConfigError
from wire.spec import Direction

PLANNED = "auto"
"""The name of a codec that is planned."""
LADDER = ("2", "2.5", "3", "3.5", "4", "4.41", "5", "6", "7", "8")
"""Bits an element to choose from: `trellis-R` for activations, `dither-R` for their gradients."""
FIRST = 4.41
"""Until something is measured, a tensor gets this many bits an element, or the fewest that the run allows."""
CAUTION = 1.1
"""Count on transfers this much longer than measured."""
RISE = 2
"""Rungs that a direction may rise from one plan to the next, so that a line that is said to be fast is
measured before it carries much more."""
GAIN = 0.1
"""A plan is worth an epoch if a microbatch is expected to take this much less time,"""
MORE_BITS = 0.15
"""or if tensors have this much more bits on average at the same pace."""
WATCHED = 8
"""Steps by which a plan is judged."""
WORSE = 0.05
"""A plan that made steps this much longer is taken back."""

Way = tuple[int, Direction]
"""A boundary's number, and the kind of tensor."""


@dataclass(frozen=True, kw_only=True)
class CodecPlan:
    """The codecs of an epoch, by boundary, the first boundary first."""

    activations: tuple[str, ...]
    gradients: tuple[str, ...]

    @classmethod
    def first(cls, pipeline: PipelineSection, boundaries: int) -> "CodecPlan":
        """The plan of a run whose links were not measured yet."""
        there, back = first_codecs(pipeline)
        return cls(activations=(there,) * boundaries, gradients=(back,) * boundaries)

    @classmethod
    def from_json(cls, text: str) -> "CodecPlan":
        """Raises ConfigError for what `to_json` does not write."""
        try:
            given = json.loads(text)
            plan = cls(activations=tuple(given["activations"]), gradients=tuple(given["gradients"]))
            for name in (*plan.activations, *plan.gradients):
                codec_format(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"a recorded plan of codecs cannot be read ({error})") from None
        return plan

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def boundaries(self) -> int:
        return len(self.activations)

    def name(self, way: Way) -> str:
        """The codec of a tensor. KeyError for a kind that crosses no boundary."""
        boundary, direction = way
        return {Direction.ACTIVATION: self.activations, Direction.GRADIENT: self.gradients}[direction][
            boundary
        ]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """What crosses a pipeline's links."""

    measures: StepMeasures
    """Times and rates. Its bytes do not count."""
    chunks: int
    shape: tuple[int, ...]
    """Of a boundary tensor."""
    windows: Windows
    """The widest that stages have memory for, as `node.pipeline.schedule.schedule` takes them."""
    microbatch_seconds: float = math.inf
    """Of the newest steps, by the coordinator's clock: no stage computes for longer."""

    @property
    def stages(self) -> int:
        return len(self.measures.forward)

    @property
    def boundaries(self) -> int:
        return self.stages * self.chunks - 1 + (self.measures.head_share is not None)

    @property
    def compute_seconds(self) -> float:
        """Of the slowest stage, a microbatch."""
        stages = zip(self.measures.forward, self.measures.backward, strict=True)
        return min(self.microbatch_seconds, max(forward + backward for forward, backward in stages))

    def ends(self, way: Way) -> tuple[int, int]:
        """The stage that sends, and the one that receives."""
        boundary, direction = way
        low, high = boundary % self.stages, (boundary + 1) % self.stages
        return (low, high) if direction is Direction.ACTIVATION else (high, low)

    def ways(self) -> list[Way]:
        """Everything that crosses a link, by boundary."""
        kinds = (Direction.ACTIVATION, Direction.GRADIENT)
        return [(j, kind) for j in range(self.boundaries) for kind in kinds if self.stages > 1]

    def transfer(self, way: Way, codec: str) -> tuple[float, float]:
        """Seconds for which one tensor occupies its link, and its latency, both with `CAUTION`."""
        network = Network(self.stages, self.measures.links)
        passage = network.passage(*self.ends(way), codec_format(codec).packed_bytes(self.shape))
        return CAUTION * max(passage.seconds.values(), default=0.0), CAUTION * passage.latency

    def busy(self, codecs: Mapping[Way, str]) -> dict[tuple[int, int], float]:
        """Seconds a microbatch that each direction of a link is occupied."""
        found: dict[tuple[int, int], float] = {}
        for way, codec in codecs.items():
            ends = self.ends(way)
            found[ends] = found.get(ends, 0.0) + self.transfer(way, codec)[0]
        return found

    def round_trip(self, boundary: int, codecs: Mapping[Way, str]) -> float:
        """Seconds from sending an activation until the gradient could be back, without compute."""
        there, back = (
            self.transfer((boundary, kind), codecs[boundary, kind])
            for kind in (Direction.ACTIVATION, Direction.GRADIENT)
        )
        return sum(there) + sum(back)

    def window(self, boundary: int) -> int:
        """Extra microbatches that may be on their way over this boundary."""
        if self.chunks > 1:
            return max(self.windows, default=0)
        return self.windows[boundary] if boundary < len(self.windows) else 0


def ladder(min_bits: float) -> tuple[str, ...]:
    """The codecs of activations to choose from, fewest bits first; `of_gradients` gives those of gradients.
    ConfigError if no rate is left."""
    rungs = tuple(f"{TrellisFormat.PREFIX}{rate}" for rate in LADDER if float(rate) >= min_bits)
    if not rungs:
        raise ConfigError(f"pipeline.min_bits is {min_bits:g}; it must be at most {LADDER[-1]}")
    return rungs


def of_gradients(rung: str) -> str:
    """The codec of gradients with as many bits as this one of activations: one whose error has no mean."""
    return rung.replace(TrellisFormat.PREFIX, DitherFormat.PREFIX)


def first_codecs(pipeline: PipelineSection) -> tuple[str, str]:
    """The codecs of activations and gradients until others are planned; the run file's if none ever are."""
    if not pipeline.plans_codecs:
        return pipeline.forward_codec, pipeline.backward_codec
    first = ladder(max(FIRST, pipeline.min_bits))[0]
    return first, of_gradients(first)


def pace(lines: Lines, plan: CodecPlan) -> float:
    """The least seconds a microbatch with these codecs: of compute, or of the busiest direction."""
    busy = lines.busy({way: plan.name(way) for way in lines.ways()})
    return max((lines.compute_seconds, *busy.values()))


def plan_codecs(lines: Lines, rungs: Sequence[str], most: Mapping[Way, int] | None = None) -> CodecPlan:
    """For each direction the highest rung that costs no time; the lowest where even that is too slow.

    Args:
        rungs: codecs to choose from, fewest bits first.
        most: the highest rung that a tensor may get; any where it is not named.
    """
    ways, limits = lines.ways(), most or {}
    chosen = dict.fromkeys(ways, 0)

    def codecs() -> dict[Way, str]:
        return {way: rungs[rung] for way, rung in chosen.items()}

    allowed = max((lines.compute_seconds, *lines.busy(codecs()).values()))
    by_ends: dict[tuple[int, int], list[Way]] = {}
    for way in ways:
        by_ends.setdefault(lines.ends(way), []).append(way)
    for sharing in by_ends.values():
        # All tensors of a direction rise together, so that none of them pays for the others.
        for rung in range(1, len(rungs)):
            wanted = {way: rungs[min(rung, limits.get(way, rung))] for way in sharing}
            if sum(lines.transfer(way, codec)[0] for way, codec in wanted.items()) > allowed:
                break
            chosen.update({way: min(rung, limits.get(way, rung)) for way in sharing})
    for boundary in range(lines.boundaries if ways else 0):
        # What the window must cover, the slower of both directions first.
        pair = [(boundary, kind) for kind in (Direction.ACTIVATION, Direction.GRADIENT)]
        covered = lines.window(boundary) * allowed
        while lines.round_trip(boundary, codecs()) > max(covered, allowed) and any(chosen[w] for w in pair):
            slower = max(pair, key=lambda way: (chosen[way] > 0, lines.transfer(way, rungs[chosen[way]])[0]))
            chosen[slower] -= 1
    found = codecs()
    return CodecPlan(
        activations=tuple(codec for (_, kind), codec in found.items() if kind is Direction.ACTIVATION),
        gradients=tuple(
            of_gradients(codec) for (_, kind), codec in found.items() if kind is Direction.GRADIENT
        ),
    )


class RateControl:
    """When a run's epoch ends for other codecs. Of one number of stages: make another for others."""

    def __init__(self, rungs: Sequence[str], current: CodecPlan) -> None:
        """
        Args:
            rungs: as for `plan_codecs`; `current` holds no others.
            current: the plan in use.
        """
        self.current = current
        self._rungs = tuple(rungs)
        self._before: tuple[CodecPlan, float] | None = None
        """The plan before, and its seconds a microbatch."""
        self._caps: dict[Way, int] = {}
        """Rungs that a rise beyond was taken back from."""
        self._seconds: list[float] = []

    def step_done(self, lines: Lines, microbatch_seconds: float) -> CodecPlan | None:
        """A step with the current plan took this long; the plan for a new epoch, where that is worth it.

        Args:
            microbatch_seconds: step time over microbatches, by the coordinator's clock.
        """
        self._seconds.append(microbatch_seconds)
        if len(self._seconds) < WATCHED:
            return None
        # The first step of an epoch compiles, and finds its links' rates.
        usual = median(self._seconds[1:])
        self._seconds.clear()
        if self._before is not None:
            (plan, seconds), self._before = self._before, None
            if usual > (1 + WORSE) * seconds and self._cap(lines, plan):
                return self._change(plan, None)
        lines = replace(lines, microbatch_seconds=min(usual, lines.microbatch_seconds))
        most = {way: self._highest(way) for way in lines.ways()}
        found = plan_codecs(lines, self._rungs, most)
        now, then = pace(lines, self.current), pace(lines, found)
        faster = then < (1 - GAIN) * now
        finer = then <= now and self._bits(lines, found) >= (1 + MORE_BITS) * self._bits(lines, self.current)
        return self._change(found, usual) if faster or finer else None

    def _change(self, plan: CodecPlan, seconds: float | None) -> CodecPlan:
        """Take another plan. `seconds`: a microbatch's with the present one, to compare with, if at all."""
        self._before = None if seconds is None else (self.current, seconds)
        self.current = plan
        return plan

    def _cap(self, lines: Lines, plan: CodecPlan) -> bool:
        """Never again rise above `plan` where the current one does; whether there is such a place."""
        risen = [way for way in lines.ways() if self._rung(self.current, way) > self._rung(plan, way)]
        self._caps.update({way: self._rung(plan, way) for way in risen})
        return bool(risen)

    def _highest(self, way: Way) -> int:
        top = min(self._rung(self.current, way) + RISE, len(self._rungs) - 1)
        return min(top, self._caps.get(way, top))

    def _rung(self, plan: CodecPlan, way: Way) -> int:
        boundary, direction = way
        if direction is Direction.ACTIVATION:
            return self._rungs.index(plan.activations[boundary])
        return [of_gradients(rung) for rung in self._rungs].index(plan.gradients[boundary])

    def _bits(self, lines: Lines, plan: CodecPlan) -> int:
        """Packed bytes of one microbatch over all boundaries."""
        return sum(codec_format(plan.name(way)).packed_bytes(lines.shape) for way in lines.ways())


class RateHistory(StepHistory[CodecPlan]):
    """Which plan each step has. With other stages there is no step to repeat bit for bit: then `instead`."""

    def changed(self, step: int, plan: CodecPlan) -> "RateHistory":
        """With another plan from `step` on, the first that no node has begun.

        Raises ConfigError for a step that has a later plan: a replay must not rewrite what has run.
        """
        if step < self.newest:
            raise ConfigError(f"step {step} is before the newest plan on record, of step {self.newest}")
        return self.instead(step, plan)
