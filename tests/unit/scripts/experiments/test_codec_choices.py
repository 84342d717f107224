"""Ways of coding at equal bits: lengths add up, and predictions use earlier values only."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.experiments import code_lengths
from scripts.experiments import codec_choices as choices

ROOT = Path(__file__).resolve().parents[4]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_static_lengths_are_near_the_entropy_of_what_they_describe() -> None:
    index = torch.round(5 * normal(1 << 18))
    scale = torch.full_like(index, 5 * math.sqrt(2 / math.pi))
    entropy = code_lengths.histogram_bits(index) / index.numel()
    assert entropy == pytest.approx(math.log2(5 * math.sqrt(2 * math.pi * math.e)), abs=0.01)
    bits = code_lengths.static_bits(index, scale, 0.0, 0.0) / index.numel()
    assert 0 <= bits - entropy < 0.01
    # Tables of 12 bits with classes a quarter of an octave apart, and whole bits.
    table = code_lengths.table_bits(index, scale) / index.numel()
    assert 0 < table - entropy < 0.1
    rice = code_lengths.rice_bits(index, scale, False) / index.numel()
    assert 0.02 < rice - entropy < 0.5


def test_lengths_are_of_a_code_that_can_exist() -> None:
    """Kraft: shares of all indices add up to no more than one."""
    index = torch.arange(-200.0, 201.0)
    for mean in (0.4, 3.0, 11.0):
        scale = torch.full_like(index, mean)
        each = [
            code_lengths.static_bits(index[n : n + 1], scale[n : n + 1], 0.0, 0.0) for n in range(len(index))
        ]
        # Of two distributions the shorter is taken for each index here, and nothing is rarer than 2**-40.
        assert sum(2.0**-bits for bits in each) < 2
    symbol = torch.zeros(1, dtype=torch.float32)
    assert code_lengths.static_bits(symbol, torch.full((1,), 1e-6), 0.0, 0.0) < 1e-3


def test_rice_codes_of_tiles_have_the_recorded_lengths() -> None:
    index = torch.zeros(128)
    index[64:] = 3
    # k = 0 for zeros; 3 is symbol 5: 6 bits at k = 0, 4 at k = 1 and 2; two parameters, one bit each.
    assert code_lengths.rice_bits(index, torch.ones(128), True) == 64 * 1 + 64 * 4 + 2


def test_the_chosen_path_has_the_least_error() -> None:
    x = normal(3, 6, seed=2).numpy()
    step = 0.4
    found = choices.path(x, step)
    least = np.full(3, np.inf)
    reach = range(-12, 13)

    def extend(row: int, place: int, before: int, current: int, error: float) -> None:
        if error >= least[row]:
            return
        if place == x.shape[1]:
            least[row] = error
            return
        for n in reach:
            if n % 2 == current:
                more = (x[row, place] / step - n) ** 2
                extend(row, place + 1, current, (n >> 1 & 1) ^ before, error + more)

    for row in range(3):
        extend(row, 0, 0, 0, 0.0)
    errors = ((x / step - found) ** 2).sum(1)
    np.testing.assert_allclose(errors, least, rtol=1e-5)


def test_a_trellis_beats_rounding_at_equal_bits() -> None:
    x = normal(128, 128)
    plain = choices.at_rate(x, choices.PLAIN, 3.45, choices.predictor(x, None))
    trellis = choices.at_rate(x, replace(choices.PLAIN, trellis=True), 3.45, choices.predictor(x, None))
    for bits, _ in (plain, trellis):
        assert 3.43 < bits <= 3.45
    assert 0.85 < trellis[1] / plain[1] < 0.95


def test_low_rank_prediction_pays_on_low_rank_tensors() -> None:
    x = normal(256, 4) @ normal(4, 192, seed=1) + 0.1 * normal(256, 192, seed=2)
    way = replace(choices.PLAIN, low_rank=True)
    predicted = choices.predictor(x, None)
    assert (
        choices.at_rate(x, way, 4.41, predicted)[1]
        < 0.5 * choices.at_rate(x, choices.PLAIN, 4.41, predicted)[1]
    )


def test_tokens_predict_from_rows_before_alone() -> None:
    ids = torch.tensor([5, 9, 5, 5, 7])
    x = normal(5, 8)
    prediction, bits, share = choices.token_prediction(x, ids, False)
    assert share == 2 / 5 and bits == 32
    assert (prediction[[0, 1, 4]] == 0).all()
    other = x.clone()
    other[3:] = 7
    again, _, _ = choices.token_prediction(other, ids, False)
    # The gain alone knows of later rows; it is sent.
    direction = torch.nn.functional.cosine_similarity(prediction[2], again[2], dim=0)
    assert abs(direction) == pytest.approx(1)
    every, _, all_share = choices.token_prediction(x, ids, True)
    assert all_share == 3 / 5 and (every[0] != 0).any()
