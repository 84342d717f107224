"""`thinwire status RUN_DIR`: show a run's state, from its database and its history."""

import argparse
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.view.view_builder import RunViewBuilder

GONE = "gone"
STEPS = ("training", "replaying")
"""States in which the speed of the newest step is current."""
GOES_ON = (*STEPS, "waiting for nodes")
PAUSED = "paused"
"""The state while the disk is full, in which the speed and the bottleneck are not current."""
_OF_A_LINK = (
    "source",
    "target",
    "source_replica",
    "target_replica",
    "path",
    "why_not_direct",
    "why_not_together",
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("status", help="show a run's state")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.run_directory import existing_run_directory
    from node.coordinator.store import Store
    from node.display.status import coordinator_alive, copied_from
    from node.display.top import path_sentences
    from node.display.watch import HistoryWatch
    from node.state.snapshot import list_models
    from node.telemetry.format import dropped_text, duration_text, loss_text, printable
    from wire.errors import UserError

    directory = existing_run_directory(args.run_dir)
    now = time.time()
    with Store.open(directory) as store:
        record = store.run()
        last = store.last_step()
        members = [member.node_id for member in store.members() if member.evicted is None]
        complete = [snapshot for snapshot in store.snapshots() if snapshot.complete]
        usable = sum(token.state(now) == "usable" for token in store.list_tokens())
    watch = HistoryWatch(directory)
    view, events = watch.view(), watch.run
    bottleneck = view.bottleneck
    snapshots = [snapshot.step for snapshot in complete]
    ahead = [*list_models(directory)]
    # The database counts steps from 0.
    done = last.step + 1 if last else 0
    steps = record.values().get("run", {}).get("steps")
    if not isinstance(steps, int):
        raise UserError(f"the config of run {record.run_id} in its database has no number of steps")
    alive = coordinator_alive(events.started, directory) if events.started else False
    state = run_state(events, alive, complete=done >= steps, replays_to=view.replays_to)
    # The age does not matter if the run does not continue.
    age = max(0.0, now - complete[-1].created) if complete and state in GOES_ON else None
    if args.json:
        whole = {
            "run_id": record.run_id,
            "state": state,
            "steps_done": done,
            "steps": steps,
            "loss": last.loss if last and math.isfinite(last.loss) else None,
            "nodes_admitted": members,
            "snapshots": snapshots,
            "snapshot_age_seconds": age,
            "models": ahead,
            "usable_tokens": usable,
            "bottleneck": bottleneck,
            "replaced": view.replaced,
            "dropped": view.dropped,
            "scores": [vars(scores) for scores in view.scores],
            "samples": [vars(sample) for sample in view.samples],
            "links": [{name: getattr(link, name) for name in _OF_A_LINK} for link in view.links],
            "status": _status_fields(events),
        }
        sys.stdout.write(json.dumps(whole) + "\n")
        return 0
    lines = [f"run {record.run_id}: {state}, {done} of {steps} steps"]
    if last:
        lines.append(f"loss      {loss_text(last.loss)} in step {done}")
    original = copied_from(events.started, directory) if events.started and not events.finished else None
    lines += _live_lines(events, now, alive, original, steps=state in STEPS)
    if state in GOES_ON:
        lines += [f"slow      {sentence}" for sentence in bottleneck]
    lines += [f"path      {sentence}" for sentence in path_sentences(view)]
    lines += [f"fault     {line}" for line in view.replaced]
    if view.dropped:
        lines.append(f"left out  {dropped_text(view.dropped)} of the documents read so far")
    lines += [event.text for event in view.events if event.kind == "scores"][-1:]
    newest_sampled = view.samples[-1].step if view.samples else 0
    lines += [
        printable(f"sample    step {sample.step}: {sample.prompt} | {sample.text}")
        for sample in view.samples
        if sample.step == newest_sampled
    ]
    lines.append(f"nodes     {len(members)} admitted since the run began")
    newest = f", the newest {duration_text(age)} old" if age is not None else ""
    lines.append(f"snapshots {', '.join(map(str, snapshots)) or 'none yet'}{newest}")
    if (model := max(ahead, default=0)) > max(snapshots, default=0):
        lines.append(f"model     of step {model} is ready for thinwire export; the optimizer's state follows")
    lines.append(f"tokens    {usable} usable")
    if state in ("stopped", GONE) and original is None:
        lines.append(f"continue with: thinwire resume {shlex.quote(str(directory))}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def run_state(run: "RunViewBuilder", alive: bool | None, *, complete: bool, replays_to: int = 0) -> str:
    """`finished`, `failed`, `training`, `replaying`, `waiting for nodes`, `paused`, `stopped`, `gone`,
    `not running here`.

    `gone`: the coordinator died without ending its run, or runs another copy of it. `replaying`: the current
    steps ran before.

    Args:
        alive: whether the coordinator is alive and runs this directory; None if it ran on another machine.
        complete: whether the last step of the run is committed.
        replays_to: the last step that runs again; 0 if none does.
    """
    if run.finished:
        ended = "finished" if complete else "stopped"
        return "failed" if run.finished.failed else ended
    if alive is None:
        return "not running here"
    if not run.started:
        return "stopped"
    if not alive:
        return GONE
    if run.paused:
        return PAUSED
    if not run.placed:
        return "waiting for nodes"
    return "replaying" if replays_to else "training"


def _status_fields(run: "RunViewBuilder") -> dict[str, Any] | None:
    """The newest event of each kind in its JSON form; None before the run began."""
    from node.telemetry.events import finite

    if run.started is None:
        return None
    fields = {
        "event": "status",
        "updated": run.updated,
        "host": run.started.host,
        "process_id": run.started.process_id,
        "started": run.started,
        "nodes": [run.known[node_id] for node_id in run.members],
        "gone": run.left,
        "placement": run.placement,
        "step": run.step,
        "held_out": run.held_out[-1] if run.held_out else None,
        "aborted": run.aborted,
        "lost": run.lost,
        "work": run.work,
        "planned": run.planned,
        "snapshot": run.stored,
        "finished": run.finished,
        "page": run.page,
        "paused": run.paused,
        "process_start": run.started.process_start,
    }
    plain: dict[str, Any] = finite(fields)
    return plain


def _live_lines(
    run: "RunViewBuilder", now: float, alive: bool | None, original: Path | None, *, steps: bool
) -> list[str]:
    """The newest known state. `alive` is as in `run_state`; `original`: the directory of which this is a copy
    and which that coordinator runs; `steps`: whether the last step is current."""
    from node.display.render import SHORT_ID, stage_rows
    from node.display.status import COORDINATOR_GONE
    from node.telemetry.format import count_text, counted, duration_text, named, printable, table_lines

    started, placement = run.started, run.placement
    if started is None:
        return []
    by = f"by process {started.process_id} on {started.host}"
    if original is not None:
        by += f"; this is a copy of {original}, which it runs"
    elif not alive and not run.finished:
        by += f"; {COORDINATOR_GONE} now"
    lines = [printable(f"as of     {duration_text(max(0.0, now - run.updated))} ago, {by}")]
    nodes = placement.nodes if placement else ()
    if run.paused and alive and not run.finished:
        lines.append(printable(run.paused))
    if alive is not False:
        grid = counted(len(nodes) or started.stages, "stage")
        if placement is not None and placement.groups:
            rows = len(placement.groups)
            grid = f"{counted(rows, 'row')} of {counted(placement.stages, 'stage')}"
        lines.append(f"connected {counted(len(run.members), 'node')} for {grid}")
    called = [named(node[:SHORT_ID], run.name_of(node)) for node in run.members if run.name_of(node)]
    if called and alive is not False:
        lines.append(printable(f"names     {', '.join(called)}"))
    for left in run.left:
        name = named(left.node_id[:SHORT_ID], run.name_of(left.node_id))
        lines.append(printable(f"gone      {name}: {left.reason}"))
    if run.step and steps:
        lines.append(f"speed     {count_text(run.step.tokens_per_second)} tokens/s")
        if run.step.idle:
            lines += table_lines(*stage_rows(run.step, nodes, placement.stages if placement else 0))
    if run.held_out:
        lines.append(run.held_out[-1].line)
    if run.aborted:
        lines.append(f"aborted   {counted(run.aborted, 'step')}, which ran again")
    if run.lost:
        lines.append(f"lost      {counted(run.lost, 'node')} while steps continued")
    if run.work.lost and run.work.goodput is not None:
        lines.append(f"goodput   {100 * run.work.goodput:.1f} % of the nodes' work in steps was committed")
    if run.planned:
        lines.append(f"planned   {counted(run.planned, 'change')} of placement")
    if run.page and not run.finished and alive is not False:
        lines.append(printable(f"page      {run.page.url}"))
    if run.finished:
        lines.append(printable(f"ended     {run.finished.reason}"))
    return lines
