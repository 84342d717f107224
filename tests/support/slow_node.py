"""`thinwire` whose blocks take longer and compute the same: a slow node.

python -m tests.support.slow_node PROGRAM join TOKEN ...
"""

import importlib
import sys
import time
from typing import Any

from node.model import blocks

SECONDS = 0.06
"""Each block's forward takes this much longer: far more than a block of the tests' models, also on a busy
machine."""


def main() -> int:
    forward = blocks.Block.forward

    def slow(block: blocks.Block, *arguments: Any, **named: Any) -> Any:
        time.sleep(SECONDS)
        return forward(block, *arguments, **named)

    blocks.Block.forward = slow  # type: ignore[method-assign]
    del sys.argv[0]
    code: int = importlib.import_module(sys.argv[0]).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
