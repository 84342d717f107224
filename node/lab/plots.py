"""Figures of results: tokens per second by bandwidth, loss against time, link use. Needs matplotlib.

The figures are SVG files on a light background, readable in print. Each codec pair is one line, with the same
colour in all figures.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.lab.table import codec_pair
from wire.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart."""
STYLE: Mapping[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "thinwire",
}

LEAST_CURVE = 10
"""The fewest steps of a run that are drawn as a curve."""

Cell = Mapping[str, Any]


def draw(results: Mapping[str, Any], directory: Path, tell: Callable[[str], None]) -> list[Path]:
    """Write every figure that one results file gives, and return the files.

    Creates `directory`, and reports figures that it skips. Raises UserError if matplotlib is missing, or if
    there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "figures need matplotlib, an optional extra: pip install 'thinwire[lab]', then "
            "`thinwire lab plot RESULTS`"
        ) from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    cells = results["cells"]
    if not cells:
        raise UserError("there is nothing to draw: no cell has been measured")
    colours = {pair: COLOURS[i % len(COLOURS)] for i, pair in enumerate(_by_pair(cells))}
    files = []
    directory.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(STYLE)):
        for name, plot in (("tokens", _tokens), ("loss", _loss), ("use", _use)):
            for setting, group in _settings(cells, by_shape=name == "loss").items():
                if name == "loss" and min(len(cell["curve"]) for cell in group) < LEAST_CURVE:
                    tell(f"no figure of losses, {setting}: a run has fewer than {LEAST_CURVE} steps")
                    continue
                figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
                plot(axes, group, colours)
                axes.set_title(setting, fontsize=10, loc="left")
                axes.legend()
                path = directory / f"{name}-{_file_name(setting)}.svg"
                figure.savefig(path, metadata={"Date": None})
                pyplot.close(figure)
                files.append(path)
    return files


def _tokens(axes: "Axes", cells: Sequence[Cell], colours: Mapping[str, str]) -> None:
    for pair, points in _by_pair(cells).items():
        points = sorted(points, key=lambda cell: cell["mbit"])
        rates = [cell["mbit"] for cell in points]
        tokens = [cell["tokens_per_second"]["median"] for cell in points]
        spread = [
            [cell["tokens_per_second"]["median"] - cell["tokens_per_second"]["least"] for cell in points],
            [cell["tokens_per_second"]["most"] - cell["tokens_per_second"]["median"] for cell in points],
        ]
        axes.errorbar(rates, tokens, yerr=spread, marker="o", capsize=3, color=colours[pair], label=pair)
    _rate_axis(axes, cells)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)


def _use(axes: "Axes", cells: Sequence[Cell], colours: Mapping[str, str]) -> None:
    for pair, points in _by_pair(cells).items():
        points = sorted(points, key=lambda cell: cell["mbit"])
        use = [100 * max(wire["use"] for wire in cell["wires"]) for cell in points]
        axes.plot([cell["mbit"] for cell in points], use, marker="o", color=colours[pair], label=pair)
    _rate_axis(axes, cells)
    axes.set_ylabel("busiest link direction, % of its rate")
    axes.set_ylim(0, 105)


def _loss(axes: "Axes", cells: Sequence[Cell], colours: Mapping[str, str]) -> None:
    for pair, points in _by_pair(cells).items():
        for number, cell in enumerate(points):
            seconds, losses, now = [], [], 0.0
            for _, step_seconds, loss in cell["curve"]:
                now += step_seconds
                seconds.append(now)
                losses.append(loss)
            label = pair if number == 0 else None
            axes.plot(seconds, losses, color=colours[pair], linewidth=1.2, label=label)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss, nats per token")


def _rate_axis(axes: "Axes", cells: Sequence[Cell]) -> None:
    rates = sorted({cell["mbit"] for cell in cells})
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("Mbit/s")


def _settings(cells: Sequence[Cell], *, by_shape: bool) -> dict[str, list[Cell]]:
    """Cells that belong in one figure: alike in all but codecs, seed and, unless `by_shape`, bandwidth."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        key = cell["key"]
        name = f"microbatch {key['microbatch']}, window {key['window']}"
        if by_shape:
            name += f", {key['shape']} Mbit/s"
        elif cell["rtt_ms"]:
            name += f", round trip {cell['rtt_ms']:g} ms"
        groups.setdefault(name, []).append(cell)
    return groups


def _by_pair(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(codec_pair(cell["key"]), []).append(cell)
    return groups


def _file_name(setting: str) -> str:
    """Letters, digits and dashes."""
    return "-".join("".join(char if char.isalnum() or char == "." else " " for char in setting).split())
