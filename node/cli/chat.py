"""`thinwire chat RUN_DIR`: talk to a snapshot's model in transformers' chat."""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from node.cli.parser import UsageError
from node.cli.serve import (
    TRANSFORMERS,
    check_installed,
    exported,
    has_chat_template,
    server_command,
    server_environment,
)
from node.cli.snapshot_model import add_snapshot_arguments
from wire.errors import DataError, RunError

HOST = "127.0.0.1"
START_SECONDS = 600.0
"""How long the server may take to start."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a snapshot's model")
    add_snapshot_arguments(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="a system message")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    check_installed(TRANSFORMERS)
    folder = exported(args)
    if not has_chat_template(folder):
        raise UsageError(
            f"{args.run_dir} trains on plain text, without a chat template: use `thinwire sample`, or set "
            "data.chat_template or data.response_marker"
        )
    if args.system:
        check_system_message(folder, args.system)
    with serving(folder) as url:
        command = [sys.executable, "-m", "transformers.cli.transformers", "chat", folder.name, url]
        command += ["--save-folder", str(folder.parent / "chats")]
        command += ["--system-prompt", args.system] if args.system else []
        return subprocess.run(command, cwd=folder.parent, env=client_environment()).returncode


def check_system_message(folder: Path, text: str) -> None:
    """Raise UsageError if an exported model's chat template refuses or leaves out a system message."""
    from node.data.chat import load_chat_encoder

    encoder = load_chat_encoder(str(folder), "")
    plain = encoder.question("a")
    try:
        written = encoder.question("a", system=text) != plain
    except DataError as error:
        raise UsageError(f"{error}; leave out --system") from None
    if not written:
        raise UsageError("the chat template leaves out system messages: leave out --system")


def client_environment() -> dict[str, str]:
    """The environment of the chat client. It must not be offline, because huggingface_hub would then also
    refuse the server on this machine, nor reach that server through a proxy."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in server_environment().items() if name not in offline}
    return environment | {"no_proxy": "*", "NO_PROXY": "*"}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run transformers' server for the model on a free local port until the chat ends. Yields its URL."""
    from node.coordinator.ports import free_port

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # the server has a session of its own, and would stay
    port = free_port(HOST, 0, "free a port")
    log = folder.parent / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            server_command(TRANSFORMERS, folder.name, HOST, port),
            cwd=folder.parent,
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C stops an answer, not the server
        )
    url = f"http://{HOST}:{port}"
    try:
        _wait_until_ready(server, url, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def _wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        try:
            server.wait(0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError, urllib.error.URLError):
                opener.open(f"{url}/health", timeout=5).close()
                return
        else:
            raise RunError(f"the model's server ended before it answered; its output is in {log}")
    raise RunError(f"the model's server did not answer within {START_SECONDS:.0f} s; its output is in {log}")
