"""`thinwire join TOKEN`: join a run with this machine."""

import argparse
from pathlib import Path
from typing import Any

MAX_TOKEN_FILE = 16_384
YIELDS_FROM = 25.0
"""The default of `--yield-gpu`, percent of a GPU. A desktop uses less, games more."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("join", help="join a run with this machine")
    parser.add_argument(
        "token", metavar="TOKEN", nargs="?", help="the token from the coordinator's join line"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help="read the token from a file, so that `ps` does not show it",
    )
    parser.add_argument(
        "--listen", default="0.0.0.0:0", metavar="HOST:PORT", help="where to accept neighbours' connections"
    )
    parser.add_argument(
        "--no-listen",
        action="store_true",
        help="open no port; neighbours that cannot be dialled connect through a relay",
    )
    parser.add_argument(
        "--no-map-port",
        action="store_true",
        help="do not ask the router to map a port to this machine (NAT-PMP, or UPnP with thinwire[upnp])",
    )
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST:PORT",
        help="address for neighbours to dial (default: the one that the coordinator sees)",
    )
    parser.add_argument(
        "--name", default="", metavar="TEXT", help="this machine's public name, such as \"Ana's 4090\""
    )
    parser.add_argument("--state-dir", type=Path, help="directory for this node's key and certificate")
    parser.add_argument(
        "--device", default="auto", metavar="auto|cpu|mps|cuda:N", help="device to compute on"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="share the stage among N GPUs, starting at --device; with --device cpu, among N processes",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="T",
        help="split each block among T of the GPUs; T must divide N (default: 1)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    parser.add_argument(
        "--max-bandwidth", type=float, default=0.0, metavar="MBIT", help="upload limit in Mbit/s"
    )
    parser.add_argument(
        "--relay",
        type=float,
        default=0.0,
        metavar="MBIT",
        help="relay up to this many Mbit/s between other nodes that cannot reach each other; they must be "
        "able to reach a port here",
    )
    parser.add_argument(
        "--max-disk",
        type=float,
        default=0.0,
        metavar="GB",
        help="disk space for snapshot layers in GB; 0 (default) means half of the free space",
    )
    parser.add_argument(
        "--max-memory",
        type=float,
        default=0.0,
        metavar="GB",
        help="memory limit in GB; stages that need more are refused",
    )
    parser.add_argument(
        "--yield-gpu",
        type=float,
        nargs="?",
        const=YIELDS_FROM,
        default=0.0,
        metavar="PERCENT",
        help=f"slow down while other programs, such as a game, use this percentage of the GPU (without a "
        f"number: {YIELDS_FROM:g}); requires NVIDIA's driver",
    )
    parser.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="let the run keep snapshots below this address, such as s3://BUCKET, with the credentials in "
        "this machine's environment",
    )
    parser.add_argument(
        "--hub",
        action="append",
        default=[],
        metavar="OWNER/NAME",
        help="use your HF_TOKEN to read this model from the hub; other models are read without a token "
        "(repeatable)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="this machine's copy of the model that the run starts from (default: fetch it)",
    )
    parser.add_argument(
        "--max-host-memory",
        type=float,
        metavar="GB",
        help="main memory for what does not fit on the GPU, in GB; 0: none (default: half of what is free)",
    )
    parser.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="serve this node's metrics for Prometheus"
    )
    parser.add_argument(
        "--wait",
        default="1h",
        metavar="TIME",
        help="how long to wait for a coordinator that is not up yet, or for a stopped run to be resumed, "
        "such as 30 min or 12h; 0 does not wait (default: 1h)",
    )
    parser.add_argument("--json", action="store_true", help="print progress as JSON lines")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from node.cli.parser import UsageError, check_devices, set_up_logging
    from node.cli.run_directory import owner_only
    from node.config.join_options import MOST_LIMIT, MOST_THREADS, JoinOptions, OwnerAllows
    from node.run_file.addresses import parse_listen
    from node.telemetry.format import parse_duration
    from wire.identity.names import MOST_NAME, clean_name
    from wire.identity.token import JoinToken

    token = _read_token(args.token, args.token_file)
    JoinToken.parse(token)  # refuse a mistyped token before torch is imported
    parse_listen(args.listen)
    if args.advertise:
        parse_listen(args.advertise)
        if args.no_listen:
            raise UsageError(
                "--advertise names a port to dial, but --no-listen opens none: use only one of the two"
            )
    if args.metrics:
        parse_listen(args.metrics)
    if args.store:
        from node.state.object_store import wrong_url

        if (why := wrong_url(args.store)) is not None:
            raise UsageError(f"--store {args.store[:200]} cannot hold snapshots: {why}")
    if len(args.name) > MOST_NAME:
        raise UsageError(f"--name may have at most {MOST_NAME} characters, got {len(args.name)}")
    if args.relay and args.no_listen:
        raise UsageError("--relay needs an open port, but --no-listen opens none: use only one of the two")
    if 0 < args.relay < 1:
        raise UsageError(f"--relay must be at least 1 Mbit/s, got {args.relay:g}")
    if args.model is not None and not args.model.is_dir():
        raise UsageError(f"--model {args.model} is not a folder: name the folder that contains config.json")
    check_devices(args)
    if not 0 <= args.threads <= MOST_THREADS:
        raise UsageError(f"--threads must be 0 (torch's own choice) to {MOST_THREADS}, got {args.threads}")
    if not 0 <= args.yield_gpu <= 100:
        raise UsageError(f"--yield-gpu must be 1 to 100 percent of the GPU, got {args.yield_gpu:g}")
    limits = {
        "--max-bandwidth": args.max_bandwidth,
        "--relay": args.relay,
        "--max-disk": args.max_disk,
        "--max-memory": args.max_memory,
        "--max-host-memory": args.max_host_memory or 0.0,
    }
    for name, value in limits.items():
        if not 0 <= value <= MOST_LIMIT:
            raise UsageError(
                f"{name} must be a number above 0, at most {MOST_LIMIT:g}, or 0 for no limit, got {value:g}"
            )
    wait = 0.0 if args.wait == "0" else parse_duration(args.wait)
    if wait is None:
        raise UsageError(f"--wait must be a time such as 30 min, 12h or 2d, or 0, got {args.wait!r}")
    options = JoinOptions(
        listen="" if args.no_listen else args.listen,
        advertise=args.advertise,
        name=clean_name(args.name),
        state_dir=args.state_dir,
        device=args.device,
        gpus=args.gpus,
        tensor_parallel=args.tensor_parallel,
        threads=args.threads,
        max_bandwidth_mbit=args.max_bandwidth,
        map_port=not args.no_map_port,
        relay_mbit=args.relay,
        max_memory_gb=args.max_memory,
        max_host_memory_gb=args.max_host_memory,
        yield_gpu=args.yield_gpu,
        max_disk_gb=args.max_disk,
        allows=OwnerAllows(store=args.store, hub=tuple(map(_repository, args.hub)), model=args.model),
        metrics=args.metrics,
        wait_seconds=wait,
        json=args.json,
    )
    from node.cli.importing import importing
    from node.display.volunteer import VolunteerScreen

    set_up_logging()
    screen = VolunteerScreen(json_lines=args.json)
    screen("starting")
    with screen.seconds_of("loading torch"), importing():
        from node.processes.node import run_node

    with owner_only():
        return run_node(token, options)


def _repository(text: str) -> str:
    """The `owner/name` of a repository. Raises UsageError for a malformed name."""
    from node.cli.parser import UsageError
    from node.state.hub import PREFIX, Repository
    from wire.errors import ConfigError

    try:
        return Repository.parse(f"{PREFIX}{text.removeprefix(PREFIX)}").name
    except ConfigError:
        raise UsageError(f"--hub must be OWNER/NAME of a model on the hub, got {text[:100]!r}") from None


def _read_token(token: str | None, path: Path | None) -> str:
    """The token from the command line or the file. Raises UsageError unless exactly one is given."""
    from node.cli.parser import UsageError
    from wire.identity.token import token_in

    if (token is None) == (path is None):
        raise UsageError("give the join token either as TOKEN or with --token-file PATH")
    if path is None:
        assert token is not None
        return token_in(token)
    try:
        # Some editors write a byte order mark.
        with path.open(encoding="utf-8-sig") as file:
            # Tokens are far shorter than the limit.
            content = token_in(file.read(MAX_TOKEN_FILE))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--token-file {path} cannot be read: {reason}") from None
    if not content:
        raise UsageError(f"--token-file {path} is empty: write the join token into it")
    return content
