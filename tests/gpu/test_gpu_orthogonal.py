"""Newton-Schulz's iteration on a GPU: exact products, the same bits in any company, and Muon's steps."""

from dataclasses import replace

import pytest
import torch

from kernels.orthogonal import triton
from node.config.schema import TrainingSection
from node.model.optimizers import MuonRule
from node.training.muon import Muon
from node.training.update_rules import Step, Turn
from tests.support import orthogonal_cases as cases

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = [*cases.SHAPES, (768, 768), (768, 2048), (2048, 768), (1000, 3000)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_products_are_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    cases.check_symmetric(triton.symmetric, shape, CUDA, dtype)
    cases.check_product(triton.product, shape, CUDA, dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    cases.check_iteration(triton.orthogonal, shape, CUDA, 0.1)


@pytest.mark.parametrize("count", [1, 2, 7, 48])
def test_a_norm_has_the_same_bits_in_any_company(count: int) -> None:
    random = torch.Generator(CUDA).manual_seed(count)
    matrices = [torch.randn(768, 2048, generator=random, device=CUDA) for _ in range(count)]
    together = triton.normalized(matrices, torch.float32)
    for number, matrix in enumerate(matrices):
        assert torch.equal(triton.normalized([matrix], torch.float32)[0], together[number])


def test_steps_are_the_same_bits_together_and_apart() -> None:
    training = replace(TrainingSection(), optimizer="muon")
    step = Step(lr=1e-3, weight_decay=0.1, number=1)
    random = torch.Generator(CUDA).manual_seed(1)
    shapes = [(768, 768), (2048, 768), (768, 768), (768, 2048), (2304, 768)] * 2
    values = [[torch.randn(shape, generator=random, device=CUDA) for shape in shapes] for _ in range(3)]
    results = []
    for groups in (1, len(shapes)):
        weights, gradients, moments = ([one.clone() for one in many] for many in values)
        for rule in (MuonRule(), MuonRule(joined=3)):
            muon = Muon(rule, training)
            chosen = [n for n, shape in enumerate(shapes) if (shape[0] == 2304) == (rule.joined == 3)]
            parts = [chosen] if groups == 1 else [[n] for n in chosen]
            for part in parts:
                muon.step_together(
                    [weights[n] for n in part],
                    [gradients[n] for n in part],
                    [[moments[n]] for n in part],
                    step,
                )
        results.append([*weights, *moments])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_with_momentum_in_fp8_are_the_same_bits_together_and_apart(dtype: torch.dtype) -> None:
    training, rule = replace(TrainingSection(), optimizer="muon", moments="fp8"), MuonRule()
    random = torch.Generator(CUDA).manual_seed(2)
    shapes = [(768, 768), (2048, 768), (768, 768), (768, 2048), (2048, 768)]
    values = [[torch.randn(shape, generator=random, device=CUDA) for shape in shapes] for _ in range(2)]
    results = []
    for together in (True, False):
        weights = [weight.to(dtype, copy=True) for weight in values[0]]
        turns = []
        for number, (weight, gradient) in enumerate(zip(weights, values[1], strict=True)):
            moments = [
                torch.full(
                    (part.count(weight.numel()),), part.first, dtype=getattr(torch, part.dtype), device=CUDA
                )
                for part in rule.keys(training, "weight", is_matrix=True).values()
            ]
            how = Step(lr=1e-2, weight_decay=0.1, number=1, scale=0.5, salt=number)
            turns.append(Turn(weight, gradient.clone(), moments, how))
        muon = Muon(rule, training)
        if together:
            muon.step_each(turns)
        else:
            for turn in turns:
                muon.step(*turn)
        results.append([*weights, *(moment for turn in turns for moment in turn.moments)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert not torch.equal(results[0][0], values[0][0].to(dtype))
