"""gRPC's bidirectional streams as streams of byte messages. Any end raises `StreamDroppedError`."""

import asyncio
import re
from collections.abc import Iterator
from typing import Any, cast

import grpc
import grpc.aio

from wire.errors import LinkError
from wire.event_loop import on_thread

REFUSAL_KEY = "thinwire-refusal"
"""The key of the trailing metadata that holds a server's `RefusalCode`."""

# What gRPC prepends to the cause of a failed connection.
_GRPC_PREAMBLE = re.compile(r"^failed to connect to all addresses; last error: \w+: (?:ipv[46]:\S+: )?")

ClientCall = grpc.aio.StreamStreamCall[bytes, bytes]
ServerContext = grpc.aio.ServicerContext[bytes, bytes]


class StreamDroppedError(LinkError):
    """A stream has ended: the peer closed or refused it, or its connection was lost.

    `refusal` is the value of the peer's `RefusalCode`; empty if it gave none.
    """

    def __init__(self, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class ClientStream:
    """The calling end of a stream. `read` and `write` raise `StreamDroppedError` after its end."""

    def __init__(self, call: ClientCall) -> None:
        self._call = call

    async def opened(self) -> None:
        """Wait until the server has accepted the call."""
        try:
            await self._call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            raise _dropped(error.code(), error.details(), error.trailing_metadata()) from error

    async def read(self) -> bytes:
        try:
            message = await self._call.read()
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._status() from error
        if message is grpc.aio.EOF:
            raise await self._status()
        return cast(bytes, message)

    async def write(self, message: bytes) -> None:
        """Return when gRPC has room for more, which does not mean that the message was delivered."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise await self._status() from error

    async def _status(self) -> StreamDroppedError:
        # Called only after the stream has ended, so these return at once.
        call = self._call
        return _dropped(await call.code(), await call.details(), await call.trailing_metadata())


class ServerStream:
    """The called end of a stream, with the methods of `ClientStream`."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def read(self) -> bytes:
        try:
            message = cast("bytes | None", await self._context.read())
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise StreamDroppedError(f"the neighbour hung up ({_first_line(str(error))})") from error
        if not message:
            raise StreamDroppedError("the neighbour closed the stream")
        return message

    async def write(self, message: bytes) -> None:
        try:
            await self._context.write(message)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
            raise StreamDroppedError(f"the neighbour hung up ({_first_line(str(error))})") from error


ByteStream = ClientStream | ServerStream


class BulkClient:
    """The calling end of a stream on gRPC's synchronous stack. One thread reads; on another, gRPC takes the
    messages to send from an iterator."""

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        metadata: tuple[tuple[str, str], ...],
        sends: Iterator[bytes],
    ) -> None:
        # No serializers: messages are bytes.
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        self._call = stub(sends, metadata=metadata)

    async def opened(self) -> None:
        """Wait until the server has accepted the call."""
        await on_thread(self._call.initial_metadata, "bulk-open")
        if not self._call.is_active():
            raise self._status()

    def read(self) -> bytes:
        """Wait for a message. Raises `StreamDroppedError` when the stream has ended."""
        try:
            return next(self._call)
        except (StopIteration, grpc.RpcError):
            raise self._status() from None

    def end(self) -> None:
        """Wake `read`, which then raises. Any thread may call it."""
        self._call.cancel()

    def _status(self) -> StreamDroppedError:
        call = self._call
        return _dropped(call.code(), call.details(), call.trailing_metadata())


class BulkServer:
    """The called end of a bulk stream. The call ends with the handler's iterator, which also wakes `read`."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests

    def read(self) -> bytes:
        try:
            return next(self._requests)
        except (StopIteration, grpc.RpcError):
            raise StreamDroppedError("the neighbour hung up") from None

    def end(self) -> None:
        pass


BulkStream = BulkClient | BulkServer


def _dropped(code: grpc.StatusCode, details: str | None, trailing: Any) -> StreamDroppedError:
    refusal = next((value for key, value in trailing or () if key == REFUSAL_KEY), "")
    details = _first_line(details or "")
    if code is grpc.StatusCode.OK:
        return StreamDroppedError("the neighbour closed the stream")
    details = _GRPC_PREAMBLE.sub("", details)
    if "Hostname Verification" in details:
        details = "another node answers there: the name in its certificate differs"
    elif "handshake failed" in details:
        details = f"no secure connection: the other side's certificate is not from this run ({details})"
    return StreamDroppedError(details or code.name.lower(), str(refusal))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
