"""Tables of links: laboratory, efficiency of a step, all-reduce, and cost of tracing."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from node.lab.reach import doctor_table, reach_table
from node.lab.results import read_results
from node.lab.table import all_tables, provenance
from scripts.docs.explained import EXPLAINED, explained_steps
from scripts.docs.markdown import Tables, commit, if_recorded, notes, read_report, spaced
from scripts.experiments.paper_tables import tables_beside
from scripts.report import RESULTS, markdown

PIPELINE_FLOOR = RESULTS / "pipeline_floor.json"
ALL_REDUCE = RESULTS / "all_reduce.json"
ALL_REDUCE_LINKS = RESULTS / "all_reduce_links.json"
ALL_REDUCE_LINKS_GPUS = RESULTS / "all_reduce_links_gpus.json"
TRACE_COST = RESULTS / "trace_cost.json"
STATUS_SPEED = RESULTS / "status_speed.json"
PAUSES = RESULTS / "pauses.json"
STAGE_ORDER = RESULTS / "stage_order.json"
PLANNERS = RESULTS / "planners.json"
FOUR_LINKS = RESULTS / "four_links.json"
REACH = RESULTS / "reach.json"
RELAY = RESULTS / "relay.json"
RELAY_LINES = RESULTS / "relay_lines.json"
SMALL_STEPS = RESULTS / "small_steps.json"
FAST, LINKS = RESULTS / "pipeline_fast.json", RESULTS / "links.json"
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


def all_reduce() -> str:
    """FP8 beside NCCL's own sums and torchft's, by size."""
    report = read_report(ALL_REDUCE)
    ways = {"fp8": "e4m3", "bf16": "bf16", "fp32": "fp32"}
    rival = any("torchft" in row["milliseconds"] for row in report["rows"])
    if rival:
        ways["torchft"] = "torchft"
    counts = list(dict.fromkeys(row["ranks"] for row in report["rows"]))
    rows = []
    for row in report["rows"]:
        times = row["milliseconds"]
        rows.append(
            (
                *([str(row["ranks"])] if len(counts) > 1 else []),
                f"{row['elements']:,}",
                *(f"{times[way]:.3f}" if way in times else "-" for way in ways),
                f"{row['bytes_sent']['fp32'] / row['bytes_sent']['fp8']:.2f}",
            )
        )
    columns = (
        *([("GPUs", "right")] if len(counts) > 1 else []),
        ("elements", "right"),
        *((f"{name}, ms", "right") for name in ways.values()),
        ("bytes of fp32 over e4m3", "right"),
    )
    caption = f"{' and '.join(map(str, counts))} x {report['hardware']}, NVLink, NCCL, median of "
    caption += f"{report['rows'][0]['runs']}, torch {report['versions']['torch']}, commit {commit(report)}."
    if rival:
        caption += (
            f" torchft {report['versions']['torchft']}: its `allreduce_quantized` of bf16, "
            "quantizing and dequantizing included."
        )
    return f"{markdown(columns, rows)}\n\n{caption}{notes(report)}"


def all_reduce_links() -> str:
    """FP8 beside gloo's own sums, on throttled links."""
    return _links(read_report(ALL_REDUCE_LINKS), "gloo")


def all_reduce_links_gpus() -> str:
    """The same with one GPU per rank."""
    return _links(read_report(ALL_REDUCE_LINKS_GPUS), "NCCL over its sockets")


