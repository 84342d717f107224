"""`thinwire lab run` itself: the smoke profile from command to table, and what is left of a killed one."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.cli.main import main
from node.lab import namespaces
from node.telemetry.events import RunFinished
from node.telemetry.history import read_history
from node.telemetry.trace import align
from node.telemetry.trace_files import read_batches
from tests.support.paths import ROOT, python_path
from wire.errors import UserError

SMOKE = ROOT / "deploy" / "lab" / "smoke.toml"
SECONDS = 480.0
EARLY_SECONDS = 60.0
"""Of each wait for a lab that ends early."""
MARK = "THINWIRE_LAB_TEST"


@pytest.fixture(scope="module")
def laboratory() -> None:
    try:
        namespaces.working_flags()
    except UserError as error:
        pytest.skip(f"no laboratory can be built here: {error}")


@pytest.fixture
def mark() -> Iterator[str]:
    """In the environment of every process of a test; whoever is left is killed."""
    name = uuid.uuid4().hex
    yield name
    for pid in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "node.cli.main", "lab", *arguments]


def environment(mark: str) -> dict[str, str]:
    return {**os.environ, MARK: mark, "PYTHONPATH": python_path()}


def marked(mark: str) -> list[int]:
    """Processes whose environment holds the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def roles(mark: str) -> dict[str, list[int]]:
    """The processes of a lab that last: of others that it starts, such as `ip`, any may be gone again."""
    words = {"lab": "--inside", "coordinator": "coordinator", "node": "node.cli.lab_node"}
    found: dict[str, list[int]] = {role: [] for role in words}
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            program, *arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            for role, word in words.items():
                # Of the lab the first process of the private place is meant, not `unshare`, which made that.
                if program == sys.executable and word in arguments:
                    found[role].append(pid)
    return found


def complete(found: dict[str, list[int]]) -> bool:
    return {role: len(pids) for role, pids in found.items()} == {"lab": 1, "coordinator": 1, "node": 2}


def host() -> tuple[list[str], list[str], list[str]]:
    """Devices, named namespaces and mounts that everybody here sees."""
    names = sorted(path.name for path in Path("/sys/class/net").iterdir())
    netns = Path("/run/netns")
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return names, sorted(path.name for path in netns.iterdir()) if netns.exists() else [], mounts


def wait_end(pids: list[int], seconds: float) -> None:
    """Until all these processes are gone."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            assert ended, f"process {pid} lives on"
        finally:
            os.close(handle)


def link_seconds(cell: dict[str, Any]) -> float:
    """What a step's bytes take over the busiest direction of the link, at the rate that was asked for."""
    busiest = max(8e-6 * link["own_bytes"] / link["asked_mbit"] for link in cell["wires"])
    return float(busiest) / int(cell["measured_steps"])


def most_in_flight(run: Path, cell: dict[str, Any]) -> int:
    """Microbatches between their two passes at the first stage, the most in a measured step: by the trace of
    the run that was kept. Window 0 allows as many as there are stages."""
    measured = [step for step, _, _ in cell["curve"]][-cell["measured_steps"] :]
    # Steps are numbered from 1, spans from 0.
    spans = align(read_batches(run, measured[0] - 2, measured[-1]), measured[0] - 1, measured[-1] - 1).spans
    most = now = 0
    for one in sorted((one for one in spans if one.stage == 0), key=lambda one: one.start):
        now += {"forward": 1, "backward": -1}.get(one.span.kind, 0)
        most = max(most, now)
    return most


