"""Emits the run's events (steps, placements, recoveries and the summary), and writes its trace.

The reporter knows what happened in this process. The run's state is in the state machine and the database.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from node.config.schema import RunConfig, TelemetrySection
from node.coordinator.accounting import Accounting
from node.coordinator.store import StepRecord
from node.model.units import is_block
from node.run_state.actions import (
    Aborted,
    AbortKind,
    Announce,
    RecordHeldOut,
    RecordPlan,
    RecordRestored,
    SeatFilled,
    SeatLost,
)
from node.run_state.grid import ONE_ROW
from node.schedule.placement import stage_units
from node.telemetry import events
from node.telemetry.costs import bits_per_element, idle_by_stage, mbit_by_stage
from node.telemetry.events import Notice, Recovered
from node.telemetry.format import bytes_text, count_text, duration_text, named
from node.telemetry.trace_files import TracedSteps, TraceWriter
from node.tuning.codec_plan import of_gradients
from node.tuning.snapshot_place import stage_state_bytes
from node.tuning.storage_choice import StoragePlan, words_of_name
from node.view.explain import framed_bytes
from wire.codecs.formats import FP32, codec_format, codec_names, ladder, proposed_names
from wire.figures import LinkFigures, Place, flow_sum, total
from wire.telemetry import StepSpans

Emit = Callable[[events.Event], None]

OWN_COSTS = 128
"""The most stages in all rows for which every step has costs of its own."""
COSTS_PAUSE, COSTS_PAUSE_A_STAGE = 1.0, 2e-3
"""The least seconds between two sums of costs for more stages, and the seconds per stage. A sum over a
thousand stages takes longer than everything else that the coordinator does in a step."""


@dataclass
class _Tally:
    """What happened in this process."""

    steps: int = 0
    first_loss: float = math.nan
    last_loss: float = math.nan
    """The losses of the first and the last step with labels."""
    tokens: int = 0
    """The tokens of steps that ran for the first time."""
    seconds: float = 0.0
    since: int | None = None
    """The steps done when this process started training; None before."""
    newest: int = 0
    """The highest step so far. Steps up to it are repeated."""
    again: int = 0
    sent: LinkFigures = field(default_factory=LinkFigures)
    """Figures of all links, summed from the costs of all steps, so that all figures agree."""


@dataclass
class _Unsummed:
    """Committed steps whose costs are not in an event yet."""

    steps: int = 0
    seconds: float = 0.0


class Reporter:
    """Emits events. Times are on the monotonic clock.

    `unreported` is a step that an earlier coordinator committed without emitting its event.
    """

    def __init__(self, config: RunConfig, emit: Emit, unreported: StepRecord | None = None) -> None:
        pipeline = config.pipeline
        codecs = {FP32.name, pipeline.forward_codec, pipeline.backward_codec}
        if pipeline.plans_codecs:
            rungs = ladder(pipeline.min_bits)
            codecs.update(rungs, map(of_gradients, rungs))
        self.accounting = Accounting(codecs.union(config.sync_codecs))
        self.snapshot_path = ""
        self.weights_sha256 = ""
        self._snapshot_step = -1
        self._config = config
        self._emit = emit
        self._recovery = Recovery()
        self._tally = _Tally()
        self._names: dict[str, str] = {}
        self._taken_part: Counter[str] = Counter()
        """The number of steps of each node."""
        self._step_began = self._epoch_began = time.monotonic()
        self._costs_at = self._step_began
        self._unsummed = _Unsummed()
        self._bits = 0.0, 0.0
        self._commit = unreported
        """A committed step whose `StepDone` event is not emitted yet."""
        self._is_earlier = unreported is not None
        """Whether an earlier coordinator ran that step, and measured its time."""

    @property
    def step_seconds(self) -> float:
        """The seconds since the current step began."""
        return time.monotonic() - self._step_began

    @property
    def epoch_seconds(self) -> float:
        """The seconds since the current epoch began."""
        return time.monotonic() - self._epoch_began

    def joined(self, joined: events.NodeJoined) -> None:
        self._names[joined.node_id] = named(joined.node_id, joined.name)
        self._emit(joined)

    def announced(self, line: Announce) -> None:
        """A line for the operator."""
        replaced = events.NodeReplaced(text=line.text, node_id=line.about) if line.about else None
        self._emit(replaced or events.Notice(text=line.text))

    def placed(self) -> None:
        """Every stage has a node again."""
        self._recovery.placed(time.monotonic())

    def planned(self, record: RecordPlan) -> None:
        """From a step on, links use other codecs, or stages store their activations differently."""
        step, plan = record.step, record.plan
        if isinstance(plan, StoragePlan):
            parts = [f"stage {stage}: {words_of_name(name)}" for stage, name in enumerate(plan.names)]
            text = f"activations stored from step {step + 1} on (storage.allow): {'; '.join(parts)}"
            self._emit(events.StoragesPlanned(text=text, step=step, storages=plan.names))
        elif plan.boundaries:
            there, back = ", ".join(plan.activations), ", ".join(plan.gradients)
            text = f"codecs from step {step + 1} on: activations {there}; gradients {back}"
            self._emit(
                events.CodecsPlanned(
                    text=text, step=step, activations=plan.activations, gradients=plan.gradients
                )
            )

    def committed(self, commit: StepRecord) -> None:
        self._commit, self._is_earlier = commit, False

    def interrupted(self, aborted: Aborted) -> None:
        """The epoch ended before its step."""
        self._recovery.interrupted(time.monotonic(), planned=aborted.kind is AbortKind.PLACEMENT)
        if self._commit is None and self.accounting.hosts:
            # The aborted step used bytes and time, which are no longer separable from unsummed costs.
            self._emit(self._costs(aborted.step + 1, self.step_seconds, aborted=True))
        self._emit(
            events.StepAborted(
                epoch=aborted.epoch, step=aborted.step + 1, kind=aborted.kind.value, reason=aborted.reason
            )
        )

    def seat_lost(self, lost: SeatLost) -> None:
        """A host is gone, and training continues."""
        taker = {
            group: row for row, groups in lost.portions for group in groups if row < self.accounting.rows
        }
        moved = tuple(group for group in lost.groups if taker.get(group) != lost.row)
        share = len(moved) / max(1, sum(len(groups) for _, groups in lost.portions))
        self._emit(
            events.SeatLost(
                epoch=lost.epoch,
                step=lost.step + 1,
                node_id=lost.node_id,
                row=lost.row,
                stage=lost.stage,
                reason=lost.reason,
                groups=moved,
                takers=tuple(taker.get(group, events.WAITS) for group in moved),
                lost_seconds=self.step_seconds * len(self.accounting.hosts) * share,
                kept=tuple(group for group in lost.groups if group not in moved),
            )
        )

    def seat_filled(self, filled: SeatFilled) -> None:
        self.accounting.seat(filled.node_id, Place(filled.row, filled.stage))
        self._emit(
            events.SeatFilled(
                epoch=filled.epoch,
                step=filled.step + 1,
                node_id=filled.node_id,
                row=filled.row,
                stage=filled.stage,
            )
        )

    def restored(self, restored: RecordRestored, download_rates: Mapping[str, float]) -> None:
        """Every stage holds the state of a step. `download_rates`: bytes per second by node."""
        if self._commit is not None and restored.step == self._commit.step + 1:
            # Its epoch ended before every stage had reported that the commit was applied.
            self.finish_step()
        self._commit = None
        rows = len(restored.groups)
        self.accounting.begin_epoch(restored.epoch, restored.nodes, rows)
        self._epoch_began = time.monotonic()
        stages = stage_units(self._config, len(restored.nodes) // rows)
        self._emit(
            events.PlacementMade(
                epoch=restored.epoch,
                nodes=restored.nodes,
                resume_step=restored.step,
                blocks=tuple(sum(is_block(unit) for unit in units) for units in stages),
                groups=restored.groups if restored.groups != ONE_ROW else (),
            )
        )
        rates = [download_rates[node] for node in restored.nodes if node in download_rates]
        recovered = self._recovery.over(
            step=restored.step,
            now=time.monotonic(),
            state_bytes=max(stage_state_bytes(self._config, len(stages))),
            rate=min(rates, default=0.0),
        )
        if recovered is not None:
            self._emit(recovered)
        self._step_began = time.monotonic()

    def finish_step(self, *, goes_on: bool = False) -> events.StepCosts | None:
        """Every stage has applied the newest commit. Returns its costs, unless they were reported before.

        With many stages, the costs of short steps are summed, so most steps return none. `goes_on`: the next
        step has begun, so this step's costs may be summed with the next one's.
        """
        commit, seconds = self._commit, self.step_seconds
        self._step_began = time.monotonic()
        if commit is None:
            return None
        self._commit = None
        if self._is_earlier:
            seconds = commit.seconds
        is_again = commit.step + 1 <= self._tally.newest
        if not is_again:
            # A seat whose node is gone keeps that node's name until another takes it.
            reports = self.accounting.newest
            self._taken_part.update(node for node in self.accounting.hosts if node in reports)
        costs: events.StepCosts | None = None
        if goes_on and not self._costs_due():
            self._unsummed.steps += 1
            self._unsummed.seconds += seconds
        else:
            costs = self._costs(commit.step + 1, seconds)
            self._bits = bits_per_element(costs, "activation"), bits_per_element(costs, "gradient")
            self._emit(costs)
        up_mbit, down_mbit = mbit_by_stage(costs) if costs is not None else ((), ())
        tokens = self._config.training.global_batch * self._config.model.sequence
        self._count(commit, 0 if is_again else tokens, seconds)
        self._emit(
            events.StepDone(
                step=commit.step + 1,
                steps=self._config.run.steps,
                loss=commit.loss,
                lr=commit.lr,
                grad_norm=commit.grad_norm,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                idle=idle_by_stage(costs) if costs is not None else (),
                bits_forward=self._bits[0],
                bits_backward=self._bits[1],
                up_mbit=up_mbit,
                down_mbit=down_mbit,
            )
        )
        return costs

    def _costs_due(self) -> bool:
        """Whether it is time to sum up costs."""
        stages = len(self.accounting.hosts)
        if stages <= OWN_COSTS:
            return True
        return time.monotonic() - self._costs_at >= max(COSTS_PAUSE, COSTS_PAUSE_A_STAGE * stages)

    def _costs(self, step: int, seconds: float, *, aborted: bool = False) -> events.StepCosts:
        """Report the costs of a step that took this long, with all unsummed costs."""
        self._costs_at = time.monotonic()
        before, self._unsummed = self._unsummed, _Unsummed()
        costs = self.accounting.step(step, before.seconds + seconds, aborted=aborted)
        self._tally.sent = total((self._tally.sent, *costs.links))
        return replace(costs, steps=before.steps + 1) if before.steps else costs

    def held_out(self, record: RecordHeldOut) -> None:
        """The held-out loss of a state was measured. Its time and bytes belong to no step."""
        seconds = self.step_seconds
        self._step_began = time.monotonic()
        self.accounting.step(record.step, seconds)
        self._emit(
            events.HeldOutLoss(
                step=record.step,
                loss=record.loss,
                uncompressed=record.uncompressed,
                samples=record.samples,
                best=record.best,
                seconds=seconds,
            )
        )

    def snapshot_stored(self, step: int, size: int, path: str, weights_sha256: str) -> None:
        # Copies of a step's layers may be complete later than those of a later step.
        if step >= self._snapshot_step:
            self._snapshot_step, self.snapshot_path, self.weights_sha256 = step, path, weights_sha256
        self._emit(events.SnapshotStored(step=step, bytes=size, path=path))

    def finished(self, reason: str, *, failed: bool, resume: str = "") -> None:
        """`resume`: the command that continues the run; empty if all steps are done."""
        summary = self._summary()
        self._emit(events.RunFinished(reason=reason, failed=failed, summary=summary, resume=resume))

    def _count(self, commit: StepRecord, tokens: int, seconds: float) -> None:
        """A step is done. It is a repeated one if it has no tokens."""
        tally, loss = self._tally, commit.loss
        if not math.isnan(loss):
            tally.first_loss = loss if math.isnan(tally.first_loss) else tally.first_loss
            tally.last_loss = loss
        if tally.since is None:
            tally.since = commit.step
        tally.newest = max(tally.newest, commit.step + 1)
        tally.steps += bool(tokens)
        tally.again += not tokens
        tally.tokens += tokens
        tally.seconds += seconds

    def _summary(self) -> events.RunSummary | None:
        tally = self._tally
        if tally.steps == 0:
            return None
        elements = sum(flow.elements for flow in tally.sent.flows)
        return events.RunSummary(
            steps=tally.steps,
            first_loss=tally.first_loss,
            last_loss=tally.last_loss,
            tokens=tally.tokens,
            seconds=tally.seconds,
            tokens_per_second=tally.tokens / tally.seconds,
            link_bytes=tally.sent.bytes,
            link_bytes_fp32=4 * elements,
            link_bytes_bf16=2 * elements,
            bits_forward=flow_sum([tally.sent], "activation").bits,
            bits_backward=flow_sum([tally.sent], "gradient").bits,
            since=tally.since or 0,
            again=tally.again,
            held_out_bytes=self.accounting.run.held_out_bytes,
            stages=self.accounting.stage_times(),
            snapshot_path=self.snapshot_path,
            weights_sha256=self.weights_sha256,
            machines=tuple(
                f"{self._names.get(node, node)} ({count_text(steps)} step{'s' * (steps != 1)})"
                for node, steps in self._taken_part.most_common()
            ),
        )


BASE_SECONDS = 10.0
"""The seconds for a start, a placement and the warm-up of links. The time to fetch a stage's state is
added."""


class Recovery:
    """Times an interruption, and says how long recovery should take. Seconds are on any monotonic clock."""

    def __init__(self) -> None:
        self._interrupted_at: float | None = None
        self._placed_at: float | None = None
        self._planned = False

    def interrupted(self, now: float, *, planned: bool = False) -> None:
        """An epoch ended early. Interruptions before the next finished step count as one."""
        self._planned = planned and (self._interrupted_at is None or self._planned)
        if self._interrupted_at is None:
            self._interrupted_at = now

    def placed(self, now: float) -> None:
        """Every stage has a node again."""
        self._placed_at = now

    def over(self, *, step: int, now: float, state_bytes: int, rate: float) -> Notice | None:
        """The event to emit when every stage holds the state of `step`; None if nothing was interrupted.

        A planned change of placement is not a recovery.

        Args:
            state_bytes: the weights and optimizer state of the largest stage.
            rate: bytes per second from the coordinator to the slowest node; 0 if unknown.
        """
        interrupted_at, self._interrupted_at = self._interrupted_at, None
        if interrupted_at is None or self._placed_at is None:
            return None
        if self._planned:
            return Notice(text=f"placement changed at step {step} in {duration_text(now - interrupted_at)}")
        limit = f"{BASE_SECONDS:g} s + {bytes_text(state_bytes)} of state"
        if rate > 0:
            seconds = BASE_SECONDS + state_bytes / rate
            limit += f" / {bytes_text(rate)}/s = {duration_text(seconds)}"
        text = (
            f"back at step {step} in {duration_text(now - interrupted_at)}, of which "
            f"{duration_text(now - self._placed_at)} with a node for every stage; "
            f"expected at most {limit}"
        )
        return Recovered(text=text, step=step, seconds=now - interrupted_at)


def codec_bits(config: RunConfig) -> dict[str, float]:
    """Bits per element of a boundary tensor, with frames, for every stateless codec and every proposed one.
    Empty if codecs are planned, because there is nothing to propose then."""
    if config.pipeline.plans_codecs:
        return {}
    training, model = config.training, config.model
    shape = (training.microbatch, model.sequence, model.hidden)
    names = dict.fromkeys((*codec_names(), *proposed_names()))
    return {name: 8 * framed_bytes(codec_format(name).packed_bytes(shape)) / prod(shape) for name in names}


log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""The seconds between two writes of spans."""


class Tracer:
    """The trace of one run. A disk error ends the trace but not the run."""

    def __init__(
        self, settings: TelemetrySection, directory: Path, places: Callable[[], Mapping[str, Place]]
    ) -> None:
        """
        Args:
            directory: the run directory.
            places: returns the current places of hosts, by node.
        """
        self._writer = TraceWriter(directory, 1_000_000 * settings.trace_mb)
        self._wanted = bool(TracedSteps.parse(settings.trace))
        self._places = places

    def add(self, node_id: str, spans: StepSpans) -> None:
        """Keep a stage's spans if the node hosts that stage."""
        place = self._places().get(node_id)
        if self._wanted and place is not None and place.stage == spans.stage:
            self._writer.add(node_id, spans, place.replica)

    async def run(self) -> None:
        """Write spans periodically, until cancelled or the disk fails."""
        while not self._writer.broken:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()
        log.warning("%s; the run continues", self._writer.broken)

    async def write(self) -> None:
        await asyncio.to_thread(self._writer.write, self._writer.take())
