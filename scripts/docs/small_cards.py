"""Tables of small cards: plans by their memory, and the largest model, beside what LLMQ's paper reports."""

from textwrap import fill
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

LARGEST_MODEL = RESULTS / "largest_model.json"
MEMORY_PLAN = RESULTS / "memory_plan.json"


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


def memory_plan() -> str:
    """A node's plan beside fixed ways, by the memory of its card (scripts/bench/memory_plan.py)."""
    report = read_report(MEMORY_PLAN)
    ways = ("plan", "plan, few bits", "plain", "again", "selective", "budget", "agoq", "compact")
    lines, plans = [], []
    for row in sorted(report["rows"], key=lambda row: (row["tokens"], row["gb"])):
        cells = []
        for way in ways:
            found = row["ways"].get(way)
            if found is None:
                cells.append("-")
            else:
                cells.append("" if "failed" in found else f"{1e3 * found['microbatch_seconds']:.1f}")
        lines.append([row["tokens"], str(row["gb"]), *cells, _over(row), _over(row.get("planner_after"))])
        plans.append(f"- {row['tokens']}, {row['gb']} GB: {row['plan']}.")
        if (bits := row["ways"].get("plan, few bits")) and bits["plan"] != row["plan"]:
            plans.append(f"- {row['tokens']}, {row['gb']} GB, few bits: {bits['storage']}; {bits['plan']}.")
    others = {
        found["commit"][:12] for row in report["rows"] for found in row["ways"].values() if "commit" in found
    }
    earlier = ", ".join(sorted(others))
    own = ", ".join(sorted({row["commit"][:12] for row in report["rows"] if "commit" in row}))
    later = [row["planner_after"] for row in report["rows"] if "planner_after" in row]
    after = ", ".join(sorted({each["commit"][:12] for each in later}))
    columns = [("tokens", "left"), ("GB", "right"), *((f"{way}, ms", "right") for way in ways)]
    columns += [("estimate over peak", "right"), ("the same now", "right")]
    caption = (
        "Milliseconds of a microbatch, forward and backward, of a stage of 8 blocks of Llama 8B's shape, the "
        "middle one of three, on a GPU whose memory is capped; a way without a figure ran out of memory. "
        "*Plan*: what a node with so much memory does, by times that it measures; it changes no bit. *Plan, "
        "few bits*: where the run file allows 8 and 4 bits. *Again*: every block runs again; *selective*: "
        "torch's selective checkpointing; *budget*: torch.compile with the largest memory budget of "
        "activations that fits; `agoq` and `compact` are presets of few bits, with everything else kept. "
        "*Estimate over peak*: of what torch reserved; *now*: by a planner that counts what is at work more "
        f"closely, and its own plans, at commit {after}. {spaced(report['gpu'])}, torch {report['torch']}, "
        f"commits {own}; of ways that did not fit or are torch's, {earlier}."
    )
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}\n\nThe plans:\n\n" + "\n".join(plans)


def _over(row: dict[str, Any] | None) -> str:
    """A plan's estimate over what torch reserved."""
    held = row and row["ways"]["plan"].get("reserved_bytes")
    return f"{row['estimate_of_torch'] / held:.2f}" if row and held else ""


TABLES: Tables = {
    "memory_plan": memory_plan,
    **if_recorded(LARGEST_MODEL, "largest_model", largest_model),
}
