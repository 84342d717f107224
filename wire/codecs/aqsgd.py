"""`aqsgd-b`: the change of a sample's activation since it was last sent, at b bits per element.

AQ-SGD (Wang et al. 2022, "Fine-tuning language models over slow networks using activation quantization
with guarantees", algorithm 1): both ends cache an activation m for each sample. The sender packs Q(a - m),
both set m to m + Q(a - m), and the receiver computes with m. A sample that is sent for the first time
travels uncompressed and becomes m. Here m and the first pass are bf16 (16 bits per element), which has
fp32's range, and Q is `fixed-b`. The error of one pass is part of the next change.

Payload: activations of new samples, bf16, in order | `fixed-b` payload of the changes of the known
samples, in order, as one tensor. A part without samples is left out. Both ends know from their place in
the run which samples are new, so they know the size before anything is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.common import dispatch
from kernels.common.tiles import MAX_EXPONENT, MIN_EXPONENT, NON_FINITE
from kernels.fixed import reference as fixed
from wire.codecs.base import Codec
from wire.codecs.fixed import FixedCodec, plain
from wire.codecs.formats import AqsgdFormat
from wire.codecs.header import Header
from wire.codecs.sample_cache import SampleCache
from wire.errors import CodecError, NonFiniteError
from wire.spec import TensorSpec


@dataclass(frozen=True)
class SampleBatch:
    """The samples of one tensor `[n, ...]`, in the order of its rows."""

    cache: SampleCache
    samples: tuple[int, ...]
    known: tuple[bool, ...]
    """Whether a step since `cache.since` has sent the sample, which follows from its place in the run."""
    place: int
    """The microbatch's number, which orders the tensors of a step."""

    def rows(self, known: bool) -> list[int]:
        """Rows of the tensor whose samples are known (or not known)."""
        return [row for row, flag in enumerate(self.known) if flag is known]

    @property
    def known_samples(self) -> list[int]:
        return [self.samples[row] for row in self.rows(True)]


class AqsgdCodec(Codec):
    """`aqsgd-b` without samples: it knows sizes if all samples are known. `of` makes a tensor's codec."""

    exponents = range(MIN_EXPONENT, MAX_EXPONENT + 1)

    def __init__(self, known: AqsgdFormat) -> None:
        super().__init__(known)
        self.fixed = FixedCodec(known.changes)

    def of(self, batch: SampleBatch) -> "AqsgdTensorCodec":
        return AqsgdTensorCodec(self, batch)

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        raise CodecError(f"{self.name} packs changes of known samples: pack with `of(batch)`")

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        raise CodecError(f"{self.name} packs changes of known samples: unpack with `of(batch)`")


