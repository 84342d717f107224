"""The demo's care for its processes, with stand-ins for the coordinator and the nodes.

A stand-in is one Python file. `coordinator` prints events and `join` waits; what each does besides is told by
the files in the run directory's `script` folder, and every stand-in leaves its process id in `pids`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.processes import demo
from node.processes.demo import demo_file, run_demo
from node.telemetry.events import Event, JoinLine, Notice, RunFinished, RunStarted
from wire.errors import RunError, UserError

HEARS_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
"""For a program: tests may themselves be run by something that ignores them."""
STAND_IN = textwrap.dedent(
    """
    import os, pathlib, signal, sys, time

    role, plan = sys.argv[1], {plan!r}
    directory = pathlib.Path({directory!r})
    name = role if role == "coordinator" else pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1]).name
    (directory / f"{{name}}.args").write_text(" ".join(sys.argv[1:]))
    def end(*_):
        (directory / f"{{name}}.asked").touch()
        os._exit(0)

    if role == "join":
        signal.signal(signal.SIGTERM, end)
    # Whoever sees the name reads it whole.
    (directory / f"{{name}}.written").write_text(str(os.getpid()))
    (directory / f"{{name}}.written").rename(directory / f"{{name}}.pid")
    class Flag:  # set by a signal; a `threading.Event` that is waited for may hold its lock then
        value = False

        def set(self, *_):
            self.value = True

        def is_set(self):
            return self.value

        def wait(self, seconds):
            end = time.monotonic() + seconds
            while not self.value and time.monotonic() < end:
                time.sleep(0.002)
            return self.value

    interrupted, over = Flag(), directory / "over"
    signal.signal(signal.SIGINT, interrupted.set)
    released = Flag()  # by the test
    signal.signal(signal.SIGUSR1, released.set)

    def say(event):
        print(event.to_json(), flush=True)

    def wait_until(condition, seconds=30):
        for _ in range(int(seconds / 0.01)):
            if condition() or interrupted.wait(0.01):
                return

    if role == "coordinator":
        if "refuse" in plan:
            sys.stderr.write("thinwire: error: run.toml: no good\\n")
            sys.exit(2)
        sys.path[:0] = {path!r}
        from node.telemetry.events import JoinLine, Notice, RunFinished, RunStarted

        say(RunStarted(run_id="r", name="demo", directory="d", stages=2, steps=1, first_step=0,
                       tokens_per_step=1, forward_codec="tah", backward_codec="fixed-8"))
        say(JoinLine(line="thinwire join tw1_secret"))
        wait_until(lambda: all((directory / f"node-{{i}}.pid").exists() for i in range(2)))
        say(Notice(text="nodes are here"))
        if "go on" in plan:
            wait_until(released.is_set)
        if "end slowly" in plan:
            say(Notice(text="ending"))
            released.wait(30)
        if "die" in plan:
            sys.exit(3)
        say(RunFinished(reason="stopped" if interrupted.is_set() else "done", failed="fail" in plan))
        over.touch()  # not before: nodes end at once, and a demo that has not heard why takes it for trouble
        sys.exit(1 if "fail" in plan else 130 if interrupted.is_set() else 0)
    if "node dies" in plan and name == "node-1":
        sys.stderr.write("something before\\nthinwire: error: out of memory\\n\\n")
        sys.exit(7)
    if "node stays" in plan and name == "node-1":
        wait_until(lambda: False, 60)
    wait_until(over.exists)
    """
)


class Stage:
    """A place with a stand-in program and what was seen of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.events: list[Event] = []

    def command(self, *plan: str) -> list[str]:
        program = self.directory / "stand_in.py"
        root = str(Path(demo.__file__).parents[2])
        program.write_text(STAND_IN.format(path=[root], plan=plan, directory=str(self.directory)))
        return [sys.executable, str(program)]

    def run(self, *plan: str, overrides: tuple[str, ...] = ()) -> int:
        command = self.command(*plan)
        return run_demo(run_dir=self.run_dir, emit=self.events.append, overrides=overrides, command=command)

    def alive(self) -> list[str]:
        """The stand-ins that still run."""
        found = []
        for path in self.directory.glob("*.pid"):
            try:
                os.kill(int(path.read_text()), 0)
            except ProcessLookupError:
                continue
            found.append(path.stem)
        return found


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(demo, "GRACE_SECONDS", 30.0)
    monkeypatch.setattr(demo, "STOP_SECONDS", 30.0)
    return Stage(tmp_path)


