"""Collects measurements of nodes and links, requests missing ones, and plans which node hosts which stage.

It runs on the event loop. Plans are made on a thread.
"""

import asyncio
import copy
import functools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from node.config.schema import RunConfig
from node.coordinator.probes import ProbeDesk
from node.model.units import HEAD, block_name, unit_cost
from node.run_state.epoch import Epoch
from node.run_state.failures import transfer_seconds
from node.run_state.membership import Member
from node.run_state.run_plan import Past
from node.run_state.stage_assignment import Candidate
from node.schedule.placement import block_counts, slices_of
from node.telemetry.costs import row_costs
from node.telemetry.events import StepCosts
from node.tuning.codec_plan import CodecPlan
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import least_stage_bytes
from node.tuning.places import RESTART_SECONDS, Grid, PlacePlan, Volunteer, plan_places
from node.tuning.snapshot_place import stage_state_bytes
from node.tuning.speeds import LEAST_STEPS, Line, Speeds
from node.tuning.stage_order import Work
from node.tuning.window_plan import measured
from wire.codecs.formats import codec_format
from wire.messages import BlockTime, CoordinatorMessage, PeerRate

LOOK_SECONDS = 0.5
PLAN_SECONDS = 5.0
"""The seconds between two plans."""
MOST_WAIT = 1000
"""The most steps before a placement may change again. The number starts at `LEAST_STEPS` and doubles after
each move, so that noise cannot move a run back and forth."""
BUSY = 0.5
"""A link's measured rate counts if the link carried tensors for this share of a step."""
REST = 20
"""The pause after a plan, as a multiple of the time that making it took."""


