"""Products of whole numbers on tensor cores are exact up to their bounds."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.common.triton.numbers import product, small_product

ROWS, DEPTH, COLUMNS = 16, 64, 32


@triton.jit
def _multiply(a, b, out, SMALL: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    row, inner, column = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    left = tl.load(a + row[:, None] * DEPTH + inner[None, :])
    right = tl.load(b + inner[:, None] * COLUMNS + column[None, :])
    found = small_product(left, right) if SMALL else product(left, right)
    tl.store(out + row[:, None] * COLUMNS + column[None, :], found)


def multiplied(a: torch.Tensor, b: torch.Tensor, *, small: bool) -> torch.Tensor:
    out = torch.full((ROWS, COLUMNS), torch.nan, device="cuda")
    _multiply[(1,)](
        a.float().cuda(), b.float().cuda(), out, SMALL=small, ROWS=ROWS, DEPTH=DEPTH, COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out.cpu().long()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("most_a", "most_b"), [(255, 63), (63, 255), (256, 256), (1, 1)])
def test_small_numbers(most_a: int, most_b: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-most_a, most_a + 1, (ROWS, DEPTH), generator=generator)
    b = torch.randint(-most_b, most_b + 1, (DEPTH, COLUMNS), generator=generator)
    assert torch.equal(multiplied(a, b, small=True), a @ b)
    # All of one sign, at the bound.
    a, b = torch.full_like(a, most_a), torch.full_like(b, -most_b)
    assert torch.equal(multiplied(a, b, small=True), a @ b)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("most_a", "most_b"), [(31 * 255, 31), (1 << 15, 3), (63 * 65, 63), (127, 127)])
def test_large_numbers_times_small_ones(most_a: int, most_b: int, seed: int) -> None:
    """Sums up to 2**24 - 1, among them those just below it."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-most_a, most_a + 1, (ROWS, DEPTH), generator=generator)
    b = torch.randint(-most_b, most_b + 1, (DEPTH, COLUMNS), generator=generator)
    assert (a.abs() @ b.abs()).max() < 1 << 24
    assert torch.equal(multiplied(a, b, small=False), a @ b)
    for sign in (1, -1):
        a, b = torch.full_like(a, sign * most_a), torch.full_like(b, most_b)
        # One short of 2**24 where the bound allows it.
        most = ((1 << 24) - 1) // (most_a * most_b)
        a[:, most:] = 0
        assert torch.equal(multiplied(a, b, small=False), a @ b)
