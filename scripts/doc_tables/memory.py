"""Tables of what a node keeps in few bits: activations, and the losses and gradients that follow."""

from typing import Any

from .markdown import LOSSES, RESULTS, Tables, against, commit, markdown, read_report

STORED_ACTIVATIONS = RESULTS / "stored_activations.json"
STORED_LOSS = RESULTS / "stored_activations_loss.json"


def stored_activations() -> str:
    """What scripts/bench_stored_activations.py recorded, beside the formulas of AGoQ's table 1."""
    report = read_report(STORED_ACTIVATIONS)
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
        f"commit {commit(report)}. {notes}"
    )
    return markdown(columns, rows) + "\n\n" + caption


def stored_gradients() -> str:
    """Errors of gradients by bits, from scripts/exp_stored_activations.py."""
    report = read_report(STORED_LOSS)
    found = {(row["gradient"], row["bits"]): row["normalised_l2"] for row in report["gradients"]}
    widths = sorted({bits for _, bits in found})
    rows = [
        [name, *(f"{found[name, bits]:.4f}" for bits in widths)]
        for name in dict.fromkeys(name for name, _ in found)
    ]
    columns = [("gradient", "left"), *((f"{bits} bits", "right") for bits in widths)]
    return markdown(columns, rows) + "\n\n" + _caption(report)


def stored_loss() -> str:
    """Losses of each way of keeping activations, by seed."""
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


def _caption(report: dict[str, Any]) -> str:
    model, training = report["settings"]["model"], report["settings"]["training"]
    return (
        f"{model['family']}, {model['layers']} blocks, {model['hidden']} wide, after "
        f"{report['settings']['run.steps']} steps of {training['global_batch']} x {model['sequence']} "
        f"tokens; {report['data']['name']}, float32, {report['hardware']}, "
        f"torch {report['versions']['torch']}, commit {commit(report)}."
    )


TABLES: Tables = {
    "stored_activations": stored_activations,
    "stored_gradients": stored_gradients,
    "stored_loss": stored_loss,
}
