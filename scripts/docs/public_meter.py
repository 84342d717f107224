"""Tables of lines that activations and gradients share: the public meter by codec, windows on small ones."""

import math
from typing import Any

from node.lab.results import read_results
from node.lab.table import provenance
from scripts.docs.losses import GRADIENT_BIAS, GRADIENT_RATES, rate_changes
from scripts.docs.markdown import Tables, read_report
from scripts.report import RESULTS, markdown

NANOGPT = RESULTS / "lab_nanogpt.json"
SHARED_LINE, SHARED_LINE_PLANS = RESULTS / "lab_shared-line.json", RESULTS / "shared_line_plans.json"


def public_meter() -> str:
    """Seconds of a step, and what they come to at equal loss."""
    result = read_results(NANOGPT)
    rates = read_report(GRADIENT_RATES)
    changes = {pair: sum(found) / len(found) for pair, found in rate_changes(rates).items()}
    exponent = _exponent(rates)
    rows = []
    for cell in sorted(result["cells"], key=lambda cell: float(cell["step_seconds"]["median"])):
        pair = cell["key"]["forward_codec"], cell["key"]["backward_codec"]
        seconds, floor = cell["step_seconds"], cell["floor"]
        rows.append(
            [
                "/".join(f"`{name}`" for name in pair),
                f"{cell['bits_forward']:.2f}, {cell['bits_backward']:.2f}",
                f"{seconds['median']:.1f} ({seconds['least']:.1f} to {seconds['most']:.1f})",
                f"{floor['seconds']:.1f}",
                f"{floor['share']:.2f}",
                f"{changes[pair]:+.2%}",
                f"{seconds['median'] * (1 + changes[pair]) ** (1 / exponent):.1f}",
            ]
        )
    for cut in result["cut"]:
        whole = [step["seconds"] for step in cut["steps"] if step["shape"]][1:]
        names = "/".join(f"`{name}`" for name in cut["codecs"].split("/"))
        rows.append([names, "16, 16", f"{whole[0]:.1f} (one step)", "", "", "", f"{whole[0]:.1f}"])
    columns = [("codecs", "left"), ("bits out, back", "right"), ("s a step", "right"), ("floor, s", "right")]
    columns += [("of the floor", "right"), ("loss", "right"), ("s a step at equal loss", "right")]
    cut = "; ".join(f"`{one['codecs']}`: {one['why']}" for one in result["cut"])
    return (
        f"{markdown(columns, rows)}\n\nLoss: the mean change of the table of rates in losses.md, of another "
        "model as wide with as many boundaries. At equal loss: times the tokens that such a loss is worth, "
        f"if loss falls as tokens to the power of -{exponent:.2f}, as between the runs without codecs "
        f"of 6.6 and 13.1 million tokens; an estimate. {cut}. {provenance(result)}."
    )


def _exponent(rates: dict[str, Any]) -> float:
    """How fast loss falls with tokens: between half of them, in an earlier report, and all."""
    first = read_report(GRADIENT_BIAS)["reports"][0]
    fewer, more = (report["settings"]["steps"] for report in (first, rates))
    (before,) = (run["held_out_loss"] for run in first["runs"] if run["way"] == "none")
    after = [run["held_out_loss"] for run in rates["runs"] if run["way"] == "none"]
    return math.log(before * len(after) / sum(after)) / math.log(more / fewer)


def shared_line() -> str:
    """Seconds of a step by window, and of windows as other commits plan them."""
    swept = read_results(SHARED_LINE)
    plans = read_report(SHARED_LINE_PLANS)["results"]
    rows = []
    for result in (swept, *plans):
        for cell in result["cells"]:
            seconds = cell["step_seconds"]
            rows.append(
                [
                    cell["key"]["shape"],
                    str(cell["key"]["window"]),
                    result["machine"]["commit"][:7],
                    f"{seconds['median']:.1f} ({seconds['least']:.1f} to {seconds['most']:.1f})",
                    f"{cell['floor']['share']:.2f}",
                    _planned(cell),
                ]
            )
    columns = [("Mbit/s out/in, round trip", "left"), ("window", "left"), ("commit", "left")]
    columns += [("s a step", "right"), ("of the floor", "right"), ("windows planned", "left")]
    what = "; ".join(f"{one['machine']['commit'][:7]}: {one['what']}" for one in plans)
    return f"{markdown(columns, rows)}\n\n{what}. {provenance(swept)}."


def _planned(cell: dict[str, Any]) -> str:
    """The least and the most of the windows that the measured steps may have had; empty if not on record."""
    first = cell["curve"][-cell["measured_steps"]][0]
    plans = cell.get("plans", [])
    before = [plan for plan in plans if plan["step"] < first]
    windows = [
        window
        for plan in (*before[-1:], *(plan for plan in plans if plan["step"] >= first))
        for window in plan["windows"]
    ]
    return f"{min(windows)} to {max(windows)}" if windows else ""


TABLES: Tables = {"public_meter": public_meter, "shared_line": shared_line}
