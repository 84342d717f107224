"""Messages and exit codes of the `thinwire` command when its work or its output fails."""

import argparse
import errno
import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import node.cli as cli
from node.cli import doctor
from node.cli.main import main
from node.display.render import make_renderer
from node.telemetry.events import NodeJoined, from_json
from tests.support.homes import without_home
from wire.errors import ConfigError, LinkError, RunError, ThinwireError

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("own_home")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad key"), 2, "thinwire: error: bad key\n"),
        (RunError("over"), 1, "thinwire: error: over\n"),
        (ThinwireError("two\nlines"), 1, "thinwire: error: two lines\n"),
        (KeyboardInterrupt(), 130, "thinwire: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'numpy'", name="numpy.core"),
            2,
            "thinwire: error: the Python package numpy is missing here: install thinwire with its packages, "
            "by `pip install .` in a checkout or `pip install WHEEL`\n",
        ),
        (OSError(5, "Input/output error", "/x"), 1, "thinwire: error: /x: Input/output error\n"),
        *(
            (
                OSError(code, "No", "/x"),
                2,
                "thinwire: error: /x: No; check the path and its permissions, or give another\n",
            )
            for code in (
                errno.EACCES,
                errno.EPERM,
                errno.ELOOP,
                errno.ENAMETOOLONG,
                errno.ENOTDIR,
                errno.EROFS,
            )
        ),
        (
            BaseExceptionGroup("g", [ExceptionGroup("h", [LinkError("gone")]), KeyboardInterrupt()]),
            1,
            "thinwire: error: gone\n",
        ),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "thinwire: interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert run_failing(error, monkeypatch) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("of a\nkind"),
        OSError(9, "Bad file descriptor"),
        ExceptionGroup("tasks", [LinkError("gone"), ValueError("of a kind")]),
    ],
)
def test_a_bug_leaves_its_traceback_in_a_file(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    assert run_failing(error, monkeypatch) == 70
    err = capsys.readouterr().err
    assert err.startswith(f"thinwire: this is a bug: {type(error).__name__}") and err.count("\n") == 1
    (report,) = (tmp_path / "state" / "thinwire").iterdir()
    assert err.rstrip().endswith(f"traceback in {report}")
    text = report.read_text()
    assert "Traceback (most recent call last)" in text and "raise error" in text


@pytest.mark.parametrize("has_home", [True, False], ids=["a folder that takes no file", "no home"])
def test_a_bug_is_reported_beside_temporary_files_where_the_users_folder_takes_none(
    has_home: bool, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    if has_home:
        (tmp_path / "blocked").write_text("a file where a directory is needed")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "blocked"))
    else:
        without_home(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_failing(ValueError("x"), monkeypatch) == 70
    report = Path(capsys.readouterr().err.rstrip().rpartition("traceback in ")[2])
    assert report.parent == tmp_path and "ValueError: x" in report.read_text()


def test_a_bug_whose_traceback_no_disk_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    def full(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run_failing(ValueError("x"), monkeypatch) == 70
    line = "thinwire: this is a bug: ValueError: x; its traceback could not be written\n"
    assert capsys.readouterr().err == line


def run_failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `thinwire doctor` where its work raises `error`."""

    def fail(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    return main(["doctor"])


SERVES = """
import asyncio, grpc.aio
from aiohttp import web
from node.cli.parser import set_up_logging
from wire.v1.control_pb2 import RenewRequest
from wire.v1.control_pb2_grpc import CoordinatorServicer, add_CoordinatorServicer_to_server

class Service(CoordinatorServicer):
    async def Renew(self, request, context):
        raise ValueError("a bug")

async def main():
    set_up_logging()
    server = grpc.aio.server()
    add_CoordinatorServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method, message in (("Renew", b"\\xff" * 9), ("HoldLayers", b""), ("Renew", b"")):
            try:
                await channel.unary_unary(f"/thinwire.wire.v1.Coordinator/{method}")(message)
            except grpc.aio.AioRpcError as error:
                print(error.code())
    await server.stop(None)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for request in (b"GET / HTTP/9.9\\r\\n\\r\\n", b"GET / HTTP/1.1\\r\\n\\r\\n"):
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(request)
        print((await reader.readline()).decode().strip())
    await runner.cleanup()

asyncio.run(main())
"""


def test_messages_that_no_client_sends_leave_no_traceback_and_bugs_do() -> None:
    done = subprocess.run([sys.executable, "-c", SERVES], capture_output=True, text=True, timeout=150)
    assert (done.stdout.count("StatusCode"), done.stdout.count("400 Bad Request")) == (3, 2)
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: a bug" in done.stderr


def test_a_working_directory_that_was_deleted_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_went_away_is_no_error() -> None:
    Path("run.toml").write_text('[run]\nname = "small"\n')
    shell = f"{sys.executable} -m node.cli.main config explain run.toml | head -n 1"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=150)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_the_output_cannot_hold_ends_nothing(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = NodeJoined(node_id="node-a", device="Grafikkarte für Büro \u2581 \udcff", address="")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))

    def run(args: argparse.Namespace) -> int:
        for json_lines in (False, True):
            with make_renderer(json=json_lines) as emit:
                emit(said)
        return 0

    monkeypatch.setattr(doctor, "run", run)
    assert main(["doctor"]) == 0
    plain, json_line = raw.getvalue().decode(encoding).splitlines()
    assert "Grafikkarte f" in plain
    assert from_json(json_line) == said


def test_a_complaint_without_room_changes_no_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "node.cli.main", "status", "absent"]
        assert subprocess.run(command, stderr=full, timeout=150).returncode == 2


def test_closed_streams_and_an_encoding_without_a_paths_characters_are_no_bug(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[data]\npath = "\u2603.txt"\n', encoding="utf-8")
    command = [sys.executable, "-m", "node.cli.main", "data", "preview", str(tmp_path / "a.toml")]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        command, env={**os.environ, **ascii_alone}, capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "PYTHONUTF8=1" in ended.stderr
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command]
    assert subprocess.run(closed, timeout=150).returncode == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        OSError(24, "Too many open files"),
        MemoryError(),
        ExceptionGroup("tasks", [OSError(12, "Cannot allocate memory")]),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
)
def test_limits_of_the_system_are_no_bug(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert run_failing(error, monkeypatch) == 1
    line = capsys.readouterr().err
    assert "ulimit -v" in line and "bug" not in line and line.count("\n") == 1


def test_too_few_addresses_are_refused_before_native_code_aborts() -> None:
    command = 'ulimit -v 500000; exec "$0" -m node.cli.main coordinator absent.toml'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=150
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1 and "ulimit -v" in ended.stderr


def test_what_an_error_quotes_is_shortened(capsys: Capture, tmp_path: Path) -> None:
    name = "x" * 5_000_000
    for text in (
        f"[{name}]",
        f"[run]\n{name} = 1",
        f"{name} = 1",
        f"[run]\nname = '{name}'\nsteps = '{name}'",
    ):
        (tmp_path / "run.toml").write_text(text)
        assert main(["plan", str(tmp_path / "run.toml")]) == 2
        assert len(capsys.readouterr().err) < 1000
    (tmp_path / "run.toml").write_text("")
    for command in (["plan", str(tmp_path / "run.toml"), f"run.{name}=1"], ["join", f"{name}_a"], [name]):
        assert main(command) == 2
        assert len(capsys.readouterr().err) < 7000


def test_windows_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        importlib.reload(cli)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "WSL" in said


ENDS = """
import atexit, sys
from node.cli import main

class Kept:
    def __del__(self):
        print("the interpreter is taken down")

kept = Kept()
main.main = lambda: 3
atexit.register(print, "at exit")
sys.modules.setdefault("grpc", object()) if LOADED else sys.modules.pop("grpc", None)
main.program()
"""


@pytest.mark.parametrize("loaded", [True, False])
def test_the_interpreter_is_not_taken_down_below_threads_of_grpc(loaded: bool) -> None:
    source = f"LOADED = {loaded}\n{ENDS}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=150)
    lines = ["at exit"] if loaded else ["at exit", "the interpreter is taken down"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (3, lines, "")


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "node.cli.parser":
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["/bin/thinwire", "status"]
sys.meta_path.insert(0, Finder())
from node.cli.main import program
"""


def test_ctrl_c_during_the_imports_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
