"""Measure each fault once, in real processes, and write the table.

python -m scripts.checks.faults            measure; writes scripts/results/faults.json and deploy/FAULTS.md
python -m scripts.checks.faults --only DISK  measure again only faults whose name has this text
python -m scripts.checks.faults --render   only write deploy/FAULTS.md from the records
python -m scripts.checks.faults --check    fail if deploy/FAULTS.md differs from what the records give
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from node.config.schema import SyncSection
from node.display.render import event_lines
from node.lab.results import commit
from node.run_state.epoch import PROOF_STEPS
from node.run_state.state_agreement import LEAST_TIMES, MOST_DISPUTES, MOST_TIMES, OTHER_KIND, PROBATION
from node.telemetry.events import (
    Event,
    ModelStored,
    NodeLeft,
    Notice,
    PlacementMade,
    RunFinished,
    RunStarted,
    StepAborted,
    StepDone,
)
from scripts.experiments.churn import THOUSAND
from scripts.report import RESULTS, ROOT, markdown
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, held, small, until_joined
from tests.support.faults import ANY, Fault, Kind, Phase
from wire.version import VERSION

RECORD = RESULTS / "faults.json"
SOAK = RESULTS / "soak.json"
ATTACK = RESULTS / "attack.json"
CHURN = RESULTS / "churn.json"
ONE_ROW = RESULTS / "churn_one_row.json"
STATES = RESULTS / "state_attacks.json"
DOCUMENT = ROOT / "deploy" / "FAULTS.md"
STEP, SNAPSHOT = 3, 2
SILENT_SECONDS = 14.0
HEARTBEAT_SECONDS = 2.0
HOLD = Fault(kind=Kind.HOLD, phase=Phase.FORWARD, stage=0, step=0)


@dataclass(frozen=True)
class Case:
    """One row: the fault, and what the run needs to recover from it."""

    what: str
    help: str
    faults: tuple[Fault, ...]
    spares: int = 0
    restart: bool = True
    real_start: bool = False
    """Start every process with its imports, as on a volunteer's machine."""
    steps: int = 8
    min_stages: int = 0
    rows: int = 1
    """With more than one, steps are rounds of two local steps before the fault."""
    tells: str = ""
    """Words of the line to show, if it is not the first one."""


def _at(kind: Kind, phase: Phase, stage: int = 1, **more: Any) -> tuple[Fault, ...]:
    step = SNAPSHOT if phase is Phase.SNAPSHOT else more.pop("step", STEP)
    return (Fault(kind=kind, phase=phase, stage=stage, step=step, **more),)


