"""`thinwire join TOKEN`: give this machine to a run."""

import argparse
from pathlib import Path
from typing import Any

MAX_TOKEN_FILE = 16_384


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("join", help="give this machine to a run")
    parser.add_argument(
        "token", metavar="TOKEN", nargs="?", help="the token from the coordinator's join line"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH", help="read the token from a file, where no `ps` shows it"
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:0", metavar="HOST:PORT", help="where neighbours connect to"
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="what neighbours dial (default: the address that the coordinator sees)",
    )
    parser.add_argument("--state-dir", type=Path, help="where this node's key and certificate live")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:N", help="where to compute")
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="share the stage between N GPUs, --device the first; with --device cpu, between N processes",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="cut each block between T of the GPUs, which T must divide (default: none)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's own choice)")
    parser.add_argument(
        "--max-bandwidth", type=float, default=0.0, metavar="MBIT", help="send at most so many Mbit/s"
    )
    parser.add_argument(
        "--max-memory", type=float, default=0.0, metavar="GB", help="take no stage that needs more memory"
    )
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="serve this node's metrics to Prometheus there"
    )
    parser.add_argument("--json", action="store_true", help="progress on stdout as JSON lines")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.parser import UsageError, check_devices, set_up_logging
    from node.cli.run_directory import owner_only
    from node.config.join_options import MOST_LIMIT, MOST_THREADS, JoinOptions
    from node.run_file.validate import parse_listen
    from wire.identity.token import JoinToken

    token = _read_token(args.token, args.token_file)
    JoinToken.parse(token)  # a mistyped token is refused before torch is loaded
    parse_listen(args.listen)
    if args.advertise:
        parse_listen(args.advertise)
    if args.metrics:
        parse_listen(args.metrics)
    check_devices(args)
    if not 0 <= args.threads <= MOST_THREADS:
        raise UsageError(f"--threads must be 0 (torch's own choice) to {MOST_THREADS}, got {args.threads}")
    for name, value in (("--max-bandwidth", args.max_bandwidth), ("--max-memory", args.max_memory)):
        if not 0 <= value <= MOST_LIMIT:
            raise UsageError(
                f"{name} must be a number above 0, at most {MOST_LIMIT:g}, or 0 for no limit, got {value:g}"
            )
    options = JoinOptions(
        listen=args.listen,
        advertise=args.advertise,
        state_dir=args.state_dir,
        device=args.device,
        gpus=args.gpus,
        tensor_parallel=args.tensor_parallel,
        threads=args.threads,
        max_bandwidth_mbit=args.max_bandwidth,
        max_memory_gb=args.max_memory,
        metrics=args.metrics,
        json=args.json,
    )
    set_up_logging()

    from node.processes.node import run_node

    with owner_only():
        return run_node(token, options)


def _read_token(token: str | None, path: Path | None) -> str:
    """The token that was given on the command line or in a file. Raises UsageError."""
    from node.cli.parser import UsageError

    if (token is None) == (path is None):
        raise UsageError("give the join token either as TOKEN or by --token-file PATH")
    if path is None:
        assert token is not None
        return token
    try:
        # Some editors begin a file with a byte order mark, which no token has.
        with path.open(encoding="utf-8-sig") as file:
            # A whole join line is as good as its token; no token comes near this length.
            words = file.read(MAX_TOKEN_FILE).split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--token-file {path} cannot be read: {reason}") from None
    if not words:
        raise UsageError(f"--token-file {path} is empty: write the join token into it")
    return words[-1]
