"""Tables of results, as text for a terminal. Has no side effects.

A results file is one measurement, and no figure combines several files. The share of the floor says how close
a step is to its lower bound.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.lab.shape import PAYLOAD_SHARE
from node.telemetry.clock import TimeKind
from node.telemetry.format import table_lines

BASELINES = ("fp32", "bf16", "fixed-4", "aqsgd-4")
"""The forward codecs to which ratios are relative."""

SETTING = ("Mbit/s", "microbatch", "window", "codecs")
"""The columns that name a cell."""
SPENT = {
    "computes": (TimeKind.FORWARD, TimeKind.BACKWARD, TimeKind.OPTIMIZER),
    "waits for packing": (TimeKind.ENCODE, TimeKind.DECODE),
    "for other stages": (TimeKind.WAIT_UPSTREAM, TimeKind.WAIT_DOWNSTREAM, TimeKind.WAIT_VOTES),
    "for the coordinator": (TimeKind.WAIT_COORDINATOR,),
}
"""The columns that say how a step's time is spent."""

Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Headings and cells of text. The first `left` columns are names."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int


def tables_text(results: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """All tables of each (name, results) as text, each titled with its name."""
    blocks = []
    for name, result in results:
        for table in all_tables(result):
            blocks.append(table_text(name, table))
        blocks.append(provenance(result))
    return "\n\n".join(blocks)


def table_text(name: str, table: Table) -> str:
    """A table as text, titled with the name of its results."""
    lines = table_lines(list(table.headings), [list(row) for row in table.rows], left=table.left)
    return "\n".join([f"{name}: {table.title}", *lines])


def all_tables(result: Mapping[str, Any]) -> list[Table]:
    """The measured cells, and how their steps spend their time."""
    cells = result["cells"]
    # Older results lack the stages' seconds.
    timed = [cell for cell in cells if "stage_seconds" in cell]
    return [measured_table(cells), *([time_table(timed)] if timed else [])]


def measured_table(cells: Cells) -> Table:
    """A row for each setting and codec pair, over all seeds."""
    rows = []
    for group in grouped(cells):
        key = group[0]["key"]
        ratios = [_ratio(cells, group, baseline) for baseline in BASELINES]
        rows.append(
            (
                *_setting(key),
                rate_text(group),
                f"{_mean(group, 'step_seconds'):.2f}",
                *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios),
                f"{group[0]['bits_forward']:.2f} / {group[0]['bits_backward']:.2f}",
                f"{100 * statistics.fmean(max(w['use'] for w in cell['wires']) for cell in group):.0f} %",
                share_text(group),
                _binding_text(group),
                unthrottled_text(group),
            )
        )
    headings = (
        *(*SETTING, "tokens/s", "s a step"),
        *(f"/ {baseline}" for baseline in BASELINES),
        *("bits out / back", "link use", "of the floor", "binding", "of unthrottled"),
    )
    return Table(title="measured", headings=headings, rows=tuple(rows), left=len(SETTING))


def time_table(cells: Cells) -> Table:
    """Seconds of a step that each stage computes and waits, averaged over seeds."""
    rows = []
    for group in grouped(cells):
        key = group[0]["key"]
        for stage in range(len(group[0]["stage_seconds"])):
            spent = [
                statistics.fmean(
                    sum(cell["stage_seconds"][stage].get(kind.value, 0.0) for kind in kinds) for cell in group
                )
                for kinds in SPENT.values()
            ]
            rows.append((*_setting(key), str(stage), *(f"{seconds:.3f}" for seconds in spent)))
    headings = (*SETTING, "stage", *SPENT)
    return Table(title="seconds of a step", headings=headings, rows=tuple(rows), left=len(SETTING))


