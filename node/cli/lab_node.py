"""`thinwire join` with the imports done beforehand, for the lab.

    python -m node.cli.lab_node DEVICE

Imports take seconds, and the lab starts its nodes one after another so that node i gets stage i. The process
imports everything, then waits for a line on stdin with `thinwire`'s arguments as JSON.
"""

import json
import os
import sys

from node.cli.importing import importing
from node.cli.main import main


def wait_and_run() -> int:
    with importing():
        import torch

        from node.processes import node

    if (device := torch.device(sys.argv[1])).type == "cuda":
        # Initialising a GPU takes seconds too.
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    assert node.run_node is not None, "import before the wait"
    line = sys.stdin.readline()
    if not line:
        return 1
    # `thinwire join` must not read the lab's pipe.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return main(json.loads(line))


if __name__ == "__main__":
    sys.exit(wait_and_run())
