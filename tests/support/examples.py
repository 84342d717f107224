"""Numbers of Hypothesis examples.

`make test` tries the same ones each time; `make fuzz` tries others, and FUZZ times as many.
"""

import os

FUZZ = int(os.environ.get("THINWIRE_FUZZ", "0"))
"""0: the same examples in every run."""


def examples(count: int) -> int:
    """`count` in `make test`."""
    return count * max(FUZZ, 1)
