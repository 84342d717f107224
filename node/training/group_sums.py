"""The operations on gradients of gradient groups: pack a group's pieces, add two nodes of the tree, unpack.

`node.schedule.gradient_groups` defines the pieces and the tree. A node of the tree is stored in packed form,
uint8 on the CPU. So its value is what the code says, whichever machine computed it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.fp8.layout import BLOCK
from kernels.fp8.reference import Fp8Gradient, unpack_gradient
from node.schedule.gradient_groups import ROOT, Fold, Piece, piece_format
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
    """Packs a device's tensors to the CPU and back."""

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        """The sealed bytes of a tensor, uint8 [n] on the CPU.

        Raises:
            NonFiniteError: the tensor has values that are not finite.
        """
        ...

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        """The tensor on the device. Raises what `Codec.decode` raises."""
        ...


class RowPacking(Packing, Protocol):
    """`Packing` of a GPU, where pieces of equal length go through their codec together. For a single piece,
    the launches and the host's wait take longer than its elements."""

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        """The sealed bytes of every row of float32 [n, elements].

        Raises:
            NonFiniteError: with `row`, the number of the row that is not finite.
        """
        ...

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Float32 [n, elements] on the device, a row for each packed piece."""
        ...


class CodecPacking:
    """`Packing` by the codec alone, on the CPU and the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        return which.encode(tensor.cpu())

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        return which.decode(packed, spec).to(self._device)


