"""Start Python processes by forking one that has imported everything: a tenth of the usual time.

    with Prefork() as prefork:
        run = Run(tmp_path, config, launch=prefork.popen)

Each command line, a program of `PROGRAMS` or a script, runs in its own process, which can be killed and
frozen like any other. One difference: /proc/PID/environ shows the template's environment, so `Run.survivors`
does not find it.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import torch

from tests.support.compile_codecs import use
from tests.support.paths import ROOT, python_path

PROGRAMS = (
    "node.cli.main",
    "node.stage.worker",
    "scripts.experiments.paced_churn",
    "tests.support.apart_node",
    "tests.support.faults",
    "tests.support.hasty",
    "tests.support.impatient_node",
    "tests.support.liar",
    "tests.support.slow_node",
    "tests.support.strangers",
)
"""Modules that `-m` can start: their `main` reads `sys.argv` and returns an exit code."""
USED_LATER = (
    *(
        "encodings.ascii",
        "encodings.idna",
        "encodings.utf_8_sig",
        "grpc.aio",
        "grpc._channel",
        "grpc._server",
    ),
    *("torch.utils._device", "node.cli.importing", "node.cli.run_output", "node.coordinator.rebuild"),
    *("node.display.loggers", "tests.support.faults", "wire.codecs.raw"),
)
"""Modules that a process imports once it runs, beside those that `node.cli.main` does."""
DESCRIPTORS_VARIABLE = "THINWIRE_TEST_DESCRIPTORS"
"""In a process's environment: the most descriptors that it may have."""
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 256 * 1024
_IMPORT_SECONDS = 180.0
_FORK_SECONDS = 60.0
_READY = b"ready"


class Forked:
    """One process, with the part of `subprocess.Popen` that the harness and the program use."""

    def __init__(self, pid: int, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            ends = select.poll()
            ends.register(self._pidfd, select.POLLIN)
            if not ends.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("thinwire", timeout or 0.0)
            self._ended(os.waitpid(self.pid, 0)[1])
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)


class Prefork:
    """The template process, from entry to exit. The first fork waits for its imports."""

    def __init__(self) -> None:
        self._ready = False

    def __enter__(self) -> Self:
        # Forked processes become children of this one, which can then wait for them.
        _become_subreaper()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fault_prefork", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                # A library's thread pool would not survive the fork; gRPC reads its verbosity when imported.
                env={
                    **os.environ,
                    "PYTHONPATH": python_path(),
                    "OPENBLAS_NUM_THREADS": "1",
                    "GRPC_VERBOSITY": "ERROR",
                },
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._requests.close()
        try:
            self._template.wait(_FORK_SECONDS)
        except subprocess.TimeoutExpired:
            self._template.kill()
            self._template.wait()

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        text: bool,
        start_new_session: bool = True,
        preexec_fn: Callable[[], None] | None = None,
    ) -> Forked:
        """Called in place of `subprocess.Popen`, for `python -m PROGRAM ...` and `python FILE ...`."""
        assert text and start_new_session, "a forked process speaks text, in a session of its own"
        assert preexec_fn is None, "a forked template cannot run a function of this process"
        python, *words = command
        assert python == sys.executable and (words[0] != "-m" or words[1] in PROGRAMS), command
        request = {
            "command": words,
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
        }
        with contextlib.ExitStack() as theirs:
            sources: list[int] = []
            ours: list[IO[str] | None] = []
            for number, wanted in enumerate((stdin, stdout, stderr)):
                source, end = _descriptor(number, wanted, sources, theirs)
                sources.append(source)
                ours.append(end)
            self._wait_ready()
            socket.send_fds(self._requests, [json.dumps(request).encode()], sources)
            pid = int.from_bytes(self._requests.recv(8), "little")
        return Forked(pid, ours[0], ours[1])

    def _wait_ready(self) -> None:
        if not self._ready:
            self._requests.settimeout(_IMPORT_SECONDS)
            assert self._requests.recv(len(_READY)) == _READY, "the template did not start"
            self._requests.settimeout(_FORK_SECONDS)
            self._ready = True


