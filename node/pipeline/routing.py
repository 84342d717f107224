"""Which stage sends a tensor to which. Pure.

Global chunk j lives on stage j mod n, so with more than one chunk a stage the last stage feeds the first.
"""

from wire.spec import Direction, TensorKey


def source_stage(key: TensorKey, stages: int) -> int:
    """The stage that sends the tensor."""
    match key.direction:
        case Direction.ACTIVATION:
            return key.boundary % stages
        case Direction.GRADIENT:
            return (key.boundary + 1) % stages
        case Direction.TIED_SHARE:
            return stages - 1
        case Direction.TIED_SUM:
            return 0


def target_stage(key: TensorKey, stages: int) -> int:
    """The stage that receives the tensor."""
    match key.direction:
        case Direction.ACTIVATION:
            return (key.boundary + 1) % stages
        case Direction.GRADIENT:
            return key.boundary % stages
        case Direction.TIED_SHARE:
            return 0
        case Direction.TIED_SUM:
            return stages - 1


def neighbours(stage: int, stages: int, chunks: int, tied: bool) -> tuple[int, ...]:
    """The stages that `stage` has a link with, in ascending order."""
    found = {stage - 1, stage + 1} & set(range(stages))
    if (chunks > 1 or tied) and stages > 1:
        # The ring closes: chunk n of the last stage's output goes to the first, or the tied gradient does.
        if stage == 0:
            found.add(stages - 1)
        if stage == stages - 1:
            found.add(0)
    return tuple(sorted(found - {stage}))
