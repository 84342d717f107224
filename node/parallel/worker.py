"""`python -m node.parallel.worker`: a process of a node for one more of its devices. Started by `processes`.

The run file comes as JSON on stdin, which then stays open for as long as the node lives: its end is the
node's end, and ends this process too, whatever it is waiting for.

The node says in one line why it ends. So this process says nothing, unless the node lives on after a
collective failed here: then the reason is known here alone. If memory does not suffice here, it leaves a note
for the node beside the place where they met, and ends.
"""

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path

import torch

from node.config.schema import RunConfig
from node.parallel.group import Follower
from node.parallel.ranks import Ranks, arrival, farewell
from node.run_file.loader import from_json
from node.stage.fixed_order import fix_order
from node.stage.machine_info import limit_memory
from node.stage.out_of_memory import ran_out, room
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
    try:
        return _serve(arguments, config, device, end)
    except Exception as error:
        if not ran_out(error):
            raise
        # Whole, or not there: the node looks as soon as it sees this process's sockets close.
        written = arguments.meet.with_name(f"rank-{arguments.rank}-writes")
        with contextlib.suppress(OSError):  # the node is gone, and its folder with it
            written.write_text(room(device), encoding="utf-8")
            written.replace(farewell(arguments.meet, arguments.rank))
        os._exit(1)


def _serve(
    arguments: argparse.Namespace, config: RunConfig, device: torch.device, end: threading.Thread
) -> int:
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