class PlacePlanner:
    """The planner of a run with `pipeline.placement = "measured"`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        samples: int,
        past: Past,
        members: Callable[[], Mapping[str, Member]],
        send: Callable[[str, CoordinatorMessage], object],
        move: Callable[[PlacePlan, str], Awaitable[None]],
        tell: Callable[[str], None],
        look: float = LOOK_SECONDS,
        pause: float = PLAN_SECONDS,
    ) -> None:
        """
        samples: the number of samples in one pass over the text.
        past: the run's past.
        members: the members of the run.
        move: applies a plan, once, and tells the operator this line.
        tell: shows the operator a line.
        look: the seconds between two checks for lines to measure.
        pause: the least seconds between two plans.
        """
        self._config = config
        self._samples = samples
        self._members = members
        self._send = send
        self._move = move
        self._tell = tell
        self._look, self._pause = look, pause
        self._told = ""
        self._desk = ProbeDesk()
        self.speeds = Speeds(past.shown)
        self._splits = past.splits
        self._hosts = past.hosts
        self._moves = past.moves
        self._wait = min(LEAST_STEPS << min(past.moves, 10), MOST_WAIT)
        self._count = 0
        """The number of steps of the current epoch."""
        self._first_new = max(past.splits.newest, past.committed.step + 1 if past.committed else 0)
        """The first step whose split is not on record. Earlier steps run again with their recorded split."""
        self._newest: tuple[Epoch, int, list[float]] | None = None
        """The current epoch, the step after its newest one, and the seconds of its steps."""
        self._news = False
        self._has_moved = False
        self._known_needs: dict[tuple[tuple[int, ...], Devices], tuple[int, ...]] = {}

    # ---- incoming

    def heard(self, node_id: str, message: BlockTime | PeerRate) -> None:
        """A node has measured itself or a line."""
        if isinstance(message, BlockTime):
            self.speeds.claimed(node_id, message.seconds)
        elif self._desk.answered(node_id, message):
            trip, other = message.round_trip, message.node_id
            self.speeds.line(node_id, other, Line(rate=message.up, round_trip=trip))
            self.speeds.line(other, node_id, Line(rate=message.down, round_trip=trip))
        self._news = True

    def step_done(self, epoch: Epoch, nodes: Sequence[Candidate], costs: StepCosts) -> None:
        if costs.aborted or self._stages != epoch.stages:
            return
        before = self._newest
        same = before is not None and before[0].number == epoch.number
        steps = before[2] if before is not None and same else []
        self._count = self._count + 1 if same else 1
        self._newest = epoch, costs.step + 1, [*steps[1 - LEAST_STEPS :], costs.seconds]
        length = self._config.microbatches // self._config.pipeline.groups
        heads = [0.0] * (epoch.stages - 1) + [self._head_blocks]
        blocks = [count + head for count, head in zip(self._split, heads, strict=True)]
        busies = {
            (link.source_replica, link.source, link.target): link.busy_seconds
            for link in costs.links
            if link.source_replica == link.target_replica
        }
        for replica, groups in enumerate(epoch.groups):
            count = length * len(groups)
            measures = measured(row_costs(costs, replica), 1, count)
            if measures is None:
                return
            row = epoch.row(replica)
            for stage, link in enumerate(measures.links):
                for source, target, rate in ((stage, stage + 1, link.up), (stage + 1, stage, link.down)):
                    # A few small tensors do not show a line's rate, but a probe did.
                    busy = busies.get((replica, source, target), 0.0)
                    if rate < math.inf and busy >= BUSY * costs.seconds:
                        line = Line(rate=rate, round_trip=2 * link.latency)
                        self.speeds.line(row[source], row[target], line)
            if len(steps) + 1 >= LEAST_STEPS // 2:  # the first steps compile
                spent = [a + b for a, b in zip(measures.forward, measures.backward, strict=True)]
                self.speeds.step(row, blocks, spent, costs.seconds, self._work(epoch.codecs, count))
        self._news = True

    async def next_is(self, step: int) -> None:
        """Step `step` is next, counted from 0. If the step after it has a different split on record, the run
        continues with that one."""
        split = self._splits.at(step + 1)
        if split is not None and split != self._split and not self._has_moved:
            self._has_moved = True
            hosts = self._newest[0].hosts if self._newest is not None else self._hosts
            plan = PlacePlan(grid=Grid(hosts=hosts, split=split), now_seconds=0.0, then_seconds=0.0)
            blocks = ",".join(map(str, split))
            await self._move(plan, f"step {step + 2} has blocks {blocks} by stage again, as recorded")

    # ---- outgoing

    async def run(self) -> None:
        """Request measurements of lines, and plan, until cancelled."""
        planned = -self._pause
        while True:
            await asyncio.sleep(self._look)
            members = self._members()
            self._desk.present(
                {node: member.address for node, member in members.items() if member.disconnected_at is None}
            )
            for node, member in members.items():
                self.speeds.downloads(node, member.rate)
            now = time.monotonic()
            for node, probe in self._desk.due(now):
                self._send(node, probe)
            self._tell_what_is_known()
            if self._has_moved or not self._news or now - planned < self._pause:
                continue
            if (work := self._plan()) is not None:
                self._news = False
                plan = await asyncio.to_thread(work)
                # Planning takes a small share of the time, however long one plan takes.
                planned = time.monotonic()
                planned += REST * (planned - now)
                if plan is not None:
                    self._has_moved = True
                    await self._move(plan, plan.text(self._grid()))

    def _tell_what_is_known(self) -> None:
        """Report once all lines have been measured, and again after new ones."""
        if not self._desk.complete or not self._desk.measured:
            return
        text = self.speeds.text(self._desk.measured)
        if text != self._told:
            self._told = text
            self._tell(text)

    def _plan(self) -> Callable[[], PlacePlan | None] | None:
        """The function that makes a plan on a thread; None while too little is known."""
        if self._newest is None:
            return None
        epoch, step, steps = self._newest
        if step < self._first_new or epoch.vacant:
            return None
        # The first placement may change as soon as all lines are known, because little was done in it.
        is_first = self._moves == 0 and step <= LEAST_STEPS and self._desk.complete
        if self._count < self._wait and not is_first:
            return None
        speeds, now, members = copy.deepcopy(self.speeds), self._grid(), self._members()
        connected = [member for member in members.values() if member.disconnected_at is None]
        offers = {member.offer.node_id: member.offer for member in connected if not member.leaving}
        rates = [members[node].rate for node in now.hosts if node in members]
        slowest = min((rate for rate in rates if rate > 0), default=0.0)
        size = max(stage_state_bytes(self._config, self._stages))
        work = self._work(epoch.codecs, self._config.microbatches // len(epoch.groups))

        def fits(grid: Grid) -> bool:
            return all(
                self._fits(grid.split, place % self._stages, offers[node])
                for place, node in enumerate(grid.hosts)
            )

        def plan() -> PlacePlan | None:
            # A node without a measurement counts as the slowest.
            volunteers = [
                Volunteer(node_id=node, most_blocks=self._most_blocks(offer))
                for node, offer in offers.items()
                if node in now.hosts or speeds.block_seconds(node)
            ]
            return plan_places(
                speeds,
                volunteers,
                work,
                now,
                measured=sorted(steps)[len(steps) // 2],
                move_seconds=RESTART_SECONDS + 2 * transfer_seconds(size, slowest),
                steps_left=self._config.run.steps - step,
                fits=fits,
            )

        return plan

    # ---- inside

    @property
    def _stages(self) -> int:
        return self._config.pipeline.stages

    @functools.cached_property
    def _split(self) -> tuple[int, ...]:
        return block_counts(self._config, self._stages)

    @functools.cached_property
    def _head_blocks(self) -> float:
        model = self._config.model
        return unit_cost(model, HEAD) / unit_cost(model, block_name(0))

    def _grid(self) -> Grid:
        assert self._newest is not None, "a step was done"
        return Grid(hosts=self._newest[0].hosts, split=self._split)

    def _work(self, codecs: CodecPlan | None, microbatches: int) -> Work:
        config = self._config
        pipeline, shape = (
            config.pipeline,
            (config.training.microbatch, config.model.sequence, config.model.hidden),
        )
        there = codecs.activations if codecs is not None else (pipeline.forward_codec,)
        back = codecs.gradients if codecs is not None else (pipeline.backward_codec,)
        return Work(
            stages=self._stages,
            blocks=config.model.layers,
            activation_bytes=max((codec_format(name).packed_bytes(shape) for name in there), default=0),
            gradient_bytes=max((codec_format(name).packed_bytes(shape) for name in back), default=0),
            microbatches=microbatches,
            head_blocks=self._head_blocks,
            slices=slices_of(config),
        )

    def _most_blocks(self, offer: Candidate) -> int:
        """The number of blocks that fit if each takes the memory of a block on the most demanding stage."""
        if offer.memory_bytes == 0:
            return self._config.model.layers
        needs = self._needs(self._split, offer.devices)
        each = max(need / count for need, count in zip(needs, self._split, strict=True))
        return int(offer.memory_bytes / each)

    def _fits(self, split: tuple[int, ...], stage: int, offer: Candidate) -> bool:
        """Whether the stage fits, exactly, for the planned split."""
        if offer.memory_bytes == 0:
            return True
        return self._needs(split, offer.devices)[stage] <= offer.memory_bytes

    def _needs(self, split: tuple[int, ...], devices: Devices) -> tuple[int, ...]:
        """The least bytes of each stage."""
        key = split, devices
        if key not in self._known_needs:
            config = replace(self._config, pipeline=replace(self._config.pipeline, split=split))
            needs = least_stage_bytes(config, self._stages, devices, windows=self._samples)
            self._known_needs[key] = needs
        return self._known_needs[key]
