"""One port for joins, nodes with a certificate and the page: each client gets its service, others nothing."""

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import pytest

from node.config.schema import CoordinatorSection, DashboardSection, RunConfig
from node.coordinator.control_service import ControlService
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.ports import Ports, open_ports
from node.coordinator.store import Store
from node.dashboard.feed import Feed
from node.dashboard.pages import live_page
from node.model.labels import BatchPart
from node.processes.enrol import enrol
from node.stage.coordinator_client import CoordinatorClient
from node.telemetry import events
from node.view.view_builder import RunViewBuilder
from tests.support.links import eventually
from tests.support.pki import RUN_ID, new_authority, new_node
from tests.unit.node.coordinator.test_bulk_calls import Handler
from tests.unit.wire.test_client_hello import hello, in_records
from wire.admission import Phase
from wire.errors import LinkError
from wire.front import Front
from wire.identity.authority import CertificateAuthority
from wire.identity.credentials import NodeIdentity
from wire.identity.enrolment import Hardware
from wire.identity.names import control_server_name, coordinator_server_name
from wire.identity.token import JoinToken

SECONDS = 60.0
HARDWARE = Hardware(device="cpu", cores=1, memory_bytes=1 << 30)


class NoControls:
    def stop(self, reason: str) -> None:
        raise AssertionError("nobody asks")

    def save(self) -> None:
        raise AssertionError("nobody asks")


@dataclass(frozen=True)
class Served:
    ports: Ports
    authority: CertificateAuthority
    store: Store
    urls: list[str]

    @property
    def port(self) -> int:
        return self.ports.port

    @property
    def front(self) -> Front:
        assert self.ports.door is not None
        return self.ports.door.front

    def token(self) -> JoinToken:
        return self.store.create_token(time.time(), timedelta(hours=1), 1)[1]


@contextlib.asynccontextmanager
async def served(directory: Path, *, one_port: bool = True, tls: bool = False) -> AsyncIterator[Served]:
    authority, urls = new_authority(), []
    config = RunConfig(
        coordinator=CoordinatorSection(listen="127.0.0.1:0", one_port=one_port),
        dashboard=DashboardSection(tls=tls),
    )
    now = time.time()
    with Store.create(directory, run_id=RUN_ID, config_json="{}", pin=authority.pin, now=now) as store:
        enrolment = EnrolmentHandler(store, authority, timedelta(hours=1), time.time)

        def note(event: events.Event) -> None:
            assert isinstance(event, events.PageServed)
            urls.append(event.url)

        def service(front: Front) -> ControlService:
            return ControlService(Handler(), front)  # type: ignore[arg-type]  # serves batches alone

        async with (
            asyncio.timeout(SECONDS),
            open_ports(config.coordinator, authority, enrolment, service) as ports,
            live_page(
                config,
                directory=directory,
                feed=Feed(RunViewBuilder()),
                controls=NoControls(),
                store=store,
                authority=authority,
                metrics=AsyncMock(return_value=b"thinwire_up 1\n"),
                emit=note,
                ports=ports,
            ),
        ):
            store.set_addresses([f"127.0.0.1:{ports.port}"])
            yield Served(ports, authority, store, urls)


async def batch(address: str, identity: NodeIdentity) -> bytes:
    client = CoordinatorClient(address, lambda: identity, 0.0)
    try:
        return await client.batch(0, part=BatchPart.INPUTS, size=1000)
    finally:
        await client.close()


async def get(url: str, authority: CertificateAuthority | None = None) -> str:
    trusted = ssl.create_default_context(
        cadata=authority.certificate_pem.decode() if authority is not None else None
    )
    connector = aiohttp.TCPConnector(ssl=trusted)
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return await response.text()


async def test_each_client_gets_its_service(tmp_path: Path) -> None:
    async with served(tmp_path / "run") as run:
        identity, control = await enrol(run.token(), tmp_path / "node", HARDWARE)
        assert control == f"127.0.0.1:{run.port}"
        assert len(await batch(control, identity)) == 1000
        (url,) = run.urls
        assert url == f"http://127.0.0.1:{run.port}/"
        assert "<title>" in await get(url)
        secure = url.replace("http:", "https:")
        assert await get(f"{secure}metrics", run.authority) == "thinwire_up 1\n"
        assert await get(f"{secure.replace('127.0.0.1', 'localhost')}metrics", run.authority)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(secure)
        with pytest.raises(LinkError):
            await batch(control, new_node(new_authority()))


async def test_a_page_that_needs_tls_drops_clients_without(tmp_path: Path) -> None:
    async with served(tmp_path / "run", tls=True) as run:
        (url,) = run.urls
        assert url.startswith("https:")
        assert "<title>" in await get(url, run.authority)
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(url.replace("https:", "http:"))


def hung_up(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def saying(port: int, words: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.sendall(words)
        one.setblocking(False)
        yield one


@pytest.mark.parametrize(
    "words",
    [
        b"\x00",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x00\x05\x02\x00\x00\x01\x00",
        b"\x16\x02\x01\x00\x05\x01\x00\x00\x01\x00",
        b"\x16\x03\x01\xff\xff\x01",
    ],
)
async def test_garbage_is_dropped_at_once(tmp_path: Path, words: bytes) -> None:
    async with served(tmp_path / "run") as run:
        with saying(run.port, words) as one:
            await eventually(lambda: hung_up(one))
        assert not len(run.front.admission)


@pytest.mark.parametrize("name", [coordinator_server_name(RUN_ID), control_server_name(RUN_ID), "localhost"])
async def test_a_client_hello_can_arrive_in_pieces(tmp_path: Path, name: str) -> None:
    """Half of one costs no turns of the event loop, ends with its client, and is no handshake yet."""
    words = in_records(hello(name, ("h2",)), 100)
    async with served(tmp_path / "run") as run:
        admission, choose, looked = run.front.admission, run.front._choose, 0
        assert choose is not None

        def counted(first: bytes) -> Front | int | None:
            nonlocal looked
            looked += 1
            return choose(first)

        run.front._choose = counted
        with saying(run.port, words[:3]) as one:
            await eventually(lambda: looked > 0)
            one.send(words[3:-1])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await eventually(lambda: hung_up(one))
            assert admission.count(Phase.SILENT) == 1
            assert looked < 40
            one.send(words[-1:])
            await eventually(lambda: not len(admission))
            assert await asyncio.get_running_loop().sock_recv(one, 1) == b"\x16"
        with saying(run.port, words[:-1]):
            await eventually(lambda: admission.count(Phase.SILENT) == 1)
        await eventually(lambda: not len(admission))


async def test_separate_ports_stay_possible(tmp_path: Path) -> None:
    async with served(tmp_path / "run", one_port=False) as run:
        identity, control = await enrol(run.token(), tmp_path / "node", HARDWARE)
        assert control != f"127.0.0.1:{run.port}"
        assert len(await batch(control, identity)) == 1000
        (url,) = run.urls
        assert url.startswith("http:") and f":{run.port}/" not in url and control not in url
        assert "<title>" in await get(url)
