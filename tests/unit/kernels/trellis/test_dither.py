"""Dither: the loops give the reference's bits, and what is decoded has the tensor as its mean."""

import pytest
import torch

from kernels.common.random_bits import mixed, random_bits
from kernels.trellis.loops import dither
from wire.codecs.registry import codec
from wire.spec import TensorSpec

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dithers(count: int, salt: int) -> torch.Tensor:
    """The dither of each element in steps, in plain torch."""
    return random_bits(count, salt, CPU).float().mul_(2.0).add_(1.0).mul_(2.0**-16).sub_(1.0)


def test_dithers_are_even_over_two_steps_and_follow_from_the_salt() -> None:
    made = dithers(1 << 16, 5)
    assert made.abs().max() < 1 and abs(made.mean()) < 0.01 and abs(made.var() - 1 / 3) < 0.005
    assert torch.equal(made, dithers(1 << 16, 5))
    other = dithers(1 << 16, 6)
    assert abs((made * other).mean()) < 0.01


@pytest.mark.parametrize("count", [1, 70_001, (1 << 20) + 3])
def test_loops_give_the_references_bits(count: int) -> None:
    x, gain, salt = normal(count) * 3, 37.7, 2**32 - 9
    by, of = torch.tensor(gain), dithers(count, salt)
    assert torch.equal(dither.added(x, gain, salt), (x * by).add_(of * 64))
    assert torch.equal(dither.subtract(x.clone(), gain, salt), x - of * by)


@pytest.mark.parametrize("rate", [2.0, 3.0])
def test_small_elements_are_not_lost(rate: float) -> None:
    """Some rows lie far below the one step. Over many salts
    `trellis` keeps its error, and the small rows with it; that of `dither` averages out, as noise does."""
    x = normal(32, 128) * 1e-5
    x[:8] /= 32
    small, spec, times = slice(0, 8), TensorSpec(x.dtype, tuple(x.shape)), 32

    def mean(name: str) -> tuple[torch.Tensor, float]:
        total, error = torch.zeros_like(x, dtype=torch.float64), 0.0
        for salt in range(times):
            which = codec(name).salted(mixed(salt + 1))
            found = which.decode(which.encode(x), spec).double()
            total += found / times
            error += float((found - x).norm() ** 2) / times
        return total, error**0.5

    def share(found: torch.Tensor) -> float:
        """How much of the small rows is left."""
        return float((found[small] * x[small]).sum() / (x[small].double() ** 2).sum())

    biased, error = mean(f"trellis-{rate:g}")
    unbiased, noise = mean(f"dither-{rate:g}")
    assert float((biased - x).norm()) > 0.99 * error
    assert float((unbiased - x).norm()) < 1.3 * noise / times**0.5
    # Few bits more noise than the biased code's error.
    assert noise < 1.4 * error
    assert share(biased) < 0.3 and abs(share(unbiased) - 1) < 0.25


def test_the_two_ends_need_the_same_salt() -> None:
    x = normal(64, 128)
    spec, one = TensorSpec(x.dtype, tuple(x.shape)), codec("dither-4")
    packed = one.salted(3).encode(x)
    right, wrong = one.salted(3).decode(packed, spec), one.salted(4).decode(packed, spec)
    assert (right - x).norm() < 0.1 * x.norm() < (wrong - x).norm() * 2
    assert torch.equal(one.encode(x), one.salted(0).encode(x))
    assert codec("trellis-4").salted(7) is codec("trellis-4")
