"""Runs a coordinator and its nodes on one machine, as processes that join with the real join line.

The nodes do everything that a volunteer's machine does; only the network is loopback. All children are ended
and reaped, whatever happens: end of the run, an error, a child's death, Ctrl-C, SIGTERM, a closed terminal.
"""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

from node import program
from node.display.terminal import ending_signals, last_words
from node.run_file.loader import recipe
from node.telemetry.events import Event, JoinLine, Notice, RunFinished, RunStarted, from_json
from wire import event_loop
from wire.errors import RunError, UserError

START_SECONDS = 120.0
"""The seconds for the coordinator to print its join line."""
GRACE_SECONDS = 10.0
"""The seconds for the run to end after one of its nodes has ended."""
LEAVE_SECONDS = 2.0
"""The seconds from the coordinator's end to SIGTERM for nodes that had not joined and get no message."""
STOP_SECONDS = 20.0
"""The seconds from asking children to stop to killing them."""
MAX_EVENT_BYTES = 1 << 20


def demo_file() -> Path:
    """The demo's run file, which is installed with the program."""
    return recipe("demo")


def run_demo(
    *,
    run_dir: Path,
    emit: Callable[[Event], None],
    overrides: Sequence[str] = (),
    command: Sequence[str] = program("cli.main"),
) -> int:
    """Run `demo_file` in `run_dir` and return the coordinator's exit code.

    Args:
        emit: shows each of the coordinator's events, as those of `make_renderer`, which raise nothing.
        overrides: `section.key=value`, applied to the run file.
        command: starts the program; tests replace it.

        Raises UserError when the coordinator refuses its input, after removing the folder; RunError, with the
        child's last line, when a child ends before the run; KeyboardInterrupt on Ctrl-C, SIGTERM and SIGHUP.
        All children have ended by then.
    """
    try:
        return event_loop.run(_Demo(run_dir, emit, overrides, command).run())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


class _Demo:
    def __init__(
        self, run_dir: Path, emit: Callable[[Event], None], overrides: Sequence[str], command: Sequence[str]
    ) -> None:
        self._run_dir = run_dir
        self._emit = emit
        self._overrides = overrides
        self._command = command
        self._children: dict[str, Process] = {}
        self._stages = 0
        self._finished = asyncio.Event()

    async def run(self) -> int:
        task = asyncio.current_task()
        assert task is not None

        def interrupt(number: signal.Signals) -> None:
            # A closing terminal sends SIGHUP more than once; only the first counts.
            if number is not signal.SIGHUP or not task.cancelling():
                task.cancel()

        for number in ending_signals():
            if number is not signal.SIGINT:  # asyncio.Runner handles it
                asyncio.get_running_loop().add_signal_handler(number, interrupt, number)
        (self._run_dir / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                return await self._drive(group)
        except ExceptionGroup as failures:
            # Tasks of the group fail together; the first gives the reason.
            raise failures.exceptions[0] from None
        finally:
            await self._stop()

    async def _drive(self, group: asyncio.TaskGroup) -> int:
        """Start the coordinator and the nodes, and wait for all of them."""
        coordinator = await self._start(
            "coordinator", str(demo_file()), "--run-dir", str(self._run_dir), "--json", *self._overrides
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                join_line = await self._pass_events_on(coordinator, until=JoinLine)
        except TimeoutError:
            raise RunError(
                f"the coordinator printed no join line within {START_SECONDS:g} s; "
                f"see {self._log('coordinator')}"
            ) from None
        if isinstance(join_line, JoinLine):
            token = join_line.line.split()[-1]
            for stage in range(self._stages):
                node = await self._start_node(f"node-{stage}", token)
                group.create_task(self._watch(f"node-{stage}", node))
            await self._pass_events_on(coordinator)
        code = await coordinator.wait()
        if not self._finished.is_set():
            if code == UserError.exit_code and not self._stages:
                raise self._refusal()
            raise self._failure("coordinator", code)
        await self._let_nodes_end()
        return code

    async def _start_node(self, name: str, token: str) -> Process:
        state = self._run_dir / "nodes" / name
        threads = max(1, (os.cpu_count() or 1) // self._stages)
        return await self._start(
            name,
            *("join", token, "--listen", "127.0.0.1:0", "--device", "cpu", "--wait", "0"),
            *("--threads", str(threads), "--state-dir", str(state)),
        )

    async def _start(self, name: str, *arguments: str) -> Process:
        """Start a child in its own session, so that only this process gets Ctrl-C. Its logs go to a file."""
        if name == "coordinator":
            arguments = (name, *arguments)
        with self._log(name).open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                stdin=DEVNULL,
                stdout=PIPE if name == "coordinator" else log,
                stderr=log,
                limit=MAX_EVENT_BYTES,
                start_new_session=True,
            )
        self._children[name] = child
        return child

    async def _pass_events_on(self, coordinator: Process, until: type[Event] | None = None) -> Event | None:
        """Emit the coordinator's events up to one of type `until` and return it; None at the end."""
        assert coordinator.stdout is not None
        while line := await coordinator.stdout.readline():
            event = from_json(line.decode())
            self._emit(event)
            if isinstance(event, RunStarted):
                self._stages = event.stages
            elif isinstance(event, RunFinished):
                self._finished.set()
            if until is not None and isinstance(event, until):
                return event
        return None

    async def _watch(self, name: str, node: Process) -> None:
        """Raise RunError if a node ends before the run."""
        code = await node.wait()
        try:
            async with asyncio.timeout(GRACE_SECONDS):
                await self._finished.wait()
        except TimeoutError:
            raise self._failure(name, code) from None

    async def _let_nodes_end(self) -> None:
        """After the run, wait for nodes to end, then kill those that have not."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                for child in self._children.values():
                    await child.wait()
        except TimeoutError:
            for name, child in self._children.items():
                if child.returncode is None:
                    self._emit(Notice(text=f"{name} did not end with the run and was killed"))
                    child.kill()

    async def _stop(self) -> None:
        """End the coordinator as with Ctrl-C, which ends the nodes, then end the rest."""
        alive = [child for child in self._children.values() if child.returncode is None]
        coordinator = self._children.get("coordinator")
        try:
            async with asyncio.timeout(STOP_SECONDS):
                if coordinator in alive:
                    coordinator.send_signal(signal.SIGINT)
                    await self._pass_events_on(coordinator)
                    await coordinator.wait()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LEAVE_SECONDS):
                            for child in alive:
                                await child.wait()
                    for child in alive:
                        if child.returncode is None:
                            child.terminate()
                    for child in alive:
                        await child.wait()
        except TimeoutError:
            pass  # the remaining children are killed
        finally:
            for child in alive:
                if child.returncode is None:
                    child.kill()
                    await child.wait()

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    def _last_words(self, name: str) -> str:
        """The last line of a child's log, which is its error."""
        return last_words(self._log(name)) or f"{self._log(name)} is empty: is its disk full?"

    def _refusal(self) -> UserError:
        """The coordinator's error about its input. The run has not begun, so its folder is removed."""
        words = self._last_words("coordinator")
        with contextlib.suppress(OSError):
            self._log("coordinator").unlink()
            self._log("coordinator").parent.rmdir()
            self._run_dir.rmdir()
        return UserError(words)

    def _failure(self, name: str, code: int) -> RunError:
        """The child's error. The demo ends with its exit code."""
        words = self._last_words(name)
        log = self._log(name)
        error = RunError(f"{words} ({name} ended with exit code {code}; its output is in {log})")
        error.exit_code = code if code > 0 else 1
        return error
