"""The page's server over real sockets: what it serves, what it refuses, and that it stays bounded."""

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from node.config.schema import CoordinatorSection, DashboardSection, RunConfig
from node.coordinator.changes import Changes
from node.coordinator.look_service import Looks
from node.coordinator.ports import Ports
from node.coordinator.store import Store
from node.dashboard import connections, server
from node.dashboard.feed import Feed
from node.dashboard.operator import KEY_FILE, ChangeGuard, Operator, OperatorKey
from node.dashboard.pages import live_page, page_url
from node.dashboard.server import POLICY, Page, serve_page
from node.run_file.addresses import page_listen, parse_listen, shares_port
from node.run_file.loader import to_json
from node.telemetry import events
from node.view.view_builder import RunViewBuilder
from tests.support import run_events
from tests.support.page_feed import apply_patch
from wire.errors import UserError
from wire.identity.authority import CertificateAuthority
from wire.identity.token import JoinToken

KEY = "abcdefghjkmnpqrstuvwxyz234"
WITH_KEY = {"Authorization": f"Bearer {KEY}", "X-Thinwire": "1"}


class Controls:
    """Stands in for the coordinator."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stop(self, reason: str) -> None:
        self.asked.append(f"stop: {reason}")

    def save(self) -> None:
        self.asked.append("save")

    @property
    def changes(self) -> Changes:
        return Changes(RunConfig(), Path(), lambda event: None, self.asked.append)


def feed_of_a_run(steps: int = 3) -> Feed:
    feed = Feed(RunViewBuilder())
    for at, event in run_events.history(run_events.opening(), *map(run_events.step, range(1, steps + 1))):
        feed.apply(event, at)
    return feed


@asynccontextmanager
async def serving(page: Page, host: str = "127.0.0.1") -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serve_page(page, host, 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        yield session


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, dict[str, Any]]:
    """The next server-sent event: its name and its data."""
    name, data = "", ""
    async with asyncio.timeout(60):
        while line := (await response.content.readline()).decode().rstrip("\n"):
            key, _, value = line.partition(": ")
            name, data = (value, data) if key == "event" else (name, value)
    return name, json.loads(data)["view"]


async def test_the_page_and_its_files_come_with_a_strict_policy() -> None:
    async with serving(Page(feed=feed_of_a_run())) as session:
        async with session.get("/") as response:
            html = await response.text()
            assert response.status == 200 and response.content_type == "text/html"
        for path in ("/", "/app.js", "/page.css", "/icon.svg", "/api/view", "/healthz", "/nothing"):
            async with session.get(path) as response:
                assert response.headers["Content-Security-Policy"] == POLICY
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Server"] == "thinwire"
                assert response.status == (404 if path == "/nothing" else 200)
        assert "<script>" not in html and "style=" not in html and "//" not in html.replace("<!doctype", "")
        async with session.get("/app.js") as response:
            etag = response.headers["ETag"]
        async with session.get("/app.js", headers={"If-None-Match": etag}) as response:
            assert (response.status, await response.read()) == (304, b"")
    assert "'unsafe" not in POLICY and "default-src 'none'" in POLICY


async def test_the_view_and_health() -> None:
    feed = feed_of_a_run()
    async with serving(Page(feed=feed, metrics=AsyncMock(return_value=b"thinwire_step 3\n"))) as session:
        async with session.get("/api/view") as response:
            said = await response.json()
        assert said["view"] == (await feed.newest())[1] and abs(said["now"] - time.time()) < 60
        assert response.headers["Cache-Control"] == "no-store"
        async with session.get("/healthz") as response:
            assert await response.json() == {"state": "training"}
        async with session.get("/metrics") as response:
            assert await response.read() == b"thinwire_step 3\n"
            assert response.content_type == "text/plain"
    async with serving(Page(feed=feed)) as session, session.get("/metrics") as response:
        assert response.status == 404


async def test_a_stream_begins_with_the_whole_and_goes_on_with_what_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "STREAM_SECONDS", 0.01)
    feed = feed_of_a_run(steps=3)
    async with serving(Page(feed=feed)) as session, session.get("/api/stream") as response:
        assert response.content_type == "text/event-stream"
        name, view = await next_event(response)
        assert (name, view) == ("view", (await feed.newest())[1])
        for event in run_events.step(4):
            feed.apply(event, run_events.BEGAN + 100)
        while view["step"] < 4:
            name, patch = await next_event(response)
            assert name == "patch" and "run_id" not in patch and "steps" not in patch
            view = apply_patch(view, patch)
        assert view == (await feed.newest())[1]
        feed.apply(events.RunFinished(reason="all steps are done", failed=False), run_events.BEGAN + 101)
        feed.close()
        name, patch = await next_event(response)
        assert name == "patch" and apply_patch(view, patch) == (await feed.newest())[1]
        assert (await next_event(response))[0] == "end"
        assert await response.content.read() == b""


async def test_an_end_during_a_write_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = feed_of_a_run()
    write = server._write

    async def ends_meanwhile(response: web.StreamResponse, data: bytes) -> None:
        await write(response, data)
        if not feed.closed:
            feed.apply(events.RunFinished(reason="enough", failed=False), run_events.BEGAN + 100)
            feed.close()

    monkeypatch.setattr(server, "_write", ends_meanwhile)
    async with serving(Page(feed=feed)) as session, session.get("/api/stream") as response:
        _, view = await next_event(response)
        name, patch = await next_event(response)
        assert name == "patch" and apply_patch(view, patch) == (await feed.newest())[1]
        assert (await next_event(response))[0] == "end"


async def test_a_stream_is_not_sent_to_who_asks_for_its_head() -> None:
    async with serving(Page(feed=feed_of_a_run())) as session, session.head("/api/stream") as response:
        assert response.status == 405


async def test_a_quiet_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAM_SECONDS", 0.01)
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 0.05)
    async with serving(Page(feed=feed_of_a_run())) as session, session.get("/api/stream") as response:
        await next_event(response)
        async with asyncio.timeout(60):
            assert (await response.content.readline()).startswith(b": ")


@pytest.mark.parametrize("limit", ["MOST_STREAMS", "MOST_STREAMS_OF_AN_ADDRESS"])
async def test_streams_are_bounded_and_freed(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(server, limit, 2)
    monkeypatch.setattr(server, "KEEPALIVE_SECONDS", 3600.0)
    other = aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)))
    async with (
        other,
        serving(Page(feed=feed_of_a_run())) as session,
        session.get("/api/stream") as first,
        session.get("/api/stream") as second,
    ):
        await next_event(first)
        await next_event(second)
        async with session.get("/api/stream") as third:
            assert third.status == 503 and third.headers["Retry-After"]
        async with other.get(first.url) as elsewhere:
            assert elsewhere.status == (503 if limit == "MOST_STREAMS" else 200)
        first.close()
        async with asyncio.timeout(60):
            while True:
                async with session.get("/api/stream") as again:
                    if again.status == 200:
                        break


Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(port: int, count: int, host: str = "127.0.0.1") -> AsyncIterator[list[Connected]]:
    """Connections from an address of this machine that send nothing."""
    async with asyncio.timeout(60):
        made = [await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)) for _ in range(count)]
        yield made
        for _, writer in made:
            writer.close()


async def closed(connection: Connected) -> None:
    """Wait until the other end has closed it without sending anything."""
    with contextlib.suppress(ConnectionResetError):
        assert await connection[0].read() == b""


async def test_health_and_the_page_are_there_beside_300_connections_that_ask_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 3600.0)
    async with (
        serve_page(Page(feed=feed_of_a_run(), metrics=AsyncMock(return_value=b"")), "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get("/api/stream") as page,
        connected(port, 300) as silent,
    ):
        await next_event(page)  # a page that is open stays so
        for path in ("/healthz", "/metrics", "/"):
            assert await status_of(port, path) == 200
        for one in silent[: 300 - connections.MOST_OF_AN_ADDRESS]:
            await closed(one)
        assert not page.content.at_eof()


async def test_one_address_does_not_shut_out_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 3600.0)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 6)
    monkeypatch.setattr(connections, "MOST_OF_AN_ADDRESS", 4)
    async with (
        serve_page(Page(feed=feed_of_a_run()), "127.0.0.1", 0) as port,
        connected(port, 2, "127.0.0.3") as others,
        connected(port, 8, "127.0.0.2") as crowd,
    ):
        for one in crowd[:4]:
            await closed(one)
        assert not any(reader.at_eof() for reader, _ in (*others, *crowd[4:]))
        # The server is full: it closes the connection that has been silent longest, of any address.
        async with connected(port, 1):
            await closed(others[0])
        assert await status_of(port, "/healthz") == 200


async def test_a_connection_whose_requests_are_being_answered_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 2)
    async with (
        serve_page(Page(feed=feed_of_a_run()), "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get("/api/stream") as first,
        session.get("/api/stream") as second,
    ):
        await next_event(first)
        await next_event(second)
        async with connected(port, 1) as more:
            await closed(more[0])
        assert not first.content.at_eof() and not second.content.at_eof()


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
async def test_a_connection_whose_first_request_does_not_come_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    async with (
        serve_page(Page(feed=feed_of_a_run()), "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.get("/api/stream") as page,
    ):
        monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.05)  # not before the page has asked
        async with connected(port, 1) as silent:
            silent[0][1].write(sent)
            await closed(silent[0])
        await next_event(page)
        assert not page.content.at_eof()


async def test_a_page_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STREAM_SECONDS", 0.0)
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)
    monkeypatch.setattr(server, "MOST_STREAMS", 1)
    feed = feed_of_a_run(steps=400)
    page = Page(feed=feed)
    async with serve_page(page, "127.0.0.1", 0) as port:
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, ("127.0.0.1", port))
            await loop.sock_sendall(deaf, b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            restart = [run_events.started(), run_events.started(first_step=1)]
            # Each event changes much of the view, so the socket fills up and the write times out.
            async with asyncio.timeout(150):
                while await status_of(port, "/api/stream") != 503:
                    pass
                for number in range(100_000):
                    feed.apply(events.Notice(text="x" * 2000 + str(number)), 1.0)
                    feed.apply(restart[number % 2], 1.0)
                    assert await status_of(port, "/healthz") == 200
                    if number % 10 == 9 and not is_open(port, deaf.getsockname()[1]):
                        break
                else:
                    pytest.fail("it was never let go")
            assert await status_of(port, "/api/stream") == 200  # its place is free again


def is_open(port: int, peer_port: int) -> bool:
    """Whether the server at `port` still holds its connection to a port of this machine."""
    established = "01"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if int(local.split(":")[1], 16) == port and int(remote.split(":")[1], 16) == peer_port:
            return state == established
    return False


async def status_of(port: int, path: str) -> int:
    """The answer to a request over a new connection."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7702", "10.0.0.1", "[2001:db8::1]:80"])