class PieceSums:
    """Packs, adds and unpacks pieces of a run's gradients."""

    def __init__(
        self, packing: Packing, *, rows: RowPacking | None = None, uncompressed: bool = False
    ) -> None:
        """
        Args:
            rows: packs and unpacks pieces together.
            uncompressed: use fp32, whatever the pieces' codecs are.
        """
        self._packing = packing
        self._rows = rows
        self._uncompressed = uncompressed

    def leaf(self, piece: Piece, gradients: Mapping[str, Gradient]) -> Tensor:
        """The packed piece of a group's gradient.

        Raises:
            NonFiniteError: a value is not finite. The error names the layer unit.
        """
        parts = [gradient_part(gradients[name], first, end) for name, first, end in piece.parts]
        return self._pack(piece, parts[0] if len(parts) == 1 else torch.cat(parts))

    def add(self, piece: Piece, left: Tensor, right: Tensor) -> Tensor:
        """The packed sum of two nodes of the tree. Raises as `leaf`."""
        return self._pack(piece, self.unpack(piece, left).add_(self.unpack(piece, right)))

    @property
    def together(self) -> bool:
        """Whether the caller should pass pieces together."""
        return self._rows is not None

    def leaves(self, pieces: Sequence[Piece], gradients: Mapping[str, Gradient]) -> list[Tensor]:
        """`leaf` for each of several pieces of one layer unit."""
        if self._rows is None:
            return [self.leaf(piece, gradients) for piece in pieces]
        leaves: dict[int, Tensor] = {}
        for several in self._alike(pieces):
            parts = [
                gradient_part(gradients[name], *ends) for piece in several for name, *ends in piece.parts
            ]
            leaves |= self._pack_rows(several, torch.cat(parts).view(len(several), -1))
        return [leaves[piece.number] for piece in pieces]

    def put(self, folds: Mapping[int, Fold[Tensor]], node: int, values: Mapping[Piece, Tensor]) -> None:
        """`Fold.put` for a node's value of each piece. The folds are by the pieces' numbers."""
        given = dict(values)
        while given:
            left: dict[Piece, Tensor] = {}
            right: dict[Piece, Tensor] = {}
            for piece, value in given.items():
                nodes = folds[piece.number].nodes
                other = nodes.pop(node ^ 1, None) if node > ROOT else None
                if other is None:
                    nodes[node] = value
                else:
                    left[piece], right[piece] = (other, value) if node % 2 else (value, other)
            given = self._add_all(left, right)
            node //= 2

    def _add_all(self, left: Mapping[Piece, Tensor], right: Mapping[Piece, Tensor]) -> dict[Piece, Tensor]:
        """`add` for each piece."""
        if self._rows is None:
            return {piece: self.add(piece, left[piece], right[piece]) for piece in left}
        sums: dict[Piece, Tensor] = {}
        for several in self._alike(left):
            values = self._unpack_rows(several, [left[piece] for piece in several])
            values.add_(self._unpack_rows(several, [right[piece] for piece in several]))
            packed = self._pack_rows(several, values)
            sums |= {piece: packed[piece.number] for piece in several}
        return sums

    def unpack(self, piece: Piece, packed: Tensor) -> Tensor:
        """The value of a packed piece, float32 [elements] on the device."""
        return self._packing.unpack(self._codec(piece), packed, self._spec(piece))

    def check(self, piece: Piece, packed: Tensor) -> None:
        """Raise what `unpack` would raise for received bytes that no encoder produces."""
        self._codec(piece).open(packed.numpy(), self._spec(piece))

    def fold(self, piece: Piece) -> Fold[Tensor]:
        """The tree over this piece."""
        return Fold(partial(self.add, piece))

    def join(self, pieces: Iterable[Piece], packed: Iterable[Tensor]) -> dict[str, Tensor]:
        """The flat gradients by parameter, from the packed pieces of one layer unit."""
        parts: dict[str, list[Tensor]] = {}
        for piece, whole in self._unpacked(dict(zip(pieces, packed, strict=True))):
            values = torch.split(whole, [end - first for _, first, end in piece.parts])
            for (name, _, _), value in zip(piece.parts, values, strict=True):
                parts.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}

    def _unpacked(self, packed: Mapping[Piece, Tensor]) -> Iterator[tuple[Piece, Tensor]]:
        """`unpack` for each piece, in order."""
        if self._rows is None:
            for piece, value in packed.items():
                yield piece, self.unpack(piece, value)
            return
        unpacked: dict[int, Tensor] = {}
        for several in self._alike(packed):
            values = self._unpack_rows(several, [packed[piece] for piece in several])
            unpacked |= {piece.number: row for piece, row in zip(several, values, strict=True)}
        for piece in packed:
            yield piece, unpacked[piece.number]

    def _alike(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Batches of pieces with equal codec and length, small enough for memory, in the order of their first
        piece."""
        alike: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            alike.setdefault((piece.codec, piece.elements), []).append(piece)
        for several in alike.values():
            scratch = isinstance(piece_format(several[0], uncompressed=self._uncompressed), TrellisFormat)
            size = max(1, (MOST_SEARCHED if scratch else MOST_TOGETHER) // several[0].elements)
            for first in range(0, len(several), size):
                yield several[first : first + size]

    def _pack_rows(self, pieces: Sequence[Piece], values: Tensor) -> dict[int, Tensor]:
        """The packed rows by the pieces' numbers."""
        assert self._rows is not None
        try:
            packed = self._rows.pack_rows(self._codec(pieces[0]), values)
        except NonFiniteError as error:
            raise _named(pieces[error.row], error) from error
        return {piece.number: row for piece, row in zip(pieces, packed, strict=True)}

    def _unpack_rows(self, pieces: Sequence[Piece], packed: Sequence[Tensor]) -> Tensor:
        assert self._rows is not None
        return self._rows.unpack_rows(self._codec(pieces[0]), packed, self._spec(pieces[0]))

    def _pack(self, piece: Piece, values: Tensor) -> Tensor:
        try:
            return self._packing.pack(self._codec(piece), values)
        except NonFiniteError as error:
            raise _named(piece, error) from error

    def _codec(self, piece: Piece) -> Codec:
        return codec(piece_format(piece, uncompressed=self._uncompressed).name)

    @staticmethod
    def _spec(piece: Piece) -> TensorSpec:
        return TensorSpec(torch.float32, (piece.elements,))


def _named(piece: Piece, error: NonFiniteError) -> NonFiniteError:
    return NonFiniteError(f"the gradient of {piece.parts[0][0]} of {piece.unit} ({error})")


def gradient_part(gradient: Gradient, first: int, end: int) -> Tensor:
    """Elements of a gradient, flat and in float32."""
    if isinstance(gradient, Fp8Gradient):
        # All pieces except the last consist of whole blocks.
        exponents = gradient.exponents[first // BLOCK : -(-end // BLOCK)]
        return unpack_gradient(Fp8Gradient(gradient.codes[first:end], exponents))
    return gradient.flatten()[first:end].float()
