"""How much of the coordinator one node's bulk calls may take: calls at a time, and memory of each."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

CHUNK_BYTES = 256 * 1024
MOST_CALLS = 2
"""Of one kind a node at a time: text and labels, two snapshots under way, a layer that is needed and one that
is fetched ahead."""
_ZEROS = bytes(CHUNK_BYTES)


@dataclass
class _Places:
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_CALLS))
    users: int = 0
    """Calls that have a place or wait for one."""


class CallLimit:
    """A call too many waits until another of its kind and node is over. Kinds do not wait for each other:
    an upload over a slow link takes minutes, and a step waits for its batch.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], _Places] = {}

    @asynccontextmanager
    async def turn(self, node_id: str, kind: str) -> AsyncIterator[None]:
        """Have a place inside the block."""
        places = self._places.setdefault((node_id, kind), _Places())
        places.users += 1
        try:
            async with places.free:
                yield
        finally:
            places.users -= 1
            if places.users == 0:
                del self._places[node_id, kind]

    def __len__(self) -> int:
        """Nodes and kinds with calls."""
        return len(self._places)


def chunks(data: bytes) -> Iterator[bytes]:
    """Copied one at a time; at least one."""
    yield data[:CHUNK_BYTES]
    for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def zeros(size: int) -> Iterator[bytes]:
    """Chunks of so many zero bytes, which are never all there; at least one."""
    yield _ZEROS[:size]
    for start in range(CHUNK_BYTES, size, CHUNK_BYTES):
        yield _ZEROS[: size - start]


def zeros_sha256(size: int) -> str:
    """Of what `zeros` gives."""
    digest = hashlib.sha256()
    for chunk in zeros(size):
        digest.update(chunk)
    return digest.hexdigest()