async def test_loopback_is_asked_under_its_own_names(host: str) -> None:
    async with serving(Page(feed=feed_of_a_run())) as session:
        async with session.get("/api/view", headers={"Host": host}) as response:
            assert response.status == 421
        for own in ("localhost", "LOCALHOST:7702", "127.0.0.1", "[::1]:7702"):
            async with session.get("/api/view", headers={"Host": own}) as response:
                assert response.status == 200
    async with (
        serving(Page(feed=feed_of_a_run()), "0.0.0.0") as session,
        session.get("/api/view", headers={"Host": host}) as response,
    ):
        assert response.status == 200


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.create(
        tmp_path / "run", run_id="demo-x", config_json=to_json(RunConfig()), pin=b"p" * 32, now=1.0
    ) as made:
        made.set_addresses(["127.0.0.1:7700"])
        yield made


async def test_changes_need_the_key_and_are_carried_out(store: Store) -> None:
    controls, told = Controls(), list[events.Event]()
    feed = feed_of_a_run()
    operator = Operator(controls, store, told.append)
    record, _ = store.create_token(time.time(), timedelta(hours=1), 3)
    page = Page(feed=feed, operator=operator, guard=ChangeGuard(OperatorKey(KEY)))

    async def ask(body: object, headers: dict[str, str] = WITH_KEY) -> tuple[int, Any]:
        async with session.post("/api/operator", data=json.dumps(body), headers=headers) as response:
            assert response.headers["Cache-Control"] == "no-store"
            return response.status, await response.json()

    async with serving(page) as session:
        async with session.get("/api/operator") as response:
            assert await response.json() == {"available": True, "reason": ""}
        assert (await ask({"action": "stop"}, {}))[0] == 403
        assert (await ask({"action": "stop"}, {"X-Thinwire": "1"}))[0] == 401
        assert (await ask({"action": "stop"}, {**WITH_KEY, "Origin": "https://evil.example"}))[0] == 403
        assert (await ask({"action": "stop"}, {**WITH_KEY, "X-Forwarded-For": "192.0.2.1"}))[0] == 403
        assert controls.asked == [] and told == []

        assert (await ask({"action": "snapshot"}))[0] == 200
        assert (await ask({"action": "set", "id": "pipeline.window=2 training.lr=2e-3"}))[0] == 200
        assert (await ask({"action": "set", "id": "  "}))[0] == 400
        assert (await ask({"action": "set", "id": "model.hidden=1"}))[0] == 400
        assert (await ask({"action": "stop"}))[0] == 200
        change = "the run continues with pipeline.window=2, training.lr=2e-3"
        assert controls.asked == ["save", change, "stop: stopped by the operator"]
        assert len(told) == 3

        status, said = await ask({"action": "tokens"})
        assert [token["id"] for token in said["tokens"]] == [record.token_id] and said["tokens"][0]["usable"]
        assert "secret" not in json.dumps(said)
        assert (await ask({"action": "revoke", "id": record.token_id}))[0] == 200
        assert store.list_tokens()[0].revoked

        status, said = await ask({"action": "token", "uses": 3, "ttl": "1h"})
        new = JoinToken.parse(said["join_line"].removeprefix("thinwire join "))
        kept = store.list_tokens()[-1]
        assert (status, new.token_id, new.run_id) == (200, kept.token_id, "demo-x")
        assert kept.uses_allowed == 3 and kept.expires == pytest.approx(time.time() + 3600, abs=60)
        assert new.token_id in said["text"] and said["join_line"][-30:] not in "".join(map(str, told))
        for wrong in (
            {"uses": 0},
            {"uses": 1.5},
            {"uses": True},
            {"ttl": "400d"},
            {"ttl": "soon"},
            {"ttl": 7},
        ):
            assert (await ask({"action": "token", **wrong}))[0] == 400
        assert len(store.list_tokens()) == 2
        for body in (
            {"action": "revoke", "id": "nope"},
            {"action": "evict", "id": "node-x", "keep_token": "yes"},
            {"action": "evict", "id": "node-x"},
            {"action": "evict", "id": "\ud800"},
            {"action": "revoke", "id": "\ud800"},
            {"action": "fly"},
        ):
            status, said = await ask(body)
            assert status == 400 and said["error"].count("\n") == 0
        for body in ([], {}, {"action": 3}, {"action": "evict", "id": 7}, "x"):
            assert (await ask(body))[0] == 400
        async with session.post("/api/operator", data=b"\xff\xfe{", headers=WITH_KEY) as response:
            assert response.status == 400
        async with session.post("/api/operator", data=b"x" * 100_000, headers=WITH_KEY) as response:
            assert response.status == 413


