"""Draw the runs of scripts/experiments/convergence.py: `python -m scripts.docs.plot_convergence`.

Needs matplotlib.

One panel per suite: training loss (mean of 20 steps) against tokens, for every codec. Runs with few bits
backward are dashed, beside fp16, in the colour of the same codec forward. The last panel is held-out
perplexity, without the runs with few bits backward. Runs of other seeds are lighter.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from node.lab.plots import COLOURS, STYLE
from scripts.docs.losses import CONVERGENCE, SUITES, UNCHANGED
from scripts.docs.markdown import read_report
from scripts.report import drawn_from

OUT = CONVERGENCE.with_suffix(".svg")
MEAN_STEPS = 20
MORE_COLOURS = ("#542788", "#8c510a", "#b2182b", "#01665e")
"""More colours, after those of the laboratory's figures, which have fewer pairs of codecs."""
ACROSS = 3
Pair = tuple[str, str]
Look = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Draw the runs that scripts/experiments/convergence.py recorded."
    )
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(argv).out.resolve()
    report = read_report(CONVERGENCE)
    runs, tokens = report["runs"], report["tokens_a_step"]
    drawn = [run for run in runs if run["suite"] in SUITES]
    looks = _looks(drawn)
    suites = [suite for suite in SUITES if any(run["suite"] == suite for run in drawn)]
    down = -(-(len(suites) + 1) // ACROSS)
    with matplotlib.rc_context(dict(STYLE)):
        figure = pyplot.figure(figsize=(4.3 * ACROSS, 3.9 * down), layout="constrained")
        places = figure.add_gridspec(down, ACROSS)
        for number, suite in enumerate(suites):
            axes = figure.add_subplot(places[divmod(number, ACROSS)])
            axes.set_title(_words(drawn, suite, tokens), fontsize=10, loc="left")
            _curves(axes, _beside(drawn, suite), tokens, looks)
        ends = [run for run in drawn if run["suite"] != "backward"]
        row, column = divmod(len(suites), ACROSS)
        _ends(figure.add_subplot(places[row, column:]), ends, tokens, looks)
        # No date, so that the same figures give the same file.
        figure.savefig(out, metadata={"Date": None, "Description": description(runs)})
        pyplot.close(figure)
    print(out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out)
    return 0


def description(runs: list[dict[str, Any]]) -> str:
    """`drawn_from` of the runs that are shown."""
    keys = ("suite", "forward", "backward", "seed", "loss_valid", "losses")
    drawn = [{key: run[key] for key in keys} for run in runs if run["suite"] in SUITES]
    return drawn_from("runs", drawn)


def _looks(runs: list[dict[str, Any]]) -> dict[Pair, Look]:
    """One colour per pair of codecs, the same in all panels. Few bits backward: dashed, in the colour of the
    same codec forward."""
    pairs = list(dict.fromkeys(_pair(run) for run in runs if run["suite"] != "backward"))
    pairs.sort(key=lambda pair: pair != UNCHANGED)
    backward = [pair for pair in dict.fromkeys(map(_pair, runs)) if pair not in pairs]
    colours = iter(COLOURS + MORE_COLOURS)
    looks: dict[Pair, Look] = {pair: {"color": next(colours), "linestyle": "-"} for pair in pairs}
    for pair in backward:
        like = next((look["color"] for other, look in looks.items() if other[0] == pair[1]), None)
        looks[pair] = {"color": like or next(colours), "linestyle": "--"}
    return looks


def _pair(run: dict[str, Any]) -> Pair:
    return run["forward"], run["backward"]


def _words(runs: list[dict[str, Any]], suite: str, tokens_a_step: int) -> str:
    steps = next(run["steps"] for run in runs if run["suite"] == suite)
    return SUITES[suite].format(tokens=steps * tokens_a_step / 1e6)


def _beside(runs: list[dict[str, Any]], suite: str) -> list[dict[str, Any]]:
    """The suite's runs; those with few bits backward follow fp16 of the same text and seed."""
    own = [run for run in runs if run["suite"] == suite]
    if suite != "backward":
        return own
    alike = [run for run in runs if run["suite"] == "pass" and _pair(run) == UNCHANGED and not run["seed"]]
    return alike + own


def _curves(axes: Axes, runs: list[dict[str, Any]], tokens_a_step: int, looks: dict[Pair, Look]) -> None:
    for run in runs:
        losses = np.convolve(run["losses"], np.ones(MEAN_STEPS) / MEAN_STEPS, mode="valid")
        million = (np.arange(len(losses)) + MEAN_STEPS) * tokens_a_step / 1e6
        label = f"{' / '.join(_pair(run))}" + (f", seed {run['seed']}" if run["seed"] else "")
        alpha = 0.45 if run["seed"] else 1
        axes.plot(million, losses, **looks[_pair(run)], alpha=alpha, linewidth=1.2, label=label)
    # The first steps look the same for all codecs; keep runs that do not learn in view.
    last = [np.mean(run["losses"][-MEAN_STEPS:]) for run in runs]
    axes.set(xlabel="million tokens", ylabel="training loss, mean of 20 steps")
    axes.set_ylim(min(last) - 0.15, max(min(last) + 2.2, max(last) + 0.5))
    axes.legend(fontsize=8)


def _ends(axes: Axes, runs: list[dict[str, Any]], tokens_a_step: int, looks: dict[Pair, Look]) -> None:
    suites = [suite for suite in SUITES if any(run["suite"] == suite for run in runs)]
    for place, suite in enumerate(suites):
        members = [run for run in runs if run["suite"] == suite]
        for number, run in enumerate(members):
            axes.plot(
                place + 0.8 * (number + 0.5) / len(members) - 0.4,
                math.exp(run["loss_valid"]),
                "o",
                color=looks[_pair(run)]["color"],
                alpha=0.45 if run["seed"] else 1,
            )
    for pair in dict.fromkeys(map(_pair, runs)):
        axes.plot([], [], "o", color=looks[pair]["color"], label=" / ".join(pair))
    names = [_words(runs, suite, tokens_a_step).replace(", ", ",\n") for suite in suites]
    axes.set_xticks(range(len(suites)), names)
    axes.set_title("held out", fontsize=10, loc="left")
    axes.set(ylabel="held-out perplexity", xlim=(-0.5, len(suites) - 0.5))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


if __name__ == "__main__":
    sys.exit(main())
