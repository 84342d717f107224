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
            raise UserError(f"--device {wanted}: this machine has {count} usable GPUs; use cpu or a lower N")
        return torch.device("cuda", index)
    return device


def describe(device: torch.device, *, most_bytes: int = 0) -> Hardware:
    """The device's name and memory, and the machine's cores.

    `most_bytes` above 0 is all the memory that the owner offers: no stage that needs more comes here, and on
    a GPU torch refuses to take more.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if 0 < most_bytes < properties.total_memory:
            torch.cuda.set_per_process_memory_fraction(most_bytes / properties.total_memory, device)
        memory = min(properties.total_memory, most_bytes or properties.total_memory)
        return Hardware(device=properties.name, cores=cores, memory_bytes=memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(device="cpu", cores=cores, memory_bytes=min(memory, most_bytes or memory))


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
