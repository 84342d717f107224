"""The operations on gradients of gradient groups: pack a group's pieces, add two nodes of the tree, unpack.

`node.schedule.gradient_groups` defines the pieces and the tree. A node of the tree is stored in packed form,
uint8 on the CPU. So its value is what the code says, whichever machine computed it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient, unpack_gradient
from node.schedule.gradient_groups import Fold, Piece, piece_format
from wire.codecs.base import Codec
from wire.codecs.formats import TrellisFormat
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

MOST_TOGETHER, MOST_SEARCHED = 1 << 22, 1 << 20
"""The most elements that go through a codec together, and the most for `trellis`, whose search needs more
memory. Larger pieces go by themselves."""

Gradient = Tensor | Fp8Gradient
"""A parameter's gradient, in its shape, or flat in e4m3."""


class Packing(Protocol):
    """Packs a device's tensors to the CPU and back: every row of float32 [n, elements] by itself."""

    together: bool
    """Whether pieces of equal length go through their codec together. On a GPU, the launches and the host's
    wait for a single piece take longer than its elements."""

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        """The sealed bytes of every row, uint8 [n] on the CPU.

        Raises:
            NonFiniteError: with `row`, the number of the row that is not finite.
        """
        ...

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """The rows on the device, one for each packed piece. Raises what `Codec.decode` raises."""
        ...


class CodecPacking:
    """`Packing` by the codec alone, on the CPU and the calling thread."""

    together = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        [row] = values.cpu()
        return [which.encode(row)]

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        [row] = packed
        return which.decode(row, spec).to(self._device).unsqueeze(0)


class PieceSums:
    """Packs, adds and unpacks pieces of a run's gradients, a batch at a time."""

    def __init__(self, packing: Packing, *, uncompressed: bool = False) -> None:
        """`uncompressed`: use fp32, whatever the pieces' codecs are."""
        self._packing = packing
        self._uncompressed = uncompressed

    def batches(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Pieces with equal codec and length, small enough for memory, in the order of their first piece."""
        if not self._packing.together:
            yield from ([piece] for piece in pieces)
            return
        alike: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            alike.setdefault((piece.codec, piece.elements), []).append(piece)
        for several in alike.values():
            scratch = isinstance(piece_format(several[0], uncompressed=self._uncompressed), TrellisFormat)
            size = max(1, (MOST_SEARCHED if scratch else MOST_TOGETHER) // several[0].elements)
            for first in range(0, len(several), size):
                yield several[first : first + size]

    def leaves(self, batch: Sequence[Piece], gradients: Mapping[str, Gradient]) -> list[Tensor]:
        """The packed pieces of a group's gradient.

        Raises:
            NonFiniteError: a value is not finite. The error names the layer unit.
        """
        parts = [
            gradient_part(gradients[name], first, end) for piece in batch for name, first, end in piece.parts
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._pack(batch, whole.view(len(batch), -1))

    def fold(self, batch: Sequence[Piece]) -> Fold[list[Tensor]]:
        """The tree over these packed pieces. Its `put` raises as `leaves`."""
        return Fold(partial(self._add, batch))

    def _add(self, batch: Sequence[Piece], left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
        return self._pack(batch, self._unpack(batch, left).add_(self._unpack(batch, right)))

    def check(self, piece: Piece, packed: Tensor) -> None:
        """Raise what `unpack` would raise for received bytes that no encoder produces."""
        self._codec(piece).open(packed.numpy(), self._spec(piece))

    def join(self, pieces: Sequence[Piece], packed: Iterable[Tensor]) -> dict[str, Tensor]:
        """The flat gradients by parameter, from the packed pieces of one layer unit."""
        by_piece = dict(zip(pieces, packed, strict=True))
        whole: dict[int, Tensor] = {}
        for batch in self.batches(pieces):
            rows = self._unpack(batch, [by_piece[piece] for piece in batch])
            whole |= {piece.number: row for piece, row in zip(batch, rows, strict=True)}
        parts: dict[str, list[Tensor]] = {}
        for piece in pieces:
            values = torch.split(whole[piece.number], [end - first for _, first, end in piece.parts])
            for (name, _, _), value in zip(piece.parts, values, strict=True):
                parts.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}

    def _pack(self, batch: Sequence[Piece], values: Tensor) -> list[Tensor]:
        try:
            return self._packing.pack_rows(self._codec(batch[0]), values)
        except NonFiniteError as error:
            piece = batch[error.row]
            raise NonFiniteError(f"the gradient of {piece.parts[0][0]} of {piece.unit} ({error})") from error

    def _unpack(self, batch: Sequence[Piece], packed: Sequence[Tensor]) -> Tensor:
        return self._packing.unpack_rows(self._codec(batch[0]), packed, self._spec(batch[0]))

    def _codec(self, piece: Piece) -> Codec:
        return codec(piece_format(piece, uncompressed=self._uncompressed).name)

    @staticmethod
    def _spec(piece: Piece) -> TensorSpec:
        return TensorSpec(torch.float32, (piece.elements,))


def gradient_part(gradient: Gradient, first: int, end: int) -> Tensor:
    """Elements of a gradient, flat and in float32."""
    if isinstance(gradient, Fp8Gradient):
        # All pieces except the last consist of whole blocks.
        return unpack_gradient(gradient.part(first, end))
    return gradient.flatten()[first:end].float()
