"""Mixtures of experts on a GPU: near the exact results, the same bits always and in graphs, no waiting."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.experts import ops, reference, triton
from kernels.experts.ops import Order, PackedExperts, Weights
from node.config.schema import LoraSection, ModelSection
from node.model import routed_half
from node.model.chunk import build_chunk, compute_precision
from node.model.storage import Storage
from tests.support.poison import needs_kernels

EXPERTS, CHOICES = 12, 3
GPU = torch.device("cuda", 0)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device=GPU)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def routed(tokens: int, *, used: int = EXPERTS) -> Order:
    """The last experts get no token, the first one many."""
    logits = drawn(tokens, EXPERTS, seed=3)
    logits[:, 0] += 2.0
    logits[:, used:] = -torch.inf
    return ops.group(ops.route(logits, CHOICES, True)[1], EXPERTS)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 8, 2), (1000, 128, 8), (77, 33, 33)])
def test_routes_and_groups_are_the_references(
    tokens: int, experts: int, choices: int, normalize: bool
) -> None:
    logits = drawn(tokens, experts).mul_(4).round_()
    weights, chosen = triton.route(logits, choices, normalize)
    wanted, expected = reference.route(logits.cpu(), choices, normalize)
    assert torch.equal(chosen.cpu(), expected)
    assert distance(weights.cpu(), wanted) < 1e-6
    grad = drawn(tokens, choices, seed=2)
    of_logits = triton.route_backward(grad, logits, weights, chosen, normalize)
    exact = reference.route_backward(grad.cpu(), logits.cpu(), wanted, expected, normalize)
    torch.testing.assert_close(of_logits.cpu(), exact, rtol=1e-5, atol=1e-6)
    found, order = ops.group(chosen, experts), reference.group(expected, experts)
    assert torch.equal(found.slots.cpu(), order.slots) and torch.equal(found.places.cpu(), order.places)
    assert torch.equal(found.offsets.cpu(), order.offsets)


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "dtype"),
    [
        *((384, 256, bits, torch.bfloat16) for bits in (0, 8, 6, 5, 4, 3)),
        *((200, 333, bits, dtype) for bits in (0, 4) for dtype in (torch.float16, torch.float32)),
        (8, 256, 0, torch.bfloat16),
        (256, 8, 0, torch.bfloat16),
    ],
)
def test_products_are_exact_to_rounding_and_repeat_their_bits(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype
) -> None:
    order = routed(700, used=EXPERTS - 2)
    dense, bias = drawn(EXPERTS, outputs, inputs, seed=4), drawn(EXPERTS, outputs, seed=5).to(dtype)
    weights: Weights = PackedExperts.of(dense, bits) if bits else dense.to(dtype)
    x, grad = drawn(700, inputs, seed=6).to(dtype), drawn(700 * CHOICES, outputs, seed=7).to(dtype)
    exact = dense.to(dtype)
    if isinstance(weights, PackedExperts):
        exact = torch.stack([weights.dense(expert, dtype) for expert in range(EXPERTS)])
    exact, wide = exact.double(), partial(torch.Tensor.to, dtype=torch.float64)
    works: list[tuple[Callable[[], Tensor], Tensor]] = [
        (
            lambda: triton.matmul(x, weights, order, bias, gathers=True),
            reference.matmul(wide(x), exact, order, bias, gathers=True),
        ),
        (
            lambda: triton.input_gradient(grad, weights, order),
            reference.input_gradient(wide(grad), exact, order),
        ),
    ]
    if not bits:
        works.append(
            (
                lambda: triton.weight_gradient(grad, x, order, torch.float32, gathers=True),
                reference.weight_gradient(wide(grad), wide(x), order, torch.float64, gathers=True),
            )
        )
        works.append(
            (
                lambda: triton.bias_gradient(grad, order, torch.float32),
                reference.bias_gradient(wide(grad), order, torch.float64),
            )
        )
    allowed = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 3e-6}[dtype]
    for work, wanted in works:
        first = work()
        assert distance(first, wanted) < allowed
        assert all(torch.equal(work(), first) for _ in range(3))


@pytest.mark.parametrize("bits", [0, 4])
def test_a_row_has_the_same_bits_whatever_the_others_are(bits: int) -> None:
    dense = drawn(EXPERTS, 384, 256, seed=4).bfloat16()
    weights: Weights = PackedExperts.of(dense, bits) if bits else dense
    x, whole = drawn(700, 256, seed=6).bfloat16(), routed(700)
    found = triton.matmul(x, weights, whole, None, gathers=True)
    first, last = whole.offsets[3:5].tolist()
    mine = whole.slots[first:last].long() // CHOICES
    for rows in (mine, mine[:1], mine[:5]):
        alone = ops.group(torch.full((len(rows), 1), 3, device=GPU), EXPERTS)
        made = triton.matmul(x[rows], weights, alone, None, gathers=True)
        assert torch.equal(made, found[first : first + len(rows)])


def test_sums_of_results_have_the_references_bits() -> None:
    order = routed(500)
    y, weights = drawn(500 * CHOICES, 1000, seed=8).bfloat16(), drawn(500, CHOICES, seed=9)
    here = Order(slots=order.slots.cpu(), places=order.places.cpu(), offsets=order.offsets.cpu())
    assert torch.equal(
        triton.combine(y, weights, order).cpu(), reference.combine(y.cpu(), weights.cpu(), here)
    )


@pytest.mark.parametrize("bits", [0, 4])
def test_a_routed_feed_forward_runs_in_a_graph_with_the_same_bits(bits: int) -> None:
    """It never waits for the device, and other tokens may take other experts at every replay."""
    needs_kernels("experts")
    dense = drawn(EXPERTS, 512, 256, seed=4).bfloat16()
    into: Weights = PackedExperts.of(dense, bits) if bits else dense
    down = drawn(EXPERTS, 256, 256, seed=5).bfloat16()
    x, logits = drawn(300, 256, seed=6).bfloat16(), drawn(300, EXPERTS, seed=7)
    grad, of_weights = drawn(300 * CHOICES, 256, seed=8).bfloat16(), drawn(300, CHOICES, seed=9)

    def work() -> list[Tensor]:
        weights, chosen = ops.route(logits, CHOICES, False)
        order = ops.group(chosen, EXPERTS)
        gate, up = ops.matmul(x, into, order, gathers=True).chunk(2, dim=1)
        inner = torch.sigmoid(gate) * up
        of_inner = ops.input_gradient(grad, down, order)
        return [
            ops.combine(ops.matmul(inner, down, order), weights, order),
            ops.combine(of_inner, None, order),
            ops.input_gradient(torch.cat((of_inner, of_inner), 1), into, order),
            ops.weight_gradient(grad, inner, order, down.dtype),
            ops.bias_gradient(grad, order, down.dtype),
            ops.route_backward(of_weights, logits, weights, chosen, False),
        ]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    for seed in (11, 12):
        logits.copy_(drawn(300, EXPERTS, seed=seed))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wanted = work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_frozen_mixture_is_packed_one_expert_at_a_time() -> None:
    """A block of gpt-oss-20b is 3.2 GB in float32 and 0.5 GB in 4 bits, on a card of 8 GB."""
    model = ModelSection(
        family="mixture",
        layers=2,
        hidden=512,
        heads=8,
        ffn=1024,
        experts=16,
        experts_per_token=2,
        vocab=50_000,
    )
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    chunk = build_chunk(
        model, ("embed", "block.0000", "block.0001", "head"), 0, GPU, lora=LoraSection(rank=4, base="4")
    )
    kept = torch.cuda.memory_allocated(GPU) - before
    packed, four_experts = chunk.layers[1].get_buffer("gate.weight.kept").nbytes, 4 * 1024 * 512 * 4
    assert torch.cuda.max_memory_allocated(GPU) - before < kept + packed + four_experts


def test_clamped_activations_need_no_more_memory_at_work_than_others() -> None:
    """They are computed in float32; twelve copies of all rows were 2.2 GB of a card of 8 GB."""
    model = ModelSection(
        family="mixture",
        layers=1,
        hidden=256,
        heads=8,
        ffn=2048,
        experts=8,
        experts_per_token=4,
        vocab=256,
        sequence=2048,
    )
    ids = torch.zeros(2, 2048, dtype=torch.long, device=GPU)
    rises = []
    for limit in (0.0, 7.0):
        chunk = build_chunk(
            replace(model, swiglu_limit=limit),
            ("embed", "block.0000", "head"),
            0,
            GPU,
            storage=Storage(ffn_input="4"),
        )
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(GPU)
            before = torch.cuda.memory_allocated(GPU)
            with compute_precision("bfloat16", GPU):
                chunk.loss(ids, ids).backward()
            rise = torch.cuda.max_memory_allocated(GPU) - before
            chunk.zero_grad(set_to_none=True)
        rises.append(rise)
    copies = 12 * 4 * routed_half.ELEMENTS_AT_ONCE
    assert rises[1] < rises[0] + copies
