"""The kernels of gradients and moments in e4m3 give the reference's bits under Triton's interpreter, on CPUs;
moments but for the last bits of logarithms."""

from functools import partial

import pytest
import torch

from tests.support import fp8_cases as cases
from tests.support.cases import each
from tests.support.interpreter import inside

pytestmark = [
    *inside,
    # What lies beyond a tensor's end overflows or has no logarithm in numpy, as on a GPU; nobody keeps it.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
SIZES = (1, 127, 129, 1000, 2048)


@each(("rows", "stochastic"), [(1, False), (8, True), (1, True)])
@each(("count", "scale"), [*zip(SIZES, (1e-40, 1e30, 1e-40, 1e30, 1e-40), strict=True), (129, 1e30)])
def test_accumulation_gives_the_references_bits(
    count: int, scale: float, rows: int, stochastic: bool
) -> None:
    from kernels.fp8 import triton as triton_fp8

    accumulate = partial(triton_fp8.accumulate_gradient, rows=rows)
    cases.check_accumulation(accumulate, CPU, count, scale, torch.float32, stochastic=stochastic)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stochastic", [False, True])
def test_non_finite_values_are_marked_as_by_the_reference(bad: float, stochastic: bool) -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_not_finite(triton_fp8.accumulate_gradient, CPU, bad, stochastic=stochastic)


def test_extremes_are_rounded_as_by_the_reference() -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_extremes(triton_fp8.accumulate_gradient, CPU)


def test_the_salt_is_read_when_the_kernel_runs() -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_replays(triton_fp8.accumulate_gradient, CPU)


@each("count", SIZES)
@each("many", [1, 2, 5])
def test_sums_give_the_references_bits(count: int, many: int) -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_sums(triton_fp8.sum_gradients, CPU, count, many)


@each("count", SIZES[1:4])
@each("packed", [False, True])
def test_momentum_is_the_references_but_for_logarithms(count: int, packed: bool) -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_momentum(triton_fp8.momentum_step, CPU, count, packed=packed)


@each("count", SIZES[1:4])
@each(("weights", "packed"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_adamw_is_the_references_but_for_logarithms(count: int, weights: torch.dtype, packed: bool) -> None:
    from kernels.fp8 import triton as triton_fp8

    cases.check_adamw(triton_fp8.adamw_step, CPU, count, weights, packed=packed)
