"""Slices: where a sample is cut along the sequence, so that each slice takes equally long. Pure, torch-free.

Later tokens attend to more keys, so later slices are shorter. Where a sample is cut decides bits, so it
follows from the model's shape and the number of slices alone.
"""

from functools import lru_cache
from itertools import pairwise

from node.config.schema import ModelSection
from node.model.units import unit_cost, unit_names

GRANULE = 128
"""Cuts are at multiples of so many tokens, the tiles of kernels, where a sample has `GRANULES` a slice."""
GRANULES = 4


@lru_cache(maxsize=64)
def sample_slices(model: ModelSection, count: int) -> tuple[range, ...]:
    """The positions of each slice of a sample, first to last; together all of them, each slice with at least
    one.

    Raises ValueError for less than one slice, or more than a sample has tokens.
    """
    length = model.sequence
    if not 1 <= count <= length:
        raise ValueError(f"a sample of {length} tokens has at least 1 and at most {length} slices")
    granule = GRANULE
    while granule > 1 and granule * GRANULES * count > length:
        granule //= 2
    whole = _work(model, length)
    cuts = [0]
    for number in range(1, count):
        # Of the places that leave a granule, or what the sample has, to every other slice.
        first, last = cuts[-1] + granule, length - (count - number) * granule
        low, high = -(-first // granule), last // granule
        while low < high:
            middle = (low + high) // 2
            if _work(model, middle * granule) * count < whole * number:
                low = middle + 1
            else:
                high = middle
        before, after = (abs(_work(model, at * granule) * count - whole * number) for at in (low - 1, low))
        is_nearer = before < after and (low - 1) * granule >= first
        cuts.append((low - is_nearer) * granule)
    return tuple(range(first, end) for first, end in pairwise((*cuts, length)))


def _work(model: ModelSection, tokens: int) -> float:
    """Forward flops of the first tokens of a sample: products, and scores of the keys that each sees."""
    products, windows = _shape(model)
    pairs = sum(count * _pairs(tokens, window) for window, count in windows)
    return products * tokens + 4.0 * model.q_width * pairs


@lru_cache(maxsize=64)
def _shape(model: ModelSection) -> tuple[float, tuple[tuple[int, int], ...]]:
    """Flops of a token's products; (window, blocks that have it)."""
    attention = model.layers * 2.0 * model.q_width * model.sequence
    products = sum(unit_cost(model, unit) for unit in unit_names(model)) - attention
    windows = [model.window_of(index) for index in range(model.layers)]
    return products, tuple((window, windows.count(window)) for window in sorted(set(windows)))


def _pairs(tokens: int, window: int) -> int:
    """Keys that the first tokens see, summed over them."""
    full = min(tokens, window) if window else tokens
    return full * (full + 1) // 2 + (tokens - full) * window
