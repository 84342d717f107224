"""A coordinator's control port while it still reads: clients are asked to wait, and then the port is free."""

import asyncio
import time
from datetime import timedelta

import pytest

from node.coordinator.ports import ANSWER, nodes_wait
from node.stage.coordinator_client import CoordinatorClient
from tests.support.links import SECONDS
from tests.support.pki import hello, new_authority, new_node
from tests.support.ports import free_port
from wire.channels import make_server
from wire.errors import LinkError, NotYetError
from wire.identity.credentials import mutual_tls
from wire.messages import CoordinatorMessage

TURNS = 4


async def test_the_port_is_free_as_soon_as_all_is_read() -> None:
    authority = new_authority()
    identity = new_node(authority)
    credentials = authority.coordinator_credentials(timedelta(hours=1), time.time())
    address = f"127.0.0.1:{free_port()}"
    for _ in range(TURNS):
        with nodes_wait(address, authority):
            client = CoordinatorClient(address, lambda: identity, SECONDS)
            with pytest.raises(NotYetError, match=ANSWER):
                await ask(client)
        server = make_server([])
        port = server.add_secure_port(address, mutual_tls(lambda: credentials, authority.certificate_pem))
        assert address.endswith(f":{port}")
        await server.start()
        await server.stop(None)


async def test_only_nodes_of_the_run_get_the_message() -> None:
    address = f"127.0.0.1:{free_port()}"
    identity = new_node(new_authority())
    with nodes_wait(address, new_authority()), pytest.raises(LinkError) as refused:
        await ask(CoordinatorClient(address, lambda: identity, SECONDS))
    assert not isinstance(refused.value, NotYetError)


def test_a_port_taken_by_another_process_stays_with_it() -> None:
    address = f"127.0.0.1:{free_port()}"
    with nodes_wait(address, new_authority()), nodes_wait(address, new_authority()):
        pass


async def ask(client: CoordinatorClient) -> None:
    async def heed(message: CoordinatorMessage) -> None:
        raise AssertionError(f"it said {message}")

    async with asyncio.timeout(SECONDS):
        await client.session(hello("127.0.0.1:1"), asyncio.Queue(), heed, lambda: None)
