"""Call the programs and system calls of the lab: `ip`, `tc`, `nft`, `unshare`, `nsenter`, `setns`."""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from node.lab.topology import LAB, Device
from wire.errors import RunError, UserError

Result = TypeVar("Result")

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
FOR_REACH = {"nft": "nftables"}
"""Needed only where the lab builds NAT and firewalls."""
SBIN = ("/usr/sbin", "/sbin")
"""Debian's folders for these programs, which an ordinary user's PATH lacks."""
SECONDS = 20.0
"""Time limit of each of these programs."""
NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def tool(name: str) -> str:
    """The program's path. Raises UserError that names the package."""
    path = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *SBIN)))
    if path is None:
        package = {**PACKAGES, **FOR_REACH}[name]
        raise UserError(
            f"the lab needs the program {name!r}, which is not here: install {package} "
            f"(Debian and Ubuntu: apt install {package})"
        )
    return path


def call(name: str, *arguments: str) -> str:
    """Run one of `PACKAGES`' programs and return its output. Raises RunError with its stderr."""
    command = [tool(name), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"`{name} {' '.join(arguments)}` did not end within {SECONDS:g} s") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise RunError(f"`{name} {' '.join(arguments)}` failed: {words}")
    return done.stdout


def ip(namespace: str, *arguments: str) -> str:
    return call("ip", *_into(namespace), *arguments)


def tc(namespace: str, *arguments: str) -> str:
    return call("tc", *_into(namespace), *arguments)


def root_qdisc(device: Device) -> dict[str, Any] | None:
    """The device's shaper as `tc -s -j qdisc` describes it; None if it has none."""
    reply = tc(device.namespace, "-s", "-j", "qdisc", "show", "dev", device.name)
    for qdisc in json.loads(reply or "[]"):
        if qdisc.get("root") and qdisc.get("kind") == "tbf":
            return dict(qdisc)
    return None


def sent_bytes(device: Device) -> int:
    """Bytes that have left the device.

    The shaper counts them with every packet's header. Without a shaper the device counts them, and takes a
    batch of segments as one packet.
    """
    if (qdisc := root_qdisc(device)) is not None:
        return int(qdisc["bytes"])
    reply = json.loads(ip(device.namespace, "-s", "-j", "link", "show", "dev", device.name))
    return int(reply[0]["stats64"]["tx"]["bytes"])


def inside(namespace: str, work: Callable[[], Result]) -> Result:
    """Run `work` on a thread inside the network namespace. Sockets that it opens stay in the namespace."""
    if namespace == LAB:
        return work()

    def run() -> Result:
        _enter(namespace)
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _enter(namespace: str) -> None:
    """Move this thread into a network namespace. (`os.setns` exists from Python 3.12 on.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter network namespace {namespace}: {os.strerror(number)}")
    finally:
        os.close(handle)


def prefix(namespace: str) -> tuple[str, ...]:
    """The prefix of a command that runs in the network namespace."""
    return (tool("nsenter"), f"--net={NAMESPACES / namespace}")


def _into(namespace: str) -> Sequence[str]:
    return () if namespace == LAB else ("-n", namespace)
