"""Draw what scripts/exp_convergence.py recorded: `python scripts/plot_convergence.py`. Needs matplotlib.

Left: training loss against tokens, the mean of 20 steps, for the longest runs. Right: held-out perplexity of
every codec, against fp16's; runs of another seed are drawn lighter.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from doc_tables.losses import CONVERGENCE, SUITES, UNCHANGED
from doc_tables.markdown import read_report
from matplotlib import pyplot
from matplotlib.axes import Axes

from node.lab.plots import COLOURS, STYLE

OUT = CONVERGENCE.with_suffix(".svg")
MEAN_STEPS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the runs that scripts/exp_convergence.py recorded.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out.resolve()
    report = read_report(CONVERGENCE)
    runs = [run for run in report["runs"] if run["suite"] in SUITES and run["suite"] != "backward"]
    pairs = dict.fromkeys((run["forward"], run["backward"]) for run in runs)
    colours = dict(zip(sorted(pairs, key=lambda pair: pair != UNCHANGED), COLOURS, strict=False))
    with matplotlib.rc_context(dict(STYLE)):
        figure, (curves, ends) = pyplot.subplots(1, 2, figsize=(10.0, 4.0), layout="constrained")
        _curves(curves, [run for run in runs if run["suite"] == "long"], report["tokens_a_step"], colours)
        _ends(ends, runs, report["tokens_a_step"], colours)
        # No date, so that the same figures give the same file.
        figure.savefig(out, metadata={"Date": None})
        pyplot.close(figure)
    print(out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out)
    return 0


def _curves(
    axes: Axes, runs: list[dict[str, Any]], tokens_a_step: int, colours: dict[tuple[str, str], str]
) -> None:
    for run in runs:
        losses = np.convolve(run["losses"], np.ones(MEAN_STEPS) / MEAN_STEPS, mode="valid")
        million = (np.arange(len(losses)) + MEAN_STEPS) * tokens_a_step / 1e6
        pair = run["forward"], run["backward"]
        label = f"{' / '.join(pair)}, seed {run['seed']}"
        axes.plot(
            million, losses, color=colours[pair], alpha=0.45 if run["seed"] else 1, linewidth=1.2, label=label
        )
    axes.set(xlabel="million tokens", ylabel="training loss, mean of 20 steps", ylim=(3.6, 6.5))
    axes.legend()


def _ends(
    axes: Axes, runs: list[dict[str, Any]], tokens_a_step: int, colours: dict[tuple[str, str], str]
) -> None:
    suites = [suite for suite in SUITES if any(run["suite"] == suite for run in runs)]
    for place, suite in enumerate(suites):
        members = [run for run in runs if run["suite"] == suite]
        for number, run in enumerate(members):
            pair = run["forward"], run["backward"]
            axes.plot(
                place + 0.8 * (number + 0.5) / len(members) - 0.4,
                math.exp(run["loss_valid"]),
                "o",
                color=colours[pair],
                alpha=0.45 if run["seed"] else 1,
            )
    for pair, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=" / ".join(pair))
    names = [
        SUITES[suite].format(
            tokens=next(run for run in runs if run["suite"] == suite)["steps"] * tokens_a_step / 1e6
        )
        for suite in suites
    ]
    axes.set_xticks(range(len(suites)), [name.replace(", ", ",\n") for name in names])
    axes.set(ylabel="held-out perplexity", xlim=(-0.5, len(suites) - 0.5))
    axes.legend(fontsize=8)


if __name__ == "__main__":
    sys.exit(main())
