"""Tables of what a node packs: memory of activations and moments, and the effect on losses and gradients."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from kernels.fp8.layout import BLOCK
from kernels.fp8.reference import Fp8Gradient, Moment
from scripts.bench.stored_activations import SHAPES
from scripts.docs.markdown import (
    LOSSES,
    Tables,
    against,
    commit,
    commits,
    if_recorded,
    notes,
    read_report,
    spaced,
)
from scripts.report import RESULTS, markdown

STORED_ACTIVATIONS = RESULTS / "stored_activations.json"
STORED_LOSS = RESULTS / "stored_activations_loss.json"
STORED_GRADIENTS = RESULTS / "stored_gradients.json"
OUTLIER_STORAGE = RESULTS / "outlier_storage.json"
QUANTIZE_GEMM = RESULTS / "quantize_gemm.json"
OPTIMIZER = RESULTS / "optimizer.json"
PAPER_GRADIENTS = {
    "norm": 0.003,
    "weights behind a norm": 0.026,
    "SwiGLU": 0.051,
    "weights behind SwiGLU": 0.026,
}
"""AGoQ's table 13, normalised L2: its LayerNorm, GEMM (weight), SiLU, and GEMM again, all kept in 4 bits."""
COAT_FIXED, COAT_BY_FFN = 8.5, 2.0
"""U of what COAT keeps by AGoQ's table 1: of width H, and as many times F / H (the inputs of SwiGLU and of
the last product, 6 U and 2 U for F = 4 H)."""
OURS = "AdamW e4m3, fp32 weights and gradients"
"""The row that is comparable with the other packages: one parameter and its gradient in fp32."""
UPDATE_ERRORS = {
    "AdamW e4m3": "e4m3, blocks of 128, expanded",
    "torchao": "e4m3, blocks of 256 (as torchao)",
    "bitsandbytes": "bitsandbytes' dynamic 8 bits, blocks of 256",
}
"""How each optimizer stores its moments, by the start of its name."""


