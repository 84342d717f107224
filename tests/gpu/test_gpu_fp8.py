"""e4m3 gradients, moments and AdamW on a GPU against the reference."""

import pytest
import torch

from kernels.fp8 import ops
from kernels.fp8 import reference as fp8
from tests.support import fp8_cases as cases
from tests.support.poison import needs_kernels

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SIZES = (1, 127, 129, 5000, 1 << 20)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-5, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stochastic", [False, True])
def test_accumulation_gives_the_references_bits(
    count: int, scale: float, dtype: torch.dtype, stochastic: bool
) -> None:
    cases.check_accumulation(ops.accumulate_gradient, CUDA, count, scale, dtype, stochastic=stochastic)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stochastic", [False, True])
def test_non_finite_values_are_marked_as_by_the_reference(bad: float, stochastic: bool) -> None:
    cases.check_not_finite(ops.accumulate_gradient, CUDA, bad, stochastic=stochastic)


def test_extremes_are_rounded_as_by_the_reference() -> None:
    cases.check_extremes(ops.accumulate_gradient, CUDA)


def test_the_salt_is_read_when_the_kernel_runs() -> None:
    cases.check_replays(ops.accumulate_gradient, CUDA)


def test_a_graph_draws_by_the_salt_of_each_replay() -> None:
    needs_kernels("fp8")
    addend, microbatch = cases.values(5000, 1).to(CUDA), torch.zeros(1, dtype=torch.int64, device=CUDA)
    draw = fp8.Draw(microbatch, 0xFEDCBA98)
    found, expected = fp8.Fp8Gradient.zeros(5000, CUDA), fp8.Fp8Gradient.zeros(5000, CUDA)
    ops.accumulate_gradient(found, addend, draw)  # compiled before it is captured
    found.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.accumulate_gradient(found, addend, draw)
    seen = set()
    for salt in (3, 0x80000001, 5):
        microbatch.fill_(salt)
        graph.replay()
        ops.accumulate_gradient(expected, addend, fp8.Draw(torch.tensor([salt], device=CUDA), 0xFEDCBA98))
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.exponents, expected.exponents)
        seen.add(bytes(found.codes.cpu().numpy()))
    assert len(seen) == 3


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("many", [1, 2, 5])
def test_sums_give_the_references_bits(count: int, many: int) -> None:
    cases.check_sums(ops.sum_gradients, CUDA, count, many)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("packed", [False, True])
def test_momentum_is_the_references_but_for_logarithms(count: int, packed: bool) -> None:
    cases.check_momentum(ops.momentum_step, CUDA, count, packed=packed)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_adamw_is_the_references_but_for_logarithms(count: int, weights: torch.dtype, packed: bool) -> None:
    cases.check_adamw(ops.adamw_step, CUDA, count, weights, packed=packed)
