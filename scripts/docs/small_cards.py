"""Tables of small cards: plans by their memory, and the largest model, beside what LLMQ's paper reports."""

from textwrap import fill
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

LARGEST_MODEL = RESULTS / "largest_model.json"
MEMORY_PLAN = RESULTS / "memory_plan.json"
SMALL_PLANS = RESULTS / "small_plans.json"
TARGETS = RESULTS / "targets.json"
MEMORY_ROWS = RESULTS / "memory_rows.json"
CAPPED = RESULTS / "capped_runs.json"


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
    report, estimates = read_report(MEMORY_PLAN), read_report(MEMORY_ROWS)
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
        ratios = _ratios(row, estimates["rows"])
        lines.append([row["tokens"], str(row["gb"]), *cells, *ratios])
        plans.append(f"- {row['tokens']}, {row['gb']} GB: {row['plan']}.")
        if (bits := row["ways"].get("plan, few bits")) and bits["plan"] != row["plan"]:
            plans.append(f"- {row['tokens']}, {row['gb']} GB, few bits: {bits['storage']}; {bits['plan']}.")
    others = {
        found["commit"][:12] for row in report["rows"] for found in row["ways"].values() if "commit" in found
    }
    earlier = ", ".join(sorted(others))
    own = ", ".join(sorted({row["commit"][:12] for row in report["rows"] if "commit" in row}))
    found, count = estimates["summary"], len(estimates["rows"])
    columns = [("tokens", "left"), ("GB", "right"), *((f"{way}, ms", "right") for way in ways)]
    columns += [("estimate over peak", "right"), ("over reserved", "right")]
    caption = (
        "Milliseconds of a microbatch, forward and backward, of a stage of 8 blocks of Llama 8B's shape, the "
        "middle one of three, on a GPU whose memory is capped; a way without a figure ran out of memory. "
        "*Plan*: what a node with so much memory does, by times that it measures; it changes no bit. *Plan, "
        "few bits*: where the run file allows 8 and 4 bits. *Again*: every block runs again; *selective*: "
        "torch's selective checkpointing; *budget*: torch.compile with the largest memory budget of "
        "activations that fits; `agoq` and `compact` are presets of few bits, with everything else kept. "
        "*Estimate over peak*: of the plan's tensors, over the most that was allocated; *over reserved*: "
        "with the pages of an allocator that is short, over what torch had reserved. Both are what the code "
        f"at commit {commit(estimates)} says of the plan that was measured (scripts/bench/memory_rows.py); "
        f"of all {count} ways that were measured the first is {_range(found['tensors_over_peak'])}, the "
        f"second {_range(found['over_reserved'])}. {spaced(report['gpu'])}, torch {report['torch']}, commits "
        f"{own}; of ways that did not fit or are torch's, {earlier}."
    )
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}\n\nThe plans:\n\n" + "\n".join(plans)


def small_plans() -> str:
    """How many cards of 6 to 16 GB models take (scripts/bench/small_plans.py)."""
    report = read_report(SMALL_PLANS)
    sizes = sorted({row["gb"] for row in report["rows"]})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in report["rows"]:
        trained = "adapters, the model in 4 bits" if row["adapters"] else "all weights"
        cell = "-"
        if (cards := row.get("cards")) is not None:
            cell = f"{cards} (+{row['added']:.0%})"
            if (more := row.get("cards_little")) not in (None, cards):
                cell += f", {more} (+{row['added_little']:.0%})"
        cells.setdefault((row["model"], trained), {})[row["gb"]] = cell
    columns = [("model", "left"), ("trained", "left"), *((f"{gb} GB", "left") for gb in sizes)]
    caption = (
        "How many alike cards hold a run, by their memory, and what the plan adds to a microbatch's time: "
        "the fewest that hold it at all and, if they are others, the fewest with at most "
        f"{report['little']:.0%} added. {report['desktop_gb']} GB of each is the desktop's; each machine "
        f"gives {report['host_gb']} GiB of main memory. `-`: more cards do not help, as one of them has "
        "embedding and head. All weights: in bf16, gradients and moments in FP8, activations `agoq`. "
        "Adapters of rank 16 in float32. One sample of "
        f"{report['sequence']} tokens a microbatch, bfloat16. The program's estimates, with times of a "
        f"typical card; commit {commit(report)}."
    )
    lines = [[*names, *(of_size.get(gb, "") for gb in sizes)] for names, of_size in cells.items()]
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}"


