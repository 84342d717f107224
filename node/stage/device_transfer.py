"""Packs a device's tensors into bytes on the host, and unpacks them, for each kind of device.

`mark` and `wait` run on the compute thread and never block it; `pack` and `unpack` run on threads beside it
(`tensor_transfer.py`), which may wait for the device.

On a GPU the codec's kernels and copies run on separate streams beside the stage's work, ordered by events.
Copies go through page-locked memory, because others block the thread and the stream. That memory and the
GPU's come from torch's caching allocators, so in the steady state nothing is allocated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wire.codecs import header
from wire.codecs.base import ROW_BYTES, Codec
from wire.codecs.host_copies import HostCopies, Mark, Streams
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

CPU = torch.device("cpu")


class DeviceTransfer(ABC):
    @abstractmethod
    def mark(self) -> Mark | None:
        """A mark after all work that the compute thread has submitted; None if that work is done."""

    @abstractmethod
    def wait(self, tensor: Tensor, mark: Mark | None) -> None:
        """Make later work of the compute thread see `tensor` as of `mark`."""

    @abstractmethod
    def pack(self, codec: Codec, tensor: Tensor, mark: Mark | None) -> Tensor:
        """`tensor` as of `mark`, packed and sealed: uint8 `[packed_bytes]` on the CPU.

        Raises NonFiniteError as `Codec.encode` does. `tensor` must not change until this returns.
        """

    @abstractmethod
    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, Mark | None]:
        """The tensor of `spec` from `packed`, uint8 `[packed_bytes]` on the CPU, and a mark when it is ready.

        Raises what `Codec.decode` raises. `packed` may be reused when this returns.
        """


class CpuTransfer(DeviceTransfer):
    """For a CPU, and for a device whose codecs run on the CPU and whose copies themselves wait for all
    submitted work. On a CPU nothing is copied."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._device = device

    def mark(self) -> None:
        return None

    def wait(self, tensor: Tensor, mark: Mark | None) -> None:
        pass

    def pack(self, codec: Codec, tensor: Tensor, mark: Mark | None) -> Tensor:
        return codec.encode(tensor.cpu())

    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, None]:
        return codec.decode(packed, spec).to(self._device), None


class CudaTransfer(DeviceTransfer):
    """Packs on one stream and unpacks on another, so that neither waits for the other's copies."""

    def __init__(
        self, device: torch.device, streams: Streams = torch.cuda, *, page_locked: bool = True
    ) -> None:
        """`page_locked` is False only without a GPU to lock pages for."""
        self._device = device
        self._streams = streams
        self._copies = HostCopies(streams, page_locked=page_locked)
        self._packing = streams.Stream(device)
        self._unpacking = streams.Stream(device)

    def mark(self) -> Any:
        event = self._streams.Event(blocking=True)
        event.record(self._streams.current_stream(self._device))
        return event

    def wait(self, tensor: Tensor, mark: Any) -> None:
        stream = self._streams.current_stream(self._device)
        stream.wait_event(mark)
        # It was allocated on the other stream; do not reuse its memory before this stream is done.
        if tensor.is_cuda:
            tensor.record_stream(stream)

    def pack(self, codec: Codec, tensor: Tensor, mark: Any) -> Tensor:
        with self._streams.stream(self._packing):
            self._packing.wait_event(mark)
            packed = codec.pack(tensor)
            host, done = self._copies.fetch(packed)
        # A blocking event sleeps and lets other threads run. `tensor` and `packed` stay alive until then.
        done.synchronize()
        header.seal(host.numpy())
        return host

    def pack_rows(self, codec: Codec, values: Tensor, mark: Any) -> list[Tensor]:
        """Apply `pack` to every row of fp32 `[n, C]` as a separate tensor, with a single wait.

        Raises NonFiniteError, whose `row` is the index of that row.
        """
        with self._streams.stream(self._packing):
            self._packing.wait_event(mark)
            packed = codec.pack_rows(values)
            whole = packed.as_strided((len(packed), packed.stride(0)), (packed.stride(0), 1))
            host, done = self._copies.fetch(whole)
        done.synchronize()
        rows = [row[: packed.shape[1]] for row in host]
        for number, row in enumerate(rows):
            try:
                header.seal(row.numpy())
            except NonFiniteError as error:
                error.row = number
                raise
        return rows

    def unpack_rows(self, codec: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> tuple[Tensor, Any]:
        """Apply `unpack` to many tensors of one spec `[C]`, fp32; returns them as rows `[n, C]`."""
        opened = [codec.open(part.numpy(), spec) for part in packed]
        size = len(packed[0])
        host = self._copies.room((len(packed), -(-size // ROW_BYTES) * ROW_BYTES), torch.uint8)
        for row, part in zip(host, packed, strict=True):
            row[:size].copy_(part)
        with self._streams.stream(self._unpacking):
            on_device = torch.empty_like(host, device=self._device)
            on_device.copy_(host, non_blocking=True)
            values = codec.unpack_rows(on_device, spec, opened, packed)
            there = self._streams.Event(blocking=True)
            there.record(self._unpacking)
        return values, there

    def unpack(self, codec: Codec, packed: Tensor, spec: TensorSpec) -> tuple[Tensor, Any]:
        parts = codec.open(packed.numpy(), spec)
        host = self._copies.room(packed.shape, packed.dtype)
        host.copy_(packed)
        with self._streams.stream(self._unpacking):
            on_device = torch.empty_like(host, device=self._device)
            on_device.copy_(host, non_blocking=True)
            tensor = codec.unpack(on_device, spec, parts)
            there = self._streams.Event(blocking=True)
            there.record(self._unpacking)
        return tensor, there


def device_transfer(device: torch.device) -> DeviceTransfer:
    return CudaTransfer(device) if device.type == "cuda" else CpuTransfer(device)
