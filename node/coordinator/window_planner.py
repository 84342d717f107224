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


class WindowPlanner:
    """Takes what steps cost, on the event loop; only the newest counts."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int,
        link_report: Callable[[Place, Place], LinkReport | None],
        use: Callable[[int, Windows], None],
    ) -> None:
        """
        Args:
            samples: of one pass over the text.
            link_report: the newest report of (source, target), if there is one.
            use: receives each plan, with the number of its epoch.
        """
        self._config = config
        self._samples = samples
        self._link_report = link_report
        self._use = use
        self._measured = asyncio.Event()
        self._work: tuple[int, Callable[[], Windows]] = (0, tuple)

    def step_done(self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts) -> None:
        """A step of `epoch`, which these nodes host, has cost this."""
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
                return
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

        self._work = epoch.number, work
        self._measured.set()

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
            epoch, work = self._work
            self._use(epoch, await asyncio.to_thread(work))
