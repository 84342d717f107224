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
from node.run_state.epoch import PROOF_STEPS
from node.run_state.state_agreement import LEAST_TIMES, MOST_DISPUTES, MOST_TIMES, OTHER_KIND, PROBATION
from node.telemetry.events import (
    Event,
    NodeLeft,
    Notice,
    PlacementMade,
    RunFinished,
    RunStarted,
    StepAborted,
    StepDone,
)
from scripts.report import RESULTS, ROOT, markdown
from tests.support.fault_prefork import Prefork
from tests.support.fault_run import FaultRun, held, small, until_joined
from tests.support.faults import ANY, Fault, Kind, Phase
from wire.version import VERSION

RECORD = RESULTS / "faults.json"
SOAK = RESULTS / "soak.json"
ATTACK = RESULTS / "attack.json"
CHURN = RESULTS / "churn.json"
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
        "room on it; the run goes on by itself",
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
            rows.append(_measure(case, prefork))
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
            f"`{row['sees']}`" if row["sees"] else "nothing: it is mended below what the run prints",
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

Each row is one run of real processes over loopback: a coordinator, three stages and, where it says so, a
spare, or a second row that shares rounds of two local steps. The fault is injected at an exact point
(`tests/support/faults.py`). Every run that did not stop ended with the losses and the weights SHA-256 of an
undisturbed one, bit for bit.

{markdown(columns, rows)}

Measured once each, on {report["cores"]} cores that did other work too, with a model so small that a step
takes tens of milliseconds; the state of a larger one adds its bytes over the rate of the link to the
coordinator. `coordinator.heartbeat_seconds` is {report["heartbeat_seconds"]:g} and
`coordinator.silent_seconds` {report["silent_seconds"]:g}, the defaults. A node or coordinator that is started
again loads its libraries first. A dash: the coordinator has no reason to notice, because the link itself
reconnects or asks for the frame again, or because it is the coordinator that died.

{_churn()}

## Soak

`make soak` kills processes by seeded random schedules and compares every run with an undisturbed one.
Recorded: {soak["kills"]} processes killed with SIGKILL ({soak["kills_of_coordinators"]} of them coordinators)
in {soak["runs"]} runs of {soak["steps"]} steps together, seeds {soak["seeds"][0]} to {soak["seeds"][1]}, in
{soak["seconds"]} s on {soak["cores"]} cores; no loss and no weight differed.

{_soak_table(soak)}

There faults overlap, and processes start without loading their libraries: most who died were back before
their absence was noticed, and their return is what was. `coordinator.silent_seconds` was
{soak["silent_seconds"]:g}.

{_attacks()}"""


def _churn() -> str:
    """What a death costs, by how often nodes die."""
    report = json.loads(CHURN.read_text(encoding="utf-8"))
    found = {(case["grid"], case["a_node_dies"], case["goes_on"]): case for case in report["cases"]}
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
    steps = sorted({grid["step"] for grid in report["grids"].values()})
    return f"""## What a death costs

A node that dies in a step costs its row's work of that step, and then a row until somebody has its seat.
Rows that are whole take the groups of its row; the step's losses and weights are those of a step without a
death. Two rows that have lost nodes of different stages become one at once, within the step: a node of one
moves to the other. So as many rows compute as the stage with fewest nodes has nodes. While seats are empty,
a row has the group that it computes and the next one. The other groups wait, and a row that becomes whole in
the step takes its part of them. A node that comes for a seat fetches its state and catches up beside the
steps. If no row is whole any more, the step runs again, with the same nodes in their seats. With one row a
death ends the step, which runs again.

Goodput is the share of a calm run's steps that are committed in the same time, each counted once. Simulated
by `python -m scripts.experiments.churn` with the run's real state machine and nodes that take a set time:
steps of {" or ".join(f"{step:g}" for step in steps)} s, a dead node back after 10 s, 20 s to fetch its state,
{max(len(case["runs"]) for case in report["cases"])} runs of {report["node_hours"]:g} node-hours each.

{markdown(columns, rows)}

