"""The table of the largest model on a small card, beside what LLMQ's paper reports."""

from scripts.docs.markdown import Tables, commit, if_recorded, read_report
from scripts.report import RESULTS, markdown

LARGEST_MODEL = RESULTS / "largest_model.json"


def largest_model() -> str:
    """Results of scripts/bench/largest_model.py, beside LLMQ's on another card."""
    report = read_report(LARGEST_MODEL)
    rows = []
    for row in report["rows"]:
        peak = row.get("peak_bytes")
        rows.append(
            [
                f"thinwire, {report['hardware']}",
                f"{row['parameters'] / 1e9:.1f}B",
                "bf16" if row["products"] == "precision" else row["products"],
                row.get("plan_at_the_end", row["plan"]),
                f"{row['tokens_a_second']:,.0f}" if peak else "does not run",
                f"{row['tokens_a_second_without_optimizer']:,.0f}" if peak else "",
                f"{peak / 1e9:.1f}" if peak else "",
                f"{row['estimate_without_process'] / 1e9:.1f}",
            ]
        )
    for row in report["llmq_on_an_rtx_4090"]:
        rows.append(
            [
                "LLMQ, RTX 4090",
                row["model"],
                row["products"].lower(),
                f"{row['offloaded']} in host memory",
                f"{row['tokens_a_second']:,.0f}",
                *[""] * 3,
            ]
        )
    columns = [("program and card", "left"), ("model", "right"), ("products", "left"), ("plan", "left")]
    columns += [("tokens/s", "right"), ("without the optimizer's step", "right")]
    columns += [("peak, GB", "right"), ("planned, GB", "right")]
    caption = (
        f"{report['layers']} blocks of Llama 8B's shape, 1 x 4096 tokens a microbatch, "
        f"{report['microbatches']} microbatches a step, on a GPU capped as a card of {report['card_gb']} GB; "
        f"weights in bf16, gradients and moments in e4m3, medians of {report['runs']} steps, torch "
        f"{report['versions']['torch']}, commit {commit(report)}. LLMQ's figures are its paper's (tables 1 "
        "and 7), for steps of 500,000 tokens in microbatches of 16 and 32 samples, moments and gradients in "
        "bf16. The cards differ in speed, so the two are no comparison of programs; both run within 24 GB."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


TABLES: Tables = if_recorded(LARGEST_MODEL, "largest_model", largest_model)