def test_a_run_from_its_join_line_to_its_end(stage: Stage) -> None:
    assert stage.run(overrides=("run.steps=3",)) == 0
    assert [type(event) for event in stage.events] == [RunStarted, JoinLine, Notice, RunFinished]
    assert stage.alive() == []
    asked = (stage.directory / "coordinator.args").read_text()
    assert asked == f"coordinator {demo_file()} --run-dir {stage.run_dir} --json run.steps=3"
    for name in ("node-0", "node-1"):
        asked = (stage.directory / f"{name}.args").read_text()
        assert asked.startswith("join tw1_secret --listen 127.0.0.1:0 --device cpu --wait 0 --threads ")
        assert asked.endswith(f"--state-dir {stage.run_dir / 'nodes' / name}")
    assert {path.name for path in (stage.run_dir / "logs").iterdir()} == {
        "coordinator.log",
        "node-0.log",
        "node-1.log",
    }


def test_a_failed_run_gives_the_coordinators_exit_code(stage: Stage) -> None:
    assert stage.run("fail") == 1
    assert stage.alive() == []


def test_a_coordinator_that_refuses_is_quoted_and_leaves_no_folder(stage: Stage) -> None:
    with pytest.raises(UserError, match=r"^run\.toml: no good$"):
        stage.run("refuse")
    assert stage.alive() == []
    assert not stage.run_dir.exists()


def test_nodes_end_when_their_coordinator_dies(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 0.2)  # the nodes know nothing of it and must be killed
    with pytest.raises(RunError, match="is its disk full"):
        stage.run("die")
    assert stage.alive() == []


def test_a_node_that_dies_ends_the_demo_and_is_quoted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "GRACE_SECONDS", 0.2)
    with pytest.raises(RunError, match=r"^out of memory \(node-1 ended with exit code 7; .*node-1\.log\)$"):
        stage.run("node dies", "go on")
    assert stage.alive() == []
    assert RunFinished(reason="stopped", failed=False) in stage.events


def test_a_node_that_outstays_the_run_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "STOP_SECONDS", 1.0)
    assert stage.run("node stays") == 0
    assert stage.alive() == []
    told = stage.events[-1]
    assert isinstance(told, Notice) and "node-1" in told.text and "killed" in told.text


@contextlib.contextmanager
def running(stage: Stage, *plan: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """A demo in a process of its own, once its nodes are here."""
    program = before + driver(stage, *stage.command(*plan))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert any('"nodes are here"' in line for line in child.stdout or ())
            yield child
        except BaseException:
            child.terminate()
            raise
    assert stage.alive() == []


def test_a_signal_ends_every_process(stage: Stage) -> None:
    """The tests below send Ctrl-C and hang up."""
    with running(stage, "go on") as child:
        assert set(stage.alive()) == {"coordinator", "node-0", "node-1"}
        child.send_signal(signal.SIGTERM)
        rest, _ = child.communicate(timeout=150)
    assert (child.returncode, '"reason": "stopped"' in rest) == (130, True)


def test_a_node_that_has_yet_to_join_is_asked_to_end_with_the_demo(stage: Stage) -> None:
    with running(stage, "go on", "node stays") as child:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=150)
    assert child.returncode == 130
    assert (stage.directory / "node-1.asked").exists(), "it was killed"


def test_a_closed_pipe_gives_no_traceback_and_the_run_ends_normally(stage: Stage) -> None:
    program = driver(stage, *stage.command())
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert "started" in child.stdout.readline()
        child.stdout.close()
        complaint = child.stderr.read()
    assert child.returncode == 0
    assert complaint == "the output cannot be written (Broken pipe); the run continues without it\n"
    assert stage.alive() == []


def test_a_demo_under_nohup_outlives_its_terminal(stage: Stage) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    with running(stage, "go on", before=ignoring) as child:
        child.send_signal(signal.SIGHUP)
        # The coordinator ends the run well: as it does when the demo did not stop it.
        os.kill(int((stage.directory / "coordinator.pid").read_text()), signal.SIGUSR1)
        rest, _ = child.communicate(timeout=150)
    assert (child.returncode, '"reason": "done"' in rest) == (0, True)


def test_a_second_hangup_does_not_cut_the_end_short(stage: Stage) -> None:
    with running(stage, "go on", "end slowly", before=HEARS_HANGUPS) as child:
        child.send_signal(signal.SIGHUP)
        assert any('"ending"' in line for line in child.stdout or ())
        child.send_signal(signal.SIGHUP)
        os.kill(int((stage.directory / "coordinator.pid").read_text()), signal.SIGUSR1)
        rest, _ = child.communicate(timeout=150)
    assert (child.returncode, '"reason": "stopped"' in rest) == (130, True)


def driver(stage: Stage, *command: str) -> str:
    """A program that runs the demo on stand-ins and prints its events."""
    return textwrap.dedent(
        f"""
        import pathlib, sys
        from node.display.render import make_renderer
        from node.processes.demo import run_demo
        try:
            code = run_demo(run_dir=pathlib.Path({str(stage.run_dir)!r}), command={list(command)!r},
                            emit=make_renderer(json=True))
        except KeyboardInterrupt:
            code = 130
        sys.exit(code)
        """
    )


def test_the_installed_recipe_has_four_stages() -> None:
    assert tomllib.loads(demo_file().read_text())["pipeline"]["stages"] == 4
