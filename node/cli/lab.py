"""`thinwire lab run|table|plot|check`: measure real runs over shaped networks on one machine.

`run` restarts itself in private namespaces (`node.lab.namespaces`) and measures there.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.cli.parser import UsageError, number

DEFAULT_PARENT = Path("lab")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("lab", help="measure runs over slow networks, emulated on this machine")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    run_ = actions.add_parser("run", help="measure every cell of a profile, and resume earlier results")
    run_.add_argument(
        "profile", metavar="PROFILE.toml", type=Path, help="a profile, such as those in deploy/lab/"
    )
    run_.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="values that override those of the profile and its run file",
    )
    run_.add_argument("--out", type=Path, help="output directory (default: lab/<name>)")
    run_.add_argument(
        "--time-limit",
        type=number,
        default=0.0,
        metavar="SECONDS",
        help="start no further cell after this time; run the same command again to continue",
    )
    run_.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CODECS@SHAPE",
        help="only these cells, such as tah/fixed-6@100; CODECS or @SHAPE alone work too; repeatable",
    )
    run_.add_argument("--no-plots", action="store_true", help="draw no figures")
    run_.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    table = actions.add_parser("table", help="print what was measured")
    plot = actions.add_parser("plot", help="draw figures from results")
    for action in (table, plot):
        action.add_argument(
            "results", metavar="RESULTS", nargs="+", type=Path, help="result files or output folders"
        )
    plot.add_argument(
        "--out",
        type=Path,
        help="folder for the figures (default: beside results.json, or lab/NAME for NAME.json); "
        "several results get one folder each",
    )
    check = actions.add_parser("check", help="check which tools the lab can use on this machine")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    actions_ = ((run_, _run), (table, _table), (plot, _plot), (check, _check))
    for action, function in actions_:
        action.set_defaults(run=function, parser=action)


def _run(args: argparse.Namespace) -> int:
    from node.lab.laboratory import Laboratory, until_stdin_ends
    from node.lab.namespaces import furnish, run_inside
    from node.lab.plan import check_only
    from node.lab.profile import load_profile
    from node.lab.reach import is_reach_profile
    from node.lab.results import RESULTS_FILE
    from wire import event_loop

    if not 0 <= args.time_limit < 1e9:
        raise UsageError(f"--time-limit must be a number of seconds of at least 0, got {args.time_limit:g}")
    if is_reach_profile(args.profile):
        return _run_reach(args)
    profile = load_profile(args.profile, args.overrides)
    check_only(profile, args.only)
    out = args.out or DEFAULT_PARENT / profile.lab.name
    if args.inside:
        furnish()
        lab = Laboratory(profile, out, time_limit=args.time_limit, tell=_tell, only=args.only)
        event_loop.run(until_stdin_ends(lab.run()))
        return 0
    from node.lab.support import check_devices

    check_devices(profile)
    created = _create(out)
    options = ["--out", str(out), "--time-limit", str(args.time_limit), "--inside"]
    options += [f"--only={words}" for words in args.only]
    try:
        code = run_inside(["lab", "run", str(args.profile), *args.overrides, *options])
    finally:
        _remove_empty(created)
    if code == 0 and not args.no_plots:
        _draw(out / RESULTS_FILE, out, must=False)
    return code


def _run_reach(args: argparse.Namespace) -> int:
    """Train over every pair of ways to connect to the internet, such as two kinds of NAT."""
    from node.lab.laboratory import until_stdin_ends
    from node.lab.namespaces import furnish, run_inside
    from node.lab.reach import load_reach_profile, names_of, run_reach
    from node.lab.tools import tool
    from wire import event_loop

    if args.overrides or args.time_limit:
        raise UsageError("a profile with [reach] takes no overrides and no --time-limit")
    profile = load_reach_profile(args.profile)
    known = {name for pair in profile.pairs for name in names_of(pair)}
    for kind in args.only:
        if kind not in known:
            raise UsageError(f"--only {kind}: expected a kind such as nat, or a pair such as nat-symmetric")
    out = args.out or DEFAULT_PARENT / profile.reach.name
    if args.inside:
        furnish()
        return 0 if event_loop.run(until_stdin_ends(run_reach(profile, out, _tell, args.only))) else 1
    tool("nft")
    _create(out)
    options = ["--out", str(out), "--inside", *(f"--only={words}" for words in args.only)]
    return run_inside(["lab", "run", str(args.profile), *options])


def _create(out: Path) -> list[Path]:
    """Create a folder. Returns those that were created for it, innermost first."""
    try:
        created = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create {out} ({error.strerror}); give another --out") from error
    return created


def _remove_empty(created: Sequence[Path]) -> None:
    """Remove the empty folders that this command created, innermost first, after a refused run."""
    with contextlib.suppress(OSError):
        for folder in created:
            folder.rmdir()


def _table(args: argparse.Namespace) -> int:
    from node.lab.reach import reach_table, read_reach_results
    from node.lab.results import read_results
    from node.lab.table import tables_text
    from node.telemetry.format import table_lines

    texts, others = [], []
    for path in args.results:
        if (reach := read_reach_results(path)) is not None:
            head, *rows = reach_table(reach)
            texts.append("\n".join(table_lines(head, rows, left=len(head))))
        else:
            others.append((str(path), read_results(path)))
    if others:
        texts.append(tables_text(others))
    sys.stdout.write("\n".join(texts) + "\n")
    return 0


def _plot(args: argparse.Namespace) -> int:
    for path, folder in zip(args.results, figure_folders(args.results, args.out), strict=True):
        _draw(path, folder, must=True)
    return 0


def figure_folders(results: Sequence[Path], out: Path | None) -> list[Path]:
    """The folder for the figures of each results file.

    Figures for an output folder of `lab run` go beside its results.json, and those for another file NAME.json
    go to lab/NAME. `out` is the folder for a single result, or the parent of the folders for several.
    Repeated names get a number.
    """
    from node.lab.results import RESULTS_FILE

    folders: list[Path] = []
    for path in results:
        try:
            folder_given = path.is_dir()
        except OSError:
            folder_given = False  # reading it reports the error
        ours = folder_given or path.name == RESULTS_FILE
        home = path if folder_given else path.parent
        name = home.resolve().name if ours else path.stem
        if out is not None:
            folder = out / name if len(results) > 1 else out
        else:
            folder = home if ours else DEFAULT_PARENT / name
        numbered = (folder.with_name(f"{folder.name}-{number}") for number in range(2, len(results) + 1))
        folders.append(folder if folder not in folders else next(f for f in numbered if f not in folders))
    return folders


def _draw(results: Path, out: Path, *, must: bool) -> None:
    """Draw the figures. An error, such as a missing matplotlib, is raised only if `must`."""
    from node.lab.plots import draw
    from node.lab.results import read_results
    from wire.errors import UserError

    try:
        for path in draw(read_results(results), out, _tell):
            _tell(f"drew {path}")
    except UserError as error:
        if must:
            raise
        _tell(f"no figures: {error}")


def _check(args: argparse.Namespace) -> int:
    from node.lab.support import ask_private, find_outside

    findings = find_outside()
    if all(finding.works for finding in findings if finding.needed):
        findings += ask_private()
    if args.json:
        sys.stdout.write(json.dumps([vars(finding) for finding in findings]) + "\n")
    else:
        for finding in findings:
            mark = "ok" if finding.works else "FAIL" if finding.needed else "no"
            sys.stdout.write(f"{mark:<4}  {finding.name:<10}  {finding.detail}\n")
    return 0 if all(finding.works for finding in findings if finding.needed) else 1


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