def inside_a_node() -> str:
    """Settings of a run file for a node's memory, with measured values or those given by the formats."""
    report = read_report(STORED_ACTIVATIONS)
    plain = plain_rows(report)

    def change(way: str, figure: str) -> list[float]:
        """Per cent of the plain block's bytes, by shape."""
        rows = [row for row in report["rows"] if row["way"] == way]
        return [100 * (row[figure] / plain[row["shape"], row["tokens"]][figure] - 1) for row in rows]

    memory = [-value for value in change("agoq", "peak_bytes")]
    time = change("agoq", "seconds")
    faster = [-value for value in change("bf16, cuDNN", "seconds")]
    cpu = torch.device("cpu")
    gradient = Fp8Gradient.zeros(BLOCK, cpu).nbytes / BLOCK
    moments = 2 * Moment.zeros(BLOCK, cpu).nbytes / BLOCK
    rows = [
        [
            '`storage.preset = "agoq"`',
            "blocks keep activations in 4 bits and compute the rest again: "
            f"{_range(memory, '.0f')} % less peak memory above weights and gradients than a plain block in "
            "bfloat16, "
            f"{_range(time, '+.1f')} % time with the same attention (with cuDNN's a plain block takes "
            f"{_range(faster, '.0f')} % less)",
        ],
        [
            "`storage.bits_by_stage`",
            "stages that hold fewer microbatches keep more bits (with a fixed `pipeline.window`)",
        ],
        ['`training.gradients = "fp8"`', f"gradients add up in e4m3, {gradient:.2f} bytes an element"],
        [
            '`training.moments = "fp8"`',
            f"AdamW's moments in e4m3 with range expansion, {moments:.2f} bytes a parameter",
        ],
        [
            '`training.weights = "bfloat16"`',
            "matrices in bfloat16, rounded stochastically by a hash of their place",
        ],
    ]
    return markdown([("key", "left"), ("what it does", "left")], rows)


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def plain_rows(report: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows of plain blocks in bfloat16, by shape and tokens."""
    return {(row["shape"], row["tokens"]): row for row in report["rows"] if row["way"] == "bf16"}


def stored_activations() -> str:
    """Results of scripts/bench/stored_activations.py, beside the formulas of AGoQ's table 1."""
    report = read_report(STORED_ACTIVATIONS)
    plain = plain_rows(report)
    rows = []
    for row in sorted(report["rows"], key=lambda row: row["tokens"]):
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
        if row["way"] == "full":
            model = SHAPES[row["shape"]]
            by_formula = COAT_FIXED + COAT_BY_FFN * model.ffn / model.hidden
            rows.append([row["shape"], rows[-1][1], "COAT, by formula", f"{by_formula:.2f}", *"-----"])
    columns = [("block", "left"), ("tokens", "right"), ("kept", "left"), ("U a block", "right")]
    columns += [("peak, GiB", "right"), ("against bf16", "right")]
    columns += [("ms a block", "right"), ("against bf16", "right"), ("1000 tokens/s and block", "right")]
    most = max(row["blocks"] for row in report["rows"])
    fewer = sorted((row["tokens"], row["blocks"]) for row in report["rows"] if row["blocks"] < most)
    but = f" ({fewer[0][1]} from {fewer[0][0] // 1024}K on)" if fewer else ""
    caption = (
        f"1 U = tokens x hidden x 2 bytes. Forward and backward of {most} blocks{but}, the peak above "
        "weights, gradients and input; times are medians of turns in one run. For F = 4 H the formulas of "
        "AGoQ's table 1 give Megatron 28 U, COAT 16.5 U and AGoQ 7.75 U; they count 5 U for attention. Of "
        "other shapes COAT's parts behind the FFN's first products go with F / H. "
        f"{report['hardware']}, torch {report['versions']['torch']}, Triton {report['versions']['triton']}, "
        f"commit {commits(report, report['rows'])}.{notes(report)}"
    )
    return markdown(columns, rows) + "\n\n" + caption


def stored_gradients() -> str:
    """Errors of gradients by bits."""
    report = read_report(STORED_LOSS)
    found = {(row["gradient"], row["bits"]): row["normalised_l2"] for row in report["gradients"]}
    widths = sorted({bits for _, bits in found})
    rows = [
        [
            name,
            *(f"{found[name, bits]:.4f}" for bits in widths),
            f"{PAPER_GRADIENTS[name]:.3f}" if name in PAPER_GRADIENTS else "",
        ]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    columns = [("gradient", "left"), *((f"{bits} bits", "right") for bits in widths)]
    columns.append(("the paper's, 4 bits", "right"))
    missed = {
        name: next((bits for bits in widths if found[name, bits] <= aim), None)
        for name, aim in PAPER_GRADIENTS.items()
        if found[name, 4] > aim
    }
    caption = (
        _caption(report) + " The last column is table 13 of the AGoQ paper, its GEMM beside both weights."
    )
    if missed:
        needed = (f"{name} {bits or 'none'}" for name, bits in missed.items())
        caption += f" Here 4 bits do not reach it; the fewest that do: {', '.join(needed)}."
    return markdown(columns, rows) + "\n\n" + caption


def stored_gradients_by_width() -> str:
    """Errors at 4 bits by the model's width."""
    report = read_report(STORED_GRADIENTS)
    found = {row["width"]: row["normalised_l2"] for row in report["widths"]}
    rows = [
        [name, *(f"{errors[name]:.4f}" for errors in found.values()), f"{aim:.3f}"]
        for name, aim in PAPER_GRADIENTS.items()
    ]
    columns = [("gradient", "left"), *((f"{width} wide", "right") for width in found)]
    columns.append(("the paper's", "right"))
    settings = report["settings"]
    return f"""{markdown(columns, rows)}

{settings["bits"]} bits; llama, {settings["layers"]} blocks, after {settings["steps"]} steps of
{settings["microbatch"]} x {settings["sequence"]} tokens; {report["data"]["name"]}, float32,
{spaced(report["hardware"])}, torch {report["versions"]["torch"]}, commit {commit(report)}."""


def stored_loss() -> str:
    """Losses of each way of storing activations, by seed."""
    report = read_report(STORED_LOSS)
    seeds = sorted({run["seed"] for run in report["runs"]})
    by_key = {(run["way"], run["seed"]): run for run in report["runs"]}
    rows = []
    for way in dict.fromkeys(run["way"] for run in report["runs"]):
        row = [f"`{way}`"]
        for seed in seeds:
            for key in LOSSES:
                row.append(against(by_key.get((way, seed)), by_key.get(("off", seed)), key))
        rows.append(row)
    columns = [("kept", "left")]
    for seed in seeds:
        columns += [(f"loss, seed {seed}", "right"), (f"held out, seed {seed}", "right")]
    return markdown(columns, rows) + "\n\n" + _caption(report)


def quantize_gemm() -> str:
    """Recorded times of packing in the producer, in a kernel of its own, or inside the matrix product."""
    report = read_report(QUANTIZE_GEMM)
    rows = []
    for row in report["rows"]:
        times = row["milliseconds"]
        now = times["producer"]
        line = [row["model"], row["layer"], row["dtype"], f"{row['width']} x {row['columns']}", f"{now:.3f}"]
        for way in ("separate", "fused"):
            line.append(f"{times[way]:.3f} ({100 * (times[way] / now - 1):+.1f} %)")
        rows.append([*line, *(f"{times[way]:.3f}" for way in ("unstored", "fused_unstored", "gemm"))])
    columns = [("block", "left"), ("layer", "left"), ("packed from", "left"), ("matrix", "left")]
    columns += [("packed in the producer, ms", "right"), ("by a kernel of its own", "right")]
    columns += [("inside the product", "right"), ("not packed, ms", "right")]
    columns += [("one kernel, not packed, ms", "right"), ("cuBLAS alone, ms", "right")]
    won = sum(row["milliseconds"]["fused"] < row["milliseconds"]["producer"] for row in report["rows"])
    caption = (
        f"SwiGLU or norm and the product behind it, {report['tokens']} tokens; in brackets against packing "
        f"in the producer, which packing inside the product beats in {won} of {len(rows)}. Medians of "
        f"{report['runs']} turns, CUDA graphs; {report['hardware']}, torch {report['versions']['torch']}, "
        f"Triton {report['versions']['triton']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def optimizer() -> str:
    """AdamW with moments in e4m3, and other packages' optimizers."""
    report = read_report(OPTIMIZER)
    # From a run in which they were installed.
    rivals = report.get("rivals", {"speed": []})
    found = {row["way"]: row for row in (*report["speed"], *rivals["speed"]) if "AdamW" in row["way"]}

    def error(way: str) -> float | None:
        kept = next((kept for begins, kept in UPDATE_ERRORS.items() if way.startswith(begins)), None)
        return None if kept is None else report["update_error"][kept]

    rows = []
    for way, row in found.items():
        wrong = error(way)
        rows.append(
            [
                way,
                f"{row['microseconds']:.0f}",
                f"{row['state_bytes_a_parameter']:.3f}",
                "" if wrong is None else f"{wrong:.4f}",
            ]
        )
    columns = [("optimizer", "left"), ("step, microseconds", "right")]
    columns += [("state, bytes a parameter", "right"), ("error of the update", "right")]
    versions = {**report["versions"], **rivals.get("versions", {})}
    named = ", ".join(f"{name} {versions[name]}" for name in ("torchao", "bitsandbytes"))
    caption = (
        f"One parameter of {report['elements']:,} elements, {report['hardware']}, median of {report['runs']} "
        f"turns in one run, torch {versions['torch']}, Triton {versions['triton']}, commit "
        f"{commit(report)}. The others step from fp32 weights and gradients. Errors are those of "
        f"m / (sqrt(v) + eps), normalised, for moments of {report['train_steps']} steps of training in fp32, "
        "packed as each packs them."
    )
    if "rivals" in report:
        caption += (
            f" {named} at commit {rivals['commit'][:12]}, in a run in which a copy took "
            f"{rivals['copy_microseconds']:.0f} microseconds, where it took {_copy(report):.0f} here."
        )
    ours, better = found[OURS], []
    for way, row in found.items():
        if way.startswith("AdamW e4m3"):
            continue
        pairs = (
            ("time", row["microseconds"], ours["microseconds"], ".0f"),
            ("state", row["state_bytes_a_parameter"], ours["state_bytes_a_parameter"], ".3f"),
            ("error of the update", error(way), error(OURS), ".4f"),
        )
        better += [
            f"{way} in {name} ({theirs:{form}} against {own:{form}})"
            for name, theirs, own, form in pairs
            if theirs is not None and own is not None and theirs < own
        ]
    if better:
        caption += f" Others are better than `{OURS}`: {', '.join(better)}."
    return markdown(columns, rows) + "\n\n" + caption


def _copy(report: dict[str, Any]) -> float:
    """Microseconds of a device copy in the same run."""
    found: float = next(row["microseconds"] for row in report["speed"] if row["way"] == "copy")
    return found


def _caption(report: dict[str, Any]) -> str:
    model, training = report["settings"]["model"], report["settings"]["training"]
    return (
        f"{model['family']}, {model['layers']} blocks, {model['hidden']} wide, after "
        f"{report['settings']['run.steps']} steps of {training['global_batch']} x {model['sequence']} "
        f"tokens; {report['data']['name']}, float32, {report['hardware']}, "
        f"torch {report['versions']['torch']}, commit {commit(report)}."
    )


def outlier_storage() -> str:
    """INT4 with outlier channels apart beside block floats: means over the tensors of a kind."""
    report = read_report(OUTLIER_STORAGE)
    rows = []
    for kind in dict.fromkeys(row["kind"] for row in report["results"]):
        ways = [row["ways"] for row in report["results"] if row["kind"] == kind]
        for way in ways[0]:
            found = [one[way] for one in ways]
            rows.append(
                [
                    f"{kind} ({len(ways)})",
                    way,
                    f"{statistics.mean(one['bits'] for one in found):.2f}",
                    f"{statistics.mean(one['error'] for one in found):.4f}",
                    f"{statistics.geometric_mean(one['against'] for one in found):.2f}",
                ]
            )
    columns = [
        ("tensors", "left"),
        ("kept as", "left"),
        ("bits", "right"),
        ("error", "right"),
        ("over ours at as many bits", "right"),
    ]
    return f"{markdown(columns, rows)}\n\n{report['hardware']}, commit {report['commit'][:12]}."


TABLES: Tables = {
    "inside_a_node": inside_a_node,
    "stored_activations": stored_activations,
    "stored_gradients": stored_gradients,
    "stored_gradients_by_width": stored_gradients_by_width,
    "stored_loss": stored_loss,
    "optimizer": optimizer,
    "outlier_storage": outlier_storage,
} | if_recorded(QUANTIZE_GEMM, "quantize_gemm", quantize_gemm)
