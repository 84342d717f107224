"""Numbers as people read them, and strings from other machines made safe to print."""


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as links are sold: 1532 -> `1.53 kB`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"), " ")


def count_text(count: float) -> str:
    """A count or rate: 18437 -> `18.4k`."""
    return _scaled(count, ("", "k", "M", "G", "T", "P"), "")


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


def printable(text: str) -> str:
    """`text` on one line and without control characters: it may come from a stranger's machine."""
    return "".join(char if char.isprintable() else " " for char in text)


def _scaled(value: float, units: tuple[str, ...], space: str) -> str:
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    digits = f"{value:.3g}" if abs(value) < 999.5 and value != int(value) else f"{value:.0f}"
    return f"{digits}{space if unit else ''}{unit}"
