"""What a step costs beside its arithmetic: `python -m scripts.bench.small_steps [--checkout NAME=PATH ...]`.

Trains a Llama of 215,000 parameters on 256 tokens a step by the program, with one stage and with four, on
loopback, and by the reference trainer (plain torch) in this process. Such steps compute little: what the
program takes beyond plain torch are its messages, its writes to disk and its wake-ups.

Checkouts of the program take turns, so that a busy machine is as busy for each. The coordinator's events time
the steps; processor time is what the processes of the coordinator and the nodes used in these steps.

Trees without git: `--commit NAME=COMMIT` says which one each is, and THINWIRE_COMMIT that of this one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import Any

import torch

from node.config.schema import (
    CoordinatorSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TelemetrySection,
    TrainingSection,
)
from node.data.shards import load_data
from node.lab.results import commit, processor
from node.run_file.loader import toml_value
from node.telemetry.events import Event, JoinLine, StepDone, from_json
from tests.support.reference_trainer import ReferenceTrainer

WARM, STEPS = 30, 150
"""Steps that are not counted, and all steps."""
STAGES = (1, 4)
CONFIG = RunConfig(
    run=RunSection(name="small", steps=STEPS, snapshot_every=10_000),
    model=ModelSection(layers=4, hidden=64, heads=4, kv_heads=2, ffn=172, vocab=256, sequence=64),
    training=TrainingSection(global_batch=4, microbatch=1),
    telemetry=TelemetrySection(),
    coordinator=CoordinatorSection(listen="127.0.0.1:0"),
)
TICKS = os.sysconf("SC_CLK_TCK")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Timed:
    """A run's steps after `WARM`: median seconds a step, and processor seconds a step by process."""

    seconds: float
    processor: dict[str, float]


def run_file(config: RunConfig) -> str:
    """What differs from the defaults, so that checkouts with fewer keys and sections read it too."""
    blocks = []
    for name, section in vars(config).items():
        usual = vars(type(section)())
        lines = [
            f"{key} = {toml_value(value)}" for key, value in vars(section).items() if value != usual[key]
        ]
        if lines:
            blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n".join(blocks) + "\n"


def events(coordinator: "subprocess.Popen[str]") -> Iterator[Event]:
    assert coordinator.stdout is not None
    for line in coordinator.stdout:
        yield from_json(line)


def used(pid: int) -> float:
    """Processor seconds of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run(checkout: Path, stages: int) -> Timed:
    """Train with so many stages, each a process of one thread."""
    config = replace(CONFIG, pipeline=PipelineSection(stages=stages))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        where = Path(folder)
        (where / "run.toml").write_text(run_file(config), encoding="utf-8")

        def start(*arguments: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [sys.executable, "-m", "node.cli.main", *arguments],
                cwd=checkout,
                env=environment,
                stdout=subprocess.PIPE if arguments[0] == "coordinator" else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        coordinator = start("coordinator", str(where / "run.toml"), "--run-dir", str(where / "run"), "--json")
        processes = {"coordinator": coordinator}
        seconds: list[float] = []
        before: dict[str, float] = {}
        for event in events(coordinator):
            if isinstance(event, JoinLine):
                for stage in range(stages):
                    processes[f"node {stage}"] = start(
                        *("join", event.line.split()[-1], "--listen", "127.0.0.1:0", "--device", "cpu"),
                        *("--threads", "1", "--wait", "0", "--state-dir", str(where / f"node-{stage}")),
                    )
            if isinstance(event, StepDone):
                if event.step == WARM:
                    before = {name: used(process.pid) for name, process in processes.items()}
                elif event.step > WARM:
                    seconds.append(event.seconds)
                if event.step == STEPS - 1:
                    break
        if not before:
            raise SystemExit(f"{checkout}: the run did not reach step {WARM}")
        after = {name: used(process.pid) for name, process in processes.items()}
        each = {name: (after[name] - before[name]) / (STEPS - 1 - WARM) for name in after}
        return Timed(statistics.median(seconds), each)


def plain_torch() -> float:
    """Median seconds of a step of the unsplit model, on one thread."""
    torch.set_num_threads(1)
    config = replace(CONFIG, pipeline=PipelineSection(stages=1, forward_codec="fp32", backward_codec="fp32"))
    data = load_data(config)
    trainer = ReferenceTrainer(config, data)
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        trainer.train_step()
        seconds.append(time.perf_counter() - began)
    data.close()
    return statistics.median(seconds[WARM:])


def report(timed: Sequence[Timed]) -> dict[str, Any]:
    """Of several runs: the median of each figure."""
    names = timed[0].processor
    return {
        "seconds_per_step": statistics.median(one.seconds for one in timed),
        "runs_seconds": [one.seconds for one in timed],
        "processor_seconds_per_step": statistics.median(sum(one.processor.values()) for one in timed),
        "by_process": {name: statistics.median(one.processor[name] for one in timed) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a small step costs.")
    parser.add_argument(
        "--checkout", action="append", default=[], metavar="NAME=PATH", help="a tree; repeat it"
    )
    parser.add_argument("--commit", action="append", default=[], metavar="NAME=COMMIT", help="of a checkout")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, of which the median counts")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    checkouts = dict(one.split("=", 1) for one in args.checkout) or {"this": str(Path.cwd())}
    commits = {name: commit_of(Path(path).resolve()) for name, path in checkouts.items()}
    commits |= dict(one.split("=", 1) for one in args.commit)
    found: dict[tuple[str, int], list[Timed]] = {}
    torch_seconds = []
    for _ in range(args.rounds):
        torch_seconds.append(plain_torch())
        for stages in STAGES:
            for name, path in checkouts.items():
                timed = run(Path(path).resolve(), stages)
                found.setdefault((name, stages), []).append(timed)
                speed = f"{name}, {stages} stages: {1 / timed.seconds:.1f} steps/s"
                print(speed, {key: round(1e3 * ms, 1) for key, ms in timed.processor.items()}, flush=True)
    figures: dict[str, Any] = {
        "plain_torch_seconds_per_step": statistics.median(torch_seconds),
        "checkouts": {
            name: {str(stages): report(found[name, stages]) for stages in STAGES} for name in checkouts
        },
        "commits": commits,
        "steps": STEPS - 1 - WARM,
        "rounds": args.rounds,
        "hardware": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n", encoding="utf-8")


def commit_of(checkout: Path) -> str:
    """A tree's commit; "unknown" if it is neither under git nor this one."""
    if checkout == ROOT:
        return commit()
    command = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    found = subprocess.run(command, capture_output=True, text=True, check=False) if which("git") else None
    return found.stdout.strip() if found is not None and found.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
