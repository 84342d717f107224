"""Tables of Muon beside AdamW: loss by codecs, a step's bounds, and what both come to on slow lines."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from node.config.schema import ModelSection
from node.model.units import parameter_specs, unit_names
from scripts.docs.markdown import Tables, commits, if_recorded, read_report
from scripts.report import RESULTS, markdown
from wire.codecs.formats import codec_format

LOSSES = RESULTS / "optimizers.json"
SMALL = RESULTS / "muon_small.json"
EARLIER = RESULTS / "convergence.json"
"""Has AdamW's runs of more seeds, of the same text and first weights."""
SAME_LOSS = 1e-3
ADAMW_BYTES, BYTES_A_SECOND, OPERATIONS_A_SECOND = 28, 4.8e12, 989e12
LINES = (20, 100, 1000)
"""Mbit/s of each machine, up and down."""
PLAIN, DEFAULT = ("fp32", "fp32"), ("tah", "fixed-8")

Run = dict[str, Any]


def losses() -> str:
    """The suite `optimizer` of scripts/experiments/convergence.py, and means over seeds."""
    report = read_report(LOSSES)
    rounds = _rounds(report)
    earlier = list(_earlier(report))
    report["runs"] += earlier
    runs = sorted(
        report["runs"],
        key=lambda run: (-_longest(report, run), _pair(run) != PLAIN, _pair(run), run["seed"], _way(run)),
    )
    rows = []
    for run in runs:
        changes = []
        for pair in (PLAIN, _pair(run)):
            adamw = _adamw(report, run, pair)
            if adamw is None or adamw is run:
                changes.append("")
            else:
                changes.append(f"{run['loss_valid'] / adamw['loss_valid'] - 1:+.2%}")
        rows.append(
            [
                _way(run),
                f"{run['lr']:g}",
                "/".join(f"`{name}`" for name in _pair(run)),
                f"{run['steps']:,}",
                f"{run['steps'] * report['tokens_a_step'] / 1e6:.1f} million",
                str(run["seed"]),
                f"{run['loss_valid']:.4f}",
                *changes,
            ]
        )
    columns = [("optimizer", "left"), ("lr", "right"), ("codecs", "left"), ("steps", "right")]
    columns += [("tokens", "right"), ("seed", "right"), ("held-out loss", "right")]
    columns += [("against AdamW without codecs", "right"), ("through the same codecs", "right")]
    seeds = " and ".join(str(run["seed"]) for run in earlier)
    others = f"; those of seeds {seeds} had eight microbatches a step (`{EARLIER.name}`)" if earlier else ""
    return (
        f"{markdown(columns, rows)}\n\n{_means(report)}{rounds} A Llama of 124 million parameters, 4 stages "
        f"in one process, {report['tokens_a_step']:,} tokens a step of books in GPT-2's tokens, cosine to a "
        f"tenth; {report['validation_windows']} held-out windows, without codecs. AdamW's run is the one of "
        f"most steps at its first rate and of the same seed{others}. {report['hardware']}, torch "
        f"{report['versions']['torch']}, commit {commits(report, runs)}."
    )


def _rounds(report: Run) -> str:
    """What rounds of local steps cost Muon. Their runs and the exact ones beside them leave the report."""
    rounds = [run for run in report["runs"] if run.get("every", 1) > 1]
    exact = {(run["steps"], run["seed"]): run for run in report["runs"] if run.get("every", 1) == 1}
    lengths = {run["steps"] for run in rounds}
    report["runs"] = [run for run in report["runs"] if run["steps"] not in lengths]
    words = ""
    for run in rounds:
        change = run["loss_valid"] / exact[run["steps"], run["seed"]]["loss_valid"] - 1
        words += (
            f" In rounds of {run['every']} local steps, of {run['rounds']['groups']} groups whose changes "
            f"are summed in `{run['rounds']['codec']}`, from {run['rounds']['exact_steps']} exact steps on, "
            f"{run['optimizer']} ends {change:+.2%} off its {run['steps']} exact steps (one seed, commit "
            f"{run['commit'][:12]})."
        )
    return words


