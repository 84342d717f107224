"""`thinwire doctor [TOKEN]`: check this machine, and whether it can reach the run."""

import argparse
import sys
from pathlib import Path
from typing import Any

GIVEN = ("token", "run file")
"""Names of the checks of user input. If one of them fails, the exit code is that for bad input."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this machine")
    parser.add_argument(
        "token",
        metavar="TOKEN",
        nargs="?",
        help="also check a join token, its coordinator, and the paths from here to the run's other nodes",
    )
    parser.add_argument("--state-dir", type=Path, help="the state directory to check (default: the user's)")
    parser.add_argument(
        "--run-file",
        type=Path,
        metavar="RUN.toml",
        help="also estimate which stages of this run fit here",
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="auto|cpu|mps|cuda:N",
        help="with TOKEN or --run-file: the device, as for `thinwire join`",
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="as for `thinwire join`")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="T", help="as for `thinwire join`")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.importing import importing
    from node.cli.parser import check_devices
    from node.display.volunteer import VolunteerScreen
    from wire.errors import UserError

    check_devices(args)
    screen = VolunteerScreen(json_lines=args.json)
    with screen.seconds_of("checking this machine" + (" and the token's coordinator" if args.token else "")):
        with importing():
            from node.processes.doctor import Status, checks_json, checks_text, examine, healthy
            from node.stage.processes import choose_devices

        chosen = choose_devices(args.device, args.gpus)
        checks = examine(token=args.token, state_dir=args.state_dir)
    if args.token is not None:
        from node.processes.reach_check import check_reach

        with screen.seconds_of("checking the paths to the coordinator and the run's other nodes"):
            checks += check_reach(args.token, chosen[0])
    if args.run_file is not None:
        from node.processes.run_check import check_run

        with screen.seconds_of("estimating the run's stages"):
            checks += check_run(args.run_file, chosen, args.tensor_parallel)
    sys.stdout.write((checks_json(checks) if args.json else checks_text(checks)) + "\n")
    if any(check.name in GIVEN and check.status is Status.FAIL for check in checks):
        return UserError.exit_code
    return 0 if healthy(checks) else 1
