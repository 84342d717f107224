"""Time codecs in CUDA graphs, against a device copy of the same tensor in the same run.

A graph holds calls on several tensors in turn, so no call finds its input in the cache. The figure is the
median of the replays. A rate is the bytes that must move (the tensor once, the packed form once) over time;
`of_copy` is that rate over the copy's (bytes read and written).
"""

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from scripts.checks.gpu_kernels import calls, sample

SHAPES = {"large": (8192, 4096), "small": (2, 4096, 2048)}
TARGETS = {"fixed encode": 0.85, "fixed decode": 0.85, "tah encode": 0.60, "tah decode": 0.75}


def graph_seconds(works: list[Callable[[], Any]], runs: int) -> list[float]:
    """Seconds per call for each of `runs` replays of a CUDA graph of all `works`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    for _ in range(3):
        graph.replay()
    taken = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / len(works))
    return taken


def eager_seconds(work: Callable[[], Any], runs: int) -> float:
    """Median seconds of one call, launch included; the host waits for each call."""
    taken = []
    for _ in range(runs + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def kernel_microseconds(work: Callable[[], Any]) -> dict[str, float]:
    """Mean microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
    return {
        event.key[:60]: round(event.self_device_time_total / 10, 2)
        for event in recorded.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0
    }


def time_size(size: str, runs: int) -> list[dict[str, Any]]:
    shape = SHAPES[size]
    rotate = 6 if size == "large" else 12
    tensors = [sample(shape, seed).bfloat16() for seed in range(rotate)]
    nbytes = tensors[0].nbytes
    targets = [torch.empty_like(x) for x in tensors]
    copies = [lambda x=x, y=y: y.copy_(x) for x, y in zip(tensors, targets, strict=True)]
    rows: list[dict[str, Any]] = []
    for name in ("fixed-4", "fixed-6", "fixed-8", "tah"):
        try:
            made = [calls(name, x) for x in tensors]
            packed = made[0][1].nbytes
            for index, way in enumerate(("encode", "decode")):
                # Time the copy around each codec so the ratio compares the same moment.
                before = graph_seconds(copies, runs)
                taken = graph_seconds([steps[index] for steps, _, _ in made], runs)
                after = graph_seconds(copies, runs)
                copied = statistics.median(before + after)
                seconds = statistics.median(taken)
                share = (nbytes + packed) / seconds / (2 * nbytes / copied)
                target = TARGETS[f"{name.split('-')[0]} {way}"]
                rows.append(
                    {
                        "size": size,
                        "shape": list(shape),
                        "codec": name,
                        "way": way,
                        "seconds": seconds,
                        "spread_seconds": [min(taken), max(taken)],
                        "bytes": nbytes + packed,
                        "bytes_per_second": (nbytes + packed) / seconds,
                        "copy_bytes_per_second": 2 * nbytes / copied,
                        "of_copy": share,
                        "target": target,
                        "eager_seconds": eager_seconds(made[0][0][index], 20),
                        "kernels_microseconds": kernel_microseconds(made[0][0][index]),
                        "runs": runs,
                        "tensors": rotate,
                    }
                )
        except Exception:  # the other codecs are still timed
            print(f"FAILED: timing {name} {size}\n{traceback.format_exc()[-2500:]}", flush=True)
            rows.append({"size": size, "codec": name, "failed": traceback.format_exc()[-1000:]})
    return rows
