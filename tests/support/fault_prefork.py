"""Starts `thinwire` processes by forking one that has imported everything: a tenth of the usual time.

    with Prefork() as prefork:
        run = Run(tmp_path, config, launch=prefork.popen)

What runs is the same command line in a process of its own, which can be killed and frozen like any other. The
one difference: /proc/PID/environ shows the template's environment, so `Run.survivors` does not see it.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
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

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 256 * 1024
_FORK_SECONDS = 30.0


class Forked:
    """One process, with the part of `subprocess.Popen`'s interface that the harness uses."""

    def __init__(self, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = stdout
        self._returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended(status)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self._returncode is None:
            ends = select.poll()
            ends.register(self._pidfd, select.POLLIN)
            if not ends.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("thinwire", timeout or 0.0)
            self._ended(os.waitpid(self.pid, 0)[1])
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, status: int) -> None:
        self._returncode = os.waitstatus_to_exitcode(status)
        os.close(self._pidfd)


class Prefork:
    """The template process, from entry to exit."""

    def __enter__(self) -> Self:
        # Forked processes are handed over to this one, which can then wait for them.
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
                    "PYTHONPATH": str(ROOT),
                    "OPENBLAS_NUM_THREADS": "1",
                    "GRPC_VERBOSITY": "ERROR",
                },
            )
        self._requests.settimeout(_FORK_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._requests.close()
        self._template.wait(_FORK_SECONDS)

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: IO[bytes],
        cwd: Path,
        env: Mapping[str, str],
        text: bool,
        start_new_session: bool,
        preexec_fn: Callable[[], None] | None,
    ) -> Forked:
        """Called by the harness in place of `subprocess.Popen`."""
        assert (stdin, stdout, text, start_new_session) == (subprocess.DEVNULL, subprocess.PIPE, True, True)
        assert preexec_fn is None, "a forked template cannot run a function of this process"
        assert list(command[:3]) == [sys.executable, "-m", "node.cli.main"]
        request = {"arguments": list(command[3:]), "cwd": str(cwd), "environment": dict(env)}
        read_end, write_end = os.pipe()
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [write_end, stderr.fileno()])
        finally:
            os.close(write_end)
        pid = int.from_bytes(self._requests.recv(8), "little")
        return Forked(pid, os.fdopen(read_end, encoding="utf-8"))


def _become_subreaper() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the reaper of forked processes")


# ---- the template


def _serve(requests: socket.socket) -> None:
    """Fork for every request until the other end closes; then take along whatever still runs."""
    _import_everything()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would be lost in the fork"
    forked: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 2)
        if not message:
            break
        pid = _fork(requests, json.loads(message), list(descriptors))
        for descriptor in descriptors:
            os.close(descriptor)
        forked.append(os.pidfd_open(pid))
        requests.send(pid.to_bytes(8, "little"))
    for pidfd in forked:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _fork(requests: socket.socket, request: dict[str, object], descriptors: list[int]) -> int:
    """The pid of a grandchild that is no longer ours: its parent is gone."""
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
    """Become the `thinwire` command that was asked for; returns its exit code."""
    from node.cli.main import main

    try:
        os.setsid()
        os.chdir(str(request["cwd"]))
        environment, arguments = request["environment"], request["arguments"]
        assert isinstance(environment, dict) and isinstance(arguments, list)
        os.environ.clear()
        os.environ.update(environment)
        for target, source in enumerate(descriptors, start=1):
            os.dup2(source, target)
            os.close(source)
        faulthandler.enable()
        code = main(arguments)
        sys.stdout.flush()
        return code
    except BaseException:
        traceback.print_exc()
        return 99


def _import_everything() -> None:
    import grpc.aio  # noqa: F401  # imported for the processes to be forked

    import node.cli.coordinator
    import node.cli.join
    import node.coordinator.main
    import node.stage.main
    import node.telemetry.render  # noqa: F401  # the same


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