CASES = (
    Case("kill -9 of a node in backward", "a spare", _at(Kind.KILL, Phase.BACKWARD), 1, restart=False),
    Case(
        "kill -9 of a node between commit and apply",
        "a spare",
        _at(Kind.KILL, Phase.COMMIT_APPLY),
        1,
        restart=False,
    ),
    Case(
        "kill -9 of a node in backward",
        "the same node, started again at once",
        _at(Kind.KILL, Phase.BACKWARD),
        real_start=True,
    ),
    Case(
        "kill -9 of a node in backward",
        "fewer stages (`pipeline.min_stages`)",
        _at(Kind.KILL, Phase.BACKWARD),
        restart=False,
        min_stages=2,
    ),
    *(
        Case(
            f"kill -9 of a node of one of two rows in {words}",
            "the other row",
            _at(Kind.KILL, phase),
            rows=2,
            restart=False,
        )
        for words, phase in (("a local step", Phase.LOCAL_STEP), ("sync", Phase.SYNC))
    ),
    Case("a node freezes (SIGSTOP) in forward", "a spare", _at(Kind.STOP, Phase.FORWARD), 1),
    Case("Ctrl-C at a node", "a spare", _at(Kind.LEAVE, Phase.FORWARD), 1, restart=False, tells="it left"),
    Case("a node's connections to its neighbours are reset", "none needed", _at(Kind.CUT, Phase.BACKWARD)),
    Case(
        "a node's connections to the coordinator are reset",
        "none needed",
        _at(Kind.CUT_CONTROL, Phase.VOTING),
    ),
    Case("a bit of a frame flips", "none needed", _at(Kind.CORRUPT, Phase.SENDING)),
    Case("a frame is sent twice", "none needed", _at(Kind.DUPLICATE, Phase.SENDING)),
    Case("two frames change places", "none needed", _at(Kind.REORDER, Phase.SENDING, skip=1)),
    Case("a frame is cut short", "none needed", _at(Kind.TRUNCATE, Phase.SENDING)),
    Case("a link stalls for 2 s", "none needed", _at(Kind.STALL, Phase.SENDING, seconds=2.0)),
    Case(
        "a peer sends well-formed nonsense, three times",
        "a spare",
        tuple(fault for step in range(3) for fault in _at(Kind.NONSENSE, Phase.SENDING, step=step)),
        1,
        tells="quarantined",
    ),
    Case(
        "kill -9 of the coordinator between votes",
        "`thinwire resume` at once",
        _at(Kind.COORDINATOR_KILL, Phase.VOTING, stage=ANY, skip=1),
        real_start=True,
    ),
    Case(
        "kill -9 of the coordinator after a commit is recorded",
        "`thinwire resume` at once",
        _at(Kind.COORDINATOR_KILL, Phase.COMMIT_APPLY, stage=ANY),
        real_start=True,
    ),
    Case(
        "kill -9 of the coordinator amid a snapshot's write",
        "`thinwire resume` at once",
        _at(Kind.TORN_WRITE, Phase.SNAPSHOT, stage=ANY, skip=2),
        real_start=True,
    ),
    Case(
        "the coordinator's disk is full",
        "room on it; the run continues by itself",
        _at(Kind.DISK_FULL, Phase.SNAPSHOT, ANY),
        tells="paused",
    ),
    Case("a gradient is not finite, once", "wider codecs, `thinwire resume`", _at(Kind.NAN, Phase.BACKWARD)),
    Case(
        "a gradient is not finite, without compression too",
        "a lower learning rate, `thinwire resume`",
        _at(Kind.NAN, Phase.BACKWARD, count=2),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure each fault, and write the table.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--render", action="store_true", help="measure nothing")
    only.add_argument("--check", action="store_true", help="measure and write nothing")
    only.add_argument("--only", default="", metavar="TEXT", help="measure only faults with this text")
    args = parser.parse_args(argv)
    if args.check:
        return int(not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != document())
    if not args.render:
        _measure_all(args.only)
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


# ---- measuring


def _measure_all(only: str) -> None:
    torch.set_num_threads(1)
    rows = []
    before = json.loads(RECORD.read_text(encoding="utf-8"))["rows"] if only else []
    recorded = {(row["what"], row["help"]): row for row in before}
    with Prefork() as prefork:
        for case in CASES:
            if only and only.lower() not in case.what.lower():
                rows.append(recorded[case.what, case.help])
                continue
            rows.append({**_measure(case, prefork), "commit": commit()})
            print(json.dumps(rows[-1]), flush=True)
    report = {
        "version": VERSION,
        "cores": os.cpu_count(),
        "silent_seconds": SILENT_SECONDS,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "rows": rows,
    }
    RECORD.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _measure(case: Case, prefork: Prefork) -> dict[str, Any]:
    config = small(
        steps=case.steps,
        min_stages=case.min_stages,
        codecs=("fp32", "fp32") if case.min_stages else ("tah", "fixed-8"),
        heartbeat_seconds=HEARTBEAT_SECONDS,
        silent_seconds=SILENT_SECONDS,
    )
    launch = subprocess.Popen if case.real_start else prefork.popen
    holds = (HOLD,) if case.rows > 1 else ()
    if holds:
        config = replace(
            config,
            training=replace(config.training, global_batch=16),
            pipeline=replace(config.pipeline, groups=4, replicas=case.rows),
            sync=SyncSection(every=2, warmup=1, outer_lr=0.6, outer_momentum=0.9),
        )
    with (
        tempfile.TemporaryDirectory() as directory,
        FaultRun(Path(directory), config, (*case.faults, *holds), launch=launch) as run,
    ):
        with held(run, HOLD) if holds else nullcontext():
            run.start()
            run.add_nodes(3 * case.rows)
            if holds:
                # All rows are to take part in the step of the fault.
                run.tend(until=until_joined(3 * case.rows))
        for _ in range(case.spares):
            run.add_spare()
        code = run.tend(restart=case.restart)
        if code == 0:
            run.assert_undisturbed(codes=(0, 1, 130))
        run.assert_all_happened()
        at = max(run.times(case.faults[-1]))
        return {
            "what": case.what,
            "help": case.help,
            "sees": _seen(run, case, at),
            "detect_seconds": _seconds(run, at, NodeLeft, StepAborted, RunFinished, whole=code == 0),
            "recover_seconds": _recovery(run, at) if code == 0 else None,
            "ends_run": code != 0,
        }


def _seen(run: FaultRun, case: Case, at: float) -> str:
    """The line that the coordinator prints about the fault; empty if there is none."""
    for when, event in run.heard_at:
        if isinstance(event, ModelStored):
            continue  # of the run's end
        ends = isinstance(event, RunFinished) and event.failed
        if when >= at and (ends or isinstance(event, NodeLeft | StepAborted | Notice | RunStarted)):
            line = next(filter(None, event_lines(event))).replace(f"{run.directory}/", "")
            if case.tells in line:
                return line
    assert not case.tells, f"no line says {case.tells!r}"
    return ""


def _seconds(run: FaultRun, at: float, *kinds: type[Event], whole: bool) -> float | None:
    """Seconds until the coordinator reports the fault; None if it has no reason to."""
    for when, event in run.heard_at:
        if when >= at and isinstance(event, kinds) and not (whole and isinstance(event, RunFinished)):
            return round(when - at, 2)
    return None


def _recovery(run: FaultRun, at: float) -> float:
    """Seconds until the first step in a newer placement, or until the next step if there is none."""
    placed_again = any(when >= at and isinstance(event, PlacementMade) for when, event in run.heard_at)
    placed = not placed_again
    for when, event in run.heard_at:
        if when < at:
            continue
        placed = placed or isinstance(event, PlacementMade)
        if placed and isinstance(event, StepDone):
            return round(when - at, 2)
    raise AssertionError("the run went on, so a step was done")


# ---- the document


def document() -> str:
    """deploy/FAULTS.md, made from the records."""
    report = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [
        [
            row["what"],
            row["help"],
            f"`{row['sees']}`" if row["sees"] else "none: the link recovers by itself",
            _text(row["detect_seconds"]),
            "the run stops" if row["ends_run"] else _text(row["recover_seconds"]),
        ]
        for row in report["rows"]
    ]
    columns = [("what goes wrong", "left"), ("what helps", "left"), ("line printed", "left")]
    columns += [("seconds to notice", "right"), ("seconds to the next step", "right")]
    soak = json.loads(SOAK.read_text(encoding="utf-8"))
    return f"""# Faults

Made by `python -m scripts.checks.faults`; do not edit.

Each row is one run of real processes over loopback: a coordinator, three stages and, where the table says so,
a spare, or a second row that shares rounds of two local steps. The fault is injected at an exact point
(`tests/support/faults.py`). Every run that did not stop ended with the same losses and the same SHA-256 of
the weights as an undisturbed run.

{markdown(columns, rows)}

Each fault was measured once, on {report["cores"]} cores that did other work too, with a model so small that a
step takes tens of milliseconds. A larger model takes longer to recover: its state has to cross the link to
the coordinator. `coordinator.heartbeat_seconds` is {report["heartbeat_seconds"]:g} and
`coordinator.silent_seconds` {report["silent_seconds"]:g}, the defaults. The times include loading the
libraries where a node or coordinator is started again. A dash means that the coordinator has nothing to
notice, because the link reconnects or asks for the frame again by itself, or because the coordinator died.

{_churn()}

## Soak

`make soak` kills processes by seeded random schedules and compares every run with an undisturbed one.
Recorded: {soak["kills"]} processes killed with SIGKILL ({soak["kills_of_coordinators"]} of them coordinators)
in {soak["runs"]} runs of {soak["steps"]} steps together, seeds {soak["seeds"][0]} to {soak["seeds"][1]}, in
{soak["seconds"]} s on {soak["cores"]} cores; no loss and no weight differed.

{_soak_table(soak)}

In these runs faults overlap, and processes start without loading their libraries. Most nodes that died were
back before the coordinator noticed their absence; then their return counts as noticing.
`coordinator.silent_seconds` was {soak["silent_seconds"]:g}.

{_attacks()}"""


def _churn() -> str:
    """What a death costs, by how often nodes die."""
    report = json.loads(CHURN.read_text(encoding="utf-8"))
    cases = sorted(report["cases"], key=lambda case: report["grids"][case["grid"]]["rows"])
    found = {(case["grid"], case["a_node_dies"], case["goes_on"]): case for case in cases}
    rows = [
        [
            grid,
            rate if "minute" in rate else f"every {rate}",
            f"{case['goodput']:.2f}",
            f"{other['goodput']:.2f}" if (other := found.get((grid, rate, False))) else "-",
            f"{case['seconds_a_death']:.1f}",
        ]
        for (grid, rate, goes_on), case in found.items()
        if goes_on and rate != "none"
    ]
    columns = [("stages x rows", "left"), ("a node dies", "left"), ("goodput", "right")]
    columns += [("if each death ended the step", "right"), ("seconds of the run a death", "right")]
    grid = next(iter(report["grids"].values()))
    steps = sorted({one["step"] for one in report["grids"].values()})
    is_there = any(case["grid"] == THOUSAND for case in cases)
    thousand = " A thousand nodes ran once, for half an hour." if is_there else ""
    return f"""## What a death costs

When a node dies in a step, its row loses its work of that step, and computes nothing until another node takes
the empty seat. Complete rows take over the row's groups, and the step's losses and weights are the same as
without a death. If two rows have lost nodes of different stages, a node of one moves to the other within the
step, so that one of the two is complete at once. So the number of rows that compute is the number of nodes of
the stage with the fewest nodes. While seats are empty, each row holds two groups: the one that it computes
and the next, or as many as take 4 seconds. The other groups wait, and a row that is completed during the step
takes its share of them. A node that takes a seat fetches its state and catches up while steps go on. A node
that was started again gets a seat of the stage that it had, if one is empty. If nodes keep snapshots
(`snapshots.keep`), the state is on its disk then, and it fetches only the gradients of the steps since. If no
row is complete any more, the step runs again, with the same nodes in their seats. In a run with one row, the
step always runs again.

Neighbours say when the connection to a node closes or brings nothing. If the coordinator does not hear the
node either, it counts as dead: at once if both connections closed, otherwise after 3 or 4 seconds. A node
that is back in the same step has its seat again. If nobody could do a node's work, it has
`coordinator.silent_seconds`.

Goodput is the number of committed steps, each counted once, as a share of those of a run without deaths in
the same time. `python -m scripts.experiments.churn` simulates it with the run's real state machine and nodes
that take set times, in {max(len(case["runs"]) for case in report["cases"])} runs of
{report["node_hours"]:g} node-hours each. Steps take {" or ".join(f"{step:g}" for step in steps)} s.
A dead node is back after {grid["back"]:g} s, with the snapshots on its disk. It fetches a state that it does
not have in {grid["fetch"]:g} s, and the gradients of a step in {grid["sums"]:g} s. Unless the table says so,
there are 12 groups for four rows, and 64 for 16.{thousand}

{markdown(columns, rows)}

In the first two steps of a node with a seat its row computes one more group, one of another row, and the
results are compared. With 12 groups for four rows that is a quarter of a row's work, and most of what a
single death costs. Real processes lose more than the simulation says
([network.md](../scripts/results/network.md)).

Choose many times as many groups as rows, and a number that one row less can share evenly too: 24, 36 or 48
groups for four rows, of which three rows take 8, 12 or 16 each. What is computed again or compared is at
least a group, and the last of them holds up all rows, so many rows need at least eight groups each. If
nodes die every few minutes, most of the loss comes from rows that wait for a seat, until a node is back and
has caught up.

{_one_row()}"""


def _one_row() -> str:
    """What a death costs where no other row goes on, and what could be kept of the step that it ends."""
    report = json.loads(ONE_ROW.read_text(encoding="utf-8"))
    (grid,) = report["grids"].values()

    def mean(case: dict[str, Any], figure: str) -> float:
        return sum(float(run[figure]) for run in case["runs"]) / len(case["runs"])

    rows = [
        [
            case["a_node_dies"] if "minute" in case["a_node_dies"] else f"every {case['a_node_dies']}",
            f"{case['goodput']:.2f}",
            *(
                f"{mean(case, figure):.1f}"
                for figure in ("seconds_a_death", "done_again_a_death", "aborted_a_death")
            ),
            f"{mean(case, 'aborted_a_death') / mean(case, 'seconds_a_death'):.0%}",
        ]
        for case in report["cases"]
        if case["a_node_dies"] != "none"
    ]
    columns = [("a node dies", "left"), ("goodput", "right"), ("seconds of the run a death", "right")]
    columns += [("steps done again", "right"), ("the step that ends", "right"), ("its part", "right")]
    return f"""### One row

With one row of {grid["stages"]} stages and {grid["spares"]} spares nobody else holds the state of the stage
that is lost, so all nodes go back to the newest snapshot, here one of every {grid["snapshots"]} steps. The
time that the ended step had run is a small part of what a death costs. A replay of that step from boundary
tensors that neighbours keep could save at most this part. The program does not do it, because it would take
memory of the neighbours in every step. More frequent snapshots, or a second row, save the rest.

{markdown(columns, rows)}

Simulated by `python -m scripts.experiments.churn --one-row`, {len(report["cases"][-1]["runs"])} runs of
{report["node_hours"]:g} node-hours each."""


def _attacks() -> str:
    report = json.loads(ATTACK.read_text(encoding="utf-8"))
    members = [
        [
            row["what"],
            _outcome(row),
            f"`{row['line']}`" if row["line"] else "-",
            str(row["steps_again"]),
            f"{row['longest_wait']:.2f}",
            "equal" if row["bits_equal"] else "differ",
        ]
        for row in report["members"]
    ]
    strangers = [
        [
            f"{row['what']}, {_size(row)}",
            "goes on" if row["ended"] else f"stops: `{row['line']}`",
            f"{row['speed']:.2f} ({min(row['speeds']):.2f} to {max(row['speeds']):.2f})",
            f"{row['cpu']:.2f}",
            _text(row["reconnect_seconds"]),
            _text(row["join_seconds"]),
            _text(row.get("asked_seconds")),
            _memory(row),
            "equal" if row["bits_equal"] else "differ",
        ]
        for row in report["strangers"]
    ]
    columns = ("from step 5 on, a member", "what happens", "line printed")
    member_columns = [(words, "left") for words in columns]
    member_columns += [("attempts lost", "right"), ("longest wait, s", "right")]
    member_columns += [("losses and weights", "left")]
    stranger_columns = [("strangers", "left"), ("the run", "left"), ("speed", "right"), ("CPU", "right")]
    stranger_columns += [("a member connects in at most, s", "right")]
    stranger_columns += [("an honest node joins in, s", "right"), ("of these asking, s", "right")]
    stranger_columns += [("the coordinator's memory", "right")]
    stranger_columns += [("losses and weights", "left")]
    return f"""## Members that lie or are broken

`make attack` runs each of these against a coordinator, three stages and two spares, as real processes. The
liar has a real certificate and computes its part of every step, but alters the messages that it sends to the
coordinator (`tests/support/liar.py`). *Longest wait* is the longest time without a new step, from the first
lie to the end. *Losses and weights* are compared with those of an undisturbed run, bit for bit. After each
run, `thinwire status` and the page name the liar and say why it lost its stage.

{markdown(member_columns, members)}

Those that keep parts or sums of gradients run in three rows of two stages without audits. Three members
compute wrong values, as a broken card does, and run in two rows of two stages with `audit.rate = 1`. With
rate *p* and *R* rows of nodes of the same kind, a member that is always wrong is found after *R* / (2 *p*)
steps on average, and within 3 *R* / (2 *p*) steps in 95 of 100 cases. The wrong steps before that stay in the
weights, so return to an earlier snapshot. The cost is one more gradient group for one row in a share *p* of
the steps: at most *p* of the run's time if there are as many groups as rows. In the other steps nodes only
hash what they send.

Not protected: the member with the head can report any loss in range, and any member can send finite but wrong
tensors, or vote a wrong norm within the range of recent steps. With one row, or without audits, nothing finds
these lies, because that takes a second computation of the same work. Nor does an audit find a member that
names a kind of its own, because only nodes of one kind compute the same bits. A member that computes
correctly but sends wrong sums to another row makes the node that holds those sums look wrong before the step
is committed, because votes have digests of the sums. That node may lose its stage, but nothing else is held
against it. Audits compare what nodes compute for a gradient group, not the sums over groups. So nothing finds
a member that sends the same wrong sum of its share of the gradient to all rows, in any number of steps.

If gradients are not finite, or far from earlier ones, the step runs again without one node of their stage, or
of its row, at a time. A member that stops its lie when another is left out costs that one its stage. Who was
left out is not blamed any more if it happens again, and who is there each time is left out next. Three rows
find such a member within three lies, and it is never the only one left of its stage. Of two nodes it may be.

If two nodes disagree, a third node of the same kind decides: a node of another row, a spare, or a node of
another stage that changes places with one of the two. If only two nodes are of that kind, both compute the
audited step again. A node that then gives another value than before is wrong, which finds a card with random
errors. If both repeat their values, nothing tells the honest node from the other; the operator reads both
names once, and the run continues with both. If the *gradient norms* or the sums of such a pair differ twice,
and no third node of their kind can compute the step, the run saves the state before the step and ends with
the stage and both names. If one of the two leaves meanwhile, the other continues as the only node of its
stage, and a line says so.

### The state that a member hands in

At a snapshot's step every node of a stage reports the SHA-256 and the sums of squares of each of its layers,
whether it hands the layer in or not. The run stores, copies and offers a layer only under the hash that more
than half of the nodes of one kind report. Only nodes that held the state before are counted. The hashes are
kept in the database and in the manifest, and `resume` and `recover` use no other layer. A node that hands in
another layer than agreed, or reports another hash than the majority, is shut out at that snapshot; a line
names it and the step. Its layer replaces nothing, and another row hands in the right one. The table above has
such members, in three rows of two stages without audits.

{_states()}

- *If two nodes disagree*, the snapshot is not taken. A spare of their kind, or a node of another stage that
  changes places with one of the two, computes the state again from the newest agreed snapshot, and then two
  agree. Without a third node the run goes on without that snapshot. If this happens {MOST_DISPUTES} more
  times in a row, or if the run waits for the snapshot (at its end, or when a node leaves), the run stops and
  names the two. If one of the two leaves, no snapshot of the other is taken until another node has computed
  the same state.
- *A lying majority* of the nodes that held the state before, two of three or three of four, is believed, and
  the honest node is shut out. Half of them, two of four, is not believed.
- *Newcomers* that follow the run also compute one gradient group of an older row in each of their first
  {PROBATION} steps, with or without audits. If the results differ, that step runs again without the newcomer.
  Nothing is held against it, because the state that it received may be wrong. If its hashes differ a second
  time, it is shut out. Until then its hashes count for nothing against nodes that held the state before.
- *Copies on nodes* are described by the nodes that hold the state. A copy that another node calls damaged
  counts until its holder has looked. If a node gets none of the copies that others say they hold, it fails in
  that epoch. If that happens again in a later one, the snapshot is given up. A holder that sends slowly is
  left for another one after 30 s. Not protected: a member that says it holds a copy, and does not.
- *A refused layer*, with another size, another hash or a malformed file, is asked of another row at once. One
  row of the same kind keeps a copy of its layers on its disks if there is room. So the snapshot is still
  completed, at the coordinator, on nodes or in an object store. Without such a row, or if a node is shut out
  or gone before it has handed in its layers, the snapshot is taken again from another row, at the next step
  or, at the run's end, at the same step. A file in an object store is compared with its hash only when a node
  loads it.
- *Restarts and ends*: a coordinator that starts again does not know the hashes of an unfinished snapshot, or
  which nodes were shut out; such a node is found again at its next lie. Hashes that arrive after the last
  agreed snapshot, or in an attempt that ends before all nodes have reported, change nothing.
- *If half of the nodes are gone* before they have reported their hashes, the snapshot is taken at the next
  step instead.

Nodes say of what kind they are. So only the rows hand in layers whose nodes have the most others of their
kind beside them: a member that names a kind of its own is not asked where two others hold its layers.

There remains the case in which *one* node is the only one of its kind to hold a layer: with one row, or with
rows that all have different machines. Its file must be well formed. The sums of squares of weights and
moments are compared with those of nodes of other kinds ({OTHER_KIND:.0%}), and with the previous snapshot:
weights must be between {LEAST_TIMES:g} and {MOST_TIMES:g} times as large, or no further from it than the
optimizer moves weights at the learning rates of the steps between; moments must not vanish, and there must be
no zeros where there were gradients. A spare computes a layer outside these bounds
again; without a spare it is not saved. When such a layer has been loaded, the first {PROOF_STEPS} steps that
were committed after it must give about the same loss and gradient norm again. If they do not, other nodes
compute the step again in place of the one that reports it. If they find the same, the run uses an older
snapshot and names the only holder of this one; without an older snapshot it stops. Three lies are not found:
another state of the same size, until it is loaded; a state that gives about the same steps, such as a
slightly changed model; and, if no step was committed since the snapshot, a state whose loss is near the
newest ones. With one row and no spare, nothing more can be checked, and a member can have snapshots set
aside.

A link leaves a volunteer's relay that holds each piece for 2 s, or that forwards only 2,000 bytes a second.
It does so once the relay has been too slow for at least 2 s and another relay is faster; a line says `node
... left the relay of node ...`. A relay that loses bytes breaks the connection, and the link continues
through the next relay. No step is lost (`tests/integration/test_run_reach.py`). If there is no other relay,
the link stays at the slow one.

A member that does nothing delays a step by 30 seconds beyond the usual time, or by three times the usual
time, whichever is longer. A member that reports that it computes or waits can delay it by a minute, or by ten
times the usual time. In an epoch's first step these are two and four minutes. In a run's first step, when
nothing has been measured, a member that reports that it computes or waits can delay it by ten minutes. If two
nodes contradict each other about what they wait for, one of them gives up its stage. A member that lies again
contradicts another node then, and this shows which one lies. Every stage sees activations, and the first sees
the text.

## Strangers

These strangers have no certificate of the run; they connect from 200 addresses. Each process of the run may
have 1,024 descriptors. The run has one core and the strangers have another, so that their own work does not
slow the run. Measured on {report["cores"]} cores that did other work too. Steps take tens of milliseconds, so
the cost of a connection weighs more than in a real run. A connection that has shown no valid token carries
8 KiB a second, so most requests to join are never read.

- *Speed* is steps per second during the siege, divided by the mean of a calm time before and one after it:
  the median of the rounds, with the lowest and the highest in brackets. *CPU* is the run's own processor
  seconds per step, in the same way.
- *A member connects in at most*: throughout, a member opens a new connection every 2 s, as nodes do.
- *An honest node joins in* is the time from the start of its process, which loads its libraries on the run's
  core, to its admission. *Of these asking* is the longest of five admissions, from the first message on.

{markdown(stranger_columns, strangers)}
"""


def _states() -> str:
    """Of the simulated lies."""
    report = json.loads(STATES.read_text(encoding="utf-8"))
    rows = report["rows"]
    runs, lied = sum(row["seeds"] for row in rows), sum(row["lied"] for row in rows)
    most = max(row["most_steps_until_named"] for row in rows)
    ended, named = sum(row["ended_right"] for row in rows), sum(row["named"] for row in rows)
    kinds = ", ".join(dict.fromkeys(row["lie"] for row in rows))
    return (
        f"`python -m scripts.checks.attack --states 100` runs such lies ({kinds}) against the run's state "
        f"machine in a simulated world, with 2, 3 and 4 rows, with and without audits, newcomers and deaths "
        f"at random times. Liars lie only while at least half of the nodes that held their layers before are "
        f"honest. Recorded: {runs} runs, with a lie in {lied}. No run stored or loaded a wrong state, and no "
        f"honest node was shut out. Of the {lied} runs, {ended} ended with the right state, and the others "
        f"stopped and named nodes. In {named} runs a line named a liar, alone or with the nodes that it "
        f"contradicted; if most nodes were honest, within {most} steps of its lie."
    )


def _outcome(row: dict[str, Any]) -> str:
    if not row["ended"]:
        return "the run stops"
    return "it loses its stage" if row["replaced"] else "it stays"


def _size(row: dict[str, Any]) -> str:
    """How many strangers, and for how long."""
    times = f"{row['rounds']} times {row['seconds']:g} s"
    if not row["idle"]:
        return f"800 a second for {times}"
    more = f" and {row['idle_a_second']} new ones a second" if row["idle_a_second"] else ""
    return f"{row['idle']:,}{more} for {times}"


def _memory(row: dict[str, Any]) -> str:
    """The coordinator's largest memory before and during sieges, and its descriptors; rows of an earlier
    record have none."""
    if "memory_mb" not in row:
        return "-"
    calm, *sieges = row["memory_mb"]
    return f"{max(sieges):.0f} MB, {calm:.0f} before; {row['descriptors']} descriptors"


def _soak_table(soak: dict[str, Any]) -> str:
    rows = []
    for key, words in (
        ("seconds_to_detect_a_death", "to notice that a node died"),
        ("seconds_to_detect_silence", "to notice that a node fell silent"),
        ("seconds_to_recover_from_a_node", "from a node's fault to the next step"),
        ("seconds_to_recover_from_a_coordinator", "from a coordinator's death to the next step"),
    ):
        spread = soak[key]
        rows.append([words, str(spread["measured"]), _text(spread.get("median")), _text(spread.get("max"))])
    return markdown(
        [("seconds", "left"), ("measured", "right"), ("median", "right"), ("longest", "right")], rows
    )


def _text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    sys.exit(main())
