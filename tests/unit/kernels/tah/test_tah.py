"""The parts of TAH-Quant that have a meaning of their own."""

import math

import pytest
import torch

from kernels.tah import reference as tah


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def sylvester(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def test_rotation_is_the_papers() -> None:
    y = normal(50, 64)
    y[torch.arange(50), torch.arange(50)] = 30.0
    rotated, pivot = tah.rotate(y)
    assert pivot.tolist() == list(range(50))
    swapped = y.double()
    swapped[torch.arange(50), pivot] = y[:, 0].double()
    swapped[:, 0] = 30.0
    assert torch.allclose(rotated.double(), swapped @ sylvester(64) / 8, atol=1e-5, rtol=0)
    assert torch.allclose(tah.unrotate(rotated, pivot), y, atol=1e-5, rtol=0)


def test_rotation_flattens_a_spike() -> None:
    y = torch.zeros(1, 64)
    y[0, 40] = 8.0
    rotated, _ = tah.rotate(y)
    assert torch.equal(rotated, torch.ones(1, 64))


def test_entropy_of_known_distributions() -> None:
    rows = torch.zeros(5, 64)
    rows[0, :] = 2**13
    rows[1, :32] = 2**14
    rows[2, 7] = 9000
    rows[3, :2] = torch.tensor([12000.0, 4000.0])
    bits = (tah.entropy_bits(rows).double() / 2**20).tolist()
    quarter = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert bits[:2] == [6.0, 5.0] and bits[4] == 0.0
    # Where magnitudes are no powers of two, the logarithm is approximate and its products are rounded.
    assert bits[2] == pytest.approx(0.0, abs=1e-4)
    assert bits[3] == pytest.approx(quarter, abs=1e-4)


@pytest.mark.parametrize(
    ("largest", "second", "outlier"),
    [
        (4096.0, 2048.0, False),
        (4096.0, 2047.0, True),
        (4096.0, 4096.0, False),
        (4096.0, -2047.0, True),
        (-4096.0, 2048.0, False),
        (4096.0, 0.0, True),
    ],
)
def test_outliers_are_more_than_twice_the_second(largest: float, second: float, outlier: bool) -> None:
    y = torch.full((1, 64), 100.0 if second else 0.0)
    y[0, 20], y[0, 50] = largest, second
    found, _ = tah._outliers_and_entropy(y.clone(), y.amin(1), y.amax(1))
    assert found.tolist() == [outlier]


def test_a_tile_of_zeros_is_no_outlier() -> None:
    y = torch.zeros(1, 64)
    found, rank = tah._outliers_and_entropy(y.clone(), y.amin(1), y.amax(1))
    assert found.tolist() == [False] and rank.tolist() == [0]


@pytest.mark.parametrize("count", [0, 1, 7, 10])
def test_the_highest_are_chosen_and_ties_go_to_the_lower_index(count: int) -> None:
    rank = torch.tensor([[5, 1, 5, 0, 5, 9, 1, 1, 0, 5], [0] * 10])
    flags = tah._highest(rank, count).view(2, 10)
    for row, chosen in zip(rank.tolist(), flags.tolist(), strict=True):
        expected = sorted(range(10), key=lambda t: (-row[t], t))[:count]
        assert [t for t in range(10) if chosen[t]] == sorted(expected)
