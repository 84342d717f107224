"""The laboratory's links in the kernel: rates, delays, refusal of links that are off, and cleaning up."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.lab import namespaces, tools
from wire.errors import UserError
from wire.port_mapping import LIFETIME_SECONDS

ROOT = Path(__file__).resolve().parents[2]
IN_A_USER_NAMESPACE = ("--user", "--map-root-user")


TOLERANCE = 0.05
"""Of the lab's own calibration."""
NEARLY = pytest.approx(0.7, abs=0.36)
"""Of a rate: a busy machine may send less than a shaper lets through, never much more. The lab compares
what the kernel's shapers are set to with what was asked for."""


@pytest.fixture(scope="module")
def flags() -> tuple[str, ...]:
    """How private namespaces are made here."""
    try:
        return namespaces.working_flags()
    except UserError as error:
        pytest.skip(f"no laboratory can be built here: {error}")


def inside(flags: tuple[str, ...], case: str, *settings: str) -> dict[str, Any]:
    command = [
        tools.tool("unshare"),
        *flags,
        sys.executable,
        "-m",
        "tests.support.lab_inside",
        case,
        *settings,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def test_a_link_has_the_rate_and_the_tcp_asked_for_in_each_direction(flags: tuple[str, ...]) -> None:
    before = SLOW_START.read_text()
    found = inside(flags, "measured", "rate=16/8", "congestion_control=reno", "slow_start_after_idle=0")
    up, down = found["links"]
    assert (up["sender"], up["asked_mbit"], down["sender"], down["asked_mbit"]) == (0, 16.0, 1, 8.0)
    assert up["share"] == NEARLY and down["share"] == NEARLY
    for link in (up, down):
        assert link["payload_mbit"] == pytest.approx(link["share"] * link["asked_mbit"] * 1448 / 1514)
        assert (link["fault"] is None) == (abs(link["share"] - 1) <= TOLERANCE)
        assert link["congestion_control"] == "reno"
    assert found["slow_start_after_idle"] == ["0"] * 3
    assert SLOW_START.read_text() == before, "in the nodes' namespaces alone"


def test_an_ordinary_user_gets_one_in_a_user_namespace(flags: tuple[str, ...]) -> None:
    own = (*IN_A_USER_NAMESPACE, *(flag for flag in flags if flag not in IN_A_USER_NAMESPACE))
    try:
        tools.call("unshare", *own, "true")
    except UserError as error:
        pytest.skip(f"this kernel allows no user namespaces: {error}")
    assert_no_trace(inside(own, "again"))


def netem(flags: tuple[str, ...]) -> bool:
    """Whether this kernel has it, by a probe that is not the lab's own."""
    script = "ip link add probe0 type veth peer name probe1 && tc qdisc add dev probe0 root netem delay 1ms"
    path = os.pathsep.join((os.environ.get("PATH", ""), *tools.SBIN))
    command = [tools.tool("unshare"), *flags, "env", f"PATH={path}", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, timeout=150, check=False).returncode == 0


@pytest.mark.parametrize("delay", ["auto", "relay"])
def test_a_delay_does_not_reduce_the_rate(flags: tuple[str, ...], delay: str) -> None:
    """With `auto` by netem where the kernel has it: there this test is netem's, too."""
    has_netem = netem(flags)
    if delay == "relay" and not has_netem:
        pytest.skip("`auto` is the relay here")
    found = inside(flags, "measured", "rate=8", "rtt=100", f"delay={delay}")
    assert found["method"] == ("netem" if delay == "auto" and has_netem else "relay")
    for link in found["links"]:
        # What a busy machine adds is not the delay's doing, but it can never be less; twice it would be.
        assert 100.0 <= link["rtt_ms"] < 200.0
        assert link["share"] == NEARLY
    if found["method"] == "relay":
        assert found["relay"]["frames"] > 1000
        assert found["relay"]["missed"] == 0


def test_the_relay_leaves_it_to_a_slow_interface_to_queue(flags: tuple[str, ...]) -> None:
    """What waits there was dropped when the relay's own socket held no more of it."""
    found = inside(flags, "burst")
    assert found["relay"]["refused"] == found["relay"]["missed"] == 0
    assert found["arrived"] == list(range(300))
    # At 8 Mbit/s, half a round trip late.
    assert found["seconds"] > 0.2 + 0.9 * 300 * 1442 / 1e6


def test_interfaces_are_limited_at_both_ends(flags: tuple[str, ...]) -> None:
    shape = "topology=interfaces", "rate=12/8", "rtt=20", "delay=auto"
    found = inside(flags, "measured", *shape, "congestion_control=reno", "slow_start_after_idle=1")
    up, down = found["links"]
    # Out of one node at 12, into the other at 8.
    assert up["asked_mbit"] == down["asked_mbit"] == 8.0
    assert up["share"] == NEARLY and down["share"] == NEARLY
    assert up["congestion_control"] == down["congestion_control"] == "reno"
    assert found["slow_start_after_idle"] == ["1"] * 3


def test_a_link_that_is_off_is_refused(flags: tuple[str, ...]) -> None:
    found = inside(flags, "off", "wrong=20")
    up, down = found["links"]
    assert 1.06 < up["share"] < 2.65
    assert "0 to 1" in up["fault"] and "too much" in up["fault"]
    assert down["share"] == NEARLY
    assert "20 Mbit/s" in found["check"]


def test_networks_follow_each_other_without_a_trace(flags: tuple[str, ...]) -> None:
    assert_no_trace(inside(flags, "again"))


def assert_no_trace(found: dict[str, Any]) -> None:
    assert found["seen"] == [[1, 1], [1, 1], [1, 1]]
    assert found["devices"] == ["lo"]
    assert found["namespaces"] == ""


def test_check_tells_what_this_machine_can_do(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "node.cli.main", "lab", "check", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {"ip", "tc", "unshare", "nsenter", "namespaces", "tbf", "netem", "relay"} <= found.keys()
    assert found["tbf"]["works"] and found["namespaces"]["works"]
    # Whatever does not work says why.
    assert all(finding["detail"] for finding in found.values())


def test_a_machine_finds_its_router_by_upnps_search(flags: tuple[str, ...]) -> None:
    """The search goes out by multicast over a real device, to a router that does not know NAT-PMP."""
    found = inside(flags, "upnp")
    assert (found["by"], found["outside"], found["why_not"]) == ("UPnP", 7001, "")
    assert found["mapped"] == {"7001": ["192.168.7.2", 7001, LIFETIME_SECONDS]} and found["left"] == {}
    assert found["searches"]
