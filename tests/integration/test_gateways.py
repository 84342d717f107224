"""Gateways: processes that keep the control sessions change no bit of a run, and the run outlives them."""

import asyncio
import os
import signal
import socket
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from node.coordinator.gateways import Gateways
from node.coordinator.sessions import SessionDesk
from node.run_file.loader import default_config
from tests.support.control_handler import NobodyAsks
from tests.support.fault_prefork import Prefork
from tests.support.run_harness import SMALL, Run, Still
from wire.admission import Limits
from wire.front import TLS_HANDSHAKE, Front

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")

CONFIG = replace(
    SMALL,
    run=replace(SMALL.run, steps=10),
    pipeline=replace(SMALL.pipeline, stages=2),
    coordinator=replace(SMALL.coordinator, gateways=2),
)


def gateways(coordinator: int) -> list[int]:
    """Process ids of a coordinator's gateways."""
    children = Path(f"/proc/{coordinator}/task/{coordinator}/children").read_text().split()
    return [int(one) for one in children if b"gateway" in Path(f"/proc/{one}/cmdline").read_bytes()]


@pytest.mark.timeout(240)
def test_a_run_outlives_its_gateways_with_the_same_bits(prefork: Prefork, tmp_path: Path) -> None:
    with Run(tmp_path, CONFIG, launch=prefork.popen, still=Still(stage=1, steps=4)) as run:
        coordinator = run.start()
        nodes = run.add_nodes(2)
        frozen = run.wait_still()
        killed = gateways(coordinator.pid)
        assert len(killed) == 2
        for one in killed:
            os.kill(one, signal.SIGKILL)
        frozen.go_on()
        assert coordinator.wait_exit() == 0
        assert [node.wait_exit() for node in nodes] == [0, 0]
        # Both sessions were in a gateway.
        assert all("connecting again" in node.stderr for node in nodes)
        run.assert_undisturbed()


async def test_a_connection_that_is_reset_before_it_is_handed_on_costs_nothing() -> None:
    """Its bytes can still be read, and it has no address any more."""
    raised: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context))
    own = Front(Limits.of_members(64))
    passing = Gateways(0, default_config(), SessionDesk(NobodyAsks()), own)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    client.sendall(TLS_HANDSHAKE)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    accepted.setblocking(False)
    passing.front.adopt(accepted, "127.0.0.1")
    await asyncio.sleep(0)
    assert accepted.fileno() == -1 and len(passing.front.admission) == len(own.admission) == 0
    assert raised == []
    await passing.close()
    await own.close()
