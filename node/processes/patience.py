"""How long a machine waits: for a coordinator that is not up yet, or for a stopped run to continue."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from wire.pacing import RECONNECT_SECONDS, Backoff

LOOK_SECONDS = 1.0
"""The seconds between two updates of what is shown."""

Show = Callable[[str, float], None]
"""Called with what the machine waits for and the seconds left."""


class Patience:
    """Counts down from its creation."""

    def __init__(self, seconds: float = 0.0, show: Show | None = None) -> None:
        self._show = show if seconds else None
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The seconds left; 0 once it has ended."""
        return max(0.0, self._until - time.monotonic())

    @contextlib.asynccontextmanager
    async def shown(self, what: str) -> AsyncIterator[None]:
        """While the block runs, show what the machine waits for and the time left, after a moment."""
        task = asyncio.create_task(self._keep_showing(what))
        try:
            yield
        finally:
            task.cancel()

    async def _keep_showing(self, what: str) -> None:
        while self._show is not None:
            await asyncio.sleep(LOOK_SECONDS)
            self._show(what, self.left)


async def answered(ask: Callable[[], Awaitable[bool]], patience: Patience, what: str) -> bool:
    """Ask until the answer is yes. False once the patience has ended. Errors of `ask` propagate."""
    backoff = Backoff(0.2, RECONNECT_SECONDS)
    async with patience.shown(what):
        while not await ask():
            if patience.left < backoff.seconds:
                return False
            await asyncio.sleep(backoff.advance())
        return True
