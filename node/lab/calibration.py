"""Measure every shaped wire with real TCP traffic before a run uses it, and refuse it if it is off.

Each pair of nodes sends bulk data over its own connection, with the lab's congestion control, one direction
after the other. All links are measured at once, to detect a machine that cannot carry them together. The
first stretch is discarded, because the shaper's bucket is full and TCP is still finding the rate.

The payload that arrives per second is compared with `PAYLOAD_SHARE` of the configured rate: a bulk transfer
fills its packets, so the share of headers is known exactly. Packets are counted when they arrive, not when a
program can read them. A packet that the shaper's queue drops holds back all that follow it, for one or two
queue lengths, although the link is never idle. At 4 Mbit/s that is half of a slice, and the queue drops a
packet every two seconds.

The round trip is measured with single bytes on the idle wire and compared with the configured delay.
"""

import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from node.lab import tools
from node.lab.network import Network
from node.lab.shape import PAYLOAD_SHARE, Shape, burst_bytes
from node.lab.topology import node_address, node_name
from wire.errors import RunError

PINGS = 15
LEAST_SECONDS = 1.5
SETTLE_SECONDS = 0.5
SETTLE_ROUND_TRIPS = 12
"""TCP's congestion control gets this many round trips, plus `SETTLE_SECONDS`, to find the rate."""
BURSTS = 10
"""A measurement sends at least this many times the shaper's bucket, so that the bucket is at most a tenth of
it at any rate."""
RTT_SLACK_MS = 1.0
"""A shared machine may wake processes up this late."""
SLICES = 6
"""The number of slices of a measurement. It continues while their rates differ by more than `UNEVEN`."""
UNEVEN = 0.1
UNSTEADY_LENGTHS = 4.0
ATTEMPTS = 3
TOLERANCE = 0.05
"""The lab measures nothing over links that are off by more than this share."""
CONNECT_SECONDS = 10.0
CHUNK = 1 << 18
_MSS, _DATA_SEGMENTS = 16, 152
"""Offsets of `tcpi_snd_mss` and `tcpi_data_segs_in` in Linux's `tcp_info` (include/uapi/linux/tcp.h).

The latter exists since Linux 4.6.
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One direction between two neighbours: the configured values and the measured ones."""

    sender: int
    receiver: int
    asked_mbit: float
    """Rate of the slowest shaper on the path; 0 without one."""
    payload_mbit: float
    """TCP payload that arrived per second, in order or not."""
    asked_rtt_ms: float
    rtt_ms: float
    seconds: float
    """Length of the measurement without the first stretch."""
    congestion_control: str

    @property
    def share(self) -> float:
        """The measured payload rate divided by the one that the shaper's rate allows: 1 is perfect."""
        return self.payload_mbit / (self.asked_mbit * PAYLOAD_SHARE)

    def fault(self) -> str | None:
        """Why this direction cannot be used; None if it can."""
        where = f"the link from stage {self.sender} to {self.receiver}"
        if self.asked_mbit and abs(self.share - 1) > TOLERANCE:
            reached = self.payload_mbit / PAYLOAD_SHARE
            hint = (
                "this machine cannot carry the rate: ask for a lower one, or use a machine with less to do"
                if self.share < 1
                else "its shaper lets too much through"
            )
            return (
                f"{where} is off by {100 * (self.share - 1):+.1f} %: asked for {self.asked_mbit:g} Mbit/s on "
                f"the wire, found {reached:.4g} ({self.payload_mbit:.4g} of payload); {hint}"
            )
        slack = max(TOLERANCE * self.asked_rtt_ms, RTT_SLACK_MS)
        if self.asked_rtt_ms and abs(self.rtt_ms - self.asked_rtt_ms) > slack:
            return f"{where} has a round trip of {self.rtt_ms:.2f} ms instead of {self.asked_rtt_ms:g} ms"
        return None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements of the whole network at one shape."""

    label: str
    attempts: int
    links: tuple[Measured, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def payload_mbit(self, sender: int, receiver: int) -> float:
        return self._find(sender, receiver).payload_mbit

    def rtt_ms(self, sender: int, receiver: int) -> float:
        return self._find(sender, receiver).rtt_ms

    def _find(self, sender: int, receiver: int) -> Measured:
        return next(m for m in self.links if (m.sender, m.receiver) == (sender, receiver))


def calibrate(network: Network, shape: Shape, ends: Sequence[tuple[int, int]]) -> Calibration:
    """Measure a network that has `shape`, up to `ATTEMPTS` times, because other work may disturb a
    measurement.

    Args:
        ends: The pairs of neighbours.

    Raises RunError that names the first direction that is off and the measured value.
    """
    faults: list[str] = []
    for attempt in range(1, ATTEMPTS + 1):
        measured = measure(network, shape, ends)
        faults = [fault for measurement in measured if (fault := measurement.fault()) is not None]
        if not faults:
            return Calibration(label=shape.label, attempts=attempt, links=tuple(measured))
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise RunError(f"calibration refuses {shape.label!r}: {faults[0]}{more}; {ATTEMPTS} attempts")


def measure(network: Network, shape: Shape, ends: Sequence[tuple[int, int]]) -> list[Measured]:
    """Measure both directions of every pair of neighbours.

    Links are measured at once. With interfaces pairs share wires, so they are measured one after the other.
    """
    shared = any(wire.higher < 0 for wire in network.topology.wires)
    turns = [[pair] for pair in ends] if shared else [list(ends)]
    measured: list[Measured] = []
    for turn in turns:
        connections = [_connect(*pair) for pair in turn]
        try:
            trips = [_round_trip(near, far) for near, far in connections]
            for upward in (True, False):
                jobs = []
                for pair, (near, far), trip in zip(turn, connections, trips, strict=True):
                    way = pair if upward else pair[::-1]
                    pipe = (near, far) if upward else (far, near)
                    jobs.append(_job(network, shape, way, pipe, trip))
                measured += _at_once(jobs)
        finally:
            for near, far in connections:
                near.close()
                far.close()
    return measured


def _congestion_control(connection: socket.socket) -> str:
    """The congestion control that the kernel uses for a connection."""
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.rstrip(b"\0").decode("ascii", "replace")


def _job(
    network: Network,
    shape: Shape,
    way: tuple[int, int],
    pipe: tuple[socket.socket, socket.socket],
    trip: float,
) -> Callable[[], Measured]:
    asked, rtt_ms = _asked(network, shape, *way)
    settle = SETTLE_SECONDS + SETTLE_ROUND_TRIPS * max(rtt_ms / 1e3, trip)
    length = max(LEAST_SECONDS, BURSTS * burst_bytes(asked) * 8e-6 / asked)

    def run() -> Measured:
        received, seconds = _transfer(*pipe, settle, length)
        return Measured(
            sender=way[0],
            receiver=way[1],
            asked_mbit=asked,
            payload_mbit=8e-6 * received / seconds,
            asked_rtt_ms=rtt_ms,
            rtt_ms=1e3 * trip,
            seconds=seconds,
            congestion_control=_congestion_control(pipe[0]),
        )

    return run


def _asked(network: Network, shape: Shape, sender: int, receiver: int) -> tuple[float, float]:
    """Configured Mbit/s and round trip in ms of this direction in the shape."""
    rates, trips = [], []
    for wire, link in zip(network.topology.wires, shape.links, strict=True):
        if wire.higher < 0:
            if wire.lower == sender:
                rates.append(link.up_mbit)
            elif wire.lower == receiver:
                rates.append(link.down_mbit)
            if wire.lower in (sender, receiver):
                trips.append(link.rtt_ms)
        elif {wire.lower, wire.higher} == {sender, receiver}:
            rates.append(link.up_mbit if wire.lower == sender else link.down_mbit)
            trips.append(link.rtt_ms)
    return min(rates), max(trips)


def _connect(lower: int, higher: int) -> tuple[socket.socket, socket.socket]:
    """Connect two nodes. Returns the ends in the lower and the higher node's namespace."""
    listener = tools.inside(node_name(higher), lambda: socket.create_server((node_address(higher), 0)))
    try:
        listener.settimeout(CONNECT_SECONDS)
        address = listener.getsockname()
        near = tools.inside(
            node_name(lower), lambda: socket.create_connection(address[:2], timeout=CONNECT_SECONDS)
        )
        far, _ = listener.accept()
    except OSError as error:
        raise RunError(f"stage {lower} cannot reach stage {higher} inside the lab: {error}") from None
    finally:
        listener.close()
    for end in (near, far):
        end.settimeout(CONNECT_SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def _round_trip(near: socket.socket, far: socket.socket) -> float:
    """The median of `PINGS` round trips after one warm-up, in seconds."""
    trips = []
    for _ in range(PINGS + 1):
        began = time.perf_counter()
        near.sendall(b"?")
        far.recv(1)
        far.sendall(b"!")
        near.recv(1)
        trips.append(time.perf_counter() - began)
    return statistics.median(trips[1:])


def _transfer(
    sender: socket.socket, receiver: socket.socket, settle: float, length: float
) -> tuple[int, float]:
    """The bytes that arrived and the seconds that they took, once the rate is steady."""
    done = threading.Event()

    def push() -> None:
        data = bytes(CHUNK)
        while not done.is_set():
            try:
                sender.send(data)
            except TimeoutError:
                continue
            except OSError:
                return

    sender.settimeout(0.1)
    pusher = threading.Thread(target=push, name="calibration")
    pusher.start()
    buffer = bytearray(CHUNK)
    try:
        begin = time.perf_counter() + settle
        while time.perf_counter() < begin:
            receiver.recv_into(buffer)
        slices: list[tuple[int, float]] = []
        most = int(UNSTEADY_LENGTHS * SLICES)
        while not steady(slices) and len(slices) < most:
            slices.append(_slice(sender, receiver, buffer, length / SLICES))
    finally:
        done.set()
        pusher.join()
    _drain(receiver, buffer)
    sender.settimeout(CONNECT_SECONDS)
    last = slices[-SLICES:]
    return sum(received for received, _ in last), sum(seconds for _, seconds in last)


def steady(slices: Sequence[tuple[int, float]]) -> bool:
    """Whether the last `SLICES` of (bytes, seconds) have about the same rate."""
    rates = [received / seconds for received, seconds in slices[-SLICES:]]
    return len(rates) == SLICES and max(rates) - min(rates) <= UNEVEN * statistics.median(rates)


def _slice(
    sender: socket.socket, receiver: socket.socket, buffer: bytearray, length: float
) -> tuple[int, float]:
    first = last = time.perf_counter()
    before = arrived(sender, receiver)
    while last - first < length:
        receiver.recv_into(buffer)
        last = time.perf_counter()
    return arrived(sender, receiver) - before, last - first


def arrived(sender: socket.socket, receiver: socket.socket) -> int:
    """Bytes of payload in all packets that the receiver has got, including retransmissions that it did not
    need.

    Packets of a bulk transfer are full.
    """
    (segments,) = struct.unpack_from("=I", _tcp_info(receiver), _DATA_SEGMENTS)
    (full,) = struct.unpack_from("=I", _tcp_info(sender), _MSS)
    return int(segments * full)


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _drain(receiver: socket.socket, buffer: bytearray) -> None:
    """Read until nothing arrives for 0.3 s, so that late data does not disturb the other direction."""
    receiver.settimeout(0.3)
    try:
        while receiver.recv_into(buffer):
            pass
    except TimeoutError:
        receiver.settimeout(CONNECT_SECONDS)


def _at_once(jobs: Sequence[Callable[[], Measured]]) -> list[Measured]:
    """Run all jobs in threads. Raises RunError with the first error."""
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [future.result() for future in [pool.submit(job) for job in jobs]]
    except OSError as error:
        raise RunError(f"calibration failed: a connection inside the lab broke ({error})") from None
