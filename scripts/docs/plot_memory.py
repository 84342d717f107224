"""Draw plans of memory by scripts/bench/memory_plan.py: `python -m scripts.docs.plot_memory`.

Needs matplotlib. The frontier is solved again, by the newest times on record: minutes of processor time.

A panel per length of samples: the time of a microbatch, over that of everything kept, against the memory of
the card. The line is the frontier that the planner foretells without a change of bits, with what an
optimizer's step takes longer where moments are in host memory; points are passes as measured, with a cap of
so much.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from node.lab.plots import COLOURS, STYLE
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import frontier
from scripts.bench.memory_plan import (
    BESIDE,
    FIXED_BYTES,
    GB,
    HOST_GB,
    LENGTHS,
    STAGE,
    STAGES,
    run_file,
    times_of,
)
from scripts.docs.markdown import read_report
from scripts.docs.small_cards import MEMORY_PLAN
from scripts.report import RESULTS, drawn_from

OUT = RESULTS / "memory_plan.svg"
WAYS = {
    "plan": ("o", "plan"),
    "plan, few bits": ("D", "plan, few bits"),
    "plain": ("s", "everything kept"),
    "again": ("^", "every block again"),
    "selective": ("v", "selective checkpointing"),
    "budget": ("P", "torch.compile's budget"),
    "agoq": ("x", "agoq"),
    "compact": ("+", "compact"),
}
"""Marker and words of each way."""
POINTS = 25
"""Memories that the frontier is solved for."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw what scripts/bench/memory_plan.py recorded.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--points", type=int, default=POINTS, help="of each frontier")
    arguments = parser.parse_args(argv)
    out, report = arguments.out.resolve(), read_report(MEMORY_PLAN)
    with matplotlib.rc_context(dict(STYLE)):
        figure, panels = pyplot.subplots(1, len(LENGTHS), figsize=(11, 4.2), layout="constrained")
        for axes, tokens in zip(panels, LENGTHS, strict=True):
            _panel(axes, tokens, [row for row in report["rows"] if row["tokens"] == tokens], arguments.points)
        panels[0].set_ylabel("time of a microbatch, over everything kept")
        # Not every way was measured at every length.
        drawn = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels)
        shown = {words: line for panel in drawn for line, words in panel}
        panels[-1].legend(shown.values(), shown.keys(), fontsize=8)
        # No date, so that the same figures give the same file.
        figure.savefig(out, metadata={"Date": None, "Description": description(report)})
        pyplot.close(figure)
    print(out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out)
    return 0


def description(report: dict[str, Any]) -> str:
    """`drawn_from` of the rows as far as they are shown."""
    drawn = [[row["tokens"], row["gb"], _measured(row), row["times"]] for row in report["rows"]]
    return drawn_from("rows", drawn)


def _measured(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a microbatch of the ways that fit."""
    found = {way: result.get("microbatch_seconds") for way, result in row["ways"].items()}
    return {way: found[way] for way in WAYS if found.get(way)}


def _panel(axes: Axes, tokens: str, rows: list[dict[str, Any]], points: int) -> None:
    kept = max((row for row in rows if "plain" in _measured(row)), key=lambda row: row["gb"])
    whole = _measured(kept)["plain"]
    samples, length = LENGTHS[tokens]
    devices = Devices(on_cpu=False, host_bytes=HOST_GB * GB, has_own_attention=True)
    plans = frontier(
        run_file(samples, length), STAGES, STAGE, devices, times_of(rows[-1]["times"]), points=points
    )
    # A node has beside the plan what is fixed; the bench what its own process takes.
    memories = [(plan.memory.total + BESIDE - FIXED_BYTES) / GB for plan in plans]
    axes.step(
        [*memories[::-1], max(row["gb"] for row in rows)],
        [*(1 + plan.added for plan in plans[::-1]), 1.0],
        where="post",
        color=COLOURS[0],
        label="frontier, as foretold",
    )
    for number, (way, (marker, words)) in enumerate(WAYS.items()):
        found = [(row["gb"], _measured(row)[way] / whole) for row in rows if way in _measured(row)]
        if found:
            style = {"color": COLOURS[number % len(COLOURS)], "fillstyle": "none", "markersize": 7}
            axes.plot(*zip(*found, strict=True), marker, label=words, **style)
    axes.set_xscale("log", base=2)
    caps = sorted({row["gb"] for row in rows})
    axes.set_xticks(caps, [str(cap) for cap in caps])
    axes.minorticks_off()
    axes.set_xlabel("memory of the card, GB")
    axes.set_title(f"8 blocks of Llama 8B's shape, {tokens} tokens", fontsize=10, loc="left")


if __name__ == "__main__":
    sys.exit(main())
