"""Sums in pieces on a CPU give the reference's bits, whatever the size, the values and the pieces."""

import pytest
import torch
from torch import Tensor

from kernels.fp8 import cpu, reference
from kernels.fp8.reference import (
    BLOCK,
    NON_FINITE,
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
    cpu.sum_gradients(codes, exponents, found)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.exponents, expected.exponents)
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PIECE_BLOCKS", 3)


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


def test_every_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    codes[codes == 0x7F], codes[codes == 0xFF] = 0, 0  # not a number, which nothing stores
    exponents = torch.tensor([[3, 3], [0, 0]], dtype=torch.int8)
    check(codes, exponents)
    values = codes[0].view(torch.float8_e4m3fn).float()
    into = torch.empty(256)
    cpu._decode(codes[0], torch.empty(256, dtype=torch.int16), into)
    assert torch.equal((into * 256).view(torch.int32), values.view(torch.int32))
