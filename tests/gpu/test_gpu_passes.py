"""Captured passes on a GPU give autograd's bits, every time; passes that cannot be captured use autograd."""

import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kernels.common.dispatch import withdrawn
from node.config.schema import ModelSection, PipelineSection, RunConfig, SyncSection
from node.model import storage
from node.stage.captured_passes import CapturedPasses, CudaRecorder, Work
from node.stage.stage_model import StageModel
from node.tuning.memory_plan import Choice, Room
from tests.support.passes import CASES, Forced

GPU = torch.device("cuda", 0)
SHAPE = (2, 512)
HIDDEN = 256
ORDER = ("f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3")
"""At most two microbatches are in flight, between forward and backward."""


def run_file(case: str, family: str, *, graphs: bool) -> RunConfig:
    training, stored, lora = CASES[case]
    return RunConfig(
        model=ModelSection(
            family=family,
            layers=4,
            hidden=HIDDEN,
            heads=4,
            kv_heads=4,
            ffn=640,
            vocab=1024,
            sequence=SHAPE[1],
        ),
        training=replace(training, cuda_graphs=graphs),
        storage=stored,
        lora=lora,
        pipeline=PipelineSection(stages=2),
    )


def act(model: StageModel, stage: int, step: int, action: str) -> Tensor | None:
    microbatch = int(action[1])
    generator = torch.Generator().manual_seed(step * 10 + microbatch)
    tokens = torch.randint(0, 1024, SHAPE, generator=generator).to(GPU)
    hidden = torch.randn(*SHAPE, HIDDEN, generator=generator).to(GPU)
    if action[0] == "f":
        if stage:
            return model.forward(0, microbatch, hidden, tokens)
        return model.forward(0, microbatch, tokens)
    return model.backward(0, microbatch, None if stage else hidden)


def run_step(model: StageModel, stage: int, step: int) -> list[Tensor]:
    """The step's outputs and input gradients, its squared norms, and the state after it."""
    model.begin_step()
    made = [act(model, stage, step, action) for action in ORDER]
    norms = torch.tensor(list(model.squared_norms().values()))
    model.apply(1e-2, 0.5)
    state = [tensor for unit in model.optimizer.units for tensor in model.unit_state(unit).values()]
    return [*(tensor for tensor in made if tensor is not None), norms, *state]


def steps(
    config: RunConfig, stage: int, count: int = 4, room: Room | None = None
) -> tuple[list[list[Tensor]], StageModel]:
    model = StageModel(config, GPU, room=room)
    model.build(stage, 2)
    return [run_step(model, stage, step) for step in range(count)], model


def assert_same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert len(one) == len(other)
        different = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]
        assert different == [], f"step {step}"


def captured(model: StageModel) -> CapturedPasses:
    (passes,) = model._passes
    assert isinstance(passes, CapturedPasses)
    return passes


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CASES)
def test_graphs_give_autograds_bits(case: str, family: str, stage: int) -> None:
    wanted, _ = steps(run_file(case, family, graphs=False), stage)
    again, _ = steps(run_file(case, family, graphs=False), stage)
    assert_same(again, wanted)
    found, model = steps(run_file(case, family, graphs=True), stage)
    assert_same(found, wanted)
    # What plain torch does instead of a kernel may not be captured; the bits are the same.
    assert withdrawn() or captured(model).slots == 2


@pytest.mark.parametrize("case", ["autocast", "products in fp8"])
def test_graphs_see_the_weights_of_every_local_step(case: str) -> None:
    found = []
    for graphs in (False, True):
        config = run_file(case, "llama", graphs=graphs)
        config = replace(config, sync=SyncSection(every=2, warmup=0))
        config = replace(config, pipeline=replace(config.pipeline, groups=2))
        made, model = steps(config, 1, count=3)
        local = model.local
        for step in (3, 4):
            model.begin_step()
            for group in range(2):
                local.begin_group()
                for part in range(2):
                    microbatch = 2 * group + part
                    losses = [act(model, 1, step, f"{action}{microbatch}") for action in "fb"]
                    made.append([one for one in losses if one is not None])
                    local.step(step)
                made += [list(changes.values()) for changes in local.changes().values()]
            local.end()
        found.append(made)
        assert withdrawn() or not graphs or captured(model).slots
    assert_same(found[1], found[0])


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_graphs_in_float16_give_autograds_bits(family: str, stage: int) -> None:
    plain, graphs = (run_file("autocast", family, graphs=on) for on in (False, True))
    plain, graphs = (
        replace(one, training=replace(one.training, precision="float16")) for one in (plain, graphs)
    )
    wanted, _ = steps(plain, stage)
    assert all(tensor.isfinite().all() for made in wanted for tensor in made)
    assert_same(steps(graphs, stage)[0], wanted)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("case", [case for case, (_, _, lora) in CASES.items() if not lora.dropout])
