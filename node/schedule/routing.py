"""Which stage sends a tensor to which stage, and a stage's units and boundaries. All functions are pure.

Global chunk j is on stage j mod n, and boundary j is between chunks j and j + 1. So with more than one chunk
per stage, or with the head on the first stage, the last stage sends to the first.
"""

from typing import NamedTuple

from node.config.schema import RunConfig
from node.schedule.floor import joints
from node.schedule.placement import chunk_units, chunks_of, head_first, slices_of
from node.schedule.schedule import Action, Kind, dependencies
from wire.spec import Direction, TensorKey


class Peer(NamedTuple):
    """A seat in the grid of rows and stages, at the other end of a link."""

    replica: int
    stage: int


BETWEEN_ROWS = -1
"""Stands for a stage if the tensor stays in its stage and goes to another row."""


def source_stage(key: TensorKey, stages: int) -> int:
    """The stage that sends the tensor, or `BETWEEN_ROWS`."""
    match key.direction:
        case Direction.ACTIVATION | Direction.HELD_OUT:
            return key.boundary % stages
        case Direction.GRADIENT:
            return (key.boundary + 1) % stages
        case Direction.TIED_SHARE:
            return stages - 1
        case Direction.TIED_SUM:
            return 0
        case Direction.SYNC_SHARE | Direction.SYNC_SUM:
            return BETWEEN_ROWS


def target_stage(key: TensorKey, stages: int) -> int:
    """The stage that receives the tensor, or `BETWEEN_ROWS`."""
    match key.direction:
        case Direction.ACTIVATION | Direction.HELD_OUT:
            return (key.boundary + 1) % stages
        case Direction.GRADIENT:
            return key.boundary % stages
        case Direction.TIED_SHARE:
            return 0
        case Direction.TIED_SUM:
            return stages - 1
        case Direction.SYNC_SHARE | Direction.SYNC_SUM:
            return BETWEEN_ROWS


def neighbours(stage: int, stages: int, chunks: int, tied: bool) -> tuple[int, ...]:
    """The stages to which `stage` has a link, in ascending order."""
    others = {stage - 1, stage + 1} & set(range(stages))
    if (chunks > 1 or tied) and stages > 1:
        # The ring closes: the last stage's output, or the tied gradient, goes to the first stage.
        if stage == 0:
            others.add(stages - 1)
        if stage == stages - 1:
            others.add(0)
    return tuple(sorted(others - {stage}))


def link_ends(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """The stages at both ends of each link of a row, in pipeline order.

    A link that closes the ring comes last and starts at the last stage.
    """
    closes = config.pipeline.chunks > 1 or config.sums_tied_gradients
    return tuple(joints(config.pipeline.stages, closes=closes))


class StageLayout:
    """Stage `stage` of `stages`, with `chunks` model chunks, and one more for a head on the first stage."""

    def __init__(self, config: RunConfig, stage: int, stages: int) -> None:
        self.stage = stage
        self.stages = stages
        self.head_first = head_first(config, stages)
        self._units = chunk_units(config, stages)
        self.last_chunk = len(self._units) - 1
        """The global chunk that computes the loss."""
        self._own = range(stage, len(self._units), stages)
        self.chunks = len(self._own)
        self.interleaved = chunks_of(config, stages) > 1
        """Whether tensors may arrive in another order than they are needed."""
        self.slices = slices_of(config)
        """The slices of each microbatch."""
        self._numbers = config.microbatches * self.slices
        self._held_out = self._numbers * (1 + config.validation_passes)
        """Numbers from `_numbers` up to this belong to held-out samples, pass after pass."""
        self.exchanges_tie = config.sums_tied_gradients and stages > 1 and not self.head_first
        """Whether the gradient of a tied weight crosses the link between the last stage and the first."""
        self.sums_tie_alone = config.sums_tied_gradients and self.is_first and self.has_loss
        """Whether this stage has both copies of a tied weight that is trained."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def has_loss(self) -> bool:
        """Whether this stage computes the loss, from labels."""
        return self.last_chunk in self._own

    @property
    def units(self) -> tuple[str, ...]:
        """The layer units of this stage, in model order within each chunk."""
        return tuple(unit for chunk in self._own for unit in self._units[chunk])

    def chunk_units(self, chunk: int) -> tuple[str, ...]:
        """The layer units of one of the stage's chunks, which are numbered from 0."""
        return tuple(self._units[self._own[chunk]])

    @property
    def boundaries(self) -> dict[int, str]:
        """The boundaries of this stage by number, each with the layer unit before it."""
        ends = {chunk - 1 for chunk in self._own} | set(self._own)
        return {index: self._units[index][-1] for index in sorted(ends) if 0 <= index < self.last_chunk}

    def global_chunk(self, action: Action) -> int:
        """The global number of the chunk that an action of this stage runs."""
        return action.chunk * self.stages + self.stage

    def ends_microbatch(self, action: Action) -> bool:
        """Whether a backward is the last one of its microbatch through its chunk."""
        alone = self.head_first and self.global_chunk(action) == self.last_chunk
        return action.slice == (self.slices - 1 if alone else 0)

    def number(self, action: Action) -> int:
        """The number of this action's slice, which its tensors have as their microbatch."""
        return action.microbatch * self.slices + action.slice

    def receives(self, key: TensorKey) -> bool:
        if target_stage(key, self.stages) != self.stage:
            return False
        if key.direction in (Direction.TIED_SHARE, Direction.TIED_SUM):
            # There is one per step, without microbatch or boundary. A check is needed, because every accepted
            # key may get a buffer as large as the embedding.
            return self.exchanges_tie and key.microbatch == 0 and key.boundary == 0
        most = self._held_out if key.direction is Direction.ACTIVATION else self._numbers
        return 0 <= key.boundary < self.last_chunk and 0 <= key.microbatch < most

    def needed(self, epoch: int, step: int, action: Action) -> TensorKey | None:
        """The tensor for which an action of this stage waits."""
        chunks = (self.last_chunk + 1) // self.stages
        tensor = dependencies(action, self.stage, self.stages, chunks, head_first=self.head_first).needs
        if tensor is None:
            return None
        direction = Direction.ACTIVATION if tensor.kind is Kind.FORWARD else Direction.GRADIENT
        return TensorKey(epoch, step, self.number(action), tensor.boundary, direction)
