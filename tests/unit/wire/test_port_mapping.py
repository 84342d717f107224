"""`wire.port_mapping` beside a router of NAT-PMP and one of UPnP on loopback."""

import asyncio
import socket
from pathlib import Path

import pytest

from node.lab.router import MOST_SECONDS, nat_pmp_server
from tests.support.fake_igd import fake_igd
from wire import port_mapping
from wire.interfaces import is_private
from wire.port_mapping import (
    LIFETIME_SECONDS,
    RENEW_SECONDS,
    MappedPort,
    NatPmp,
    Upnp,
    default_gateway,
    routers_to_ask,
)

PORT = 7001


@pytest.fixture
def told() -> list[str]:
    return []


async def test_a_port_is_mapped_by_nat_pmp_and_given_back(told: list[str]) -> None:
    async with nat_pmp_server() as router:
        mapped = MappedPort([NatPmp("127.0.0.1", router.port)], told.append)
        await mapped.open(PORT)
        assert (mapped.outside, mapped.by, mapped.why_not) == (PORT, "NAT-PMP", "")
        assert router.mapped == {PORT: ("127.0.0.1", PORT)}
        assert told == [f"the router maps its port {PORT} to this node (NAT-PMP)"]
        await mapped.close()
        assert router.mapped == {} and mapped.outside == 0


async def test_a_lost_packet_is_sent_again_and_a_taken_port_becomes_another(told: list[str]) -> None:
    async with nat_pmp_server() as router:
        router.taken, router.lost = {PORT}, 2
        mapped = MappedPort([NatPmp("127.0.0.1", router.port)], told.append)
        await mapped.open(PORT)
        assert [mapped.outside] == list(router.mapped) != [PORT]
        assert router.requests == [(PORT, PORT, LIFETIME_SECONDS)] * 3


async def test_a_mapping_is_renewed_before_it_ends_and_a_new_port_is_told(told: list[str]) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:  # the router was restarted, and another machine has the port by now
            router.mapped.clear()
            router.taken.add(PORT)
        if len(slept) == 3:
            raise asyncio.CancelledError

    async with nat_pmp_server() as router:
        mapped = MappedPort([NatPmp("127.0.0.1", router.port)], told.append)
        await mapped.open(PORT)
        with pytest.raises(asyncio.CancelledError):
            await mapped.keep(sleep)
        assert [mapped.outside] == list(router.mapped) != [PORT]
        assert told[1:] == [f"the router now maps its port {mapped.outside} to this node, no longer {PORT}"]
        assert router.requests[-1][1] == mapped.outside
    assert slept == [min(RENEW_SECONDS, MOST_SECONDS / 2)] * 3


