"""Sum a whole model's gradient groups on their device, where the packed bytes are not needed.

The values are those of `GroupSums`: each node of the tree is what its packed form says. But pieces of equal
length go through their codec together, as rows of one tensor. A model of 124 million parameters has 669
pieces of five lengths, and a step of four groups packs each seven times.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.common.random_bits import mixed
from node.config.schema import RunConfig
from node.schedule.gradient_groups import ROOT, Fold, GroupTree, Piece, model_pieces, piece_format
from node.training.group_sums import CodecPacking, Gradient, Packing, PieceSums, gradient_part
from wire.codecs.base import ROW_BYTES, Codec
from wire.codecs.header import seal
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.spec import TensorSpec

MOST_ELEMENTS = 1 << 27
"""Of a batch, if it has more than one piece."""

Sums = Iterator[tuple[str, dict[str, Tensor]]]


class ModelSums(Protocol):
    """Sums the gradient groups of a whole model."""

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's, by layer unit and parameter. May raise NonFiniteError, which names the unit."""
        ...

    def finish(self) -> Sums:
        """All groups are done: layer units and their sum over groups, flat by parameter. May raise
        NonFiniteError."""
        ...


def model_sums(config: RunConfig, units: Sequence[str], device: torch.device, *, of_round: bool) -> ModelSums:
    """The sums for a device. `of_round`: of how local steps changed the weights."""
    if device.type == "cpu":
        return GroupSums(config, units, CodecPacking(device), of_round=of_round)
    return DeviceSums(config, units, of_round=of_round)


class GroupSums:
    """Sums the gradient groups of a whole model in one process, as a run's stages do."""

    def __init__(self, config: RunConfig, units: Sequence[str], packing: Packing, *, of_round: bool) -> None:
        """`of_round`: what is summed is how local steps changed the weights, not gradients."""
        pieces = model_pieces(config, of_round=of_round)
        self._tree = GroupTree(config.pipeline.groups)
        self._sums = PieceSums(packing)
        self._pieces = {unit: pieces[unit] for unit in units}
        self._folds = {
            unit: [(batch, self._sums.fold(batch)) for batch in self._sums.batches(pieces[unit])]
            for unit in units
        }

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's, by layer unit and parameter."""
        for unit, folds in self._folds.items():
            for batch, fold in folds:
                fold.put(self._tree.leaf(group), self._sums.leaves(batch, gradients[unit]))

    def finish(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """All groups are done: layer units and their sum over groups, flat by parameter."""
        for unit, pieces in self._pieces.items():
            roots = {
                piece.number: root
                for batch, fold in self._folds[unit]
                for piece, root in zip(batch, fold.nodes.pop(ROOT), strict=True)
            }
            yield unit, self._sums.join(pieces, [roots[piece.number] for piece in pieces])


@dataclass(frozen=True)
class Batch:
    """Pieces that go through their codec together; all of one codec and length."""

    pieces: tuple[Piece, ...]

    @cached_property
    def runs(self) -> tuple[tuple[str, str, int, int], ...]:
        """(unit, parameter, first element, end) of the parts of all pieces in order, joined where one follows
        the other."""
        found: list[tuple[str, str, int, int]] = []
        for piece in self.pieces:
            for name, first, end in piece.parts:
                if found and found[-1][:2] == (piece.unit, name) and found[-1][3] == first:
                    found[-1] = (*found[-1][:3], end)
                else:
                    found.append((piece.unit, name, first, end))
        return tuple(found)

    def gather(self, gradients: Mapping[str, Mapping[str, Gradient]]) -> Tensor:
        """The pieces of a group's gradient, float32 `[n, elements]`, a copy."""
        parts = [gradient_part(gradients[unit][name], first, end) for unit, name, first, end in self.runs]
        return torch.cat(parts).view(len(self.pieces), -1)


def batches(pieces: Iterable[Piece], most: int) -> list[Batch]:
    """Pieces of equal codec and length together, of at most so many elements unless it is one piece."""
    alike: dict[tuple[str, int], list[Piece]] = {}
    for piece in pieces:
        alike.setdefault((piece.codec, piece.elements), []).append(piece)
    found = []
    for (_, elements), several in alike.items():
        size = max(1, most // elements)
        found += [Batch(tuple(several[first : first + size])) for first in range(0, len(several), size)]
    return found


class DeviceSums:
    """`ModelSums` on any device."""

    def __init__(
        self, config: RunConfig, units: Sequence[str], *, of_round: bool, salt: int | None = None
    ) -> None:
        """
        Args:
            of_round: what is summed is how local steps changed the weights, not gradients.
            salt: of the step, 32 bits, from which those of the tree's nodes follow, for codecs that draw.
        """
        pieces = model_pieces(config, of_round=of_round)
        self._pieces = {unit: pieces[unit] for unit in units}
        self._tree = GroupTree(config.pipeline.groups)
        self._salt = salt
        self._batches = batches((piece for unit in units for piece in self._pieces[unit]), MOST_ELEMENTS)
        self._folds = [Fold(partial(self._add, batch)) for batch in self._batches]
        self._packed = 0

    def group_done(self, group: int, gradients: Mapping[str, Mapping[str, Gradient]]) -> None:
        """Take a group's, by layer unit and parameter; they may be dropped at once.

        Raises NonFiniteError, which names the layer unit.
        """
        for batch, fold in zip(self._batches, self._folds, strict=True):
            fold.put(self._tree.leaf(group), self._through(batch, batch.gather(gradients)))

    def finish(self) -> Sums:
        """All groups are done: layer units and their sum over groups, flat by parameter."""
        places: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        for batch, fold in zip(self._batches, self._folds, strict=True):
            values, start = fold.nodes.pop(ROOT).view(-1), 0
            for unit, name, first, end in batch.runs:
                part = values[start : start + end - first]
                places.setdefault((unit, name), []).append((first, part))
                start += end - first
        for unit, pieces in self._pieces.items():
            names = dict.fromkeys(name for piece in pieces for name, _, _ in piece.parts)
            yield unit, {name: _joined(places.pop((unit, name))) for name in names}

    def _add(self, batch: Batch, left: Tensor, right: Tensor) -> Tensor:
        return self._through(batch, left.add_(right))

    def _through(self, batch: Batch, values: Tensor) -> Tensor:
        """What packed forms of a node of the tree say."""
        which = codec(piece_format(batch.pieces[0]).name)
        if which.draws and self._salt is not None:
            # All pieces of all nodes draw by themselves, but for equal places in pieces of one batch.
            self._packed += 1
            which = which.salted(mixed(self._salt ^ mixed(self._packed)))
        try:
            return through(which, values)
        except NonFiniteError as error:
            piece = batch.pieces[error.row]
            raise NonFiniteError(f"the gradient of {piece.parts[0][0]} of {piece.unit} ({error})") from None


def through(which: Codec, values: Tensor) -> Tensor:
    """The rows of fp32 `[n, C]` after packing and unpacking. Raises NonFiniteError with `row`."""
    packed, spec = which.pack_rows(values), TensorSpec(values.dtype, (values.shape[1],))
    records = torch.nn.functional.pad(packed, (0, -packed.shape[1] % ROW_BYTES))
    rows = [record[: packed.shape[1]] for record in records.cpu()]
    for number, row in enumerate(rows):
        try:
            seal(row.numpy())
        except NonFiniteError as error:
            error.row = number
            raise
    return which.unpack_rows(records, spec, [which.open(row.numpy(), spec) for row in rows], rows)


def _joined(parts: list[tuple[int, Tensor]]) -> Tensor:
    parts.sort(key=lambda part: part[0])
    return parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])
