"""As `tests.support.apart_node`, with links that wait less for a silent neighbour, so that a test of silence
takes seconds.

python -m tests.support.impatient_node join TOKEN ...
"""

import functools
import sys

from node.stage import runtime
from tests.support.apart_node import main as thinwire
from wire.link_state import LinkSettings

SECONDS = 2.0
"""A neighbour that is busy for longer is connected to again, which changes nothing."""


def main() -> int:
    runtime.LinkSettings = functools.partial(LinkSettings, silent_seconds=SECONDS)  # type: ignore[misc,assignment]
    return thinwire()


if __name__ == "__main__":
    sys.exit(main())
