"""Randomness as a function of place, never of a generator's state.

Whatever is drawn depends on (seed, step, microbatch, layer, direction, purpose) alone, so a re-run step, a
resumed run and another split draw the same numbers.
"""

from hashlib import blake2b

import numpy as np


def generator(
    seed: int, *, step: int = 0, microbatch: int = 0, layer: str = "", direction: str = "", purpose: str
) -> np.random.Generator:
    """A fresh Philox generator keyed by the 128-bit BLAKE2b hash of its place."""
    place = repr((seed, step, microbatch, layer, direction, purpose)).encode()
    key = int.from_bytes(blake2b(place, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))
