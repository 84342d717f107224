"""Tables of what a node packs: memory of activations and moments, and the effect on losses and gradients."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.fp8.layout import BLOCK
from kernels.fp8.reference import Fp8Gradient, Moment
from scripts.bench.stored_activations import SHAPES
from scripts.docs.markdown import (
    Tables,
    commits,
    notes,
    read_report,
)
from scripts.report import RESULTS, markdown

STORED_ACTIVATIONS = RESULTS / "stored_activations.json"
COAT_FIXED, COAT_BY_FFN = 8.5, 2.0
"""U of what COAT keeps by AGoQ's table 1: of width H, and as many times F / H (the inputs of SwiGLU and of
the last product, 6 U and 2 U for F = 4 H)."""


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


TABLES: Tables = {
    "inside_a_node": inside_a_node,
    "stored_activations": stored_activations,
}
