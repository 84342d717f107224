"""Decides when other codecs are worth a new epoch. All functions are pure.

`RateControl` uses times that the coordinator itself measures. So a false report of compute, packing or a line
can lead to a worse plan only for as many steps as `RateControl` watches. A replay follows the plans on
record, whatever is measured then.
"""

from collections.abc import Sequence
from dataclasses import replace

from node.tuning.codec_plan import FREE, CodecPlan, Lines, Way, of_gradients, plan_codecs, seconds_of
from node.tuning.decisions import WORSE, Trial, pays
from wire.codecs.formats import codec_format
from wire.spec import Direction

RISE = 1.5
"""From one plan to the next, a tensor's bytes may grow by this factor at most, so that a line reported as
fast is measured before it carries much more."""
MORE_BITS = 0.15
"""A plan that takes hardly longer is worth an epoch if tensors have this much more bits of precision on
average."""


class RateControl:
    """Decides when a run's epoch ends for other codecs. Each number of stages needs an object of its own."""

    def __init__(self, rungs: Sequence[str], current: CodecPlan) -> None:
        """
        rungs: as for `plan_codecs`. `current` contains no other codecs.
        current: the plan in use.
        """
        self._rungs = tuple(rungs)
        self._trial = Trial(current)
        self._banned: set[tuple[Way, int]] = set()
        """Rungs from which a tensor was taken back, and higher rungs of the same family."""

    @property
    def current(self) -> CodecPlan:
        return self._trial.current

    def step_done(self, lines: Lines, microbatch_seconds: float) -> CodecPlan | None:
        """Record a step with the current plan. Returns the plan for a new epoch if it is worth one.

        Args:
            microbatch_seconds: step time divided by microbatches, by the coordinator's clock.
        """
        usual = self._trial.step_done(microbatch_seconds)
        if usual is None:
            return None
        if (before := self._trial.judged()) is not None:
            plan, seconds = before
            if usual > (1 + WORSE) * seconds and self._ban(lines, plan):
                return self._change(plan, None)
        lines = replace(lines, microbatch_seconds=min(usual, lines.microbatch_seconds)).believed(self.current)
        rungs = {way: self._rung(self.current, way) for way in lines.ways()}
        sizes = [codec_format(rung).packed_bytes(lines.shape) for rung in self._rungs]

        def may(way: Way, rung: int) -> bool:
            now = rungs[way]
            return rung == now or (sizes[rung] <= RISE * sizes[now] and (way, rung) not in self._banned)

        planned = plan_codecs(lines, self._rungs, may)
        now, then = seconds_of(lines, self.current), seconds_of(lines, planned)
        faster = pays(now - then, now, cost=0.0, steps_left=1)
        finer = then <= (1 + FREE) * now and self._bits(lines, planned) >= (1 + MORE_BITS) * self._bits(
            lines, self.current
        )
        return self._change(planned, usual) if faster or finer else None

    def _change(self, plan: CodecPlan, seconds: float | None) -> CodecPlan:
        """Use another plan. `seconds` are a microbatch's with the present plan; None if they are not to be
        compared."""
        self._trial.change(plan, seconds)
        return plan

    def _ban(self, lines: Lines, plan: CodecPlan) -> bool:
        """Never again rise above `plan` where the current plan does. Returns whether it rises anywhere."""
        rises = False
        for way in lines.ways():
            now, before = self._rung(self.current, way), self._rung(plan, way)
            sizes = [codec_format(self._rungs[rung]).packed_bytes(lines.shape) for rung in (before, now)]
            if now > before or sizes[1] > sizes[0]:
                rises = True
                alike = codec_format(self._rungs[now]).family
                above = (
                    r
                    for r in range(before + 1, len(self._rungs))
                    if codec_format(self._rungs[r]).family == alike
                )
                self._banned.update((way, rung) for rung in (now, *above))
        return rises

    def _rung(self, plan: CodecPlan, way: Way) -> int:
        boundary, direction = way
        if direction is Direction.ACTIVATION:
            return self._rungs.index(plan.activations[boundary])
        return [of_gradients(rung) for rung in self._rungs].index(plan.gradients[boundary])

    def _bits(self, lines: Lines, plan: CodecPlan) -> float:
        """The bits of precision, summed over all tensors of a microbatch."""
        return sum(codec_format(self._rungs[self._rung(plan, way)]).precision for way in lines.ways())
