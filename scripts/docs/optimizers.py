"""Tables of Muon beside AdamW: loss by codecs, the time of a step, and what both come to on slow lines."""

import math
from collections.abc import Iterator
from typing import Any

from node.config.schema import ModelSection
from scripts.docs.markdown import Tables, commit, commits, if_recorded, read_report
from scripts.report import RESULTS, markdown
from wire.codecs.formats import codec_format

LOSSES, STEPS = RESULTS / "optimizers.json", RESULTS / "muon.json"
LINES = (20, 100, 1000)
"""Mbit/s of each machine, up and down."""
PLAIN = ("fp32", "fp32")

Run = dict[str, Any]


def losses() -> str:
    """The suite `optimizer` of scripts/experiments/convergence.py."""
    report = read_report(LOSSES)
    runs = sorted(report["runs"], key=lambda run: (-_longest(report, run), run["seed"], _pair(run) != PLAIN))
    rows = []
    for run in runs:
        adamw = _adamw(report, run)
        change = (
            "" if adamw is None or adamw is run else f"{run['loss_valid'] / adamw['loss_valid'] - 1:+.2%}"
        )
        rows.append(
            [
                run["optimizer"],
                f"{run['lr']:g}",
                "/".join(f"`{name}`" for name in _pair(run)),
                f"{run['steps']:,}",
                f"{run['steps'] * report['tokens_a_step'] / 1e6:.1f} million",
                str(run["seed"]),
                f"{run['loss_valid']:.4f}",
                change,
                f"{run['seconds_a_step']:.3f}",
            ]
        )
    columns = [("optimizer", "left"), ("lr", "right"), ("codecs", "left"), ("steps", "right")]
    columns += [("tokens", "right"), ("seed", "right"), ("held-out loss", "right")]
    columns += [("against AdamW through the same codecs", "right"), ("seconds a step", "right")]
    return (
        f"{markdown(columns, rows)}\n\nA Llama of 124 million parameters, 4 stages in one process, "
        f"{report['tokens_a_step']:,} tokens a step of books in GPT-2's tokens, cosine to a tenth; "
        f"{report['validation_windows']} held-out windows, without codecs. AdamW's run is the one of most "
        f"steps at its first rate. {report['hardware']}, torch {report['versions']['torch']}, commit "
        f"{commits(report, runs)}."
    )


def lines() -> str:
    """By arithmetic: seconds to AdamW's loss."""
    report = read_report(LOSSES)
    model = ModelSection(**report["model"])
    rows = []
    for adamw, muon, steps in _equal(report):
        for name, run, count in (("AdamW", adamw, float(adamw["steps"])), ("Muon", muon, steps)):
            bits = sum(_bits(codec, model) for codec in _pair(run))
            seconds = [
                count
                * max(run["seconds_a_step"], report["tokens_a_step"] * model.hidden * bits / (1e6 * rate))
                for rate in LINES
            ]
            rows.append(
                [
                    name,
                    "/".join(f"`{codec}`" for codec in _pair(run)),
                    f"{bits:.2f}",
                    f"{count:.0f}",
                    *(f"{each:,.0f}" for each in seconds),
                ]
            )
    columns = [("optimizer", "left"), ("codecs", "left"), ("bits, both ways", "right")]
    columns += [("steps to AdamW's loss", "right"), *((f"s at {rate} Mbit/s", "right") for rate in LINES)]
    return (
        f"{markdown(columns, rows)}\n\nBy arithmetic, from the table above: the loss is AdamW's through the "
        "same codecs. Muon's steps are interpolated between its two runs, in the logarithm of steps, or "
        "extrapolated. A step takes the longer of its compute, measured for the whole model on one "
        f"{report['hardware']}, and of what a middle stage sends: activations and gradients of "
        f"{report['tokens_a_step']:,} tokens, {model.hidden} wide, with nothing lost to latency, filling or "
        "draining."
    )


