"""`fixed-b`: b bits per element, symmetric, with one scale per 64 elements. The default for gradients (b =
8).

Payload: scales, fp16 | bit-planes, lowest first, one 64-bit word per tile. It has b + 0.25 bits per element.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common import dispatch
from kernels.common.tiles import (
    HALF_INFINITY,
    HALF_MAGNITUDE,
    MAX_EXPONENT,
    MIN_EXPONENT,
    TILE,
    tiles_per_row,
)
from kernels.fixed import reference as fixed
from wire.codecs.base import Codec, Layout
from wire.codecs.formats import HEADER_BYTES, FixedFormat
from wire.codecs.header import EXPONENT, Header
from wire.errors import NonFiniteError, PackedMismatchError


class FixedCodec(Codec):
    """The fixed-point quantizer with b bits, whose arithmetic is in `kernels.fixed.reference`."""

    exponents = range(MIN_EXPONENT, MAX_EXPONENT + 1)

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        return _layout(self.parameters.bits, shape)

    def _padding_is_clear(self, payload: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
        layout = self._layout(shape)
        if not layout.gaps_are_clear(payload):
            return False
        if (short := shape[-1] % TILE) == 0:
            return True
        words = layout.raw(payload)[1].view("<u8")
        return int(words[tiles_per_row(shape[-1]) - 1 :: tiles_per_row(shape[-1])].max()) < 1 << short

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        layout = self._layout(tensor.shape)
        layout.clear_gaps(payload)
        sections = fixed.FixedSections(*layout.views(payload))
        if dispatch.has_kernels(tensor.device, "fixed"):
            from kernels.fixed import triton

            exponent = torch.empty((), dtype=torch.int32, device=tensor.device)
            triton.encode(tensor, *sections, exponent)
            return exponent
        encoded: torch.Tensor = plain(tensor.device).encode(tensor, sections)
        return encoded

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        sections = fixed.FixedSections(*self._layout(out.shape).views(payload))
        if dispatch.has_kernels(out.device, "fixed"):
            from kernels.fixed import triton

            device_exponent = torch.full((), exponent, dtype=torch.int32, device=out.device)
            status = triton.decode(*sections, out, device_exponent)
            self._refuse(int(status.max()))
            return
        # Numpy, because torch would wake threads for these few bytes, which then keep their cores busy.
        scales = sections.scales.view(torch.int16).cpu().numpy()
        # Minus infinity is refused below, as a negative scale.
        infinite = (scales >= HALF_INFINITY) | (scales & HALF_MAGNITUDE > HALF_INFINITY)
        if np.count_nonzero(infinite):
            self._refuse(dispatch.NON_FINITE)
        if np.count_nonzero(scales <= 0):
            self._refuse(dispatch.BAD_SCALE)
        if not plain(out.device).decode(sections, out, exponent):
            self._refuse(dispatch.BAD_CODE)

    def _pack_rows(self, x: torch.Tensor, records: torch.Tensor, size: int) -> torch.Tensor:
        if not dispatch.has_kernels(x.device, "fixed"):
            return super()._pack_rows(x, records, size)
        from kernels.fixed import triton

        layout = self._layout((x.shape[1],))
        for gap in layout.gaps:
            records[:, HEADER_BYTES + gap.start : HEADER_BYTES + gap.stop] = 0
        exponents = torch.empty(len(x), dtype=torch.int32, device=x.device)
        scales, planes = layout.views(records[0, HEADER_BYTES:size])
        triton.encode(x, scales, planes, exponents, record=records.shape[1])
        return exponents

    def _unpack_rows(
        self,
        records: torch.Tensor,
        out: torch.Tensor,
        headers: Sequence[Header],
        host: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if not dispatch.has_kernels(out.device, "fixed"):
            super()._unpack_rows(records, out, headers, host)
            return
        from kernels.fixed import triton

        size = self.packed_bytes(headers[0].spec)
        scales, planes = self._layout((out.shape[1],)).views(records[0, HEADER_BYTES:size])
        exponents = records.view(torch.int32)[:, EXPONENT.start // 4].contiguous()
        faults = triton.decode(scales, planes, out, exponents, record=records.shape[1])
        self._refuse(int(faults.max()))

    def _refuse(self, fault: int) -> None:
        if fault == dispatch.NON_FINITE:
            raise NonFiniteError(f"a packed {self.name} tensor has scales that are not finite: refused")
        if fault == dispatch.BAD_SCALE:
            raise PackedMismatchError(f"a packed {self.name} tensor has a scale of zero or below: refused")
        if fault == dispatch.BAD_CODE:
            raise PackedMismatchError(f"a packed {self.name} tensor has a code beyond its range: refused")


def plain(device: torch.device) -> Any:
    """The module that encodes and decodes on a device without kernels."""
    if device.type != "cpu":
        return fixed
    # Here, because a node that computes on a GPU needs no numba, which takes long to import.
    from kernels.fixed import loops

    return loops


@lru_cache(maxsize=256)
def _layout(bits: int, shape: tuple[int, ...]) -> Layout:
    return Layout(*FixedFormat(bits).sections(shape))
