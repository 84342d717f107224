"""The command line: a parser with one-line errors and suggestions, shared checks, and logging."""

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from node.config.join_options import MOST_DEVICES
from node.display.terminal import LIVE_LINE
from wire.errors import UserError, escaped, nearest

MOST_NUMBER = 1e9
"""The largest number that an option accepts, in its own unit."""


class UsageError(UserError):
    """The command line is invalid."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` and suggests the nearest command or option."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation may become ambiguous when an option is added.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.endswith(f": {action.metavar}"):
                message = f"name {'an action' if action.metavar == 'ACTION' else 'a command'}: "
                message += ", ".join(action.choices)
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse would list every choice.
        if action.choices is not None and value not in action.choices:
            kind = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            self.error(f"unknown {kind} {value!r}{nearest(str(value), map(str, action.choices))}")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line.

        Overrides (`key=value`) may be anywhere after the command. Raises UsageError.
        """
        argv = list(sys.argv[1:] if argv is None else argv)
        args, rest = self.parse_known_args(argv)
        if hasattr(args, "overrides"):
            args.overrides += [text for text in rest if "=" in text and not text.startswith("-")]
            rest = [text for text in rest if text not in args.overrides]
        if rest:
            parser: Parser = getattr(args, "parser", self)
            unknown = next((text for text in rest if text.startswith("-")), None)
            if unknown is None:
                parser.error(f"unexpected argument {rest[0]!r}")
            name = unknown.partition("=")[0]
            parser.error(f"unknown option {name}{nearest(name, parser._option_string_actions)}")
        return args


def number(text: str) -> float:
    """A number for an option. Raises ValueError for NaN, infinity and numbers beyond `MOST_NUMBER`."""
    value = float(text)
    if not abs(value) <= MOST_NUMBER:
        raise ValueError
    return value


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add RUN.toml and `section.key=value`, the arguments of `load_config`."""
    parser.add_argument("run_file", metavar="RUN.toml", type=Path, help="the run file, or a recipe's name")
    parser.add_argument(
        "overrides",
        metavar="section.key=value",
        nargs="*",
        default=[],
        help="values that override those of the file",
    )


def check_devices(args: argparse.Namespace) -> None:
    """Raise UsageError unless --device, --gpus and --tensor-parallel make sense together."""
    if not re.fullmatch(r"auto|cpu|mps|xpu|cuda(:[0-9]+)?", args.device):
        raise UsageError(f"--device must be auto, cpu, mps or cuda:N, got {args.device!r}")
    if not 1 <= args.gpus <= MOST_DEVICES:
        raise UsageError(f"--gpus must be 1 to {MOST_DEVICES}, got {args.gpus}")
    if args.tensor_parallel < 1 or args.gpus % args.tensor_parallel:
        raise UsageError(
            f"--tensor-parallel must be at least 1 and divide --gpus {args.gpus}, got {args.tensor_parallel}"
        )


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # not subscriptable at run time
    """Writes to the current `sys.stderr`, which the live display replaces, below a live line."""

    def emit(self, record: logging.LogRecord) -> None:
        LIVE_LINE.end()
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


_OF_CALLERS = {"DecodeError", "NotImplementedError", "ExecuteBatchError", "HttpProcessingError"}
"""Names of errors of gRPC and aiohttp that only a caller can cause."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a record is not a server's traceback of what only a caller can cause: a message, method or HTTP
    that no client of ours sends, or a call that it left. With these, anybody who can reach the port could
    fill the operator's terminal and disk."""
    error = record.exc_info[0] if record.exc_info else None
    is_theirs = error is not None and not _OF_CALLERS.isdisjoint(base.__name__ for base in error.__mro__)
    return not (is_theirs and record.name.startswith(("grpc.", "aiohttp.")))


def set_up_logging() -> None:
    """Log INFO and above to stderr. `THINWIRE_LOG=debug` (or warning, error) sets another level.

    Call it before grpc is imported, because gRPC reads its verbosity once and by default logs every closed
    connection.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    handler = _StderrHandler()
    handler.addFilter(_is_ours)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    level = os.environ.get("THINWIRE_LOG", "info").upper()
    if level not in logging.getLevelNamesMapping():
        level = "INFO"
    logging.basicConfig(level=level, handlers=[handler])
    if level != "DEBUG":
        # At INFO, torch writes figures of its caches when the process ends.
        logging.getLogger("torch").setLevel(logging.WARNING)
