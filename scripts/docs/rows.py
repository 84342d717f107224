"""Tables of rows of nodes that share a step."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from node.telemetry.format import bytes_text
from scripts.docs.markdown import Tables, commit, if_recorded, notes, read_report, spaced
from scripts.report import RESULTS, markdown

ROWS, ROW_SLICES = RESULTS / "rows.json", RESULTS / "rows_slices.json"
ROW_WAITS, SOAK_ROWS = RESULTS / "row_waits.json", RESULTS / "soak_rows.json"
CHURN, PACED_CHURN = RESULTS / "churn.json", RESULTS / "paced_churn.json"
UNSCALED_CHURN = RESULTS / "paced_churn_unscaled.json"


def rows(path: Path) -> str:
    """Results of scripts/experiments/paced_rows.py: two rows against one, by stages and links."""
    report = read_report(path)
    steps = {_place(one): one for one in report["results"]}
    lines = []
    for speedup in report["speedups"]:
        one, two = (steps[rows, *_link(speedup)] for rows in (1, 2))
        alone, shared = (median(each["step_seconds"]) for each in (one, two))
        lines.append(
            [
                f"2 x {speedup['stages']} against 1 x {speedup['stages']}",
                f"{speedup['rate_mbit']:g}",
                f"{speedup['round_trip_ms']:g}",
                f"{alone:.2f}",
                f"{shared:.2f}",
                f"{speedup['times']:.2f}",
                f"{one['floor_seconds'] / alone:.2f}",
                f"{two['floor_seconds'] / shared:.2f}",
            ]
        )
    columns = [("nodes", "left"), ("Mbit/s", "right"), ("round trip, ms", "right")]
    columns += [("step of one row, s", "right"), ("of two, s", "right"), ("times as fast", "right")]
    columns += [("floor over step, one row", "right"), ("two rows", "right")]
    slices = f" in {report['slices']} slices each" if report.get("slices", 1) > 1 else ""
    caption = (
        f"{report['microbatches']} microbatches a step{slices}, the median of {report['steps']} steps; "
        f"{report['paced']}, so that a few cores play all nodes. Floor: the compute of a row, or the bytes "
        "of the busiest direction of a node's link, whichever takes longer; sums of gradients are at most "
        f"{bytes_text(max(one['sync_bytes'] for one in report['results']))} a node. "
        f"{spaced(report['hardware'])}, torch {report['versions']['torch']}, commit {commit(report)}."
        f"{notes(report)}"
    )
    return f"{markdown(columns, lines)}\n\n{caption}"


def row_waits() -> str:
    """What steps wait for snapshots and newcomers (scripts/experiments/paced_rows.py)."""
    return waits_of(read_report(ROW_WAITS))


def waits_of(waits: dict[str, Any]) -> str:
    """A report in words."""
    new, usual = waits["newcomers"], waits["usual_step_seconds"]
    slowest = waits["slowest_usual_step_seconds"] - usual
    text = (
        f"With a snapshot of {bytes_text(waits['snapshot_bytes'])} every {waits['snapshot_every']} steps, "
        f"kept by `{waits['keep']}`, the longest step beside one took "
        f"{waits['longest_wait_for_a_snapshot_seconds']:.2f} s more than the usual {usual:.2f} s; the "
        f"slowest without one {slowest:.2f} s more. A row that came entered "
        f"{new['seconds_from_arrival_to_entry']:.1f} s later, {new['steps_meanwhile']} steps went on "
        f"meanwhile, and the others waited {max(0.0, new['wait_seconds']):.2f} s for it. "
        f"{waits['stages']} stages; {waits['paced']}. {spaced(waits['hardware'])}, torch "
        f"{waits['versions']['torch']}, commit {commit(waits)}."
    )
    return fill(text, 118)


def soak_rows() -> str:
    """Seeded deaths in runs of several rows (scripts/checks/soak.py)."""
    report = read_report(SOAK_ROWS)
    found: dict[str, dict[str, int]] = {}
    for fault, count in report["faults"].items():
        kind, _, phase = fault.partition(" in ")
        found.setdefault(phase, {})[kind] = count
    lines = [
        [phase, *(spaced(str(kinds[kind])) if kind in kinds else "" for kind in ("kill", "coordinator-kill"))]
        for phase, kinds in sorted(found.items())
    ]
    columns = [("killed in", "left"), ("nodes", "right"), ("coordinators", "right")]
    node, coordinator = (report[f"seconds_to_recover_from_a_{who}"] for who in ("node", "coordinator"))
    first, last = report["seeds"]
    caption = (
        f"{report['kills']} processes killed in {report['runs']} runs of {report['steps']:,} steps in all, "
        "of one to three stages, two to four rows and four gradient groups, exact or in local steps, with "
        f"every sync codec: seeds {first} to {last}. Rows were lost {report['rows_lost']} times and entered "
        f"{report['rows_entered']} times. Every loss and weight equals the undisturbed run's. From the death "
        f"of a node to the next committed step a median of {node['median']:.2f} s, at most "
        f"{node['max']:.2f} s; of the coordinator {coordinator['median']:.2f} s, at most "
        f"{coordinator['max']:.2f} s. {report['schedules_at_a_time']} runs at a time. "
        f"{spaced(report['hardware'])}, torch {report['versions']['torch']}, commit {commit(report)}."
    )
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}"


def paced_churn(path: Path) -> str:
    """Goodput while nodes are killed (scripts/experiments/paced_churn.py), beside that of the simulation."""
    report, simulation = read_report(path), read_report(CHURN)
    simulated = {(case["grid"], case["a_node_dies"]): case for case in simulation["cases"] if case["goes_on"]}
    cells = [cell for cell in report["cells"] if "goodput" in cell]
    lines = []
    for cell in cells:
        groups = "" if report["groups"] == 12 else f", {report['groups']} groups"
        case = simulated.get((cell["grid"] + groups, cell["a_node_dies"]))
        deadly = cell["deaths"] > 0
        lines.append(
            [
                cell["grid"],
                cell["a_node_dies"] if "minute" in cell["a_node_dies"] else f"every {cell['a_node_dies']}",
                str(cell["deaths"]),
                f"{cell['deaths_a_step']:.2f}",
                str(cell["committed"]),
                f"{cell['goodput']:.2f}",
                f"{case['goodput']:.2f}" if case else "-",
                f"{cell['real_seconds_a_death']:.1f}" if deadly else "-",
                f"{case['seconds_a_death']:.1f}" if case else "-",
            ]
        )
    columns = [("stages x rows", "left"), ("a node dies", "left"), ("deaths", "right")]
    columns += [
        ("a step", "right"),
        ("steps committed", "right"),
        ("goodput", "right"),
        ("simulated", "right"),
    ]
    columns += [("seconds of the run a death", "right"), ("simulated", "right")]
    steps, other_steps = sum(cell["steps_compared"] for cell in cells), _count(cells, "steps_that_differ")
    stored, other_stored = (_count(cells, f"snapshots_{which}") for which in ("compared", "that_differ"))
    shut_out = sum(cell["evicted"] + cell["left_alive"] + cell["replaced_alive"] for cell in cells)
    calm = median(cell["calm_step_seconds"] for cell in cells)
    scale = calm / report["real_step_seconds"]
    state = max(report["state_bytes"].values()) / (report["mbit"] * 1e6 / 8) / scale
    caption = (
        f"Processes of the program, killed by SIGKILL. Blocks wait, so that a calm step takes {calm:.1f} s; "
        f"it stands for one of {report['real_step_seconds']:g} s, by which deaths and seconds are scaled. A "
        f"new process starts {report['real_back_seconds']:g} s after a death. Not scaled: "
        f"{report['not_scaled']}. {report['groups']} groups, {report['microbatches']} microbatches; nodes "
        f"send {report['mbit']:g} Mbit/s, which carries a stage's state in {state:.0f} s. Beside a run "
        f"without deaths, loss or gradient norm of {other_steps} of {steps} steps differ, and files of "
        f"{other_stored} of {stored} snapshots. Nodes that were shut out, or replaced although nobody had "
        f"killed them: {shut_out}. {spaced(report['hardware'])}, torch {report['versions']['torch']}, commit "
        f"{commit(report)}.{notes(report)}"
    )
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}"


def _count(cells: Sequence[dict[str, Any]], key: str) -> int:
    return sum(len(cell[key]) for cell in cells)


def _link(one: dict[str, Any]) -> tuple[int, float, float]:
    return one["stages"], one["rate_mbit"], one["round_trip_ms"]


def _place(one: dict[str, Any]) -> tuple[int, int, float, float]:
    return one["rows"], *_link(one)


TABLES: Tables = {
    "rows": partial(rows, ROWS),
    "rows_slices": partial(rows, ROW_SLICES),
    **if_recorded(ROW_WAITS, "row_waits", row_waits),
    "soak_rows": soak_rows,
    **{
        name: partial(paced_churn, path)
        for name, path in (("paced_churn", PACED_CHURN), ("paced_churn_unscaled", UNSCALED_CHURN))
    },
}