def provenance(result: Mapping[str, Any]) -> str:
    """One line that says where the figures come from."""
    machine, network = result["machine"], result["network"]
    gpus = ", ".join(f"{machine['gpus'].count(name)} x {name}" for name in dict.fromkeys(machine["gpus"]))
    where = (
        gpus if result["device"] == "cuda" and gpus else f"{machine['processor']}, {machine['cores']} cores"
    )
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    delay = {"none": "no delay", "netem": "delay by netem", "relay": "delay by the lab's packet relay"}
    worst = max(
        (abs(_share(link) - 1) for calibration in result["calibrations"] for link in calibration["links"]),
        default=0.0,
    )
    # Older results lack this setting.
    pauses = "" if network.get("slow_start_after_idle", True) else " without slow starts after pauses"
    seeds = len(result["seeds"])
    model = result["model"]
    return (
        f"{result['profile']}: {model['family']}, {model['layers']} layers, {model['hidden']} wide, sequence "
        f"{model['sequence']}, global batch {result['training']['global_batch']}, {result['stages']} stages; "
        f"text {result['text']}; "
        f"{where}; {network['topology']} shaped by {network['qdisc']}, {delay[network['delay_method']]}, "
        f"{network['congestion_control']}{pauses}, kernel {machine['kernel']}, "
        f"calibrated to {100 * worst:.1f} %; "
        f"{len(result['runs'])} runs, {seeds} seed{'s' if seeds > 1 else ''}{_steps_text(result['cells'])}"
        f"{_unfinished_text(result)}; {_command_text(result)}{versions}; "
        f"commit {machine['commit'][:12]}{' with changes' if machine['commit'].endswith('changes') else ''}"
    )


def _steps_text(cells: Cells) -> str:
    """`, each figure the median of 2 to 4 steps`: the number of measured steps per seed."""
    counts = sorted({cell["measured_steps"] for cell in cells})
    if not counts:
        return ""
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f", each figure the median of {many} step{'s' if counts[-1] > 1 else ''}"


def _unfinished_text(result: Mapping[str, Any]) -> str:
    if result["finished"]:
        return ""
    # Older results lack the number of planned cells.
    planned = result.get("planned_cells")
    of = f"{planned} cells" if planned else "cells"
    return f"; not finished: {len(result['cells'])} of its profile's {of} are here"


def _command_text(result: Mapping[str, Any]) -> str:
    """The command that repeats the measurement. Older results lack it."""
    if "overrides" not in result:
        return ""
    options = [word for words in result["only"] for word in ("--only", words)]
    command = shlex.join(["thinwire", "lab", "run", result["profile_file"], *result["overrides"], *options])
    return f"by `{command}`; "


def _setting(key: Mapping[str, Any]) -> tuple[str, ...]:
    return key["shape"], str(key["microbatch"]), str(key["window"]), codec_pair(key)


def grouped(cells: Cells) -> list[list[Mapping[str, Any]]]:
    """Group cells that differ only in their seed, in the order they were measured."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(_setting(cell["key"]), []).append(cell)
    return list(groups.values())


def _ratio(cells: Cells, group: Cells, baseline: str) -> float | None:
    """Tokens per second relative to the first group with the same setting and the forward codec
    `baseline`."""
    key = group[0]["key"]
    for other in grouped(cells):
        its = other[0]["key"]
        same = all(its[name] == key[name] for name in ("shape", "microbatch", "window"))
        if same and its["forward_codec"] == baseline:
            return tokens(group) / tokens(other)
    return None


def codec_pair(key: Mapping[str, Any]) -> str:
    return f"{key['forward_codec']}/{key['backward_codec']}"


def tokens(group: Cells) -> float:
    return _mean(group, "tokens_per_second")


def _mean(group: Cells, name: str) -> float:
    """The mean over seeds of the median over steps."""
    return statistics.fmean(cell[name]["median"] for cell in group)


def rate_text(group: Cells) -> str:
    """For example `4045 (3990 to 4100)`. The spread is over all steps."""
    least = min(cell["tokens_per_second"]["least"] for cell in group)
    most = max(cell["tokens_per_second"]["most"] for cell in group)
    return f"{tokens(group):.0f} ({least:.0f} to {most:.0f})"


def share_text(group: Cells) -> str:
    shares = [cell["floor"]["share"] for cell in group if "floor" in cell]
    return f"{statistics.fmean(shares):.2f}" if shares else "-"


def _binding_text(group: Cells) -> str:
    """What binds the cell's floor: a link, a line or a stage's compute."""
    return ", ".join(dict.fromkeys(cell["floor"]["binds"] for cell in group if "floor" in cell)) or "-"


def unthrottled_text(group: Cells) -> str:
    """The rate as a share of the same run's rate before its links were shaped."""
    shares = [cell["of_unthrottled"] for cell in group if "of_unthrottled" in cell]
    return f"{statistics.fmean(shares):.2f}" if shares else "-"


def _share(link: Mapping[str, Any]) -> float:
    return float(link["payload_mbit"]) / (float(link["asked_mbit"]) * PAYLOAD_SHARE)