def _earlier(report: Run) -> Iterator[Run]:
    """AdamW's runs of other seeds, recorded before."""
    known = {run["seed"] for run in report["runs"] if run["optimizer"] == "adamw" and _pair(run) == PLAIN}
    first = {run["seed"]: run["losses"][0] for run in report["runs"] if _pair(run) == PLAIN}
    for run in read_report(EARLIER)["runs"]:
        if (run["suite"], run["memory"]) != ("memory-long", "plain") or run["seed"] in known:
            continue
        if run["seed"] in first and abs(run["losses"][0] - first[run["seed"]]) < SAME_LOSS:
            yield {**run, "optimizer": "adamw", "lr": 6e-4}


def _means(report: Run) -> str:
    """What the fewest steps of Muon come to on average of seeds, by codecs and learning rate."""
    changes: dict[tuple[tuple[str, str], float], list[float]] = {}
    for run in report["runs"]:
        adamw = _adamw(report, run, PLAIN)
        if adamw is not None and run["steps"] < adamw["steps"] and _way(run) == "muon":
            change = run["loss_valid"] / adamw["loss_valid"] - 1
            changes.setdefault((_pair(run), run["lr"]), []).append(change)
    words = []
    for ((forward, backward), lr), each in changes.items():
        seeds = f"on average of {len(each)} seeds ({min(each):+.2%} to {max(each):+.2%})"
        words.append(
            f"Through `{forward}`/`{backward}` at {lr:g} Muon's loss after 0.72 of the tokens is "
            f"{fmean(each):+.2%} off AdamW's without codecs, {seeds if len(each) > 1 else 'one seed'}."
        )
    return " ".join(words)


def small() -> str:
    """The suite `small` of the same script, seeds beside one another."""
    report = read_report(SMALL)
    shortest = min(run["steps"] for run in report["runs"])
    ways: dict[SmallWay, dict[int, float]] = {}
    for run in report["runs"]:
        if run["steps"] > shortest:
            ways.setdefault(_small_way(run), {})[run["seed"]] = run["loss_valid"]
    longest = max(way.steps for way in ways)
    adamw = ways[SmallWay("adamw", longest)]
    rows = []
    for way, losses in ways.items():
        plain = ways[SmallWay(way.optimizer, way.steps)]
        in_fewer = way.optimizer == "muon" and way == replace(way, moments="plain", every=1)
        rows.append(
            [
                way.optimizer,
                f"{way.steps:,}",
                "/".join(f"`{name}`" for name in way.pair),
                {"plain": "float32", "moments": "FP8"}[way.moments],
                "every step" if way.every == 1 else f"every {way.every} local steps",
                str(len(losses)),
                f"{fmean(losses.values()):.4f}",
                "" if losses is plain else _mean_change(losses, plain),
                _mean_change(losses, adamw) if in_fewer else "",
            ]
        )
    columns = [("optimizer", "left"), ("steps", "right"), ("codecs", "left"), ("moments", "left")]
    columns += [("groups are summed", "left"), ("seeds", "right"), ("held out, mean", "right")]
    columns += [("against the plain run", "right"), (f"against AdamW's {longest} plain steps", "right")]
    return f"{markdown(columns, rows)}\n\n{_small_caption(report, shortest, longest)}"


@dataclass(frozen=True)
class SmallWay:
    """What runs of the suite `small` differ in but for their seed."""

    optimizer: str
    steps: int
    pair: tuple[str, str] = PLAIN
    moments: str = "plain"
    every: int = 1


def _small_way(run: Run) -> SmallWay:
    return SmallWay(run["optimizer"], run["steps"], _pair(run), run["memory"], run["every"])


