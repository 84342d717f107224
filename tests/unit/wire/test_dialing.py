"""Which proxy an address is dialled through, in which order, and how a connection is kept alive."""

import asyncio
import socket

import pytest

from tests.support.cases import each
from wire.dialing import Proxy, first_to_answer, in_turn, proxy_for, proxy_options
from wire.errors import UserError
from wire.frames import HEADER_BYTES
from wire.pacing import KEEP_ALIVE, LEAST_ROUND_TRIP, LONGEST_SECONDS, PERIOD_SECONDS, KeepAlive

PROXY = "http://proxy.example:3128"


@each(
    ("address", "exceptions", "proxied"),
    [
        ("203.0.113.7:7700", "", True),
        ("unix:/tmp/socket", "", False),
        ("127.0.0.1:7700", "", False),
        ("[::1]:7700", "", False),
        ("localhost:7700", "", False),
        ("203.0.113.7:7700", "*", False),
        ("203.0.113.7:7700", "10.0.0.0/8, 203.0.113.0/24", False),
        ("[2001:db8::7]:7700", "2001:db8::/32", False),
        ("10.1.2.3:7700", "10.1.2.3", False),
        ("10.1.2.33:7700", "10.1.2.3", True),
        ("runs.example.org:7700", "example.org", False),
        ("runs.example.org:7700", ".example.org", False),
        ("runs.example.org:7700", "*.example.org", False),
        ("badexample.org:7700", "example.org", True),
        ("runs.example.org:7700", "example.org:443", True),
        ("runs.example.org:443", "example.org:443", False),
        ("runs.example.org:443", " ,, ", True),
    ],
)
def test_what_goes_through_the_proxy(address: str, exceptions: str, proxied: bool) -> None:
    environment = {"HTTPS_PROXY": PROXY, "NO_PROXY": exceptions}
    assert (proxy_for(address, environment) is not None) == proxied
    assert proxy_for(address, {"NO_PROXY": exceptions}) is None


def test_the_lower_case_names_come_first() -> None:
    environment = {"https_proxy": "", "HTTPS_PROXY": PROXY}
    assert proxy_for("203.0.113.7:1", environment) is None
    environment = {"HTTPS_PROXY": PROXY, "no_proxy": "", "NO_PROXY": "*"}
    assert proxy_for("203.0.113.7:1", environment) is not None


def test_a_proxy_may_want_a_password_which_is_not_shown() -> None:
    found = Proxy.parse("http://us%3Aer:p%40ss@[2001:db8::1]:3128")
    assert (found.host, found.port, found.shown) == ("2001:db8::1", 3128, "[2001:db8::1]:3128")
    assert found.secret == "dXM6ZXI6cEBzcw=="
    assert "p%40ss" not in repr(found) and found.secret not in repr(found)
    assert Proxy.parse("proxy.example:8080").port == 8080
    assert Proxy.parse("http://proxy.example").port == 80


@pytest.mark.parametrize(
    "url", ["socks5://u:hidden@h:1", "https://u:hidden@h:1", "http://u:hidden@h:x", "http://:1"]
)
def test_a_proxy_that_cannot_be_used_is_refused_in_words(url: str) -> None:
    with pytest.raises(UserError, match="HTTPS_PROXY must be") as refused:
        proxy_for("203.0.113.7:7700", {"HTTPS_PROXY": url})
    assert "hidden" not in str(refused.value)


def test_grpc_is_told_of_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    monkeypatch.delenv("no_proxy", raising=False)
    assert dict(proxy_options("203.0.113.7:7700"))["grpc.http_proxy"] == PROXY
    assert proxy_options("10.0.0.1:7700") == (("grpc.enable_http_proxy", 0),)


def test_addresses_of_both_families_take_turns_with_ipv6_first() -> None:
    four = [(int(socket.AF_INET), (host, 1)) for host in "ab"]
    six = [(int(socket.AF_INET6), (host, 1)) for host in "xyz"]
    assert [place[0] for _, place in in_turn([*four, *six])] == ["x", "a", "y", "b", "z"]


async def test_an_address_that_does_not_answer_delays_the_next_only_a_little() -> None:
    """The first has a full queue, so its connection does not come about; the third refuses."""
    with socket.socket() as full, socket.socket() as well, socket.socket() as refusing:
        for one in (full, well, refusing):
            one.bind(("127.0.0.1", 0))
        full.listen(0)
        well.listen(5)
        places = [(int(socket.AF_INET), one.getsockname()) for one in (full, refusing, well)]
        crowd = []
        for _ in range(4):
            crowd.append(socket.socket())
            crowd[-1].setblocking(False)
            crowd[-1].connect_ex(full.getsockname())
        try:
            # The kernel itself gives the first up after two minutes.
            async with asyncio.timeout(60):
                connection, number = await first_to_answer(places)
            assert number == 2
            connection.close()
            with pytest.raises(OSError, match="refused"):
                await first_to_answer(places[1:2])
        finally:
            for one in crowd:
                one.close()


FAR = 2 * LEAST_ROUND_TRIP


def test_nothing_leaves_before_the_first_frame() -> None:
    assert KeepAlive().due_at(FAR) is None


def test_nearby_and_unknown_links_cause_no_message() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    assert warm.due_at(0.0) is None
    assert warm.due_at(LEAST_ROUND_TRIP / 2) is None


def test_padding_fills_a_pause_until_nothing_is_left_to_keep() -> None:
    warm, now, left = KeepAlive(), 10.0, []
    warm.frame_sent(now)
    while (due := warm.due_at(FAR)) is not None:
        assert due - now <= PERIOD_SECONDS + 1e-9
        now = due
        left.append(now)
        warm.sent(now)
        assert len(left) < 1000
    assert 10.0 + LONGEST_SECONDS - PERIOD_SECONDS <= left[-1] <= 10.0 + LONGEST_SECONDS


def test_a_frame_restarts_the_pause() -> None:
    warm = KeepAlive()
    warm.frame_sent(10.0)
    warm.sent(10.0 + LONGEST_SECONDS)
    assert warm.due_at(FAR) is None
    warm.frame_sent(20.0)
    assert warm.due_at(FAR) == 20.0 + PERIOD_SECONDS


def test_the_message_can_be_no_frame() -> None:
    assert 0 < len(KEEP_ALIVE) < HEADER_BYTES
