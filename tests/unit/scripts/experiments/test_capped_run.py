"""Runs on small cards end with a node's error, and not with a time limit."""

import asyncio
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from node.telemetry import events
from scripts.experiments.capped_run import Run, launched
from scripts.experiments.paced_pipeline import PacedRun

WAITS = "import sys; sys.stdin.read()"


async def test_a_node_that_ends_by_itself_ends_the_run_with_its_error(tmp_path: Path) -> None:
    coordinator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WAITS, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with ExitStack() as stack:
        # As a node, json.tool refuses its arguments.
        processes = PacedRun(coordinator, {**os.environ}, tmp_path, tmp_path, stack, "json.tool", launched)
        run = Run(processes, rate=100.0, delay=0.0)
        await run.add_node()
        try:
            async with asyncio.timeout(60):
                with pytest.raises(RuntimeError, match=r"node 0 ended: .*usage") as raised:
                    await run.until(events.StepDone)
            assert "error:" in str(raised.value)
        finally:
            await processes.kill()
