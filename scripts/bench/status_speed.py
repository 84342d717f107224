"""Time `status`, `top --once` and loading the page, by run length: `python -m scripts.bench.status_speed`.

Makes a run directory with a history and a database of `--steps` steps, four stages, ten steps a second. The
event writer writes only the last `WRITTEN` steps, with its index; earlier ones are written directly in the
same format and file sizes. Times are processor seconds of a whole command (with Python's start) and wall
seconds, medians of `--runs`.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config.schema import RunConfig, RunSection
from node.coordinator.database import connect
from node.coordinator.store import Store
from node.lab.results import commit, hardware
from node.run_file.loader import to_json
from node.telemetry import events, history
from node.telemetry.clock import TimeKind
from node.view import checkpoint
from node.view.view_builder import RunViewBuilder
from node.view.view_builder import view as view_of
from scripts.report import RESULTS, write
from wire.figures import FlowFigures, LinkFigures
from wire.spec import Direction

OUT = RESULTS / "status_speed.json"
STAGES = 4
STEP_SECONDS = 0.1
WRITTEN = 5000
MOST_READ_WHOLE = 100_000
BEGAN = 1_700_000_000.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Time status, top and the page on a long history.")
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    rows = []
    for steps in arguments.steps:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(Path(folder, "run"), steps, arguments.runs))
            print(rows[-1], flush=True)
    report = {
        "commit": commit(),
        "hardware": hardware(),
        "python": platform.python_version(),
        "load_after": os.getloadavg()[0],
        "runs": arguments.runs,
        "stages": STAGES,
        "rows": rows,
    }
    write(arguments.out, report)
    return 0


def measure(directory: Path, steps: int, runs: int) -> dict[str, Any]:
    make_run(directory, steps)
    program = [sys.executable, "-m", "node.cli.main"]
    row: dict[str, Any] = {
        "steps": steps,
        "history_bytes": history.history_size(directory),
        "history_disk_bytes": sum(path.stat().st_size for path in history.history_files(directory)),
        "status": _timed(lambda: _run([*program, "status", str(directory)]), runs),
        "top": _timed(lambda: _run([*program, "top", "--once", str(directory)]), runs),
        "page": _timed(lambda: checkpoint.read_view(directory)[0].view(), runs, own=True),
        "highest_step": _timed(lambda: history.highest_step(directory), runs, own=True),
    }
    if steps <= MOST_READ_WHOLE:
        whole = ((entry.at, entry.event) for entry in history.read_history(directory))
        row["page_without_checkpoint"] = _timed(lambda: view_of(whole), 1, own=True)
    shown = json.loads(_run([*program, "status", "--json", str(directory)]))
    view = checkpoint.read_view(directory)[0].view()
    if shown["steps_done"] != steps or view.step != steps or view.loss_curve.steps[-1] != steps:
        raise SystemExit(f"wrong figures: {shown['steps_done']} and {view.step} steps, not {steps}")
    return row


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def _timed(work: Callable[[], object], runs: int, *, own: bool = False) -> dict[str, float]:
    """Median processor seconds (of this process with `own`, else of its children) and wall seconds."""
    who = resource.RUSAGE_SELF if own else resource.RUSAGE_CHILDREN
    busy, wall = [], []
    for _ in range(runs):
        before, start = resource.getrusage(who), time.perf_counter()
        work()
        after = resource.getrusage(who)
        wall.append(time.perf_counter() - start)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"processor_seconds": statistics.median(busy), "wall_seconds": statistics.median(wall)}


def make_run(directory: Path, steps: int) -> None:
    """Make the run directory of a coordinator that has done `steps` steps."""
    config = to_json(RunConfig(run=RunSection(name="long", steps=steps)))
    Store.create(directory, run_id="long-aaaaa", config_json=config, pin=bytes(32), now=BEGAN).close()
    database = connect(directory / "run.db")
    database.execute("BEGIN")
    rows = ((step, 1, _loss(step), 1.0, 1e-3, 1.0, 4096, STEP_SECONDS, _at(step)) for step in range(steps))
    database.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
    database.execute("COMMIT")
    database.close()

    builder, lines = RunViewBuilder(), _Lines(directory)
    for event in (_started(directory, steps), *map(_joined, range(STAGES)), _placed()):
        builder.apply(event, BEGAN)
        lines.add(event, BEGAN)
    direct = steps - WRITTEN
    costs, done = _costs(0), _done(0)
    for step in range(1, direct + 1):
        if step % 10 == 0:
            costs = replace(costs, step=step)
            builder.apply(costs, _at(step))
            lines.add(costs, _at(step))
        done = replace(done, step=step, loss=_loss(step))
        builder.apply(done, _at(step))
        lines.add(done, _at(step))
    lines.close()
    checkpoint._save(directory, builder, history.history_size(directory))

    now = _at(direct)
    writer = history.HistoryWriter(print, lambda: now, index=checkpoint.refresh)
    writer(_started(directory, steps, first_step=direct))
    for node in range(STAGES):
        writer(_joined(node))
    writer(_placed(direct))
    for step in range(direct + 1, steps + 1):
        now = _at(step)
        if step % 10 == 0:
            writer(_costs(step))
        writer(_done(step))
    writer.close()


class _Lines:
    """Writes events in the format of the event writer, into files of the same size."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rest: dict[type[events.Event], str] = {}
        """JSON of the constant fields by kind, because encoding a million whole events takes minutes."""
        self._file = (directory / history.HISTORY_FILE).open("w", encoding="utf-8")

    def add(self, event: events.Event, at: float) -> None:
        kind = type(event)
        if kind not in self._rest:
            fields = json.loads(event.to_json())
            changing = {"event", "step", "loss"} if kind in (events.StepDone, events.StepCosts) else {"event"}
            rest = {key: value for key, value in fields.items() if key not in changing}
            self._rest[kind] = json.dumps(rest, separators=(",", ":"))[1:]
        changed = f'"step":{event.step},' if isinstance(event, events.StepDone | events.StepCosts) else ""
        changed += f'"loss":{event.loss},' if isinstance(event, events.StepDone) else ""
        self._file.write(f'{{"at":{at:.3f},"event":"{event.event}",{changed}{self._rest[kind]}\n')
        if isinstance(event, events.NodeJoined):
            del self._rest[kind]
        if self._file.tell() >= history.SEGMENT_BYTES:
            self.close()
            history._rotate(self._directory)
            history._compress(history.history_files(self._directory)[-1])
            self._file = (self._directory / history.HISTORY_FILE).open("w", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def _at(step: int) -> float:
    return BEGAN + STEP_SECONDS * step


def _loss(step: int) -> float:
    return 2.0 + 3.0 / (1 + step / 1000)


def _started(directory: Path, steps: int, first_step: int = 0) -> events.RunStarted:
    return events.RunStarted(
        run_id="long-aaaaa",
        name="long",
        directory=str(directory),
        stages=STAGES,
        steps=steps,
        first_step=first_step,
        tokens_per_step=4096,
        forward_codec="tah",
        backward_codec="fixed-8",
        microbatches=16,
        codec_bits={"fp32": 32.03, "tah": 4.42, "fixed-8": 8.26},
    )


def _joined(node: int) -> events.NodeJoined:
    return events.NodeJoined(node_id=f"node-{node}", device="cpu", address="192.0.2.7:4711")


def _placed(step: int = 0) -> events.PlacementMade:
    nodes = tuple(f"node-{node}" for node in range(STAGES))
    return events.PlacementMade(epoch=1, nodes=nodes, resume_step=step, blocks=(2,) * STAGES)


def _done(step: int) -> events.StepDone:
    return events.StepDone(
        step=step,
        steps=1_000_000,
        loss=_loss(step),
        lr=1e-3,
        grad_norm=1.0,
        seconds=STEP_SECONDS,
        tokens_per_second=4096 / STEP_SECONDS,
        idle=(0.44, 0.44, 0.38, 0.43),
        bits_forward=4.42,
        bits_backward=8.26,
        up_mbit=(6.1, 18.2, 18.3, 12.4),
        down_mbit=(12.4, 18.3, 18.2, 6.1),
    )


def _costs(step: int) -> events.StepCosts:
    seconds = {kind.value: 1.0 / len(TimeKind) for kind in TimeKind}
    stages = tuple(
        events.StageCost(
            stage=stage,
            node_id=f"node-{stage}",
            wall_seconds=1.0,
            seconds=seconds,
            memory_bytes=300_000_000,
            peak_memory_bytes=400_000_000,
        )
        for stage in range(STAGES)
    )
    pairs = [pair for low in range(STAGES - 1) for pair in ((low, low + 1), (low + 1, low))]
    links = tuple(map(_link, pairs))
    return events.StepCosts(step=step, seconds=1.0, aborted=False, stages=stages, links=links)


def _link(pair: tuple[int, int]) -> LinkFigures:
    direction, codec = (Direction.ACTIVATION, "tah") if pair[0] < pair[1] else (Direction.GRADIENT, "fixed-8")
    flow = FlowFigures(direction=direction, codec=codec, bytes=1_000_000, elements=1_800_000)
    return LinkFigures(
        source=pair[0],
        target=pair[1],
        bytes=1_000_000,
        flows=(flow,),
        busy_seconds=0.25,
        capacity=4e6,
        round_trip_seconds=0.02,
        retransmits=0,
        rejects=0,
        queued_bytes=0,
    )


if __name__ == "__main__":
    sys.exit(main())
