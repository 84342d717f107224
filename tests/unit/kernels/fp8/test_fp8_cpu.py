"""A CPU that works piece by piece gets the reference's bits, for any size of pieces and any values."""

import pytest
import torch
from torch import Tensor

from kernels.common.random_bits import random_bits
from kernels.fp8 import ops, reference
from kernels.fp8.reference import (
    BLOCK,
    NON_FINITE,
    ROUNDED_BITS,
    Draw,
    Fp8Gradient,
    blocks,
    pack_gradient,
)
from tests.support.cases import each


def packed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [k, n] and exponents [k, blocks] of each row."""
    rows = []
    for row in values:
        rows.append(Fp8Gradient.zeros(row.numel(), torch.device("cpu")))
        pack_gradient(row, rows[-1])
    return torch.stack([g.codes for g in rows]), torch.stack([g.exponents for g in rows])


def poisoned(elements: int) -> Fp8Gradient:
    return Fp8Gradient(
        torch.full((elements,), 0xA5, dtype=torch.uint8), torch.full((blocks(elements),), 9, dtype=torch.int8)
    )


def check(codes: Tensor, exponents: Tensor) -> Fp8Gradient:
    expected, found = poisoned(codes.shape[1]), poisoned(codes.shape[1])
    reference.sum_gradients(codes, exponents, expected)
    ops.sum_gradients(codes, exponents, found)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.exponents, expected.exponents)
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "PIECE", 3 * BLOCK)


@each("ranks", [1, 2, 5])
@each("elements", [1, 127, 128, 3 * BLOCK, 3 * BLOCK + 1, 10 * BLOCK, 11 * BLOCK - 5])
def test_the_bits_are_the_references(ranks: int, elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(ranks, elements, generator=generator)
    check(*packed(values * 10.0 ** torch.randint(-8, 8, (1, elements), generator=generator)))


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e-30, 1e30, 1e36, 3.4e38])
def test_they_also_hold_at_the_ends_of_the_range(scale: float) -> None:
    """Sums of 3.4e38 overflow, in some blocks and not in others."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(2, 9 * BLOCK, generator=generator) * scale
    values[1, : 4 * BLOCK] *= -1
    check(*packed(values))


@pytest.mark.parametrize("spoiled", [0, 4, 8])
def test_a_non_finite_block_does_not_affect_other_blocks(spoiled: int) -> None:
    values = torch.ones(2, 9 * BLOCK)
    values[1, spoiled * BLOCK + 7] = torch.nan
    found = check(*packed(values))
    assert (found.exponents == NON_FINITE).nonzero().flatten().tolist() == [spoiled]


@pytest.mark.parametrize("salt", [None, 7])
@each("elements", [1, 3 * BLOCK, 3 * BLOCK + 1, 10 * BLOCK - 5])
def test_additions_in_pieces_have_the_references_bits(elements: int, salt: int | None) -> None:
    values = torch.randn(2, elements, generator=torch.Generator().manual_seed(elements))
    values[1, elements // 2] = torch.inf
    found, expected = poisoned(elements), poisoned(elements)
    for gradient in found, expected:
        pack_gradient(values[0], gradient)
    draw = None if salt is None else Draw(torch.tensor([salt]), 3)
    noise = None
    if draw is not None:
        noise = random_bits(elements, draw.salt, torch.device("cpu"), bits=ROUNDED_BITS)
    pack_gradient(reference.unpack_gradient(expected) + values[1], expected, noise)
    ops.accumulate_gradient(found, values[1], draw)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.exponents, expected.exponents)
