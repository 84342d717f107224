"""What a coordinator tells `thinwire doctor`, over real sockets and TLS at its one port."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from node.config.schema import CoordinatorSection
from node.coordinator.control_service import ControlService
from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.ports import Ports, open_ports
from node.coordinator.store import Store
from node.processes import reach_check
from node.processes.doctor import Status
from node.processes.reach_check import Findings, _find_by, _places, find, judged
from tests.support.links import SECONDS
from wire.bootstrap import fetch_authority
from wire.dialing import connect
from wire.errors import LinkError
from wire.identity.authority import CertificateAuthority
from wire.identity.token import JoinToken
from wire.mirror import seen_as

DAY = timedelta(hours=24)


@dataclass
class Desk:
    store: Store
    ports: Ports
    address: str

    def token(self) -> JoinToken:
        return self.store.create_token(time.time(), DAY, 1)[1]


@contextlib.asynccontextmanager
async def open_desk(folder: Path, *, one_port: bool = True) -> AsyncIterator[Desk]:
    authority = CertificateAuthority.create("demo-run", time.time())
    store = Store.create(folder, run_id="demo-run", config_json="{}", pin=authority.pin, now=time.time())
    try:
        enrolment = EnrolmentHandler(store, authority, DAY, time.time)
        settings = CoordinatorSection(listen="127.0.0.1:0", one_port=one_port)
        async with open_ports(
            settings, authority, enrolment, lambda front: ControlService(None, front)
        ) as ports:  # type: ignore[arg-type]
            address = f"127.0.0.1:{ports.port}"
            store.set_addresses([address])
            yield Desk(store, ports, address)
    finally:
        store.close()


async def many_links() -> list[str]:
    return ["x" * 2000] * 100


async def findings(token: JoinToken) -> Findings:
    async with asyncio.timeout(SECONDS):
        found = await _find_by(token)
    assert found is not None
    return found


async def test_the_coordinator_says_what_it_sees_and_the_token_stays_unused(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "run") as desk:
        desk.ports.looks.relayed, desk.ports.looks.relays = True, lambda: [desk.address] * 5
        desk.ports.looks.links = many_links
        token = desk.token()
        before = desk.store.list_tokens()
        found = await findings(token)
        assert desk.store.list_tokens() == before and desk.store.members() == []
        assert (found.host, found.reached, found.relayed, found.refusal) == ("127.0.0.1", True, True, "")
        assert [seen.target for seen in found.seen] == [desk.address]
        assert found.seen[0].here == found.seen[0].there
        assert [*found.relays] == [desk.address] * 3
        assert (found.members, found.members_answer) == ("", True), "the port of joins is that of members"
        assert found.links == ("x" * 1000,) * 20
        assert found.down > 0 and found.up > 0 and found.round_trip > 0
        assert (found.mapped_port, found.not_mapped) == (0, "")


async def test_a_port_of_members_alone_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_desk(tmp_path / "run", one_port=False) as desk:
        found = await findings(desk.token())
        assert found.members_answer and found.members not in ("", desk.address)
        assert Status.FAIL not in [check.status for check in judged(found)]

        async def blocked(address: str) -> socket.socket:
            if address == found.members:
                raise OSError("as behind a firewall")
            return await connect(address)

        monkeypatch.setattr(reach_check, "connect", blocked)
        (failed,) = (check for check in judged(await findings(desk.token())) if check.status is Status.FAIL)
        assert failed.name == f"coordinator {found.members}" and "open this port too" in failed.fix


async def test_a_token_that_was_revoked_is_told_so_and_a_forged_one_no_more(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "run") as desk:
        desk.ports.looks.relays = lambda: [desk.address]
        token = desk.token()
        forged = JoinToken(token.addresses, token.run_id, token.pin, token.token_id, b"x" * 16)
        authority = await fetch_authority(desk.address, token.pin)
        with pytest.raises(LinkError, match="never issued this join token"):
            await find(forged, desk.address, authority)
        desk.store.revoke_token(token.token_id)
        assert "was revoked" in (await findings(token)).refusal


async def test_another_runs_token_is_refused(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "run") as desk:
        token = desk.token()
        authority = await fetch_authority(desk.address, token.pin)
        other = JoinToken(token.addresses, "other-run", token.pin, token.token_id, token.secret)
        with pytest.raises(LinkError, match="did not report"):
            await find(other, desk.address, authority)


async def test_the_mirror_tells_a_stranger_its_own_address_alone(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "run") as desk:
        (place,) = await _places(desk.address)
        here, there = await seen_as(place, ("127.0.0.1", 0))
        assert here == there and here[0] == "127.0.0.1"
        reader, writer = await asyncio.open_connection("127.0.0.1", desk.ports.port)
        writer.write(b"?whatever\n")
        assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()