def test_blocks_that_run_again_and_a_head_in_pieces_give_the_same_bits(
    case: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "FUSED_LOGITS", 300 * 1024)  # of 1,024 tokens
    wanted, _ = steps(run_file(case, "llama", graphs=False), stage)
    for graphs in (False, True):
        for choices in ((Choice.AGAIN, Choice.KEPT), (Choice.AGAIN, Choice.AGAIN)):
            found, _ = steps(run_file(case, "llama", graphs=graphs), stage, room=Forced(choices))
            assert_same(found, wanted)


def test_feed_forwards_that_run_again_give_the_same_bits() -> None:
    wanted, _ = steps(run_file("autocast", "llama", graphs=False), 0)
    for graphs in (False, True):
        room = Forced((Choice(recomputed=("ffn_input",)), Choice.AGAIN))
        found, _ = steps(run_file("autocast", "llama", graphs=graphs), 0, room=room)
        assert_same(found, wanted)


def test_garbage_of_other_code_breaks_no_capture() -> None:
    """Freeing a graph during another capture breaks that capture; the garbage collector might do so."""
    config = run_file("autocast", "llama", graphs=True)
    _, left = steps(config, 0)
    model = StageModel(config, GPU)
    model.build(0, 2)
    run_step(model, 0, 0)
    recorder = captured(model)._recorder
    assert isinstance(recorder, CudaRecorder)
    cycle: list[object] = [left]
    cycle.append(cycle)
    gone = weakref.ref(left)
    x = torch.zeros(8, device=GPU)

    def work() -> None:
        nonlocal cycle, left
        del cycle, left
        # Enough objects to trigger Python's garbage collector.
        _ = [[] for _ in range(100_000)]
        assert gone() is not None
        x.add_(1)

    recorder.record(work, apart=True)()
    assert x.sum().item() == 8
    gc.collect()
    assert gone() is None
    run_step(model, 0, 1)
    assert captured(model).slots == 2


def waiting(block: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Reads a value from the device, which a capture does not allow."""
    return x * (1.0 if x.detach().sum().isfinite().item() else 2.0)


def test_what_cannot_be_captured_runs_through_autograd(caplog: pytest.LogCaptureFixture) -> None:
    config = run_file("autocast", "llama", graphs=True)
    wanted, _ = steps(replace(config, training=replace(config.training, cuda_graphs=False)), 0)
    model = StageModel(config, GPU)
    model.build(0, 2)
    model._chunks[0].layers[-1].register_forward_hook(waiting)
    with caplog.at_level(logging.WARNING):
        found = [run_step(model, 0, step) for step in range(4)]
    assert_same(found, wanted)
    assert captured(model).slots == 0
    assert len(caplog.records) == 1
    # Neither the device nor the allocator waits for the end of what broke.
    model.build(0, 2)
    again = [run_step(model, 0, step) for step in range(4)]
    assert_same(again, wanted)
    assert captured(model).slots == 2


def test_full_memory_ends_capturing_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    config = run_file("autocast", "llama", graphs=True)
    wanted, _ = steps(replace(config, training=replace(config.training, cuda_graphs=False)), 0)
    model = StageModel(config, GPU)
    model.build(0, 2)
    found = [run_step(model, 0, 0)]
    passes = captured(model)
    recorder = passes._recorder
    recorded = 0

    class Full:
        def record(self, work: Work, *, apart: bool) -> Work:
            nonlocal recorded
            recorded += 1
            if recorded < 4:
                return recorder.record(work, apart=apart)

            def too_much() -> None:
                work()
                torch.empty(1 << 46, dtype=torch.uint8, device=GPU)

            return recorder.record(too_much, apart=apart)

    passes._recorder = Full()
    with caplog.at_level(logging.WARNING):
        found += [run_step(model, 0, step) for step in range(1, 4)]
    assert_same(found, wanted)
    assert passes.slots == 1
    assert "out of memory" in caplog.records[0].getMessage()
