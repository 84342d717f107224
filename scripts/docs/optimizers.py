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
PLAIN, DEFAULT = ("fp32", "fp32"), ("tah", "fixed-8")

Run = dict[str, Any]


def losses() -> str:
    """The suite `optimizer` of scripts/experiments/convergence.py, and means over seeds."""
    report = read_report(LOSSES)
    runs = sorted(
        report["runs"],
        key=lambda run: (-_longest(report, run), _pair(run) != PLAIN, _pair(run), run["seed"], _way(run)),
    )
    rows = []
    for run in runs:
        adamw = _adamw(report, run)
        change = (
            "" if adamw is None or adamw is run else f"{run['loss_valid'] / adamw['loss_valid'] - 1:+.2%}"
        )
        rows.append(
            [
                _way(run),
                f"{run['lr']:g}",
                "/".join(f"`{name}`" for name in _pair(run)),
                f"{run['steps']:,}",
                f"{run['steps'] * report['tokens_a_step'] / 1e6:.1f} million",
                str(run["seed"]),
                f"{run['loss_valid']:.4f}",
                change,
            ]
        )
    columns = [("optimizer", "left"), ("lr", "right"), ("codecs", "left"), ("steps", "right")]
    columns += [("tokens", "right"), ("seed", "right"), ("held-out loss", "right")]
    columns += [("against AdamW through the same codecs", "right")]
    return (
        f"{markdown(columns, rows)}\n\nA Llama of 124 million parameters, 4 stages in one process, "
        f"{report['tokens_a_step']:,} tokens a step of books in GPT-2's tokens, cosine to a tenth; "
        f"{report['validation_windows']} held-out windows, without codecs. AdamW's run is the one of most "
        f"steps at its first rate and of the same seed. {report['hardware']}, torch "
        f"{report['versions']['torch']}, commit {commits(report, runs)}."
    )


def lines() -> str:
    """By arithmetic: seconds to the loss of AdamW's run through the default codecs, or less."""
    report = read_report(LOSSES)
    model = ModelSection(**report["model"])
    compared = list(_reaching(report))
    first = compared[0]
    rows = []
    for run in compared:
        bits = sum(_bits(codec, model) for codec in _pair(run))
        row = [_way(run), "/".join(f"`{codec}`" for codec in _pair(run)), f"{bits:.2f}"]
        row += [f"{run['steps']:,}", f"{run['loss_valid']:.4f}"]
        for rate in LINES:
            seconds, slowest = (_seconds(report, each, model, rate) for each in (run, first))
            times = "" if run is first else f" ({slowest / seconds:.2f} times as fast)"
            row.append(f"{seconds:,.0f}{times}")
        rows.append(row)
    columns = [("optimizer", "left"), ("codecs", "left"), ("bits, both ways", "right")]
    columns += [("steps", "right"), ("held-out loss", "right")]
    columns += [(f"s at {rate} Mbit/s", "right") for rate in LINES]
    return (
        f"{markdown(columns, rows)}\n\nBy arithmetic, of the runs of seed {first['seed']} above that end "
        "at most at the loss of the first. A step takes the longer of its compute, measured for the whole "
        "model without codecs on one GPU, and of what a middle stage sends: activations and gradients of "
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


def _way(run: Run) -> str:
    """The optimizer, and its iterations if they are not as usual."""
    iterations = run.get("iterations", 5)
    return str(run["optimizer"]) + ("" if iterations == 5 else f", {iterations} iterations")


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


def _reaching(report: Run) -> Iterator[Run]:
    """AdamW's longest run through the default codecs, and after it those of the seed that reach its loss."""
    of_adamw = [run for run in report["runs"] if run["optimizer"] == "adamw" and _pair(run) == DEFAULT]
    if not of_adamw:
        return
    first = max(of_adamw, key=lambda run: (run["steps"], -run["seed"]))
    yield first
    for run in report["runs"]:
        if run is not first and run["seed"] == first["seed"] and run["loss_valid"] <= first["loss_valid"]:
            yield run


def _seconds(report: Run, run: Run, model: ModelSection, rate: int) -> float:
    """Of a run at so many Mbit/s."""
    compute = min(
        other["seconds_a_step"]
        for other in report["runs"]
        if (other["optimizer"], _pair(other), other["runs_a_gpu"]) == (run["optimizer"], PLAIN, 1)
    )
    bits = sum(_bits(codec, model) for codec in _pair(run))
    sent: float = report["tokens_a_step"] * model.hidden * bits / (1e6 * rate)
    return int(run["steps"]) * max(compute, sent)


def _bits(name: str, model: ModelSection) -> float:
    shape = (4, model.sequence, model.hidden)
    return 8 * codec_format(name).packed_bytes(shape) / math.prod(shape)


TABLES: Tables = {
    **if_recorded(LOSSES, "optimizer_losses", losses),
    **({"optimizer_lines": lines} if LOSSES.exists() and any(_reaching(read_report(LOSSES))) else {}),
    **if_recorded(STEPS, "optimizer_steps", steps),
}