class AqsgdTensorCodec(Codec):
    """`aqsgd-b` for one tensor `[n, ...]` of n samples. Packing and unpacking stage the cache's update."""

    exponents = AqsgdCodec.exponents

    def __init__(self, codec: AqsgdCodec, batch: SampleBatch) -> None:
        super().__init__(codec.format)
        self.parameters = replace(codec.parameters, share=len(batch.rows(False)))
        self._fixed = codec.fixed
        self._batch = batch

    def _header(self, spec: TensorSpec) -> Header:
        cache = self._batch.cache
        entries = (cache.since, cache.crc(self._batch.known_samples))
        return Header(self.parameters, spec, self._payload_bytes(spec), cache=entries)

    def _payload_bytes(self, spec: TensorSpec) -> int:
        samples = len(self._batch.samples)
        if spec.shape[0] != samples or len(spec.shape) < 2:
            raise CodecError(f"a tensor of shape {list(spec.shape)} does not hold {samples} samples")
        new = len(self._batch.rows(False))
        size = AqsgdFormat.new_bytes(spec.shape, new)
        if new < samples:
            size += self._fixed._payload_bytes(_changes(spec, samples - new))
        return size

    def _padding_is_clear(self, payload: NDArray[np.uint8], shape: tuple[int, ...]) -> bool:
        samples = len(self._batch.samples)
        new = len(self._batch.rows(False))
        elements = math.prod(shape) // samples
        split = AqsgdFormat.new_bytes(shape, new)
        return not payload[2 * elements * new : split].any() and (
            new == samples or self._fixed._padding_is_clear(payload[split:], (samples - new, *shape[1:]))
        )

    def _pack(self, tensor: torch.Tensor, payload: torch.Tensor) -> torch.Tensor:
        new, known = self._batch.rows(False), self._batch.rows(True)
        updated = torch.empty(tensor.shape, dtype=torch.bfloat16, device=tensor.device)
        exponent = torch.zeros((), dtype=torch.int32, device=tensor.device)
        split = AqsgdFormat.new_bytes(tuple(tensor.shape), len(new))
        if new:
            first = _take(tensor, new).to(torch.bfloat16)
            _put(updated, new, first)
            size = 2 * first.numel()
            payload[:size].copy_(first.contiguous().view(torch.uint8).flatten())
            payload[size:split].zero_()
            low, high = torch.aminmax(first)
            finite = torch.isfinite(low) & torch.isfinite(high)
            exponent = torch.where(finite, exponent, NON_FINITE).int()
        if known:
            before = self._batch.cache.recall(self._batch.known_samples, tensor.device).float()
            change = _take(tensor, known).float() - before
            encoded = self._fixed._pack(change, payload[split:])
            exponent = torch.where(exponent == NON_FINITE, exponent, encoded).int()
            _put(updated, known, _renewed(before, self._unpacked(payload[split:], change.shape, encoded)))
        self._batch.cache.stage(self._batch.place, self._batch.samples, updated)
        return exponent

    def _unpack(self, payload: torch.Tensor, out: torch.Tensor, exponent: int) -> None:
        new, known = self._batch.rows(False), self._batch.rows(True)
        updated = torch.empty(out.shape, dtype=torch.bfloat16, device=out.device)
        split = AqsgdFormat.new_bytes(tuple(out.shape), len(new))
        if new:
            shape = (len(new), *out.shape[1:])
            first = payload[: 2 * torch.Size(shape).numel()].view(torch.bfloat16).view(shape)
            low, high = torch.aminmax(first)
            if not (low.isfinite() and high.isfinite()):
                raise NonFiniteError(f"a packed {self.name} tensor holds infinities or NaNs: refused")
            _put(updated, new, first)
        if known:
            before = self._batch.cache.recall(self._batch.known_samples, out.device).float()
            change = torch.empty_like(before)
            self._fixed._unpack(payload[split:], change, exponent)
            _put(updated, known, _renewed(before, change))
        limit = torch.finfo(out.dtype).max
        out.copy_(
            updated if limit >= torch.finfo(torch.bfloat16).max else updated.float().clamp(-limit, limit)
        )
        self._batch.cache.stage(self._batch.place, self._batch.samples, updated)

    def _unpacked(self, payload: torch.Tensor, shape: torch.Size, exponent: torch.Tensor) -> torch.Tensor:
        """What the receiver will decode from a newly packed payload; arbitrary if the tensor is
        refused."""
        sections = fixed.FixedSections(*self._fixed._layout(tuple(shape)).views(payload))
        change = torch.zeros(shape, dtype=torch.float32, device=payload.device)
        if dispatch.has_kernels(payload.device, "fixed"):
            from kernels.fixed import triton

            triton.decode(*sections, change, exponent)
        elif int(exponent) != NON_FINITE:
            plain(payload.device).decode(sections, change, int(exponent))
        return change


def _renewed(before: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """m + Q(a - m), computed in fp32 and rounded to bf16 within its finite range."""
    limit = torch.finfo(torch.bfloat16).max
    return (before + change).clamp_(-limit, limit).to(torch.bfloat16)


def _changes(spec: TensorSpec, samples: int) -> TensorSpec:
    return TensorSpec(torch.float32, (samples, *spec.shape[1:]))


def _take(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, device=tensor.device)]


def _put(tensor: torch.Tensor, rows: Sequence[int], values: torch.Tensor) -> None:
    if len(rows) == tensor.shape[0]:
        tensor.copy_(values)
    else:
        tensor[torch.tensor(rows, device=tensor.device)] = values
