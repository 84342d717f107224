"""A private place for the whole laboratory: network, mount and process namespaces that one process holds.

The lab runs again as the first process of a process namespace. When that process ends, however it ends, the
kernel kills everything in the namespace, and with the last process go the network namespaces, their devices
and a memory file system at /run with all run directories. It is itself killed when its parent is, and the
parent when the user's command is, so nothing outlives a `kill -9` of any of them. The host's network is never
touched: the lab cannot see it.

An ordinary user gets there by a user namespace, where the kernel allows those; root does without.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from node.lab.tools import NAMESPACES, SBIN, call, tool
from wire.errors import RunError, UserError

STOP_SECONDS = 20.0
"""How long the lab may take to end in good order once it is asked to."""
SCRATCH = Path("/run/thinwire")
_PR_SET_PDEATHSIG = 1
_FLAGS = ("--net", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
_AS_ROOT_OF_ITS_OWN = ("--user", "--map-root-user")
_PROBE = "mount -t tmpfs tmpfs /run && ip link add probe0 type veth peer name probe1"


def working_flags() -> tuple[str, ...]:
    """`unshare`'s options that work here, the fewest first. Raises UserError that says what failed."""
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
    """Run `thinwire ARGUMENTS` in a private place and return its exit code.

    Ctrl-C and SIGTERM ask it to end in good order, by the end of its stdin; whoever is left is killed.
    """
    flags = working_flags()
    command = [tool("unshare"), *flags, sys.executable, "-m", "node.cli.main", *arguments]
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
                # Its own words are about the same interruption.
                return child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGTERM, before)
            if child.poll() is None:
                child.kill()


def furnish() -> None:
    """Called first in the private place: a /run of its own, so that named namespaces leave no trace."""
    mount("tmpfs", "/run")
    NAMESPACES.mkdir()
    SCRATCH.mkdir(mode=0o700)


def mount(kind: str, target: str) -> None:
    """Mount an empty file system of `kind` (mount(2)). Raises RunError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(kind.encode(), target.encode(), kind.encode(), 0, None) != 0:
        raise RunError(f"cannot mount {kind} at {target}: {os.strerror(ctypes.get_errno())}")


def _die_with_parent() -> None:
    """In the child, before it becomes another program: the kernel kills it when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
