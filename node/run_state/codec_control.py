"""Which codecs the links of an epoch use, if the run file leaves that to the coordinator. Pure.

A repeated step uses the codecs with which it first ran, whatever is measured since. It gets others only with
another number of stages, which changes the step's bits anyway.
"""

import functools
from collections.abc import Callable, Sequence

from node.config.schema import RunConfig
from node.run_state.actions import Action, RecordPlan
from node.run_state.epoch import Epoch
from node.schedule.placement import boundaries
from node.tuning.codec_plan import CodecPlan, Lines
from node.tuning.decisions import StepHistory
from node.tuning.rate_control import RateControl
from wire.codecs.formats import ladder


class CodecControl:
    """The codec plans of a run's steps: recorded plans, and the plan with which the next epoch begins."""

    def __init__(
        self,
        rungs: Sequence[str],
        first: Callable[[int], CodecPlan],
        boundaries: Callable[[int], int],
        history: StepHistory[CodecPlan],
        newest: int,
    ) -> None:
        """
        Args:
            rungs: as for `plan_codecs`; empty if the run's codecs are not planned.
            first: number of boundaries -> the plan to use until links are measured.
            boundaries: number of stages -> boundaries between chunks.
            history: the recorded plans.
            newest: the first step that has never been committed.
        """
        self._rungs = tuple(rungs)
        self._first = first
        self._boundaries = boundaries
        self.history = history
        self._newest = newest
        self._wanted: CodecPlan | None = None
        self._rates: RateControl | None = None
        self._hosts: tuple[str, ...] = ()

    def begin(self, epoch: Epoch) -> list[Action]:
        """Give the epoch, which is about to restore, the codecs of its step. They are recorded before a node
        receives them."""
        if not self._rungs:
            return []
        step, boundaries = epoch.step, self._boundaries(epoch.stages)
        wanted, self._wanted = self._wanted, None
        plan = self.history.at(step)
        if plan is None or plan.boundaries != boundaries:
            plan = self._first(boundaries)
            self.history = self.history.instead(step, plan)
        elif wanted is not None and wanted.boundaries == boundaries and not self._repeats(step):
            plan = wanted
            self.history = self.history.instead(step, plan)
        else:
            epoch.use_codecs(plan)
            return []
        epoch.use_codecs(plan)
        return [RecordPlan(step=step, plan=plan)]

    def step_done(self, step: int) -> None:
        """A step was committed and applied."""
        self._newest = max(self._newest, step + 1)

    def measured(self, epoch: Epoch, lines: Lines, seconds: float) -> None:
        """The newest step of this epoch took `seconds` per microbatch."""
        plan = epoch.codecs
        if plan is None or self._repeats(epoch.step) or lines.boundaries != plan.boundaries:
            return
        if self._rates is None or self._rates.current != plan or self._hosts != epoch.hosts:
            # The machines or lines have changed, so earlier measurements do not apply.
            self._rates, self._hosts = RateControl(self._rungs, plan), epoch.hosts
        if self._wanted is None:
            self._wanted = self._rates.step_done(lines, seconds)

    def recorded_change(self, epoch: Epoch, step: int) -> bool:
        """Whether this step ran before with other codecs than this epoch's."""
        known = None if epoch.codecs is None else self.history.at(step)
        return known is not None and known != epoch.codecs

    def may_gain(self, epoch: Epoch, step: int) -> bool:
        """Whether other codecs justify a new epoch that begins with this step."""
        return epoch.codecs is not None and self._wanted is not None and not self._repeats(step)

    def _repeats(self, step: int) -> bool:
        return step < max(self._newest, self.history.newest)


def codec_control(config: RunConfig, history: StepHistory[CodecPlan], newest: int) -> CodecControl:
    """Create the control for a run; arguments are as for `CodecControl`."""
    pipeline = config.pipeline
    rungs = ladder(pipeline.min_bits) if pipeline.plans_codecs else ()
    first = functools.partial(CodecPlan.first, pipeline)
    return CodecControl(rungs, first, functools.partial(boundaries, config), history, newest)


def no_codecs(history: StepHistory[CodecPlan], newest: int) -> CodecControl:
    """Create the control for a run whose codecs are those of its run file."""
    nothing = CodecPlan(activations=(), gradients=())
    return CodecControl((), lambda count: nothing, lambda stages: 0, history, newest)
