"""e4m3 gradients and moments: plain arithmetic over odd sizes, extreme values and poisoned buffers."""

import math

import pytest
import torch

from kernels.common.random_bits import random_bits
from kernels.fp8.ops import accumulate_gradient, adamw_step
from kernels.fp8.reference import (
    BLOCK,
    NON_FINITE,
    AdamWStep,
    Fp8Gradient,
    Moment,
    blocks,
    pack_gradient,
    pack_moment,
    round_stochastically,
    unpack_gradient,
    unpack_moment,
)
from tests.support.cases import each

CPU = torch.device("cpu")
SIZES = (1, 127, 128, 129, 1000)


def normal(count: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def poisoned_gradient(count: int) -> Fp8Gradient:
    return Fp8Gradient(
        torch.full((count,), 0x55, dtype=torch.uint8), torch.full((blocks(count),), 3, dtype=torch.int8)
    )


def poisoned_moment(count: int) -> Moment:
    return Moment(
        torch.full((count,), 0x55, dtype=torch.uint8),
        torch.full((blocks(count),), 3.0, dtype=torch.bfloat16),
        torch.full((blocks(count),), 99, dtype=torch.uint8),
    )


def nearest_e4m3(value: float) -> float:
    """By search over all finite codes, ties to the even code."""
    table = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    distance = (table - abs(value)).abs()
    best = distance.min()
    codes = [int(code) for code in torch.nonzero(distance == best).flatten()]
    return math.copysign(float(table[min(codes, key=lambda code: code % 2)]), value)


@each("count", SIZES)
@each("scale", [1e-34, 1e-5, 1.0, 1e30])
def test_every_element_is_the_nearest_code_of_its_block(count: int, scale: float) -> None:
    values = normal(count, scale)
    gradient = poisoned_gradient(count)
    pack_gradient(values, gradient)
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK].double()
        power = 2.0 ** float(gradient.exponents[start // BLOCK])
        assert 224 <= float(block.abs().max()) / power <= 448
        expected = [nearest_e4m3(value / power) * power for value in block[:20].tolist()]
        found = unpack_gradient(gradient)[start : start + BLOCK][:20].double()
        assert torch.equal(found, torch.tensor(expected, dtype=torch.float64))


def test_a_value_that_nothing_is_added_to_keeps_its_code() -> None:
    gradient = poisoned_gradient(300)
    pack_gradient(normal(300), gradient)
    codes = gradient.codes.clone()
    for _ in range(5):
        accumulate_gradient(gradient, torch.zeros(300))
    assert torch.equal(gradient.codes, codes)


def test_accumulation_is_addition_then_packing() -> None:
    gradient = Fp8Gradient.zeros(300, CPU)
    assert torch.equal(unpack_gradient(gradient), torch.zeros(300))
    for seed in range(4):
        whole = unpack_gradient(gradient) + normal(300, seed=seed).bfloat16().float()
        accumulate_gradient(gradient, normal(300, seed=seed).bfloat16())
        expected = poisoned_gradient(300)
        pack_gradient(whole, expected)
        assert torch.equal(gradient.codes, expected.codes)
        assert torch.equal(gradient.exponents, expected.exponents)


def test_the_error_of_sixteen_additions_is_that_of_e4m3() -> None:
    gradient = Fp8Gradient.zeros(1 << 16, CPU)
    total = torch.zeros(1 << 16, dtype=torch.float64)
    for seed in range(16):
        addend = normal(1 << 16, 1e-4, seed)
        accumulate_gradient(gradient, addend)
        total += addend
    error = (unpack_gradient(gradient) - total).norm() / total.norm()
    assert 0.05 < error < 0.085


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_in_their_block(bad: float) -> None:
    gradient = poisoned_gradient(300)
    values = normal(300)
    values[130] = bad
    pack_gradient(values, gradient)
    assert gradient.exponents.tolist()[1] == NON_FINITE
    for _ in range(2):
        found = unpack_gradient(gradient)
        assert bool(found[128:256].isnan().all())
        assert bool(found[:128].isfinite().all() and found[256:].isfinite().all())
        accumulate_gradient(gradient, torch.zeros(300))


@each("count", SIZES)
@each("scale", [1e-30, 1e-9, 1.0, 1e30])
def test_moments_come_back_within_three_percent(count: int, scale: float) -> None:
    values = normal(count, scale)
    moment = poisoned_moment(count)
    pack_moment(values, moment)
    found = unpack_moment(moment)
    assert (found - values).norm() <= 0.03 * values.norm()
    assert torch.equal(found.sign(), values.sign())


def test_moments_of_small_range_are_expanded() -> None:
    """COAT's table 1 and the study's: expansion more than halves the error of second moments."""
    values = (normal(1 << 14).square() + 1) * 1e-10
    moment = poisoned_moment(1 << 14)
    pack_moment(values, moment)
    expanded = (unpack_moment(moment) - values).norm() / values.norm()
    rows = values.view(-1, BLOCK)
    scale = rows.amax(dim=1, keepdim=True) / 448
    plain = ((rows / scale).to(torch.float8_e4m3fn).float() * scale).flatten()
    assert expanded < 0.5 * (plain - values).norm() / values.norm()
    assert float(moment.powers.float().mean()) / 16 > 2


@pytest.mark.parametrize("value", [0.0, 1e-3, -7.0, 3e38])
def test_a_block_of_equal_values_comes_back(value: float) -> None:
    moment = poisoned_moment(256)
    pack_moment(torch.full((256,), value), moment)
    assert torch.allclose(unpack_moment(moment), torch.full((256,), value), rtol=2**-8, atol=0)


def test_a_block_that_spans_more_than_e4m3_keeps_its_order() -> None:
    values = torch.logspace(-37, 37, BLOCK)
    moment = poisoned_moment(BLOCK)
    pack_moment(values, moment)
    found = unpack_moment(moment)
    assert bool((found > 0).all()) and bool((found.diff() >= 0).all())


def test_state_takes_two_bytes_and_a_twentieth_a_parameter() -> None:
    pair = [Moment.zeros(1 << 20, CPU) for _ in range(2)]
    assert sum(moment.nbytes for moment in pair) / (1 << 20) <= 2.1
    assert Fp8Gradient.zeros(1 << 20, CPU).nbytes / (1 << 20) <= 1.01


def one_step(**changes: float | int) -> AdamWStep:
    values: dict[str, float | int] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 1,
        "clip_coefficient": 0.7,
        "salt": 0xDEADBEEF,
    }
    return AdamWStep(**{**values, **changes})  # type: ignore[arg-type]  # step and salt are ints above


def test_the_first_step_is_adamw_itself() -> None:
    """Moments start at zero, which packs exactly; errors come in with the second step."""
    weight, gradient = normal(1000), normal(1000, 1e-3, seed=1)
    expected = torch.nn.Parameter(weight.clone())
    expected.grad = 0.7 * gradient
    torch.optim.AdamW([expected], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    adamw_step(weight, gradient, Moment.zeros(1000, CPU), Moment.zeros(1000, CPU), one_step())
    assert torch.allclose(weight, expected.detach(), rtol=1e-6, atol=1e-7)


def test_twenty_steps_stay_close_to_adamw() -> None:
    weight = normal(4096)
    expected = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([expected], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    mean, square = Moment.zeros(4096, CPU), Moment.zeros(4096, CPU)
    start = weight.clone()
    for step in range(1, 21):
        gradient = normal(4096, 1e-3, seed=step) + 5e-4
        expected.grad = gradient.clone()
        optimizer.step()
        adamw_step(weight, gradient, mean, square, one_step(step=step, clip_coefficient=1.0))
    moved = (expected.detach() - start).norm()
    assert (weight - expected.detach()).norm() < 0.03 * moved


def test_packed_gradients_do_as_their_values() -> None:
    gradient = poisoned_gradient(1000)
    pack_gradient(normal(1000, 1e-3), gradient)
    results = []
    for given in (gradient, unpack_gradient(gradient)):
        weight = normal(1000, seed=5)
        adamw_step(weight, given, Moment.zeros(1000, CPU), Moment.zeros(1000, CPU), one_step())
        results.append(weight)
    assert torch.equal(*results)


def test_stochastic_rounding_is_right_on_average_and_a_function_of_its_salt() -> None:
    value = torch.full((1 << 16,), 1 + 3 / 1024)  # 3/8 of the way from 1 to the next bf16
    rounded = round_stochastically(value, 7)
    assert set(rounded.float().tolist()) == {1.0, 1 + 1 / 128}
    assert abs(float(rounded.float().mean()) - float(value[0])) < 4 * 0.5 / 128 / 256
    assert torch.equal(rounded, round_stochastically(value, 7))
    assert not torch.equal(rounded, round_stochastically(value, 8))


def test_stochastic_rounding_keeps_what_bf16_holds_and_what_is_not_finite() -> None:
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, 2.0**-133])
    rounded = round_stochastically(exact, 3)
    assert torch.equal(rounded.view(torch.int16), exact.bfloat16().view(torch.int16))
    assert bool(round_stochastically(torch.tensor([torch.nan]), 3).isnan())


def test_random_bits_are_spread() -> None:
    bits = random_bits(1 << 16, 1, CPU)
    assert int(bits.min()) >= 0 and int(bits.max()) < 1 << 16
    assert abs(float(bits.double().mean()) - 32767.5) < 4 * 65536 / math.sqrt(12) / 256
    # Neighbours are unlike: no correlation beyond chance.
    centred = bits.double() - bits.double().mean()
    assert abs(float((centred[1:] * centred[:-1]).mean() / centred.square().mean())) < 4 / 256
