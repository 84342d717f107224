"""Compile the CPU loops of codecs into numba's cache: `python -m tests.support.compile_codecs`.

`make test` does so while it installs, and `scripts/test` before the tests. On a fresh clone every process of
the first runs would compile the same loops at the same time, and tests' limits of time would have to allow
for it.
"""

import sys

import torch

from wire.codecs.registry import codec
from wire.spec import TensorSpec

CODECS = ("tah", "fixed-8", "dither-4.41", "trellis-4.41")
SPEC = TensorSpec(torch.float32, (2, 32, 64))


def use(name: str) -> None:
    """Pack a tensor and unpack it again, so that the codec's loops are compiled and loaded."""
    chosen = codec(name)
    chosen.decode(chosen.encode(torch.linspace(-1, 1, SPEC.elements).view(SPEC.shape)), SPEC)


def main() -> int:
    for name in CODECS:
        use(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
