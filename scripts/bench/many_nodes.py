"""A coordinator with a thousand members: `python -m scripts.bench.many_nodes [--stages 250] [--rows 4] ...`.

The coordinator is a real process. The members are *light*: they enrol with a token, keep a control session by
the program's own client, send heartbeats, take places, answer every step, report the layers of snapshots and
follow the run to fill a seat, but have no model and no torch.
Several hundred of them share a process. A vote has the same norms in every row, as honest nodes' have.

Measured: how long enrolments take at a given rate; the processor time and memory of the coordinator and of
its gateways while all members compute for some seconds a step (heartbeats are most of their work then);
seconds of a step that members answer after 50 ms; how long the page and `/metrics` take meanwhile. At last
members are killed, and new processes of the same nodes come back; none may be evicted for it. With
`--stages 8 --rows 125 --groups 250 --parts churn --churn-step-seconds 20 --back 10` steps have the length of
real ones, and rows that are whole take over the groups of others.

Figures of a part are written as soon as it is done. `--parts` leaves some of it out; `--within` ends the
churn early, so that the whole call takes no longer. With `--processes 8 --churn-minutes 3.5 --within 8.5` all
of it takes about seven minutes, if there are many cores.

After the churn, `evicted` counts nodes that the run shut out, `left_alive` nodes that left without being
killed, and `replaced_alive` nodes that lost their stage without being killed. All should be 0.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from node.lab.results import commit, hardware
from node.telemetry.events import QUARANTINED, StepCosts
from node.telemetry.history import EVICTED, HistoryTail
from scripts.bench.light_nodes import LEAST_STEP
from scripts.report import RESULTS, write

OUT = RESULTS / "many_nodes.json"
PARTS = ("steps", "heartbeats", "churn")
TELL_SECONDS = 20.0
"""Between two times that figures of the churn are written."""
LAST_SECONDS = 15.0
"""Of a call, after the churn."""
RUN_FILE = """
[run]
name = "many"
steps = 1000000
snapshot_every = 1000000
[model]
family = "llama"
layers = {layers}
hidden = 16
heads = 2
kv_heads = 2
ffn = 32
vocab = 256
sequence = 16
[data]
path = "{text}"
[training]
global_batch = {batch}
microbatch = 1
[pipeline]
stages = {stages}
groups = {groups}
forward_codec = "fp32"
backward_codec = "fp32"
window = 0
[coordinator]
listen = "127.0.0.1:0"
one_port = {one_port}
heartbeat_seconds = {heartbeat}
gateways = {gateways}
[snapshots]
keep = "nodes"
"""


class Output:
    """A process's JSON lines, read on a thread as they come."""

    def __init__(self, stream: IO[str], pool: ThreadPoolExecutor) -> None:
        self.lines: list[dict[str, Any]] = []
        self._done = pool.submit(self._read, stream)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("event") == kind]

    def wait(self, kind: str, count: int, seconds: float) -> None:
        """Wait for so many events of a kind. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while len(self.of(kind)) < count:
            if time.monotonic() > deadline or self._done.done():
                raise TimeoutError(f"{len(self.of(kind))} of {count} {kind} after {seconds:g} s")
            time.sleep(0.05)


class Told(Output):
    """The events of a run, read from its history as they come, without its costs."""

    def __init__(self, directory: Path, process: "subprocess.Popen[str]", pool: ThreadPoolExecutor) -> None:
        self.lines = []
        self._done = pool.submit(self._follow, HistoryTail(directory), process)

    def _follow(self, tail: HistoryTail, process: "subprocess.Popen[str]") -> None:
        while process.poll() is None:
            for entry in tail.read():
                if not isinstance(entry.event, StepCosts):
                    self.lines.append({"event": entry.event.event, **vars(entry.event)})
            time.sleep(0.05)


@contextlib.contextmanager
def started(command: list[str], log: Path, pool: ThreadPoolExecutor) -> Iterator[tuple[Any, Output]]:
    """A process and its output; it is ended with the block."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        try:
            yield process, Output(process.stdout, pool)  # type: ignore[arg-type]
        finally:
            process.kill()
            process.wait()


@dataclass
class Sample:
    """What a process had used at a moment."""

    at: float
    cpu: float
    """Processor seconds."""
    resident: int
    """Bytes."""

    @classmethod
    def of(cls, pid: int) -> "Sample":
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tick = os.sysconf("SC_CLK_TCK")
        cpu = (int(fields[11]) + int(fields[12])) / tick
        return cls(time.monotonic(), cpu, int(fields[21]) * resource.getpagesize())


