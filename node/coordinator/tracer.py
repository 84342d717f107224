"""Collect the spans that stages report of their steps, if the run file asks for a trace."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from node.config.schema import TelemetrySection
from node.telemetry.costs import Place
from node.telemetry.trace_files import TracedSteps, TraceWriter
from wire.telemetry import StepSpans

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""Spans are written this often."""


class Tracer:
    """One run's trace. A disk error ends the trace; the run goes on."""

    def __init__(
        self, settings: TelemetrySection, directory: Path, places: Callable[[], Mapping[str, Place]]
    ) -> None:
        """
        Args:
            directory: the run's.
            places: of who hosts the stages now, by node.
        """
        self._writer = TraceWriter(directory, 1_000_000 * settings.trace_mb)
        self._wanted = bool(TracedSteps.parse(settings.trace))
        self._places = places

    def add(self, node_id: str, spans: StepSpans) -> None:
        """Keep a stage's spans, if the node hosts that stage."""
        place = self._places().get(node_id)
        if self._wanted and place is not None and place.stage == spans.stage:
            self._writer.add(node_id, spans, place.replica)

    async def run(self) -> None:
        """Write spans as they come, until cancelled or the disk fails."""
        while not self._writer.broken:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()
        log.warning("%s, the run goes on", self._writer.broken)

    async def write(self) -> None:
        """Write the spans collected so far."""
        await asyncio.to_thread(self._writer.write, self._writer.take())
