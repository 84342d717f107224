"""Kill -9 of a coordinator right after it acknowledged a join: no acknowledged join is lost."""

import asyncio
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from node.coordinator.enrolment import EnrolmentHandler
from node.coordinator.store import Store
from node.processes.enrol import enrol
from tests.support.join_port import open_join_port
from tests.support.ports import free_port
from wire.errors import Refused
from wire.identity.authority import CertificateAuthority
from wire.identity.enrolment import Hardware
from wire.identity.token import JoinToken

HARDWARE = Hardware("cpu", 2, 2**33)
DAY = timedelta(hours=24)

COORDINATOR = """
import asyncio, datetime, pathlib, sys, time
from node.coordinator.enrolment import EnrolmentHandler
from tests.support.join_port import open_join_port
from node.coordinator.store import Store
from wire.identity.authority import CertificateAuthority

async def main(directory, day=datetime.timedelta(hours=24)):
    authority = CertificateAuthority.create("run-a", time.time())
    authority.save(directory)
    store = Store.create(directory, run_id="run-a", config_json="{}", pin=authority.pin, now=time.time())
    handler = EnrolmentHandler(store, authority, day, time.time)
    credentials = authority.coordinator_credentials(day, time.time())
    server, port = await open_join_port(handler, sys.argv[2], credentials, 7701)
    store.set_addresses([f"127.0.0.1:{port}"])
    print(store.create_token(time.time(), day, 1)[1].encode(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main(pathlib.Path(sys.argv[1])))
"""


async def test_an_acknowledged_join_survives_kill_9(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    # A port that no other process gets while the coordinator is down.
    address = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", COORDINATOR, str(directory), address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            token = JoinToken.parse((await process.stdout.readline()).decode())
        identity, _ = await enrol(token, tmp_path / "node", HARDWARE)
    finally:
        process.kill()
        await process.wait()
    assert process.returncode == -signal.SIGKILL
    with Store.open(directory) as store:
        assert [member.node_id for member in store.members()] == [identity.node_id]
        (record,) = store.list_tokens()
        assert (record.token_id, record.uses) == (token.token_id, 1)
        await _go_on(directory, store, token, tmp_path)


async def _go_on(directory: Path, store: Store, token: JoinToken, tmp_path: Path) -> None:
    """A coordinator that starts again at the same address knows its node and its used-up token."""
    authority = CertificateAuthority.load(directory)
    assert authority.pin == token.pin
    handler = EnrolmentHandler(store, authority, DAY, time.time)
    credentials = authority.coordinator_credentials(DAY, time.time())
    server, _ = await open_join_port(handler, token.addresses[0], credentials, 7701)
    try:
        (tmp_path / "node" / "identity.json").unlink()
        again, _ = await enrol(token, tmp_path / "node", HARDWARE)
        assert [member.node_id for member in store.members()] == [again.node_id]
        with pytest.raises(Refused, match="used up"):
            await enrol(token, tmp_path / "other", HARDWARE)
    finally:
        await server.stop(None)
