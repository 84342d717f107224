"""Check what the lab can use on this machine: programs, namespaces, shapers, delay."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node import program
from node.lab import namespaces, tools
from node.lab.profile import Profile
from node.lab.relay import PACKET_VNET_HDR, SOL_PACKET
from node.lab.topology import LAB
from wire.errors import RunError, ThinwireError, UserError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that the lab uses, and whether it works here."""

    name: str
    works: bool
    detail: str
    needed: bool
    """Whether the lab cannot run without it."""


def delay_method(wanted: str) -> str:
    """`netem` or `relay`. `auto` chooses netem where the kernel has it. Call it inside the private
    namespaces.

    Raises RunError if the method does not work here, or for `auto` if neither works.
    """
    netem = _try(_netem)
    if wanted != "relay" and netem is None:
        return "netem"
    relay = _try(_packet_sockets)
    if wanted != "netem" and relay is None:
        return "relay"
    reasons = {"netem": [netem], "relay": [relay]}.get(wanted, [netem, relay])
    raise RunError(
        f"no delay is possible here ({'; '.join(map(str, reasons))}): use delays of 0, or another kernel"
    )


def congestion_control(wanted: str) -> str:
    """`wanted`, or the kernel's default if it is empty. Raises RunError for one that the kernel does not
    have."""
    settings = Path("/proc/sys/net/ipv4")
    if not wanted:
        return (settings / "tcp_congestion_control").read_text().strip()
    known = (settings / "tcp_available_congestion_control").read_text().split()
    if wanted not in known:
        raise RunError(
            f"this kernel has no congestion control {wanted!r}: set network.congestion_control to one of "
            f"{', '.join(sorted(known))}, or load its module"
        )
    return wanted


def check_devices(profile: Profile) -> None:
    """Raise UserError if a profile's nodes need GPUs that are not here."""
    stages = profile.config.pipeline.stages
    if profile.lab.device != "cuda":
        return
    import torch

    devices, needed = torch.cuda.device_count(), profile.lab.gpus or stages
    if devices < needed:
        many = "a GPU" if needed == 1 else f"{needed} GPUs{', one a stage' if needed == stages else ''}"
        raise UserError(
            f"{profile.file} needs {many}, and torch {torch.__version__} sees "
            f'{devices or "none"} here: use a machine that has them, or a profile with lab.device = "cpu"'
        )


def find_in_private() -> list[Finding]:
    """Check what works inside the private namespaces."""
    findings = []
    for name, check, needed in (
        ("tbf", _tbf, True),
        ("netem", _netem, False),
        ("relay", _packet_sockets, False),
        ("forwarding", _forwarding, False),
    ):
        problem = _try(check)
        words = problem or _WORKS[name]
        findings.append(Finding(name=name, works=problem is None, detail=words, needed=needed))
    return findings


def find_outside() -> list[Finding]:
    findings = [
        _found(name, partial(tools.tool, name), needed=name in tools.PACKAGES)
        for name in (*tools.PACKAGES, *tools.FOR_REACH)
    ]
    if all(finding.works for finding in findings if finding.needed):
        findings.append(_found("namespaces", _namespaces, needed=True))
    try:
        import matplotlib

        findings.append(Finding(name="plots", works=True, detail=matplotlib.__version__, needed=False))
    except ImportError:
        detail = "matplotlib is missing: pip install 'thinwire[lab]'"
        findings.append(Finding(name="plots", works=False, detail=detail, needed=False))
    return findings


def _found(name: str, look: Callable[[], str], *, needed: bool) -> Finding:
    try:
        return Finding(name=name, works=True, detail=look(), needed=needed)
    except UserError as error:
        return Finding(name=name, works=False, detail=str(error), needed=needed)


def _namespaces() -> str:
    rootless = "--user" in namespaces.working_flags()
    return "rootless, in a user namespace" if rootless else "as root, without a user namespace"


def ask_private() -> list[Finding]:
    """Run `find_in_private` inside new private namespaces."""
    command = [tools.tool("unshare"), *namespaces.working_flags(), *program("lab.support")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise RunError("the checks inside private namespaces did not end within 60 s") from None
    if done.returncode:
        raise RunError(f"the checks inside private namespaces failed: {' '.join(done.stderr.split())[-400:]}")
    return [Finding(**entry) for entry in json.loads(done.stdout)]


_WORKS = {
    "tbf": "shapes links",
    "netem": "delays packets in the kernel",
    "relay": "packet sockets with batched segments: the lab's own relay can delay",
    "forwarding": 'the lab can route, for network.topology = "interfaces" without delay',
}


def _try(check: Callable[[], None]) -> str | None:
    """Why a check fails, or None."""
    try:
        check()
    except ThinwireError as error:
        return str(error)
    except OSError as error:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error)
    return None


def _tbf() -> None:
    _qdisc("tbf", "rate", "100mbit", "burst", "65536", "limit", "200000")


def _netem() -> None:
    _qdisc("netem", "delay", "1ms")


def _qdisc(kind: str, *arguments: str) -> None:
    """Add the qdisc to a temporary device."""
    tools.ip(LAB, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    try:
        tools.tc(LAB, "qdisc", "add", "dev", "probe0", "root", kind, *arguments)
    finally:
        tools.ip(LAB, "link", "del", "probe0")


def _packet_sockets() -> None:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as probe:
        probe.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)


def _forwarding() -> None:
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _main() -> None:
    namespaces.furnish()
    sys.stdout.write(json.dumps([vars(finding) for finding in find_in_private()]))


if __name__ == "__main__":
    _main()
