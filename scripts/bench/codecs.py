"""Speed, size and error of every codec on this machine: `python -m scripts.bench.codecs [--json PATH]`.

Each figure is the median of `--runs` runs after one warm-up run. The tensor is normal with one element in a
thousand 30 times larger. A copy of it is timed between the runs of each codec, so the ratio to memory speed
compares the same moment. CPU time (of all threads, including their waits for each other) is valid on a busy
machine too; elements per second only on a quiet one.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from node.lab.results import commit, hardware
from scripts.report import RESULTS
from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec

OUT = RESULTS / "codec_speed.json"


def seconds(work: Callable[[], torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Wall time and this process's CPU time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start, cpu = time.perf_counter(), time.process_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, time.process_time() - cpu


def sample(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 1e-3, x * 30, x)


def measure(name: str, x: torch.Tensor, runs: int) -> dict[str, Any]:
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    target = torch.empty_like(x)
    timings = [
        (
            *seconds(lambda: which.encode(x), x.device),
            *seconds(lambda: which.decode(packed, spec), x.device),
            *seconds(lambda: target.copy_(x), x.device),
        )
        for _ in range(runs + 1)
    ]
    encode, encode_cpu, decode, decode_cpu, copy, _ = zip(*timings[1:], strict=True)
    error = torch.linalg.vector_norm(which.decode(packed, spec) - x) / torch.linalg.vector_norm(x)
    copied = statistics.median(copy)
    return {
        "codec": name,
        "encode_elements_per_second": x.numel() / statistics.median(encode),
        "decode_elements_per_second": x.numel() / statistics.median(decode),
        "encode_cpu_nanoseconds_per_element": statistics.median(encode_cpu) / x.numel() * 1e9,
        "decode_cpu_nanoseconds_per_element": statistics.median(decode_cpu) / x.numel() * 1e9,
        "encode_copies": statistics.median(encode) / copied,
        "decode_copies": statistics.median(decode) / copied,
        "encode_spread_seconds": [min(encode), max(encode)],
        "decode_spread_seconds": [min(decode), max(decode)],
        "copy_bytes_per_second": x.nbytes / copied,
        "bits_per_element": which.bits_per_element(spec),
        "relative_error": error.item(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return hardware()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every codec on this machine.")
    parser.add_argument("--shape", type=int, nargs="+", default=[4, 1024, 1024])
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each codec, at least 5")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=OUT)
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("a median of fewer than 5 runs says little: use --runs 5 or more")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    x = sample(tuple(arguments.shape)).to(device)

    load = os.getloadavg()[0]
    results = [measure(name, x, arguments.runs) for name in codec_names()]
    where = f"{device_name(device)}, {arguments.threads} threads"
    print(f"{list(x.shape)} fp32 on {where}, median of {arguments.runs} runs")
    print("codec        encode    decode   encode   decode   encode   decode  bits an  relative")
    print("             M el/s    M el/s   copies   copies   CPU ns   CPU ns  element     error")
    for row in results:
        print(
            f"{row['codec']:9} {row['encode_elements_per_second'] / 1e6:9.0f} "
            f"{row['decode_elements_per_second'] / 1e6:9.0f} {row['encode_copies']:8.1f} "
            f"{row['decode_copies']:8.1f} {row['encode_cpu_nanoseconds_per_element']:8.2f} "
            f"{row['decode_cpu_nanoseconds_per_element']:8.2f} {row['bits_per_element']:8.3f} "
            f"{row['relative_error']:9.5f}"
        )
    report = {
        "commit": commit(),
        "hardware": device_name(device),
        "load_before": load,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": arguments.threads,
        "runs": arguments.runs,
        "shape": list(x.shape),
        "dtype": "fp32",
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
