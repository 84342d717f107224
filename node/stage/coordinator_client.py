"""A node's two connections to the coordinator: a control stream, and bulk data on a separate socket."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
import numpy as np

from node.config.schema import RunConfig
from node.model.labels import IGNORED, SMALL_BYTES, BatchPart, bytes_of, from_bytes, steps_at_once
from node.stage.layer_peers import LayerPlace
from node.state.manifest import LayerFile, LayerSource
from wire.channels import NOT_YET, BulkChannel, open_channel
from wire.data_messages import ArrivingFile, as_bytes, data_message, data_or
from wire.errors import (
    LinkError,
    LinkLostError,
    NotYetError,
    PackedMismatchError,
    ProtocolViolationError,
    Refused,
    RunError,
    ThinwireError,
    first_error,
)
from wire.event_loop import on_thread
from wire.identity.credentials import NodeIdentity
from wire.identity.enrolment import Refusal
from wire.layer_exchange import growing_pieces
from wire.messages import CoordinatorMessage, HeldLayer, Hello, NodeMessage, PlacedStage
from wire.messages_proto import coordinator_message_from_proto, node_message_to_proto, refusal_from_proto
from wire.pacing import RECONNECT_SECONDS, Backoff, Pacer
from wire.v1 import control_pb2, control_pb2_grpc

GET_LAYER, PUT_LAYER = "/thinwire.wire.v1.Coordinator/GetLayer", "/thinwire.wire.v1.Coordinator/PutLayer"
PIECE_BYTES = 256 * 1024, 1024 * 1024
"""The least and the most bytes of a layer that are sent at a time."""
MOST_LAYERS = 2
"""The most layers that are fetched, and that are sent, at a time. The coordinator serves no more per node."""
TOGETHER_BYTES = 16 * 1024
"""Messages are joined until they have this many bytes. A message has up to 200 kB, and gRPC's limit is 260
kB."""
PROBE_BYTES = 1024 * 1024
CALL_SECONDS = 600.0
"""The seconds for a bulk call, in addition to the time for its bytes."""
ANSWER_SECONDS = 5.0
LEAST_RATE = 32 * 1024
"""The least bytes per second. A slower transfer times out."""

_FATAL = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}

Result = TypeVar("Result")


class _Channel(Protocol):
    async def close(self) -> None: ...


@dataclass
class _Shared:
    """A channel and the number of calls on it."""

    channel: _Channel
    stub: control_pb2_grpc.CoordinatorStub
    users: int = 0


class _LayerStub(control_pb2_grpc.CoordinatorStub):
    """The calls that transfer layers. `wire.data_messages` encodes and decodes their messages."""

    def __init__(self, channel: grpc.Channel) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        chunk = control_pb2.DataChunk
        self.GetLayer = channel.unary_stream(
            GET_LAYER,
            control_pb2.GetLayerRequest.SerializeToString,
            data_or(chunk.FromString, chunk.DATA_FIELD_NUMBER),
        )
        self.PutLayer = channel.stream_unary(PUT_LAYER, as_bytes, control_pb2.PutLayerReply.FromString)


class _Calls:
    """Calls on one channel, which is dialled again after it breaks."""

    def __init__(self, dial: Callable[[], _Shared]) -> None:
        self._dial = dial
        self._shared: _Shared | None = None

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.channel.close()
            self._shared = None

    async def retry(
        self,
        call: Callable[[control_pb2_grpc.CoordinatorStub], Awaitable[Result]],
        outage_seconds: float,
        address: str,
    ) -> Result:
        """Run one call; repeat it after a lost connection, within the outage limit.

        The limit counts from the first loss. A coordinator that answers "not yet" is no outage.
        """
        deadline = math.inf
        backoff = Backoff(0.2, RECONNECT_SECONDS)
        while True:
            shared = self._shared = self._shared or self._dial()
            shared.users += 1
            try:
                return await call(shared.stub)
            except grpc.RpcError as error:
                failure = _as_error(error)
                if isinstance(failure, Refused | RunError):
                    raise failure from None
                if isinstance(failure, NotYetError):
                    deadline = math.inf
                else:
                    deadline = min(deadline, time.monotonic() + outage_seconds)
                if time.monotonic() + backoff.seconds > deadline:
                    raise LinkLostError(
                        f"the coordinator at {address} did not answer for {outage_seconds:g} s"
                    ) from None
                if self._shared is shared:
                    self._shared = None
            finally:
                shared.users -= 1
                # Closing a shared channel would cancel the calls of other tasks.
                if shared.users == 0 and self._shared is not shared:
                    await shared.channel.close()
            await asyncio.sleep(backoff.advance())


class CoordinatorClient:
    """The node's connections to the coordinator. It dials with the newest identity and reconnects for at most
    `outage_seconds`."""

    def __init__(
        self,
        address: str,
        identity: Callable[[], NodeIdentity],
        outage_seconds: float,
        pacer: Pacer | None = None,
    ) -> None:
        self.address = address
        self.layer_bytes_came: Callable[[int], None] = lambda count: None
        """Called with the size of each received part of a layer's file."""
        self._pacer = pacer
        self.outage_seconds = outage_seconds
        self._identity = identity
        self._calls, self._layers = _Calls(self._dial_calls), _Calls(self._dial_layers)
        self._turns = {"get": asyncio.Semaphore(MOST_LAYERS), "put": asyncio.Semaphore(MOST_LAYERS)}

    def _dial(self, *, session: bool = False) -> grpc.aio.Channel:
        identity = self._identity()
        name = identity.session_name if session else identity.coordinator_name
        return open_channel(self.address, identity=identity, server_name=name)

    def _dial_calls(self) -> _Shared:
        channel = self._dial()
        return _Shared(channel, control_pb2_grpc.CoordinatorStub(channel))

    def _dial_layers(self) -> _Shared:
        """Dial on gRPC's synchronous stack, because layers bypass the event loop."""
        identity = self._identity()
        channel = BulkChannel(self.address, identity=identity, server_name=identity.coordinator_name)
        return _Shared(channel, _LayerStub(channel.channel))

    # ---- control

    async def session(
        self,
        hello: Hello,
        outbox: "asyncio.Queue[NodeMessage]",
        handle: Callable[[CoordinatorMessage], Awaitable[None]],
        connected: Callable[[], None],
    ) -> None:
        """Keep one control connection until it breaks (LinkError) or the coordinator refuses (Refused)."""
        if self._identity().expires_at <= time.time():
            # The handshake would fail without saying why.
            raise LinkError(self._identity().ended())
        channel = self._dial(session=True)
        try:
            stub = control_pb2_grpc.CoordinatorStub(channel)
            call = stub.Session()

            async def send() -> None:
                # A stream that ends during a write may still hold a goodbye or a refusal. The reader finds
                # it, or the reason for the end.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(node_message_to_proto(hello))
                    while True:
                        # Messages are joined because each one costs both ends more than its contents.
                        messages = [node_message_to_proto(await outbox.get())]
                        room = TOGETHER_BYTES - messages[0].ByteSize()
                        while room > 0 and not outbox.empty():
                            messages.append(node_message_to_proto(outbox.get_nowait()))
                            room -= messages[-1].ByteSize()
                        several = control_pb2.Several(messages=messages)
                        whole = control_pb2.NodeMessage(several=several)
                        await call.write(whole if len(messages) > 1 else messages[0])

            async with asyncio.TaskGroup() as group:
                sender = group.create_task(send())
                first = True
                async for reply in call:
                    message = coordinator_message_from_proto(_parsed(reply))
                    if isinstance(message, Refusal):
                        raise Refused(message.code, message.message)
                    if first:
                        connected()
                        first = False
                    await handle(message)
                sender.cancel()
            raise LinkError("the coordinator closed the control connection")
        except* (grpc.aio.AioRpcError, asyncio.InvalidStateError, LinkError, Refused) as errors:
            raise _as_error(first_error(errors)) from None
        finally:
            await channel.close()

    # ---- bulk

    async def answers(self) -> bool:
        """Whether the coordinator takes calls now. Raises Refused or RunError if it refuses this node."""
        channel = self._dial()
        try:
            await _probe(control_pb2_grpc.CoordinatorStub(channel), 1, ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            if isinstance(failure := _as_error(error), Refused | RunError):
                raise failure from None
            return False
        finally:
            await channel.close()
        return True

    async def measure_download(self) -> float:
        """The bytes per second from the coordinator, measured by a download on a warm connection."""
        await self._retry(lambda stub: _probe(stub, 16 * 1024))
        began = time.perf_counter()
        await self._retry(lambda stub: _probe(stub, PROBE_BYTES))
        return PROBE_BYTES / (time.perf_counter() - began)

    async def batch(
        self,
        step: int,
        *,
        part: BatchPart,
        size: int,
        held_out: bool = False,
        groups: tuple[int, ...] = (),
        steps: int = 1,
    ) -> bytes:
        """A part of a step's or held-out batch: exactly `size` bytes, encoded by
        `node.model.labels.to_bytes`.

        Args:
            groups: only these gradient groups; all by default.
            steps: how many consecutive steps to fetch, starting with `step`.
        """
        request = control_pb2.GetBatchRequest(
            step=step,
            labels=part is BatchPart.LABELS,
            documents=part is BatchPart.DOCUMENTS,
            held_out=held_out,
            groups=groups,
            steps=steps,
        )
        return await self._retry(
            lambda stub: _collect(
                stub.GetBatch(request, timeout=CALL_SECONDS), size, f"{_batch_name(step, held_out)}"
            )
        )

    async def layer(
        self, step: int, unit: str, limit: int, kept: LayerFile | None = None, bad: Collection[str] = ()
    ) -> LayerFile | LayerPlace:
        """A layer unit's snapshot file of at most `limit` bytes, its SHA-256 checked; or where to fetch it.

        Args:
            kept: this node's copy. The coordinator does not send the file again if it is the same.
            bad: nodes whose copy is damaged or missing.
        """
        held = kept.sha256 if kept is not None else ""
        request = control_pb2.GetLayerRequest(step=step, unit=unit, held_sha256=held, bad_holders=sorted(bad))
        what, loop = f"layer {unit} of step {step}", asyncio.get_running_loop()

        async def call(stub: control_pb2_grpc.CoordinatorStub) -> LayerFile | control_pb2.DataChunk:
            download = _Download(limit, what, exact=False, kept=kept)
            asked = stub.GetLayer(request, timeout=_call_seconds(limit))

            def receive() -> LayerFile | control_pb2.DataChunk:
                for maybe in asked:
                    chunk: control_pb2.DataChunk | memoryview = _parsed(maybe)
                    if not isinstance(chunk, memoryview) and chunk.HasField("place"):
                        asked.cancel()
                        return chunk
                    count = download.take(chunk)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_soon_threadsafe(self.layer_bytes_came, count)
                return download.file()

            return await _on_thread(receive, asked)

        async with self._turns["get"]:
            answer = await self._retry(call, self._layers)
        if isinstance(answer, LayerFile):
            return answer
        return LayerPlace(
            step=step,
            unit=unit,
            bytes=answer.total_bytes,
            sha256=answer.sha256,
            holders=tuple(
                PlacedStage(node_id=holder.node_id, address=holder.address) for holder in answer.place.holders
            ),
            url=answer.place.url,
        )

    async def hold_layers(
        self, layers: Sequence[HeldLayer], missing: Sequence[tuple[int, str]] = ()
    ) -> list[tuple[int, str]]:
        """Tell the coordinator which files are on this node's disk, and which requested files are not.

        Returns step and unit of files that belong to no snapshot.
        """
        request = control_pb2.HoldLayersRequest(
            layers=[control_pb2.HeldLayer(**vars(layer)) for layer in layers],
            missing=[control_pb2.LayerName(step=step, unit=unit) for step, unit in missing],
        )

        async def call(stub: control_pb2_grpc.CoordinatorStub) -> list[tuple[int, str]]:
            reply = _parsed(await stub.HoldLayers(request, timeout=CALL_SECONDS))
            return [(name.step, name.unit) for name in reply.unknown]

        return await self._retry(call)

    async def put_layer(
        self, step: int, unit: str, file: LayerSource, *, weights_alone: bool = False, weights_at: int = 0
    ) -> None:
        """Upload one layer unit's snapshot file; returns when the coordinator has it on disk.

        Args:
            weights_alone: the file holds only the weights, which are sent first.
            weights_at: the offset of the weights in the file, if they were sent first.

        Raises RunError if one of the two disks fails.
        """
        failed: list[RunError] = []
        over = threading.Event()

        def chunks() -> Iterator[control_pb2.PutLayerChunk | bytes]:
            """The chunks to send. Runs on a thread of gRPC, which only logs exceptions."""
            for start, end in growing_pieces(0, file.size, *PIECE_BYTES):
                if self._pacer is not None and start:
                    over.wait(self._pacer.reserve(end - start, time.monotonic()))
                if over.is_set():
                    return
                try:
                    data = file.read(start, end - start)
                except RunError as error:
                    failed.append(error)
                    return
                if start:
                    yield data_message(control_pb2.PutLayerChunk.DATA_FIELD_NUMBER, data)
                else:
                    yield control_pb2.PutLayerChunk(
                        step=step,
                        unit=unit,
                        total_bytes=file.size,
                        sha256=file.sha256,
                        weights_alone=weights_alone,
                        weights_at=weights_at,
                        data=data,
                    )

        async def call(stub: control_pb2_grpc.CoordinatorStub) -> None:
            sent = stub.PutLayer.future(chunks(), timeout=_call_seconds(file.size))
            try:
                reply = _parsed(await _on_thread(sent.result, sent))
            except grpc.RpcError:
                if failed:
                    raise failed[0] from None
                raise
            if not reply.stored:
                raise RunError(reply.message)

        try:
            async with self._turns["put"]:
                await self._retry(call, self._layers)
        finally:
            over.set()

    async def renew(self, csr_der: bytes) -> bytes:
        """A new certificate (PEM) for this node."""

        async def call(stub: control_pb2_grpc.CoordinatorStub) -> bytes:
            reply = _parsed(await stub.Renew(control_pb2.RenewRequest(csr_der=csr_der), timeout=30.0))
            if reply.WhichOneof("outcome") == "refusal":
                refusal = refusal_from_proto(reply.refusal)
                raise Refused(refusal.code, refusal.message)
            return bytes(reply.certificate_pem)

        return await self._retry(call)

    async def close(self) -> None:
        await self._calls.close()
        await self._layers.close()

    async def _retry(
        self,
        call: Callable[[control_pb2_grpc.CoordinatorStub], Awaitable[Result]],
        calls: _Calls | None = None,
    ) -> Result:
        """Run one call; repeat it after a lost connection, within the outage limit."""
        return await (calls or self._calls).retry(call, self.outage_seconds, self.address)


@dataclass(frozen=True)
class _Ahead:
    """Batches that were requested before their steps; None if the request failed."""

    steps: range
    fetching: asyncio.Task[Sequence[np.ndarray] | None]


class Batches:
    """Token ids for the first stage, labels for the stage with the head, and document starts, fetched before
    their step.

    A batch is a pure function of its step, so it can be fetched early, and again after an abort. Small
    batches are fetched for several steps at a time, because steps of milliseconds would spend much of their
    time on calls.
    """

    def __init__(self, config: RunConfig, client: CoordinatorClient, group: asyncio.TaskGroup) -> None:
        self._shape = (config.training.global_batch, config.model.sequence)
        self._vocab = config.model.vocab
        self._masks_labels = config.data.masks_labels
        self._steps = config.run.steps
        self._group_count = config.pipeline.groups
        self._groups: dict[BatchPart, tuple[int, ...]] = {}
        """The groups of the newest batch of each part."""
        self._client = client
        self._group = group
        self._ahead: dict[BatchPart, list[_Ahead]] = {part: [] for part in BatchPart}
        self._held_out: dict[tuple[int, BatchPart], np.ndarray] = {}

    async def get(
        self, step: int, part: BatchPart, groups: tuple[int, ...] = (), audited: tuple[int, ...] = ()
    ) -> np.ndarray:
        """int64 or bool [global batch, sequence]. Also starts to fetch the next step's batch.

        `groups`, in ascending order, restricts the batch to these gradient groups and to `audited`, except
        for labels of a run that masks some: their weight depends on all labels.

        Raises LinkLostError when the coordinator does not answer, ProtocolViolationError for invalid ids.
        """
        if part is BatchPart.LABELS and self._masks_labels:
            groups = audited = ()
        if groups != self._groups.get(part, ()):
            self._ahead[part].clear()
        self._groups[part] = groups
        # A running fetch is not cancelled, because another call may wait for it.
        self._ahead[part] = [batch for batch in self._ahead[part] if batch.steps.stop > step]
        batch = await self._fetched(step, part)
        if batch is None:
            batch = await self._fetch(step, part, groups=groups)
        if step + 1 < self._steps and not any(step + 1 in batch.steps for batch in self._ahead[part]):
            count = steps_at_once(part, *self._rows_and_columns(groups))
            steps = range(step + 1, min(step + 1 + count, self._steps))
            fetching = self._group.create_task(self._try_fetch(steps, part, groups))
            self._ahead[part].append(_Ahead(steps, fetching))
        if groups and audited:
            more = await self._fetch(step, part, groups=audited)
            parts = np.split(np.concatenate([batch, more]), len(groups) + len(audited))
            by_group = dict(zip((*groups, *audited), parts, strict=True))
            return np.concatenate([by_group[group] for group in sorted(by_group)])
        return batch

    async def more(self, step: int, part: BatchPart, groups: tuple[int, ...]) -> Mapping[int, np.ndarray]:
        """The samples of further groups, by group; empty for parts that `get` returns whole. Raises as
        `get`."""
        if part is BatchPart.LABELS and self._masks_labels:
            return {}
        samples = await self._fetch(step, part, groups=groups)
        return dict(zip(groups, np.split(samples, len(groups)), strict=True))

    async def held_out(self, batch: int, rows: int, part: BatchPart) -> np.ndarray:
        """Held-out batch `batch`, [rows, sequence], which is fetched once. Raises as `get`."""
        ids = self._held_out.get((batch, part))
        if ids is None or len(ids) != rows:
            ids = await self._fetch(batch, part, rows)
            self._held_out[batch, part] = ids
        return ids

    def forget(self) -> None:
        """Fetch everything again, because another process with another text may coordinate the run."""
        self._ahead = {part: [] for part in BatchPart}

    async def _fetched(self, step: int, part: BatchPart) -> np.ndarray | None:
        """The step's batch, if it was requested before."""
        ahead = next((batch for batch in self._ahead[part] if step in batch.steps), None)
        if ahead is None:
            return None
        # The fetch continues if the epoch ends, because later steps need the rest.
        batches = await asyncio.shield(ahead.fetching)
        if batches is not None:
            return batches[ahead.steps.index(step)]
        if ahead in self._ahead[part]:
            self._ahead[part].remove(ahead)
        return None

    async def _try_fetch(
        self, steps: range, part: BatchPart, groups: tuple[int, ...]
    ) -> Sequence[np.ndarray] | None:
        """The batches of these steps; None if that fails: `get` fetches again and reports the error."""
        try:
            ids = await self._fetch(steps.start, part, groups=groups, steps=len(steps))
        except ThinwireError:
            return None
        return np.split(ids, len(steps))

    def _rows_and_columns(self, groups: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns of a step's batch for these groups; of all groups by default."""
        rows, columns = self._shape
        return rows * len(groups) // self._group_count if groups else rows, columns

    async def _fetch(
        self, step: int, part: BatchPart, held_out: int = 0, groups: tuple[int, ...] = (), steps: int = 1
    ) -> np.ndarray:
        """The batches of `steps` consecutive steps, concatenated along rows; or a held-out batch with
        `held_out` rows."""
        whole, columns = self._rows_and_columns(groups)
        rows = held_out or steps * whole
        size = bytes_of(part, rows, columns)
        data = await self._client.batch(
            step, part=part, size=size, held_out=held_out > 0, groups=groups, steps=steps
        )
        ids = from_bytes(part, data, rows, columns)
        if part is BatchPart.DOCUMENTS:
            return ids
        wrong = (ids < 0) | (ids >= self._vocab)
        if part is BatchPart.LABELS and self._masks_labels:
            wrong &= ids != IGNORED
        if wrong.any():
            what = _batch_name(step, held_out > 0)
            raise ProtocolViolationError(
                f"{what} has token ids outside 0..{self._vocab - 1}: check the coordinator"
            )
        return ids


def _batch_name(step: int, held_out: bool) -> str:
    return f"held-out batch {step}" if held_out else f"the batch of step {step}"


async def _probe(stub: control_pb2_grpc.CoordinatorStub, size: int, seconds: float = CALL_SECONDS) -> None:
    request = control_pb2.ProbeRequest(bytes=size)
    await _collect(stub.Probe(request, timeout=seconds), size, "the probe")


async def _collect(stream: AsyncIterator[control_pb2.DataChunk], size: int, what: str) -> bytes:
    """Join a download of exactly `size` bytes."""
    download = _Download(size, what)
    async for maybe in stream:
        download.take(_parsed(maybe))
    if size <= SMALL_BYTES:
        return download.file().data
    # Hash and copy on a thread, because the file may have gigabytes.
    return (await asyncio.to_thread(download.file)).data


class _Download:
    """Joins a download. Checks the announced size first and the SHA-256 at the end."""

    def __init__(self, size: int, what: str, *, exact: bool = True, kept: LayerFile | None = None) -> None:
        """
        Args:
            size: in bytes. Without `exact`, it is the limit.
            kept: the file to return if the download has no data, which means that the files are equal.
        """
        self._size, self._what, self._exact, self._kept = size, what, exact, kept
        self._file = ArrivingFile(0)
        self._total, self._digest = -1, ""

    def take(self, chunk: control_pb2.DataChunk | memoryview) -> int:
        """Add the next part and return its size. Raises ProtocolViolationError."""
        data = chunk if isinstance(chunk, memoryview) else chunk.data
        if self._total < 0:
            if not isinstance(chunk, memoryview):
                self._total, self._digest = chunk.total_bytes, chunk.sha256
            if self._total > self._size or (self._exact and self._total != self._size):
                raise ProtocolViolationError(f"{self._what} has {self._total} bytes, expected {self._size}")
            self._file = ArrivingFile(max(0, self._total))
        if self._file.size + len(data) > self._total:
            raise ProtocolViolationError(
                f"{self._what} is longer than the {self._total} bytes that were announced"
            )
        self._file.take(data)
        return len(data)

    def file(self) -> LayerFile:
        """The whole file. Raises PackedMismatchError if it is damaged."""
        kept, came = self._kept, self._file.size
        if not came and kept is not None and kept.sha256 == self._digest:
            return kept
        file = LayerFile(*self._file.read())
        if file.size != self._total or file.sha256 != self._digest:
            raise PackedMismatchError(f"{self._what} arrived damaged: {came} of {self._total} bytes")
        return file


async def _on_thread(work: Callable[[], Result], call: "grpc.Future[Any] | grpc.Call") -> Result:
    """Run `work`, which waits for a call, on a thread. Cancelling the wait ends the call."""
    try:
        return await on_thread(work, "layer")
    finally:
        call.cancel()


def _call_seconds(size: int) -> float:
    """The time limit in seconds of a call that transfers this many bytes."""
    return CALL_SECONDS + size / LEAST_RATE


def _parsed(message: Result | None) -> Result:
    """The message. gRPC returns None for bytes that cannot be parsed."""
    if message is None:
        raise ProtocolViolationError("the coordinator sent a message that cannot be parsed")
    return message


def _as_error(error: Exception) -> Exception:
    if isinstance(error, asyncio.InvalidStateError):
        return LinkError("the control connection closed while a message was being written")
    if not isinstance(error, grpc.RpcError):
        return error
    call = cast(grpc.Call, error)  # errors of both stacks have a code and details
    details = call.details() or call.code().name
    if call.code() is NOT_YET:
        return NotYetError(details)
    if error.code() in _FATAL:
        return RunError(f"the coordinator refused: {details}")
    return LinkError(f"the connection to the coordinator broke: {details}")