def _small_caption(report: Run, shortest: int, longest: int) -> str:
    runs, tokens = report["runs"], report["tokens_a_step"]
    model = ModelSection(**{**report["model"], "no_rope": (), "no_window": ()})  # hashable, as in Python
    sizes = [math.prod(spec.shape) for unit in unit_names(model) for spec in parameter_specs(model, unit)]
    trials: dict[str, list[str]] = {}
    for run in runs:
        if run["steps"] == shortest:
            trials.setdefault(run["optimizer"], []).append(f"{run['loss_valid']:.4f} at {run['lr']:g}")
    rates = "; ".join(f"{optimizer} {', '.join(each)}" for optimizer, each in trials.items())
    rounds = next(run["rounds"] for run in runs if run["rounds"])
    return (
        f"A small scale: a Llama of {sum(sizes) / 1e6:.2f} million parameters, {model.layers} layers, "
        f"{model.hidden} wide, {tokens:,} bytes of books a step, at most {longest * tokens / 1e6:.2f} "
        "million in all, float32. Changes are means over the seeds that both have, and their "
        "range. Plain: the same optimizer and steps, summed exactly, nothing packed. Rounds are of "
        f"{rounds['groups']} groups, summed in `{rounds['codec']}`, after {rounds['exact_steps']} exact "
        f"steps. Held out: {report['validation_windows']} windows of {model.sequence} from other books. "
        f"Learning rates are the best of one seed's {shortest} steps: {rates}. {len(runs)} runs, "
        f"each once; {report['hardware']}, torch {report['versions']['torch']}, Python "
        f"{report['versions']['python']}, commit {commits(report, runs)}."
    )


def _mean_change(losses: dict[int, float], others: dict[int, float]) -> str:
    changes = [loss / others[seed] - 1 for seed, loss in losses.items() if seed in others]
    if len(changes) < 2:
        return "".join(f"{change:+.2%}" for change in changes)
    return f"{fmean(changes):+.2%} ({min(changes):+.2%} to {max(changes):+.2%})"


def lines() -> str:
    """By arithmetic: seconds to the loss of AdamW's run through the default codecs, or less."""
    report = read_report(LOSSES)
    model = ModelSection(**report["model"])
    compared = list(_reaching(report))
    first = compared[0]
    where = "" if first["suite"] == "optimizer" else f", which is of `{EARLIER.name}`"
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
        f"{markdown(columns, rows)}\n\nBy arithmetic, of the runs of seed {first['seed']} through codecs "
        f"that end at most at the loss of the first{where}. A step takes the longer of its compute, measured "
        "for the whole model without codecs on one GPU, and of what a middle stage sends: activations and "
        f"gradients of {report['tokens_a_step']:,} tokens, {model.hidden} wide, with nothing lost to "
        "latency, filling or draining."
    )


def fastest(rate: int) -> tuple[float, Run, float]:
    """Seconds of AdamW's run through the default codecs at so many Mbit/s, the run that reaches its loss in
    the shortest time, and its seconds."""
    report = read_report(LOSSES)
    model = ModelSection(**report["model"])
    first, *others = _reaching(report)
    seconds = [_seconds(report, run, model, rate) for run in others]
    least = min(seconds)
    return _seconds(report, first, model, rate), others[seconds.index(least)], least


def _pair(run: Run) -> tuple[str, str]:
    return run["forward"], run["backward"]


def _way(run: Run) -> str:
    """The optimizer, its iterations if they are not as usual, and its moments if they are in few bits."""
    iterations = run.get("iterations", 5)
    fewer = "" if iterations == 5 else f", {iterations} iterations"
    return f"{run['optimizer']}{fewer}{', moments in FP8' if run['memory'] == 'moments' else ''}"


def _longest(report: Run, run: Run) -> int:
    """The steps of AdamW's run beside this one, which has as many or 0.72 of them."""
    return max(int(other["steps"]) for other in report["runs"] if other["steps"] <= run["steps"] / 0.7)


def _adamw(report: Run, run: Run, pair: tuple[str, str]) -> Run | None:
    """AdamW's first run beside this one, through these codecs."""
    alike = [
        other
        for other in report["runs"]
        if other["optimizer"] == "adamw"
        and (_pair(other), other["seed"]) == (pair, run["seed"])
        and other["steps"] == _longest(report, run)
    ]
    return min(alike, key=lambda other: abs(math.log(other["lr"] / 6e-4)), default=None)


