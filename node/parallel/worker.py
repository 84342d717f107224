"""`python -m node.parallel.worker`: a process of a node for one more of its devices. Started by `processes`.

The run file comes as JSON on stdin, which then stays open for as long as the node lives: its end is the
node's end, and ends this process too, whatever it is waiting for.

The node says in one line why it ends. So this process says nothing, unless the node lives on after a
collective failed here: then the reason is known here alone.
"""

import argparse
import os
import sys
import threading
from pathlib import Path

import torch

from node.config.loader import from_json
from node.parallel.group import Follower
from node.parallel.ranks import Ranks, arrival
from node.stage.fixed_order import fix_order
from node.stage.machine_info import limit_memory
from wire.errors import DeviceLostError

GRACE_SECONDS = 1.0
"""A node that sees what this process saw has ended within this time, and this process with it."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tensor-parallel", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--most-bytes", type=int, required=True)
    parser.add_argument("--meet", type=Path, required=True)
    arguments = parser.parse_args()
    config = from_json(sys.stdin.readline())
    end = threading.Thread(target=_end_with_the_node, daemon=True)
    end.start()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    fix_order(device)
    limit_memory(device, arguments.most_bytes)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # fails here, if the device cannot be used
    arrival(arguments.meet, arguments.rank).touch()
    ranks = Ranks(
        arguments.rank,
        arguments.count,
        device,
        arguments.meet,
        arguments.tensor_parallel,
    )
    try:
        Follower(config, ranks).serve()
    except DeviceLostError as error:
        end.join(GRACE_SECONDS)
        sys.stderr.write(f"thinwire: error: rank {arguments.rank} ({arguments.device}): {error}\n")
        sys.stderr.flush()
        # NCCL would wait for what the others never send.
        os._exit(1)
    ranks.close()
    return 0


def _end_with_the_node() -> None:
    sys.stdin.read()
    # The main thread may sit in a collective for ever.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
