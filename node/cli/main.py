"""The `thinwire` command. Each subcommand is a module beside this one with `add_parser` and `run`.

Exit codes: 0: done; 1: the run, a link or the other side failed; 2: bad input; 130: stopped by Ctrl-C. An
error is one line on stderr. An unexpected exception is a bug: its traceback goes to a file that stderr names,
and the exit code is 70.
"""

import atexit
import contextlib
import errno
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from node.cli.parser import Parser
from node.display.terminal import discard, open_closed_streams, say, take_any_text
from wire.errors import MOST_LINE, MemoryExhaustedError, ThinwireError, UserError, leaves, shortened
from wire.identity.files import state_folder
from wire.version import VERSION

COMMANDS = (
    *("demo", "coordinator", "join", "resume", "set", "status", "top", "dashboard"),
    *("chat", "serve", "eval", "sample", "trace", "compare", "export", "token", "evict", "recover"),
    *("config", "plan", "data", "lab", "doctor", "completion"),
)
"""The modules of the commands, in the order of the help."""
OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of stdout itself, such as a full disk or a closed terminal. Errors of files have a file name."""
PATH_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR),
)
"""Errors of a path that cannot be used, so that the user must give another or change its permissions."""
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


def program() -> NoReturn:
    """Run this process's command line, and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # see `node.cli`
    code = main()
    if "grpc" not in sys.modules:
        sys.exit(code)
    # A thread of gRPC may call into an interpreter that is being taken down, which crashes the process after
    # a run that went well. So it is not taken down.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line without the program's name (by default, of this process). Returns the exit code."""
    # Silence gRPC's log lines on stderr. gRPC reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    open_closed_streams()
    take_any_text(sys.stdout, sys.stderr)
    try:
        argv = sys.argv[1:] if argv is None else argv
        if argv[:1] == ["help"]:
            argv = [*argv[1:], "--help"]
        args = build_parser(argv[0] if argv else "").parse(argv)
        _refuse_missing_directory()
        _refuse_small_address_space(1000 if argv[0] in _STARTS_NATIVE_THREADS else 300)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output is gone.
        discard(sys.stdout)
        return 1
    except ThinwireError as error:
        return _complain(f"error: {error}", error.exit_code)
    except BaseExceptionGroup as group:
        return _group_exit(group)
    except OSError as error:
        if error.filename is None:
            if error.errno not in OUTPUT_ERRORS:
                return _bug(error)
            discard(sys.stdout)
            return _complain(f"error: cannot write output: {error.strerror}", 1)
        path = shortened(os.fsdecode(error.filename))
        if error.errno in PATH_ERRORS:
            advice = "check the path and its permissions, or give another"
            return _complain(f"error: {path}: {error.strerror}; {advice}", UserError.exit_code)
        return _complain(f"error: {path}: {error.strerror}", 1)
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        if encoding == "utf-8":
            return _bug(error)
        name = shortened(ascii(error.object))
        advice = "set PYTHONUTF8=1 or a UTF-8 locale, such as LC_ALL=C.UTF-8"
        return _complain(
            f"error: {name} is no path in the encoding {encoding}: {advice}", UserError.exit_code
        )
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "kernels", "node", "wire"):
            return _bug(error)
        advice = "install thinwire with its packages, by `pip install .` in a checkout or `pip install WHEEL`"
        return _complain(
            f"error: the Python package {package} is missing here: {advice}", UserError.exit_code
        )
    except Exception as error:  # a bug ends in one line too
        return _bug(error)


def build_parser(command: str = "") -> Parser:
    """The parser for all commands, or for one command, whose module alone is then imported. `completion`
    needs all commands.
    """
    description = "Train language models across machines joined only by a slow network."
    parser = Parser(prog="thinwire", description=description)
    parser.add_argument("--version", action="version", version=f"thinwire {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    alone = command in COMMANDS and command != "completion"
    for name in (command,) if alone else COMMANDS:
        import_module(f"{__package__}.{name}").add_parser(commands)
    return parser


def _group_exit(group: BaseExceptionGroup[BaseException]) -> int:
    """Show the first error meant for users, because tasks of a group fail together."""
    parts = list(leaves(group))
    foreseen = [error for error in parts if isinstance(error, ThinwireError)]
    if foreseen and all(isinstance(error, (ThinwireError, KeyboardInterrupt)) for error in parts):
        return _complain(f"error: {foreseen[0]}", foreseen[0].exit_code)
    if all(isinstance(error, KeyboardInterrupt) for error in parts):
        return _complain("interrupted", EXIT_INTERRUPTED)
    return _bug(group)


def _refuse_missing_directory() -> None:
    """Raise UserError if the working directory was deleted, where torch aborts the process."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error.strerror}): change to another"
        ) from None


_STARTS_NATIVE_THREADS = ("demo", "coordinator", "join", "resume", "lab")


def _refuse_small_address_space(least: int) -> None:
    """Raise MemoryExhaustedError if the limit of the address space is below `least` MB.

    Below it, threads of gRPC, torch and numpy abort the process or wait for ever, and no exception can be
    caught: a coordinator aborts with 500 MB and runs with 800, numpy aborts with 120, and a plan hangs with
    200.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < least * 10**6:
        raise MemoryExhaustedError(
            f"this process is limited to {limit / 1e6:.0f} MB of address space and needs at least {least} "
            "MB: raise the limit (`ulimit -v`)"
        )


_LIMITS = (
    *("can't start new thread", "Resource temporarily unavailable"),
    *("failed to map segment", "allocate memory"),
)
"""Parts of messages about the system's limits, for which there is no exception class."""


def _is_out_of_room(error: BaseException) -> bool:
    """Whether the system refused threads, memory or files."""
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EMFILE):
        return True
    if isinstance(error, (RuntimeError, ImportError, OSError)):
        return any(sign in str(error) for sign in _LIMITS)
    return isinstance(error, MemoryError)


def _bug(error: BaseException) -> int:
    """Write the traceback to a file and print one line that names it. The system's limits are not bugs."""
    if refused := next(filter(_is_out_of_room, leaves(error)), None):
        reason = " ".join(str(refused).split()) or "out of memory"
        return _complain(
            f"error: the system gives this process no more threads, memory or files ({reason}): raise its "
            "limits (`ulimit -v`, `-u`, `-n`, or those of its container or service), or stop other programs",
            MemoryExhaustedError.exit_code,
        )
    report = "".join(traceback.format_exception(error))
    summary = " ".join(str(error).split()) or "no message"
    line = f"this is a bug: {type(error).__name__}: {summary}"
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (_crash_directory, lambda: Path(tempfile.gettempdir())):
        # UserError: the user has no home directory.
        with contextlib.suppress(OSError, UserError):
            path = folder() / name
            path.write_text(report, encoding="utf-8", errors="backslashreplace")
            return _complain(f"{line}; traceback in {path}", EXIT_BUG)
    return _complain(f"{line}; its traceback could not be written", EXIT_BUG)


def _crash_directory() -> Path:
    directory = state_folder()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _complain(message: str, code: int) -> int:
    say(f"thinwire: {shortened(' '.join(message.splitlines()), MOST_LINE)}")
    return code


if __name__ == "__main__":
    program()
