"""Starts and watches the processes of a node's other devices. If one of them ends, the node ends too."""

import asyncio
import contextlib
import subprocess
import tempfile
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import torch

from node import program
from node.config.schema import RunConfig
from node.model.shard_shapes import check_sizes
from node.run_file.loader import to_json
from node.stage.collectives import collective
from node.stage.group import Leader
from node.stage.machine_info import choose_device
from node.stage.ranks import Ranks, arrival, farewell
from node.stage.stage_model import OneDevice
from node.stage.watchdog import StuckError
from node.tuning.memory_plan import Room
from wire.errors import DeviceLostError, UserError

POLL_SECONDS = 0.2
END_SECONDS = 20.0
"""The seconds for a process to end after the stop command."""


def choose_devices(wanted: str, count: int) -> tuple[torch.device, ...]:
    """The devices of `--device wanted --gpus count`.

    Raises UserError if the machine does not have them; several processes on a CPU need `--device cpu`.
    """
    first = choose_device(wanted)
    if wanted == "auto" and count > 1 and first.type == "cpu":
        raise UserError(
            f"--gpus {count}: this machine has no GPU that torch can use: install a CUDA build of torch and "
            f"a driver, leave --gpus out, or use --device cpu for {count} processes on its CPU"
        )
    return devices(first, count)


def devices(first: torch.device, count: int) -> tuple[torch.device, ...]:
    """`count` devices of a node, starting with `first`.

    Raises UserError if the machine does not have them.
    """
    if count < 1:
        raise UserError(f"--gpus must be at least 1, got {count}")
    if first.type == "cpu":
        return (first,) * count
    if first.type == "mps":
        if count > 1:
            raise UserError(f"--gpus {count}: a Mac has one GPU: leave --gpus out")
        return (first,)
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
            f"--gpus {count} would use unlike GPUs ({', '.join(sorted(names))}), and all would wait for the "
            "slowest: choose equal ones with CUDA_VISIBLE_DEVICES"
        )
    return chosen


class DeviceGroup:
    """Several devices of a node, with one process for each after the first.

    Call `start` on the compute thread and `watch` on the event loop.
    """

    def __init__(
        self,
        chosen: tuple[torch.device, ...],
        threads: int,
        tensor_parallel: int = 1,
        most_bytes: int = 0,
    ) -> None:
        """
        Args:
            tensor_parallel: how many devices share each block.
            most_bytes: the most bytes of each GPU that its process may use; 0: no limit.

        Raises:
            UserError: `tensor_parallel` does not divide the number of devices.
        """
        if tensor_parallel < 1 or len(chosen) % tensor_parallel:
            raise UserError(
                f"--tensor-parallel {tensor_parallel} does not divide --gpus {len(chosen)}: choose a number "
                "that does"
            )
        self.first = chosen[0]
        """The device that holds boundary tensors."""
        self._devices = chosen
        self._tensor_parallel = tensor_parallel
        self._threads = threads
        self._most_bytes = most_bytes
        self._workers: list[subprocess.Popen[str]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._leader: Leader | None = None
        self._ending = False

    def start(self, config: RunConfig, room: Room | None = None) -> Leader:
        """Start the other processes and connect to them.

        Raises:
            RunError: the run's microbatches or blocks cannot be split between the devices.
            DeviceLostError: a process ended before all had connected. `close` then ends the others.
        """
        count = len(self._devices)
        check_sizes(config, count, self._tensor_parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="thinwire-ranks-")  # only the owner can read it
        meet, room = self._meeting_place, room or Room()
        for rank, device in enumerate(self._devices[1:], start=1):
            words = ["--rank", str(rank), "--count", str(count), "--device", str(device)]
            words += ["--threads", str(self._threads), "--meet", str(meet)]
            words += ["--tensor-parallel", str(self._tensor_parallel), "--most-bytes", str(self._most_bytes)]
            words += ["--memory-bytes", str(room.memory_bytes), "--windows", str(room.windows)]
            words += ["--host-bytes", str(room.devices.host_bytes)]
            worker = subprocess.Popen(
                [*program("stage.worker"), *words],
                stdin=subprocess.PIPE,
                text=True,
                # The node handles Ctrl-C.
                start_new_session=True,
            )
            assert worker.stdin is not None
            self._workers.append(worker)
            # `_meet` reports a process that has ended.
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(to_json(config) + "\n")
                worker.stdin.flush()
        self._leader = Leader(config, self._meet(meet), room)
        return self._leader

    @property
    def _meeting_place(self) -> Path:
        assert self._folder is not None, "start() comes first"
        return Path(self._folder.name) / "meet"

    def _meet(self, meeting_place: Path) -> Ranks:
        """Become rank 0 of the group. torch alone would wait minutes for a process that has ended."""
        for rank, worker in enumerate(self._workers, start=1):
            # A process arrives after loading torch and its device, where most failures happen.
            while not arrival(meeting_place, rank).exists():
                self._all_alive()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(POLL_SECONDS)
        met: Future[Ranks] = Future()

        def meet() -> None:
            try:
                with collective():
                    ranks = Ranks(
                        0, len(self._devices), self._devices[0], meeting_place, self._tensor_parallel
                    )
            except Exception as error:  # `met` passes it to the waiting thread
                met.set_exception(error)
            else:
                met.set_result(ranks)

        # If a process has ended, the thread remains, because torch's wait cannot be interrupted.
        threading.Thread(target=meet, name="meeting", daemon=True).start()
        while not wait([met], POLL_SECONDS).done:
            self._all_alive()
        if self._devices[0].type == "cuda":
            torch.cuda.set_device(self._devices[0])  # each thread has its own
        return met.result()

    def _all_alive(self) -> None:
        if (ended := self._ended()) is not None:
            raise DeviceLostError(f"{ended} before all had connected, so the node ends too")

    async def watch(self) -> None:
        """Raise StuckError when a process ends unexpectedly, because the compute thread may wait for it."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not self._ending and (ended := self._ended()) is not None:
                raise StuckError(f"{ended}, so the node ends too")

    def exhausted(self) -> tuple[torch.device, str] | None:
        """The first device whose process ran out of memory, and that device's memory in words."""
        if self._folder is not None:
            for rank, device in enumerate(self._devices[1:], start=1):
                with contextlib.suppress(FileNotFoundError):
                    return device, farewell(self._meeting_place, rank).read_text(encoding="utf-8")
        return None

    def lost(self) -> bool:
        """Whether a process has ended, so that a collective may never return."""
        return self._ended() is not None

    def _ended(self) -> str | None:
        """The first process that has ended, as the start of an error message."""
        for rank, worker in enumerate(self._workers, start=1):
            if worker.poll() is not None:
                return (
                    f"the process of this node's {self._devices[rank]} (rank {rank}) ended with exit code "
                    f"{worker.returncode}"
                )
        return None

    def close(self, *, broken: bool = False) -> None:
        """End all processes, cleanly if all are alive. Call it on the compute thread unless that hangs.

        Args:
            broken: whether the ranks are out of step, so that one may wait for a collective forever.
        """
        self._ending = True
        in_order = False
        if self._leader is not None and not broken and not self.lost():
            # A process that is about to end does not count as lost yet.
            with contextlib.suppress(DeviceLostError):
                self._leader.close()
                in_order = True
        if self._leader is not None and not in_order:
            self._leader.abandon()
        for worker in self._workers:
            assert worker.stdin is not None
            if not in_order:
                worker.kill()
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
            try:
                worker.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        if self._folder is not None:
            self._folder.cleanup()


StageDevices = OneDevice | DeviceGroup