def _descriptor(
    number: int, wanted: IO[bytes] | int | None, sources: list[int], theirs: contextlib.ExitStack
) -> tuple[int, IO[str] | None]:
    """The child's descriptor `number`, in the sense of `subprocess.Popen`, and our end if it is a pipe.

    `theirs` closes what is opened for the child alone.
    """
    if wanted is None:
        return number, None
    if wanted == subprocess.STDOUT:
        return sources[1], None
    if wanted == subprocess.DEVNULL:
        source = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, source)
        return source, None
    if wanted == subprocess.PIPE:
        ends = os.pipe()
        source, own = ends if number == 0 else ends[::-1]
        theirs.callback(os.close, source)
        return source, os.fdopen(own, "w" if number == 0 else "r", encoding="utf-8")
    return wanted if isinstance(wanted, int) else wanted.fileno(), None


def _become_subreaper() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of forked processes")


# ---- the template


def _serve(requests: socket.socket) -> None:
    """Fork for every request until the other end closes; then kill what still runs."""
    _import_everything()
    # A garbage collection in a forked process would touch, and so copy, the pages of all modules.
    gc.collect()
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would be lost in the fork"
    forked: list[int] = []
    # The other end may close at any time.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        requests.send(_READY)
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not message:
                break
            pid = _fork(requests, json.loads(message), list(descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
            forked = [*_running(forked), os.pidfd_open(pid)]
            requests.send(pid.to_bytes(8, "little"))
    for pidfd in forked:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _running(pidfds: list[int]) -> list[int]:
    """Those whose process has not ended; closes the others."""
    ends = select.poll()
    for pidfd in pidfds:
        ends.register(pidfd, select.POLLIN)
    ended = {pidfd for pidfd, _ in ends.poll(0)}
    for pidfd in ended:
        os.close(pidfd)
    return [pidfd for pidfd in pidfds if pidfd not in ended]


def _fork(requests: socket.socket, request: dict[str, object], descriptors: list[int]) -> int:
    """The pid of an orphaned grandchild that runs the request."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        os.waitpid(child, 0)
        pid = int.from_bytes(os.read(read_end, 8), "little")
        os.close(read_end)
        return pid
    os.close(read_end)
    if (grandchild := os.fork()) != 0:
        os.write(write_end, grandchild.to_bytes(8, "little"))
        os._exit(0)
    os.close(write_end)
    requests.close()
    os._exit(_run(request, descriptors))


def _run(request: dict[str, object], descriptors: list[int]) -> int:
    """Run the requested command in this process; returns its exit code."""
    try:
        os.setsid()
        os.chdir(str(request["cwd"]))
        environment, words = request["environment"], request["command"]
        assert isinstance(environment, dict) and isinstance(words, list)
        os.environ.clear()
        os.environ.update(environment)
        for target, source in enumerate(descriptors):
            os.dup2(source, target)
        for source in set(descriptors) - {0, 1, 2}:
            os.close(source)
        if most := os.environ.pop(DESCRIPTORS_VARIABLE, ""):
            resource.setrlimit(resource.RLIMIT_NOFILE, (int(most), int(most)))
        faulthandler.enable()
        try:
            code = _execute(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        sys.stdout.flush()
        return code
    except BaseException:
        traceback.print_exc()
        return 99


def _execute(words: list[str]) -> int:
    """Do what Python does with these arguments."""
    if words[0] == "-m":
        sys.argv = words[1:]
        code: int = importlib.import_module(words[1]).main()
        return code
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _import_everything() -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    import node.cli.coordinator
    import node.cli.join
    import node.cli.main
    import node.cli.run_directory
    import node.display.render
    import node.processes.coordinator
    import node.processes.node
    import node.stage.worker
    from node.config.schema import RunConfig
    from node.run_file import loader
    from node.stage import machine_info
    from wire.identity.credentials import key_to_pem, make_csr

    for name in USED_LATER:
        importlib.import_module(name)
    node.cli.main.build_parser()  # imports every command
    # What every process would read and import first: a run's settings, how to sign a request.
    loader.from_json(loader.to_json(RunConfig()))
    make_csr(key_to_pem(ec.generate_private_key(ec.SECP256R1())))
    # Hundreds of nodes start: each would multiply large matrices for a quarter of a second.
    machine_info.MEASURE_SECONDS, machine_info.MATRIX = 0.01, 256
    # Many of them pack, and would each load the compiled loops. A second thread would be lost in the fork.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("tah", "fixed-8"):
        use(name)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
