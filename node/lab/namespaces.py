"""Private network, mount and process namespaces for the whole lab, held by one process.

The lab starts itself again as the first process of a process namespace. When that process ends, the kernel
kills everything in the namespace and removes its network namespaces, its devices, and the memory file system
at /run with all run directories. The process is killed with its parent, so nothing survives a `kill -9` of
either. The lab cannot see the host's network and never changes it.

Ordinary users need user namespaces, which the kernel must allow. Root does not need them.
"""

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from node import program
from node.lab.tools import NAMESPACES, SBIN, call, tool
from wire.errors import RunError, UserError

STOP_SECONDS = 20.0
"""Seconds after which the lab is killed if it has been asked to end."""
SCRATCH = Path("/run/thinwire")
_PR_SET_PDEATHSIG = 1
_FLAGS = ("--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
_AS_ROOT_OF_ITS_OWN = ("--user", "--map-root-user")
_PROBE = "mount -t tmpfs tmpfs /run && ip link add probe0 type veth peer name probe1"


def working_flags() -> tuple[str, ...]:
    """The first of `unshare`'s options that works here. Raises UserError that says what failed."""
    tool("ip"), tool("tc"), tool("nsenter")
    candidates: list[tuple[str, ...]] = [(*_AS_ROOT_OF_ITS_OWN, *_FLAGS)]
    if os.geteuid() == 0:
        candidates.insert(0, _FLAGS)
    complaints = []
    for flags in candidates:
        try:
            path = os.pathsep.join((os.environ.get("PATH", ""), *SBIN))
            call("unshare", *flags, "env", f"PATH={path}", "sh", "-c", _PROBE)
        except RunError as error:
            complaints.append(str(error).partition("failed: ")[2] or str(error))
        else:
            return flags
    raise UserError(
        f"this kernel or container allows no private network namespaces ({'; '.join(complaints)}): run the "
        "lab as root, or allow user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )


def run_inside(arguments: Sequence[str]) -> int:
    """Run `thinwire ARGUMENTS` in private namespaces and return its exit code.

    Ctrl-C and SIGTERM close its stdin, which asks it to end. Processes left after `STOP_SECONDS` are killed.
    """
    flags = working_flags()
    command = [tool("unshare"), *flags, *program("cli.main"), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=_die_with_parent
    ) as child:
        assert child.stdin is not None

        def terminate(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, terminate)
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.stdin.close()
            try:
                # It reports the interruption itself.
                return child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGTERM, before)
            if child.poll() is None:
                child.kill()


def furnish() -> None:
    """Mount a private /run, so that named network namespaces leave no trace. Must be called first inside."""
    mount("tmpfs", "/run")
    NAMESPACES.mkdir()
    SCRATCH.mkdir(mode=0o700)


def mount(kind: str, target: str) -> None:
    """Mount an empty file system of `kind` (mount(2)). Raises RunError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind.encode(), target.encode(), kind.encode(), 0, None) != 0:
        raise RunError(f"cannot mount {kind} at {target}: {os.strerror(ctypes.get_errno())}")


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. The child calls it before exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
