"""Keeps what stages say that they did in their steps, if the run file asks for a trace."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from node.config.schema import TelemetrySection
from node.telemetry.trace_files import TraceWriter
from node.telemetry.traced_steps import TracedSteps
from wire.telemetry import StepSpans

log = logging.getLogger(__name__)

WRITE_SECONDS = 1.0
"""Spans are gathered for so long before they are written."""


class Tracer:
    """One run's. A disk that refuses ends the trace, and the run goes on."""

    def __init__(
        self, settings: TelemetrySection, directory: Path, seats: Callable[[], tuple[str, ...]]
    ) -> None:
        """
        Args:
            directory: the run's.
            seats: who hosts the stages now.
        """
        self._writer = TraceWriter(directory, 1_000_000 * settings.trace_mb)
        self._wanted = bool(TracedSteps.parse(settings.trace))
        self._seats = seats

    def add(self, node_id: str, spans: StepSpans) -> None:
        """Keep what a stage did in a step, if the node is that stage."""
        if self._wanted and self._seats()[spans.stage : spans.stage + 1] == (node_id,):
            self._writer.add(node_id, spans)

    async def run(self) -> None:
        """Write what comes, until cancelled or the disk refuses."""
        while not self._writer.broken:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()
        log.warning("%s, the run goes on", self._writer.broken)

    async def write(self) -> None:
        """Write what has come by now."""
        await asyncio.to_thread(self._writer.write, self._writer.take())
