"""Tables of links: laboratory, efficiency of a step, all-reduce, and cost of tracing."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from node.lab.reach import PATH_CHECKS, reach_table
from node.lab.results import read_results
from node.lab.table import all_tables, provenance
from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.experiments.paper_tables import tables_beside
from scripts.report import RESULTS, markdown

PIPELINE_FLOOR = RESULTS / "pipeline_floor.json"
REACH = RESULTS / "reach.json"
SMALL_STEPS = RESULTS / "small_steps.json"
STATE_RATES, STATE_DISK = RESULTS / "state_rates.json", RESULTS / "state_disk.json"
STATE_FAST = RESULTS / "state_fast.json"
LINK_FLOOR = RESULTS / "link_floor.json"
FAST, LINKS = RESULTS / "pipeline_fast.json", RESULTS / "links.json"
LINK_PAIRS = RESULTS / "link_pairs.json"
GOAL = 0.9
"""Efficiency to reach wherever a link is the bottleneck."""
PAPER_SHAPE = (48, 1600)
"""Layers and width of the model in the paper's throughput tables."""


def lab() -> str:
    """Results of the laboratory, one block per results file; the paper's tables beside its model."""
    blocks = []
    for path in sorted(RESULTS.glob("lab_*.json")):
        result = read_results(path)
        model = result["model"]
        paper = (model["layers"], model["hidden"]) == PAPER_SHAPE
        for table in [*all_tables(result), *(tables_beside(result) if paper else ())]:
            # Only the paper's rows whose setting was measured; skip a table without any ratio.
            beside = table.headings.index("here / fp32") if "here / fp32" in table.headings else None
            measured = beside is None or any(row[beside] not in ("-", "1.00") for row in table.rows)
            shown = [row for row in table.rows if beside is None or row[beside] != "-"]
            if not measured:
                continue
            sides = ["left" if i < table.left else "right" for i in range(len(table.headings))]
            text = markdown(list(zip(table.headings, sides, strict=True)), shown)
            blocks.append(f"{path.name}, {table.title}:\n\n{text}")
        blocks.append(f"{provenance(result)}.")
    return "\n\n".join(blocks) or "Nothing has been recorded yet."


def lab_floor() -> str:
    """Efficiency in each results file, separately for cells bound by a link and by compute."""
    rows = []
    for path in sorted(RESULTS.glob("lab_*.json")):
        cells = [cell for cell in read_results(path)["cells"] if "floor" in cell]
        compute = [cell for cell in cells if cell["floor"]["binds"].startswith("compute")]
        link = [cell for cell in cells if cell not in compute]
        near = [cell for cell in link if cell["floor"]["share"] >= GOAL]
        if cells:
            rows.append([path.name, f"{len(near)} of {len(link)}", _least(link), _least(compute)])
    columns = [("file", "left"), (f"link binds: cells at {GOAL} or more", "right")]
    columns += [("the least there", "left"), ("the least where compute binds", "left")]
    return markdown(columns, rows)


def _least(cells: Sequence[Mapping[str, Any]]) -> str:
    """The cell with the lowest efficiency, in words."""
    if not cells:
        return "-"
    cell = min(cells, key=lambda cell: float(cell["floor"]["share"]))
    key = cell["key"]
    where = f"{key['forward_codec']}/{key['backward_codec']} at {key['shape']}"
    microbatch = f", microbatch {key['microbatch']}" if key["microbatch"] > 1 else ""
    return f"{cell['floor']['share']:.2f} ({where}{microbatch})"