async def test_a_router_that_refuses_or_is_silent_is_named_and_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    class Silent(NatPmp):
        async def _ask(self, port: int, outside: int, seconds: int) -> port_mapping.Mapping:
            with monkeypatch.context() as patch:
                patch.setattr(port_mapping, "ANSWER_SECONDS", 0.1)
                return await super()._ask(port, outside, seconds)

    monkeypatch.setattr(port_mapping, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(port_mapping, "TRIES", 1)
    async with nat_pmp_server() as refusing, nat_pmp_server() as silent, nat_pmp_server() as good:
        refusing.refuses, silent.lost = 2, 100
        routers = [NatPmp("127.0.0.1", refusing.port), Silent("127.0.0.1", silent.port)]
        mapped = MappedPort(routers, told.append)
        await mapped.open(PORT)
        await mapped.keep()  # there is nothing to keep
        assert (mapped.outside, told) == (0, [])
        assert mapped.why_not == (
            "NAT-PMP: the gateway refuses: its owner has turned this off; "
            "NAT-PMP: the gateway does not answer"
        )
        mapped = MappedPort([*routers, NatPmp("127.0.0.1", good.port)], told.append)
        await mapped.open(PORT)
        assert mapped.outside == PORT


async def test_answers_to_others_are_no_answer() -> None:
    """To another port, of another kind, of another version, too short."""
    answers = [
        b"",
        b"\0\x82\0\0",
        b"\0\x82\0\0" + bytes(4) + (PORT + 1).to_bytes(2) + (9).to_bytes(2) + bytes(4),
        b"\0\x81\0\0" + bytes(4) + PORT.to_bytes(2) + (9).to_bytes(2) + bytes(4),
        b"\1\x82\0\0" + bytes(4) + PORT.to_bytes(2) + (9).to_bytes(2) + bytes(4),
    ]
    assert [port_mapping._read_reply(answer, PORT) for answer in answers] == [None] * len(answers)


@pytest.mark.parametrize("only_permanent", [False, True])
async def test_a_port_is_mapped_by_upnp_and_given_back(told: list[str], only_permanent: bool) -> None:
    with fake_igd() as igd:
        igd.only_permanent = only_permanent
        mapped = MappedPort([Upnp(igd.url)], told.append)
        await mapped.open(PORT)
        assert (mapped.outside, mapped.by) == (PORT, "UPnP")
        assert igd.mapped == {PORT: ("127.0.0.1", PORT, 0 if only_permanent else LIFETIME_SECONDS)}
        await mapped.close()
        assert igd.mapped == {}


async def test_a_upnp_router_that_has_the_port_taken_says_so(told: list[str]) -> None:
    with fake_igd() as igd:
        igd.taken = {PORT}
        mapped = MappedPort([Upnp(igd.url)], told.append)
        await mapped.open(PORT)
        assert mapped.outside == 0 and mapped.why_not.startswith("UPnP: the router refuses: ")


@pytest.mark.parametrize(
    ("listen", "source", "coordinator", "asked"),
    [
        ("0.0.0.0:0", "192.168.1.7", "198.51.100.1:443", ["NAT-PMP", "UPnP"]),
        ("192.168.1.7:0", "192.168.1.7", "198.51.100.1:443", ["NAT-PMP", "UPnP"]),
        ("", "192.168.1.7", "198.51.100.1:443", []),
        ("127.0.0.1:0", "192.168.1.7", "198.51.100.1:443", []),
        ("0.0.0.0:0", "203.0.113.9", "198.51.100.1:443", []),
        ("0.0.0.0:0", "192.168.1.7", "192.168.1.2:443", []),
        ("0.0.0.0:0", "192.168.1.7", "127.0.0.1:7700", []),
        ("0.0.0.0:0", "", "198.51.100.1:443", []),
    ],
)
async def test_routers_are_asked_where_they_stand_between_this_machine_and_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, listen: str, source: str, coordinator: str, asked: list[str]
) -> None:
    monkeypatch.setattr(port_mapping, "default_source", lambda family: source)
    monkeypatch.setattr(port_mapping, "default_gateway", lambda: "192.168.1.1")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert [router.name for router in await routers_to_ask(listen, coordinator)] == asked


async def test_through_a_proxy_no_router_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "default_source", lambda family: "192.168.1.7")
    monkeypatch.setenv("https_proxy", "http://192.168.1.1:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert await routers_to_ask("0.0.0.0:0", "198.51.100.1:443") == []


def test_addresses_that_the_internet_does_not_route() -> None:
    private = ["10.1.2.3", "172.31.0.1", "192.168.0.1", "100.64.3.2", "127.0.0.1", "fe80::1%eth0", "fd00::1"]
    public = ["172.32.0.1", "100.128.0.1", "198.18.0.1", "2001:db8::1", "home.example.org"]
    assert [is_private(host) for host in private + public] == [True] * 7 + [False] * 5


def test_the_gateway_is_that_of_the_default_route(tmp_path: Path) -> None:
    table = tmp_path / "route"
    gateway = int.from_bytes(socket.inet_aton("192.168.1.1"), "little")
    table.write_text(
        "Iface\tDestination\tGateway \tFlags\n"
        f"eth0\t0001A8C0\t00000000\t0001\n"
        f"eth0\t00000000\t{gateway:08X}\t0003\n"
    )
    assert default_gateway(table) == "192.168.1.1"
    table.write_text("Iface\tDestination\tGateway \tFlags\neth0\t00000000\t00000000\t0001\n")
    assert default_gateway(table) == default_gateway(tmp_path / "missing") == ""
