"""How many examples properties are tried on.

`make test` tries the same ones each time, as a test that fails now and then teaches nobody; `make fuzz` tries
others, and `FUZZ` times as many.
"""

import os

FUZZ = int(os.environ.get("THINWIRE_FUZZ", "0"))
"""0: the same examples in every run."""


def examples(count: int) -> int:
    """`count` in `make test`."""
    return count * max(FUZZ, 1)