def gateways_of(pid: int) -> list[int]:
    """Process ids of a coordinator's gateways."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


@dataclass
class Usage:
    """What a coordinator and its gateways had used at a moment."""

    core: Sample
    gateways: dict[int, Sample]

    @classmethod
    def of(cls, pid: int) -> "Usage":
        found = {}
        for child in gateways_of(pid):
            with contextlib.suppress(OSError):  # it has just ended
                found[child] = Sample.of(child)
        return cls(Sample.of(pid), found)

    def since(self, before: "Usage") -> dict[str, Any]:
        """Processor seconds meanwhile."""
        core, known = self.core, before.gateways
        each = [one.cpu - (known[pid].cpu if pid in known else 0.0) for pid, one in self.gateways.items()]
        seconds = core.at - before.core.at
        return {
            "seconds": seconds,
            "core_cpu": core.cpu - before.core.cpu,
            "gateways_cpu": sum(each),
            "cpu_share": (core.cpu - before.core.cpu) / seconds,
            "gateway_most_share": max(each, default=0.0) / seconds,
        }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def timed_gets(url: str, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as reply:
            reply.read()
        found.append(time.perf_counter() - began)
    return found


def measure(
    arguments: argparse.Namespace,
    folder: Path,
    pool: ThreadPoolExecutor,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """`tell` gets the whole report after each part."""
    end_at = time.monotonic() + 60 * arguments.within
    nodes = arguments.stages * arguments.rows
    text = folder / "text.txt"
    text.write_text("A thousand members share this text.\n" * 2000)
    run_file = folder / "many.toml"
    run_file.write_text(
        RUN_FILE.format(
            layers=arguments.stages,
            text=text,
            batch=2 * (arguments.groups or arguments.rows),
            groups=arguments.groups or arguments.rows,
            stages=arguments.stages,
            rows=arguments.rows,
            heartbeat=arguments.heartbeat,
            one_port=str(not arguments.several_ports).lower(),
            gateways=arguments.gateways if arguments.gateways.isdecimal() else '"auto"',
        )
    )
    run, python = folder / "run", [sys.executable, "-m"]
    command = [*python, "node.cli.main", "coordinator", str(run_file), "--run-dir", str(run)]
    with contextlib.ExitStack() as stack:
        coordinator, _ = stack.enter_context(started(command, folder / "coordinator.log", pool))
        output = Told(run, coordinator, pool)
        output.wait("page", 1, 60)
        page = output.of("page")[0]["url"]
        made = subprocess.run(
            [*python, "node.cli.main", "token", "create", str(run), "--uses", str(2 * nodes), "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
        token = json.loads(made.stdout)["token"]
        shares = [
            nodes // arguments.processes + (n < nodes % arguments.processes)
            for n in range(arguments.processes)
        ]
        every = arguments.processes / arguments.rate
        crowds = [
            stack.enter_context(
                started(
                    [
                        *python,
                        "scripts.bench.light_nodes",
                        token,
                        str(folder / f"crowd{n}"),
                        str(share),
                        str(every),
                    ],
                    folder / f"crowd{n}.log",
                    pool,
                )
            )
            for n, share in enumerate(shares)
        ]

        order = partial(_order, crowds)

        def events(kind: str) -> list[dict[str, Any]]:
            return [event for _, crowd in crowds for event in crowd.of(kind)]

        began = Sample.of(coordinator.pid)
        for _, crowd in crowds:
            crowd.wait("all-enrolled", 1, 120 + 4 * nodes / arguments.rate)
        enrolled = Sample.of(coordinator.pid)
        seconds = [event["seconds"] for event in events("enrolled")]
        report: dict[str, Any] = {
            "nodes": nodes,
            "enrolment": {
                "rate": arguments.rate,
                "refused": len(events("refused")),
                "median": statistics.median(seconds),
                "p99": percentile(seconds, 0.99),
                "most": max(seconds),
                "cpu_share": (enrolled.cpu - began.cpu) / (enrolled.at - began.at),
            },
        }
        tell(report)
        print(json.dumps(report["enrolment"]), flush=True)
        full = arguments.stages * arguments.rows

        def placed() -> bool:
            return any(len(event["nodes"]) == full for event in output.of("placement"))

        deadline = time.monotonic() + 300
        while not placed() and time.monotonic() < deadline:
            time.sleep(0.2)
        print("placed", [len(event["nodes"]) for event in output.of("placement")], flush=True)
        order()
        done = len(output.of("step"))
        output.wait("step", done + 3, 300)
        if "steps" in arguments.parts:
            report["step"] = _steps(coordinator.pid, output, arguments.seconds, page, nodes)
            tell(report)
            print(json.dumps(report["step"]), flush=True)
        if "heartbeats" in arguments.parts:
            order(step_seconds=arguments.step_seconds)
            done = len(output.of("step"))
            output.wait("step", done + 2, 60 + 4 * arguments.step_seconds)
            report["heartbeats"] = {
                "every": arguments.heartbeat,
                "step_seconds": arguments.step_seconds,
                **_steps(coordinator.pid, output, arguments.seconds, page, nodes),
            }
            tell(report)
            print(json.dumps(report["heartbeats"]), flush=True)
        if "churn" in arguments.parts:
            order(step_seconds=arguments.churn_step_seconds)
            done = len(output.of("step"))
            # The median of the newest nine is the usual step: before, steps were shorter.
            output.wait("step", done + 6, 60 + 8 * arguments.churn_step_seconds)
            for churned in _churn(arguments, crowds, output, coordinator.pid, end_at):
                report["churn"] = churned
                tell(report)
            print(json.dumps(report["churn"]), flush=True)
        end = Usage.of(coordinator.pid)
        report["resident_bytes"] = end.core.resident
        report["gateways"] = len(end.gateways)
        report["gateways_resident_bytes"] = sum(one.resident for one in end.gateways.values())
        report["ended"] = len(events("ended"))
        report["left"] = len(output.of("node-left"))
        report["notices"] = [event["text"] for event in output.of("notice")][-20:]
        tell(report)


def _steps(pid: int, output: Output, seconds: float, page: str, nodes: int) -> dict[str, Any]:
    """What steps, the page and `/metrics` take for so many seconds."""
    done, before = len(output.of("step")), Usage.of(pid)
    time.sleep(seconds / 2)
    used, calm = Usage.of(pid).since(before), len(output.of("step")) - done
    views, metrics = timed_gets(f"{page}api/view", 10), timed_gets(f"{page}metrics", 10)
    time.sleep(seconds / 2)
    steps = output.of("step")[done:]
    calm_seconds = [event["seconds"] for event in steps[:calm]]
    member_steps = max(1, calm) * nodes
    return {
        "steps": len(steps),
        "step_median": statistics.median(event["seconds"] for event in steps) if steps else None,
        "step_median_unlooked": statistics.median(calm_seconds) if calm else None,
        "step_most": max((event["seconds"] for event in steps), default=None),
        "cpu_share": used["cpu_share"],
        "gateways_cpu_share": used["gateways_cpu"] / used["seconds"],
        "gateway_most_share": used["gateway_most_share"],
        "cpu_a_step": used["core_cpu"] / max(1, calm),
        "core_ms_a_member_and_step": 1000 * used["core_cpu"] / member_steps,
        "gateways_ms_a_member_and_step": 1000 * used["gateways_cpu"] / member_steps,
        "view_median": statistics.median(views),
        "view_most": max(views),
        "metrics_median": statistics.median(metrics),
        "metrics_most": max(metrics),
    }


def _order(crowds: Any, **what: Any) -> None:
    """Tell all members."""
    for process, _ in crowds:
        process.stdin.write(json.dumps(what) + "\n")
        process.stdin.flush()


def _churn(
    arguments: argparse.Namespace, crowds: Any, output: Output, pid: int, end_at: float
) -> Iterator[dict[str, Any]]:
    """Kill random members, a share of `--churn` a minute; they start again. Yields the counts so far every
    `TELL_SECONDS`, and at the end."""
    random.seed(0)
    names = [{event["number"]: event["node"] for event in crowd.of("enrolled")} for _, crowd in crowds]
    everyone = [(crowd, number) for crowd, known in enumerate(names) for number in known]
    kinds = ("step", "step-aborted", "node-left", "replaced", "seat-lost", "seat-filled")
    began = {kind: len(output.of(kind)) for kind in kinds}
    calm = output.of("step")[-1]["seconds"]
    ended, before = sum(len(crowd.of("ended")) for _, crowd in crowds), Usage.of(pid)
    pause = 60 / (arguments.churn * len(everyone))
    end = min(before.core.at + arguments.churn_minutes * 60, end_at - LAST_SECONDS)
    killed: set[str] = set()
    away: dict[tuple[int, int], float] = {}
    """When they are there again."""
    deaths, tell_at = 0, before.core.at

    def seen() -> dict[str, Any]:
        used = Usage.of(pid).since(before)
        new = {kind: output.of(kind)[count:] for kind, count in began.items()}
        left = new["node-left"]
        return {
            "minutes": round(used["seconds"] / 60, 1),
            "share_a_minute": arguments.churn,
            "back_seconds": arguments.back,
            "deaths": deaths,
            "deaths_a_step": deaths * calm / used["seconds"],
            "calm_step_seconds": calm,
            "steps": len(new["step"]),
            "step_seconds": [round(event["seconds"], 1) for event in new["step"]],
            "goodput": len(new["step"]) * calm / used["seconds"],
            "seats_lost": len(new["seat-lost"]),
            "seats_filled": len(new["seat-filled"]),
            "aborted": sum(event["kind"] != "placement" for event in new["step-aborted"]),
            "placements_changed": sum(event["kind"] == "placement" for event in new["step-aborted"]),
            "evicted": sum(event["reason"].startswith((QUARANTINED, EVICTED)) for event in left),
            "left_alive": sum(event["node_id"] not in killed for event in left),
            "replaced_alive": sum(event["node_id"] not in killed for event in new["replaced"]),
            "ended": sum(len(crowd.of("ended")) for _, crowd in crowds) - ended,
            "cpu_share": used["cpu_share"],
            "gateways_cpu_share": used["gateways_cpu"] / used["seconds"],
            "gateway_most_share": used["gateway_most_share"],
        }

    for number in itertools.count(1):
        at = before.core.at + number * pause
        if at > end:
            break
        time.sleep(max(0.0, at - time.monotonic()))
        now = time.monotonic()
        crowd, member = random.choice([one for one in everyone if away.get(one, 0.0) <= now])
        away[crowd, member] = now + arguments.back + 1.0
        killed.add(names[crowd][member])
        process, _ = crowds[crowd]
        process.stdin.write(json.dumps({"kill": member, "back": arguments.back}) + "\n")
        process.stdin.flush()
        _order(crowds, gone=names[crowd][member])
        deaths += 1
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + TELL_SECONDS
            yield seen()
    yield seen()


def main() -> int:
    parser = argparse.ArgumentParser(description="A coordinator with a thousand light members.")
    parser.add_argument("--stages", type=int, default=250)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rate", type=float, default=20.0, help="enrolments a second (default 20)")
    parser.add_argument("--processes", type=int, default=4, help="that share the members (default 4)")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="seconds between heartbeats (default 2)")
    parser.add_argument("--gateways", default="auto", help="processes that keep sessions (default auto)")
    parser.add_argument("--several-ports", action="store_true", help="nodes have a port of their own")
    parser.add_argument(
        "--step-seconds", type=float, default=10.0, help="compute time of a slow step (default 10)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (default 30)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument(
        "--churn", type=float, default=0.05, help="share of members that die a minute (default 0.05)"
    )
    parser.add_argument(
        "--churn-step-seconds", type=float, default=LEAST_STEP, help="compute time of a step meanwhile"
    )
    parser.add_argument("--back", type=float, default=0.0, help="seconds until a killed member is back")
    parser.add_argument("--groups", type=int, default=0, help="gradient groups (default: as many as rows)")
    parser.add_argument("--churn-minutes", type=float, default=30.0)
    parser.add_argument("--within", type=float, default=1e6, help="minutes that the call takes at most")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    about = {
        "commit": commit(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "runs": 1,
        "stages": arguments.stages,
        "rows": arguments.rows,
        "groups": arguments.groups or arguments.rows,
        "one_port": not arguments.several_ports,
    }

    def tell(found: dict[str, Any]) -> None:
        write(arguments.out, {**about, "load_after": os.getloadavg()[0], **found})

    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(arguments.processes + 2) as pool:
        try:
            measure(arguments, Path(made), pool, tell)
        except Exception:
            for log in sorted(Path(made).glob("*.log")):
                print(log.name, log.read_text()[-2000:], sep="\n", file=sys.stderr)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
