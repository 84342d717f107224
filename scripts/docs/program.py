"""Tables of the program: keys, commands, metrics, bits of codecs, a thousand members."""

import argparse
import ast
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from textwrap import fill

import torch

import node.config.schema
import node.lab.profile
from node.cli.main import build_parser
from node.lab.profile import LabSection, NetworkSection, SweepSection
from node.run_file.loader import section_types, toml_value
from node.telemetry.metrics import NODE_METRICS, PREFIX, RUN_METRICS, Definition
from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown
from wire.codecs.formats import AqsgdFormat, codec_format, codec_names
from wire.codecs.registry import codec
from wire.spec import TensorSpec

MANY_NODES = RESULTS / "many_nodes.json"
MEMBER_COSTS = RESULTS / "member_costs.json"
MEMBER_DEATHS = RESULTS / "member_deaths.json", RESULTS / "member_deaths_thousand.json"
SIZED_SHAPE = (4, 1024, 1024)


def run_file() -> str:
    """Every key of a run file, its default, and its docstring in the schema."""
    words = field_words(Path(node.config.schema.__file__).read_text(encoding="utf-8"))
    rows = [
        [f"`{section}.{key.rstrip('_')}`", f"`{toml_value(value)}`", words[kind.__name__].get(key, "")]
        for section, kind in section_types().items()
        for key, value in vars(kind()).items()
    ]
    return markdown([("key", "left"), ("default", "left"), ("meaning", "left")], rows)


def field_words(source: str) -> dict[str, dict[str, str]]:
    """The docstrings of each class's fields, on one line each."""
    found: dict[str, dict[str, str]] = {}
    for statement in ast.parse(source).body:
        if not isinstance(statement, ast.ClassDef):
            continue
        fields = found.setdefault(statement.name, {})
        for before, after in zip(statement.body, statement.body[1:], strict=False):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                match after:
                    case ast.Expr(value=ast.Constant(value=str() as text)):
                        fields[before.target.id] = " ".join(text.split())
    return found


def lab_profile() -> str:
    """Every key of a laboratory profile, its default, and its docstring."""
    words = field_words(Path(node.lab.profile.__file__).read_text(encoding="utf-8"))
    sections = {"lab": LabSection, "network": NetworkSection, "sweep": SweepSection}
    rows = [
        [f"`{section}.{key}`", f"`{toml_value(value)}`", words[kind.__name__].get(key, "")]
        for section, kind in sections.items()
        for key, value in vars(kind()).items()
    ]
    return markdown([("key", "left"), ("default", "left"), ("meaning", "left")], rows)


def commands() -> str:
    """Every command with its help."""
    rows = []
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                rows.append([f"`thinwire {choice.dest}`", choice.help or ""])
    return markdown([("command", "left"), ("does", "left")], rows)


def run_metrics() -> str:
    """Every metric of the coordinator."""
    return _metrics(RUN_METRICS)


def node_metrics() -> str:
    """Every metric of a node (`join --metrics`)."""
    return _metrics(NODE_METRICS)


def _metrics(definitions: Sequence[Definition]) -> str:
    rows = [
        [
            f"`{PREFIX}{one.name}`",
            one.kind.value,
            ", ".join(f"`{label}`" for label in one.labels),
            one.meaning,
        ]
        for one in definitions
    ]
    return markdown([("metric", "left"), ("kind", "left"), ("labels", "left"), ("meaning", "left")], rows)


def codec_sizes() -> str:
    """True bits per element of every codec, header included, for a tensor of about four million elements."""
    rows = [
        [f"`{name}`", f"{_bits(codec_format(name).packed_bytes(SIZED_SHAPE)):.3f}"] for name in codec_names()
    ]
    for bits in (2, 4, 8):
        remembering = AqsgdFormat(bits)
        always, first = remembering.packed_bytes(SIZED_SHAPE), remembering.first_pass_bytes(SIZED_SHAPE)
        size = f"{_bits(always):.3f}, in the first pass {_bits(first):.3f}"
        rows.append([f"`aqsgd-{bits}`", size])
    return markdown([("codec", "left"), ("bits per element", "right")], rows)


CONSTANT_SHAPES = ((8,), (64,), (16, 16), (33, 31), (64, 96), (128, 256))
CONSTANT_RATES = ("2", "3.45", "4.41", "8")
CONSTANTS = (1.0, 1.999, 7.25, 1 / 3, 0.7071, -2.71828, 1e-20, 3e5)


@cache
def trellis_constants() -> str:
    """Largest error of `trellis-R` on tensors of equal elements, computed now over some values."""
    rows = []
    for shape in CONSTANT_SHAPES:
        row = [" x ".join(map(str, shape))]
        for rate in CONSTANT_RATES:
            which, spec = codec(f"trellis-{rate}"), TensorSpec(torch.float32, shape)
            errors = [
                abs(which.decode(which.encode(torch.full(shape, value)), spec).double() / value - 1)
                for value in CONSTANTS
            ]
            row.append(f"{max(float(error.square().mean().sqrt()) for error in errors):.4f}")
        rows.append(row)
    columns = [("elements, all equal", "left")]
    columns += [(f"`trellis-{rate}`", "right") for rate in CONSTANT_RATES]
    return markdown(columns, rows)


def _bits(packed_bytes: int) -> float:
    return 8 * packed_bytes / prod(SIZED_SHAPE)


def many_nodes() -> str:
    """A coordinator with a thousand light members (scripts/bench/many_nodes.py)."""
    report = read_report(MANY_NODES)
    enrolment, step, slow = report["enrolment"], report["step"], report["heartbeats"]

    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.0f} ms"

    rows = [
        [f"enrolment at {enrolment['rate']:.0f} a second, median", milliseconds(enrolment["median"])],
        ["the slowest of a hundred", milliseconds(enrolment["p99"])],
        ["a step that members answer after 50 ms, median", milliseconds(step["step_median"])],
        ["processor seconds of the coordinator in such a step", f"{step['cpu_a_step']:.2f}"],
        ["the page's view beside such steps, median", milliseconds(step["view_median"])],
        ["`/metrics` beside them, median", milliseconds(step["metrics_median"])],
        [
            f"share of a core, steps of {slow['step_seconds']:.0f} s, heartbeats every {slow['every']:.0f} s",
            f"{slow['cpu_share']:.2f}",
        ],
        ["the same with its gateways", f"{slow['cpu_share'] + slow['gateways_cpu_share']:.2f}"],
        ["the page's view then, median", milliseconds(slow["view_median"])],
        ["`/metrics` then, median", milliseconds(slow["metrics_median"])],
        ["memory of the coordinator", f"{report['resident_bytes'] / 1e6:.0f} MB"],
    ]
    if count := report.get("gateways"):
        rows.append(["gateways", str(count)])
        rows.append(
            [
                "their processor seconds in a step",
                f"{step['gateways_ms_a_member_and_step'] * report['nodes'] / 1e3:.2f}",
            ]
        )
        rows.append(["memory of all gateways", f"{report['gateways_resident_bytes'] / 1e6:.0f} MB"])
    if churn := report.get("churn"):
        gone = f"{churn['deaths']} members die and return in {churn['minutes']:g} min"
        rows.append([f"{gone}: steps done, aborted", f"{churn['steps']}, {churn['aborted']}"])
        rows.append(["members evicted for it", str(churn["evicted"])])
        if "left_alive" in churn:
            alive = churn["left_alive"] + churn["replaced_alive"]
            rows.append(["members that nobody killed and that left or lost their stage", str(alive)])
    caption = (
        f"{report['nodes']:,} members, {report['stages']} stages in {report['rows']} rows, members and "
        f"coordinator on the same {spaced(report['hardware'])}, load {report['load_after']:.0f}; one run, "
        f"Python {report['python']}, commit {commit(report)}."
    )
    if churn and "hardware" in churn:
        caption += f" Deaths: {spaced(churn['hardware'])}, {commit(churn)}."
    return f"{markdown([('what', 'left'), ('measured', 'right')], rows)}\n\n{caption}"


def member_deaths() -> str:
    """Rows of light members that die and come back, at steps of real length (scripts/bench/many_nodes.py)."""
    reports = [read_report(path) for path in MEMBER_DEATHS]
    runs = [report["churn"] for report in reports]
    rows = [
        ["deaths, and in a step", *(f"{run['deaths']}, {run['deaths_a_step']:.1f}" for run in runs)],
        ["steps committed, aborted", *(f"{run['steps']}, {run['aborted']}" for run in runs)],
        ["goodput", *(f"{run['goodput']:.2f}" for run in runs)],
        [
            "seats that became empty, that were filled",
            *(f"{run['seats_lost']}, {run['seats_filled']}" for run in runs),
        ],
        ["members evicted for it", *(str(run["evicted"]) for run in runs)],
        [
            "members that nobody killed and that left or lost their stage",
            *(str(run["left_alive"] + run["replaced_alive"]) for run in runs),
        ],
        ["processor seconds of the coordinator in a second", *(f"{run['cpu_share']:.2f}" for run in runs)],
    ]
    cases = [
        f"{report['nodes']:,} members, {report['stages']} stages in {report['rows']} rows, "
        f"{report['groups']} groups, for {run['minutes']:g} min: {spaced(report['hardware'])}, "
        f"load {report['load_after']:.0f}, Python {report['python']}, commit {commit(report)}."
        for report, run in zip(reports, runs, strict=True)
    ]
    caption = (
        f"{runs[0]['share_a_minute']:.0%} die a minute and are back after {runs[0]['back_seconds']:g} s. "
        f"A step takes {runs[0]['calm_step_seconds']:.1f} s without deaths, and a state as long to fetch. "
        f"{' '.join(cases)}"
    )
    columns = [("what", "left"), *((f"{report['stages']} x {report['rows']}", "right") for report in reports)]
    return f"{markdown(columns, rows)}\n\n{fill(caption, 118)}"


def member_costs() -> str:
    """What members cost the coordinator itself, by commit (scripts/bench/member_costs.py)."""
    report = read_report(MEMBER_COSTS)
    runs = report["runs"]
    rows = [
        ["a heartbeat, us", *(f"{1e6 * run['heartbeat_seconds']:.0f}" for run in runs)],
        ["all reports of a step, and its sums, ms", *(f"{1e3 * run['step_seconds']:.0f}" for run in runs)],
        ["the text of `/metrics`, ms", *(f"{1e3 * run['metrics_seconds']:.0f}" for run in runs)],
        ["a scrape, all of it, ms", *(f"{1e3 * run['scrape_seconds']:.0f}" for run in runs)],
        ["the longest block of a scrape, ms", *(f"{1e3 * run['scrape_block_seconds']:.0f}" for run in runs)],
        ["the placements of an epoch, MB", *(f"{run['placement_bytes'] / 1e6:.1f}" for run in runs)],
    ]
    columns = [("what", "left"), *((f"commit {commit(run)[:7]}", "right") for run in runs)]
    caption = (
        f"{runs[0]['members']:,} members, {report['stages']} stages in {report['rows']} rows, without gRPC "
        f"and sockets; processor time, the least of {report['repeats']}. A block: for so long nothing else "
        f"has its turn, collections of cycles included; the median of 5. Python "
        f"{report['python']}, {spaced(report['hardware'])}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


TABLES: Tables = {
    "run_file": run_file,
    "lab_profile": lab_profile,
    "commands": commands,
    "run_metrics": run_metrics,
    "node_metrics": node_metrics,
    "codec_sizes": codec_sizes,
    "trellis_constants": trellis_constants,
    **if_recorded(MANY_NODES, "many_nodes", many_nodes),
    **if_recorded(MEMBER_COSTS, "member_costs", member_costs),
    "member_deaths": member_deaths,
}
