"""An argument parser whose mistakes are one line each, with the nearest match."""

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from node.config.join_options import MOST_DEVICES
from wire.errors import UserError


class UsageError(UserError):
    """The command line does not parse."""


class Parser(argparse.ArgumentParser):
    """As argparse's, but mistakes raise `UsageError` and unknown commands and options get a suggestion."""

    def __init__(self, **kwargs: Any) -> None:
        # An abbreviation that works today is ambiguous once another option starts alike.
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse lists every choice; a user who mistyped wants the one that was meant.
        if action.choices is not None and value not in action.choices:
            what = "command" if isinstance(action, argparse._SubParsersAction) else action.dest
            self.error(f"unknown {what} {value!r}{nearest(str(value), map(str, action.choices))}")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line.

        Overrides (`key=value`) may stand anywhere after the command. Raises UsageError.
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


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the known names when nothing is near."""
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else f"; known: {', '.join(known)}"


def check_devices(args: argparse.Namespace) -> None:
    """Raise UsageError unless --device, --gpus and --tensor-parallel make sense together."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", args.device):
        raise UsageError(f"--device must be auto, cpu or cuda:N, got {args.device!r}")
    if not 1 <= args.gpus <= MOST_DEVICES:
        raise UsageError(f"--gpus must be 1 to {MOST_DEVICES}, got {args.gpus}")
    if args.tensor_parallel < 1 or args.gpus % args.tensor_parallel:
        raise UsageError(
            f"--tensor-parallel must be at least 1 and divide --gpus {args.gpus}, got {args.tensor_parallel}"
        )
