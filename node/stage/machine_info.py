"""The machine's description for a run (devices, memory, speed), and how to sum in a fixed order."""

import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.deterministic

from kernels.common.dispatch import kind_of
from node.config.schema import TrainingSection
from node.stage.stopwatch import finish
from node.tuning.device_memory import available_bytes
from wire.errors import UserError
from wire.identity.enrolment import MPS, Hardware

MATRIX = 1024
MEASURE_SECONDS = 0.2
HOST_SHARE = 0.5
"""The share of free main memory that may hold what does not fit on the GPUs."""
ASK_SECONDS = 120.0
"""The seconds for a process to report free memory. Loading torch may take long on a slow disk."""
_ASK = "import sys, torch; print(min(torch.cuda.mem_get_info(int(index))[0] for index in sys.argv[1:]))"


def choose_device(wanted: str) -> torch.device:
    """The device for `--device`. `auto` is the first GPU of NVIDIA or AMD, else the CPU. Raises UserError for
    a missing or unsupported device."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "xpu":
        raise UserError(
            "--device xpu: thinwire does not compute on Intel GPUs: use cpu, or a GPU of NVIDIA or AMD"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps: torch finds no Apple GPU here: it needs macOS 14 on Apple silicon and the arm64 "
            "build of torch; use cpu"
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise UserError(f"--device {wanted}: this machine has {count} usable GPUs; use cpu or a lower N")
        return torch.device("cuda", index)
    return device


def describe(
    chosen: Sequence[torch.device],
    *,
    tensor_parallel: int = 1,
    most_bytes: int = 0,
    most_host_bytes: int | None = None,
) -> Hardware:
    """The devices' name and memory, and the machine's cores.

    A GPU's memory is what is free on it now; of several, the least, because each process holds as much as the
    others. Processes on a CPU share its memory equally.

    Args:
        most_bytes: if above 0, the owner's limit for each GPU or for the machine. torch enforces it on a GPU.
        most_host_bytes: the owner's limit of main memory for what does not fit on the GPUs; None: a share of
            the free memory.

    Raises UserError for a GPU that cannot be used.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = chosen[0]
    if first.type == "cuda":
        name = torch.cuda.get_device_properties(first).name
        memory, _ = torch.cuda.mem_get_info(first)
        if len(chosen) > 1:
            memory = min(memory, _free_elsewhere(chosen[1:]))
        limit_memory(first, most_bytes)
        memory = min(memory, most_bytes or memory)
        share = int(HOST_SHARE * available_bytes())
        host = (share if most_host_bytes is None else min(most_host_bytes, 2 * share)) // len(chosen)
    else:
        # A Mac's GPU uses main memory, and its driver reports how much of it works at full speed.
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        name, memory = first.type, torch.mps.recommended_max_memory() if first.type == MPS else whole
        memory = min(memory, most_bytes or memory) // len(chosen)
        host = 0  # it is the same memory
    return Hardware(
        device=name,
        cores=cores,
        memory_bytes=memory,
        devices=len(chosen),
        tensor_parallel=tensor_parallel,
        host_bytes=host,
        # It is unknown whether Metal sums in a fixed order, so no other node counts as the same kind, and no
        # results are compared with this one's.
        arithmetic=(f"{secrets.token_hex(4)}, " if first.type == MPS else "") + arithmetic(first),
    )


def arithmetic(device: torch.device) -> str:
    """What the bits of a node's results depend on besides its devices: torch, its kernels, and the chip.

    Sums on a CPU also depend on the number of threads.
    """
    if device.type == "cuda":
        return f"torch {torch.__version__}, {kind_of(device).name}"
    if device.type == MPS:
        return f"torch {torch.__version__}, {platform.machine()}, {device.type}"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {platform.machine()} {capability}, {torch.get_num_threads()} threads"


def cannot_compute(training: TrainingSection, device: torch.device) -> str | None:
    """Why this device cannot compute a stage of this run, and what to do; None if it can. CPUs can."""
    kind = kind_of(device)
    name = torch.cuda.get_device_properties(device).name if device.type == "cuda" else str(device)
    if training.compute == "fp8" and not kind.fp8_products:
        return (
            f"this run multiplies in FP8 ([training] compute), which this node's {name} cannot: join with a "
            "GPU of compute capability 8.9 or later"
        )
    if training.precision == "bfloat16" and not kind.bfloat16:
        return (
            f"this run computes in bfloat16 ([training] precision), which this node's {name} cannot: join "
            "with a GPU of compute capability 8.0 or later, or a CPU, or let the run have training.precision "
            "float16, float32 or auto"
        )
    return None


def _free_elsewhere(others: Sequence[torch.device]) -> int:
    """The least free bytes among these GPUs.

    A separate process asks, because asking takes hundreds of megabytes on each GPU until the process ends.

    Raises UserError.
    """
    words = [sys.executable, "-c", _ASK, *(str(device.index) for device in others)]
    asked = subprocess.run(words, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    if asked.returncode != 0:
        names = ", ".join(map(str, others))
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise UserError(f"this node cannot use {names} ({reason}): lower --gpus, or look at nvidia-smi")
    return int(asked.stdout)


def limit_memory(device: torch.device, most_bytes: int) -> None:
    """Limit the GPU memory that torch uses in this process; 0: no limit."""
    if device.type != "cuda" or most_bytes == 0:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    if most_bytes < total:
        torch.cuda.set_per_process_memory_fraction(most_bytes / total, device)


def measure_flops(device: torch.device) -> float:
    """Floating-point operations per second in float32 matrix products. Takes a fraction of a second."""
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    torch.mm(matrix, matrix)
    products, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < MEASURE_SECONDS:
        torch.mm(matrix, matrix)
        finish(device)
        products += 1
    return products * 2.0 * MATRIX**3 / elapsed


def fix_order(device: torch.device) -> None:
    """Make this process sum in a fixed order, so that a repeated step gives the same bits.

    Call it before the device's first matrix product. Without it, FlashAttention's backward adds with atomics,
    and torch prefers cuDNN's attention, whose backward has no fixed order either.
    """
    if device.type != "cuda":
        return
    # cuBLAS chooses the same algorithm every time only with these workspace sizes.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # mypy does not see the module's property.
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False
