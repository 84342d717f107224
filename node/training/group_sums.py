"""What gradient groups do to a gradient: packing a group's pieces, adding two nodes of the tree, unpacking.

`node.schedule.gradient_groups` says which pieces and which tree. A node of the tree is its packed form, uint8
on the CPU, so its value is what the code says, wherever it was made.
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
"""Elements that go through a codec together; through `trellis`, whose search needs more memory, fewer. Larger
pieces go by themselves."""

Gradient = Tensor | Fp8Gradient
"""A parameter's, in its shape, or flat in e4m3."""


class Packing(Protocol):
    """Packs a device's tensors to the CPU and back."""

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        """Sealed, uint8 [n] on the CPU. Raises NonFiniteError."""
        ...

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        """On the device. Raises what `Codec.decode` raises."""
        ...


class RowPacking(Packing, Protocol):
    """A GPU's, where pieces of equal length go through their codec together: what a piece takes by itself,
    launches and the host's wait, is more than its elements take."""

    def pack_rows(self, which: Codec, values: Tensor) -> list[Tensor]:
        """Every row of float32 [n, elements], as `pack`. Raises NonFiniteError with `row`."""
        ...

    def unpack_rows(self, which: Codec, packed: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Float32 [n, elements], a row for each, as `unpack`."""
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
            rows: where pieces are packed and unpacked together.
            uncompressed: in fp32, whatever the pieces' codecs are.
        """
        self._packing = packing
        self._rows = rows
        self._uncompressed = uncompressed

    def leaf(self, piece: Piece, gradients: Mapping[str, Gradient]) -> Tensor:
        """A group's gradient of a piece, packed. Raises NonFiniteError, which names the layer unit."""
        parts = [gradient_part(gradients[name], first, end) for name, first, end in piece.parts]
        return self._pack(piece, parts[0] if len(parts) == 1 else torch.cat(parts))

    def add(self, piece: Piece, left: Tensor, right: Tensor) -> Tensor:
        """The sum of two nodes of the tree, packed. Raises as `leaf`."""
        return self._pack(piece, self.unpack(piece, left).add_(self.unpack(piece, right)))

    @property
    def together(self) -> bool:
        """Whether pieces should be given together."""
        return self._rows is not None

    def leaves(self, pieces: Sequence[Piece], gradients: Mapping[str, Gradient]) -> list[Tensor]:
        """`leaf` of each, pieces of one layer unit."""
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
        """`Fold.put` of a node's value of each piece, in the folds by the pieces' numbers."""
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
        """`add` of each piece."""
        if self._rows is None:
            return {piece: self.add(piece, left[piece], right[piece]) for piece in left}
        found: dict[Piece, Tensor] = {}
        for several in self._alike(left):
            values = self._unpack_rows(several, [left[piece] for piece in several])
            values.add_(self._unpack_rows(several, [right[piece] for piece in several]))
            packed = self._pack_rows(several, values)
            found |= {piece: packed[piece.number] for piece in several}
        return found

    def unpack(self, piece: Piece, packed: Tensor) -> Tensor:
        """What a packed piece says, float32 [elements] on the device."""
        return self._packing.unpack(self._codec(piece), packed, self._spec(piece))

    def check(self, piece: Piece, packed: Tensor) -> None:
        """Raise what `unpack` would raise for received bytes that no encoder makes."""
        self._codec(piece).open(packed.numpy(), self._spec(piece))

    def fold(self, piece: Piece) -> Fold[Tensor]:
        """The tree over this piece."""
        return Fold(partial(self.add, piece))

    def join(self, pieces: Iterable[Piece], packed: Iterable[Tensor]) -> dict[str, Tensor]:
        """The flat gradients, by parameter, that packed pieces of one layer unit say."""
        parts: dict[str, list[Tensor]] = {}
        for piece, whole in self._unpacked(dict(zip(pieces, packed, strict=True))):
            values = torch.split(whole, [end - first for _, first, end in piece.parts])
            for (name, _, _), value in zip(piece.parts, values, strict=True):
                parts.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}

    def _unpacked(self, packed: Mapping[Piece, Tensor]) -> Iterator[tuple[Piece, Tensor]]:
        """`unpack` of each, in order."""
        if self._rows is None:
            for piece, one in packed.items():
                yield piece, self.unpack(piece, one)
            return
        found: dict[int, Tensor] = {}
        for several in self._alike(packed):
            values = self._unpack_rows(several, [packed[piece] for piece in several])
            found |= {piece.number: row for piece, row in zip(several, values, strict=True)}
        for piece in packed:
            yield piece, found[piece.number]

    def _alike(self, pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Pieces of equal codec and length, few enough for memory, in the order of the first of each."""
        alike: dict[tuple[str, int], list[Piece]] = {}
        for piece in pieces:
            alike.setdefault((piece.codec, piece.elements), []).append(piece)
        for several in alike.values():
            scratch = isinstance(piece_format(several[0], uncompressed=self._uncompressed), TrellisFormat)
            size = max(1, (MOST_SEARCHED if scratch else MOST_TOGETHER) // several[0].elements)
            for first in range(0, len(several), size):
                yield several[first : first + size]

    def _pack_rows(self, pieces: Sequence[Piece], values: Tensor) -> dict[int, Tensor]:
        """By the pieces' numbers."""
        assert self._rows is not None
        try:
            packed = self._rows.pack_rows(self._codec(pieces[0]), values)
        except NonFiniteError as error:
            raise _named(pieces[error.row], error) from error
        return {piece.number: one for piece, one in zip(pieces, packed, strict=True)}

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
        # A piece is whole blocks, except the last.
        exponents = gradient.exponents[first // BLOCK : -(-end // BLOCK)]
        return unpack_gradient(Fp8Gradient(gradient.codes[first:end], exponents))
    return gradient.flatten()[first:end].float()
