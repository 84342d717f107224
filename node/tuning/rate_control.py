"""Decides when other codecs are worth a new epoch. Pure.

`RateControl` decides when another plan is worth an epoch, from times that the coordinator itself measures:
what a volunteer reports of its compute, its packing or its line can choose a worse plan only for as many
steps as `RateControl` watches. A replay follows the plans on record, whatever is measured then.
"""

from collections.abc import Sequence
from dataclasses import replace

from node.tuning.codec_plan import FREE, CodecPlan, Lines, Way, plan_codecs, seconds_of
from node.tuning.codec_times import of_gradients
from node.tuning.decisions import WORSE, Trial, pays
from wire.codecs.formats import codec_format
from wire.spec import Direction

RISE = 1.5
"""A tensor's bytes may grow by this factor from one plan to the next, so that a line reported as fast is
measured before it carries much more."""
MORE_BITS = 0.15
"""A plan that takes hardly longer is worth an epoch if tensors have this much more bits of precision on
average."""


class RateControl:
    """When a run's epoch ends for other codecs. Of one number of stages: make another for others."""

    def __init__(self, rungs: Sequence[str], current: CodecPlan) -> None:
        """
        Args:
            rungs: as for `plan_codecs`; `current` holds no others.
            current: the plan in use.
        """
        self._rungs = tuple(rungs)
        self._trial = Trial(current)
        self._banned: set[tuple[Way, int]] = set()
        """Rungs that a tensor was taken back from, and those above them that pack in the same way."""

    @property
    def current(self) -> CodecPlan:
        """The plan in use."""
        return self._trial.current

    def step_done(self, lines: Lines, microbatch_seconds: float) -> CodecPlan | None:
        """A step with the current plan took this long; the plan for a new epoch, where that is worth it.

        Args:
            microbatch_seconds: step time over microbatches, by the coordinator's clock.
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

        found = plan_codecs(lines, self._rungs, may)
        now, then = seconds_of(lines, self.current), seconds_of(lines, found)
        faster = pays(now - then, now, cost=0.0, steps_left=1)
        finer = then <= (1 + FREE) * now and self._bits(lines, found) >= (1 + MORE_BITS) * self._bits(
            lines, self.current
        )
        return self._change(found, usual) if faster or finer else None

    def _change(self, plan: CodecPlan, seconds: float | None) -> CodecPlan:
        """Take another plan. `seconds`: a microbatch's with the present one, to compare with, if at all."""
        self._trial.change(plan, seconds)
        return plan

    def _ban(self, lines: Lines, plan: CodecPlan) -> bool:
        """Never again rise above `plan` where the current one does; whether there is such a place."""
        found = False
        for way in lines.ways():
            now, before = self._rung(self.current, way), self._rung(plan, way)
            sizes = [codec_format(self._rungs[rung]).packed_bytes(lines.shape) for rung in (before, now)]
            if now > before or sizes[1] > sizes[0]:
                found = True
                alike = codec_format(self._rungs[now]).family
                above = (
                    r
                    for r in range(before + 1, len(self._rungs))
                    if codec_format(self._rungs[r]).family == alike
                )
                self._banned.update((way, rung) for rung in (now, *above))
        return found

    def _rung(self, plan: CodecPlan, way: Way) -> int:
        boundary, direction = way
        if direction is Direction.ACTIVATION:
            return self._rungs.index(plan.activations[boundary])
        return [of_gradients(rung) for rung in self._rungs].index(plan.gradients[boundary])

    def _bits(self, lines: Lines, plan: CodecPlan) -> float:
        """Of precision, over all tensors of a microbatch."""
        return sum(codec_format(self._rungs[self._rung(plan, way)]).precision for way in lines.ways())
