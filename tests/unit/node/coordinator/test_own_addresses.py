"""Where a coordinator can be reached: the addresses that go into its join line."""

import pytest

from node.coordinator import ports
from node.coordinator.ports import own_addresses, own_hosts, where_reached


class NoRoute:
    """A socket of a machine without a default route."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "NoRoute":
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, _: object) -> None:
        raise OSError("network is unreachable")


def test_without_a_default_route_the_interfaces_addresses_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.socket, "socket", NoRoute)
    monkeypatch.setattr(ports, "interface_addresses", lambda: ("10.0.0.5", "192.168.7.2"))
    assert own_hosts("0.0.0.0") == ("10.0.0.5", "192.168.7.2", "127.0.0.1")
    monkeypatch.setattr(ports, "interface_addresses", tuple)
    assert own_hosts("0.0.0.0") == ("127.0.0.1",)
    assert "leads to this machine alone" in where_reached(own_addresses("0.0.0.0", 7700))


def test_the_operator_reads_where_the_join_line_leads() -> None:
    said = where_reached(("10.0.0.5:7700", "127.0.0.1:7700"))
    assert said.startswith("the join line leads to 10.0.0.5:7700, 127.0.0.1:7700;")
    assert own_hosts("203.0.113.7") == ("203.0.113.7",)


def test_this_machines_interfaces_can_be_listed() -> None:
    assert "127.0.0.1" not in ports.interface_addresses()