def steps() -> str:
    """Results of scripts/bench/muon.py."""
    report = read_report(STEPS)
    rows = []
    for model in report["models"]:
        adamw = model["steps"][0]["milliseconds"]
        for step in model["steps"]:
            rows.append(
                [
                    model["model"],
                    step["way"],
                    f"{step['milliseconds']:.2f}",
                    f"{step['milliseconds'] / adamw:.2f}",
                    f"{step['milliseconds'] / model['block_passes_milliseconds']:.1%}",
                    f"{step['milliseconds'] / (4 * model['block_passes_milliseconds']):.1%}",
                    f"{step['moment_bytes_a_parameter']:.2f}",
                    f"{step['scratch_bytes'] / 1e6:.0f}",
                ]
            )
    columns = [("model", "left"), ("optimizer", "left"), ("step, ms", "right"), ("times AdamW's", "right")]
    columns += [(f"of {report['tokens'] * times:,} tokens' passes", "right") for times in (1, 4)]
    columns += [("moments, bytes a parameter", "right"), ("scratch, MB", "right")]
    return (
        f"{markdown(columns, rows)}\n\nAll parameters of a model in one process. Passes: forward and "
        f"backward of the blocks in bfloat16, measured of one block, and {report['tokens']:,} tokens. "
        f"Medians of {report['runs']}; {report['hardware']}, torch {report['versions']['torch']}, Triton "
        f"{report['versions']['triton']}, commit {commit(report)}. Newton-Schulz's iteration by our kernels "
        f"takes of the time of torch's batched products: {_iterations(report)}."
    )


def _iterations(report: Run) -> str:
    """Our kernels' share of torch's time, by shape."""
    times: dict[str, list[float]] = {}
    for row in report["iterations"]:
        # Torch's comes first, then that of the tiles in use.
        times.setdefault(" x ".join(map(str, row["shape"])), []).append(row["milliseconds"])
    return ", ".join(f"{own / torch:.2f} at {shape}" for shape, (torch, own, *_) in times.items())


def _pair(run: Run) -> tuple[str, str]:
    return run["forward"], run["backward"]


def _longest(report: Run, run: Run) -> int:
    """The steps of AdamW's run beside this one, which has as many or 0.72 of them."""
    return max(other["steps"] for other in report["runs"] if other["steps"] <= run["steps"] / 0.7)


def _adamw(report: Run, run: Run) -> Run | None:
    """AdamW's first run beside this one."""
    alike = [
        other
        for other in report["runs"]
        if other["optimizer"] == "adamw"
        and (_pair(other), other["seed"]) == (_pair(run), run["seed"])
        and other["steps"] == _longest(report, run)
    ]
    return min(alike, key=lambda other: abs(math.log(other["lr"] / 6e-4)), default=None)


def _equal(report: Run) -> Iterator[tuple[Run, Run, float]]:
    """AdamW's runs, Muon's beside them, and the steps in which Muon reaches AdamW's loss."""
    for adamw in report["runs"]:
        if adamw["optimizer"] != "adamw" or _adamw(report, adamw) is not adamw:
            continue
        muon = [run for run in report["runs"] if run["optimizer"] == "muon" and _adamw(report, run) is adamw]
        rates = {run["lr"] for run in muon if run["steps"] < adamw["steps"]}
        pairs = sorted((run for run in muon if run["lr"] in rates), key=lambda run: int(run["steps"]))
        if len(pairs) == 2:
            fewer, more = pairs
            slope = math.log(more["steps"] / fewer["steps"]) / (fewer["loss_valid"] - more["loss_valid"])
            gap = fewer["loss_valid"] - adamw["loss_valid"]
            yield adamw, more, fewer["steps"] * math.exp(slope * gap)


def _bits(name: str, model: ModelSection) -> float:
    shape = (4, model.sequence, model.hidden)
    return 8 * codec_format(name).packed_bytes(shape) / math.prod(shape)


TABLES: Tables = {
    **if_recorded(LOSSES, "optimizer_losses", losses),
    **({"optimizer_lines": lines} if LOSSES.exists() and any(_equal(read_report(LOSSES))) else {}),
    **if_recorded(STEPS, "optimizer_steps", steps),
}
