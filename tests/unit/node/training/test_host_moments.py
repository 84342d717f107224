"""A step whose moments come from host memory has the bits of one whose moments are on the device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection, TrainingSection
from node.model.chunk import build_chunk, weight_dtype
from node.model.units import unit_names
from node.training import host_moments
from node.training.optimizer import StageOptimizer
from tests.support.host_memory import LateHostMemory

CPU = torch.device("cpu")
MODEL = ModelSection(layers=2, hidden=48, heads=2, kv_heads=2, ffn=80, vocab=101, sequence=8, tied=True)
PLAIN = TrainingSection(lr=1e-2)
TRAININGS = {
    "float32": PLAIN,
    "fp8 moments": replace(PLAIN, moments="fp8"),
    "fp8 gradients": replace(PLAIN, gradients="fp8"),
    "all in fp8": replace(PLAIN, gradients="fp8", moments="fp8"),
    "bf16 moments": replace(PLAIN, moments="bfloat16"),
    "muon": replace(PLAIN, optimizer="muon"),
    "muon, bf16 moments": replace(PLAIN, optimizer="muon", moments="bfloat16", gradients="fp8"),
    "muon, all in fp8": replace(PLAIN, optimizer="muon", gradients="fp8", moments="fp8", weights="bfloat16"),
    "bf16 weights": replace(PLAIN, gradients="fp8", moments="fp8", weights="bfloat16"),
}


@pytest.fixture(autouse=True)
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_moments, "PIECE", 1280)  # of matrices of up to 4,848


def build(training: TrainingSection, host: LateHostMemory | None = None) -> StageOptimizer:
    chunk = build_chunk(MODEL, unit_names(MODEL), 5, CPU, weight_dtype(training.weights))
    return StageOptimizer([chunk], training, 5, host=host)


def step(optimizer: StageOptimizer, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    for parameter in optimizer.parameters:
        optimizer.gradients.put(parameter, torch.randn(parameter.shape, generator=random))
    optimizer.squared_norms()
    optimizer.apply(1e-2 / (number + 1), 0.7)


def states(optimizer: StageOptimizer) -> dict[str, Tensor]:
    return {
        f"{unit}/{name}": tensor
        for unit in optimizer.units
        for name, tensor in optimizer.unit_state(unit).items()
    }


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", TRAININGS)
def test_a_streamed_step_has_the_same_bits(case: str) -> None:
    plain, host = build(TRAININGS[case]), LateHostMemory()
    moved = build(TRAININGS[case], host)
    for number in range(4):
        step(plain, number)
        step(moved, number)
    assert same(states(moved), states(plain))
    assert moved.moment_bytes < plain.moment_bytes
    # Three pieces at a time, of two moments; or of one, of whole matrices.
    element = {"fp8": 1.1, "bfloat16": 2 if "muon" in case else 3}.get(TRAININGS[case].moments, 4)
    piece = 80 * 48 if TRAININGS[case].optimizer == "muon" else 2 * 1280
    assert 0 < host.most_on_device <= 3 * piece * element
    assert host.copied_in == host.copied_out


@pytest.mark.parametrize("case", TRAININGS)
def test_moments_that_move_out_and_back_between_steps_have_the_same_bits(case: str) -> None:
    plain, other, host = build(TRAININGS[case]), build(TRAININGS[case]), LateHostMemory()
    for number, place in enumerate((None, host, host, None, None)):
        other.move_moments(place)
        assert (other.moment_bytes < plain.moment_bytes) == (place is not None)
        step(plain, number)
        step(other, number)
    assert same(states(other), states(plain))


@pytest.mark.parametrize("case", ["float32", "fp8 moments", "muon, bf16 moments", "bf16 weights"])
def test_snapshots_of_either_resume_the_other(case: str) -> None:
    kinds = {"plain": None, "moved": LateHostMemory()}
    wanted = build(TRAININGS[case])
    for number in range(4):
        step(wanted, number)
    for host in kinds.values():
        first = build(TRAININGS[case], host)
        step(first, 0), step(first, 1)
        saved = {unit: first.unit_state(unit) for unit in first.units}
        step(first, 2)  # what was saved is a copy
        for other in (None, LateHostMemory()):
            second = build(TRAININGS[case], other)
            for unit, state in saved.items():
                second.load_unit_state(unit, state)
            step(second, 2), step(second, 3)
            assert same(states(second), states(wanted))
