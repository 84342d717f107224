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

from wire.codecs import tah as tah_codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat

SHAPES = {"large": (8192, 4096), "small": (2, 4096, 2048)}
TARGETS = {"fixed encode": 0.85, "fixed decode": 0.85, "tah encode": 0.60, "tah decode": 0.75}


def sample(shape: tuple[int, ...], seed: int, spikes: float = 1e-4) -> torch.Tensor:
    """Normal values, a share `spikes` of them 30 times larger; at 1e-4 one tile in 160 is an outlier tile."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return torch.where(torch.rand(shape, generator=generator, device="cuda") < spikes, x * 30, x)


def calls(
    name: str, x: torch.Tensor, **options: Any
) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], torch.Tensor, torch.Tensor]:
    """Functions that encode and decode x, the packed payload and the decoded tensor."""
    from kernels.fixed import triton as triton_fixed
    from kernels.tah.triton import decode as triton_tah_decode
    from kernels.tah.triton import encode as triton_tah

    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    encode_options, decode_options = options.get("encode", {}), options.get("decode", {})
    if name == "tah":
        samples, tiles = tah_codec.samples_and_tiles(tuple(x.shape))
        layout = tah_codec._layout(tuple(x.shape))
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
        parts = layout.views(payload)
        split = {"samples": samples, "four_bit": tah_codec.four_bit_tiles(tiles)}
        return (
            (
                lambda: triton_tah.encode(x, *parts, exponent, **split, **encode_options),
                lambda: triton_tah_decode.decode(*parts, out, exponent, **split, **decode_options),
            ),
            payload,
            out,
        )
    layout = FixedCodec(FixedFormat(int(name[6:])))._layout(tuple(x.shape))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    parts = layout.views(payload)
    return (
        (
            lambda: triton_fixed.encode(x, *parts, exponent, **encode_options),
            lambda: triton_fixed.decode(*parts, out, exponent, **decode_options),
        ),
        payload,
        out,
    )


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
