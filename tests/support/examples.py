"""Numbers of Hypothesis examples.

`make test` tries the same ones each time; `make fuzz` tries others, and many more.
"""

import os

FUZZ = int(os.environ.get("THINWIRE_FUZZ", "0"))
"""0: the same examples in every run."""


def examples(count: int) -> int:
    """A third of `count` in `make test`, and FUZZ times `count` in `make fuzz`."""
    return count * FUZZ if FUZZ else -(-count // 3)
