"""Tables of tied models: `node.schedule.placement` decides where their head is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.docs.markdown import Tables, commit, if_recorded, read_report, spaced
from scripts.report import RESULTS, markdown

TIED_MODELS = RESULTS / "tied_models.json"
TIED_MODELS_LARGE = RESULTS / "tied_models_124m.json"
TIED_MODELS_NEWER = RESULTS / "tied_models_124m_newer.json"
TIED_MODELS_GPUS = RESULTS / "tied_models_124m_4gpu.json"
PACED = RESULTS / "paced_tied.json"
PROGRAMS = {
    "before": "as it was",
    "ahead": "a device has its next action early",
    "beside": "unpacking has a thread of its own",
    "this": "both",
}
"""What scripts/experiments/paced_tied.py compared, by the names that it was given."""


def tied_models() -> str:
    """Results of scripts/experiments/tied_models.py: seconds of a step by the head's stage."""
    report = read_report(TIED_MODELS)
    noise = (
        f"{spaced(report['hardware'])}, shared with other work: the ranges of untied and head first overlap "
        "everywhere, so only the last row at 10 Mbit/s is beyond noise."
    )
    return _tied_ways(report, noise)


def tied_models_large() -> str:
    """The same of 124 million parameters: on one GPU, and with a stage on each of several."""
    found = []
    for path in filter(Path.exists, (TIED_MODELS_LARGE, TIED_MODELS_NEWER, TIED_MODELS_GPUS)):
        report = read_report(path)
        gpus = report.get("gpus", 1)
        where = f"All stages on one {report['hardware']}." if gpus == 1 else f"{gpus} x {report['hardware']}."
        where += report.get("note", "")
        found.append(_tied_ways(report, where))
    return "\n\n".join(found)


def _tied_ways(report: Mapping[str, Any], words: str) -> str:
    ways = report["ways"]
    rates = list(ways[0]["step_seconds"])
    rows = [
        [
            way["way"],
            f"{way['busiest_bytes'] / 1e6:.2f}",
            *(
                f"{way['step_seconds'][rate]:.2f}"
                + (f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else "")
                for rate in rates
                for each in [[run[rate] for run in way["all_step_seconds"]]]
            ),
        ]
        for way in ways
    ]
    runs = "One run"
    if report["runs"] > 1:
        runs = f"Of {report['runs']} runs the median, in brackets the least and the most"
    columns = [("model", "left"), ("busiest direction, MB a step", "right")]
    columns += [
        (f"{rate} Mbit/s, s a step" if rate.isdigit() else f"{rate}, s a step", "right") for rate in rates
    ]
    caption = (
        f"{runs}; four stages of "
        f"deploy/lab/{report['profile']}. {words} "
        f"torch {report['versions']['torch']}, commit {commit(report)}."
    )
    return markdown(columns, rows) + "\n\n" + caption


def paced_tied() -> str:
    """Results of scripts/experiments/paced_tied.py: tied over untied by program and cards."""
    report = read_report(PACED)
    places = dict.fromkeys((one["cards"], one["switch_seconds"]) for one in report["results"])
    rows = []
    for cards, switch in places:
        own = [one for one in report["results"] if (one["cards"], one["switch_seconds"]) == (cards, switch)]
        where = "a card each" if cards > 1 else f"one card, {1e3 * switch:g} ms to change turns"
        bounds = [next(one["bound_seconds"] for one in own if one["tied"] is tied) for tied in (False, True)]
        rows.append([where, "the least possible", *_ratio(*bounds)])
        for name, words in PROGRAMS.items():
            times = {one["tied"]: one["step_seconds"] for one in own if one["program"] == name}
            if times:
                rows.append([where, words, *_ratio(times[False], times[True])])
    columns = [("cards", "left"), ("program", "left"), ("untied, ms a step", "right")]
    columns += [("tied, ms a step", "right"), ("tied / untied", "right")]
    splits = " and ".join(", ".join(map(str, split)) for split in report["splits"])
    caption = (
        f"{report['microbatches']} microbatches; stages of {splits} blocks; a block's forward "
        f"{1e3 * report['unit_seconds']:g} ms, a tensor packed in {1e3 * report['pack_seconds']:g} ms and "
        f"unpacked in {1e3 * report['unpack_seconds']:g} ms, turns of {1e3 * report['slice_seconds']:g} ms. "
        f"All {report['scale']} times as slow while it was measured. Median of "
        f"{len(report['results'][0]['steps'])} steps, one run. {spaced(report['hardware'])}, torch "
        f"{report['torch']}, commit {commit(report)}."
    )
    return f"{markdown(columns, rows)}\n\n{caption}"


def _ratio(untied: float, tied: float) -> list[str]:
    return [f"{1e3 * untied:.0f}", f"{1e3 * tied:.0f}", f"{tied / untied:.2f}"]


TABLES: Tables = {
    "tied_models": tied_models,
    **if_recorded(TIED_MODELS_LARGE, "tied_models_large", tied_models_large),
    **if_recorded(PACED, "paced_tied", paced_tied),
}
