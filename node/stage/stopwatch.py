"""How long work takes on a device: by its own clock on a GPU, by the system's elsewhere."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

RUNS = 3
ENOUGH_SECONDS = 2.0
"""Of measured work, on a slow machine."""


def seconds_of(device: torch.device, *parts: Callable[[], object]) -> tuple[float, ...]:
    """Of each part, one after another: the median of a few rounds. The first round compiles, and does not
    count."""
    taken: list[tuple[float, ...]] = []
    spent = 0.0
    while len(taken) <= RUNS and (len(taken) < 2 or spent < ENOUGH_SECONDS):
        taken.append(_on_gpu(parts) if device.type == "cuda" else _on_cpu(parts))
        spent += sum(taken[-1]) if len(taken) > 1 else 0.0
    return tuple(statistics.median(one) for one in zip(*taken[1:], strict=True))


def _on_gpu(parts: tuple[Callable[[], object], ...]) -> tuple[float, ...]:
    marks = [_event()]
    marks[0].record()
    for part in parts:
        part()
        marks.append(_event())
        marks[-1].record()
    marks[-1].synchronize()
    return tuple(a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))


def _on_cpu(parts: tuple[Callable[[], object], ...]) -> tuple[float, ...]:
    marks = [time.perf_counter()]
    for part in parts:
        part()
        marks.append(time.perf_counter())
    return tuple(b - a for a, b in pairwise(marks))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
