"""Decides when to send and when to retry: bandwidth limit, keep-alive, back-off."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

BURST_SECONDS = 0.05
"""Sending may exceed the rate by what fits in this time, or by one frame."""

LEAST_PIECE = 16 * 1024
"""The least bytes of a piece, however slow the line is."""

YIELD_SECONDS, YIELD_TIMES = 0.25, 5
"""What may wait does so at most so long, and at most so many times its own time on the line, while other
traffic is queued."""
_LOOK_SECONDS = 0.01

KEEP_ALIVE = b"\0"
"""One byte on the bulk stream. It cannot be a frame, which has 64 bytes or more."""
PERIOD_SECONDS = 0.1
"""The interval between keep-alives, which is below Linux's least retransmission timeout."""
LONGEST_SECONDS = 3.0
"""The longest pause over which keep-alives are sent. After a longer one TCP has lost its rate anyway."""
LEAST_ROUND_TRIP = 0.005
"""The least round trip, in seconds, at which keep-alives help. Below it, slow start ends within one
message."""

RECONNECT_SECONDS = 2.0
"""The longest pause between two attempts to connect."""


class Pacer:
    """A bandwidth limit of `rate` bytes per second on average, for everything that shares it. Thread-safe."""

    def __init__(self, rate: float, ahead: float = BURST_SECONDS) -> None:
        """
        Args:
            rate: bytes per second, above 0.
            ahead: how many seconds' worth of bytes may pass at once after a pause.
        """
        self.rate = rate
        self._ahead = ahead
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._behind = threading.Lock()
        """Held by the one that waits for an idle line."""

    @property
    def piece(self) -> int:
        """How many bytes to take at once, so that others who share the rate do not wait long."""
        return max(LEAST_PIECE, int(BURST_SECONDS * self.rate))

    def reserve(self, size: int, now: float) -> float:
        """Reserve `size` bytes at `now` (seconds on any clock). Returns the seconds to wait first."""
        with self._lock:
            start = max(self._free_at, now - self._ahead)
            self._free_at = start + size / self.rate
        return max(0.0, start - now)

    def reserve_behind(
        self, size: int, now: Callable[[], float], wait: Callable[[float], bool]
    ) -> float | None:
        """Reserve bytes that may wait for others', on any thread. One caller at a time does so, once the line
        is idle or after `YIELD_TIMES` as long as they take. So other bytes wait for those of one caller only,
        however many there are.

        `now` is the clock. `wait` takes seconds, and returns False to give up. Returns the seconds to wait
        first, or None.
        """
        own = size / self.rate
        while not self._behind.acquire(timeout=own):
            if not wait(0.0):
                return None
        try:
            latest = now() + YIELD_TIMES * own
            while (busy := min(self._free_at, latest) - now()) > 0:
                if not wait(busy):
                    return None
            return self.reserve(size, now())
        finally:
            self._behind.release()

    async def pass_through(
        self,
        size: int,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Wait until `size` bytes may be sent. `now` is the clock that `sleep` waits by."""
        delay = self.reserve(size, now())
        if delay > 0:
            await sleep(delay)


class BesideTraining:
    """Passes other traffic than training's tensors, such as layers of snapshots. Tensors go first.

    With a bandwidth limit, one small piece at a time takes its share of the rate. A tensor that comes then
    waits for no more than that piece, however many transfers there are. On a busy line, these have at most a
    sixth of the rate.
    """

    def __init__(
        self,
        pacer: Pacer | None,
        busy: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            pacer: the node's bandwidth limit, if it has one.
            busy: whether training tensors are waiting to be sent.
            now: the clock that `sleep` waits by.
        """
        self._pacer, self._busy = pacer, busy
        self._now, self._sleep = now, sleep
        self._turn = asyncio.Lock()

    async def pass_through(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        if self._pacer is None:
            return await self._yield(YIELD_SECONDS)
        while size > 0:
            piece = min(size, self._pacer.piece)
            async with self._turn:
                await self._yield(max(YIELD_SECONDS, YIELD_TIMES * piece / self._pacer.rate))
                await self._pacer.pass_through(piece, self._now, self._sleep)
            size -= piece

    async def _yield(self, most: float) -> None:
        """Wait for training traffic, but not for long: a transfer continues on busy links too."""
        for _ in range(int(most / _LOOK_SECONDS)):
            if not self._busy():
                return
            await self._sleep(_LOOK_SECONDS)


class KeepAlive:
    """Decides when an idle bulk stream sends `KEEP_ALIVE`, so that TCP keeps its rate over a pause.

    Between steps a bulk stream pauses for a round trip or more. After it was idle for a retransmission
    timeout (0.2 s or more), TCP restarts with ten packets per round trip (RFC 5681, section 4.1). With round
    trips of tens of milliseconds, most of a step would be over before the link is full. With an occasional
    byte the connection is never idle, and TCP only halves an unused window once per timeout (RFC 7661).
    """

    def __init__(self) -> None:
        self._frame_at: float | None = None
        self._sent_at = 0.0

    def frame_sent(self, now: float) -> None:
        self._frame_at = self._sent_at = now

    def sent(self, now: float) -> None:
        """Record that `KEEP_ALIVE` was sent."""
        self._sent_at = now

    def due_at(self, round_trip: float) -> float | None:
        """When to send the next keep-alive; None if none is needed before the next frame.

        Args:
            round_trip: the link's round trip in seconds; 0 while unknown.
        """
        if self._frame_at is None or round_trip < LEAST_ROUND_TRIP:
            return None
        due = self._sent_at + PERIOD_SECONDS
        return due if due <= self._frame_at + LONGEST_SECONDS else None


class Backoff:
    """The pause before the next attempt: `least` seconds, doubled each time, up to `most`."""

    def __init__(self, least: float, most: float) -> None:
        self._least, self._most = least, most
        self.seconds = least

    def reset(self) -> None:
        """Return to the shortest pause after an attempt has succeeded."""
        self.seconds = self._least

    def advance(self) -> float:
        """The pause to make now. The next one is longer."""
        pause, self.seconds = self.seconds, min(2 * self.seconds, self._most)
        return pause
