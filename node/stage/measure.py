"""What a node measures of itself: `Telemetry` out of its clocks, links and memory."""

import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from node.telemetry.clock import ClockSync, SpanRing, StageClock, Times, difference
from node.telemetry.trace_files import TracedSteps
from wire.link_state import LinkStats
from wire.spec import Direction, TensorKey
from wire.telemetry import MOST_SPANS, FlowReport, LinkReport, StepSpans, Telemetry
from wire.transfers import TransferKind


class NodeMeter:
    """Totals of the epoch that runs. Called on the event loop.

    `codec_of` names the codec of each kind of tensor at present.
    """

    def __init__(self, device: torch.device, codec_of: Callable[[Direction], str]) -> None:
        self.sync = ClockSync()
        self.ring = SpanRing()
        self._traced = TracedSteps.parse("off")
        self._device = device
        self._codec_of = codec_of
        self._epoch = 0
        self._counted_from: tuple[Times, float] | None = None
        self._elements_before: Mapping[Direction, int] = {}

    def trace(self, steps: TracedSteps) -> None:
        """Whose spans to hand on; before it is said, nobody's."""
        self._traced = steps

    def transferred(
        self, peer_stage: int, kind: TransferKind, key: TensorKey, start: float, end: float
    ) -> None:
        """Part of a tensor's way over a link; called by the links."""
        if key.step in self._traced:
            self.ring.record(kind, start, end, key, peer_stage)

    def step_spans(self, epoch: int, step: int, stage: int) -> list[StepSpans]:
        """What was done since this was asked last; nothing if the step is not to be traced."""
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

    def begin_epoch(self, epoch: int, elements_sent: Mapping[Direction, int]) -> None:
        """A new placement: its totals begin at nothing. `elements_sent` so far are others'."""
        self._epoch = epoch
        self._counted_from = None
        self._elements_before = dict(elements_sent)

    def count_time(self, clock: StageClock) -> None:
        """Count time from here on; what came before the epoch's first step is nobody's step."""
        if self._counted_from is None:
            self._counted_from = clock.snapshot(), time.monotonic()

    def telemetry(
        self,
        clock: StageClock,
        links: Mapping[int, tuple[LinkStats, int]],
        elements_sent: Mapping[Direction, int],
    ) -> Telemetry:
        """What there is to report now.

        Args:
            links: by the neighbour's stage: the link's totals and the bytes that wait in it.
            elements_sent: by kind of tensor, since the process began.
        """
        times: dict[str, float] = {}
        wall = 0.0
        if self._counted_from is not None:
            before, began = self._counted_from
            wall = time.monotonic() - began
            times = {kind.value: spent for kind, spent in difference(clock.snapshot(), before).items()}
        # The wall clock is read here alone: everything else is on the monotonic one.
        skew = time.time() - (time.monotonic() + self.sync.offset) if self.sync.known else 0.0
        on_gpu = self._device.type == "cuda"
        resident = resident_bytes()
        return Telemetry(
            epoch=self._epoch,
            times=times,
            wall_seconds=wall,
            links=tuple(
                self._link(stage, stats, queued, elements_sent)
                for stage, (stats, queued) in sorted(links.items())
            ),
            memory_bytes=resident,
            # The two come from different counters of the system.
            peak_memory_bytes=max(resident, peak_resident_bytes()),
            gpu_memory_bytes=torch.cuda.memory_allocated(self._device) if on_gpu else 0,
            gpu_peak_memory_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
            clock_skew_seconds=skew,
            clock_error_seconds=self.sync.error,
        )

    def _link(
        self, stage: int, stats: LinkStats, queued: int, elements_sent: Mapping[Direction, int]
    ) -> LinkReport:
        # Each kind of tensor goes to one neighbour alone (`routing.py`): the one that got bytes of it.
        flows = tuple(
            FlowReport(
                direction=direction,
                codec=self._codec_of(direction),
                bytes_sent=sent,
                elements_sent=elements_sent.get(direction, 0) - self._elements_before.get(direction, 0),
            )
            for direction, sent in stats.direction_bytes_sent.items()
            if sent > 0
        )
        return LinkReport(
            peer_stage=stage,
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            retransmits=stats.retransmits,
            rejects=stats.rejects,
            rtt_seconds=stats.rtt_seconds,
            least_rtt_seconds=stats.least_rtt_seconds,
            capacity=stats.capacity,
            busy_seconds=stats.busy_seconds,
            queued_bytes=queued,
            flows=flows,
        )


def resident_bytes() -> int:
    """The process's resident set now; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The process's largest resident set so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
