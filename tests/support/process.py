"""One `thinwire` command as a real process: its output, bounded waits, signals, exit code."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Protocol, TypeVar

from node.telemetry.events import Event, JoinLine, RunFinished, RunSummary, StepDone, from_json
from tests.support.faults import VARIABLE

SECONDS = 150.0
"""Limit of a single wait; far more than anything takes on a busy two-core machine."""

E = TypeVar("E", bound=Event)


class StuckError(AssertionError):
    """A wait took longer than its bound, or the process ended first."""


class Child(Protocol):
    """The part of `subprocess.Popen` that the harness uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[str] | None: ...

    @property
    def stdout(self) -> IO[str] | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


Launch = Callable[..., Child]
"""Starts a process; called like `subprocess.Popen`."""
Listener = Callable[["Process", str | None], None]
"""Called on a process's reader thread with each line of its stdout, and with None at its end."""


class Process:
    """One `thinwire` command. Keeps its output: `lines` of stdout, and `stderr` as text."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        program: Sequence[str] = ("node.cli.main",),
        prepare: Callable[[], None] | None = None,
        wrapper: Sequence[str] = (),
        launch: Launch = subprocess.Popen,
        listener: Listener | None = None,
    ) -> None:
        """
        Args:
            program: the module to run, and arguments before `arguments`.
            prepare: runs in the child before the program does.
            wrapper: a command that starts the program.
        """
        self.name = name
        self._listener = listener
        self.lines: list[str] = []
        self.times = [time.monotonic()]
        """When it was started, and when each line came."""
        self._stderr_file = directory / f"{name}.stderr"
        self._changed = threading.Condition()
        self._ended = False
        faulty = ["tests.support.faults"] if VARIABLE in environment else []
        with self._stderr_file.open("wb") as stderr:
            self._child = launch(
                [*wrapper, sys.executable, "-m", *faulty, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=directory,
                env=dict(environment),
                text=True,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self._reader = threading.Thread(target=self._read, name=f"stdout of {name}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<{self.name}, process {self.pid}, exit code {self._child.poll()}>"

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that killed it."""
        return self._child.poll()

    @property
    def stderr(self) -> str:
        return self._stderr_file.read_text(encoding="utf-8", errors="replace")

    @property
    def complaints(self) -> list[str]:
        """Lines of stderr in which the command says how it ended; no log lines."""
        return [line for line in self.stderr.splitlines() if line.startswith("thinwire: ")]

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.send(signal.SIGINT)

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self._child.kill()
        self._child.wait()

    def stop(self) -> None:
        """Freeze it with SIGSTOP: alive, connected and silent."""
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        self.send(signal.SIGCONT)

    def wait_frozen(self) -> None:
        """Wait until a SIGSTOP has taken effect: a SIGCONT before that would be lost.

        The kernel notifies the parent, which is this process. Only the test's timeout bounds the wait.
        """
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if found is None or found.si_code != os.CLD_STOPPED:
            raise StuckError(f"{self.name} ended and never froze\n{self.report()}")

    def wait_exit(self, seconds: float = SECONDS) -> int:
        """Wait for the end of the process and of its output; returns the exit code."""
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StuckError(f"{self.name} did not end within {seconds:g} s\n{self.report()}") from None
        self._reader.join(seconds)
        return code

    def wait_line(self, wanted: Callable[[str], bool], seconds: float = SECONDS) -> str:
        """The first line of stdout that is `wanted`, past or to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(map(wanted, self.lines)), seconds)
            found = next(filter(wanted, self.lines), None)
        if found is None:
            why = "ended without" if self._ended else f"did not print within {seconds:g} s"
            raise StuckError(f"{self.name} {why} the line that the test waits for\n{self.report()}")
        return found

    def longest_silence(self) -> tuple[float, str]:
        """The longest time without a line, in seconds, and the line before it."""
        gaps = [later - earlier for earlier, later in pairwise(self.times)]
        return max(zip(gaps, ["", *self.lines[:-1]], strict=True), default=(0.0, ""))

    def report(self) -> str:
        """The last lines of its output."""
        output = "\n".join(self.lines[-12:])
        return f"==== {self!r}\n{output}\n---- stderr\n{self.stderr[-3000:]}"

    def reap(self) -> None:
        """Kill it if it runs, and free its resources."""
        if self.running:
            self._child.kill()
        self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._heard(line.rstrip("\n"))
        self._heard(None)

    def _heard(self, line: str | None) -> None:
        with self._changed:
            if line is None:
                self._ended = True
            else:
                self.lines.append(line)
                self.times.append(time.monotonic())
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(self, line)


class Coordinator(Process):
    """`thinwire coordinator --json` or `thinwire resume --json`: its lines are events."""

    @property
    def events(self) -> list[Event]:
        """All events so far."""
        return [from_json(line) for line in list(self.lines)]

    def all(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def wait_event(
        self, kind: type[E], where: Callable[[E], bool] = lambda _: True, seconds: float = SECONDS
    ) -> E:
        """The first event of a kind, past or to come, that `where` accepts."""

        def wanted(line: str) -> bool:
            event = from_json(line)
            return isinstance(event, kind) and where(event)

        event = from_json(self.wait_line(wanted, seconds))
        assert isinstance(event, kind)
        return event

    def wait_step(self, step: int, seconds: float = SECONDS) -> StepDone:
        """Wait until `step` steps, or more, are done."""
        return self.wait_event(StepDone, lambda done: done.step >= step, seconds)

    @property
    def token(self) -> str:
        """From the join line; waits for it."""
        return self.wait_event(JoinLine).line.split()[-1]

    @property
    def finished(self) -> RunFinished:
        """The last event of the run; waits for it."""
        return self.wait_event(RunFinished)

    @property
    def summary(self) -> RunSummary:
        """The last event's summary of this process; waits for it."""
        summary = self.finished.summary
        assert summary is not None, self.report()
        return summary
