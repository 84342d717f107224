"""Weights and main gradients that wait in host memory: the same bits, and two blocks' on the device."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import (
    LoraSection,
    ModelSection,
    PipelineSection,
    RunConfig,
    SyncSection,
    TrainingSection,
)
from node.model import offload
from node.model.host_memory import Copy
from node.model.lora import FrozenWeight
from node.model.page_locked import in_pieces, page_locked, pieces_of
from node.model.storage import Storage
from node.model.units import parameter_specs
from node.stage.stage_model import StageModel
from node.state.unit_state import FROZEN_PREFIX
from node.tuning.device_memory import Devices, Share
from node.tuning.memory_plan import Choice
from node.tuning.state_moves import STAYS, Moved, moved_blocks
from tests.support.host_memory import LateHostMemory
from tests.support.memory_pipeline import MemoryPipeline, reference_run
from tests.support.passes import CASES, Forced
from tests.unit.node.model.test_offload import ALL, CPU, HIDDEN, KEPT3, SHAPE, config, same, steps

BOTH = Moved(moments=1, weights=3, gradients=3)
CODES = Moved(moments=1, weights=3, gradients=3, codes=3)
STATES = {
    "weights": Moved(moments=1, weights=3),
    "gradients": Moved(moments=1, gradients=3),
    "some blocks": Moved(moments=1, weights=2, gradients=1),
}
KEPT_ALIKE = ("agoq", "compact", "recompute")
"""Cases whose weights, gradients and moments are those of `autocast`."""
TRAINED_WHOLE = [case for case, (_, _, lora) in CASES.items() if lora.rank == 0 and case not in KEPT_ALIKE]
AGAIN = replace(Choice.AGAIN, moved=(offload.ALL,))


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


@pytest.mark.parametrize(
    ("case", "stage"),
    [
        *((case, number % 2) for number, case in enumerate(TRAINED_WHOLE)),
        ("products in fp8", 0),
        ("products in fp8, agoq, bf16", 1),
    ],
)
def test_a_stage_whose_state_is_in_host_memory_has_the_same_bits(case: str, stage: int) -> None:
    run, host = config(case), LateHostMemory()
    choices = (AGAIN, ALL, Choice.KEPT) if stage else KEPT3
    coded = run.training.compute == "fp8"
    found = steps(run, choices, host, stage=stage, states=(CODES if coded else BOTH,))
    assert same(found, steps(run, KEPT3, stage=stage))


@pytest.mark.parametrize(
    ("state", "order"),
    [
        ("weights", "two in flight"),
        ("weights", "last in, first out"),
        ("gradients", "one at a time"),
        ("gradients", "last in, first out"),
        ("some blocks", "two in flight"),
    ],
)
def test_any_order_of_microbatches(state: str, order: str) -> None:
    run, host = config("bf16 weights", family="gpt2" if state == "weights" else "llama"), LateHostMemory()
    found = steps(run, (AGAIN,) * 3, host, order=order, states=(STATES[state],))
    assert same(found, steps(run, KEPT3, order=order))


@pytest.mark.parametrize("case", ["float32", "agoq, fp8, bf16", "products in fp8"])
def test_state_moves_out_and_back_between_steps(case: str) -> None:
    run = config(case)
    states = (STAYS, BOTH, STATES["some blocks"], STATES["gradients"], STAYS, STATES["weights"], BOTH)
    if run.training.compute == "fp8":
        states = (*states, CODES, Moved(moments=1, codes=2), CODES)
    found = steps(run, KEPT3, LateHostMemory(), count=len(states), states=states)
    assert same(found, steps(run, KEPT3, count=len(states)))


FROZEN = Moved(moments=1, weights=3)


def adapted(case: str) -> RunConfig:
    if case != "mixture":
        return config(case)
    run = config("lora", family="mixture", experts=5, experts_per_token=2, qk_norm="head", ffn=32)
    return replace(run, lora=LoraSection(rank=4, base="4"))


@pytest.mark.parametrize(("case", "stage"), [("lora", 0), ("lora, 4 bits, dropout", 1), ("mixture", 1)])
def test_frozen_weights_come_from_host_memory_with_the_same_bits(case: str, stage: int) -> None:
    """They go there once, and adapters stay; some of them, all and none between steps."""
    run, host = adapted(case), LateHostMemory()
    kept_or_again = KEPT3 if run.lora.dropout else (AGAIN, ALL, Choice.KEPT)
    states = (FROZEN, FROZEN, STAYS, STATES["some blocks"]._replace(gradients=0))
    found = steps(run, kept_or_again, host, stage=stage, count=4, states=states)
    assert same(found, steps(run, KEPT3, stage=stage, count=4))


def test_frozen_weights_of_two_blocks_are_on_the_device_and_a_checkpoints_replace_them() -> None:
    run, host = adapted("mixture"), LateHostMemory()
    hidden, tokens = torch.ones(*SHAPE, HIDDEN), torch.zeros(SHAPE, dtype=torch.int64)
    generator = torch.Generator().manual_seed(3)
    units = [f"block.{number:04d}" for number in range(3, 6)]
    checkpoint = {
        unit: {
            f"{FROZEN_PREFIX}{spec.name}": 0.1 * torch.randn(spec.shape, generator=generator)
            for spec in parameter_specs(run.model, unit)
        }
        for unit in units
    }
    found: list[list[Tensor]] = []
    for state in (STAYS, FROZEN):
        model = StageModel(run, CPU, room=Forced(KEPT3, state), host=host)
        model.build(1, 2)
        for unit, weights in checkpoint.items():
            model.load_unit_state(unit, weights)
        model.begin_step()
        with torch.no_grad():
            loss = model.forward(0, 0, hidden.clone(), tokens)
        model.forward(0, 0, hidden.clone(), tokens)
        model.backward(0, 0, None)
        found.append([loss, torch.tensor(list(model.squared_norms().values()))])
    assert same(*found)
    (chunk,) = model._chunks
    each = [
        sum(
            part.kept.untyped_storage().nbytes() for part in layer.modules() if isinstance(part, FrozenWeight)
        )
        for layer in chunk.layers[:3]
    ]
    size = Share(run, Devices(), Storage()).block_weights(units[0])
    # One had gone there before the checkpoint's came.
    assert sorted(each) == [0, size, size] and host.copied_out == 4 * size


@pytest.mark.parametrize("case", ["float32", "fp8"])
def test_the_device_holds_the_state_of_two_blocks_and_of_one_that_leaves(case: str) -> None:
    run, host = config(case, layers=16), LateHostMemory()
    model = StageModel(run, CPU, room=Forced((Choice.KEPT,) * 8, Moved(1, 8, 8)), host=host)
    model.build(1, 2)
    hidden, tokens = torch.randn(*SHAPE, HIDDEN), torch.zeros(SHAPE, dtype=torch.int64)
    for _ in range(2):
        model.begin_step()
        for microbatch in range(2):
            model.forward(0, microbatch, hidden.clone(), tokens)
            model.backward(0, microbatch, None)
        model.squared_norms()
        model.apply(1e-3, 1.0)
    model.forward(0, 0, hidden.clone(), tokens)
    blocks = [list(model.optimizer.named[unit].values()) for unit in model.optimizer.units[:8]]
    matrices = [[parameter for parameter in block if parameter.ndim >= 2] for block in blocks]
    there = [all(parameter.untyped_storage().nbytes() for parameter in block) for block in matrices]
    assert sum(there) == 2
    elements = sum(parameter.numel() for parameter in matrices[0])
    of_gradients = (1 if case == "fp8" else 4) * elements
    of_moments = 3 * 2 * (1 if case == "fp8" else 4) * max(p.numel() for p in model.optimizer.parameters)
    assert host.most_on_device <= 1.1 * (2 * 4 * elements + 3 * of_gradients + of_moments)


def test_a_step_that_is_dropped_leaves_nothing_behind() -> None:
    run, host = config("fp8"), LateHostMemory()
    model = StageModel(run, CPU, room=Forced(KEPT3, BOTH), host=host)
    model.build(1, 2)
    hidden, tokens = torch.ones(*SHAPE, HIDDEN), torch.zeros(SHAPE, dtype=torch.int64)
    model.begin_step()
    model.forward(0, 0, hidden.clone(), tokens)
    model.backward(0, 0, None)
    model.forward(0, 1, hidden.clone(), tokens)

    def after_another(other: StageModel) -> list[Tensor]:
        other.begin_step()
        other.forward(0, 0, hidden.clone(), tokens)
        other.backward(0, 0, None)
        other.apply(1e-2, 1.0)
        with torch.no_grad():
            loss = other.forward(0, 0, hidden.clone(), tokens)
        return [loss, *(t for unit in other.optimizer.units for t in other.unit_state(unit).values())]

    plain = StageModel(run, CPU, room=Forced(KEPT3))
    plain.build(1, 2)
    assert same(after_another(model), after_another(plain))
    model.drop()


class Short(LateHostMemory):
    """A device that has no memory for what comes, at one of the copies."""

    def __init__(self) -> None:
        super().__init__()
        self.left = -1
        """Copies until then."""

    def copy_in(self, copies: Iterable[Copy]) -> int:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().copy_in(copies)


def test_a_step_in_which_memory_runs_short_is_repeated_with_the_same_bits() -> None:
    run = config("fp8")
    hidden, tokens = torch.ones(*SHAPE, HIDDEN), torch.zeros(SHAPE, dtype=torch.int64)
    found: list[list[Tensor]] = []
    for number in (0, 1, 2, 5, 7):  # 0 is never reached
        host = Short()
        model = StageModel(run, CPU, room=Forced(KEPT3, BOTH if number else STAYS), host=host)
        model.build(1, 2)
        host.left = number

        def passes(model: StageModel = model) -> None:
            model.begin_step()
            for microbatch in range(2):
                model.forward(0, microbatch, hidden.clone(), tokens)
                model.backward(0, microbatch, None)

        if number:
            with pytest.raises(torch.OutOfMemoryError):
                passes()
        passes()
        model.apply(1e-2, 1.0)
        found.append([t for unit in model.optimizer.units for t in model.unit_state(unit).values()])
    assert all(same(one, found[0]) for one in found[1:])


@pytest.mark.parametrize("case", ["float32", "bf16 weights", "fp8"])
def test_gradients_and_state_are_taken_and_put(case: str) -> None:
    """As gradient groups and snapshots do."""
    run = config(case)
    hidden, tokens = torch.ones(*SHAPE, HIDDEN), torch.zeros(SHAPE, dtype=torch.int64)
    models = [
        StageModel(run, CPU, room=Forced(KEPT3, state), host=LateHostMemory()) for state in (STAYS, BOTH)
    ]
    found: list[list[Tensor]] = []
    for model in models:
        model.build(1, 2)
        model.begin_step()
        values: list[Tensor] = []
        for _ in range(2):  # they begin again at 0
            model.forward(0, 0, hidden.clone(), tokens)
            model.backward(0, 0, None)
            taken = model.take_gradients(model.optimizer.units)
            for one in (gradient for named in taken.values() for gradient in named.values()):
                values += [one] if isinstance(one, Tensor) else [one.codes, one.exponents]
        for unit, named in model.optimizer.named.items():
            random = torch.Generator().manual_seed(len(unit))
            model.put_gradients(
                unit, {name: torch.randn(one.numel(), generator=random) for name, one in named.items()}
            )
        values.append(torch.tensor(list(model.squared_norms().values())))
        model.apply(1e-2, 1.0)
        found.append([value.clone() for value in values])
    assert same(found[1], found[0])
    states = [{unit: model.unit_state(unit) for unit in model.optimizer.units} for model in models]
    for model, given in zip(models, reversed(states), strict=True):
        for unit, state in given.items():
            model.load_unit_state(unit, state)
        model.begin_step()
        model.forward(0, 0, hidden.clone(), tokens)
        model.backward(0, 0, None)
        model.apply(1e-2, 1.0)
    units = models[0].optimizer.units
    one, other = ([t for unit in units for t in model.unit_state(unit).values()] for model in models)
    assert same(one, other)


def test_a_run_of_several_rows_has_the_weights_of_the_unsplit_model() -> None:
    """Groups' gradients are taken, summed and put: an exact step, and a round of two local ones. Some blocks
    move and some stay."""
    run = RunConfig(
        model=ModelSection(layers=6, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=256, sequence=16),
        training=TrainingSection(global_batch=8, microbatch=1, lr=1e-2, warmup_steps=1),
        pipeline=PipelineSection(stages=2, forward_codec="fp32", backward_codec="fp32", groups=4),
        sync=SyncSection(every=2, warmup=1, codec="fixed-4", outer_lr=0.6, outer_momentum=0.9),
    )
    wanted, sha256 = reference_run(run, 2)
    with MemoryPipeline(run, rows=[(0, 1, 2), (3,)], room=Forced(KEPT3, STATES["some blocks"])) as stages:
        assert stages.train(2) == wanted
        assert stages.weights_sha256() == sha256


def test_page_locked_pieces_hold_what_they_should_and_little_more() -> None:
    for size in (1, 1 << 20, 3 << 19, (1 << 25) - 1, 1 << 25, 117440512, 117440512 + 12345):
        pieces = pieces_of(size)
        assert sum(pieces) == size and len(pieces) <= size // (1 << 25) + 6
        assert size <= sum(map(page_locked, pieces)) <= in_pieces(size)
    assert pieces_of(0) == []


def test_blocks_that_move_are_spread_evenly() -> None:
    blocks = [f"block.{number:04d}" for number in range(8)]
    assert moved_blocks(blocks, 8) == tuple(blocks)
    assert moved_blocks(blocks, 2) == (blocks[2], blocks[6])
    assert moved_blocks(blocks, 0) == ()
    for count in range(1, 9):
        assert len(set(moved_blocks(blocks, count))) == count
