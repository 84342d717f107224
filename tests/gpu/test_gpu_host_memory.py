"""What waits in host memory on a GPU: the same bits, and less of the GPU's memory."""

import gc
from dataclasses import replace

import pytest
import torch

from kernels.common.dispatch import kind_of
from node.config.schema import ModelSection, RunConfig, TrainingSection
from node.model import offload
from node.model.chunk import build_chunk, weight_dtype
from node.model.host_memory import CudaHostMemory
from node.model.units import unit_names
from node.stage.passes import AutogradPasses
from node.stage.stage_model import StageModel
from node.training import host_moments
from node.training.optimizer import StageOptimizer
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import Choice, Room, least_stage_bytes
from node.tuning.state_moves import Moved
from tests.gpu.test_gpu_passes import GPU, assert_same, run_file, steps
from tests.support.passes import CASES, Forced

ALL = Choice.MOVED
WORKSPACE = 32 << 20
"""CUBLAS_WORKSPACE_CONFIG is `:4096:8`."""
FEED_FORWARD = Choice(moved=("ffn_input",), recomputed=("attention",))
FORMS = ((ALL, ALL), (Choice.INPUT_MOVED, ALL), (Choice.INPUT_MOVED, Choice.INPUT_MOVED))


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)


MOMENTS = Moved(moments=1)
STATES = (
    Moved(moments=1, weights=4, gradients=4),
    Moved(moments=1, weights=3),
    Moved(moments=1, gradients=3),
)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("case", [case for case, (_, _, lora) in CASES.items() if not lora.dropout])
def test_a_stage_that_moves_has_the_bits_of_one_that_keeps(case: str, stage: int) -> None:
    wanted, _ = steps(run_file(case, "llama", graphs=False), stage)
    for choices in FORMS:
        found, model = steps(run_file(case, "llama", graphs=True), stage, room=Forced(choices, MOMENTS))
        assert_same(found, wanted)
        assert all(isinstance(passes, AutogradPasses) for passes in model._passes)


def test_one_kind_may_move_and_another_be_computed_again() -> None:
    wanted, _ = steps(run_file("autocast", "llama", graphs=False), 0)
    found, _ = steps(run_file("autocast", "llama", graphs=True), 0, room=Forced((FEED_FORWARD, ALL)))
    assert_same(found, wanted)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("case", [case for case, (_, _, lora) in CASES.items() if not lora.dropout])
def test_weights_and_gradients_stream_with_the_same_bits(case: str, stage: int) -> None:
    """With adapters frozen weights do."""
    plain, graphs = (run_file(case, "llama", graphs=on) for on in (False, True))
    plain, graphs = (replace(one, model=replace(one.model, layers=8)) for one in (plain, graphs))
    wanted, _ = steps(plain, stage)
    for state, choice in zip(STATES, (Choice.INPUT_MOVED, Choice.AGAIN, Choice.KEPT), strict=True):
        if graphs.training.compute == "fp8":
            state = state._replace(codes=state.weights)
        if graphs.lora.rank:
            state = Moved(moments=1, weights=max(state.weights, state.gradients))
        found, model = steps(graphs, stage, room=Forced((choice,) * 4, state))
        assert_same(found, wanted)
        assert all(isinstance(passes, AutogradPasses) for passes in model._passes)


def test_moments_alone_move_beside_graphs() -> None:
    wanted, _ = steps(run_file("autocast", "llama", graphs=True), 0)
    found, _ = steps(run_file("autocast", "llama", graphs=True), 0, room=Forced((Choice.KEPT,) * 2, MOMENTS))
    assert_same(found, wanted)


@pytest.mark.parametrize("case", ["autocast", "fp8", "bf16 weights", "agoq, fp8, bf16"])
def test_a_step_streamed_in_pieces_has_the_same_bits(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_moments, "PIECE", 128 * 100)
    training, _, _ = CASES[case]
    model = ModelSection(layers=2, hidden=256, heads=4, kv_heads=4, ffn=640, vocab=1024, sequence=64)

    def build(host: CudaHostMemory | None) -> StageOptimizer:
        chunk = build_chunk(model, unit_names(model), 5, GPU, weight_dtype(training.weights))
        return StageOptimizer([chunk], training, 5, host=host)

    plain, moved = build(None), build(CudaHostMemory(GPU))
    for number in range(3):
        for optimizer in (plain, moved):
            random = torch.Generator(GPU).manual_seed(number)
            optimizer.zero_grad()
            for parameter in optimizer.parameters:
                value = torch.randn(parameter.shape, generator=random, device=GPU)
                optimizer.gradients.put(parameter, value)
            optimizer.apply(1e-2, 0.7)
    for unit in plain.units:
        one, other = plain.unit_state(unit), moved.unit_state(unit)
        assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_plan_for_less_memory_takes_less_and_no_more_than_it_says() -> None:
    sizes = ModelSection(layers=8, hidden=1024, heads=8, kv_heads=8, ffn=2816, vocab=1024, sequence=2048)
    training = TrainingSection(
        precision="bfloat16", microbatch=2, global_batch=4, warmup_steps=0, cuda_graphs=False
    )
    config = RunConfig(model=sizes, training=training)
    own = kind_of(GPU).own_attention
    devices = Devices(on_cpu=False, host_bytes=1 << 38, has_own_attention=own)
    whole = Room(devices=devices).plan(config, 1, 0)
    gc.collect()
    others = torch.cuda.memory_allocated()
    """What other tests left."""
    peaks, results = [], []
    least = least_stage_bytes(config, 1, devices)[0]
    for budget in (0, int(0.7 * whole.memory.total), int(0.5 * whole.memory.total), int(1.02 * least)):
        room = Room(devices=devices, memory_bytes=budget)
        plan = room.plan(config, 1, 0)
        assert plan.fits
        model = StageModel(config, GPU, room=room)
        model.build(0, 1)
        tokens = torch.arange(2 * 2048).view(2, 2048) % 1024
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model.begin_step()
            for microbatch in range(2):
                model.forward(0, microbatch, tokens.to(GPU), tokens.to(GPU))
                model.backward(0, microbatch, None)
            norms = list(model.squared_norms().values())
            model.apply(1e-3, 1.0)
        results.append(norms)
        peaks.append(torch.cuda.max_memory_allocated() - others)
        memory = plan.memory
        # The process and tensors on the way are not torch's; cuBLAS' workspaces are, of two threads.
        assert peaks[-1] <= memory.total - memory.fixed + 2 * WORKSPACE, str(plan.text())
        model.drop()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    assert plan.state.weights and plan.state.gradients
    assert all(result == results[0] for result in results)
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.5 * peaks[0]
