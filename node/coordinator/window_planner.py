"""Plans the windows of each row's links from what steps cost."""

import asyncio
import functools
from collections.abc import Callable, Sequence

from node.config.schema import RunConfig
from node.coordinator.epoch import Epoch
from node.coordinator.stage_assignment import Candidate
from node.pipeline.memory import most_held
from node.pipeline.placement import chunks_of, head_share, hops
from node.pipeline.window_plan import StepMeasures, Windows, measured, plan_windows
from node.telemetry.costs import Place, row_costs
from node.telemetry.events import StepCosts
from wire.telemetry import LinkReport

PLAN_SECONDS = 1.0
"""Between two plans: a plan takes longer to make than a step of milliseconds."""


class WindowPlanner:
    """Takes what steps cost, on the event loop; only the newest counts."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int,
        link_report: Callable[[Place, Place], LinkReport | None],
        use: Callable[[int, Windows], None],
        pause: float = PLAN_SECONDS,
    ) -> None:
        """
        Args:
            samples: of one pass over the text.
            link_report: the newest report of (source, target), if there is one.
            use: receives each plan, with the number of its epoch.
            pause: seconds between the end of a plan and the next one.
        """
        self._config = config
        self._samples = samples
        self._link_report = link_report
        self._use = use
        self._pause = pause
        self._measured = asyncio.Event()
        self._newest: tuple[Epoch, Sequence[Candidate], StepCosts] | None = None

    def step_done(self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts) -> None:
        """A step of `epoch`, which these nodes host, has cost this."""
        self._newest = epoch, nodes, costs
        self._measured.set()

    def _work(
        self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts
    ) -> Callable[[], Windows] | None:
        """What plans the windows, for a thread; None if nobody has measured the step."""
        config, stages = self._config, epoch.stages
        chunks, links = chunks_of(config, stages), hops(config, stages)
        current = epoch.planned_windows or (0,) * (epoch.rows * links)
        length = config.microbatches // config.pipeline.groups
        plans: list[Callable[[], Windows]] = []
        for replica, groups in enumerate(epoch.groups):
            microbatches = length * len(groups)
            measures = measured(
                row_costs(costs, replica),
                functools.partial(self._report_of, replica),
                chunks,
                microbatches,
                head_share(config, stages),
            )
            if measures is None:
                return None
            row = nodes[replica * stages : (replica + 1) * stages]
            plans.append(
                functools.partial(
                    self._plan_row,
                    row,
                    measures,
                    microbatches,
                    current[replica * links : (replica + 1) * links],
                )
            )

        def work() -> Windows:
            return tuple(window for plan in plans for window in plan())

        return work

    def _report_of(self, replica: int, source: int, target: int) -> LinkReport | None:
        return self._link_report(Place(replica, source), Place(replica, target))

    def _plan_row(
        self, nodes: Sequence[Candidate], measures: StepMeasures, microbatches: int, current: Windows
    ) -> Windows:
        """The windows of one row's links."""
        config, stages = self._config, len(nodes)
        memory, devices = [node.memory_bytes for node in nodes], [node.devices for node in nodes]
        return plan_windows(
            measures,
            chunks=chunks_of(config, stages),
            microbatches=microbatches,
            most_held=most_held(config, stages, memory, self._samples, devices),
            current=current,
        )

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            await self._measured.wait()
            self._measured.clear()
            assert self._newest is not None, "it is set before the event"
            epoch, nodes, costs = self._newest
            if (work := self._work(epoch, nodes, costs)) is not None:
                self._use(epoch.number, await asyncio.to_thread(work))
                await asyncio.sleep(self._pause)
