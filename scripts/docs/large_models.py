"""Tables of experts' products, attention in slices, and stages of large models on small cards."""

from statistics import median
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report
from scripts.report import RESULTS, markdown

EXPERTS, ATTENTION = RESULTS / "experts.json", RESULTS / "attention_chunks.json"
PACED = RESULTS / "sequence_chunks.json"
LONG, MIXTURE = RESULTS / "long_samples.json", RESULTS / "mixture_stage.json"


def experts() -> str:
    """A mixture's feed-forward beside transformers."""
    report = read_report(EXPERTS)
    rows = [
        [
            f"{row['tokens']:,}",
            row["way"],
            "yes" if row["trained"] else "no",
            _number(row.get("forward_milliseconds")),
            _number(row["both_milliseconds"]),
        ]
        for row in report["ways"]
    ]
    columns = [("tokens", "right"), ("experts' weights", "left"), ("trained", "left")]
    columns += [("forward, ms", "right"), ("forward and backward, ms", "right")]
    shape = report["shape"]
    return (
        f"{markdown(columns, rows)}\n\nA routed feed-forward of Qwen3-30B-A3B's shape: "
        f"{shape['experts']} experts, {shape['choices']} a token, {shape['hidden']} wide, "
        f"{shape['inner']} inside. "
        f"{_where(report)}, transformers {report['transformers']}."
    )


def long_samples() -> str:
    """A long sample whole and in slices."""
    report = read_report(LONG)
    rows = [
        [
            str(run["slices"]),
            f"{run['cap_gb']:g}" if run["cap_gb"] else "-",
            f"{run['tokens_a_second']:,.0f}",
            f"{run['peak_bytes'] / 1e9:.1f}",
        ]
        for run in report["runs"]
    ]
    columns = [
        ("slices", "right"),
        ("memory allowed, GB", "right"),
        ("tokens/s", "right"),
        ("peak, GB", "right"),
    ]
    gradients = report["gradients"]
    return (
        f"{markdown(columns, rows)}\n\nA stage of {report['blocks']} of an 8B model's "
        f"{report['model']['layers']} blocks, one sample of {report['length']:,} tokens, alone on the card. "
        f"Gradients of {gradients['blocks']} blocks at {gradients['length']:,} tokens in "
        f"{gradients['slices']} slices differ by {gradients['mean_error']:.2%} in the mean from those of "
        f"whole samples. {_where(report)}."
    )


def sequence_chunks() -> str:
    """What slices leave of fill and drain."""
    report = read_report(PACED)
    rows = [
        [
            str(row["microbatches"]),
            f"{row['tokens']:,}",
            f"{row['sequence_chunks']}" + (f" ({row['slices']})" if row["sequence_chunks"] == "auto" else ""),
            f"{row['work_seconds']:.2f}",
            f"{median(row['step_seconds']):.2f}",
            f"{row['share']:.3f}",
            f"{row['share_of_measured']:.3f}",
        ]
        for row in report["results"]
    ]
    columns = [("microbatches", "right"), ("tokens of each", "right"), ("slices", "right")]
    columns += [("work of a stage, s", "right"), ("step, s", "right")]
    columns += [("work over step", "right"), ("as measured", "right")]
    return (
        f"{markdown(columns, rows)}\n\nA run of {report['stages']} stages, whose blocks wait for a set time, "
        f"over links of {report['rate_mbit']:g} Mbit/s. As measured: with the time that the busiest stage "
        f"computed as its work. Medians of {len(report['results'][0]['step_seconds'])} steps. "
        f"{report['hardware']}, torch {report['torch']}, commit {commit(report)}."
    )


def mixture() -> str:
    """A mixture's stage by the bits of its frozen weights."""
    report = read_report(MIXTURE)
    rows = [
        [
            "bf16, in transformers" if row["base"] == "transformers" else row["base"],
            f"{row['tokens']:,}",
            f"{1e3 * row['forward_seconds']:.0f}",
            f"{1e3 * row['backward_seconds']:.0f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_bytes'] / 1e9:.1f}",
        ]
        for row in report["rows"]
    ]
    columns = [("bits of frozen weights", "right"), ("tokens", "right"), ("forward, ms", "right")]
    columns += [("backward, ms", "right"), ("tokens/s", "right"), ("peak, GB", "right")]
    has_theirs = any(row["base"] == "transformers" for row in report["rows"])
    theirs = "; in transformers frozen without it, with `grouped_mm`" * has_theirs
    return (
        f"{markdown(columns, rows)}\n\nOne stage alone: {report['rows'][0]['blocks']} of "
        f"Qwen3-30B-A3B's 48 blocks, random weights, LoRA of rank 8{theirs}. {_where(report)}."
    )


def _number(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.2f}"


def _where(report: dict[str, Any]) -> str:
    versions = report.get("versions", report)
    return f"{report['hardware']}, torch {versions['torch']}, commit {commit(report)}"


TABLES: Tables = {
    **if_recorded(EXPERTS, "experts", experts),
    **if_recorded(PACED, "sequence_chunks", sequence_chunks),
    **if_recorded(LONG, "long_samples", long_samples),
    **if_recorded(MIXTURE, "mixture_stage", mixture),
}
