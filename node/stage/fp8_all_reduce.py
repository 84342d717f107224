"""An all-reduce of e4m3 gradients that never adds in e4m3 (AGoQ, arXiv 2605.00539, section 5).

Each rank owns a share of every bucket. In an all-to-all it gets all ranks' codes of that share. It adds them
in fp32 in the order of ranks, packs the sum once, and sends it to all in an all-gather. One rank packs each
share, so all ranks end with the same bits. This moves 1.01 bytes per element in each direction; a ring of
fp32 moves 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.fp8.layout import BLOCK, blocks
from kernels.fp8.ops import sum_gradients
from kernels.fp8.reference import Fp8Gradient

# torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

GPU_BUCKET_BLOCKS = 1 << 20
"""Blocks of 128 elements per bucket between GPUs: 128 MiB of codes. A bucket's calls take at least half a
millisecond whatever its size, and NVLink moves 100 MB in that time."""
CPU_BUCKET_BLOCKS = 1 << 13
"""1 MiB between CPUs, where summing takes as long as sending. One bucket is summed while the next is sent."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of a gradient that go to one rank."""

    gradient: Fp8Gradient
    start: int
    """The gradient's first block in this piece."""
    end: int
    rank: int
    at: int
    """The position of the first block in that rank's share."""

    def gradient_codes(self) -> Tensor:
        return self.gradient.codes[self.start * BLOCK : self.end * BLOCK]

    def gradient_exponents(self) -> Tensor:
        return self.gradient.exponents[self.start : self.end].view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Blocks that are sent together. As bytes, a rank's share is its blocks' codes, then their exponents."""

    pieces: tuple[_Piece, ...]
    share: int
    """The blocks of a rank's share; the last share is padded."""
    sent: Tensor
    """uint8 [ranks, share * 129]: what each rank gets. Afterwards the rank's own row holds its sums."""
    received: Tensor
    """uint8 [ranks, share * 129]: what each rank sent. Afterwards it holds all ranks' sums."""

    def codes(self, buffer: Tensor) -> Tensor:
        return buffer[..., : self.share * BLOCK]

    def exponents(self, buffer: Tensor) -> Tensor:
        return buffer[..., self.share * BLOCK :]


class Fp8AllReduce:
    """Sums the same list of gradients over the ranks of a group, in place. Buffers are allocated once.

    `complete` marks a gradient as complete and starts buckets, always in the same order, so that they overlap
    with the rest of backward. `finish` sends the rest and waits. `reset` drops everything.
    """

    def __init__(
        self,
        gradients: Sequence[Fp8Gradient],
        group: dist.ProcessGroup | None = None,
        bucket_blocks: int = 0,
    ) -> None:
        """
        Args:
            gradients: of at least one element each, on one device, with the same sizes on every rank.
            bucket_blocks: the most blocks per bucket; larger gradients are split. 0: chosen by device. The
                sums do not depend on it.
        """
        if bucket_blocks == 0:
            on_gpu = gradients[0].codes.device.type == "cuda"
            bucket_blocks = GPU_BUCKET_BLOCKS if on_gpu else CPU_BUCKET_BLOCKS
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._buckets = tuple(self._bucket(parts) for parts in _cut(gradients, bucket_blocks))
        self._running: list[tuple[_Bucket, dist.Work]] = []
        self._complete: set[int] = set()

    def complete(self, gradient: Fp8Gradient) -> None:
        """Mark a gradient that will not change until `finish`."""
        self._complete.add(id(gradient))
        while len(self._running) < len(self._buckets):
            bucket = self._buckets[len(self._running)]
            if not all(id(piece.gradient) in self._complete for piece in bucket.pieces):
                break
            self._start(bucket)

    def reset(self) -> None:
        """Drop the buckets of an aborted step. Call it on every rank before the next step.

        It waits for running all-to-alls: all ranks have started the same ones, and buffers are reused.
        """
        for _, work in self._running:
            work.wait()
        self._running.clear()
        self._complete.clear()

    def _start(self, bucket: _Bucket) -> None:
        for piece in bucket.pieces:
            _codes(bucket, bucket.sent, piece).copy_(piece.gradient_codes())
            _exponents(bucket, bucket.sent, piece).copy_(piece.gradient_exponents())
        work = dist.all_to_all_single(bucket.received, bucket.sent, group=self._group, async_op=True)
        self._running.append((bucket, work))

    def finish(self) -> None:
        """Sum the remaining buckets. Afterwards all gradients hold the sums."""
        for bucket in self._buckets[len(self._running) :]:
            self._start(bucket)
        gathering = []
        for bucket, work in self._running:
            work.wait()
            mine = self._sum(bucket)
            everybody = bucket.received.view(-1)
            gathering.append(all_gather(everybody, mine, group=self._group, async_op=True))
        for (bucket, _), work in zip(self._running, gathering, strict=True):
            work.wait()
            for piece in bucket.pieces:
                piece.gradient_codes().copy_(_codes(bucket, bucket.received, piece))
                piece.gradient_exponents().copy_(_exponents(bucket, bucket.received, piece))
        self._running.clear()
        self._complete.clear()

    def _sum(self, bucket: _Bucket) -> Tensor:
        """The sum of this rank's share: uint8 [share * 129]."""
        mine = bucket.sent[dist.get_rank(self._group)]
        total = Fp8Gradient(bucket.codes(mine), bucket.exponents(mine).view(torch.int8))
        received = bucket.received
        sum_gradients(bucket.codes(received), bucket.exponents(received).view(torch.int8), total)
        return mine

    def _bucket(self, parts: list[tuple[Fp8Gradient, int, int]]) -> _Bucket:
        share = -(-sum(end - start for _, start, end in parts) // self._ranks)
        pieces: list[_Piece] = []
        at = 0
        for gradient, start, end in parts:
            while start < end:
                rank, place = divmod(at, share)
                count = min(end - start, share - place)
                pieces.append(_Piece(gradient, start, start + count, rank, place))
                start += count
                at += count
        device = parts[0][0].codes.device
        # Zeros, because the padding is also sent and summed.
        sent, received = (
            torch.zeros((self._ranks, share * (BLOCK + 1)), dtype=torch.uint8, device=device)
            for _ in range(2)
        )
        return _Bucket(tuple(pieces), share, sent, received)


def _codes(bucket: _Bucket, buffer: Tensor, piece: _Piece) -> Tensor:
    first = piece.at * BLOCK
    return buffer[piece.rank, first : first + piece.gradient_codes().numel()]


def _exponents(bucket: _Bucket, buffer: Tensor, piece: _Piece) -> Tensor:
    first = bucket.share * BLOCK + piece.at
    return buffer[piece.rank, first : first + piece.end - piece.start]


def _cut(gradients: Sequence[Fp8Gradient], most: int) -> list[list[tuple[Fp8Gradient, int, int]]]:
    """Concatenate all gradients and cut them every `most` blocks: (gradient, first block, end block)."""
    buckets: list[list[tuple[Fp8Gradient, int, int]]] = []
    room = 0
    for gradient in gradients:
        start, count = 0, blocks(gradient.codes.numel())
        while start < count:
            if room == 0:
                buckets.append([])
                room = most
            end = min(count, start + room)
            buckets[-1].append((gradient, start, end))
            room -= end - start
            start = end
    return buckets
