"""`thinwire lab run|merge|table|plot|check`: shaped networks on one machine, real runs over them, figures.

`run` starts itself again in private namespaces (`node.lab.namespaces`) and measures there.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from node.cli.parser import UsageError

DEFAULT_PARENT = Path("lab")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("lab", help="measure runs over slow networks made on this machine")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    run_ = actions.add_parser("run", help="measure every cell of a profile, or go on with it")
    run_.add_argument("profile", metavar="PROFILE.toml", type=Path, help="deploy/lab/ has some")
    run_.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="values that replace the profile's, and its run file's",
    )
    run_.add_argument("--out", type=Path, help="results go here (default: lab/<name>)")
    run_.add_argument(
        "--time-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="measure only what ends within so long; the same command goes on",
    )
    run_.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="CODECS@SHAPE",
        help="only these cells, as in tah/fixed-6@100; also CODECS or @SHAPE; may be given more than once",
    )
    run_.add_argument("--no-plots", action="store_true", help="draw no figures")
    run_.add_argument(
        "--pack", action="store_true", help="put raw/, logs/ and runs/ into one logs.tar.xz at the end"
    )
    run_.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    merge_ = actions.add_parser("merge", help="results of several parts of one profile as one file")
    merge_.add_argument(
        "parts", metavar="RESULTS", nargs="+", type=Path, help="of `lab run`: files or folders"
    )
    merge_.add_argument("--out", type=Path, required=True, help="the file to write")
    table = actions.add_parser("table", help="the paper's tables beside what was measured")
    plot = actions.add_parser("plot", help="figures from results")
    for action in (table, plot):
        action.add_argument(
            "results", metavar="RESULTS", nargs="+", type=Path, help="of `lab run`: files or folders"
        )
    plot.add_argument(
        "--out",
        type=Path,
        help="figures go here (default: beside a results.json, in lab/NAME for another file's NAME.json); of "
        "several results each has a folder there",
    )
    check = actions.add_parser("check", help="what this machine can do for the lab")
    check.add_argument("--json", action="store_true", help="one JSON object instead of text")
    actions_ = ((run_, _run), (merge_, _merge), (table, _table), (plot, _plot), (check, _check))
    for action, function in actions_:
        action.set_defaults(run=function, parser=action)


def _run(args: argparse.Namespace) -> int:
    from node.lab.plan import check_only
    from node.lab.profile import load_profile

    if not 0 <= args.time_limit < 1e9:
        raise UsageError(f"--time-limit must be a number of seconds of at least 0, got {args.time_limit:g}")
    profile = load_profile(args.profile, args.overrides)
    check_only(profile, args.only)
    out = args.out or DEFAULT_PARENT / profile.lab.name
    if args.inside:
        return _run_inside(args, out)
    from node.lab.archive import pack_logs
    from node.lab.namespaces import run_inside
    from node.lab.results import RESULTS_FILE
    from node.lab.support import check_devices

    check_devices(profile)
    try:
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {out} ({error.strerror}); give another --out") from error
    options = ["--out", str(out), "--time-limit", str(args.time_limit), "--inside"]
    options += [f"--only={words}" for words in args.only]
    try:
        code = run_inside(["lab", "run", str(args.profile), *args.overrides, *options])
    finally:
        if args.pack and (packed := pack_logs(out)) is not None:
            _tell(f"packed {packed}")
        _remove_empty(made)
    if code == 0 and not args.no_plots:
        _draw(out / RESULTS_FILE, out, must=False)
    return code


def _remove_empty(made: Sequence[Path]) -> None:
    """Folders that this command made, the innermost first: empty ones are of a run that was refused."""
    with contextlib.suppress(OSError):
        for folder in made:
            folder.rmdir()


def _run_inside(args: argparse.Namespace, out: Path) -> int:
    import asyncio

    from node.lab.laboratory import end_with_stdin, run_laboratory
    from node.lab.namespaces import furnish
    from node.lab.profile import load_profile
    from wire import event_loop

    furnish()
    profile = load_profile(args.profile, args.overrides)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            lifeline = group.create_task(end_with_stdin())
            await run_laboratory(profile, out, time_limit=args.time_limit, tell=_tell, only=args.only)
            lifeline.cancel()

    event_loop.run(run())
    return 0


def _merge(args: argparse.Namespace) -> int:
    from node.lab.results import Results, merge, read_results

    merged = merge([read_results(path) for path in args.parts])
    try:
        Results(args.out, merged).write()
    except OSError as error:
        raise UsageError(f"cannot write {args.out} ({error.strerror}); give another --out") from error
    _tell(f"{args.out}: {len(merged['cells'])} cells of {len(merged['runs'])} runs")
    return 0


def _table(args: argparse.Namespace) -> int:
    from node.lab.results import read_results
    from node.lab.table import tables_text

    sys.stdout.write(tables_text([(str(path), read_results(path)) for path in args.results]) + "\n")
    return 0


def _plot(args: argparse.Namespace) -> int:
    for path, folder in zip(args.results, figure_folders(args.results, args.out), strict=True):
        _draw(path, folder, must=True)
    return 0


def figure_folders(results: Sequence[Path], out: Path | None) -> list[Path]:
    """Where the figures of each results file or folder go.

    An output folder of `lab run` has them beside its results.json. A file of another name lies among others,
    perhaps recorded ones: its figures go where `lab run` would put a profile of that name. `out` is a folder
    for one, and of a folder for each of several; names that come again get a number.
    """
    from node.lab.results import RESULTS_FILE

    folders: list[Path] = []
    for path in results:
        try:
            folder_given = path.is_dir()
        except OSError:
            folder_given = False  # which is said when it is read
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
    """Draw the figures; without matplotlib that is an error only if it is what the user asked for."""
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
