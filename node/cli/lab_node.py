"""A node that is ready to join: everything is imported, and a line on stdin says with which command line.

    python -m node.cli.lab_node DEVICE

`thinwire join`, but for the wait: imports take seconds, and the lab lets its nodes join one after the other,
so that stage i is node i. The line is JSON: `thinwire`'s arguments.
"""

import json
import os
import sys

from node.cli.main import main


def wait_and_run() -> int:
    import torch

    import node.processes.node

    if (device := torch.device(sys.argv[1])).type == "cuda":
        # A GPU's own start takes seconds too.
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    assert node.processes.node.run_node is not None, "what takes long is imported before the wait"
    line = sys.stdin.readline()
    if not line:
        return 1
    # Nothing of the lab's is the program's business.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return main(json.loads(line))


if __name__ == "__main__":
    sys.exit(wait_and_run())
