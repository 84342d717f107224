"""The kernels of mixtures of experts under Triton's interpreter, on a CPU, against the plain reference."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.experts import reference
from kernels.experts.reference import Order, PackedExperts, Weights
from tests.support.interpreter import inside
from tests.support.poison import poisoned_memory

pytestmark = [
    *inside,
    # Logits that are not finite, and packed rows beyond the last, overflow in numpy, as on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
EXPERTS = 5


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found: Tensor, wanted: Tensor) -> bool:
    """To the rounding of sums in float32, and once to the dtype."""
    error = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[wanted.dtype]
    distance = (found.double() - wanted.double()).norm()
    same = found.shape == wanted.shape and found.dtype == wanted.dtype
    return same and bool(distance <= error * wanted.double().norm())


def order_of(tokens: int, choices: int, *, used: int = EXPERTS) -> Order:
    """The other experts get no token; the first gets most."""
    logits = drawn(tokens, used, seed=3)
    logits[:, 0] += 1.0
    return reference.group(reference.route(logits, choices, True)[1], EXPERTS)


CASES = [(1, 1, 1), (20, 2, 4), (35, 3, EXPERTS), (3, EXPERTS, EXPERTS)]
"""Tokens, choices, and experts that get tokens."""


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(1, 1, 1), (13, 6, 3), (9, 40, 8), (11, 17, 17)])
def test_routing_has_the_references_experts(tokens: int, experts: int, choices: int, normalize: bool) -> None:
    from kernels.experts import triton

    logits = drawn(tokens, experts).mul_(4).round_()
    if tokens > 4:
        logits[1] = 0.0
        logits[2] = torch.tensor([-0.0, 0.0] * experts)[:experts]
        logits[3, 1:] = -torch.inf
        logits[4] *= 1e30
    weights, chosen = triton.route(logits, choices, normalize)
    wanted, expected = reference.route(logits, choices, normalize)
    assert torch.equal(chosen, expected) and chosen.dtype == expected.dtype
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-30)
    grad = drawn(tokens, choices, seed=2)
    found = triton.route_backward(grad, logits, weights, chosen, normalize)
    torch.testing.assert_close(
        found, reference.route_backward(grad, logits, wanted, expected, normalize), rtol=1e-5, atol=1e-6
    )


def test_logits_that_are_not_finite_are_routed_to_real_experts() -> None:
    from kernels.experts import triton

    logits = drawn(4, 6)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    logits[3].view(torch.int32).fill_(-1)
    weights, chosen = triton.route(logits, 3, True)
    assert all(len({*row} & {*range(6)}) == 3 for row in chosen.tolist())
    assert chosen[2, 0] == 3 and weights[[0, 2, 3]].isnan().all()


@pytest.mark.parametrize(("tokens", "choices", "used"), [(0, 2, 2), *CASES])
def test_groups_are_the_references(tokens: int, choices: int, used: int) -> None:
    from kernels.experts import triton

    experts = drawn(tokens, used, seed=3).argsort(1)[:, :choices]
    found, wanted = triton.group(experts, EXPERTS), reference.group(experts, EXPERTS)
    for one, other in (
        (found.slots, wanted.slots),
        (found.places, wanted.places),
        (found.offsets, wanted.offsets),
    ):
        assert one.dtype == other.dtype and torch.equal(one, other)


def kinds(rows: int, columns: int, depth: int):  # type: ignore[no-untyped-def]
    """Tiles of one shape for all products."""
    from kernels.experts.triton import Tile, Tiles

    tile = Tile(rows, columns, depth, 4, 1)
    return Tiles(half=tile, packed=tile, packed_back=tile, weights=tile, wide=tile)


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "case", "dtype"),
    [
        (40, 64, 0, 2, torch.float32),
        (8, 33, 0, 1, torch.bfloat16),
        (33, 8, 0, 3, torch.float16),
        (1, 1, 0, 0, torch.float32),
        (50, 150, 4, 1, torch.bfloat16),
        (20, 130, 5, 3, torch.float16),
    ],
)
def test_products_and_their_gradients(
    outputs: int,
    inputs: int,
    bits: int,
    case: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of parts of the experts, and of rows and weights that are columns of wider ones."""
    from kernels.experts import triton

    monkeypatch.setattr(triton, "tiles", lambda device: kinds(16, 32, 32))
    tokens, choices, used = CASES[case]
    order = order_of(tokens, choices, used=used)
    dense = drawn(EXPERTS, outputs, inputs + 3, seed=4)[..., 1 : inputs + 1]
    weights: Weights = PackedExperts.of(dense, bits) if bits else dense
    bias = drawn(EXPERTS, outputs, seed=5).to(dtype)
    x = drawn(tokens, inputs + 7, seed=6).to(dtype)[:, 2 : inputs + 2]
    rows = x[order.slots // choices]
    grad = drawn(tokens * choices, outputs, seed=7).to(dtype)
    wanted = reference.matmul(x, weights, order, bias, gathers=True)
    found = triton.matmul(x, weights, order, bias, gathers=True)
    assert near(found, wanted)
    assert torch.equal(triton.matmul(rows, weights, order, bias), found)
    assert near(triton.matmul(rows, weights, order, None), reference.matmul(rows, weights, order, None))
    assert near(triton.input_gradient(grad, weights, order), reference.input_gradient(grad, weights, order))
    rank = 3
    low, up, down = (
        drawn(*shape, seed=8).to(dtype)
        for shape in ((tokens * choices, rank), (EXPERTS, outputs, rank), (EXPERTS, rank, inputs))
    )
    assert near(
        triton.matmul(x, weights, order, bias, gathers=True, adapter=(low, up)),
        reference.matmul(x, weights, order, bias, gathers=True, adapter=(low, up)),
    )
    once = drawn(tokens * choices, inputs, seed=9).to(dtype)
    onto = once.clone()
    wanted = reference.input_gradient(grad, weights, order, adapter=(low, down))
    assert near(triton.input_gradient(grad, weights, order, adapter=(low, down), onto=onto), once + wanted)
    assert near(onto, once + wanted)
    found = triton.weight_gradient(grad, x, order, torch.float32, gathers=True)
    assert near(found, reference.weight_gradient(grad.float(), x, order, torch.float32, gathers=True))
    assert torch.equal(found, triton.weight_gradient(grad, rows, order, torch.float32))
    found = triton.bias_gradient(grad, order, torch.float32)
    assert near(found, reference.bias_gradient(grad, order, torch.float32))


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3])
@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype"),
    [(12, 130, 40, torch.float32), (12, 20, 256, torch.float32), (250, 130, 40, torch.bfloat16)],
)
def test_packed_experts_are_unpacked_in_the_product_or_before_it(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it if there are many rows, here four experts at a time and then one."""
    from kernels.experts import triton, unpacking

    matrix = outputs * inputs * dtype.itemsize
    monkeypatch.setattr(unpacking, "UNPACKED_BYTES", 3 * matrix)
    assert unpacking.unpacked_at_once(EXPERTS, matrix, 2 * tokens) == (4 if tokens == 250 else 0)
    order = order_of(tokens, 2)
    weights = drawn(EXPERTS, outputs, inputs, seed=4)
    weights[0, 3] = 0.0
    weights[1, :, 5] *= 1e4
    packed = PackedExperts.of(weights, bits)
    bias = drawn(EXPERTS, outputs, seed=5).to(dtype)
    x, grad = drawn(tokens, inputs, seed=6).to(dtype), drawn(2 * tokens, outputs, seed=7).to(dtype)
    low, up, down = drawn(2 * tokens, 3), drawn(EXPERTS, outputs, 3), drawn(EXPERTS, 3, inputs)
    of_low, to_up, to_down = (part.to(dtype) for part in (low, up, down))
    assert near(
        triton.matmul(x, packed, order, bias, gathers=True, adapter=(of_low, to_up)),
        reference.matmul(x, packed, order, bias, gathers=True, adapter=(of_low, to_up)),
    )
    assert near(
        triton.input_gradient(grad, packed, order, adapter=(of_low, to_down)),
        reference.input_gradient(grad, packed, order, adapter=(of_low, to_down)),
    )


def test_a_row_has_the_same_bits_whatever_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.experts import triton

    monkeypatch.setattr(triton, "tiles", lambda device: kinds(16, 32, 32))
    weights, x = drawn(EXPERTS, 40, 64, seed=4), drawn(30, 64, seed=6)
    whole = order_of(30, 1)
    few = reference.group(torch.full((1, 1), 3), EXPERTS)
    found = triton.matmul(x, weights, whole, None, gathers=True)
    first, last = whole.offsets[3:5].tolist()
    for place in range(first, last):
        token = int(whole.slots[place])
        alone = triton.matmul(x[token : token + 1], weights, few, None, gathers=True)
        assert torch.equal(alone[0], found[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 130, 2050])
@pytest.mark.parametrize("choices", [1, 3])
def test_sums_of_results_have_the_references_bits(choices: int, columns: int, dtype: torch.dtype) -> None:
    from kernels.experts import triton

    order = order_of(7, choices)
    y = drawn(7 * choices, columns + 3, seed=8).to(dtype)[:, 1 : columns + 1]
    for own in (drawn(7, choices, seed=9), None):
        assert torch.equal(triton.combine(y, own, order), reference.combine(y, own, order))