Take many times as many groups as rows, a number that one row less shares evenly too: 12 or 24 for four rows,
which three share as four or eight each. Where nodes die every few minutes, most of the loss is rows that wait
for a seat: as long as a node takes to come back and to fetch its state."""


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
coordinator (`tests/support/liar.py`). *Longest wait*: without a new step, from the first lie to the end.
*Losses and weights* are compared with an undisturbed run's, bit for bit. After each run `thinwire status`
names the liar, and why it lost its stage, too; so does the page, beside its nodes.

{markdown(member_columns, members)}

Three of them compute wrong values, as a broken card does, and run in two rows of two stages with `audit.rate
= 1`. With rate *p* and *R* rows of like nodes a member that is always wrong is found after *R* / (2 *p*)
steps on average, and within 3 *R* / (2 *p*) in 95 of 100 cases. Wrong steps before that stay in the
weights, so go back to a snapshot from before. The cost is one gradient group more for a row in a share *p*
of the steps: with as many groups as rows, at most *p* of the run's time. In the other steps nodes only hash
what they send.

Not protected: a member with the head can report any loss in range, and any member can send finite but wrong
tensors or vote a wrong norm within the range of recent steps. With one row, or without audits, nothing finds
these: only a second computation of the same work does. A member that computes correctly but sends wrong sums
to another row puts suspicion on the node that holds them. That node may lose its stage; nothing else is held
against it.

When two nodes differ, a third node of the same kind decides: one of another row, a spare, or one of another
stage that changes places with one of the two. With exactly two of a kind, both compute the audited step
again. The one that gives another value than before is wrong, so a card with random errors is found. A node
whose error repeats cannot be told from the honest one: the operator reads both names once, and the run goes
on with both. If the *gradient norms* of such a pair differ twice, and no third node of their kind can compute
the step, the run hands in the state before it and ends with the stage and both names. If one of the two
leaves meanwhile, the other goes on as the only node of its stage, and a line says so.

### The state that a member hands in

At a snapshot's step every node of a stage reports the SHA-256 and the sums of squares of each of its layers,
whether it hands the layer in or not. The run stores, spreads and offers a layer only under the hash that more
than half of the nodes of one kind report. Only nodes that held the state before are counted. The hashes are
kept in the database and in the manifest, and `resume` and `recover` use no other layer. A node that hands in
another layer than agreed, or reports another hash than the majority, is shut out at that snapshot; a line
names it and the step. Nothing that it handed in has replaced anything, and another row hands in the layer.
Such members are in the table, in three rows of two stages without audits.

{_states()}

- *Two that differ*: the snapshot is not taken. A spare of their kind, or a node of another stage that
  changes places with one of the two, computes the state again from the newest agreed snapshot, and then two
  agree. Without a third node the run goes on without that snapshot. If that happens {MOST_DISPUTES} times
  more in a row, or where the run waits for the snapshot (at its end, or when a node leaves), the run stops
  and names the two. If one of the two leaves, no snapshot of the other is taken until another node has
  computed the same state.
- *A lying majority* of the nodes that held the state before, two of three or three of four, is believed, and
  the honest node is shut out. Half of them, two of four, is not believed.
- *Newcomers* that follow the run also compute one gradient group of an older row in each of their first
  {PROBATION} steps, with or without audits. If the results differ, that step runs again without the newcomer.
  Nothing is held against it, because the state that it was given may be wrong. If its hashes differ a second
  time, it is shut out. Until then its word decides nothing against nodes that held the state before.
- *A refused layer*, of another size, another hash or malformed, is asked of another row at once. One row of
  the same kind keeps a copy of its layers on its disks, where there is room, so that snapshot is complete
  all the same, at the coordinator, on nodes or in an object store. Without such a row, and where a node is
  shut out or gone before it has handed in its layers, the snapshot is taken again, of the next step or, at
  the run's end, of the same one, from another row. A file in an object store is compared with its hash when
  a node loads it, not before.
- *Restarts and ends*: a coordinator that starts again has forgotten the hashes of an unfinished snapshot, and
  who was shut out; such a node is found again at its next lie. Hashes that arrive after the last agreed
  snapshot, or in an attempt that ends before all nodes have reported, name nobody and change nothing.
- *Half of the nodes gone* before they have reported their hashes: the snapshot is taken at the next step
  instead.

What remains is the case where *one* node is the only one of its kind to hold a layer: one row, or rows of
unlike machines. Its file must be well-formed. The sums of squares of weights and moments are compared with
those of nodes of other kinds ({OTHER_KIND:.0%}), and with the snapshot before: weights between
{LEAST_TIMES**0.5:g} and {MOST_TIMES**0.5:g} times as large, moments not vanishing, and no zeros where there
were gradients. A layer outside these bounds is computed again by a spare; without a spare it is not saved.
Once such a layer is loaded, the first {PROOF_STEPS} steps that were committed before must give about the same
loss and gradient norm again. If they do not, the snapshot is set aside for an older one, with the name of its
only holder; without an older one the run stops. Three lies are not found: another state of the same size,
until it is loaded; one that gives about the same steps, as a slightly changed model does; and, where nothing
was committed since the snapshot, one whose loss is near the newest ones. With one row and no spare nothing
more can be checked.

A volunteer's relay that holds each piece for 2 s, or passes on 2,000 bytes a second, is left once it has owed
its links more than they get by another relay, after 2 s of that at the least; a line says `node ... left the
relay of node ...`. One that loses bytes breaks the connection, and the link goes on by the next relay. No
step is lost (`tests/integration/test_run_reach.py`). Without another relay a slow one stays: there is no
other way.

A member that does nothing holds up a step for 30 seconds beyond the usual time, or for three times the usual
time, whichever is longer. One that says that it computes or waits holds it up for a minute, or for ten times
the usual time. In an epoch's first step these are two and four minutes. In a run's first step, before any was
measured, one that says that it computes holds it up for ten minutes. Every stage sees activations, and the
first sees text.

## Strangers

Nobody here has a certificate of the run; connections come from 200 addresses. Each process of the run may
have 1,024 descriptors. The run has one core and the strangers another, so that what they spend is not held
against the run. *Speed*: steps a second during the siege, over the mean of a calm time before and one after
it; the median of the rounds, and in brackets the lowest and the highest. *CPU*: the run's own processor
seconds for a step, likewise. All the time a member opens a new connection every 2 s, dialling as nodes do.
Measured on {report["cores"]} cores that did other work too. Steps take tens of milliseconds, so that what a
connection costs counts for more than in a real run. *An honest node joins in*: from the start of its process,
which loads its libraries on the run's core, to its admission; *of these asking*: the longest of five
admissions from the first word on. A connection that has shown no valid token carries 8 KiB a second, so most
requests to join are never read.

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
        f"at random times. Liars lie only while half or more of those that held their layers before are "
        f"honest. Recorded: {runs} runs, with a lie in {lied}; no other state was stored or loaded in any, "
        f"and no honest node was shut out. {ended} of the {lied} ended with the right state, the others by "
        f"name. In {named} a line named a liar, alone or with those that it contradicted; where most were "
        f"honest, within {most} steps of its lie."
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
