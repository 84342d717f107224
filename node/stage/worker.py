"""`python -m node.stage.worker`: the process of a further device of a node. `processes` starts it.

The run file arrives as JSON on stdin, which then stays open while the node lives. When stdin closes, the node
has ended, and this process ends too, even while it waits.

The node prints why it ends, so this process prints nothing, unless a collective fails here and the node
continues: then only this process knows the reason. If memory runs out here, it leaves a file for the node
beside the meeting place and ends.
"""

import argparse
import contextlib
import os
import sys
import threading
from pathlib import Path

import torch

from kernels.common.dispatch import kind_of
from node.config.schema import RunConfig
from node.run_file.loader import from_json
from node.stage.allocator import grow_segments
from node.stage.group import Follower
from node.stage.machine_info import fix_order, limit_memory
from node.stage.out_of_memory import device_memory_text, ran_out
from node.stage.ranks import Ranks, arrival, farewell
from node.tuning.device_memory import Devices
from node.tuning.memory_plan import Room
from wire.errors import DeviceLostError
from wire.identity.enrolment import CPU

GRACE_SECONDS = 1.0
"""How long this process waits for the node to see the same failure and end it."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tensor-parallel", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--most-bytes", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, default=0)
    parser.add_argument("--host-bytes", type=int, default=0)
    parser.add_argument("--windows", type=int, default=0)
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
    except Exception as error:  # torch raises several types when memory runs out; others pass
        if not ran_out(error):
            raise
        # Write it atomically, because the node reads it when this process's sockets close.
        written = arguments.meet.with_name(f"rank-{arguments.rank}-writes")
        with contextlib.suppress(OSError):  # the node has ended and removed the folder
            written.write_text(device_memory_text(device), encoding="utf-8")
            written.replace(farewell(arguments.meet, arguments.rank))
        os._exit(1)


def _serve(
    arguments: argparse.Namespace, config: RunConfig, device: torch.device, end: threading.Thread
) -> int:
    grow_segments(device)
    fix_order(device)
    limit_memory(device, arguments.most_bytes)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # fails here if the device is unusable
    arrival(arguments.meet, arguments.rank).touch()
    room = Room(
        devices=Devices(
            count=arguments.count,
            tensor_parallel=arguments.tensor_parallel,
            on_cpu=device.type == CPU,
            host_bytes=arguments.host_bytes,
            has_own_attention=kind_of(device).own_attention,
        ),
        memory_bytes=arguments.memory_bytes,
        windows=arguments.windows,
    )
    ranks = Ranks(
        arguments.rank,
        arguments.count,
        device,
        arguments.meet,
        arguments.tensor_parallel,
    )
    try:
        Follower(config, ranks, room).serve()
    except DeviceLostError as error:
        end.join(GRACE_SECONDS)
        sys.stderr.write(f"thinwire: error: rank {arguments.rank} ({arguments.device}): {error}\n")
        sys.stderr.flush()
        # NCCL would wait for the others.
        os._exit(1)
    ranks.close()
    return 0


def _end_with_the_node() -> None:
    sys.stdin.read()
    # The main thread may wait in a collective.
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
