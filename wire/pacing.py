"""A volunteer's bandwidth limit: everything bulky that a node sends passes one `Pacer` first."""

import asyncio

BURST_SECONDS = 0.05
"""Sending may run ahead of the rate by what fits in this time, or by one frame."""


class Pacer:
    """Lets through `rate` bytes a second on average, shared by all who send. One event loop only."""

    def __init__(self, rate: float) -> None:
        """`rate` in bytes a second, above 0."""
        self._rate = rate
        self._free_at = 0.0

    def reserve(self, size: int, now: float) -> float:
        """Book `size` bytes at `now` (seconds on any clock); gives the seconds to wait before sending."""
        start = max(self._free_at, now - BURST_SECONDS)
        self._free_at = start + size / self._rate
        return max(0.0, start - now)

    async def pass_through(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        delay = self.reserve(size, asyncio.get_running_loop().time())
        if delay > 0:
            await asyncio.sleep(delay)