async def test_a_page_without_a_coordinator_only_shows() -> None:
    async with serving(Page(feed=feed_of_a_run())) as session:
        async with session.get("/api/operator") as response:
            assert (await response.json())["available"] is False
        async with session.post("/api/operator", data="{}", headers=WITH_KEY) as response:
            assert response.status == 403


async def test_the_page_is_served_over_tls_with_the_runs_ca(tmp_path: Path, store: Store) -> None:
    authority = CertificateAuthority.create("demo-x", time.time())
    told: list[events.Event] = []
    config = RunConfig(
        coordinator=CoordinatorSection(
            listen="0.0.0.0:0", one_port=False, advertise=("coordinator.example:7700",)
        ),
        dashboard=DashboardSection(tls=True),
    )
    directory = tmp_path / "run"
    async with live_page(
        config,
        directory=directory,
        feed=feed_of_a_run(),
        controls=Controls(),
        store=store,
        authority=authority,
        metrics=None,
        emit=told.append,
        ports=Ports(port=0, door=None, relay=None, looks=cast(Looks, None)),
    ):
        (served,) = told
        assert isinstance(served, events.PageServed) and served.url.startswith("https://")
        assert served.key_file == str(directory / KEY_FILE)
        port = int(served.url.rpartition(":")[2].rstrip("/"))
        trusted = ssl.create_default_context(cadata=authority.certificate_pem.decode())
        key = (directory / KEY_FILE).read_text().strip()
        headers = {"Authorization": f"Bearer {key}", "X-Thinwire": "1", "X-Forwarded-For": "192.0.2.9"}
        resolver = Resolver()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusted, resolver=resolver)
        ) as session:
            for host in ("127.0.0.1", "localhost", "coordinator.example"):
                body = json.dumps({"action": "snapshot"})
                url = f"https://{host}:{port}/api/operator"
                async with session.post(url, data=body, headers=headers) as response:
                    assert response.status == 200
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"https://127.0.0.1:{port}/")
    assert not (directory / "page.pem").exists()


