"""Prints a run's view on a terminal: the whole view, or one line per step."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence

from node.telemetry.format import (
    NO_LABELS,
    bytes_text,
    count_text,
    counted,
    dropped_text,
    duration_text,
    loss_text,
    named,
    printable,
    table_lines,
)
from node.view.run_view import HeldOutView, LinkView, RunView, StageView
from wire.telemetry import RELAY, is_relayed

_BLOCKS = " ▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48
_EVENTS = 6
_STAGES_SPARE = ("gpu", "memory", "unpack", "pack", "optimizer", "forward", "backward", "sync")
_LINKS_SPARE = ("damaged", "again", "sent", "bits", "round trip", "codecs")
"""Columns that a narrow terminal drops, in this order. The waiting times stay longest."""
_LEAST_CUT = 8
"""The least characters of the second column that are shown."""


def view_lines(view: RunView, now: float, width: int = 0) -> list[str]:
    """The whole view: state, curves, stages, links and newest events.

    `now` is in Unix seconds. Sentences are wrapped to `width` columns; 0 for no wrapping.
    """
    lines = [*_wrapped("", _head(view), width), *_wrapped("", _figures(view), width)]
    for sentence in () if view.ended else view.bottleneck:
        lines += _wrapped("bottleneck  ", sentence, width)
    for name, curve, digits in (("loss", view.loss_curve, 4), ("tokens/s", view.speed_curve, 0)):
        if len(curve.values) > 1:
            low, high = min(curve.values), max(curve.values)
            lines.append(f"{name:<11} {sparkline(curve.values)}  {low:.{digits}f} to {high:.{digits}f}")
    if view.stages:
        lines += ["", *_rows(view), *_stage_table(view.stages, width)]
    if view.links:
        lines += ["", *_link_table(view.links, width)]
        for sentence in path_sentences(view, relayed_only=True):
            lines += _wrapped("path        ", sentence, width)
    if view.dropped:
        lines += _wrapped("left out    ", f"{dropped_text(view.dropped)} of the documents read so far", width)
    if view.held_out is not None:
        lines.append(_held_out(view.held_out))
    lines += ["", _nodes(view, now)]
    lines += [
        f"  {duration_text(max(0.0, now - event.at)):>8} ago  {printable(event.text)}"
        for event in view.events[-_EVENTS:]
    ]
    return lines


def _wrapped(title: str, text: str, width: int) -> list[str]:
    if width <= len(title) + 20:
        return [title + text]
    indent = " " * (len(title) or 2)
    return textwrap.wrap(text, width, initial_indent=title, subsequent_indent=indent)


def step_line(view: RunView) -> str:
    """The run's state on one line."""
    bottleneck = f"; {view.bottleneck[0]}" if view.bottleneck and not view.ended else ""
    return f"{_head(view)}; {_figures(view)}{bottleneck}"


def sparkline(values: tuple[float, ...], width: int = _CURVE_WIDTH) -> str:
    """A curve as blocks of eight heights; non-finite values leave a gap."""
    groups = [values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)]
    means = [sum(group) / len(group) for group in groups if group] if len(values) > width else list(values)
    known = [mean for mean in means if mean - mean == 0]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(_BLOCKS) - 2) / (high - low) if high > low else 0.0
    return "".join(" " if m - m != 0 else _BLOCKS[1 + round(scale * (m - low))] for m in means)


def _head(view: RunView) -> str:
    ended = f" ({printable(view.ended)})" if view.ended else ""
    return printable(f"run {view.name} ({view.run_id}): {view.state}{ended}, step {view.step}/{view.steps}")


def _figures(view: RunView) -> str:
    parts = []
    if view.loss is not None or view.lr is not None:  # some step is done
        parts.append(f"loss {loss_text(view.loss)}")
    if view.tokens_per_second is not None:
        parts.append(f"{count_text(view.tokens_per_second)} tokens/s")
    if view.step_seconds is not None:
        parts.append(f"{duration_text(view.step_seconds)} per step")
    if view.eta_seconds is not None:
        parts.append(f"eta {duration_text(view.eta_seconds)}")
    parts.append(f"activations {view.forward_codec or '-'}, gradients {view.backward_codec or '-'}")
    return "   ".join(parts)


def _held_out(held_out: HeldOutView) -> str:
    trained = "" if held_out.loss is None else f", {held_out.loss:.4f} as trained"
    best = "" if held_out.best is None else f"; best {held_out.best:.4f}, step {held_out.best_step}"
    if held_out.uncompressed is None:
        return f"held-out    {'not finite' if held_out.samples else NO_LABELS}, step {held_out.step}{best}"
    return f"held-out    {held_out.uncompressed:.4f} uncompressed{trained}, step {held_out.step}{best}"


def _rows(view: RunView) -> list[str]:
    """The gradient groups of each row, if there are several rows."""
    if view.rows == 1:
        return []
    parts = [f"row {row}: {', '.join(map(str, groups))}" for row, groups in enumerate(view.groups)]
    return [f"gradient groups by row    {'   '.join(parts)}"]


def place_text(replica: int, stage: int, rows: int) -> str:
    """A seat in the grid, or only its stage if there is one row."""
    return str(stage) if rows == 1 else f"{replica}/{stage}"


