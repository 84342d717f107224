"""The interface of all codecs and their common parts: header, checks, checksum, sections of a payload.

On a CPU, `encode` and `decode` are enough. For a tensor on a GPU they are split, so that the copy to the
host overlaps other work: `pack` on the device, copy, `seal` on the host; then `open` on the host, copy,
`unpack` on the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from wire.codecs import header as wire_header
from wire.codecs.formats import Format, Sections
from wire.codecs.header import HEADER_BYTES, Header, PackedBytes, Parameters
from wire.errors import PackedMismatchError
from wire.spec import TensorSpec

_SECTION_DTYPES = {"uint8": torch.uint8, "float16": torch.float16, "int64": torch.int64}
_ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"),
    "float16": np.dtype("<i2"),
    "int64": np.dtype("<i8"),
}


ROW_BYTES = 128
"""The alignment of packed rows in a GPU's memory."""


class Layout(Sections):
    """The sections of a payload as tensors and arrays."""

    def views(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The sections as views of `payload`, uint8 `[nbytes]` whose storage offset is a multiple of 16."""
        return [
            payload[start : start + size].view(_SECTION_DTYPES[dtype]).view(shape)
            for (dtype, shape), start, size in zip(self._sections, self._starts, self._sizes, strict=False)
        ]

    def arrays(self, payload: torch.Tensor) -> list[NDArray[Any]]:
        """`views` of a payload on the CPU as arrays, fp16 as int16. Arrays are faster to create."""
        memory = payload.numpy()
        return [
            memory[start : start + size].view(_ARRAY_DTYPES[dtype]).reshape(shape)
            for (dtype, shape), start, size in zip(self._sections, self._starts, self._sizes, strict=False)
        ]

    def raw(self, payload: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The bytes of the sections, as views of a payload in host memory."""
        return [payload[start : start + size] for start, size in zip(self._starts, self._sizes, strict=False)]

    def gaps_are_clear(self, payload: NDArray[np.uint8]) -> bool:
        """Whether the few bytes between sections are zero."""
        return not any(any(payload[gap].tobytes()) for gap in self._gaps)

    def clear_gaps(self, payload: torch.Tensor) -> None:
        """Zero the bytes between sections, so that a tensor always gives the same bytes."""
        # Numpy's calls take a fraction of the time of torch's.
        memory = payload.numpy() if payload.device.type == "cpu" else payload
        for gap in self._gaps:
            memory[gap] = 0


class _Agreed(NamedTuple):
    """The header that follows from a spec."""

    header: Header
    head: bytes
    """The header's bytes, without exponent and checksum."""


def _head(header: Header, device: torch.device) -> torch.Tensor:
    """The header's bytes on a device."""
    # A copy, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8).to(device)


@cache
def _cached_head(header: Header, device: torch.device) -> torch.Tensor:
    """`_head`, once for all tensors of a spec, because the host waits for copies from pageable memory."""
    return _head(header, device)


@lru_cache(maxsize=256)
def _payload_bytes(known: Format, shape: tuple[int, ...]) -> int:
    return known.payload_bytes(shape)


class Codec(ABC):
    """Packs tensors into bytes. Their number depends only on shape and parameters. Stateless."""

    name: str
    parameters: Parameters
    exponents: range
    """The exponents that a packed tensor may have."""
    draws = False
    """Whether `salted` returns a different codec for each tensor."""

    def __init__(self, known: Format) -> None:
        """`known` has the name, the parameters and, unless `_payload_bytes` is overridden, the sizes."""
        self.format = known
        self.name = known.name
        self.parameters = known.parameters
        self._known: dict[TensorSpec, _Agreed] = {}

    def salted(self, salt: int) -> "Codec":
        """The codec for one tensor, whose 32-bit salt both ends know; this codec itself unless it `draws`."""
        return self

    def packed_bytes(self, spec: TensorSpec) -> int:
        """The bytes of a packed tensor, header included. Raises `CodecError` for a spec that cannot be
        packed."""
        wire_header.check_spec(spec)
        return HEADER_BYTES + self._payload_bytes(spec)

    def bits_per_element(self, spec: TensorSpec) -> float:
        """Bits per element, including header and metadata."""
        return 8 * self.packed_bytes(spec) / spec.elements

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pack fp32, bf16 or fp16 `[...]` into uint8 `[packed_bytes]` on the same device.

        Raises `NonFiniteError` for infinities or NaNs, `CodecError` for other dtypes or no elements.
        """
        packed = self.pack(tensor)
        if packed.device.type == "cpu":
            wire_header.seal(packed.numpy())
            return packed
        host = packed.cpu()
        wire_header.seal(host.numpy())
        packed[wire_header.CHECKSUM] = host[wire_header.CHECKSUM].to(packed.device)
        return packed

    def decode(self, packed: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The tensor of `spec` held in uint8 `[packed_bytes]`, on the same device.

        Raises `PackedMismatchError` if the bytes are damaged or not what `spec` and this codec produce, and
        `NonFiniteError` if they would decode to infinities or NaNs.
        """
        if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
            raise PackedMismatchError(
                f"a packed tensor must be contiguous uint8 [n], not {packed.dtype} {list(packed.shape)}"
            )
        return self.unpack(packed, spec, self.open(packed.cpu().numpy(), spec))

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`encode` without the checksum and the check for non-finite values, which `seal` adds."""
        tensor = tensor.detach()
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        size = self.packed_bytes(spec)
        packed = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        agreed = self._agreed(spec)
        if packed.device.type == "cpu":
            memory = packed.numpy()
            memory[:HEADER_BYTES] = np.frombuffer(agreed.head, dtype=np.uint8)
            exponent_value = int(self._pack(tensor, packed[HEADER_BYTES:]))
            memory[wire_header.EXPONENT] = np.frombuffer(
                exponent_value.to_bytes(4, "little", signed=True), np.uint8
            )
            return packed
        header = agreed.header
        # The header of a codec with a sample cache changes with every tensor.
        head = _cached_head if header.cache is None else _head
        packed[:HEADER_BYTES].copy_(head(header, tensor.device))
        exponent = self._pack(tensor, packed[HEADER_BYTES:])
        packed[wire_header.EXPONENT].view(torch.int32).copy_(exponent)
        return packed

    def pack_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Pack each row of x, fp32 `[n, C]`, as a separate tensor into uint8 `[n, packed_bytes]`. Each row's
        bytes are contiguous. If a GPU has kernels for it, a few launches pack all rows."""
        spec = TensorSpec(x.dtype, (x.shape[1],))
        size = self.packed_bytes(spec)
        if x.device.type == "cpu":
            return torch.stack([self.pack(row) for row in x])
        records = torch.empty(len(x), -(-size // ROW_BYTES) * ROW_BYTES, dtype=torch.uint8, device=x.device)
        records[:, :HEADER_BYTES] = _cached_head(self._agreed(spec).header, x.device)
        exponents = self._pack_rows(x.contiguous(), records, size)
        records.view(torch.int32)[:, wire_header.EXPONENT.start // 4] = exponents
        return records[:, :size]

    def unpack_rows(
        self,
        records: torch.Tensor,
        spec: TensorSpec,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`unpack` many fp32 tensors of one spec `[C]`, which `open` has checked, into fp32 `[n, C]`.

        Args:
            records: uint8 `[n, k * ROW_BYTES]`, contiguous; each row begins with a packed tensor.
            headers: what `open` returned for each.
            host: the same packed tensors on the CPU, if the caller has them.

        If a GPU has kernels for it, the host waits once for all rows. Raises the errors of `unpack`.
        """
        out = torch.empty(len(headers), *spec.shape, dtype=spec.dtype, device=records.device)
        self._unpack_rows(records, out, headers, host)
        return out

    def _pack_rows(self, x: torch.Tensor, records: torch.Tensor, size: int) -> torch.Tensor:
        """Fill the payloads in `records`, uint8 `[n, k * ROW_BYTES]`. The first `size` bytes of each are the
        packed row. Returns the exponents, int32 `[n]`."""
        exponents = [
            self._pack(row, record[HEADER_BYTES:size]) for row, record in zip(x, records, strict=True)
        ]
        return torch.stack(exponents)

    def _unpack_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Fill contiguous `out`, fp32 `[n, C]`."""
        size = self.packed_bytes(headers[0].spec)
        for record, header, values in zip(records, headers, out, strict=True):
            self.unpack(record[:size], header.spec, header, values)

    def open(self, buffer: PackedBytes, spec: TensorSpec) -> Header:
        """Check received bytes in host memory against `spec`, this codec and their checksum.

        Returns the header. Raises `PackedMismatchError`, which names the difference. Allocates nothing
        before header and checksum have been checked.
        """
        wire_header.check_spec(spec)
        agreed = self._agreed(spec)
        header = wire_header.check(buffer, agreed.header, self.exponents, agreed.head)
        if not self._padding_is_clear(np.frombuffer(buffer, dtype=np.uint8)[HEADER_BYTES:], spec.shape):
            raise PackedMismatchError(
                f"a packed {self.name} tensor has bits set in its padding, where its encoder leaves "
                "zeros: refused"
            )
        return header

    def unpack(
        self, packed: torch.Tensor, spec: TensorSpec, header: Header, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`decode` for bytes that `open` has checked; `header` is what it returned.

        Writes into `out`, a contiguous tensor of `spec` on the same device, if given.
        """
        if packed.data_ptr() % 16 or packed.storage_offset() % 16:
            packed = packed.clone()
        if out is None:
            out = torch.empty(spec.shape, dtype=spec.dtype, device=packed.device)
        self._unpack(packed[HEADER_BYTES:], out, header.exponent)
        return out

    def _agreed(self, spec: TensorSpec) -> _Agreed:
        agreed = self._known.get(spec)
        if agreed is None:
            header = self._header(spec)
            agreed = _Agreed(header, header.to_bytes())
            # The header of a codec with a sample cache changes with every tensor.
            if header.cache is None:
                self._known[spec] = agreed
        return agreed

    def _header(self, spec: TensorSpec) -> Header:
        return Header(self.parameters, spec, self._payload_bytes(spec))

    def _padding_is_clear(self, payload: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
        """Whether every unused bit of a payload is 0, as the encoder leaves it.

        Otherwise one tensor would have many packed forms, and a sender could hide data there. The host
        checks it, because a decoder on a GPU would have to read the bytes again.
        """
        return True

    def _payload_bytes(self, spec: TensorSpec) -> int:
        """The number of bytes after the header, for a spec that the header can describe."""
        return _payload_bytes(self.format, spec.shape)

    @abstractmethod
    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """Fill every byte of `payload`. Returns the exponent, int32 0-d, or `tiles.NON_FINITE`."""

    @abstractmethod
    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        """Fill every element of `out`. Refuses values that no encoder produces."""