def throughput() -> str:
    """The paper's table 3, shortened: its best codec pair against fp32, in the paper and here."""
    result = read_results(RESULTS / "lab_gpt2-xl-4gpu-nic.json")
    table = tables_beside(result)[0]
    named = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    measured = {
        (cell["key"]["forward_codec"], cell["key"]["shape"]): cell
        for cell in result["cells"]
        if cell["key"]["microbatch"] == 1
    }

    def times_its_floor(rate: str) -> float:
        """Speed-up by packing over fp32, if fp32 were as fast as its bytes allow."""
        packed, plain = measured["tah", rate], measured["fp32", rate]
        return float(plain["floor"]["seconds"]) / float(packed["step_seconds"]["median"])

    by_rate: dict[str, dict[str, dict[str, str]]] = {}
    for row in named:
        by_rate.setdefault(row["Mbit/s"], {})[row["codecs"]] = row
    rows = [
        (
            rate,
            pairs["fp32/fp32"]["here, tokens/s"].split(" ")[0],
            pairs["tah/fixed-6"]["here, tokens/s"].split(" ")[0],
            pairs["tah/fixed-6"]["here / fp32"],
            f"{times_its_floor(rate):.2f}",
            pairs["tah/fixed-6"]["paper / fp32"],
            pairs["tah/fixed-6"]["of the floor"],
            pairs["tah/fixed-6"]["of unthrottled"],
        )
        for rate, pairs in by_rate.items()
    ]
    columns = [(word, "right") for word in ("Mbit/s", "fp32, tokens/s", "`tah`/`fixed-6`, tokens/s")]
    columns += [("times fp32", "right"), ("times fp32 at its floor", "right")]
    columns += [(word, "right") for word in ("in the paper", "of the floor", "of unthrottled")]
    return f"{markdown(columns, rows)}\n\n{provenance(result)}."


