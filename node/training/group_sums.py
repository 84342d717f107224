"""What gradient groups do to a gradient: packing a group's pieces, adding two nodes of the tree, unpacking.

`node.pipeline.gradient_groups` says which pieces and which tree. A node of the tree is its packed form, uint8
on the CPU, so its value is what the code says, wherever it was made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.fp8.layout import BLOCK
from kernels.fp8.reference import Fp8Gradient, unpack_gradient
from node.config.schema import RunConfig
from node.pipeline.gradient_groups import ROOT, Fold, GroupTree, Piece, model_pieces, piece_format
from wire.codecs.base import Codec
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

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


class CodecPacking:
    """`Packing` by the codec alone, on the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack(self, which: Codec, tensor: Tensor) -> Tensor:
        return which.encode(tensor).cpu()

    def unpack(self, which: Codec, packed: Tensor, spec: TensorSpec) -> Tensor:
        return which.decode(packed.to(self._device), spec)


class PieceSums:
    """Packs, adds and unpacks pieces of a run's gradients."""

    def __init__(self, packing: Packing, *, uncompressed: bool = False) -> None:
        """`uncompressed`: in fp32, whatever the pieces' codecs are."""
        self._packing = packing
        self._uncompressed = uncompressed

    def leaf(self, piece: Piece, gradients: Mapping[str, Gradient]) -> Tensor:
        """A group's gradient of a piece, packed. Raises NonFiniteError, which names the layer unit."""
        parts = [gradient_part(gradients[name], first, end) for name, first, end in piece.parts]
        return self._pack(piece, parts[0] if len(parts) == 1 else torch.cat(parts))

    def add(self, piece: Piece, left: Tensor, right: Tensor) -> Tensor:
        """The sum of two nodes of the tree, packed. Raises as `leaf`."""
        return self._pack(piece, self.unpack(piece, left).add_(self.unpack(piece, right)))

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
        for piece, one in zip(pieces, packed, strict=True):
            values = torch.split(self.unpack(piece, one), [end - first for _, first, end in piece.parts])
            for (name, _, _), value in zip(piece.parts, values, strict=True):
                parts.setdefault(name, []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}

    def _pack(self, piece: Piece, values: Tensor) -> Tensor:
        try:
            return self._packing.pack(self._codec(piece), values)
        except NonFiniteError as error:
            name = piece.parts[0][0]
            raise NonFiniteError(f"the gradient of {name} of {piece.unit} ({error})") from error

    def _codec(self, piece: Piece) -> Codec:
        return codec(piece_format(piece, uncompressed=self._uncompressed).name)

    @staticmethod
    def _spec(piece: Piece) -> TensorSpec:
        return TensorSpec(torch.float32, (piece.elements,))


def gradient_part(gradient: Gradient, first: int, end: int) -> Tensor:
    """Elements of a gradient, flat and in float32."""
    if isinstance(gradient, Fp8Gradient):
        # A piece is whole blocks, except the last.
        exponents = gradient.exponents[first // BLOCK : -(-end // BLOCK)]
        return unpack_gradient(Fp8Gradient(gradient.codes[first:end], exponents))
    return gradient.flatten()[first:end].float()


class GroupSums:
    """Sums the gradient groups of a whole model in one process, as a run's stages do."""

    def __init__(self, config: RunConfig, units: Sequence[str], packing: Packing, *, of_round: bool) -> None:
        """`of_round`: what is summed is how local steps changed the weights, not gradients."""
        pieces = model_pieces(config, of_round=of_round)
        self._tree = GroupTree(config.pipeline.groups)
        self._sums = PieceSums(packing)
        self._pieces = {unit: pieces[unit] for unit in units}
        self._folds = {piece.number: self._sums.fold(piece) for unit in units for piece in self._pieces[unit]}

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's, by layer unit and parameter."""
        for unit, pieces in self._pieces.items():
            for piece in pieces:
                self._folds[piece.number].put(self._tree.leaf(group), self._sums.leaf(piece, gradients[unit]))

    def finish(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """All groups are done: layer units and their sum over groups, flat by parameter."""
        for unit, pieces in self._pieces.items():
            roots = [self._folds[piece.number].nodes.pop(ROOT) for piece in pieces]
            yield unit, self._sums.join(pieces, roots)
