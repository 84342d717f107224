"""`thinwire top RUN_DIR|ADDRESS`: a run in the terminal, live, or as it was when it ended."""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from node.telemetry.run_view import RunView
    from node.telemetry.watch import HistoryWatch, PageWatch

INTERVAL_SECONDS = 1.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("top", help="watch a run in the terminal")
    parser.add_argument(
        "where", metavar="RUN_DIR|ADDRESS", help="the run's directory, or its page's host:port"
    )
    parser.add_argument("--once", action="store_true", help="show it as it is now, and end")
    parser.add_argument("--json", action="store_true", help="the view as JSON, a line at each change")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.telemetry.top import view_lines

    watch = _open(args.where)
    view = watch.view()
    if args.json:
        _follow(watch, view, lambda seen: sys.stdout.write(seen.to_json() + "\n"), once=args.once)
    elif args.once:
        sys.stdout.write("\n".join(view_lines(view, time.time())) + "\n")
    elif sys.stdout.isatty():
        _live(watch, view)
    else:
        from node.telemetry.top import step_line

        _follow(watch, view, lambda seen: sys.stdout.write(step_line(seen) + "\n"), once=False)
    return 0


def _open(where: str) -> "HistoryWatch | PageWatch":
    from node.cli.run_directory import existing_run_directory
    from node.telemetry.watch import HistoryWatch, PageWatch

    path = Path(where)
    if path.exists() or "/" in where.partition("://")[0]:
        return HistoryWatch(existing_run_directory(path))
    return PageWatch(where)


def _over(view: "RunView") -> bool:
    return view.state in ("stopped", "finished", "failed")


def _follow(watch: "HistoryWatch | PageWatch", view: "RunView", show: Any, *, once: bool) -> None:
    """Show each view that tells something new, until the run is over."""
    pause = threading.Event()
    shown = None
    while True:
        news = view.updated, view.step, view.state
        if news != shown:
            shown = news
            show(view)
            sys.stdout.flush()
        if once or _over(view):
            return
        pause.wait(INTERVAL_SECONDS)
        view = watch.view()


def _live(watch: "HistoryWatch | PageWatch", view: "RunView") -> None:
    """Redraw in place until the run is over or the user has seen enough."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from node.telemetry.top import view_lines

    def frame() -> Text:
        return Text("\n".join(view_lines(view, time.time())), no_wrap=True, overflow="ellipsis")

    console = Console(markup=False, emoji=False, highlight=False)
    pause = threading.Event()
    with Live(frame(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while not _over(view):
            pause.wait(INTERVAL_SECONDS)
            view = watch.view()
            live.update(frame(), refresh=True)
