"""Measures a node: makes `Telemetry` from its clocks, links and memory."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from kernels.common.dispatch import withdrawn
from node.schedule.routing import Peer
from node.stage.allocator import largest_allocated
from node.stage.node_metrics import NodeMetrics
from node.telemetry.clock import ClockSync, SpanRing, StageClock, Times, difference
from node.telemetry.trace_files import TracedSteps
from wire.figures import LinkFigures
from wire.line_meter import Line
from wire.relay import Relay
from wire.spec import Direction, TensorKey
from wire.telemetry import MOST_SPANS, StepSpans, Telemetry
from wire.transfers import TransferKind


class NodeMeter:
    """Totals of the current epoch. Call it on the event loop."""

    def __init__(self, clock: StageClock, device: torch.device, line: Line, metrics: NodeMetrics) -> None:
        """
        Args:
            clock: records what the compute thread does.
            line: the node's line, which its links measure.
            metrics: receive every report.
        """
        self._clock = clock
        self.sync = ClockSync()
        self.line = line
        self._metrics = metrics
        self.relay: Relay | None = None
        """The relay that this node offers to others, if any."""
        self.ring = SpanRing()
        self._traced = TracedSteps.parse("off")
        self._device = device
        self._epoch = 0
        self._counted_from: Times | None = None

    def trace(self, steps: TracedSteps) -> None:
        """Report the spans of these steps; of none by default."""
        self._traced = steps

    def transferred(
        self, peer_stage: int, kind: TransferKind, key: TensorKey, start: float, end: float
    ) -> None:
        """Record one part of a tensor's transfer over a link. Called by the links."""
        if key.step in self._traced:
            self.ring.record(kind, start, end, key, peer_stage)

    def step_spans(self, epoch: int, step: int, stage: int) -> list[StepSpans]:
        """The spans since the last call; none if the step is not traced."""
        spans, dropped = self.ring.take()
        if step not in self._traced:
            return []
        return [
            StepSpans(
                epoch=epoch,
                step=step,
                stage=stage,
                clock_offset=self.sync.offset,
                clock_error=self.sync.error,
                dropped=dropped if first == 0 else 0,
                spans=spans[first : first + MOST_SPANS],
            )
            for first in range(0, len(spans), MOST_SPANS)
        ]

    def begin_epoch(self, epoch: int) -> None:
        """Restart the totals at 0 for a new placement."""
        self._epoch = epoch
        self._counted_from = None

    def count_time(self) -> None:
        """Count time from now on, when the epoch's first step begins."""
        if self._counted_from is None:
            self._counted_from = self._clock.snapshot()

    def step_begins(self) -> None:
        """Count a step's time and its traffic."""
        self.count_time()
        self.line.step_begins(time.monotonic())

    def telemetry(
        self,
        links: Mapping[Peer, LinkFigures],
        codec_of: Callable[[Direction], str],
        stage: int = -1,
        stages: int = 0,
        row: int = 0,
        expert_load: tuple[float, int] = (0.0, 0),
    ) -> Telemetry:
        """The current report.

        Args:
            links: by neighbour, as from `EpochLinks.figures`.
            codec_of: the name of the codec in use for a kind of tensor.
            stage: the node's stage of `stages`; -1 for none.
            row: the node's row.
            expert_load: as from `node.stage.stage_model.StageModel.expert_load`.
        """
        times: dict[str, float] = {}
        wall = 0.0
        if self._counted_from is not None:
            # A wait that began before the count may not have ended.
            grown = difference(self._clock.settled(), self._counted_from)
            times = {kind.value: max(0.0, spent) for kind, spent in grown.items()}
            wall = sum(times.values())
        # The wall clock is read only here; everything else uses the monotonic clock.
        skew = time.time() - (time.monotonic() + self.sync.offset) if self.sync.known else 0.0
        on_gpu = self._device.type == "cuda"
        resident = resident_bytes()
        report = Telemetry(
            epoch=self._epoch,
            seconds=times,
            wall_seconds=wall,
            links=tuple(
                replace(
                    link,
                    source_replica=row,
                    target_replica=peer.replica,
                    flows=tuple(
                        replace(flow, codec=codec_of(_carried(flow.direction))) for flow in link.flows
                    ),
                )
                for peer, link in sorted(links.items())
            ),
            memory_bytes=resident,
            # The system counts the current and the peak size separately.
            peak_memory_bytes=max(resident, peak_resident_bytes()),
            gpu_memory_bytes=torch.cuda.memory_allocated(self._device) if on_gpu else 0,
            gpu_peak_memory_bytes=largest_allocated(self._device) if on_gpu else 0,
            expert_load=expert_load[0],
            dead_experts=expert_load[1],
            without_kernels=", ".join(withdrawn()),
            clock_skew_seconds=skew,
            clock_error_seconds=self.sync.error,
            relayed_bytes=self.relay.totals.bytes if self.relay is not None else 0,
            relay_pairs=self.relay.pairs if self.relay is not None else 0,
            relay_refused=self.relay.totals.refused if self.relay is not None else 0,
            line_up=self.line.up(time.monotonic()),
            line_down=self.line.down(time.monotonic()),
        )
        self._metrics.report(report, stage, stages)
        return report


def _carried(direction: Direction) -> Direction:
    """The direction, with held-out samples counted as activations."""
    return Direction.ACTIVATION if direction is Direction.HELD_OUT else direction


def resident_bytes() -> int:
    """The bytes of the process's resident set now; 0 where the system does not report them."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The bytes of the process's largest resident set so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
