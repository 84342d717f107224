"""`thinwire status RUN_DIR`: a run's state, from its database and `status.json`."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.display.status import RunStatus

GONE = "gone"
STEPS = ("training", "replaying")
"""States in which the speed of the newest step is the run's."""
GOES_ON = (*STEPS, "waiting for nodes")
PAUSED = "paused"
"""The disk is full: no step is news, and nothing of the run is slow."""
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
    from node.display.status import coordinator_alive, read_status
    from node.display.top import path_sentences
    from node.display.watch import HistoryWatch
    from node.state.snapshot import list_models
    from node.telemetry.format import dropped_text, duration_text, loss_text, printable

    directory = existing_run_directory(args.run_dir)
    now = time.time()
    with Store.open(directory) as store:
        record = store.run()
        last = store.last_step()
        members = [member.node_id for member in store.members() if member.evicted is None]
        complete = [snapshot for snapshot in store.snapshots() if snapshot.complete]
        usable = sum(token.state(now) == "usable" for token in store.list_tokens())
    status = read_status(directory)
    watch = HistoryWatch(directory)
    view = watch.view()
    bottleneck = view.bottleneck
    snapshots = [snapshot.step for snapshot in complete]
    ahead = [*list_models(directory)]
    # The database counts steps from 0.
    done = last.step + 1 if last else 0
    steps = json.loads(record.config_json)["run"]["steps"]
    alive = coordinator_alive(status) if status else False
    state = run_state(status, alive, complete=done >= steps, replays_to=view.replays_to)
    # A run that does not go on has no age that matters.
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
            "scores": [vars(found) for found in view.scores],
            "samples": [vars(sample) for sample in view.samples],
            "links": [{name: getattr(link, name) for name in _OF_A_LINK} for link in view.links],
            "status": json.loads(status.to_json()) if status else None,
        }
        sys.stdout.write(json.dumps(whole) + "\n")
        return 0
    lines = [f"run {record.run_id}: {state}, {done} of {steps} steps"]
    if last:
        lines.append(f"loss      {loss_text(last.loss)} in step {done}")
    if status:
        lines += _live_lines(status, now, alive, watch.names, steps=state in STEPS)
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
        lines.append(f"model     of step {model}, ready for thinwire export; the optimizer's state follows")
    lines.append(f"tokens    {usable} usable")
    if state in ("stopped", GONE):
        lines.append(f"go on with: thinwire resume {directory}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def run_state(status: "RunStatus | None", alive: bool | None, *, complete: bool, replays_to: int = 0) -> str:
    """`finished`, `failed`, `training`, `replaying`, `waiting for nodes`, `paused`, `stopped`, `gone`,
    `not seen here`.

    `gone` is a coordinator that died without ending its run, `replaying` one whose steps ran before.

    Args:
        alive: whether the coordinator's process lives; None when it ran on another machine.
        complete: whether the last step of the run is committed.
        replays_to: the last step that runs again; 0 if none does.
    """
    if status and status.finished:
        ended = "finished" if complete else "stopped"
        return "failed" if status.finished.failed else ended
    if alive is None:
        return "not seen here"
    if not status:
        return "stopped"
    if not alive:
        return GONE
    if status.paused:
        return PAUSED
    connected = {node.node_id for node in status.nodes}
    placed = status.placement is not None and connected.issuperset(status.placement.nodes)
    if not placed:
        return "waiting for nodes"
    return "replaying" if replays_to else "training"


def _live_lines(
    status: "RunStatus", now: float, alive: bool | None, names: Mapping[str, str], *, steps: bool
) -> list[str]:
    """The coordinator's last report; `alive` as for `run_state`.

    Args:
        names: what owners call their nodes, by node id.
        steps: whether the last step is news.
    """
    from node.display.render import SHORT_ID, stage_rows
    from node.telemetry.format import count_text, counted, duration_text, named, printable, table_lines

    lines = [
        printable(
            f"as of     {duration_text(max(0.0, now - status.updated))} ago, by process {status.process_id} "
            f"on {status.host}"
        )
    ]
    nodes = status.placement.nodes if status.placement else ()
    if status.paused and alive and not status.finished:
        lines.append(printable(status.paused))
    if alive is not False:
        grid = counted(len(nodes) or status.started.stages, "stage")
        if status.placement is not None and status.placement.groups:
            rows = len(status.placement.groups)
            grid = f"{counted(rows, 'row')} of {counted(status.placement.stages, 'stage')}"
        lines.append(f"connected {counted(len(status.nodes), 'node')} for {grid}")
    called = [named(node.node_id[:SHORT_ID], node.name) for node in status.nodes if node.name]
    if called and alive is not False:
        lines.append(printable(f"names     {', '.join(called)}"))
    for left in status.gone:
        who = named(left.node_id[:SHORT_ID], names.get(left.node_id, ""))
        lines.append(printable(f"gone      {who}: {left.reason}"))
    if status.step and steps:
        lines.append(f"speed     {count_text(status.step.tokens_per_second)} tokens/s")
        across = status.placement.stages if status.placement else 0
        if status.step.idle:
            lines += table_lines(*stage_rows(status.step, nodes, across))
    if status.held_out:
        lines.append(status.held_out.line)
    if status.aborted:
        lines.append(f"aborted   {counted(status.aborted, 'step')}, which ran again")
    if status.lost:
        lines.append(f"lost      {counted(status.lost, 'node')} while steps went on")
    if status.work.lost and status.work.goodput is not None:
        lines.append(f"goodput   {100 * status.work.goodput:.1f} % of the nodes' work in steps is on record")
    if status.planned:
        lines.append(f"planned   {status.planned} changes of placement")
    if status.page and not status.finished and alive is not False:
        lines.append(printable(f"page      {status.page.url}"))
    if status.finished:
        lines.append(printable(f"ended     {status.finished.reason}"))
    return lines
