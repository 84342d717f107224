"""The orders equal those of torch.distributed.pipelining, which runs here without processes or tensors."""

from functools import cache
from types import SimpleNamespace
from typing import Any

from node.schedule.schedule import Action, Kind, Orders, interleaved_1f1b, one_f_one_b, schedule
from tests.support.cases import each


class RecordingStage:
    """Stands in for torch's stage: records what it is asked to compute, and has nothing to send."""

    is_last = False

    def __init__(self, stages: int, stage: int) -> None:
        self.num_stages = stages
        self.stage_index = stage
        self.actions: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(Kind.FORWARD, 0, microbatch))

    def backward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.actions.append(Action(Kind.BACKWARD, 0, microbatch))

    def no_operations(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations
    perform_reduce_grad = no_operations


@cache
def plain() -> Any:
    """torch's 1F1B as it runs. (Its `pipeline_order` numbers the last stage's forwards from 1 by mistake.)"""
    from torch.distributed.pipelining import Schedule1F1B  # slow to import: not when tests are collected

    class Plain(Schedule1F1B):
        def _initialize_stage(self, *args: object, **kwargs: object) -> None:
            """Nothing to set up: there are no tensors whose shapes must be learnt."""

    return Plain


def reference_1f1b(stages: int, microbatches: int) -> Orders:
    recorders = [RecordingStage(stages, stage) for stage in range(stages)]
    for recorder in recorders:
        plain()(recorder, microbatches)._step_microbatches()
    return tuple(tuple(recorder.actions) for recorder in recorders)


# torch names a full backward `B`. It also puts in idle slots (None).
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD}


def reference_interleaved(stages: int, chunks: int, microbatches: int) -> Orders:
    """torch calls a chunk a stage and a stage a rank; its stage index is our global chunk."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    local: list[Any] = [
        SimpleNamespace(num_stages=stages * chunks, group_size=stages, group_rank=0, stage_index=c * stages)
        for c in range(chunks)
    ]
    order: dict[int, list[Any]] = ScheduleInterleaved1F1B(local, microbatches).pipeline_order
    return tuple(
        tuple(
            Action(KINDS[a.computation_type.value], a.stage_index // stages, a.microbatch_index)
            for a in order[rank]
            if a is not None
        )
        for rank in range(stages)
    )


@each("stages", range(1, 9))
def test_plain_orders_equal_torchs(stages: int) -> None:
    for microbatches in range(stages, 33):  # torch takes no fewer than the stages
        assert one_f_one_b(stages, microbatches) == reference_1f1b(stages, microbatches)


@each(
    ("stages", "chunks", "microbatches"),
    [
        (stages, chunks, microbatches)
        for stages in (1, 2, 3, 4, 5, 8)
        for chunks in (2, 3, 4)
        for microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
        if microbatches % max(1, microbatches // stages) == 0  # torch takes no others
    ],
)
def test_interleaved_orders_equal_torchs(stages: int, chunks: int, microbatches: int) -> None:
    assert schedule(stages, chunks, microbatches) == reference_interleaved(stages, chunks, microbatches)


def test_one_chunk_interleaved_equals_torchs_too() -> None:
    for stages in range(1, 6):
        assert interleaved_1f1b(stages, 1, 2 * stages) == reference_interleaved(stages, 1, 2 * stages)
        assert interleaved_1f1b(stages, 1, 2 * stages) == one_f_one_b(stages, 2 * stages, window=1)
