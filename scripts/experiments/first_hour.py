"""Record a run with friends, as its people see it: `python -m scripts.experiments.first_hour --json PATH`.

A coordinator and two machines with names, all on this machine, by the commands that people type: start, join,
change a setting while it runs, stop by Ctrl-C, resume for more steps without a new paste, end. Every line of
every terminal is recorded with the second at which it came. scripts/docs makes the README's excerpt from it.
"""

import argparse
import json
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from node.lab.results import commit, processor

TOKEN = re.compile(r"tw1_\w+(?:-\w+)*")
LIMIT_SECONDS = 300.0
"""For each thing that is waited for."""
STEPS, MORE = 60, 90
CHANGED_AT, STOPPED_AT = 20, 40


@dataclass
class Terminal:
    """One command, and what it has printed."""

    who: str
    typed: str
    process: "subprocess.Popen[str]"
    began: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.changed:
                self.lines.append((round(time.monotonic() - self.began, 1), line.rstrip("\n")))
                self.changed.notify_all()

    def wait_for(self, words: str, seconds: float = LIMIT_SECONDS) -> str:
        """The first line with these words. Raises SystemExit if it does not come."""

        def found() -> str | None:
            return next((line for _, line in self.lines if words in line), None)

        with self.changed:
            if not self.changed.wait_for(lambda: found() is not None, seconds):
                raise SystemExit(f"{self.who} never printed {words!r}: {self.lines}")
            line = found()
            assert line is not None
            return line


class Scene:
    """The terminals, in the order in which they were opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.terminals: list[Terminal] = []

    def open(self, who: str, *words: str, show: str = "") -> Terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "node.cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        terminal = Terminal(who, f"thinwire {show or ' '.join(words)}", process, self.began)
        self.terminals.append(terminal)
        threading.Thread(target=terminal.read, daemon=True).start()
        return terminal

    def end(self) -> None:
        for terminal in self.terminals:
            terminal.process.kill()
            terminal.process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port


def play(scene: Scene) -> None:
    """The whole journey."""
    run = str(scene.folder / "run")
    settings = ("pipeline.stages=2", f"run.steps={STEPS}", "training.schedule=constant", "run.name=friends")
    where = f"coordinator.listen=127.0.0.1:{free_port()}"
    first = scene.open(
        *("coordinator", "coordinator", "demo", "--run-dir", run, *settings, where),
        show="coordinator friends.toml",
    )
    token = first.wait_for("thinwire join ").split()[-1]
    friends = [
        scene.open(
            *(name, "join", token, "--name", name, "--listen", "127.0.0.1:0", "--threads", "1"),
            *("--device", "cpu", "--state-dir", str(scene.folder / name.split()[0])),
            show=f'join tw1_... --name "{name}"',
        )
        for name in ("Ana's 4090", "Ben's laptop")
    ]
    wait_for_step(first, CHANGED_AT)
    scene.open("operator", "set", run, "pipeline.window=2", show="set runs/friends-1 pipeline.window=2")
    first.wait_for("the run continues with pipeline.window=2")
    wait_for_step(first, STOPPED_AT)
    first.process.send_signal(signal.SIGINT)
    first.process.wait(LIMIT_SECONDS)
    for friend in friends:
        friend.wait_for("for the run to continue")
    second = scene.open(
        "coordinator", "resume", run, f"run.steps={MORE}", show=f"resume runs/friends-1 run.steps={MORE}"
    )
    for terminal in (second, *friends):
        terminal.process.wait(LIMIT_SECONDS)


def wait_for_step(terminal: Terminal, least: int, seconds: float = LIMIT_SECONDS) -> None:
    """Until a line of this step or a later one is there; not every step has a line."""

    def reached() -> bool:
        steps = [line.split("/")[0].split()[-1] for _, line in terminal.lines if line.startswith("step ")]
        return any(int(step) >= least for step in steps)

    with terminal.changed:
        if not terminal.changed.wait_for(reached, seconds):
            raise SystemExit(f"step {least} never came: {terminal.lines[-5:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a run with friends.")
    parser.add_argument("--json", type=Path, required=True, help="write the recording there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        try:
            play(scene)
        finally:
            scene.end()
        terminals: list[dict[str, Any]] = [
            {
                "who": terminal.who,
                "typed": terminal.typed,
                "exit_code": terminal.process.returncode,
                "lines": [
                    [at, TOKEN.sub("tw1_...", line.replace(f"{folder}/run", "runs/friends-1"))]
                    for at, line in terminal.lines
                ],
            }
            for terminal in scene.terminals
        ]
    recording = {
        "terminals": terminals,
        "hardware": processor(),
        "python": platform.python_version(),
        "commit": commit(),
        "runs": 1,
    }
    args.json.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
