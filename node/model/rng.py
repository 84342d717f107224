"""Counter-based randomness: numbers depend on where they are used, never on a generator's state.

Every draw depends only on (seed, step, microbatch, layer, purpose). So a repeated step, a resumed
run and another split draw the same numbers.
"""

from hashlib import blake2b

import numpy as np


def generator(
    seed: int, *, step: int = 0, microbatch: int = 0, layer: str = "", purpose: str
) -> np.random.Generator:
    """A new Philox generator, keyed by the 128-bit BLAKE2b hash of the arguments."""
    # The empty text is part of the key of every draw on record: without it all numbers would be others.
    key = _hash((seed, step, microbatch, layer, "", purpose), 16)
    return np.random.Generator(np.random.Philox(key=key))


def salt(seed: int, *, step: int, layer: str, purpose: str) -> int:
    """32 bits for a kernel that draws its own numbers from a hash of (salt, element)."""
    return _hash((seed, step, 0, layer, "", purpose), 4)


def _hash(place: tuple[object, ...], size: int) -> int:
    return int.from_bytes(blake2b(repr(place).encode(), digest_size=size).digest(), "little")
