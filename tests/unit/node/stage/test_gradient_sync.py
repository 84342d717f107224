"""Rows that share a step's gradient groups have the unsplit trainer's losses and weights, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fp8.reference import Fp8Gradient
from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    RunSection,
    TrainingSection,
)
from node.schedule.gradient_groups import RowShare, model_pieces, owners, piece_bytes, sync_bytes
from node.schedule.placement import split_units
from node.stage import gradient_sync
from node.stage.device_transfer import CudaTransfer
from node.stage.stage_model import StageModel
from node.training import group_sums
from tests.support import memory_pipeline
from tests.support.fake_streams import FakeStreams
from tests.support.memory_pipeline import MemoryIO, MemoryPipeline, reference_run, trained
from tests.support.reference_trainer import Step
from wire.codecs.registry import codec
from wire.errors import NonFiniteError
from wire.messages import HandedOver
from wire.spec import Direction, TensorKey, TensorSpec

TRAINED = 2
CONFIG = RunConfig(
    run=RunSection(steps=8, seed=7),
    model=ModelSection(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
    training=TrainingSection(global_batch=16, microbatch=2, lr=1e-2, warmup_steps=1),
    pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32", groups=4),
)
NARROW = replace(
    CONFIG,
    model=replace(CONFIG.model, hidden=16, heads=2, kv_heads=1, ffn=24),
    training=replace(CONFIG.training, global_batch=8),
)
"""For codecs that take long to pack."""
ROWS = {
    1: [(0, 1, 2, 3)],
    2: [(0, 1), (2, 3)],
    3: [(0, 1), (2,), (3,)],
    4: [(0,), (1,), (2,), (3,)],
}
CODECS = ("fp32", "bf16", "fixed-8", "trellis-4.41")


def synced(sync_codec: str, config: RunConfig = CONFIG) -> RunConfig:
    return replace(config, pipeline=replace(config.pipeline, sync_codec=sync_codec))


@cache
def unsplit(config: RunConfig) -> tuple[list[Step], str]:
    return reference_run(config, TRAINED)


@pytest.mark.parametrize(
    ("rows", "codec"),
    [(1, "bf16"), (2, "fp32"), (3, "fixed-8"), (4, "bf16")],
)
def test_any_number_of_rows_gives_the_bits_of_the_unsplit_model(rows: int, codec: str) -> None:
    assert trained(synced(codec), TRAINED, ROWS[rows]) == unsplit(synced(codec))


def test_a_row_that_is_sent_its_sums_with_the_signs_reversed_has_another_result() -> None:
    """It has the same norms, and would hold another state than the others."""
    sent = MemoryIO.send_to_row

    def reversed_to_last(
        io: MemoryIO, row: int, key: TensorKey, packed: Tensor, elements: int, *more: Any
    ) -> None:
        if (io.row, row, key.direction) == (0, 2, Direction.SYNC_SUM):
            spec = TensorSpec(torch.float32, (elements,))
            packed = codec("fp32").encode(-codec("fp32").decode(packed, spec))
        sent(io, row, key, packed, elements, *more)

    with MemoryPipeline(synced("fp32"), rows=ROWS[3]) as stages, pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryIO, "send_to_row", reversed_to_last)
        votes = stages.outcomes()
        for stage in range(2):
            first, second, last = votes[stage::2]
            assert first.norms == second.norms == last.norms
            assert first.result == second.result != last.result


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces go together, as on a GPU."""

    def packing(device: torch.device) -> gradient_sync.DevicePacking:
        return gradient_sync.DevicePacking(CudaTransfer(device, FakeStreams(), page_locked=False))

    monkeypatch.setattr(gradient_sync, "_packing", packing)


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(("rows", "codec"), [(2, "trellis-4.41"), (3, "bf16"), (4, "fixed-8")])
def test_pieces_that_go_together_give_the_same_bits(
    rows: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two or three matrices of a block at a time.
    monkeypatch.setattr(group_sums, "MOST_TOGETHER", 3 * 16 * 24)
    assert trained(synced(codec, NARROW), TRAINED, ROWS[rows]) == unsplit(synced(codec, NARROW))


def test_codecs_differ() -> None:
    assert len({unsplit(synced(codec, NARROW))[1] for codec in CODECS}) == len(CODECS)


changed = partial(memory_pipeline.changed, CONFIG)


VARIANTS = {
    "tied, head last": changed(model={"tied": True}, pipeline={"head": "last"}),
    "tied, head first": changed(model={"tied": True}, pipeline={"head": "first", "window": 1}),
    "gpt2, one stage": changed(model={"family": "gpt2"}, pipeline={"stages": 1}),
    "interleaved": changed(model={"layers": 4}, pipeline={"chunks": 2}),
    "wide window, three groups of uneven halves": changed(
        training={"global_batch": 12}, pipeline={"groups": 3, "window": 3}
    ),
    "fp8 gradients and moments": changed(training={"gradients": "fp8", "moments": "fp8"}),
    "fp8, stochastic": changed(training={"gradients": "fp8", "global_batch": 40}, pipeline={"groups": 2}),
    "bf16 weights": changed(
        training={
            "precision": "bfloat16",
            "weights": "bfloat16",
            "moments": "fp8",
            "gradients": "fp8",
        }
    ),
    "adapters": replace(changed(), lora=LoraSection(rank=4, dropout=0.1)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_has_groups(name: str) -> None:
    config = VARIANTS[name]
    groups = range(config.pipeline.groups)
    rows = [groups[: len(groups) // 2 + 1], groups[len(groups) // 2 + 1 :]] if len(groups) > 2 else [[0], [1]]
    assert trained(config, TRAINED, rows) == unsplit(config)


def test_codecs_between_stages_sit_where_the_reference_has_them() -> None:
    config = changed(pipeline={"forward_codec": "tah", "backward_codec": "fixed-8"})
    expected = reference_run(config, TRAINED, split_units(config.model, 2))

    assert trained(config, TRAINED, ROWS[2]) == expected


def test_rows_in_float16_skip_the_steps_of_the_unsplit_model() -> None:
    """One group overflows, so every row skips: what is sent of it is zeros, and no row refuses it."""
    config = synced("fixed-8")
    training = replace(config.training, precision="float16", loss_scale=2.0**20, loss_scale_steps=2)
    config = replace(config, training=training)
    expected = reference_run(config, 5)
    norms = [step.grad_norm for step in expected[0]]
    assert inf in norms and min(norms) < inf, "some are skipped, and some are not"
    assert trained(config, 5, ROWS[2]) == expected


def test_a_node_sends_little_more_than_a_reduce_scatter_and_an_all_gather() -> None:
    rows = 3
    # Many pieces, so that owners' shares are equal within the bound.
    config = changed(model={"hidden": 64, "vocab": 32768}, training={"global_batch": 4, "microbatch": 1})
    with MemoryPipeline(config, rows=ROWS[rows]) as stages:
        stages.train(1)
        for place, io in enumerate(stages.ios):
            units = stages.executors[place].units
            coded = sum(piece_bytes(piece) for unit in units for piece in model_pieces(config)[unit])
            sent = sum(size for key, size in io.sent if key.direction >= Direction.SYNC_SHARE)
            assert sent == sync_bytes(config, units, RowShare(config, place // 2, ROWS[rows]))
            assert 0 < sent <= 1.01 * 2 * (rows - 1) / rows * coded


def test_a_row_that_hands_over_sends_its_part_of_its_own_pieces_too() -> None:
    config, rows = synced("fixed-8"), ROWS[3]
    said: list[HandedOver] = []
    with MemoryPipeline(config, rows=rows) as stages:
        for executor in stages.executors:
            executor.hand_over = said.append
        stages.train(1)
        for place, io in enumerate(stages.ios):
            units, share = stages.executors[place].units, RowShare(config, place // 2, rows)
            pieces = [piece for unit in units for piece in model_pieces(config)[unit]]
            sizes = {piece.number: piece_bytes(piece) for piece in pieces}
            owned = sum(
                sizes[number]
                for number, row in owners(sizes, share.subtree_counts).items()
                if row == share.replica
            )
            sent = sum(size for key, size in io.sent if key.direction >= Direction.SYNC_SHARE)
            more = owned * share.subtree_counts[share.replica]
            assert sent == sync_bytes(config, units, share) + more and more > 0
    assert sorted(message.groups for message in said) == sorted(2 * rows)
    losses = [{*message.group_losses} for message in said if message.group_losses]
    assert sorted(map(sorted, losses)) == sorted(map(list, rows)), "one stage says them"


def test_sums_go_behind_the_last_gradient_which_other_stages_wait_for() -> None:
    with MemoryPipeline(synced("fixed-8"), rows=ROWS[4]) as stages:
        stages.train(1)
        for place, io in enumerate(stages.ios):
            ways = [key.direction for key, _ in io.sent]
            first_sum = ways.index(Direction.SYNC_SHARE)
            assert ways[:first_sum].count(Direction.GRADIENT) == (2 if place % 2 else 0)
            assert Direction.GRADIENT not in ways[first_sum:]


class Broken(Exception):
    """An error that a test makes a stage raise."""


@pytest.mark.parametrize("direction", [Direction.SYNC_SHARE, Direction.SYNC_SUM])
def test_a_step_called_off_while_rows_sync_runs_again_with_the_same_bits(
    direction: Direction,
) -> None:
    config = synced("fixed-8")
    with MemoryPipeline(config, rows=ROWS[2]) as stages:
        stages.train(1)
        io = stages.ios[2]
        send = io.send_to_row

        def fail(row: int, key: TensorKey, *what: Any) -> None:
            if key.direction is direction:
                raise Broken
            send(row, key, *what)

        io.send_to_row = fail  # type: ignore[method-assign]  # as a link that breaks
        with pytest.raises(Broken):
            stages.outcomes()
        io.send_to_row = send  # type: ignore[method-assign]
        stages.forget()
        stages.commit(stages.outcomes(epoch=2))

        assert stages.weights_sha256() == unsplit(config)[1]


def test_a_gradient_that_is_not_finite_is_named() -> None:
    config = changed(training={"lr": 1e-3})
    with MemoryPipeline(config, rows=ROWS[2]) as stages:
        put = StageModel.take_gradients

        def spoiled(self: StageModel, units: Sequence[str]) -> dict[str, dict[str, Tensor | Fp8Gradient]]:
            found = put(self, units)
            found["block.0000"]["gate.weight"].fill_(torch.nan)  # type: ignore[union-attr]  # a tensor
            return found

        model = stages.executors[0].model
        model.take_gradients = partial(spoiled, model)  # type: ignore[method-assign, arg-type]
        with pytest.raises(NonFiniteError, match=r"gradient of gate\.weight of block\.0000"):
            stages.outcomes()


@pytest.mark.usefixtures("together")
def test_a_gradient_that_is_not_finite_is_named_where_pieces_go_together() -> None:
    test_a_gradient_that_is_not_finite_is_named()
