"""Describes a tensor on a link: place in the run (`TensorKey`), dtype and shape (`TensorSpec`)."""

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # Only for annotations, because the coordinator does not load torch.
    import torch


class Direction(IntEnum):
    """The kind of a tensor. The wire carries the value in one byte."""

    ACTIVATION = 0
    GRADIENT = 1
    # Gradient of a tied embedding: a last stage with the head sends its share to the first and gets the sum.
    TIED_SHARE = 2
    TIED_SUM = 3
    # Gradients between the rows of a stage (`node.schedule.gradient_groups`): the sum of a node in the tree
    # of groups goes to the piece's owner, and the sum of all groups comes back.
    SYNC_SHARE = 4
    SYNC_SUM = 5
    # Only in reports: links carry activations of held-out samples as `ACTIVATION`, but count them separately.
    HELD_OUT = 6

    @property
    def words(self) -> str:
        """The kind as errors name it."""
        return self.name.lower().replace("_", " ")


ON_LINKS: frozenset[Direction] = frozenset(Direction) - {Direction.HELD_OUT}
"""The kinds that may occur in frames."""


class TensorKey(NamedTuple):
    """Identifies one tensor in flight; unique within a run.

    `boundary` is the global index of the chunk before the boundary: chunk j feeds chunk j + 1, so its
    activation and the returning gradient both cross boundary j. It is zero for tied gradients. Between
    rows it is the number of the piece, and `microbatch` is the node in the tree. If microbatches are cut
    into N slices, `microbatch` is the microbatch times N plus the slice.
    """

    epoch: int
    step: int
    microbatch: int
    boundary: int
    direction: Direction

    def __str__(self) -> str:
        """The tensor as errors name it. Steps count from 1, as everywhere that a user sees one."""
        place = f"step {self.step + 1}, microbatch {self.microbatch}, boundary {self.boundary}"
        return f"the {self.direction.words} of {place}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape that both ends agreed on before anything was sent."""

    dtype: "torch.dtype"
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)
