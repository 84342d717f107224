"""torchft's quantized all-reduce for scripts/bench/all_reduce.py, which goes on if it fails.

torchft's package imports its coordination server and OpenTelemetry; its collectives need neither, so they are
loaded through an empty package. All ranks take the same decisions: they exchange errors over gloo, sums run
in a process group of their own, and every wait has a limit, so that a rank that fails alone does not block
the others. After any error torchft stays out for the rest of the run.
"""

import importlib
import importlib.metadata
import importlib.util
import math
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from scripts.report import one_line

PACKAGE = "torchft"
DISTRIBUTIONS = ("torchft-nightly", "torchft")
ROW = 2048
"""Elements per scale, the row length of torchft's kernels. A flat tensor would get one scale per element."""
WAIT_SECONDS = 30.0
"""Limit for one sum: far longer than any takes, far shorter than the other groups' watchdogs."""
AGREE = timedelta(minutes=5)
"""Limit for an exchange of errors: longer than `WAIT_SECONDS` and compilation."""
TOLERANCE = 0.15
"""Limit of a sum's relative error. e4m3 gives 0.04; more means that torchft's last step failed: it runs in a
callback whose exceptions torch drops."""


def version() -> str:
    """torchft's version, or a note that it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed" if importlib.util.find_spec(PACKAGE) is None else "of unknown version"


def load() -> Any:
    """`torchft.collectives` alone, without what torchft's `__init__` imports."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("torchft is not installed")
    bare = types.ModuleType(PACKAGE)
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules[PACKAGE] = bare
    return importlib.import_module(f"{PACKAGE}.collectives")


class Torchft:
    """`allreduce_quantized` of one bf16 tensor at a time. All methods but the call are collective."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensor = torch.empty(0)
        """The result, as rows."""
        self.wire_bytes = 0
        """Bytes that a rank sends for a sum of this size."""
        self.reason = ""
        """Why torchft is out, the same on all ranks; empty while it is in."""
        self._problem = ""
        self._exchange: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=AGREE)
        self._group: Any = None
        self._collectives: Any = None
        self._stream: Any = None
        self._try(self._load)
        if self.agree():
            self._group = dist.new_group()
            self._connect()

    def prepare(self, values: torch.Tensor) -> bool:
        """Prepare for a new size; returns whether torchft is still in."""
        if self.reason:
            return False
        self._try(lambda: self._alone(values))
        if not self.agree():
            return False
        self.tensor.copy_(values.view_as(self.tensor))
        self()
        return self.agree()

    def check(self, error: float) -> bool:
        """Put torchft out if its sum is wrong."""
        if not error <= TOLERANCE:
            self._problem = f"its sum is off by {error:.3g} of the sum's norm"
        return self.agree()

    def agree(self) -> bool:
        """Exchange errors with the other ranks; returns whether torchft is still in."""
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, self._problem, group=self._exchange)
        found = [f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem]
        if found and not self.reason:
            # A rank that timed out knows no cause; prefer the report of the rank that failed.
            self.reason = min(found, key=lambda problem: TimeoutError.__name__ in problem)
            self.tensor = torch.empty(0)
            self._abort()
        return not self.reason

    def __call__(self) -> None:
        """Sum. Returns when the result is there or an error is noted."""
        if not (self._problem or self.reason):
            self._try(self._sum)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as problem:  # no error of another package ends the bench
            self._problem = one_line(problem)
            if isinstance(problem, TimeoutError):
                self._abort()

    def _abort(self) -> None:
        """End sums that another rank will not join: they would block the GPU for all other work."""
        if self._group is not None:
            with suppress(Exception):
                self._group.abort()
            self._group = None

    def _load(self) -> None:
        self._collectives = load()
        # One stream for all sums: torchft makes one per call, and each stream has its own pool of memory.
        self._stream = torch.Stream(device=self.device)

    def _connect(self) -> None:
        """Let NCCL connect: it does so in the first sum of each kind and waits for all ranks."""
        world = dist.get_world_size()
        sent, received = (torch.zeros(world, device=self.device) for _ in range(2))
        dist.all_to_all_single(received, sent, group=self._group)
        dist.all_gather_into_tensor(received, sent[:1], group=self._group)
        torch.cuda.synchronize(self.device)

    def _alone(self, values: torch.Tensor) -> None:
        """Compile and run the kernels on this rank alone, so that errors come before other ranks wait."""
        elements, world = values.numel(), dist.get_world_size()
        self.tensor = values.to(torch.bfloat16, copy=True).view(-1, math.gcd(elements, ROW))
        packed = self._collectives.fused_quantize_into_fp8([self.tensor], world)
        self.wire_bytes = 2 * (world - 1) * packed.numel() // world
        gathered = packed.clone()
        reduce_op = dist.ReduceOp.SUM
        self._collectives.fused_reduce_fp8([self.tensor], gathered, world, dist.get_rank(), reduce_op)
        self._collectives.fused_dequantize_from_fp8([self.tensor], packed, world)
        torch.cuda.synchronize(self.device)

    def _sum(self) -> None:
        work = self._collectives.allreduce_quantized(
            [self.tensor], dist.ReduceOp.SUM, self._group, self._stream
        )
        # The future ends with the all-gather; its callback then dequantizes on torchft's stream.
        work.get_future().wait()
        current = torch.accelerator.current_stream()
        current.wait_stream(self._stream)
        done = current.record_event()
        limit = time.monotonic() + WAIT_SECONDS
        while not done.query():
            if time.monotonic() > limit:
                raise TimeoutError(f"no sum within {WAIT_SECONDS:g} s")
