"""Sends and receives layers of snapshots, on gRPC's synchronous stack, with one thread per call.

A state's bytes do not pass the event loop, which only decides who may send and fetch what. The service
decodes a request, asks the `Coordinator`, and encodes the answer, as `node.coordinator.control_service` does
for everything else.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, NoReturn, TypeVar

import grpc

from node.coordinator.control_service import NodeRefusedError, admitted, place_chunk, when_served
from node.coordinator.coordinator import Coordinator
from node.coordinator.sessions import SessionDesk
from node.coordinator.snapshot_handler import NotDueError, UploadPermit
from node.state.manifest import LayerSource
from node.state.snapshot import NewFile
from wire.channels import NOT_YET
from wire.data_messages import as_bytes, data_message, data_or
from wire.errors import (
    DiskFullError,
    NotYetError,
    ProtocolViolationError,
    RunError,
    ThinwireError,
    without_folders,
)
from wire.front import Front
from wire.layer_exchange import growing_pieces
from wire.messages import MOST_HELD
from wire.v1 import control_pb2

PIECE_BYTES = 256 * 1024, 1024 * 1024
"""The least and the most bytes of a layer that are sent at a time."""
MOST_CALLS = 2
"""The most concurrent calls of one kind and node. Correct nodes make no more, and more are refused."""
CALLS, THREADS = 256, 272
"""The most calls that are served at a time, and the threads. Further calls are refused on the remaining
threads, and nodes ask again."""

SERVICE = "thinwire.wire.v1.Coordinator"

Result = TypeVar("Result")


class LayerService:
    """`GetLayer` and `PutLayer`. Create it on the event loop."""

    def __init__(self, handler: Coordinator, desk: SessionDesk, front: Front) -> None:
        """`front`: what accepted the service's connections."""
        self._handler = handler
        self._desk = desk
        self._front = front
        self._loop = asyncio.get_running_loop()
        self._calls = Counter[tuple[str, str]]()
        """The number of calls by node and kind. Only the event loop uses it."""

    def add_to(self, server: grpc.Server) -> None:
        chunk = control_pb2.PutLayerChunk
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GetLayer": grpc.unary_stream_rpc_method_handler(
                self.get_layer, control_pb2.GetLayerRequest.FromString, as_bytes
            ),
            "PutLayer": grpc.stream_unary_rpc_method_handler(
                self.put_layer, data_or(chunk.FromString, chunk.DATA_FIELD_NUMBER), as_bytes
            ),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])

    def get_layer(
        self, request: control_pb2.GetLayerRequest, context: grpc.ServicerContext
    ) -> Iterator[control_pb2.DataChunk | bytes]:
        with self._errors(context), self._place(context, "get layer") as node_id:
            answer = self._decided(context, self._answer(node_id, request))
            if isinstance(answer, control_pb2.DataChunk):
                yield answer
                return
            digest, file = answer
            with contextlib.closing(file):
                for start, end in growing_pieces(0, file.size, *PIECE_BYTES):
                    data = file.read(start, end - start)
                    if start:
                        yield data_message(control_pb2.DataChunk.DATA_FIELD_NUMBER, data)
                    else:
                        yield control_pb2.DataChunk(data=data, total_bytes=file.size, sha256=digest)

    def put_layer(
        self, requests: Iterator[control_pb2.PutLayerChunk | memoryview], context: grpc.ServicerContext
    ) -> control_pb2.PutLayerReply:
        with self._errors(context), self._place(context, "put layer") as node_id:
            try:
                self._receive(node_id, requests, context)
            except RunError as error:
                return control_pb2.PutLayerReply(stored=False, message=without_folders(str(error)))
            except NotDueError as error:
                self._loop.call_soon_threadsafe(self._not_due, node_id, str(error))
                raise
            return control_pb2.PutLayerReply(stored=True)

    # ---- on the call's thread

    def _receive(
        self,
        node_id: str,
        uploaded: Iterator[control_pb2.PutLayerChunk | memoryview],
        context: grpc.ServicerContext,
    ) -> None:
        """Receive one upload. Uploads that are not due, or too large for their layer, are dropped."""
        first = next(uploaded, None)
        if not isinstance(first, control_pb2.PutLayerChunk):
            raise NotDueError("the upload is incomplete")
        permit = self._decided(context, self._permit(node_id, first))
        what = f"layer {first.unit} of step {first.step}"
        size = first.total_bytes
        if size > permit.most_bytes:
            self._refuse(context, permit, f"{what} has at most {permit.most_bytes} bytes, not {size}")
        file = ahead = None
        # Read and drop a layer that is already stored, because a client may take an early reply for a lost
        # link.
        if not permit.is_stored:
            if first.weights_at:
                ahead = self._decided(context, self._handler.weights_ahead(permit))
            whole = size + (0 if ahead is None else ahead.size)
            file = self._decided(context, self._handler.arriving(permit, whole))
        with contextlib.ExitStack() as unless_complete:
            if file is not None:
                unless_complete.callback(file.close)
            came = 0
            for data in itertools.chain([memoryview(first.data)], map(_data, uploaded)):
                # Insert the weights that were sent ahead here.
                cut = first.weights_at - came
                came += len(data)
                if came > size:
                    self._refuse(context, permit, f"{what} has more than the announced {size} bytes")
                if file is None:
                    continue
                with self._disk_errors():
                    if ahead is not None and 0 < cut <= len(data):
                        file.take(data[:cut])
                        for at in range(0, ahead.size, PIECE_BYTES[1]):
                            file.take(ahead.read(at, PIECE_BYTES[1]))
                        data = data[cut:]
                    file.take(data)
            if came != size:
                raise NotDueError(f"{what} ended after {came} of {size} bytes")
            unless_complete.pop_all()
        self._decided(context, self._store(permit, file))

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """A full disk raises NotYetError, as the next try waits for space. Other failures end the run."""
        try:
            yield
        except DiskFullError as error:
            raise NotYetError(str(error)) from error
        except RunError as error:
            self._loop.call_soon_threadsafe(self._handler.fail, str(error))
            raise

    def _refuse(self, context: grpc.ServicerContext, permit: UploadPermit, why: str) -> NoReturn:
        self._decided(context, self._handler.layer_refused(permit, why))
        raise ProtocolViolationError(why)

    def _decided(self, context: grpc.ServicerContext, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` on the event loop and return its result. It is cancelled together with the call."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)

        def cancel() -> None:
            future.cancel()

        if not context.add_callback(cancel):
            cancel()
        return future.result()

    @contextlib.contextmanager
    def _place(self, context: grpc.ServicerContext, kind: str) -> Iterator[str]:
        """The calling node's id. It holds a slot for calls of this kind inside the block."""
        node_id = self._decided(context, self._enter(context, kind))
        try:
            yield node_id
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._leave, node_id, kind)

    @contextlib.contextmanager
    def _errors(self, context: grpc.ServicerContext) -> Iterator[None]:
        """End the call with the status of an error that is raised inside the block."""
        try:
            yield
        except CancelledError:
            context.abort(grpc.StatusCode.CANCELLED, "the call is over")
        except NodeRefusedError as error:
            _abort(context, grpc.StatusCode.PERMISSION_DENIED, error)
        except NotYetError as error:
            _abort(context, NOT_YET, error)
        except ThinwireError as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, error)

    # ---- on the event loop

    async def _enter(self, context: grpc.ServicerContext, kind: str) -> str:
        node_id = await admitted(context, self._handler, self._front)
        if self._calls[node_id, kind] >= MOST_CALLS or self._calls.total() >= CALLS:
            raise NotYetError("the coordinator already serves as many layers as it can")
        self._calls[node_id, kind] += 1
        return node_id

    def _leave(self, node_id: str, kind: str) -> None:
        self._calls[node_id, kind] -= 1
        if not self._calls[node_id, kind]:
            del self._calls[node_id, kind]

    async def _answer(
        self, node_id: str, request: control_pb2.GetLayerRequest
    ) -> control_pb2.DataChunk | tuple[str, LayerSource]:
        """Where the layer is, or that the node's file is right; otherwise its SHA-256 and the file."""
        await when_served(self._desk, node_id, "get layer")
        handler = self._handler
        if (count := len(request.bad_holders)) > MOST_HELD:
            why = f"a request that doubts {count} holders of a layer, more than {MOST_HELD}"
            handler.refused(node_id, why)
            raise ProtocolViolationError(why)
        placed = handler.layer_holders(node_id, request.step, request.unit, request.bad_holders)
        if placed is not None:
            return place_chunk(*placed)
        layer = await handler.layer(request.step, request.unit)
        entry = layer.entry
        if request.held_sha256 == entry.sha256:
            return control_pb2.DataChunk(total_bytes=entry.bytes, sha256=entry.sha256)
        await when_served(self._desk, node_id, f"layer {request.unit} of {request.step}")
        return entry.sha256, await layer.open()

    async def _permit(self, node_id: str, first: control_pb2.PutLayerChunk) -> UploadPermit:
        await when_served(self._desk, node_id, "put layer")
        try:
            return self._handler.upload_permit(
                node_id, first.step, first.unit, weights_alone=first.weights_alone
            )
        except NotDueError:
            raise
        except ProtocolViolationError as error:
            self._handler.refused(node_id, str(error))
            raise

    async def _store(self, permit: UploadPermit, file: NewFile | None) -> None:
        try:
            await self._handler.store_layer(permit, file)
        except NotDueError:
            raise
        except ProtocolViolationError as error:
            await self._handler.layer_refused(permit, str(error))
            raise

    def _not_due(self, node_id: str, why: str) -> None:
        """A correct node sends few layers that are not due. A node that continues does nothing else."""
        limits = self._desk.limits_of(node_id)
        if limits is not None and not limits.serves("not due", 1, time.monotonic()):
            self._handler.refused(node_id, why)


def _data(chunk: control_pb2.PutLayerChunk | memoryview) -> memoryview:
    return chunk if isinstance(chunk, memoryview) else memoryview(chunk.data)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, error: ThinwireError) -> NoReturn:
    context.abort(code, without_folders(str(error)))
    raise AssertionError("abort raises")