def _stage_table(stages: tuple[StageView, ...], width: int) -> list[str]:
    rows_here = 1 + max(stage.replica for stage in stages)
    place = "stage" if rows_here == 1 else "row/stage"
    header = [place, "node", "busy", "forward", "backward", "pack", "unpack", "optimizer"]
    header += ["wait up", "wait down", "wait votes", "wait coord", "sync", "memory", "gpu"]
    kinds = ("forward", "backward", "encode", "decode", "optimizer")
    waits = ("wait-upstream", "wait-downstream", "wait-votes", "wait-coordinator", "sync")
    rows = []
    for stage in stages:
        shares = [_percent(stage.shares[k]) if k in stage.shares else "-" for k in (*kinds, *waits)]
        rows.append(
            [
                place_text(stage.replica, stage.stage, rows_here),
                printable(named(stage.node_id[:15], stage.name)) + ("" if stage.present else " (gone)"),
                _percent(stage.busy) if stage.shares else "-",
                *shares,
                bytes_text(stage.memory_bytes) if stage.memory_bytes else "-",
                bytes_text(stage.gpu_memory_bytes) if stage.gpu_memory_bytes else "-",
            ]
        )
    return _fitting(header, rows, width, _STAGES_SPARE)


def _link_table(links: tuple[LinkView, ...], width: int) -> list[str]:
    rows_here = 1 + max(max(link.source_replica, link.target_replica) for link in links)
    header = ["link", "codecs", "Mbit/s", "capacity", "use", "bits", "round trip", "sent", "again", "damaged"]
    header.append("path")
    rows = [
        [
            f"{place_text(link.source_replica, link.source, rows_here)} to "
            f"{place_text(link.target_replica, link.target, rows_here)}",
            ", ".join(dict.fromkeys(flow.codec for flow in link.flows)) or "-",
            f"{link.mbit:.1f}",
            f"{link.capacity_mbit:.1f}" if link.capacity_mbit and not link.little_used else "-",
            _use(link),
            "/".join(f"{flow.bits_per_element:.2f}" for flow in link.flows) or "-",
            duration_text(link.round_trip_seconds) if link.round_trip_seconds else "-",
            bytes_text(link.bytes),
            str(link.retransmits),
            str(link.rejects),
            _path(link),
        ]
        for link in links
    ]
    return _fitting(header, rows, width, _LINKS_SPARE)


def _fitting(header: list[str], rows: list[list[str]], width: int, spare: Sequence[str]) -> list[str]:
    """A table of at most `width` characters; 0 for no limit. To fit, it drops `spare` columns in their order.

    If that is not enough, the second column is cut.
    """
    lines = table_lines(header, rows)
    for name in spare:
        if not 0 < width < max(map(len, lines)):
            break
        kept = [column for column, title in enumerate(header) if title != name]
        header, *rows = ([row[column] for column in kept] for row in (header, *rows))
        lines = table_lines(header, rows)
    over = max(map(len, lines)) - width
    if width and over > 0:
        room = max(_LEAST_CUT, max(len(row[1]) for row in (header, *rows)) - over)
        cut = ([first, _cut(second, room), *others] for first, second, *others in rows)
        lines = table_lines(header, list(cut))
    return lines


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def path_sentences(view: RunView, *, relayed_only: bool = False) -> list[str]:
    """The path of each link, its rate in both directions together, and why it is not direct.

    `relayed_only`: only links with such a reason, without rates, to accompany a table of links.
    """
    ways: dict[tuple[tuple[int, int], ...], LinkView] = {}
    rates: dict[tuple[tuple[int, int], ...], float] = defaultdict(float)
    for link in view.links:
        ends = (link.source_replica, link.source), (link.target_replica, link.target)
        # The dialling end comes first in `links`.
        if link.path:
            ways.setdefault(tuple(sorted(ends)), link)
            rates[tuple(sorted(ends))] += link.mbit
    sentences: dict[tuple[str, str], list[str]] = {}
    for (lower, upper), link in ways.items():
        names = place_text(*lower, view.rows), place_text(*upper, view.rows)
        why = "; ".join(filter(None, (link.why_not_direct, link.why_not_together)))
        rate = "" if relayed_only else f" ({rates[lower, upper]:.1f} Mbit/s)"
        sentences.setdefault((_path(link), why), []).append(" and ".join(names) + rate)
    return [
        f"{', '.join(names)}: {path}{f', because {why}' if why else ''}"
        for (path, why), names in sentences.items()
        if why or not relayed_only
    ]


def _path(link: LinkView) -> str:
    if is_relayed(link.path):
        return f"{RELAY} ({link.path.partition(' ')[2] or 'coordinator'})"
    return link.path or "-"


def _use(link: LinkView) -> str:
    if link.use is None:
        return "-"
    why = " program" if link.program_limits else " full" if link.full else ""
    return "little" if link.little_used else _percent(link.use) + why


def _nodes(view: RunView, now: float) -> str:
    parts = [f"{counted(len(view.members), 'node')}, {view.spares} spare"]
    if view.snapshot is not None:
        age = duration_text(max(0.0, now - view.snapshot.at))
        parts.append(f"snapshot of step {view.snapshot.step}, {age} old")
    for count, word in (
        (view.lost, "lost in a step"),
        (view.aborted, "aborted"),
        (view.replayed, "replayed"),
        (view.recoveries, "recoveries"),
    ):
        if count:
            parts.append(f"{count} {word}")
    if view.goodput is not None and view.goodput < 1.0:
        parts.append(f"goodput {_percent(view.goodput)}")
    return ";  ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