def _reaching(report: Run) -> Iterator[Run]:
    """AdamW's longest run through the default codecs, and after it those of the seed that reach its loss, the
    best of each pair of codecs."""
    of_adamw = [run for run in report["runs"] if run["optimizer"] == "adamw" and _pair(run) == DEFAULT]
    for run in read_report(EARLIER)["runs"]:
        if not of_adamw and (run["suite"], run["seed"], _pair(run)) == ("long", 0, DEFAULT):
            of_adamw = [{**run, "optimizer": "adamw"}]
    first = max(of_adamw, key=lambda run: (run["steps"], -run["seed"]))
    yield first
    best: dict[tuple[str, str], Run] = {}
    for run in report["runs"]:
        is_packed, is_other = _pair(run) != PLAIN, run is not first and run["seed"] == first["seed"]
        if is_packed and is_other and run["loss_valid"] <= first["loss_valid"]:
            best[_pair(run)] = min(best.get(_pair(run), run), run, key=lambda each: float(each["loss_valid"]))
    yield from best.values()


def _seconds(report: Run, run: Run, model: ModelSection, rate: int) -> float:
    """Of a run at so many Mbit/s."""
    compute = min(
        float(other["seconds_a_step"])
        for other in report["runs"]
        if (other["optimizer"], _pair(other), other["runs_a_gpu"]) == (run["optimizer"], PLAIN, 1)
    )
    bits = sum(_bits(codec, model) for codec in _pair(run))
    sent: float = report["tokens_a_step"] * model.hidden * bits / (1e6 * rate)
    return int(run["steps"]) * max(compute, sent)


def _bits(name: str, model: ModelSection) -> float:
    shape = (4, model.sequence, model.hidden)
    return 8 * codec_format(name).packed_bytes(shape) / math.prod(shape)


def bounds() -> str:
    """By arithmetic: what an optimizer's step can take at the least, by the width of a model."""
    rows = []
    for width, inner in ((768, 2048), (2048, 8192), (4096, 14336)):
        square, oblong = (_operations(width, longer, 1) for longer in (width, inner))
        weights = 4 * width * width + 3 * width * inner
        each = (4 * square + 3 * oblong) / weights
        adamw = ADAMW_BYTES / BYTES_A_SECOND
        row = [f"{width:,}", f"{inner:,}", f"{5 * each:,.0f}"]
        row += [f"{count * each / OPERATIONS_A_SECOND / adamw:.1f}" for count in (5, 3)]
        for tokens in (65536, 262144):
            row += [f"{count * each / (6 * tokens):.1%}" for count in (5, 3)]
        rows.append(row)
    columns = [("width", "right"), ("inner width", "right"), ("operations a weight", "right")]
    columns += [("times AdamW's step", "right"), ("with 3 iterations", "right")]
    for tokens in (65536, 262144):
        columns += [(f"of the passes of {tokens:,} tokens", "right"), ("with 3 iterations", "right")]
    return (
        f"{markdown(columns, rows)}\n\nOf a block's matrices, 4 of width x width and 3 of width x inner "
        "width: the products of the iterations alone, symmetric ones at half the work, with tensor cores at "
        f"their peak of {OPERATIONS_A_SECOND / 1e12:.0f} TFLOP/s, over what AdamW in float32 reads and "
        f"writes, {ADAMW_BYTES} bytes a weight at {BYTES_A_SECOND / 1e12:.1f} TB/s, as an H200 has both. "
        "Passes take six operations a weight and token, at the same rate."
    )


def _operations(rows: int, columns: int, iterations: int) -> int:
    """Of a matrix whose rows are the shorter side."""
    return iterations * (3 * rows * rows * columns + rows**3)


TABLES: Tables = {
    **if_recorded(LOSSES, "optimizer_losses", losses),
    **({"optimizer_lines": lines} if LOSSES.exists() and any(_reaching(read_report(LOSSES))) else {}),
    **if_recorded(SMALL, "optimizer_small", small),
    "optimizer_bounds": bounds,
}