def pipeline_floor() -> str:
    """Results of scripts/experiments/pipeline_floor.py: efficiency by rate and round trip."""
    report = read_report(PIPELINE_FLOOR)
    shapes = list(dict.fromkeys((row["round_trip_ms"], row["rate_mbit"]) for row in report["results"]))

    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["simulated"], row["window"]

    kinds = list(dict.fromkeys(map(kind, report["results"])))
    found = {(row["round_trip_ms"], row["rate_mbit"], *kind(row)): row for row in report["results"]}
    columns = [("round trip, ms", "right"), ("Mbit/s", "right"), ("floor, s", "right")]
    columns += [
        (f"`window = {window}`, {'simulated' if simulated else 'measured'}", "right")
        for simulated, window in kinds
    ]
    plans = any(row["simulated"] for row in report["results"])
    columns += [("windows planned", "left")] if plans else []
    rows = []
    for shape in shapes:
        here = [found.get((*shape, *kind)) for kind in kinds]
        some = next(row for row in here if row is not None)
        planned = next((row for row in here if row is not None and any(row.get("windows", ()))), None)
        rows.append(
            [
                *(f"{value:g}" for value in shape),
                f"{some['floor_seconds']:.2f}",
                *("-" if row is None else _share(row) for row in here),
                *(["-" if planned is None else ", ".join(map(str, planned["windows"]))] if plans else []),
            ]
        )
    settings = report["settings"]
    caption = (
        f"Share of the floor of a step of {settings['microbatches']} microbatches through "
        f"{settings['stages']} stages, forward {1e3 * settings['forward_seconds']:g} ms and backward "
        f"{1e3 * settings['backward_seconds']:g} ms each, 1 MiB (`{settings['codec']}`) over each link "
        "each way at the rate given. In brackets: of the floor with the compute times that the stages "
        f"measured in the same steps. {spaced(report['hardware'])}, torch {report['versions']['torch']}, "
        f"Python {report['versions']['python']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def _share(row: dict[str, Any]) -> str:
    """Efficiency with the set times; in brackets with those that the stages measured."""
    measured = row.get("share_of_measured")
    return f"{row['share']:.2f}" + ("" if measured is None else f" ({measured:.2f})")


def reach() -> str:
    """The path that each pair of ways to be joined to the internet came to."""
    report = read_report(REACH)
    head, *rows = reach_table(report)
    meanings = "; ".join(f"{kind}: {words}" for kind, words in report["kinds"].items())
    good = sum(pair["same_weights"] for pair in report["pairs"])
    machine = report["machine"]
    # Pairs of an earlier record name its commit.
    counted = Counter(pair.get("commit", machine["commit"])[:12] for pair in report["pairs"])
    commits = ", ".join(
        f"commit {name}" + (f" ({count} pairs)" if len(counted) > 1 else "")
        for name, count in counted.items()
    )
    caption = (
        f"{meanings}. The last path of a run of {report['steps']} steps; of {len(report['pairs'])} pairs "
        f"{good} trained the weights of two open machines. {spaced(machine['processor'])}, "
        f"{machine['cores']} cores, kernel {machine['kernel']}, {commits}."
    )
    table = f"{markdown([(words, 'left') for words in head], rows)}\n\n{caption}"
    by_kind = {pair["pair"][0]: pair["doctor"] for pair in report["pairs"] if pair.get("doctor")}
    if not by_kind:
        return table
    rows = [[kind, *(words.get(check, "-") for check in PATH_CHECKS)] for kind, words in by_kind.items()]
    said = markdown([(words, "left") for words in ("", *PATH_CHECKS)], rows)
    return f"{table}\n\nWhat `thinwire doctor` says in each kind of network:\n\n{said}"


def small_steps() -> str:
    """What small steps cost beside their arithmetic, in checkouts that took turns."""
    report = read_report(SMALL_STEPS)
    rows = []
    for name, by_stages in report["checkouts"].items():
        for stages, one in by_stages.items():
            busy = one["by_process"]
            nodes = sum(seconds for process, seconds in busy.items() if process != "coordinator")
            times = (one["seconds_per_step"], busy["coordinator"], nodes)
            rows.append([f"`{report['commits'][name][:7]}`", stages, *(f"{1e3 * one:.1f}" for one in times)])
    headings = ("stages", "ms a step", "processor: coordinator", "all nodes")
    columns = [("commit", "left"), *((words, "right") for words in headings)]
    caption = (
        f"Plain torch, one thread: {1e3 * report['plain_torch_seconds_per_step']:.1f} ms. Median of "
        f"{report['rounds']} runs of {report['steps']} steps of 256 tokens each, in turn. "
        f"{spaced(report['hardware'])}, {report['cores']} cores, torch {report['torch']}, "
        f"Python {report['python']}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def fast_lines() -> str:
    """Steps on lines that are too fast for a relay, and what a link costs in processor time."""
    report, links = read_report(FAST), read_report(LINKS)
    rows = []
    for result in report["results"]:
        step = statistics.median(result["step_seconds"])
        floors = result["floor_seconds"], statistics.median(result["measured_floor_seconds"])
        row = [f"{result['rate_mbit']:,.0f}", f"{step:.2f}"]
        rows.append(row + [text for floor in floors for text in (f"{floor:.2f}", f"{floor / step:.2f}")])
    columns = [("Mbit/s", "right"), ("step, s", "right"), ("floor by set times, s", "right")]
    columns += [("floor over step", "right"), ("floor by measured times, s", "right")]
    columns += [("floor over step", "right")]
    settings, hardware = report["settings"], spaced(report["hardware"])
    count = len(report["results"][0]["step_seconds"])
    waits = " and ".join(f"{1000 * settings[key]:g}" for key in ("forward_seconds", "backward_seconds"))
    return (
        f"{markdown(columns, rows)}\n\nFour nodes over loopback, each with its rate as its own limit, "
        f"{settings['microbatches']} microbatches of {settings['sequence']:,} tokens in "
        f"`{settings['codec']}`, blocks that wait {waits} ms; medians of {count} steps. {hardware}, commit "
        f"{commit(report)}. {_link_cost(links)}"
    )


def _link_cost(links: dict[str, Any]) -> str:
    cost = links["median"]["now"]
    whole, pairs = cost["processor_seconds_a_gb"], read_report(LINK_PAIRS)
    before, now = (pairs["median"][way]["processor_seconds_a_gb"] for way in ("before", "now"))
    parts = [cost[f"{name}_seconds_a_gb"] for name in ("MainThread", "carrier", "event_engine")]
    loop, splice, engine = (f"{part:.2f}" for part in parts)
    return (
        f"A link between two processes carries {cost['mbit_each_way'] / 1000:.2f} Gbit/s each way and takes "
        f"{whole:.2f} processor seconds a GB, sent and received, TLS included: event loops {loop}, splices "
        f"{splice}, gRPC's own threads {engine}, and the link's threads, on which gRPC encrypts and sends, "
        f"{whole - sum(parts):.2f}; median of {len(links['runs']['now'])} runs, commit {commit(links)}. "
        f"With frames of up to 4 MiB it takes {now:.2f} on {spaced(pairs['hardware'])}, where it took "
        f"{before:.2f} with 1 MiB; {_pair_ratio(pairs):.2f} of it as median of {len(pairs['runs']['now'])} "
        f"pairs: {pairs['note']}. Frames of 4 MiB at any rate take {_forced_ratio(pairs):.2f} of what those "
        f"of 1 MiB take, as median of {len(pairs['frames_at_any_rate']['most_4_mib'])} pairs. "
        f"Commits {pairs['before'][:12]} and {commit(pairs)}."
    )


def link_floor() -> str:
    """A link beside gRPC alone (scripts/bench/links.py --floor)."""
    report = read_report(LINK_FLOOR)
    key = "processor_seconds_a_gb"
    both = list(zip(report["runs"]["now"], report["runs"]["grpc"], strict=True))
    times = sorted(link[key] / alone[key] for link, alone in both)
    link, alone = (report["median"][name][key] for name in ("now", "grpc"))
    cost = report["median"]["now"]
    splices, loops = (cost[f"{name}_seconds_a_gb"] for name in ("carrier", "MainThread"))
    size = cost["frame_bytes"] / 1024
    return (
        f"On {spaced(report['hardware'])} that other programs loaded, a link takes {link:.2f} processor "
        f"seconds a GB with frames of {size:.0f} KiB, and gRPC alone {alone:.2f} with messages as long, with "
        f"TLS and without a front: {statistics.median(times):.2f} times, {times[0]:.2f} to {times[-1]:.2f} "
        f"in {len(both)} pairs. Splices take {splices:.2f} of it, event loops {loops:.2f}. "
        f"Commit {commit(report)}."
    )


def _forced_ratio(pairs: dict[str, Any]) -> float:
    """The same of frames of 4 MiB over those of 1 MiB, whatever the line carries."""
    forced = pairs["frames_at_any_rate"]
    both = zip(forced["most_4_mib"], forced["most_1_mib"], strict=True)
    return statistics.median(large / small for large, small in both)


def _pair_ratio(pairs: dict[str, Any]) -> float:
    """Processor seconds a GB now over those before, each pair by itself."""
    both = zip(pairs["runs"]["now"], pairs["runs"]["before"], strict=True)
    key = "processor_seconds_a_gb"
    return statistics.median(now[key] / before[key] for now, before in both)


def state_rates(path: Path = STATE_RATES) -> str:
    """How long nodes wait for a state, and an operator for the model (scripts/bench/state_rates.py)."""
    report = read_report(path)
    pairs = report["pairs"]

    def row(what: str, key: str) -> list[str]:
        before, now = ([pair[way].get(key) for pair in pairs] for way in ("before", "now"))
        shown = [", ".join("-" if one is None else f"{one:.1f}" for one in ones) for ones in (before, now)]
        return [what, *shown]

    rows = [
        row("from the last join to the placement, s", "join_to_placement_seconds"),
        row("processor seconds of it", "join_to_placement_processor_seconds"),
        row("until the model of the last step can be exported, s", "last_model_seconds"),
        row("until its whole snapshot is stored, s", "last_snapshot_seconds"),
        row("processor seconds of it", "last_snapshot_processor_seconds"),
    ]
    if "coordinator_grown_mb" in pairs[0]["now"]:
        rows.append(row("MB by which the coordinator's memory grew meanwhile", "coordinator_grown_mb"))
    caption = (
        f"{report['state_bytes'] / 1e9:.2f} GB of state, {report['nodes']} nodes and the coordinator on one "
        f"{spaced(report['hardware'])}, loopback; {len(pairs)} pairs of runs, beside programs that took "
        f"most of both cores. Before: commit {report['before_commit'][:12]}; now: {commit(report)}. "
        f"Python {report['python']}, torch {report['torch']}."
    )
    table = markdown([("what", "left"), ("before", "right"), ("now", "right")], rows)
    return f"{table}\n\n{caption}"


def state_fast() -> str:
    """The same of a large state, on a GPU and a fast host (scripts/bench/state_rates.py)."""
    report = read_report(STATE_FAST)
    cold, warm, size = report["cold"], report["warm"], report["state_bytes"]
    middle, ends = len(report["step_ends"]) // 2, report["step_ends"]
    beside = math.ceil(cold["middle_snapshot_seconds"] / cold["step_seconds"]) - 2
    slower = beside * cold["step_seconds"] / (ends[middle - 1 + beside] - ends[middle - 1])
    disk = 2 * size / cold["last_snapshot_seconds"] / report["disk_bytes_a_second"]
    join = "join_to_first_step_seconds"
    shown = [
        ["from the last join to the first step, kernels compiled before, s", f"{warm[join]:.1f}"],
        ["the same, nothing compiled before, s", f"{cold[join]:.1f}"],
        [
            "from a step's end until its snapshot is stored, beside steps, s",
            f"{cold['middle_snapshot_seconds']:.1f}",
        ],
        [f"speed of the {beside} steps beside it, of others'", f"{slower:.2f}"],
        ["until the model of the last step can be exported, s", f"{cold['last_model_seconds']:.1f}"],
        ["until its whole snapshot is stored, s", f"{cold['last_snapshot_seconds']:.1f}"],
        ["processor seconds of it", f"{cold['last_snapshot_processor_seconds']:.0f}"],
        ["bytes written for it, of what the disk takes", f"{disk:.2f}"],
        ["MB by which a node's memory grew, at most", f"{cold['grown_bytes_beside_a_snapshot'] / 1e6:.0f}"],
        ["MB by which the coordinator's memory grew", f"{cold['coordinator_grown_mb']:.0f}"],
    ]
    caption = (
        f"{size / 1e9:.2f} GB of state, {report['nodes']} nodes and the coordinator on one host of "
        f"{report['cores']} cores with an {spaced(report['hardware'])} and one disk, which takes "
        f"{report['disk_bytes_a_second'] / 1e9:.1f} GB/s: nodes and coordinator write each byte once. "
        f"The first row is of another run. Commit {commit(report)}, torch {report['torch']}."
    )
    return f"{markdown([('what', 'left'), ('', 'right')], shown)}\n\n{caption}"


TABLES: Tables = {
    **if_recorded(STATE_FAST, "state_fast", state_fast),
    **if_recorded(STATE_RATES, "state_rates", state_rates),
    **if_recorded(STATE_DISK, "state_disk", partial(state_rates, STATE_DISK)),
    **if_recorded(LINK_FLOOR, "link_floor", link_floor),
    **if_recorded(SMALL_STEPS, "small_steps", small_steps),
    **if_recorded(FAST, "fast_lines", fast_lines),
    "reach": reach,
    "lab": lab,
    "lab_floor": lab_floor,
    "throughput": throughput,
    "pipeline_floor": pipeline_floor,
}