class Resolver(aiohttp.abc.AbstractResolver):
    """Resolve every name to this machine."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        return [
            aiohttp.abc.ResolveResult(
                hostname=host, host="127.0.0.1", port=port, family=socket.AF_INET, proto=0, flags=0
            )
        ]

    async def close(self) -> None:
        return None


async def test_an_address_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="address of this machine"):
            async with serve_page(Page(feed=feed_of_a_run()), "127.0.0.1", port):
                pass


@pytest.mark.parametrize(
    ("coordinator", "dashboard", "expected"),
    [
        ("0.0.0.0:7700", "auto", ("0.0.0.0", 7702)),
        ("127.0.0.1:0", "auto", ("127.0.0.1", 0)),
        ("[::1]:9000", "auto", ("::1", 9002)),
        ("0.0.0.0:7700", "127.0.0.1:80", ("127.0.0.1", 80)),
        ("0.0.0.0:7700", "", None),
    ],
)
def test_where_the_page_listens(coordinator: str, dashboard: str, expected: tuple[str, int] | None) -> None:
    page = DashboardSection(listen=dashboard)
    separate = CoordinatorSection(listen=coordinator, one_port=False)
    assert page_listen(RunConfig(coordinator=separate, dashboard=page)) == expected
    config = RunConfig(coordinator=CoordinatorSection(listen=coordinator), dashboard=page)
    assert shares_port(config) == (dashboard == "auto")
    if shares_port(config):
        assert page_listen(config) == parse_listen(coordinator)
    else:
        assert page_listen(config) == expected


def test_the_pages_address_can_be_typed() -> None:
    assert page_url("127.0.0.1", 7702, tls=False) == "http://127.0.0.1:7702/"
    assert page_url("::1", 1, tls=True) == "https://[::1]:1/"
    assert "0.0.0.0" not in page_url("0.0.0.0", 7702, tls=False)