def targets() -> str:
    """Kernels compiled for each kind of GPU (scripts/checks/targets.py)."""
    report = read_report(TARGETS)
    kinds = report["targets"]
    names = sorted({name for kind in kinds.values() for name in kind["kernels"]})
    columns = [("kernel", "left"), *((name, "right") for name in kinds)]

    def cell(kind: dict[str, Any], name: str) -> str:
        found = kind["kernels"].get(name)
        if found is None:
            return ""
        if found["faulty"]:
            return f"{found['faulty']} of {found['variants']} fail"
        return f"{found['registers']} / {found['shared_bytes'] / 1024:.0f} / {found['warps']}"

    lines = [[f"`{name}`", *(cell(kind, name) for kind in kinds.values())] for name in names]
    limits = [
        f"{kind['limits']['shared_bytes'] / 1024:.0f} / {kind['limits']['warps']}" for kind in kinds.values()
    ]
    count, faulty = (
        sum(one[part] for kind in kinds.values() for one in kind["kernels"].values())
        for part in ("variants", "faulty")
    )
    caption = (
        "Registers of a thread, KiB of shared memory and warps of a program, at most, of the variants of "
        f"each kernel that {len(report['cases'])} cases of the check use: {count} variants, {faulty} with "
        "faults. They are compiled and assembled without these GPUs; whether they compute right there is "
        f"what a node's self-test finds when it joins. Triton {report['versions']['triton']}, commit "
        f"{commit(report)}."
    )
    lines.append(["what the device has: shared memory / warps", *limits])
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}"


def capped_runs() -> str:
    """Runs on nodes that are capped in memory (scripts/experiments/capped_run.py)."""
    report = read_report(CAPPED)
    lines = []
    for run in report["runs"]:
        base = run["lora"]["base"]
        trained = f"adapters, the model in {base} bits" if run["lora"]["rank"] else "all weights"
        peaks = sorted(peak["reserved"] / 1e9 for peak in run["peaks"])
        kill = run.get("kill")
        after = "" if kill is None else ("the same" if kill["equal"] else "others")
        lines.append(
            [
                run["case"],
                trained,
                f"{run['stages']} x {run['cap_gb']:g}",
                f"{run['microbatches']} x {run['samples']} x {run['model']['sequence']:,}" + _slices(run),
                f"{run['rate']:g}" + (f" + {2 * run['delay']:g} ms" if run.get("delay") else ""),
                f"{run['tokens_per_second']:,.0f}" + ("*" if run.get("beside") else ""),
                f"{peaks[0]:.1f} to {peaks[-1]:.1f}",
                after,
            ]
        )
    columns = [("shape", "left"), ("trained", "left"), ("cards, GB", "right")]
    columns += [("microbatches x samples x tokens", "right"), ("links, Mbit/s + round trip", "right")]
    columns += [("tokens/s", "right"), ("peak, GB", "right"), ("bits after a killed node", "left")]
    wheres = dict.fromkeys(
        f"{run['hardware']}, torch {run['versions']['torch']}, commit {commit(run)}" for run in report["runs"]
    )
    kills = ""
    if any(run.get("kill") for run in report["runs"]):
        kills = "A killed node is started again; steps done again have the same losses and gradient norms. "
    if any(run.get("beside") for run in report["runs"]):
        kills += "*: other programs used the card meanwhile, so alone it is faster. "
    caption = (
        "Whole runs over the network: a node process a stage, capped by `--max-memory`, random weights, "
        "`trellis-3` and `dither-3`. All nodes share one GPU, so tokens a second are those of one card; "
        f"peaks are what torch had reserved on each node. {kills}{'; '.join(wheres)}."
    )
    return f"{markdown(columns, lines)}\n\n{fill(caption, 118)}"


def _slices(run: dict[str, Any]) -> str:
    return f" in {run['slices']} slices" if run["slices"] > 1 else ""


def _ratios(row: dict[str, Any], estimates: list[dict[str, Any]]) -> tuple[str, str]:
    """What the code as it is says of a row's plan, over what that took; empty if it did not run."""
    for one in estimates:
        same = all(one[key] == row[key] for key in ("tokens", "gb", "plan"))
        if same and one["way"] == "plan":
            return f"{one['tensors_over_peak']:.3f}", f"{one['over_reserved']:.3f}"
    return "", ""


def _range(ratios: dict[str, float]) -> str:
    return f"{ratios['least']:.3f} to {ratios['most']:.3f}"


TABLES: Tables = {
    "memory_plan": memory_plan,
    **if_recorded(LARGEST_MODEL, "largest_model", largest_model),
    **if_recorded(SMALL_PLANS, "small_plans", small_plans),
    **if_recorded(TARGETS, "targets", targets),
    **if_recorded(CAPPED, "capped_runs", capped_runs),
}
