"""How many nodes the run's join tokens still admit, told as it changes: other processes make tokens too."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from node.coordinator.store import Store
from node.telemetry import events
from wire.errors import RunError
from wire.identity.token import TokenRecord

INTERVAL_SECONDS = 5.0


def uses_left(records: Iterable[TokenRecord], now: float) -> int:
    """Over all tokens that still admit somebody at the Unix time `now`."""
    usable = (record for record in records if not record.revoked and now < record.expires)
    return sum(max(0, record.uses_allowed - record.uses) for record in usable)


@asynccontextmanager
async def token_uses_told(
    store: Store,
    emit: Callable[[events.Event], None],
    *,
    interval: float = INTERVAL_SECONDS,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[None]:
    """Inside the block `emit` gets a `TokenUses` at once, then one within `interval` of a change."""

    async def watch() -> None:
        told = None
        while True:
            # A database that cannot be read now may be at the next look; whoever needs it complains.
            with contextlib.suppress(RunError):
                left = uses_left(await asyncio.to_thread(store.list_tokens), clock())
                if left != told:
                    told = left
                    emit(events.TokenUses(left=left))
            await asyncio.sleep(interval)

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
