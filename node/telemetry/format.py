"""Formats numbers, tables and untrusted strings for display."""

import re
from collections.abc import Mapping

from wire.errors import shortened

_ADDRESS = re.compile(
    # [2001:db8::1]:7700; gRPC may write the brackets as %5B and %5D
    r"(?:\[|%5B)(?=[^\s\]:]*:[^\s\]:]*:)[0-9A-F:.]+(?:%[\w.-]+?)?(?:\]|%5D)(?::\d+)?"
    # fe80::1%eth0, and addresses with all eight groups
    r"|(?<![\w:])(?=[0-9A-F:]*::)(?=:*[0-9A-F])[0-9A-F:]{3,}(?:(?:\.\d+){3})?(?:%\w+)?(?![\w:])"
    r"|\b(?:[0-9A-F]{1,4}:){7}[0-9A-F]{1,4}\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # 192.0.2.1:7700
    r"|\b\w(?:[\w-]*\.)+[^\W\d_][\w-]*\.?:\d+\b"  # node.example.org:7700
    # alices-pc:7710, but not cuda:0 or the hours of a date; without a letter it is a time or a pair of steps
    r"|\b(?!(?:cuda|cpu):\d\d?\b)(?!(?:[\d-]*-)?\d\dT\d\d:)(?=[\w-]*[^\W\d_])\w[\w-]*:\d{1,5}(?!\w|[.:]\d)",
    re.IGNORECASE,
)


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as for links: 1532 -> `1.53 kB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def count_text(count: float) -> str:
    """A count or rate: 18437 -> `18.4k`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"), "")


def mbit_text(rate: float) -> str:
    """A rate of a line, given in Mbit/s: 18.437 -> `18.4 Mbit/s`."""
    return f"{rate:.3g} Mbit/s" if rate < 999.5 else f"{rate:.0f} Mbit/s"


def counted(count: int, noun: str) -> str:
    """`1 node`, `3 nodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


NO_LABELS = "no labels"
"""Shown instead of a loss if no token counts."""


def loss_text(loss: float | None) -> str:
    """A loss in nats per token. It is None or NaN if no token counts as a label."""
    return NO_LABELS if loss is None or loss != loss else f"{loss:.4f}"


def dropped_text(reasons: Mapping[str, int]) -> str:
    """The documents that were left out, by reason, most frequent first: `3 (empty), 1 (no messages)`."""
    most = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} ({printable(shortened(reason))})" for reason, count in most)


def duration_text(seconds: float) -> str:
    """A length of time: 0.25 -> `250 ms`, 75 -> `1m15s`, 7800 -> `2h10m`."""
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours < 48 else f"{hours // 24}d{hours % 24:02}h"


def clock_text(seconds: float) -> str:
    """A countdown: 75 -> `1:15`, 3661 -> `1:01:01`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hours": 3600, "hour": 3600, "d": 86400}


def parse_duration(text: str) -> float | None:
    """The seconds of `10 min`, `90s`, `1.5h` or `2d`; None if the text is no length of time."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,3})?)\s*([a-z]+)\s*", text)
    if match is None or match[2] not in _UNITS:
        return None
    return float(match[1]) * _UNITS[match[2]]


def printable(text: str) -> str:
    """`text` on one line, without control characters, because it may come from another machine."""
    return "".join(char if char.isprintable() else " " for char in text)


def named(node: str, name: str) -> str:
    """A node's id, with the name that its owner gave it, if any."""
    return f'{node} "{name}"' if name else node


def without_addresses(text: str) -> str:
    """`text` with every IP address and every host:port replaced by three dots."""
    return _ADDRESS.sub("...", text)


def table_lines(header: list[str], rows: list[list[str]], left: int = 2) -> list[str]:
    """Rows in aligned columns. The first `left` columns are flush left, the others (numbers) flush right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def _scaled(value: float, units: tuple[str, ...], space: str) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = f"{value:.3g}" if abs(value) < 999.5 and value != int(value) else f"{value:.0f}"
    return f"{digits}{space if unit else ''}{unit}"