def look_at(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that the lab kept, by the commands for runs."""
    # The coordinator wrote to the end: it was asked to, before it was killed.
    *_, last = read_history(first)
    assert isinstance(last.event, RunFinished)
    capsys.readouterr()

    def ask(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    traced = ask("trace", str(first))
    assert traced["stages"] == 2 and traced["spans"] > 50
    assert Path(traced["file"]).parent == first
    compared = ask("compare", str(first), str(second))
    assert compared["config"]["pipeline.forward_codec"] == ["fp32", "tah"]
    assert compared["config"]["pipeline.window"] == ["auto", 0]
    bits = compared["bits"]["activation"]
    assert bits[0] > 5 * bits[1]
    assert min(compared["steps"]) >= 15


@pytest.mark.timeout(600)
def test_the_smoke_profile_measures_what_a_slow_link_costs(
    laboratory: None, mark: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = host()
    out = tmp_path / "out"
    run = [*command("run", str(SMOKE), "--out", str(out), "--no-plots")]
    # The limit is over before the first run: the same command goes on.
    done = subprocess.run(
        [*run, "--time-limit", "0.5"],
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    first = json.loads((out / "results.json").read_text())
    assert not first["finished"] and first["cells"] == []
    assert "the same command goes on" in done.stdout

    done = subprocess.run(
        run,
        env=environment(mark),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert host() == before
    assert marked(mark) == []
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert results["finished"]
    fp32, tah = results["cells"]
    told = [(cell["key"]["forward_codec"], cell["key"]["window"]) for cell in results["cells"]]
    assert told == [("fp32", "auto"), ("tah", 0)]
    assert (results["profile_file"], results["overrides"], results["only"]) == ("smoke.toml", [], [])

    assert fp32["bits_forward"] == pytest.approx(32, abs=0.1)
    assert 4.4 < tah["bits_forward"] < 4.8 and 6.2 < tah["bits_backward"] < 6.6
    # Packed tensors take about a fifth of the link's time. How much of a step that is depends on the machine.
    assert 4 * link_seconds(tah) < link_seconds(fp32) < 1.1 * fp32["floor"]["seconds"]
    for cell in results["cells"]:
        assert [link["asked_mbit"] for link in cell["wires"]] == [10.0, 10.0]
        for link in cell["wires"]:
            assert 0 < link["use"] <= 1.1
    # What the kernel counted is what the program wrote, and headers. The two are read at different moments,
    # so that only a cell of long steps tells.
    assert all(-0.2 < link["overhead"] < 0.4 for link in fp32["wires"])
    for found in results["calibrations"]:
        for link in found["links"]:
            assert link["payload_mbit"] == pytest.approx(10 * 1448 / 1514, rel=0.05)
    assert results["machine"]["kernel"] == os.uname().release
    assert results["network"]["qdisc"] == "tbf"
    assert results["network"]["congestion_control"]
    assert sorted(path.name for path in out.iterdir()) == ["logs", "raw", "results.json", "runs"]
    lines = [json.loads(line) for line in (out / "raw" / f"{tah['run']}.jsonl").read_text().splitlines()]
    assert (out / "logs" / tah["run"] / "node0.log").exists()
    runs = out / "runs"
    assert sum(path.stat().st_size for path in runs.rglob("*") if path.is_file()) < 2 * 300_000
    assert {line["kind"] for line in lines} == {"warmup", "measured"}
    assert most_in_flight(runs / tah["run"], tah) == 2
    look_at(runs / fp32["run"], runs / tah["run"], capsys)

    assert main(["lab", "table", str(out / "results.json")]) == 0
    table = capsys.readouterr().out
    assert all(f"{cell['tokens_per_second']['median']:.0f} (" in table for cell in (fp32, tah))


@pytest.mark.timeout(4 * EARLY_SECONDS)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_an_interrupted_lab_leaves_no_processes(
    number: signal.Signals, code: int, laboratory: None, mark: str, tmp_path: Path
) -> None:
    before = host()
    with subprocess.Popen(
        command("run", str(SMOKE), "--out", str(tmp_path / "out")),
        env=environment(mark),
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            assert any("starting" in line for line in child.stdout)
            # Namespaces and links are there by now, a coordinator and two nodes soon.
            deadline, pause = time.monotonic() + EARLY_SECONDS, threading.Event()
            while not complete(running := roles(mark)):
                assert time.monotonic() < deadline, running
                pause.wait(0.05)
            if number is signal.SIGKILL:
                # The lab itself can do nothing any more: it is the kernel that takes all of it away.
                os.kill(*running["lab"], signal.SIGSTOP)
            processes = marked(mark)
            child.send_signal(number)
            wait_end(processes, EARLY_SECONDS)
            assert child.wait(EARLY_SECONDS) == code
        finally:
            child.kill()
    assert marked(mark) == []
    assert host() == before


def refusal(words: list[str], env: dict[str, str], folder: Path) -> str:
    """The one line with which a command ends with exit code 2."""
    done = subprocess.run(
        words, env=env, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_a_lab_without_iproute2_names_the_package(tmp_path: Path, mark: str) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    # Debian's own place for them is looked at too, whatever the path says.
    program = (
        "import sys; import node.lab.tools; node.lab.tools.SBIN = (); from node.cli.main import main; "
        f"sys.exit(main({['lab', 'run', str(SMOKE)]!r}))"
    )
    said = refusal([sys.executable, "-c", program], {**environment(mark), "PATH": str(bare)}, tmp_path)
    assert "install iproute2" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "none.toml"], "none.toml"),
        (["run", str(SMOKE), "lab.stepz=1"], "did you mean 'steps'?"),
        (["run", str(SMOKE), "--time-limit", "-1"], "--time-limit must be"),
        (["run", str(SMOKE), "--only", "tah"], "--only 'tah'"),
        (["table", "none.json"], "none.json"),
        (["tabel"], "did you mean 'table'?"),
    ],
)
@pytest.mark.usefixtures("own_home")
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []
