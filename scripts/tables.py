"""Write the generated tables into the documents: `python scripts/tables.py`, or `--check` to only compare.

A document holds a table between `<!-- table:NAME -->` and `<!-- /table -->`. Tables come from the program
itself (run file keys, commands, codec sizes) or from recorded results in scripts/.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import node.config.schema
import node.lab.profile
from node.cli.main import build_parser
from node.config.loader import section_types, toml_value
from node.lab.profile import LabSection, NetworkSection, SweepSection
from node.lab.results import read_results
from node.lab.table import all_tables, provenance
from node.telemetry.metrics import NODE_METRICS, PREFIX, RUN_METRICS, Definition
from wire.codecs.aqsgd import AqsgdCodec
from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "kernels", "wire", "node", "node/telemetry", "deploy", "deploy/lab", "scripts", "tests")
BLOCK = re.compile(r"(<!-- table:([a-z_]+) -->\n).*?(<!-- /table -->)", re.DOTALL)

CODEC_LOSSES = (
    ROOT / "scripts" / "results" / "codec_loss.json",
    ROOT / "scripts" / "results" / "codec_loss_16_cores.json",
)
"""One report a machine."""
CODEC_SPEED = ROOT / "scripts" / "bench_codecs.json"
TRACE_COST = ROOT / "scripts" / "results" / "trace_cost.json"
GPU_CODEC_SPEED = ROOT / "scripts" / "results" / "gpu_codecs.json"
GPU_TRELLIS = ROOT / "scripts" / "results" / "gpu_trellis.json"
STORED_ACTIVATIONS = ROOT / "scripts" / "results" / "stored_activations.json"
STORED_LOSS = ROOT / "scripts" / "results" / "stored_activations_loss.json"
PACKING_OVERHEAD = ROOT / "scripts" / "results" / "packing_overhead.json"
TAH_ABLATION = ROOT / "scripts" / "results" / "tah_ablation.json"
CONVERGENCE = ROOT / "scripts" / "results" / "convergence.json"
ALL_REDUCE = ROOT / "scripts" / "results" / "all_reduce.json"
RIVALS = ROOT / "scripts" / "results" / "rivals.json"
LAB_RESULTS = ROOT / "scripts" / "results"
"""Holds the laboratory's results as lab_*.json."""
PAPER_SHAPE = (48, 1600)
"""Layers and width of the model in the paper's tables of throughput."""
PIPELINE_FLOOR = ROOT / "scripts" / "results" / "pipeline_floor.json"
SIZED_SHAPE = (4, 1024, 1024)
BASELINE = ("fp32", "fp32")
LOSSES = ("loss_last", "loss_held_out")

Column = tuple[str, str]
"""A heading, and `left` or `right`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables into the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a table is out of date")
    check = parser.parse_args(argv).check
    outdated = []
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = with_tables(before, TABLES)
        if after == before:
            continue
        outdated.append(path.relative_to(ROOT))
        if not check:
            path.write_text(after, encoding="utf-8")
    for document in outdated:
        print(f"{document}: {'out of date: run scripts/tables.py' if check else 'written'}")
    return 1 if check and outdated else 0


def documents() -> list[Path]:
    """Every README of the house that is there."""
    return [path for folder in FOLDERS if (path := ROOT / folder / "README.md").exists()]


def with_tables(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """`text` with every marked block filled anew. Raises SystemExit for a table that nothing makes."""

    def fill(found: re.Match[str]) -> str:
        if found[2] not in tables:
            raise SystemExit(f"no table is called {found[2]!r}; known: {', '.join(tables)}")
        return f"{found[1]}{tables[found[2]]()}\n{found[3]}"

    return BLOCK.sub(fill, text)


def markdown(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table; `|` within a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join("--:" if side == "right" else "---" for _, side in columns) + "|"
    return "\n".join([line([heading for heading, _ in columns]), rule, *(line(row) for row in rows)])


# ---- from the program


def run_file() -> str:
    """Every key of a run file, its default, and the words beneath it in the schema."""
    words = field_words(Path(node.config.schema.__file__).read_text(encoding="utf-8"))
    rows = [
        [f"`{section}.{key}`", f"`{toml_value(value)}`", words[kind.__name__].get(key, "")]
        for section, kind in section_types().items()
        for key, value in vars(kind()).items()
    ]
    return markdown([("key", "left"), ("default", "left"), ("meaning", "left")], rows)


def field_words(source: str) -> dict[str, dict[str, str]]:
    """For each class of a module, the docstring beneath each field, on one line."""
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
    """Every key of a laboratory's profile, its default, and the words beneath it."""
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
    """Every metric that the coordinator shows."""
    return _metrics(RUN_METRICS)


def node_metrics() -> str:
    """Every metric that a node shows with `join --metrics`."""
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
    """True bits an element of every codec, header included, for a tensor of about four million elements."""
    spec = TensorSpec(torch.float32, SIZED_SHAPE)
    rows = [[f"`{name}`", f"{codec(name).bits_per_element(spec):.3f}"] for name in codec_names()]
    for bits in (2, 4, 8):
        remembering = codec(f"aqsgd-{bits}")
        assert isinstance(remembering, AqsgdCodec)
        first = 8 * remembering.first_pass_bytes(spec) / spec.elements
        size = f"{remembering.bits_per_element(spec):.3f}, in the first pass {first:.3f}"
        rows.append([f"`aqsgd-{bits}`", size])
    return markdown([("codec", "left"), ("bits an element", "right")], rows)


# ---- from recorded results


def trace_cost() -> str:
    """What scripts/bench_trace.py recorded."""
    report = json.loads(TRACE_COST.read_text(encoding="utf-8"))
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
        f"{report['step_seconds']:.2f} s of it. {_spaced(report['hardware'])}, Python {report['python']}, "
        f"commit {report['commit'][:12]}{_changes(report['commit'])}."
    )
    return markdown([("what", "left"), ("cost", "right")], rows) + "\n\n" + caption


def codec_loss() -> str:
    """Loss of each codec pair, a table for each machine that measured."""
    return "\n\n".join(_losses(json.loads(path.read_text(encoding="utf-8"))) for path in CODEC_LOSSES)


def _losses(report: dict[str, Any]) -> str:
    """One report's losses, and their distance from the uncompressed run of the same width and seed."""
    runs = report["runs"]
    by_key = {(*_model(run), run["seed"]): run for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    columns = [("width", "right"), ("activations", "left"), ("gradients", "left")]
    columns += [("bits out", "right"), ("bits back", "right")]
    for seed in seeds:
        columns += [(f"loss, seed {seed}", "right"), (f"held out, seed {seed}", "right")]
    rows = []
    for model in sorted({_model(run) for run in runs}, key=_order):
        width, forward, backward = model
        any_run = next(run for run in runs if _model(run) == model)
        row = [str(width), f"`{forward}`", f"`{backward}`"]
        row += [f"{any_run['bits_forward']:.2f}", f"{any_run['bits_backward']:.2f}"]
        for seed in seeds:
            baseline = by_key.get((width, *BASELINE, seed))
            row += [_against(by_key.get((*model, seed)), baseline, key) for key in LOSSES]
        rows.append(row)
    settings = report["settings"]
    caption = (
        f"{settings['run.steps']} steps of {settings['training.global_batch']} x "
        f"{settings['model.sequence']} tokens, {settings['model.layers']} layers, "
        f"{settings['pipeline.stages']} stages, {report['data']['name']}; "
        f"{len(runs)} runs, {_spaced(report['hardware'])}, torch {report['versions']['torch']}, Python "
        f"{report['versions']['python']}, commit {report['commit'][:12]}{_changes(report['commit'])}. "
        f"Loss is the mean of the last {report['last_steps']} steps; held out is the loss of the final "
        f"weights, without codecs, on {report['held_out_windows']} windows that no step saw."
    )
    return markdown(columns, rows) + "\n\n" + caption


def codec_speed() -> str:
    """What `make bench` recorded. Processor time, not wall time: it holds on a busy machine too."""
    report = json.loads(CODEC_SPEED.read_text(encoding="utf-8"))
    rows = [
        [
            f"`{row['codec']}`",
            f"{row['encode_cpu_nanoseconds_per_element']:.2f}",
            f"{row['decode_cpu_nanoseconds_per_element']:.2f}",
            f"{row['bits_per_element']:.3f}",
            f"{row['relative_error']:.4f}",
        ]
        for row in report["results"]
    ]
    headings = ("encode, CPU ns an element", "decode, CPU ns an element", "bits an element", "relative error")
    shape = " x ".join(map(str, report["shape"]))
    threads = f"{report['threads']} thread" + ("s" if report["threads"] > 1 else "")
    caption = (
        f"{shape} {report['dtype']}, {_spaced(report['hardware'])}, {threads}, "
        f"load average {report['load_before']:.1f} before, median of {report['runs']} runs, "
        f"torch {report['torch']}, Python {report['python']}, "
        f"commit {report['commit'][:12]}{_changes(report['commit'])}."
    )
    columns = [("codec", "left"), *((heading, "right") for heading in headings)]
    return markdown(columns, rows) + "\n\n" + caption


def packing_overhead() -> str:
    """What scripts/bench_packing_overhead.py recorded: packing against a stage's compute, a microbatch."""
    report = json.loads(PACKING_OVERHEAD.read_text(encoding="utf-8"))
    rows = [
        [
            row["dtype"],
            f"`{row['forward']}`",
            f"`{row['backward']}`",
            f"{1e6 * row['device_seconds']:.0f}",
            f"{100 * row['share']:.2f} %",
            f"{1e6 * row['wall_seconds']:.0f}",
            f"{100 * row['wall_share']:.2f} %",
        ]
        for row in report["rows"]
    ]
    columns = [("boundary", "left"), ("activations", "left"), ("gradients", "left")]
    columns += [("kernels, microseconds", "right"), ("of the stage", "right")]
    columns += [("with the host, microseconds", "right"), ("of the stage", "right")]
    caption = (
        f"A microbatch of {' x '.join(map(str, report['shape']))} through {report['layers']} layers in "
        f"{report['stages']} stages: forward and backward of a stage take "
        f"{1e3 * report['stage_seconds']:.1f} ms. Encoding and decoding both; {report['hardware']}, median "
        f"of {report['runs']} runs, torch {report['torch']}, Triton {report['triton']}, commit "
        f"{report['commit'][:12]}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def gpu_codec_speed() -> str:
    """What scripts/bench_gpu_codecs.py recorded: kernels against a copy timed in the same run."""
    report = json.loads(GPU_CODEC_SPEED.read_text(encoding="utf-8"))
    rows = [
        [
            " x ".join(map(str, row["shape"])),
            f"`{row['codec']}`",
            row["way"],
            f"{1e6 * row['seconds']:.1f}",
            f"{100 * row['of_copy']:.0f} %",
        ]
        for row in report["times"]
    ]
    columns = [("shape", "left"), ("codec", "left"), ("way", "left")]
    columns += [("microseconds", "right"), ("of a copy's bandwidth", "right")]
    caption = (
        f"{report['dtype']}, CUDA graphs, {report['hardware']}, median of {report['runs']} runs, "
        f"torch {report['torch']}, Triton {report['triton']}, commit {report['commit'][:12]}. Bandwidth "
        "counts the bytes that must move; the copy is device to device, timed in the same run."
    )
    return markdown(columns, rows) + "\n\n" + caption


def trellis_speed() -> str:
    """What scripts/bench_gpu_trellis.py recorded, on a GPU and on a CPU of the same machine."""
    report = json.loads(GPU_TRELLIS.read_text(encoding="utf-8"))
    rows = []
    for row in report["rows"]:
        elements = math.prod(row["shape"])
        line = ["GPU" if row["device"] == "cuda" else "CPU", " x ".join(map(str, row["shape"]))]
        line += [f"`{row['codec']}`", f"{row['relative_error']:.4f}"]
        for way in ("encode", "decode"):
            alone = row.get(f"{way}_kernel_seconds")
            line += [f"{1e3 * row[f'{way}_seconds']:.1f}", "" if alone is None else f"{1e3 * alone:.1f}"]
            line += [f"{elements / row[f'{way}_seconds'] / 1e6:.0f}"]
        rows.append(line)
    columns = [("on", "left"), ("shape", "left"), ("codec", "left"), ("relative error", "right")]
    for way in ("encode", "decode"):
        columns += [(f"{way}, ms", "right"), ("kernels alone", "right"), ("M elements/s", "right")]
    caption = (
        f"bf16, {report['hardware']}; the CPU's rows: {report['cores']} cores, {report['threads']} threads. "
        f"Wall time, waits for the device included, median of {report['runs']} runs, torch "
        f"{report['torch']}, Python {report['python']}, commit {report['commit'][:12]}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def tah_ablation() -> str:
    """What scripts/exp_tah_ablation.py recorded: settings of TAH-Quant, then every codec, a line each."""
    report = json.loads(TAH_ABLATION.read_text(encoding="utf-8"))
    kinds = ("activation", "gradient", "outlier")
    names = dict.fromkeys((row["group"], row["name"]) for row in report["results"])
    by_key = {(row["group"], row["name"], row["kind"]): row for row in report["results"]}
    rows = []
    for group, name in names:
        found = [by_key.get((group, name, kind)) for kind in kinds]
        first = next(row for row in found if row is not None)
        rows.append([group, name, f"{first['bits_per_element']:.2f}"])
        rows[-1] += ["-" if row is None else f"{row['relative_error']:.4f}" for row in found]
    columns = [("varied", "left"), ("setting or codec", "left"), ("bits an element", "right")]
    columns += [(f"error, {words}", "right") for words in ("activations", "gradients", "with outliers")]
    tensors = max(row["tensors"] for row in report["results"])
    caption = (
        f"Relative error of {tensors} tensors of each kind of {', '.join(report['data'])}; torch "
        f"{report['torch']}, Python {report['python']}, commit "
        f"{report['commit'][:12]}{_changes(report['commit'])}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def rivals() -> str:
    """What scripts/bench_rivals.py recorded on a CPU."""
    report = json.loads(RIVALS.read_text(encoding="utf-8"))
    speeds = {(row["package"], row["method"]): row for row in report["speeds"]}
    by_key = {(row["package"], row["method"], row["kind"]): row for row in report["results"]}
    rows = []
    for package, method in dict.fromkeys((row["package"], row["method"]) for row in report["results"]):
        speed = speeds[package, method]
        errors = [by_key[package, method, kind]["relative_error"] for kind in ("activation", "gradient")]
        row = [package, method, f"{by_key[package, method, 'activation']['bits_per_element']:.3f}"]
        row += ["not finite" if error is None else f"{error:.4f}" for error in errors]
        row += [f"{speed[f'{way}_nanoseconds_per_element']:.1f}" for way in ("encode", "decode")]
        rows.append(row)
    columns = [("package", "left"), ("method", "left"), ("bits an element", "right")]
    columns += [("error, activations", "right"), ("error, gradients", "right")]
    columns += [("encode, ns an element", "right"), ("decode, ns an element", "right")]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    caption = (
        f"{', '.join(report['data'])}, {report['device']}, {_spaced(report['hardware'])}, "
        f"{report['threads']} thread, least of {report['runs']} runs, load average "
        f"{report['load_before']:.1f} before; {versions}; commit "
        f"{report['commit'][:12]}{_changes(report['commit'])}."
    )
    for skipped in report["skipped"]:
        caption += f" Not measured: {skipped['package']}, {skipped['method']}: {skipped['reason']}."
    return markdown(columns, rows) + "\n\n" + caption


def lab() -> str:
    """What the laboratory measured, a block a results file; the paper's tables beside its own model."""
    blocks = []
    for path in sorted(LAB_RESULTS.glob("lab_*.json")):
        result = read_results(path)
        model = result["model"]
        paper = (model["layers"], model["hidden"]) == PAPER_SHAPE
        for table in all_tables([result])[: None if paper else 1]:
            sides = ["left" if i < table.left else "right" for i in range(len(table.headings))]
            text = markdown(list(zip(table.headings, sides, strict=True)), table.rows)
            blocks.append(f"{table.title[0].upper()}{table.title[1:]}:\n\n{text}")
        blocks.append(f"{provenance(result)}.")
    return "\n\n".join(blocks) or "Nothing has been recorded yet."


def stored_activations() -> str:
    """What scripts/bench_stored_activations.py recorded, beside the formulas of AGoQ's table 1."""
    report = json.loads(STORED_ACTIVATIONS.read_text(encoding="utf-8"))
    plain = {(row["shape"], row["tokens"]): row for row in report["rows"] if row["way"] == "bf16"}
    rows = []
    for row in report["rows"]:
        kept = row["held_bytes"] if row["saved_bytes"] is None else row["saved_bytes"]
        base = plain[row["shape"], row["tokens"]]
        rows.append(
            [
                row["shape"],
                f"{row['tokens'] // 1024}K",
                row["way"],
                f"{kept / row['unit_bytes']:.2f}",
                f"{row['peak_bytes'] / 2**30:.2f}",
                f"{100 * (row['peak_bytes'] / base['peak_bytes'] - 1):+.0f} %",
                f"{1e3 * row['seconds'] / row['blocks']:.1f}",
                f"{100 * (row['seconds'] / base['seconds'] - 1):+.1f} %",
                f"{row['tokens'] / row['seconds'] * row['blocks'] / 1e3:.0f}",
            ]
        )
    columns = [("block", "left"), ("tokens", "right"), ("kept", "left"), ("U a block", "right")]
    columns += [("peak, GiB", "right"), ("against bf16", "right")]
    columns += [("ms a block", "right"), ("against bf16", "right"), ("1000 tokens/s and block", "right")]
    notes = " ".join(f"{note[0].upper()}{note[1:]}." for note in report["notes"])
    caption = (
        "1 U = tokens x hidden x 2 bytes. Forward and backward of 4 blocks (2 from 32K on), the peak above "
        "weights, gradients and input; times are medians of turns in one run. For F = 4 H the formulas of "
        "AGoQ's table 1 give Megatron 28 U, COAT 16.5 U and AGoQ 7.75 U; they count 5 U for attention. "
        f"{report['hardware']}, torch {report['versions']['torch']}, Triton {report['versions']['triton']}, "
        f"commit {report['commit'][:12]}. {notes}"
    )
    return markdown(columns, rows) + "\n\n" + caption


def stored_gradients() -> str:
    """Errors of gradients by bits, from scripts/exp_stored_activations.py."""
    report = json.loads(STORED_LOSS.read_text(encoding="utf-8"))
    found = {(row["gradient"], row["bits"]): row["normalised_l2"] for row in report["gradients"]}
    widths = sorted({bits for _, bits in found})
    rows = [
        [name, *(f"{found[name, bits]:.4f}" for bits in widths)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    columns = [("gradient", "left"), *((f"{bits} bits", "right") for bits in widths)]
    return markdown(columns, rows) + "\n\n" + _stored_caption(report)


def stored_loss() -> str:
    """Losses of each way of keeping activations, by seed."""
    report = json.loads(STORED_LOSS.read_text(encoding="utf-8"))
    seeds = sorted({run["seed"] for run in report["runs"]})
    by_key = {(run["way"], run["seed"]): run for run in report["runs"]}
    rows = []
    for way in dict.fromkeys(run["way"] for run in report["runs"]):
        row = [f"`{way}`"]
        for seed in seeds:
            for key in LOSSES:
                row.append(_against(by_key.get((way, seed)), by_key.get(("off", seed)), key))
        rows.append(row)
    columns = [("kept", "left")]
    for seed in seeds:
        columns += [(f"loss, seed {seed}", "right"), (f"held out, seed {seed}", "right")]
    return markdown(columns, rows) + "\n\n" + _stored_caption(report)


def _stored_caption(report: dict[str, Any]) -> str:
    model, training = report["settings"]["model"], report["settings"]["training"]
    return (
        f"{model['family']}, {model['layers']} blocks, {model['hidden']} wide, after "
        f"{report['settings']['run.steps']} steps of {training['global_batch']} x {model['sequence']} "
        f"tokens; {report['data']['name']}, float32, {report['hardware']}, "
        f"torch {report['versions']['torch']}, commit {report['commit'][:12]}."
    )


def pipeline_floor() -> str:
    """What scripts/exp_pipeline_floor.py found: the share of the floor by rate and round trip."""
    report = json.loads(PIPELINE_FLOOR.read_text(encoding="utf-8"))
    shapes = list(dict.fromkeys((row["round_trip_ms"], row["rate_mbit"]) for row in report["results"]))
    kinds = list(dict.fromkeys((row["simulated"], row["window"]) for row in report["results"]))
    found = {
        (row["round_trip_ms"], row["rate_mbit"], row["simulated"], row["window"]): row
        for row in report["results"]
    }
    columns = [("round trip, ms", "right"), ("Mbit/s", "right"), ("floor, s", "right")]
    columns += [
        (f"`window = {window}`" + (", simulated" if simulated else ", measured"), "right")
        for simulated, window in kinds
    ]
    columns.append(("windows planned", "left"))
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
                "-" if planned is None else ", ".join(map(str, planned["windows"])),
            ]
        )
    settings = report["settings"]
    caption = (
        f"Share of the floor of a step of {settings['microbatches']} microbatches through "
        f"{settings['stages']} stages, forward {1e3 * settings['forward_seconds']:g} ms and backward "
        f"{1e3 * settings['backward_seconds']:g} ms each, 1 MiB (`{settings['codec']}`) over each link "
        "each way at the rate given. In brackets: of the floor with the compute times that the stages "
        f"measured in the same steps. {_spaced(report['hardware'])}, torch {report['versions']['torch']}, "
        f"Python {report['versions']['python']}, commit {report['commit'][:12]}{_changes(report['commit'])}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def convergence() -> str:
    report = json.loads(CONVERGENCE.read_text(encoding="utf-8"))
    rows = []
    for run in report["runs"]:
        losses = run.get("losses")
        at_300 = losses[299] if losses else run["losses_at"]["300"]
        valid = run["loss_valid"]
        million = run["steps"] * report["tokens_a_step"] / 1e6
        codecs = f"`{run['forward']}`", f"`{run['backward']}`"
        # An fp16 without an exponent, since mended.
        mark = " *" if run["forward"] == "fp16" else ""
        rows.append(
            (f"{million:.1f}", *codecs, f"{at_300:.4f}", f"{valid:.4f}{mark}" if valid else "not measured")
        )
    columns = (
        ("million tokens", "right"),
        ("activations", "left"),
        ("gradients", "left"),
        ("training loss, step 300", "right"),
        ("held-out loss", "right"),
    )
    return f"""{markdown(columns, rows)}

A Llama of 124 million parameters, 4 stages, GPT-2's tokens of books, {report["tokens_a_step"]:,} tokens a
step, one seed, {report["hardware"]}, torch {report["versions"]["torch"]}, commit {report["commit"][:12]}.
(*) With an fp16 that had no exponent yet: gradients vanished."""


def all_reduce() -> str:
    report = json.loads(ALL_REDUCE.read_text(encoding="utf-8"))
    rows = []
    for row in report["rows"]:
        times = row["milliseconds"]
        rows.append(
            (
                f"{row['elements']:,}",
                *(f"{times[way]:.3f}" for way in ("fp8", "bf16", "fp32")),
                f"{row['bytes_sent']['fp32'] / row['bytes_sent']['fp8']:.2f}",
            )
        )
    columns = (
        ("elements", "right"),
        ("e4m3, ms", "right"),
        ("bf16, ms", "right"),
        ("fp32, ms", "right"),
        ("bytes of fp32 over e4m3", "right"),
    )
    caption = f"{report['rows'][0]['ranks']} x {report['hardware']}, NVLink, NCCL, median of "
    caption += (
        f"{report['rows'][0]['runs']}, torch {report['versions']['torch']}, commit {report['commit'][:12]}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def _share(row: dict[str, Any]) -> str:
    """Of the floor with the times set; in brackets with those that the stages measured."""
    measured = row.get("share_of_measured")
    return f"{row['share']:.2f}" + ("" if measured is None else f" ({measured:.2f})")


def _model(run: dict[str, Any]) -> tuple[int, str, str]:
    return run["width"], run["forward_codec"], run["backward_codec"]


def _order(model: tuple[int, str, str]) -> tuple[Any, ...]:
    """By width, then the uncompressed run, then by name."""
    return model[0], model[1:] != BASELINE, model


def _against(run: dict[str, Any] | None, baseline: dict[str, Any] | None, key: str) -> str:
    """`1.9321 (+0.42 %)`."""
    if run is None:
        return "-"
    if baseline is None or run is baseline:
        return f"{run[key]:.4f}"
    return f"{run[key]:.4f} ({100 * (run[key] / baseline[key] - 1):+.2f} %)"


def _changes(commit: str) -> str:
    return " with changes" if commit.endswith("with changes") else ""


def _spaced(hardware: str) -> str:
    return " ".join(hardware.split())


TABLES: dict[str, Callable[[], str]] = {
    "convergence": convergence,
    "all_reduce": all_reduce,
    "run_file": run_file,
    "lab_profile": lab_profile,
    "lab": lab,
    "commands": commands,
    "run_metrics": run_metrics,
    "node_metrics": node_metrics,
    "trace_cost": trace_cost,
    "codec_sizes": codec_sizes,
    "codec_loss": codec_loss,
    "codec_speed": codec_speed,
    "gpu_codec_speed": gpu_codec_speed,
    "trellis_speed": trellis_speed,
    "stored_activations": stored_activations,
    "stored_gradients": stored_gradients,
    "stored_loss": stored_loss,
    "packing_overhead": packing_overhead,
    "tah_ablation": tah_ablation,
    "rivals": rivals,
    "pipeline_floor": pipeline_floor,
}


if __name__ == "__main__":
    sys.exit(main())