def _links(report: dict[str, Any], through: str) -> str:
    rows = []
    for row in report["rows"]:
        times, busy, sent = row["milliseconds"], row["processor_milliseconds"], row["bytes_on_the_wire"]
        errors = row["error_against_fp64"]
        rows.append(
            (
                str(row["mbit"]),
                str(row["ranks"]),
                f"{row['elements']:,}",
                *(f"{times[way]:.1f} ({busy[way]:.1f})" for way in ("fp8", "bf16", "fp32")),
                f"{times['fp32'] / times['fp8']:.2f}",
                f"{sent['fp32'] / sent['fp8']:.2f}",
                *(f"{errors[way]:.2g}" for way in ("fp8", "bf16", "fp32")),
            )
        )
    columns = (
        ("Mbit/s", "right"),
        ("ranks", "right"),
        ("elements", "right"),
        ("e4m3, ms", "right"),
        ("bf16, ms", "right"),
        ("fp32, ms", "right"),
        ("time of fp32 over e4m3", "right"),
        ("bytes of fp32 over e4m3", "right"),
        ("error, e4m3", "right"),
        ("bf16", "right"),
        ("fp32", "right"),
    )
    caption = (
        f"Each rank behind a shaper both ways in a namespace of its own, {through}. Times are the slowest "
        "rank's, in brackets the processor's of the busiest rank; bytes as the shaper counts them; errors "
        "are normalised, against fp64's sum of what went in. "
        f"{spaced(report['hardware'])} for all ranks, median of "
        f"{report['rows'][0]['runs']}, torch {report['versions']['torch']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}{notes(report)}"


def pauses() -> str:
    """Bursts after pauses, with and without keep-warm traffic."""
    report = read_report(PAUSES)
    found = {(row["mbit"], row["round_trip_ms"], row["pause"], row["way"]): row for row in report["rows"]}
    ways = list(dict.fromkeys(row["way"] for row in report["rows"]))
    places = {
        (row["mbit"], row["round_trip_ms"], row["pause"]): row["least_seconds"] for row in report["rows"]
    }
    rows = [
        [*(f"{value:g}" for value in place), f"{least:.2f}", *(_bursts(found[*place, way]) for way in ways)]
        for place, least in places.items()
    ]
    columns = [("Mbit/s", "right"), ("round trip, ms", "right"), ("pause, s", "right")]
    columns += [("least, s", "right"), *((f"{way}, s", "right") for way in ways)]
    caption = (
        f"{report['tensors']} tensors of {report['bytes']:,} bytes, from the first send until the last has "
        f"arrived; *least* is their bytes at the rate and half a round trip. Of {report['runs']} "
        f"connections the median, in brackets the least and the most, each the median of "
        f"{report['bursts'] - 1} bursts behind a first; tbf, the lab's packet relay, CUBIC, kernel "
        f"{report['kernel']}, {spaced(report['hardware'])}, "
        f"grpcio {report['versions']['grpcio']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def planners() -> str:
    """What exact planners win over the simplest way (scripts/bench/planners.py)."""
    report = read_report(PLANNERS)
    rows = [
        [f"memory: {row['case']}, {row['gb']} GB", "seconds of a microbatch", f"{row['gain']:.3f}", ""]
        for row in report["memory"]
        if row["planned_over_all_kept"] > 1
    ]
    rows += [
        [
            f"{row['groups']} gradient groups over {row['rows']} rows, {row['draws']} draws",
            "bytes of sums",
            f"{row['bytes_mean']:.3f}",
            f"{row['bytes_most']:.3f}",
        ]
        for row in report["group_sharing"]
    ]
    columns = [("case", "left"), ("what", "left"), ("simple / planned", "right"), ("most", "right")]
    return f"{markdown(columns, rows)}\n\n{report['hardware']}; commit {report['commit'][:12]}."


def stage_order() -> str:
    """Planned orders of stages against every order."""
    report = read_report(STAGE_ORDER)
    rows = [
        [
            str(one["nodes"]),
            f"{one['orders']:,}",
            str(one["draws"]),
            f"{one['planned_over_best_mean']:.3f}",
            f"{one['planned_over_best_worst']:.3f}",
            f"{one['any_order_over_best_mean']:.2f}",
            f"{one['planning_seconds_mean']:.2f}",
        ]
        for one in report["against_every_order"]
    ]
    columns = [("nodes", "right"), ("orders", "right"), ("draws", "right"), ("planned step, mean", "right")]
    columns += [("worst", "right"), ("any order, mean", "right"), ("processor s to plan", "right")]
    return f"{markdown(columns, rows)}\n\nSteps over the shortest of all. Simulated, commit {commit(report)}."


def stage_settings() -> str:
    """Planned rows in DT-FM's five settings."""
    report = read_report(STAGE_ORDER)
    rows = [
        [
            one["setting"],
            f"{one['as_they_come_seconds_mean']:.2f}",
            f"{one['planned_seconds']:.2f}",
            f"{one['compute_alone_seconds']:.2f}",
            f"{one['gain']:.2f}",
            f"{one['planning_seconds']:.0f}",
        ]
        for one in report["settings"]
    ]
    columns = [("setting", "left"), ("s a step as nodes come", "right"), ("planned", "right")]
    columns += [("compute alone", "right"), ("gain", "right"), ("processor s to plan", "right")]
    return f"{markdown(columns, rows)}\n\nThe slowest of eight rows. Simulated, commit {commit(report)}."


def four_links() -> str:
    """Codec auto against fixed ones on unlike links (scripts/experiments/four_links.py)."""
    report = read_report(FOUR_LINKS)
    best = min(one["step_seconds"] for one in report["results"] if one["codec"] != "auto")
    trained = report["losses"] or {"held_out": {}}
    learned = ""
    if trained["held_out"]:
        learned = (
            "Loss by seed of a small model with these codecs at its boundaries, after "
            f"{trained['steps']} steps of {trained['batch']} windows; without codecs "
            f"{_losses_of(trained['held_out'], 'none')} ({spaced(trained['hardware'])}, torch "
            f"{trained['torch']}, commit {commit(trained)}). "
        )
    rows = [
        [
            f"`{one['codec']}`",
            f"{one['step_seconds']:.2f} ({min(one['steps']):.2f} to {max(one['steps']):.2f})",
            f"{best / one['step_seconds']:.2f}",
            *([_losses_of(trained["held_out"], one["codec"])] if learned else []),
            _bits_of(one["activation_codecs"]),
            _bits_of(one["gradient_codecs"]),
        ]
        for one in report["results"]
    ]
    columns = [("codec", "left"), ("s a step", "right"), ("speed over the best fixed one's", "right")]
    columns += [("held-out loss", "right")] if learned else []
    columns += [("activations by link", "left"), ("gradients by link", "left")]
    rates = ", ".join(f"{rate:g}" for rate in report["rates_mbit"])
    caption = (
        f"Links of {rates} Mbit/s and {report['round_trip_ms']:g} ms, {report['microbatches']} microbatches "
        f"of {report['elements']:,} elements, blocks that wait {1000 * report['compute_seconds']:.0f} ms "
        f"a microbatch in place of computing. Median of {len(report['results'][0]['steps'])} steps, in "
        f"brackets the least and the most. {learned}{report['runs']} run, {spaced(report['hardware'])}, "
        f"torch {report['torch']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def _losses_of(held_out: Mapping[str, Sequence[float]], name: str) -> str:
    """By seed; codecs that are far slower than others have none."""
    return ", ".join(f"{loss:.3f}" for loss in held_out.get(name, ())) or "-"


def _bits_of(codecs: Sequence[str]) -> str:
    """Of each link, or once if all are the same."""
    return f"`{codecs[0]}`" if len(set(codecs)) == 1 else ", ".join(f"`{codec}`" for codec in codecs)


def _bursts(row: Mapping[str, Any]) -> str:
    each = [statistics.median(times[1:]) for times in row["times"]]
    return f"{row['seconds']:.2f} ({min(each):.2f} to {max(each):.2f})"


def trace_cost() -> str:
    """What a trace costs."""
    report = read_report(TRACE_COST)
    rows = [
        ["recording a span", f"{1e6 * report['record_seconds']:.2f} microseconds"],
        ["sending it: packed, and its share of the frame", f"{report['wire_bytes']:.1f} bytes"],
        ["packing it for the control connection", f"{1e6 * report['pack_seconds']:.2f} microseconds"],
        ["keeping it: on the coordinator's disk", f"{report['disk_bytes']:.1f} bytes"],
        ["reading, checking and writing it there", f"{1e6 * report['keep_seconds']:.2f} microseconds"],
        ["a step of a stage", f"{report['spans_per_step']} spans"],
        ["of the demo's step, recorded and packed", f"{100 * report['share_of_step']:.2f} %"],
    ]
    caption = (
        f"Processor time, median of {report['runs']} runs; a step of the demo's stage takes "
        f"{report['step_seconds']:.2f} s of it. {spaced(report['hardware'])}, Python {report['python']}, "
        f"commit {commit(report)}."
    )
    return markdown([("what", "left"), ("cost", "right")], rows) + "\n\n" + caption


def status_speed() -> str:
    """Times of commands that read a run, by its length."""
    report = read_report(STATUS_SPEED)
    rows = [
        [
            f"{row['steps']:,}",
            f"{row['history_bytes'] / 1e6:.0f}",
            f"{row['history_disk_bytes'] / 1e6:.0f}",
            *(f"{row[name]['processor_seconds']:.2f}" for name in ("status", "top", "page")),
            _processor(row.get("page_without_checkpoint")),
        ]
        for row in report["rows"]
    ]
    headings = ("steps", "history, MB", "on disk", "`thinwire status`", "`thinwire top --once`")
    columns = [(words, "right") for words in (*headings, "the page's past", "without the checkpoint")]
    caption = (
        f"Processor seconds, Python's start included for commands, medians of {report['runs']} runs; "
        f"{report['stages']} stages, ten steps a second. {spaced(report['hardware'])}, "
        f"Python {report['python']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def _processor(measured: Mapping[str, float] | None) -> str:
    return "-" if measured is None else f"{measured['processor_seconds']:.2f}"


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
    head, *rows = doctor_table(report)
    if not rows:
        return table
    said = markdown([(words, "left") for words in head], rows)
    return f"{table}\n\nWhat `thinwire doctor` says in each kind of network:\n\n{said}"


def relay() -> str:
    """What one relay process carries, beside socat, and its memory."""
    report = read_report(RELAY)
    rows = []
    for name in ("relay", "socat"):
        rates = sorted(report["loopback"][f"{name}_bits_per_second"])
        middle = statistics.median(rates)
        rows.append([name, *(f"{rate / 1e9:.2f}" for rate in (rates[0], middle, rates[-1]))])
    sizes = report["memory_bytes"].items()
    memory = "; ".join(f"{what.replace('_', ' ')}: {size / 1e6:.1f} MB" for what, size in sizes)
    processor = report["loopback"]["processor_seconds_per_gigabyte"]
    costs = ", ".join(f"{name} {seconds:.2f}" for name, seconds in processor.items())
    held = report["kernel_bytes_of_a_direction"]
    columns = [("on loopback, Gbit/s", "left"), ("least", "right"), ("median", "right"), ("most", "right")]
    caption = (
        f"Median of the pairs' ratios {report['loopback']['ratio']:.2f}, {report['runs']} pairs in turn. "
        f"Processor seconds for a gigabyte: {costs}. Resident memory of the process: {memory}; beside that "
        f"the kernel holds at most {held >> 10} KiB for each direction that waits. "
        f"{spaced(report['hardware'])}, "
        f"{report['event_loop']}, Python {report['python']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def relay_lines() -> str:
    """What a relay carries between two slow lines, and how long a link is without one when it dies."""
    report = read_report(RELAY_LINES)
    rows = []
    for row in report["lines"]:
        shares = [one["share"] for one in row["rounds"]]
        slower = statistics.median(min(one["lines_bits_per_second"]) for one in row["rounds"])
        through = statistics.median(one["relayed_bits_per_second"] for one in row["rounds"])
        rows.append((f"{row['mbit']}", f"{slower / 1e6:.2f}", f"{through / 1e6:.2f}", f"{min(shares):.3f}"))
    columns = [("lines, Mbit/s", "right"), ("TCP over the slower, Mbit/s", "right")]
    columns += [("through the relay, Mbit/s", "right"), ("least share", "right")]
    outages = "; ".join(
        f"{name}, {min(seconds):.2f} to {max(seconds):.2f} s of {len(seconds)} times"
        for name, seconds in report["outage_seconds"].items()
    )
    caption = (
        f"Two lines in a row with a round trip of {report['round_trip_ms']:g} ms each, the relay between, "
        f"{len(report['lines'][0]['rounds'])} rounds of {report['seconds']:g} s. Without a tensor after the "
        f"process of a link's relay was {outages}. {spaced(report['hardware'])}, kernel {report['kernel']}, "
        f"{report['event_loop']}, Python {report['python']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


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
        f"{commit(report)}; {report['note']}. {_link_cost(links)}"
    )


def _link_cost(links: dict[str, Any]) -> str:
    cost = links["median"]["now"]
    whole = cost["processor_seconds_a_gb"]
    parts = [cost[f"{name}_seconds_a_gb"] for name in ("MainThread", "carrier", "event_engine")]
    loop, splice, engine = (f"{part:.2f}" for part in parts)
    return (
        f"A link between two processes carries {cost['mbit_each_way'] / 1000:.2f} Gbit/s each way and takes "
        f"{whole:.2f} processor seconds a GB, sent and received, TLS included: event loops {loop}, splices "
        f"{splice}, gRPC's own threads {engine}, and the link's threads, on which gRPC encrypts and sends, "
        f"{whole - sum(parts):.2f}; median of {len(links['runs']['now'])} runs, commit {commit(links)}."
    )


TABLES: Tables = {
    **if_recorded(EXPLAINED, "explained_steps", explained_steps),
    **if_recorded(SMALL_STEPS, "small_steps", small_steps),
    **if_recorded(FAST, "fast_lines", fast_lines),
    "relay": relay,
    "relay_lines": relay_lines,
    "reach": reach,
    "lab": lab,
    "lab_floor": lab_floor,
    "throughput": throughput,
    "pipeline_floor": pipeline_floor,
    "all_reduce": all_reduce,
    "all_reduce_links": all_reduce_links,
    "all_reduce_links_gpus": all_reduce_links_gpus,
    "pauses": pauses,
    "stage_order": stage_order,
    "planners": planners,
    "stage_settings": stage_settings,
    **if_recorded(FOUR_LINKS, "four_links", four_links),
    "trace_cost": trace_cost,
    "status_speed": status_speed,
}
