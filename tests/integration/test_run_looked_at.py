"""The records of a run: history, trace, `top`, `status`, `compare`; also after a kill."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from node.telemetry import events
from node.telemetry.clock import TimeKind
from node.telemetry.history import read_history
from node.telemetry.trace import align
from node.telemetry.trace_files import read_batches
from node.view.view_builder import view
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run, Still

STEPS = 12
CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=STEPS, snapshot_every=4),
    model=replace(SMALL.model, layers=3),
    pipeline=replace(SMALL.pipeline, stages=3, forward_codec="tah", backward_codec="fixed-8"),
)
MICROSECOND = 1.01
"""Starts and lengths are rounded to microseconds each."""


@pytest.mark.timeout(240)
def test_a_run_can_be_looked_at_when_it_is_over(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=6)) as run:
        coordinator = run.start()
        run.add_nodes(3)
        doomed = run.wait_still()
        doomed.kill()
        run.add_node(state_dir=run.state_dir(run.nodes.index(doomed)))
        assert coordinator.wait_exit() == 0
        top = run.command("top", str(run.run_dir), "--once")
        top_json = run.command("top", str(run.run_dir), "--json")
        trace = run.command(
            "trace", str(run.run_dir), "--steps", "2:3", "--out", str(tmp_path / "trace.json")
        )
        missing = run.command("trace", str(run.run_dir), "--steps", "900:901")
        astray = run.command("trace", str(run.run_dir), "--out", str(run.run_dir / "run.db"))
        compared = run.command("compare", str(run.run_dir), str(run.run_dir), "--json")
        for command in (top, top_json, trace, compared):
            assert command.wait_exit() == 0, command.report()
        assert missing.wait_exit() == astray.wait_exit() == 2
        assert (run.run_dir / "run.db").read_bytes().startswith(b"SQLite")
        assert "900:901" in missing.complaints[0]

    # The history has the coordinator's events without their secrets.
    told = [entry.event for entry in read_history(run.run_dir)]
    kinds = (events.StepDone, events.PlacementMade, events.SnapshotStored, events.RunFinished)
    for kind in kinds:
        assert [event for event in told if isinstance(event, kind)] == coordinator.all(kind)
    assert not any(isinstance(event, events.JoinLine) for event in told)
    token = coordinator.token
    assert token not in (run.run_dir / "history.jsonl").read_text()

    # Kinds sum to wall time in every step of every stage, and a stage's steps fill the run's.
    for costs in coordinator.all(events.StepCosts):
        for stage in costs.stages:
            assert sum(stage.seconds.values()) == pytest.approx(stage.wall_seconds, rel=0.02, abs=1e-3)

    seen = view((entry.at, entry.event) for entry in read_history(run.run_dir))
    assert (seen.state, seen.step, seen.recoveries) == ("finished", STEPS, 1)
    assert seen.snapshot is not None and seen.snapshot.step == STEPS
    assert len(seen.links) == 4 and all(link.bytes > 0 for link in seen.links)
    assert all(stage.memory_bytes > 10_000_000 for stage in seen.stages)
    assert json.loads(top_json.lines[-1]) == seen.to_fields() | {
        key: value for key, value in json.loads(top_json.lines[-1]).items() if key in ("stages", "links")
    }
    assert any(line.startswith("run small") and "finished" in line for line in top.lines)
    assert any("0 to 1" in line for line in top.lines)

    comparison = json.loads(compared.lines[0])
    assert comparison["config"] == {}
    assert comparison["steps"] == [STEPS, STEPS]
    assert all(first == second for _, first, second in comparison["loss_at_step"])
    assert comparison["loss_at_step"][-1][0] == STEPS

    check_trace(json.loads((tmp_path / "trace.json").read_text()), run.run_dir)


def check_trace(trace: dict[str, Any], run_dir: Path) -> None:
    error = trace["otherData"]["clock_error_microseconds"]
    assert 0 < error < 10_000_000, "all nodes are on one machine, which may be busy"
    assert trace["otherData"]["dropped_spans"] == 0
    events_by_phase = defaultdict(list)
    for event in trace["traceEvents"]:
        events_by_phase[event["ph"]].append(event)

    names = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events_by_phase["M"] if e["name"] == "thread_name"
    }
    processes = {e["pid"]: e["args"]["name"] for e in events_by_phase["M"] if e["name"] == "process_name"}
    assert [processes[stage].split(":")[0] for stage in range(3)] == ["stage 0", "stage 1", "stage 2"]
    assert {
        "compute",
        "encode",
        "decode",
        "wait",
        "send to 0",
        "send to 2",
        "receive from 0",
        "receive from 2",
    } == {name for (stage, _), name in names.items() if stage == 1}

    # What one thread does never overlap. Tensors are packed and unpacked by the compute thread and beside it.
    lanes = defaultdict(list)
    for event in events_by_phase["X"]:
        assert (event["pid"], event["tid"]) in names
        assert event["dur"] >= 0 and event["ts"] >= 0
        lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in (spans for lane, spans in lanes.items() if names[lane] not in ("encode", "decode")):
        spans.sort()
        assert all(later[0] >= earlier[1] - MICROSECOND for earlier, later in pairwise(spans))

    # What the compute thread did, lane by lane, adds up to the time between its first and its last span.
    compute = {TimeKind.FORWARD, TimeKind.BACKWARD, TimeKind.ENCODE, TimeKind.DECODE, TimeKind.OPTIMIZER}
    aligned = align(read_batches(run_dir, 0, STEPS), 1, 2)
    for stage in range(3):
        mine = sorted(
            (one.start, one.end, one.span.kind)
            for one in aligned.spans
            if one.stage == stage and one.span.kind in set(TimeKind)
        )
        # The step begins with its first forward; waiting for the coordinator before it is another step's.
        begin = next(start for start, _, kind in mine if kind in compute)
        mine = [span for span in mine if span[0] >= begin]
        covered = sum(end - start for start, end, _ in mine)
        assert covered == pytest.approx(mine[-1][1] - begin, rel=0.02, abs=len(mine) * 2e-6)
        forwards = [one for one in aligned.spans if one.stage == stage and one.span.kind == TimeKind.FORWARD]
        assert len(forwards) == 2 * CONFIG.microbatches

    # Arrows: from packing over the link to unpacking, each step no earlier than the one before.
    arrows = defaultdict(list)
    for phase in "stf":
        for event in events_by_phase[phase]:
            arrows[event["id"]].append(event)
    tensors = 2 * 2 * 2 * CONFIG.microbatches  # two steps, two boundaries, both ways
    assert len(arrows) == tensors
    for way in arrows.values():
        assert [event["ph"] for event in way] == ["s", "t", "t", "f"]
        packed, sent, received, unpacked = way
        assert packed["pid"] == sent["pid"] != received["pid"] == unpacked["pid"]
        assert packed["ts"] <= sent["ts"] + MICROSECOND
        assert sent["ts"] <= received["ts"] + 2 * error
        assert received["ts"] <= unpacked["ts"] + MICROSECOND
        for event in way:
            spans = lanes[event["pid"], event["tid"]]
            assert any(abs(start - event["ts"]) < 0.01 for start, _ in spans), "it begins where a span does"
    assert len(events_by_phase["b"]) == len(events_by_phase["e"]) > 0
