"""Where a coordinator can be reached: the addresses that go into its join line."""

import socket

import pytest

from node.coordinator import ports
from node.coordinator.ports import own_addresses, own_hosts, where_reached
from wire import interfaces


def has(
    monkeypatch: pytest.MonkeyPatch,
    *,
    routes: tuple[str, ...] = (),
    four: tuple[str, ...] = (),
    six: tuple[str, ...] = (),
) -> None:
    """Give this machine these addresses; `routes` are those of its default routes."""

    def source(family: socket.AddressFamily) -> str:
        return next((one for one in routes if (":" in one) == (family == socket.AF_INET6)), "")

    monkeypatch.setattr(ports, "default_source", source)
    monkeypatch.setattr(ports, "ipv4_addresses", lambda: four)
    monkeypatch.setattr(ports, "ipv6_addresses", lambda: six)


def test_without_a_default_route_the_interfaces_addresses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, four=("10.0.0.5", "192.168.7.2"))
    assert own_hosts("0.0.0.0") == ("10.0.0.5", "192.168.7.2", "127.0.0.1")
    has(monkeypatch)
    assert own_hosts("0.0.0.0") == ("127.0.0.1",)
    assert "only works on this machine" in where_reached(own_addresses("0.0.0.0", 7700))


def test_ipv6_addresses_are_in_the_join_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    routes, six = ("203.0.113.7", "2001:db8:7::1"), ("2001:db8:7::1", "2001:db8:7::2", "fd00::2")
    has(monkeypatch, routes=routes, four=("203.0.113.7", "10.0.0.5"), six=six)
    assert own_hosts("0.0.0.0") == ("203.0.113.7", "2001:db8:7::1", "10.0.0.5", "2001:db8:7::2", "127.0.0.1")
    assert own_hosts("::")[0] == "2001:db8:7::1"
    assert own_addresses("0.0.0.0", 7700)[1] == "[2001:db8:7::1]:7700"
    has(monkeypatch, routes=routes[1:], six=six[:1])
    assert own_hosts("0.0.0.0") == ("2001:db8:7::1", "127.0.0.1")


def test_of_ipv6_addresses_the_lasting_public_ones_come_first() -> None:
    lines = [
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",  # of one wire
        "fd000000000000000000000000000002 04 40 00 82     eth0",
        "20010db8000000000000000000000003 04 40 00 01     eth0",  # temporary
        "20010db8000000000000000000000004 04 40 00 80     eth0",
        "20010db8000000000000000000000005 04 40 00 a0     eth0",  # deprecated
        "00000000000000000000000000000001 01 80 10 80       lo",
    ]
    assert interfaces._usable(lines) == ("2001:db8::4", "2001:db8::3", "fd00::2")


def test_this_machines_interfaces_can_be_listed() -> None:
    assert "127.0.0.1" not in interfaces.ipv4_addresses()
