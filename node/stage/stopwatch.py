"""Measures how long work takes on a device: with a GPU's own clock, or with the system's elsewhere."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

RUNS = 3
LONGEST_DELAY = 0.1
"""The longest delay in seconds before a GPU starts, while work is queued."""
CYCLES_A_SECOND = 2e9
"""A GPU's cycles per second. No clock is much faster."""
ENOUGH_SECONDS = 2.0
"""On a slow machine, this many seconds of measured work are enough."""


def seconds_of(device: torch.device, *parts: Callable[[], object]) -> tuple[float, ...]:
    """The seconds of each part, run one after another: the median of a few rounds. The first round compiles
    and does not count.

    Only a GPU's own time counts: it starts after a complete round is queued. Launching kernels one by one can
    take longer than running them, particularly during other work, and a run's passes are CUDA graphs.
    """
    if device.type == "cuda":
        _on_gpu(parts)
        began = time.perf_counter()
        for part in parts:
            part()
        delay = min(LONGEST_DELAY, 2 * (time.perf_counter() - began))
        return _medians([_on_gpu(parts, delay) for _ in range(RUNS)])
    taken: list[tuple[float, ...]] = []
    spent = 0.0
    while len(taken) <= RUNS and (len(taken) < 2 or spent < ENOUGH_SECONDS):
        taken.append(_one_by_one(parts, device))
        spent += sum(taken[-1]) if len(taken) > 1 else 0.0
    return _medians(taken[1:])


def _medians(rounds: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(taken) for taken in zip(*rounds, strict=True))


def _on_gpu(parts: tuple[Callable[[], object], ...], delay: float = 0.0) -> tuple[float, ...]:
    """`delay`: the seconds before the GPU starts."""
    marks = [_event()]
    torch.cuda._sleep(int(delay * CYCLES_A_SECOND))  # type: ignore[no-untyped-call]  # torch's
    marks[0].record()
    for part in parts:
        part()
        marks.append(_event())
        marks[-1].record()
    marks[-1].synchronize()
    return tuple(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def finish(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _one_by_one(parts: tuple[Callable[[], object], ...], device: torch.device) -> tuple[float, ...]:
    marks = [time.perf_counter()]
    for part in parts:
        part()
        finish(device)
        marks.append(time.perf_counter())
    return tuple(b - a for a, b in pairwise(marks))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
