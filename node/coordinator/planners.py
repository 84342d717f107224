"""Re-plans link windows and codecs from the measured cost of steps.

It runs on the event loop. Only the newest step counts, and longer work runs on a thread.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from node.config.schema import RunConfig
from node.run_state.epoch import Epoch
from node.run_state.stage_assignment import Candidate
from node.schedule.floor import LinkRate
from node.schedule.placement import boundary_shapes, chunks_of, head_share, hops, slices_of
from node.schedule.schedule import held_activations, schedule
from node.telemetry.costs import row_costs
from node.telemetry.events import Event, StepCosts, WindowsPlanned
from node.tuning.codec_plan import Lines, PackingTimes, slowest_packing
from node.tuning.memory import most_held
from node.tuning.storage_choice import stage_configs
from node.tuning.window_plan import StepMeasures, WindowControl, Windows, combined, measured, plan_windows
from wire.figures import Place
from wire.telemetry import CodecTimes

BUSY = 0.5
"""A link's measured rate counts if tensors keep the link busy for this share of a step. Other links count as
fast, but their tensors grow at most by `rate_control.RISE` from one plan to the next."""
TELLS_SECONDS = 0.02
"""A link's measured rate also counts if one tensor takes this long: late acknowledgements distort shorter
transfers."""
MOST_NODES = 4096
"""The most nodes whose packing times are kept, newest first."""
PLAN_SECONDS = 1.0
"""The seconds between two plans. Making a plan takes longer than a step of milliseconds."""
PAUSE_TIMES = 9.0
"""The pause after a plan, at least, as a multiple of the time that making it took. A plan of many stages
takes seconds on a core."""


Changed = tuple[Windows, list[WindowsPlanned]]


class LinkPlanner:
    """Measures the cost of a step row by row, and plans the windows and codecs of links if the run file
    leaves them to the coordinator. It runs on the event loop, and only the newest step counts."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int,
        line: Callable[[Place], LinkRate],
        use_windows: Callable[[int, Windows], None],
        use_lines: Callable[[int, Lines, float], None],
        emit: Callable[[Event], None],
        pause: float = PLAN_SECONDS,
    ) -> None:
        """
        Args:
            samples: the number of samples in one pass over the text.
            line: returns the most that the machine at a place was seen to send and receive.
            use_windows: receives each plan, with the number of its epoch.
            use_lines: receives the input for planning codecs, with the number of its epoch and the seconds of
                a microbatch, or of a slice, that all lines imply.
            emit: receives a `WindowsPlanned` for each row whose windows change.
            pause: the least seconds between the end of a plan of windows and the next one.
        """
        self._config = config
        self._samples = samples
        self._line = line
        self._use_windows = use_windows
        self._use_lines = use_lines
        self._emit = emit
        self._pause = pause
        self._due = -math.inf
        """When the next plan of windows may be made."""
        self._measured = asyncio.Event()
        self._newest: tuple[Epoch, Sequence[Candidate], StepCosts] | None = None
        self._control: tuple[tuple[int, bool], WindowControl] | None = None
        """The windows of the newest epoch and kind of step. Exact steps and rounds have different windows."""
        self._packing: dict[str, PackingTimes] = {}
        self._width: tuple[int, int] = (0, 0)
        """The newest epoch's number, and the widest window for which its stages have memory."""

    def heard(self, node_id: str, message: CodecTimes) -> None:
        """A node reports how long packing takes."""
        self._packing.pop(node_id, None)
        self._packing[node_id] = PackingTimes(message.times)
        if len(self._packing) > MOST_NODES:
            del self._packing[next(iter(self._packing))]

    def step_done(self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts) -> None:
        self._newest = epoch, nodes, costs
        self._measured.set()

    async def run(self) -> None:
        while True:
            await self._measured.wait()
            if not self._config.pipeline.plans_codecs:
                await asyncio.sleep(max(0.0, self._due - time.monotonic()))
            await self.plan()

    async def plan(self) -> None:
        """Plan by the newest step."""
        self._measured.clear()
        assert self._newest is not None, "called after a step"
        pipeline, (epoch, nodes, costs) = self._config.pipeline, self._newest
        began = time.monotonic()
        plans_windows = pipeline.window == "auto" and began >= self._due
        if not (plans_windows or pipeline.plans_codecs) or (rows := self._rows(epoch, costs)) is None:
            return
        number, stages = epoch.number, epoch.stages
        held = [nodes[row * stages :][:stages] for row in range(epoch.rows)]
        if pipeline.plans_codecs:
            lines = self._lines(epoch, held, rows, costs)
            self._use_lines(number, *await asyncio.to_thread(lines))
        if plans_windows:
            changed = await asyncio.to_thread(self._windows(epoch, held, rows, costs))
            if changed is not None:
                windows, changes = changed
                self._use_windows(number, windows)
                for change in changes:
                    self._emit(change)
            ended = time.monotonic()
            self._due = ended + max(self._pause, PAUSE_TIMES * (ended - began))

    def _rows(self, epoch: Epoch, costs: StepCosts) -> list[StepMeasures] | None:
        """The measured cost of each row; None if the step was not measured."""
        chunks, share = chunks_of(self._config, epoch.stages), head_share(self._config, epoch.stages)
        rows: list[StepMeasures] = []
        for replica, groups in enumerate(epoch.groups):
            measures = measured(
                row_costs(costs, replica),
                chunks,
                self._passes(len(groups)),
                share,
                functools.partial(self._line_of, replica),
            )
            if measures is None:
                return None
            rows.append(measures)
        return rows

    def _windows(
        self,
        epoch: Epoch,
        held: Sequence[Sequence[Candidate]],
        rows: Sequence[StepMeasures],
        costs: StepCosts,
    ) -> Callable[[], Changed | None]:
        """A function for a thread. It returns the windows of all rows if they change, with an event for each
        row whose windows change."""
        config, links = self._config, hops(self._config, epoch.stages)
        current = epoch.planned_windows or (0,) * (epoch.rows * links)
        configs = stage_configs(config, epoch.storages)
        microbatches = [self._group_length * len(groups) for groups in epoch.groups]
        is_round = config.is_round(costs.step - 1)
        if is_round:
            # A row's local steps are consecutive, and each fills and drains the pipeline.
            microbatches = [self._group_length // config.sync.every] * epoch.rows
        key = epoch.number, is_round
        if self._control is None or self._control[0] != key:
            of_others = self._control is not None and self._control[0][0] == epoch.number
            is_known = bool(epoch.planned_windows) and not of_others
            self._control = key, WindowControl(current, is_known=is_known)
        control = self._control[1]

        def parts(windows: Windows) -> list[Windows]:
            return [windows[replica * links : (replica + 1) * links] for replica in range(epoch.rows)]

        def work() -> Changed | None:
            planned_by: Sequence[StepMeasures] = rows

            def plan(measures: Sequence[StepMeasures]) -> Windows:
                nonlocal planned_by
                planned_by = measures
                planned = [
                    plan_windows(
                        row,
                        chunks=chunks_of(config, epoch.stages),
                        microbatches=count,
                        most_held=self._most_held(nodes, configs),
                        current=before,
                        slices=self._slices,
                    )
                    for nodes, row, count, before in zip(
                        held, measures, microbatches, parts(current), strict=True
                    )
                ]
                return tuple(width for row in planned for width in row)

            windows = control.step_done(rows, costs.seconds, plan)
            if windows is None:
                return None
            rows_before_after = zip(parts(current), parts(windows), planned_by, strict=True)
            return windows, [
                windows_planned(epoch.number, costs.step, replica, measures, after)
                for replica, (before, after, measures) in enumerate(rows_before_after)
                if before != after
            ]

        return work

    def _lines(
        self,
        epoch: Epoch,
        held: Sequence[Sequence[Candidate]],
        rows: Sequence[StepMeasures],
        costs: StepCosts,
    ) -> Callable[[], tuple[Lines, float]]:
        """A function for a thread. It returns the input for planning codecs, and the seconds of a
        microbatch."""
        config, stages = self._config, epoch.stages
        counts = [self._passes(len(groups)) for groups in epoch.groups]
        shown = [
            where_shown(measures, row_costs(costs, replica), counts[replica])
            for replica, measures in enumerate(rows)
        ]
        configs = stage_configs(config, epoch.storages)
        nothing = PackingTimes()
        packing = tuple(
            slowest_packing([self._packing.get(row[stage].node_id, nothing) for row in held])
            for stage in range(stages)
        )

        def work() -> tuple[Lines, float]:
            if self._width[0] != epoch.number:
                widest = min(self._widest(row, max(counts), configs) for row in held)
                self._width = epoch.number, widest
            shapes = boundary_shapes(config)
            lines = Lines(
                measures=slowest(shown),
                chunks=chunks_of(config, stages),
                shape=shapes[len(shapes) // 2],
                windows=(self._width[1],) * hops(config, stages),
                microbatches=max(counts),
                packing=packing,
            )
            return lines, costs.seconds / max(counts)

        return work

    @property
    def _group_length(self) -> int:
        """The microbatches of a gradient group."""
        return self._config.microbatches // self._config.pipeline.groups

    @property
    def _slices(self) -> int:
        return slices_of(self._config)

    def _passes(self, groups: int) -> int:
        """The microbatches, or slices, of this many groups."""
        return self._slices * self._group_length * groups

    def _line_of(self, replica: int, stage: int) -> LinkRate:
        return self._line(Place(replica, stage))

    def _most_held(self, nodes: Sequence[Candidate], configs: Sequence[RunConfig] | None) -> Sequence[int]:
        """The chunk activations for which each stage of a row has memory."""
        memory, devices = [node.memory_bytes for node in nodes], [node.devices for node in nodes]
        return most_held(self._config, len(nodes), memory, self._samples, devices, configs)

    def _widest(
        self, nodes: Sequence[Candidate], microbatches: int, configs: Sequence[RunConfig] | None
    ) -> int:
        """The widest window, equal on all links, for which these stages have memory; or the run file's.

        Args:
            microbatches: the microbatches, or slices, of a step.
        """
        config, stages = self._config, len(nodes)
        if config.pipeline.window != "auto":
            return config.pipeline.window
        most = self._most_held(nodes, configs)
        head_first = head_share(config, stages) is not None
        low, high = 0, microbatches
        while low < high:
            width = (low + high + 1) // 2
            windows = (width,) * hops(config, stages)
            orders = schedule(
                stages,
                chunks_of(config, stages),
                microbatches // self._slices,
                windows,
                head_first=head_first,
                slices=self._slices,
            )
            fits = all(held_activations(o) <= room for o, room in zip(orders, most, strict=True))
            low, high = (width, high) if fits else (low, width - 1)
        return low


def windows_planned(
    epoch: int, step: int, replica: int, measures: StepMeasures, windows: Windows
) -> WindowsPlanned:
    """The event for a row's new windows. Unknown rates are infinite in `measures` and 0 in the event."""

    def known(rates: Iterable[float]) -> tuple[float, ...]:
        return tuple(0.0 if math.isinf(rate) else rate for rate in rates)

    return WindowsPlanned(
        epoch=epoch,
        step=step,
        replica=replica,
        windows=windows,
        forward=measures.forward,
        backward=measures.backward,
        activation_bytes=measures.activation_bytes,
        gradient_bytes=measures.gradient_bytes,
        round_trips=tuple(2 * link.latency for link in measures.links),
        rates_up=known(link.up for link in measures.links),
        rates_down=known(link.down for link in measures.links),
        lines_up=known(line.up for line in measures.lines),
        lines_down=known(line.down for line in measures.lines),
    )


def where_shown(measures: StepMeasures, costs: StepCosts, microbatches: int) -> StepMeasures:
    """A row's measures, with the rates of links that its step shows. Other links count as unlimited."""
    shown: dict[tuple[int, int], bool] = {}
    for link in costs.links:
        seconds = link.bytes / microbatches / link.capacity if link.capacity > 0 else 0.0
        shown[link.source, link.target] = (
            seconds >= TELLS_SECONDS or link.busy_seconds >= BUSY * costs.seconds
        )

    def rate(source: int, target: int, known: float) -> float:
        return known if shown.get((source, target)) else math.inf

    stages = len(measures.forward)
    joints = [(at, (at + 1) % stages) for at in range(len(measures.links))]
    return replace(
        measures,
        lines=(),
        links=tuple(
            replace(link, up=rate(low, high, link.up), down=rate(high, low, link.down))
            for link, (low, high) in zip(measures.links, joints, strict=True)
        ),
    )


def slowest(rows: Sequence[StepMeasures]) -> StepMeasures:
    """Each stage's time and each link's rate in the row where it is slowest. Rows have the same codecs."""
    return combined(rows, max, min)
