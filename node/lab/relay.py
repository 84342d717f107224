"""Delay without netem: packets between two devices, held back in user space. `python -m node.lab.relay`.

Frames come in on packet sockets and leave on others, in order, a set time later. Segments that the kernel has
batched stay batched (their virtio header travels along), so a gigabit needs only some thousand system calls a
second, no rate is lost, and TCP is not ended on the way: its congestion control sees the whole path.

Stdin: a line of JSON, {"ways": [{"source", "target", "mac"}…]}, then for each change of the delays a line
{"delays": [seconds, …]} by way, or {} to ask only. Each is answered by a line of JSON with what the relay has
counted since the one before; the end of stdin ends it.
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

# From linux/if_packet.h and asm-generic/socket.h; Python's socket module has none of them.
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
"""Of a port, each way. What waits in the queue of the device that it sends to is counted as the port's:
smaller than that queue, it would drop what a network carries."""
AT_ONCE = 64
"""Frames read from one port before the others get their turn."""
LATENESS_KEPT = 100_000


class Port:
    """One device's packet socket, and what waits to leave through it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        for forced, allowed in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
            except PermissionError:
                # Rootless: as much as the host allows to everyone.
                self.socket.setsockopt(socket.SOL_SOCKET, allowed, BUFFER_BYTES)
        self.socket.bind((device, ETH_P_ALL))
        self.socket.setblocking(False)
        self.full = False
        """It took no more when it was last given a frame."""

    def fileno(self) -> int:
        return self.socket.fileno()

    def count_missed(self) -> int:
        """Frames that the kernel dropped because the relay was too slow, since this was last asked."""
        # Reading the counters sets them back.
        _, drops = struct.unpack("II", self.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        return int(drops)


class Way:
    """From one port to another."""

    def __init__(self, source: str, target: Port, mac: str) -> None:
        self.source = source
        self.target = target
        self.mac = bytes.fromhex(mac.replace(":", ""))
        self.delay = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()

    def takes(self, frame: bytes) -> bool:
        """Its own frames, and those for everybody (the lowest bit of the first address byte)."""
        address = frame[VNET_HEADER : VNET_HEADER + 6]
        return not self.mac or address == self.mac or bool(address[0] & 1)


class Relay:
    """All ports and ways of a laboratory."""

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
            # What is due at a full port waits for the port.
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
                    # As long as a shaper's queue holds it, beyond its delay.
                    if now - due <= QUEUE_SECONDS + 2 * way.delay:
                        way.target.full = True
                        break
                    self.refused += 1
                except OSError:
                    # The far queue is full: the network drops a packet, as any would.
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
    # Where it is allowed: a packet that waits for the processor arrives late.
    with contextlib.suppress(OSError):
        os.nice(-10)
    relay = Relay(json.loads(sys.stdin.readline())["ways"])
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    relay.run()


if __name__ == "__main__":
    main()
