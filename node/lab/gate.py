"""A node that is ready to join: everything is imported, and a line on stdin says with which command line.

`thinwire join`, but for the wait: imports take seconds, and the lab lets its nodes join one after the other,
so that stage i is node i. The line is JSON: `thinwire`'s arguments.
"""

import json
import os
import sys

from node.cli.main import main


def wait_and_run() -> int:
    import node.stage.main

    assert node.stage.main.run_node is not None, "what takes long is imported before the wait"
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
