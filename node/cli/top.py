"""`thinwire top RUN_DIR|ADDRESS`: watch a run in the terminal, live or after it has ended."""

import argparse
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.display.watch import HistoryWatch, PageWatch
    from node.view.run_view import RunView

INTERVAL_SECONDS = 1.0
OUTAGE_SECONDS = 60.0
"""How long to retry a page that has stopped answering, because its coordinator may be restarting."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("top", help="watch a run in the terminal")
    parser.add_argument(
        "where", metavar="RUN_DIR|ADDRESS", help="the run's directory, or its page's host:port"
    )
    parser.add_argument("--once", action="store_true", help="show the current state and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each change")
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="the run's authority/ca.pem, for a page over https"
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.display.top import view_lines

    watch = _open(args.where, args.ca)
    view = watch.view()
    if args.json:
        _follow(watch, view, lambda seen: sys.stdout.write(seen.to_json() + "\n"), once=args.once)
    elif args.once:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        sys.stdout.write("\n".join(view_lines(view, time.time(), width)) + "\n")
    elif sys.stdout.isatty():
        _live(watch, view)
    else:
        from node.display.top import step_line

        _follow(watch, view, lambda seen: sys.stdout.write(step_line(seen) + "\n"), once=False)
    return 0


def _open(where: str, authority: Path | None) -> "HistoryWatch | PageWatch":
    from node.cli.run_directory import existing_run_directory
    from node.display.watch import HistoryWatch, PageWatch

    path = Path(where)
    try:
        there = path.exists()
    except OSError:
        there = True  # it is in a folder that this user may not enter
    # A page's address may end with a slash and is not a folder.
    if there or "/" in where.partition("://")[0].rstrip("/"):
        return HistoryWatch(existing_run_directory(path))
    return PageWatch(where, authority)


def _over(view: "RunView") -> bool:
    return view.state in ("stopped", "finished", "failed")


class _Patient:
    """The newest view of a run, and how long the run has not answered."""

    def __init__(self, watch: "HistoryWatch | PageWatch", view: "RunView") -> None:
        self._watch = watch
        self.view = view
        self.silent_since: float | None = None

    def look(self) -> None:
        """Fetch a view. Raises LinkError after `OUTAGE_SECONDS` without an answer."""
        from wire.errors import LinkError

        try:
            self.view = self._watch.view()
        except LinkError:
            now = time.monotonic()
            self.silent_since = self.silent_since or now
            if now - self.silent_since > OUTAGE_SECONDS:
                raise
        else:
            self.silent_since = None

    def lines(self, width: int) -> list[str]:
        from node.display.top import view_lines

        lines = view_lines(self.view, time.time(), width)
        if self.silent_since is not None:
            lines.insert(0, f"no answer for {time.monotonic() - self.silent_since:.0f} s; last known state:")
        return lines


def _follow(watch: "HistoryWatch | PageWatch", view: "RunView", show: Any, *, once: bool) -> None:
    """Show each new view until the run is over."""
    pause = threading.Event()
    patient = _Patient(watch, view)
    shown = None
    while True:
        view = patient.view
        news = view.updated, view.step, view.state
        if news != shown:
            shown = news
            show(view)
            sys.stdout.flush()
        if once or _over(view):
            return
        pause.wait(INTERVAL_SECONDS)
        patient.look()


def _live(watch: "HistoryWatch | PageWatch", view: "RunView") -> None:
    """Redraw in place until the run is over or the user presses Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    patient = _Patient(watch, view)
    console = Console(markup=False, emoji=False, highlight=False)

    def frame() -> Text:
        return Text("\n".join(patient.lines(console.width)), no_wrap=True, overflow="ellipsis")

    pause = threading.Event()
    with Live(frame(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not _over(patient.view):
            pause.wait(INTERVAL_SECONDS)
            patient.look()
            live.update(frame(), refresh=True)
