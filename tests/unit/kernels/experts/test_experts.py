"""Routing, grouping, products by expert and their sum, against one token at a time."""

import pytest
import torch
from torch import Tensor

from kernels.experts import ops
from kernels.experts.ops import Order, PackedExperts, Weights

TOKENS, EXPERTS, CHOICES, INPUTS, OUTPUTS = 23, 6, 3, 20, 14


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def routed(tokens: int = TOKENS, choices: int = CHOICES, *, without: tuple[int, ...] = (2,)) -> Order:
    """Experts `without` get no token."""
    logits = drawn(tokens, EXPERTS, seed=3)
    logits[:, list(without)] = -torch.inf
    return ops.group(ops.route(logits, choices, True)[1], EXPERTS)


def expert_of_rows(order: Order) -> list[int]:
    counts = order.offsets.diff().tolist()
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("choices", [1, 3, EXPERTS])
def test_the_largest_logits_win_and_the_lower_of_equal_ones(choices: int, normalize: bool) -> None:
    logits = drawn(TOKENS, EXPERTS).mul_(3).round_()
    logits[0] = 0.0
    logits[1] = torch.tensor([1.0, 5.0, -torch.inf, 5.0, -0.0, 0.0])
    weights, experts = ops.route(logits, choices, normalize)
    for token, row in enumerate(logits.tolist()):
        wanted = sorted(range(EXPERTS), key=lambda expert: (-row[expert], expert))[:choices]
        assert experts[token].tolist() == wanted
        probabilities = torch.tensor(row).softmax(0)[wanted]
        if normalize:
            probabilities = probabilities / probabilities.sum()
        torch.testing.assert_close(weights[token], probabilities)


@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_of_logits_is_autograds(normalize: bool) -> None:
    logits = drawn(TOKENS, EXPERTS).double().requires_grad_()
    single = logits.detach().float()
    weights, experts = ops.route(single, CHOICES, normalize)
    grad = drawn(TOKENS, CHOICES, seed=2)
    found = ops.route_backward(grad, single, weights, experts, normalize)
    probabilities = logits.softmax(1).gather(1, experts)
    if normalize:
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
    (wanted,) = torch.autograd.grad(probabilities, logits, grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_rows_lie_by_expert_and_within_one_in_the_order_of_slots() -> None:
    experts = torch.tensor([[4, 1], [1, 0], [0, 4], [4, 0]])
    order = ops.group(experts, EXPERTS)
    assert order.slots.tolist() == [3, 4, 7, 1, 2, 0, 5, 6]
    assert order.places.flatten().tolist() == [5, 3, 4, 0, 1, 6, 7, 2]
    assert order.offsets.tolist() == [0, 3, 5, 5, 5, 8, 8]
    empty = ops.group(experts[:0], EXPERTS)
    assert empty.slots.numel() == 0 and empty.offsets.tolist() == [0] * 7 and empty.choices == 2


@pytest.mark.parametrize("bits", [0, 8, 6, 5, 4, 3])
@pytest.mark.parametrize("gathers", [True, False])
def test_products_are_those_of_each_rows_expert(gathers: bool, bits: int) -> None:
    order = routed()
    dense, bias = drawn(EXPERTS, OUTPUTS, INPUTS, seed=4), drawn(EXPERTS, OUTPUTS, seed=5)
    weights: Weights = PackedExperts.of(dense, bits) if bits else dense
    if isinstance(weights, PackedExperts):
        dense = torch.stack([weights.dense(expert, torch.float32) for expert in range(EXPERTS)])
        assert weights.shape == dense.shape
    dense.requires_grad_()
    bias.requires_grad_()
    x = drawn(TOKENS if gathers else TOKENS * CHOICES, INPUTS, seed=6).requires_grad_()
    rows = x[order.slots // CHOICES] if gathers else x
    wanted = torch.stack(
        [
            row @ dense[expert].t() + bias[expert]
            for row, expert in zip(rows, expert_of_rows(order), strict=True)
        ]
    )
    torch.testing.assert_close(ops.matmul(x, weights, order, bias, gathers=gathers), wanted)
    grad = drawn(*wanted.shape, seed=7)
    # The gradient of the sorted rows: tokens' rows are summed over their choices by `combine`.
    of_x, of_bias, of_dense = torch.autograd.grad(wanted, [x, bias, dense], grad)
    of_rows = ops.input_gradient(grad, weights, order)
    torch.testing.assert_close(ops.combine(of_rows, None, order) if gathers else of_rows, of_x)
    of_weights = ops.weight_gradient(grad, x, order, torch.float32, gathers=gathers)
    torch.testing.assert_close(of_weights, of_dense)
    of_biases = ops.bias_gradient(grad, order, torch.float32)
    torch.testing.assert_close(of_biases, of_bias)
    assert not of_weights[2].any() and not of_biases[2].any()


def test_an_experts_rows_do_not_depend_on_other_tokens() -> None:
    order, weights = routed(), drawn(EXPERTS, OUTPUTS, INPUTS, seed=4)
    x = drawn(TOKENS, INPUTS, seed=6)
    first, last = order.offsets[:2].tolist()
    mine = order.slots[first:last] // CHOICES
    alone = ops.group(torch.zeros(len(mine), 1, dtype=torch.int64), EXPERTS)
    whole = ops.matmul(x, weights, order, gathers=True)[first:last]
    assert torch.equal(ops.matmul(x[mine], weights, alone), whole)


@pytest.mark.parametrize("choices", [1, 3])
def test_results_are_summed_from_the_first_choice_to_the_last(choices: int) -> None:
    order = routed(choices=choices)
    y, weights = drawn(TOKENS * choices, OUTPUTS, seed=8), drawn(TOKENS, choices, seed=9)
    found = ops.combine(y, weights, order)
    wanted = torch.zeros(TOKENS, OUTPUTS)
    for choice in range(choices):
        wanted = wanted + y[order.places[:, choice]] * weights[:, choice, None]
    assert torch.equal(found, wanted)


def test_autocast_does_not_change_the_products_dtype() -> None:
    order, weights = routed(), drawn(EXPERTS, OUTPUTS, INPUTS, seed=4)
    x = drawn(TOKENS, INPUTS, seed=6)
    wanted = ops.matmul(x, weights, order, gathers=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.matmul(x, weights, order, gathers=True), wanted)
