"""The interface of all codecs, and the part that they share: header, checks, checksum.

On a CPU `encode` and `decode` are all there is. For a tensor on a GPU they are split, so that the copy to the
host may run beside other work and the checksum is computed where the bytes are: `pack` on the device, copy,
`seal` on the host; `open` on the host, copy, `unpack` on the device.
"""

from abc import ABC, abstractmethod
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from wire.codecs import header as wire_header
from wire.codecs.form import Form
from wire.codecs.header import HEADER_BYTES, Header, PackedBytes, Parameters
from wire.errors import PackedMismatchError
from wire.spec import TensorSpec


def _head(header: Header, device: torch.device) -> torch.Tensor:
    """A header's bytes on a device."""
    # A copy, because torch warns of memory that it may not write to.
    return torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8).to(device)


@cache
def _kept_head(header: Header, device: torch.device) -> torch.Tensor:
    """The same, once for all tensors of a spec: bytes of the host's are not copied without waiting."""
    return _head(header, device)


@lru_cache(maxsize=256)
def _payload_bytes(form: Form, shape: tuple[int, ...]) -> int:
    """Worked out once for all tensors of a spec."""
    return form.payload_bytes(shape)


class Codec(ABC):
    """Packs tensors into bytes whose number depends on shape and parameters alone. Stateless."""

    name: str
    parameters: Parameters
    # Exponents that a packed tensor may have.
    exponents: range

    def __init__(self, form: Form) -> None:
        """`form` says its name, its parameters and, unless `_payload_bytes` does, its sizes."""
        self.form = form
        self.name = form.name
        self.parameters = form.parameters

    def packed_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the whole packed tensor, header included. `CodecError` for what cannot be packed."""
        wire_header.check_spec(spec)
        return HEADER_BYTES + self._payload_bytes(spec)

    def bits_per_element(self, spec: TensorSpec) -> float:
        """True bits an element: header, metadata and payload over elements."""
        return 8 * self.packed_bytes(spec) / spec.elements

    def encode(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pack fp32, bf16 or fp16 `[...]` into uint8 `[packed_bytes]` on the same device: `out`, if given.

        `NonFiniteError` if the tensor holds infinities or NaNs, `CodecError` for other dtypes or no elements.
        """
        packed = self.pack(tensor, out)
        host = packed.cpu()
        wire_header.seal(host.numpy())
        if packed is not host:
            packed[wire_header.CHECKSUM] = host[wire_header.CHECKSUM].to(packed.device)
        return packed

    def decode(self, packed: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The tensor of `spec` that uint8 `[packed_bytes]` holds, on the same device.

        `PackedMismatchError` if the bytes are not what `spec` and this codec make, or are damaged;
        `NonFiniteError` if they would give infinities or NaNs.
        """
        if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
            raise PackedMismatchError(
                f"a packed tensor must be contiguous uint8 [n], not {packed.dtype} {list(packed.shape)}"
            )
        return self.unpack(packed, spec, self.open(packed.cpu().numpy(), spec))

    def pack(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `encode`, but the checksum is zero and what is not finite is not refused: `seal` does both."""
        tensor = tensor.detach()
        spec = TensorSpec(tensor.dtype, tuple(tensor.shape))
        size = self.packed_bytes(spec)
        packed = torch.empty(size, dtype=torch.uint8, device=tensor.device) if out is None else out
        header = self._header(spec)
        # What a codec remembers changes with every tensor.
        head = _kept_head if tensor.is_cuda and header.memory is None else _head
        packed[:HEADER_BYTES].copy_(head(header, tensor.device))
        exponent = self._pack(tensor, packed[HEADER_BYTES:])
        packed[wire_header.EXPONENT].view(torch.int32).copy_(exponent)
        return packed

    def open(self, buffer: PackedBytes, spec: TensorSpec) -> Header:
        """Check received bytes in host memory against `spec`, this codec and their checksum.

        Returns the header. `PackedMismatchError` names what differs. Allocates nothing before header and
        checksum are right.
        """
        wire_header.check_spec(spec)
        header = wire_header.check(buffer, self._header(spec), self.exponents)
        if not self._filling_is_clear(np.frombuffer(buffer, dtype=np.uint8)[HEADER_BYTES:], spec.shape):
            raise PackedMismatchError(
                f"a packed {self.name} tensor has bits set where it holds nothing and its encoder leaves "
                "zeros: refused"
            )
        return header

    def unpack(
        self, packed: torch.Tensor, spec: TensorSpec, header: Header, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `decode`, after `open` has checked the same bytes and returned `header`.

        Into `out`, a contiguous tensor of `spec` on the same device, if given.
        """
        if packed.data_ptr() % 16 or packed.storage_offset() % 16:
            packed = packed.clone()
        if out is None:
            out = torch.empty(spec.shape, dtype=spec.dtype, device=packed.device)
        self._unpack(packed[HEADER_BYTES:], out, header.exponent)
        return out

    def _header(self, spec: TensorSpec) -> Header:
        return Header(self.parameters, spec, self._payload_bytes(spec))

    def _filling_is_clear(self, payload: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
        """Whether every bit of a payload that stands for nothing is 0, as the encoder leaves it.

        Else one tensor had many forms, and what a sender put there went unseen. Checked where the bytes
        arrive: a decoder on a GPU would read them again for it.
        """
        return True

    def _payload_bytes(self, spec: TensorSpec) -> int:
        """Bytes behind the header, for a spec that the header can describe."""
        return _payload_bytes(self.form, spec.shape)

    @abstractmethod
    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        """Fill every byte of `payload`; return the exponent (int32 0-d) or `kernels.common.tiles.NON_FINITE`."""

    @abstractmethod
    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        """Fill every element of `out`; refuse values that no encoder makes."""
