"""`fp32`, `bf16` and `fp16`: elements unchanged or rounded to nearest even. They are baselines."""

from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from kernels.common.tiles import (
    NON_FINITE,
    both_powers_of_two,
    multiply_all,
    normalised,
    powers_of_two,
)
from wire.codecs.base import Codec
from wire.codecs.formats import HEADER_BYTES, RawFormat
from wire.codecs.header import Header
from wire.errors import NonFiniteError

# Exponents of fp32's smallest and largest numbers.
_SMALLEST_EXPONENT = -148 - 16
_LARGEST_EXPONENT = 128 - 16 + 1
PIECE = 1 << 17
"""Elements converted at a time on a CPU."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class RawCodec(Codec):
    """Sends every element in one dtype. Values beyond that dtype's range are refused, not clipped.

    Rounding may move the largest value of a narrower dtype beyond its range (fp16's 65504 becomes bf16's
    65536). Decoding clamps it to that dtype's maximum.
    """

    exponents = range(1)

    def __init__(self, known: RawFormat) -> None:
        super().__init__(known)
        self._dtype = _DTYPES[known.name]

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        elements = payload.view(self._dtype)
        elements.view(tensor.shape).copy_(tensor)
        return torch.where(_finite(elements), 0, NON_FINITE).int()

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        elements = payload.view(self._dtype)
        limit = torch.finfo(out.dtype).max
        out.copy_(elements.view(out.shape))
        if limit >= torch.finfo(self._dtype).max:
            if not _finite(out):
                self._refuse(out)
            return
        low, high = torch.aminmax(elements)
        # Rounded as the encoder rounds it; NaNs fail too.
        if not torch.maximum(-low, high) <= torch.tensor(limit).to(self._dtype):
            self._refuse(out)
        out.clamp_(-limit, limit)

    def _pack_rows(self, x: torch.Tensor, records: torch.Tensor, size: int) -> torch.Tensor:
        elements, exponents = self._rounded(x)
        records[:, HEADER_BYTES:size] = elements.view(torch.uint8)
        return exponents

    def _unpack_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> None:
        payload = records[:, HEADER_BYTES : self.packed_bytes(headers[0].spec)]
        out.copy_(payload.view(self._dtype))
        # fp32 represents every value of the codec's dtype.
        if not _finite(out):
            self._refuse(next(values for values in out if not _finite(values)))

    def _rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of rows in the codec's dtype, and the rows' exponents."""
        elements = x.to(self._dtype)
        low, high = torch.aminmax(elements, dim=1)
        return elements, torch.where(torch.isfinite(low) & torch.isfinite(high), 0, NON_FINITE).int()

    def _refuse(self, out: torch.Tensor) -> NoReturn:
        raise NonFiniteError(
            f"a packed {self.name} tensor of shape {list(out.shape)} holds infinities or NaNs: "
            "refused; the sender's codec should have done so"
        )


class HalfCodec(RawCodec):
    """`fp16` scaled by one power of two per tensor, which the header carries.

    Plain fp16 reaches down to 6e-8, but gradients of a mean over many tokens are smaller: nearly all became
    zero, and training made no progress (scripts/results/convergence.json). The scale puts the largest
    element between 2**15 and 65504. A tensor that is already fp16 is packed exactly.
    """

    exponents = range(_SMALLEST_EXPONENT, _LARGEST_EXPONENT + 1)

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        exponent, finite = _half_exponent(*torch.aminmax(tensor))
        factors = powers_of_two(-exponent)
        for halves, piece in _pieces(payload.view(torch.float16), tensor.reshape(-1)):
            halves.copy_(normalised(piece, factors))
        return torch.where(finite, exponent, NON_FINITE).int()

    def _unpack_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> None:
        Codec._unpack_rows(self, records, out, headers, host)

    def _rounded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exponent, finite = _half_exponent(*torch.aminmax(x, dim=1))
        factors = [factor[:, None] for factor in both_powers_of_two(-exponent)]
        return normalised(x, factors).half(), torch.where(finite, exponent, NON_FINITE).int()

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        halves = payload.view(torch.float16)
        if not _finite(halves):
            self._refuse(out)
        factors = powers_of_two(torch.tensor(exponent, dtype=torch.int32))
        # Rounding may take the largest element beyond the range of the tensor's dtype.
        limit = torch.finfo(out.dtype).max
        for values, piece in _pieces(out.view(-1), halves):
            values.copy_(multiply_all(piece.to(torch.float32, copy=True), factors).clamp_(-limit, limit))


def _pieces(to: torch.Tensor, of: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two flat tensors in pieces whose fp32 form fits a CPU's cache; on a GPU, in one piece."""
    size = PIECE if to.device.type == "cpu" else max(1, to.numel())
    return zip(torch.split(to, size), torch.split(of, size), strict=True)


def _half_exponent(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest e with max |x| <= 65504 * 2**e, int32 (0 for zeros), and whether x is finite, from x's
    minimum and maximum."""
    largest = torch.maximum(-low, high).float()
    finite = torch.isfinite(largest)
    mantissa, exponent = torch.frexp(torch.where(finite, largest, 0.0))
    exponent = exponent - 16 + (mantissa > 65504 / 65536).int()
    return torch.where(largest > 0, exponent, 0).int(), finite


def _finite(x: torch.Tensor) -> torch.Tensor:
    # aminmax returns NaN if any element is NaN, so the two extremes cover all elements.
    low, high = torch.aminmax(x)
    return torch.isfinite(low) & torch.isfinite(high)
