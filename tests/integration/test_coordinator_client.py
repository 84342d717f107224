"""A node's bulk calls to the coordinator share one connection; an error in one does not affect others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc.aio
import pytest

from node.model.labels import BatchPart
from node.stage.coordinator_client import CoordinatorClient, _Shared
from node.state.manifest import LayerFile
from wire.channels import NOT_YET
from wire.errors import LinkLostError
from wire.v1 import control_pb2, control_pb2_grpc

BATCH = bytes(range(16))
SECONDS = 60.0
OUTAGE = 1.0
Context = grpc.aio.ServicerContext[Any, Any]


class Plain(CoordinatorClient):
    """Dials without certificates."""

    def __init__(self, port: int, outage_seconds: float = SECONDS) -> None:
        super().__init__(f"127.0.0.1:{port}", _no_identity, outage_seconds)

    def _dial(self, *, session: bool = False) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address)

    def _dial_layers(self) -> _Shared:
        channel = grpc.insecure_channel(self.address)
        closes = SimpleNamespace(close=AsyncMock(side_effect=channel.close))
        return _Shared(closes, control_pb2_grpc.CoordinatorStub(channel))


def _no_identity() -> Any:
    raise AssertionError("nothing here needs an identity")


class Slow(control_pb2_grpc.CoordinatorServicer):
    """Fails the first `failures` uploads, and answers a batch only when the test lets it."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.failure = grpc.StatusCode.UNAVAILABLE
        self.asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def PutLayer(
        self, requests: AsyncIterator[control_pb2.PutLayerChunk], context: Context
    ) -> control_pb2.PutLayerReply:
        async for _ in requests:
            pass
        if self.failures:
            self.failures -= 1
            await context.abort(self.failure, "gone")
        return control_pb2.PutLayerReply(stored=True)

    async def GetBatch(
        self, request: control_pb2.GetBatchRequest, context: Context
    ) -> AsyncIterator[control_pb2.DataChunk]:
        self.asked.set()
        await self.answer.wait()
        yield control_pb2.DataChunk(data=BATCH, total_bytes=len(BATCH), sha256=sha256(BATCH).hexdigest())

    async def GetLayer(
        self, request: control_pb2.GetLayerRequest, context: Context
    ) -> AsyncIterator[control_pb2.DataChunk]:
        digest = sha256(BATCH).hexdigest()
        data = b"" if digest == request.held_sha256 else BATCH
        yield control_pb2.DataChunk(data=data, total_bytes=len(BATCH), sha256=digest)


@contextlib.asynccontextmanager
async def connected(service: Slow, **options: float) -> AsyncIterator[Plain]:
    """A client of a server with this service, for as long as a test may take."""
    server = grpc.aio.server()
    control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)
    client = Plain(server.add_insecure_port("127.0.0.1:0"), **options)
    await server.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield client
    finally:
        await client.close()
        await server.stop(None)


async def test_a_local_layer_is_not_sent() -> None:
    async with connected(Slow(failures=0)) as client:
        right = LayerFile(bytes(BATCH), sha256(BATCH).hexdigest())
        assert await client.layer(2, "embed", len(BATCH), right) is right
        for other in (None, LayerFile(b"other", sha256(b"other").hexdigest())):
            assert await client.layer(2, "embed", len(BATCH), other) == right


async def test_a_failed_upload_leaves_a_download_in_peace() -> None:
    service = Slow(failures=1)
    async with connected(service) as client, asyncio.TaskGroup() as group:
        batch = group.create_task(client.batch(4, part=BatchPart.INPUTS, size=len(BATCH)))
        await service.asked.wait()
        await client.put_layer(2, "embed", LayerFile.of(b"state"))
        assert service.failures == 0
        service.answer.set()
    assert not batch.cancelled()
    assert batch.result() == BATCH


async def test_an_outage_counts_from_when_a_call_broke() -> None:
    """An upload that has run for longer than `OUTAGE` may still lose its connection and go on."""

    class Late(Slow):
        async def PutLayer(
            self, requests: AsyncIterator[control_pb2.PutLayerChunk], context: Context
        ) -> control_pb2.PutLayerReply:
            if self.failures:
                await asyncio.sleep(2 * OUTAGE)
            return await super().PutLayer(requests, context)

    service = Late(failures=1)
    async with connected(service, outage_seconds=OUTAGE) as client:
        await client.put_layer(2, "embed", LayerFile.of(b"state"))
    assert service.failures == 0


async def test_a_coordinator_that_is_still_starting_is_not_an_outage() -> None:
    service = Slow(failures=5)
    service.failure = NOT_YET
    async with connected(service, outage_seconds=OUTAGE) as client:
        await client.put_layer(2, "embed", LayerFile.of(b"state"))  # after waits of more than `OUTAGE`
    assert service.failures == 0


async def test_an_outage_that_lasts_too_long_is_an_error_of_each_call() -> None:
    async with connected(Slow(failures=10**6), outage_seconds=1.0) as client:
        uploads = [client.put_layer(2, unit, LayerFile.of(b"state")) for unit in ("embed", "head")]
        outcomes = await asyncio.gather(*uploads, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LinkLostError, LinkLostError]
        with pytest.raises(LinkLostError, match="for 1 s"):
            await client.put_layer(2, "embed", LayerFile.of(b"state"))
