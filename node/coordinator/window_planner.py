"""Plans links' windows from what steps cost, beside the run."""

import asyncio
from collections.abc import Callable, Sequence

from node.config.schema import RunConfig
from node.coordinator.epoch import Epoch
from node.coordinator.stage_assignment import Candidate
from node.pipeline.memory import most_held
from node.pipeline.placement import chunks_of, head_share, hops
from node.pipeline.window_plan import Windows, measured, plan_windows
from node.telemetry.events import StepCosts
from wire.telemetry import LinkReport


class WindowPlanner:
    """Takes what steps cost, on the event loop; only the newest counts."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int,
        link_report: Callable[[int, int], LinkReport | None],
        use: Callable[[int, Windows], None],
    ) -> None:
        """
        Args:
            samples: of one pass over the text.
            link_report: the newest report of (source, target), if there is one.
            use: is told of each plan, with the number of its epoch.
        """
        self._config = config
        self._samples = samples
        self._link_report = link_report
        self._use = use
        self._measured = asyncio.Event()
        self._work: tuple[int, Callable[[], Windows]] = (0, tuple)

    def step_done(self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts) -> None:
        """A step of `epoch`, which these nodes host, has cost this."""
        config, stages = self._config, len(nodes)
        chunks, share = chunks_of(config, stages), head_share(config, stages)
        current = epoch.planned_windows or (0,) * hops(config, stages)
        measures = measured(costs, self._link_report, chunks, config.microbatches, share)
        if measures is None:
            return

        def work() -> Windows:
            memory, devices = [node.memory_bytes for node in nodes], [node.devices for node in nodes]
            return plan_windows(
                measures,
                chunks=chunks,
                microbatches=config.microbatches,
                most_held=most_held(config, stages, memory, self._samples, devices),
                current=current,
            )

        self._work = epoch.number, work
        self._measured.set()

    async def run(self) -> None:
        """Plan until cancelled."""
        while True:
            await self._measured.wait()
            self._measured.clear()
            epoch, work = self._work
            self._use(epoch, await asyncio.to_thread(work))
