"""Starts and watches the processes of a node's other devices. Any one's death is the node's death."""

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from node.config.loader import to_json
from node.config.schema import RunConfig
from node.parallel.group import Leader, check_sizes
from node.parallel.ranks import Ranks
from node.stage.watchdog import StuckError
from wire.errors import DeviceLostError, UserError

POLL_SECONDS = 0.2
END_SECONDS = 20.0
"""How long a process may take to end when it is told to."""


def devices(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """The devices of a node that was asked to use `count`, `first` among them at the head.

    Raises UserError if the machine does not have them.
    """
    if count < 1:
        raise UserError(f"--gpus must be at least 1, got {count}")
    if first.type == "cpu":
        return (first,) * count
    there = torch.cuda.device_count()
    start = first.index or 0
    if start + count > there:
        raise UserError(
            f"--gpus {count} from cuda:{start} needs {start + count} GPUs, but this machine shows {there}: "
            "lower --gpus, give another --device, or check CUDA_VISIBLE_DEVICES"
        )
    chosen = tuple(torch.device("cuda", start + index) for index in range(count))
    names = {torch.cuda.get_device_name(device) for device in chosen}
    if len(names) > 1:
        raise UserError(
            f"--gpus {count} takes unlike GPUs ({', '.join(sorted(names))}), and the slowest would hold up "
            "the others: choose alike ones with CUDA_VISIBLE_DEVICES"
        )
    return chosen


class DeviceGroup:
    """The processes of one node's devices. `start` on the compute thread, `watch` on the event loop."""

    def __init__(self, chosen: tuple[torch.device, ...], threads: int, tensor_parallel: int = 1) -> None:
        """
        Args:
            tensor_parallel: how many devices share each block.

        Raises:
            UserError: that does not divide the number of devices.
        """
        if tensor_parallel < 1 or len(chosen) % tensor_parallel:
            raise UserError(
                f"--tensor-parallel {tensor_parallel} does not divide --gpus {len(chosen)}: give one "
                "that does"
            )
        self._devices = chosen
        self._tensor_parallel = tensor_parallel
        self._threads = threads
        self._workers: list[subprocess.Popen[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._leader: Leader | None = None
        self._ending = False

    def start(self, config: RunConfig) -> Leader:
        """Start all, and meet them. Raises RunError if the run's microbatches or blocks cannot be shared."""
        count = len(self._devices)
        check_sizes(config, count, self._tensor_parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-ranks-")  # readable to its owner alone
        meet = Path(self._folder.name) / "meet"
        for rank, device in enumerate(self._devices[1:], start=1):
            words = ["--rank", str(rank), "--count", str(count), "--device", str(device)]
            words += ["--threads", str(self._threads), "--meet", str(meet)]
            words += ["--tensor-parallel", str(self._tensor_parallel)]
            worker = subprocess.Popen(
                [sys.executable, "-m", "node.parallel.worker", *words],
                stdin=subprocess.PIPE,
                text=True,
                # Ctrl-C is the node's to handle.
                start_new_session=True,
            )
            assert worker.stdin is not None
            worker.stdin.write(to_json(config) + "\n")
            worker.stdin.flush()
            self._workers.append(worker)
        self._leader = Leader(config, Ranks(0, count, self._devices[0], meet, self._tensor_parallel))
        return self._leader

    async def watch(self) -> None:
        """Raises StuckError when a process ends that should not: the compute thread may wait for it."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for rank, worker in enumerate(self._workers, start=1):
                if not self._ending and worker.poll() is not None:
                    raise StuckError(
                        f"the process of this node's {self._devices[rank]} (rank {rank}) ended with exit "
                        f"code {worker.returncode}; the node ends with it"
                    )

    def lost(self) -> bool:
        """Whether one has ended, so that a collective may never return."""
        return any(worker.poll() is not None for worker in self._workers)

    def close(self) -> None:
        """End all, in good order if all are there. On the compute thread, or once that is done for."""
        self._ending = True
        in_order = False
        if self._leader is not None and not self.lost():
            # One that is just dying is not yet seen to be lost.
            with contextlib.suppress(DeviceLostError):
                self._leader.close()
                in_order = True
        if self._leader is not None and not in_order:
            self._leader.abandon()
        for worker in self._workers:
            assert worker.stdin is not None
            if not in_order:
                worker.kill()
            worker.stdin.close()
            try:
                worker.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        if self._folder is not None:
            self._folder.cleanup()
