"""The laboratory's packet relay where the device that it sends to takes no more for a while."""

import socket
from collections.abc import Iterator

import pytest

from node.lab import relay
from node.lab.relay import Relay
from node.lab.shape import QUEUE_SECONDS

DELAY = 0.05
FRAME = bytes(1000)


class FakePort:
    """A pair of sockets, of which one holds few frames."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.socket, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)
        self.socket.setblocking(False)
        self.far.setblocking(False)
        self.full = False

    def read(self) -> list[bytes]:
        frames = []
        while True:
            try:
                frames.append(self.far.recv(2000))
            except BlockingIOError:
                return frames


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Relay, FakePort]]:
    monkeypatch.setattr(relay, "Port", FakePort)
    made = Relay([{"source": "a", "target": "b", "mac": ""}])
    made.ways[0].delay = DELAY
    port = made.ways[0].target
    assert isinstance(port, FakePort)
    yield made, port
    for each in made.ports.values():
        assert isinstance(each, FakePort)
        each.socket.close()
        each.far.close()


def wait_for(made: Relay, count: int) -> list[bytes]:
    frames = [index.to_bytes(2, "big") + FRAME for index in range(count)]
    made.ways[0].waiting.extend((DELAY, frame) for frame in frames)
    return frames


def test_bytes_that_a_full_port_refuses_wait_in_order(target: tuple[Relay, FakePort]) -> None:
    made, port = target
    frames = wait_for(made, 1000)
    made._send(DELAY)
    assert port.full and made.refused == 0
    arrived = port.read()
    assert 0 < len(arrived) < 1000
    made._send(DELAY)
    assert port.read() == []  # it is not asked again before it says that there is room
    while made.ways[0].waiting:
        port.full = False
        made._send(DELAY + QUEUE_SECONDS)
        arrived += port.read()
    assert arrived == frames
    assert (made.frames, made.refused) == (1000, 0)


def test_what_a_full_port_does_not_take_in_time_is_dropped(target: tuple[Relay, FakePort]) -> None:
    made, port = target
    frames = wait_for(made, 1000)
    made._send(DELAY)
    taken = made.frames
    port.full = False
    made._send(DELAY + QUEUE_SECONDS + 2 * DELAY + 0.001)
    assert port.read() == frames[:taken]
    assert (made.frames, made.refused) == (taken, 1000 - taken)
    assert not made.ways[0].waiting


def test_a_relay_that_is_late_drops_nothing(target: tuple[Relay, FakePort]) -> None:
    made, port = target
    frames = wait_for(made, 3)
    made._send(DELAY + 10.0)
    assert port.read() == frames
    assert (made.frames, made.refused) == (3, 0)
