"""What the coordinator produces from every n-th snapshot: model folders and samples of text.

The run neither depends on them nor waits for them.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from node import program
from node.config.schema import RunConfig
from node.model.units import unit_names, unit_parameters
from node.state.export import export
from node.state.snapshot import snapshot_directory
from node.telemetry import events
from node.telemetry.format import bytes_text, printable
from wire.errors import ThinwireError, shortened

Emit = Callable[[events.Event], None]

SAMPLE_TOKENS = 64
"""The most tokens after a prompt."""
MOST_TEXT = 1000
"""The most characters that are kept of a continuation."""
SAMPLE_SECONDS = 600.0
"""The most seconds for the samples of one snapshot."""
LAST_SECONDS = 60.0
"""The most seconds for which the end of a run waits for the last snapshot's exports and samples."""
MEMORY_SHARE = 0.5
"""The share of free main memory that the sampled model may use."""
log = logging.getLogger(__name__)


class EveryNth:
    """Which snapshots are due: every n-th, and the one of the last step."""

    def __init__(self, config: RunConfig, every: int) -> None:
        """`every`: 0 for none."""
        steps = config.run.snapshot_every
        self._by_time = not isinstance(steps, int)
        self._every = every * (steps if isinstance(steps, int) else 1)
        self._count = 0
        self._last = config.run.steps

    def is_due(self, step: int) -> bool:
        """Whether this snapshot is due. Call it once for each."""
        self._count += 1
        number = self._count if self._by_time else step
        return self._every > 0 and (number % self._every == 0 or step == self._last)


class SnapshotExports:
    """Exports every n-th snapshot as a Hugging Face folder, `exports/step-N` in the run directory."""

    def __init__(self, config: RunConfig, run_directory: Path) -> None:
        self._nth = EveryNth(config, config.training.export_every)
        self._run_directory = run_directory
        self._due: asyncio.Queue[int] = asyncio.Queue()

    def stored(self, step: int) -> None:
        if self._nth.is_due(step):
            self._due.put_nowait(step)

    async def run(self) -> None:
        """Export until cancelled. A failed export is only logged, because the run does not depend on it."""
        while True:
            step = await self._due.get()
            out = snapshot_directory(self._run_directory / "exports", step)
            try:
                if not out.exists():
                    await asyncio.to_thread(export, self._run_directory, out, step=step)
            except ThinwireError as error:
                log.warning("the snapshot of step %d was not exported: %s", step, error)
            finally:
                self._due.task_done()

    async def finish(self) -> None:
        """Wait for the exports that are due."""
        await self._due.join()


class SnapshotSamples:
    """Lets every n-th snapshot continue `data.prompts`, by `thinwire sample` in a separate process.

    A snapshot waits while an earlier one is sampled, and is skipped if a later one completes.
    """

    def __init__(self, config: RunConfig, run_directory: Path, emit: Emit, free_bytes: int) -> None:
        """`free_bytes`: the free main memory of this machine; 0 if unknown."""
        self._prompts = config.data.prompts
        self._nth = EveryNth(config, config.data.prompts_every)
        self._command = [*program("cli.main"), "sample", "--json", "--tokens", str(SAMPLE_TOKENS)]
        self._command += ["--chat"] if config.data.format == "chat" else []
        self._run_directory = run_directory
        self._emit = emit
        self._why_not = _why_not(config, free_bytes) if self._prompts else ""
        self._due = 0
        """The step of the newest snapshot that is due and not sampled; 0 if there is none."""
        self._came = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._given_up = False
        self._told: set[str] = set()

    def stored(self, step: int, *, is_here: bool) -> None:
        """A snapshot is complete. `is_here`: it is on the coordinator's disk."""
        if not self._prompts or self._why_not or not self._nth.is_due(step):
            return
        if is_here:
            self._due = step
            self._came.set()
        else:
            self._tell("data.prompts wait: snapshots are kept elsewhere, and only local ones are sampled")

    async def run(self) -> None:
        """Sample snapshots until cancelled."""
        if self._why_not:
            self._tell(f"data.prompts are not sampled: {self._why_not}")
        while True:
            await self._came.wait()
            self._came.clear()
            await self._sample(SAMPLE_SECONDS)

    async def finish(self) -> None:
        """After `run` was cancelled, sample the newest snapshot that is due and not sampled."""
        if not self._given_up:
            await self._sample(LAST_SECONDS)

    def give_up(self) -> None:
        """The operator ends the run: sample no more."""
        self._given_up = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _sample(self, seconds: float) -> None:
        if not (step := self._due):
            return
        try:
            async with asyncio.timeout(seconds):
                samples = await self._answers()
        except TimeoutError:
            self._tell(f"data.prompts were not sampled within {seconds:.0f} s")
        except (OSError, ValueError, LookupError, ThinwireError) as error:  # its output may be invalid
            self._tell(f"data.prompts were not sampled: {error}")
        else:
            for sample in samples:
                self._emit(sample)
        if self._due == step:
            self._due = 0

    async def _answers(self) -> list[events.SampleMade]:
        """The newest snapshot's continuations of the prompts. Raises ThinwireError and OSError."""
        nice = ["nice", "-n", "10"] if shutil.which("nice") else []
        threads = max(1, (os.cpu_count() or 1) // 4)  # nodes may compute on this machine too
        self._process = process = await asyncio.create_subprocess_exec(
            # Sample the newest one, because short steps remove old snapshots while torch loads.
            *(*nice, *self._command, "--step", "last", "--", str(self._run_directory), *self._prompts),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # the coordinator handles Ctrl-C
        )
        try:
            output, errors = await process.communicate()
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            if self._given_up:
                return []
            lines = errors.decode(errors="replace").splitlines()
            raise ThinwireError(shortened(printable(lines[-1])) if lines else f"exit {process.returncode}")
        return [
            events.SampleMade(step=answer["step"], prompt=answer["prompt"], text=answer["text"][:MOST_TEXT])
            for answer in map(json.loads, output.splitlines())
        ]

    def _tell(self, line: str) -> None:
        """Show the line once: the next snapshot would produce the same one."""
        if line not in self._told:
            self._told.add(line)
            self._emit(events.Notice(text=line))


def _why_not(config: RunConfig, free_bytes: int) -> str:
    """Why this machine cannot sample the run's model; empty if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed here"
    model = config.model
    need = 4 * sum(unit_parameters(model, unit) for unit in unit_names(model))
    if 0 < free_bytes * MEMORY_SHARE < need:
        return f"the model takes {bytes_text(need)}, more than half of the {bytes_text(free_bytes)} free here"
    if config.snapshots.keep == "nodes" and not config.snapshots.last_here:
        return "no snapshot comes to the coordinator (snapshots.keep, snapshots.last_here)"
    return ""
