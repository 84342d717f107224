"""Cuts samples along the sequence into slices that take the same time. All functions are pure and need no
torch.

Later tokens attend to more keys, so later slices are shorter. The cuts determine bits, so they depend only on
the model's shape and the number of slices.
"""

from functools import lru_cache
from itertools import pairwise

from node.config.schema import ModelSection
from node.model.units import unit_cost, unit_names

GRANULE = 128
"""Cuts are at multiples of this many tokens, the tile size of kernels, if a sample has `GRANULES` times as
many for each slice. In shorter samples the multiple is smaller."""
GRANULES = 4


@lru_cache(maxsize=64)
def sample_slices(model: ModelSection, count: int) -> tuple[range, ...]:
    """The positions of each slice of a sample, first to last. Together they cover the sample, and none is
    empty.

    Raises:
        ValueError: `count` is below 1 or above the number of tokens in a sample.
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
        # Only cuts that leave at least one granule for every other slice.
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
    """Forward flops of a sample's first tokens: products, and the scores of the keys that each token sees."""
    products, windows = _shape(model)
    pairs = sum(count * _pairs(tokens, window) for window, count in windows)
    return products * tokens + 4.0 * model.q_width * pairs


@lru_cache(maxsize=64)
def _shape(model: ModelSection) -> tuple[float, tuple[tuple[int, int], ...]]:
    """The flops of a token's products, and pairs of an attention window and the number of blocks that have
    it."""
    attention = model.layers * 2.0 * model.q_width * model.sequence
    products = sum(unit_cost(model, unit) for unit in unit_names(model)) - attention
    windows = [model.window_of(index) for index in range(model.layers)]
    return products, tuple((window, windows.count(window)) for window in sorted(set(windows)))


def _pairs(tokens: int, window: int) -> int:
    """The number of keys that each of the first tokens sees, summed over the tokens."""
    full = min(tokens, window) if window else tokens
    return full * (full + 1) // 2 + (tokens - full) * window
