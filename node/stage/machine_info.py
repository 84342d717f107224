"""What this machine offers to a run: its device, and how fast that multiplies."""

import os
import time

import torch

from wire.errors import UserError
from wire.identity.enrolment import Hardware

MATRIX = 1024
MEASURE_SECONDS = 0.2


def choose_device(wanted: str) -> torch.device:
    """`auto` takes the first GPU, else the CPU. Raises UserError for a device that is not there."""
    if wanted == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            raise UserError(
                f"--device {wanted}: this machine has {count} usable GPUs; use cpu or a lower N"
            )
        return torch.device("cuda", index)
    return device


def describe(device: torch.device) -> Hardware:
    """The device's name and memory, and the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Hardware(device=properties.name, cores=cores, memory_bytes=properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(device="cpu", cores=cores, memory_bytes=memory)


def measure_flops(device: torch.device) -> float:
    """Floating-point operations a second of float32 matrix products; takes a fraction of a second."""
    matrix = torch.ones(MATRIX, MATRIX, device=device)
    torch.mm(matrix, matrix)
    products, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < MEASURE_SECONDS:
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        products += 1
    return products * 2.0 * MATRIX**3 / elapsed
