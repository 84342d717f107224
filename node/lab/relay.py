"""Delay packets between devices in user space, without netem. `python -m node.lab.relay`.

The relay receives frames on packet sockets and sends them on others, in order, after a set delay. Segments
that the kernel has batched stay batched, with their virtio header. So a gigabit needs only some thousand
system calls per second, and the relay does not limit the rate. It does not terminate TCP: congestion control
sees the whole path.

Stdin receives a line of JSON, {"ways": [{"source", "target", "mac"}…]}. After it come lines
{"delays": [seconds, …]}, one value per way, for each change of the delays, or {} to read the counters. The
relay answers each line with a line of JSON: its counters since the last answer. It ends when stdin ends.
"""

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from typing import Any

from node.lab.shape import QUEUE_SECONDS

# From linux/if_packet.h and asm-generic/socket.h; Python's socket module lacks them.
SOL_PACKET = 263
PACKET_STATISTICS = 6
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3

VNET_HEADER = 10
LARGEST_FRAME = VNET_HEADER + 14 + 65536
BUFFER_BYTES = 64 << 20
"""Send and receive buffer of a port.

Frames in the target device's queue count against the send buffer. If it were smaller than that queue, the
relay would drop frames that a network carries.
"""
AT_ONCE = 64
"""The most frames to read from one port before the next port."""
LATENESS_KEPT = 100_000


class Port:
    """The packet socket of one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        for forced, allowed in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:
                # Without root, use as much as the host allows every user.
                self.socket.setsockopt(socket.SOL_SOCKET, allowed, BUFFER_BYTES)
        self.socket.bind((device, ETH_P_ALL))
        self.socket.setblocking(False)
        self.full = False
        """Whether the socket refused the last frame because its buffer is full."""

    def fileno(self) -> int:
        return self.socket.fileno()

    def count_missed(self) -> int:
        """Frames that the kernel has dropped since the last call, because the relay was too slow."""
        # Reading the counters resets them.
        _, drops = struct.unpack("II", self.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        return int(drops)


class Way:
    """One path of frames, from one port to another, and the frames that wait on it."""

    def __init__(self, source: str, target: Port, mac: str) -> None:
        self.source = source
        self.target = target
        self.mac = bytes.fromhex(mac.replace(":", ""))
        self.delay = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()

    def takes(self, frame: bytes) -> bool:
        """Whether `frame` is for this address, or for a group (the lowest bit of the first byte)."""
        address = frame[VNET_HEADER : VNET_HEADER + 6]
        return not self.mac or address == self.mac or bool(address[0] & 1)


class Relay:
    def __init__(self, ways: list[dict[str, Any]]) -> None:
        names = dict.fromkeys(name for way in ways for name in (way["source"], way["target"]))
        self.ports = {name: Port(name) for name in names}
        self.ways = [Way(way["source"], self.ports[way["target"]], way["mac"]) for way in ways]
        self._from: dict[str, list[Way]] = {name: [] for name in names}
        for way in self.ways:
            self._from[way.source].append(way)
        self.frames = 0
        self.refused = 0
        self.lateness: deque[float] = deque(maxlen=LATENESS_KEPT)

    def run(self) -> None:
        """Forward until stdin ends."""
        while True:
            # Frames to a full port wait until it is writable.
            ready = [way.waiting[0][0] for way in self.ways if way.waiting and not way.target.full]
            # select waits to the microsecond, where epoll rounds up to milliseconds.
            wait = max(0.0, min(ready) - time.monotonic()) if ready else None
            full = [port for port in self.ports.values() if port.full]
            readable, writable, _ = select.select([sys.stdin, *self.ports.values()], full, [], wait)
            for able in writable:
                able.full = False
            for port in readable:
                if isinstance(port, Port):
                    self._take(port)
                elif not self._obey():
                    return
            self._send(time.monotonic())

    def _take(self, port: Port) -> None:
        now = time.monotonic()
        for _ in range(AT_ONCE):
            try:
                frame = port.socket.recv(LARGEST_FRAME)
            except BlockingIOError:
                return
            for way in self._from[port.device]:
                if way.takes(frame):
                    way.waiting.append((now + way.delay, frame))

    def _send(self, now: float) -> None:
        for way in self.ways:
            while way.waiting and way.waiting[0][0] <= now and not way.target.full:
                due, frame = way.waiting[0]
                try:
                    way.target.socket.send(frame)
                    self.frames += 1
                except BlockingIOError:
                    # Retry for as long as a shaper's queue may hold the frame, beyond its delay.
                    if now - due <= QUEUE_SECONDS + 2 * way.delay:
                        way.target.full = True
                        break
                    self.refused += 1
                except OSError:
                    # The target's queue is full: drop the frame, as any network does.
                    self.refused += 1
                way.waiting.popleft()
                self.lateness.append(now - due)

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        if delays := json.loads(line).get("delays"):
            for way, delay in zip(self.ways, delays, strict=True):
                way.delay = delay
        self._answer()
        self.frames = self.refused = 0
        self.lateness.clear()
        return True

    def _answer(self) -> None:
        late = sorted(self.lateness)
        counted = {
            "frames": self.frames,
            "refused": self.refused,
            "missed": sum(port.count_missed() for port in self.ports.values()),
            "late_seconds_median": late[len(late) // 2] if late else 0.0,
            "late_seconds_p99": late[99 * len(late) // 100] if late else 0.0,
        }
        sys.stdout.write(json.dumps(counted) + "\n")
        sys.stdout.flush()


def main() -> None:
    # Raise the priority where allowed: a packet that waits for the processor arrives late.
    with contextlib.suppress(OSError):
        os.nice(-10)
    relay = Relay(json.loads(sys.stdin.readline())["ways"])
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
