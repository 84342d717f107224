"""Quantizers of packages that a user could install, beside thinwire's codecs: true bits, error and speed.

    python -m pip install --target RIVALS --no-deps bitsandbytes torchao hivemind ...
    OMP_NUM_THREADS=1 PYTHONPATH=RIVALS python -m scripts.bench.rivals [--device cuda]

hivemind 1.1.12 cannot decode with numpy 2.4; it needs numpy 2.2. thinwire itself needs none of these
packages; one that is not installed or fails is recorded with the reason. Reads boundaries-step*.safetensors
(`activation.*`, `gradient.*`) from `--data`, THINWIRE_DATA or ../shared/data. All methods get the tensor in
fp32, as codecs do from a stage.

Bits count every byte that depends on the tensor and is needed to decode it: codes at their packed width,
scales, zero-points, code books made for the tensor; for thinwire's codecs also header and checksum. Error is
the norm of the difference over the norm of the tensor, in fp64. Speed on a CPU is processor time of one
thread, the least of the runs; with `--device cuda` it is wall time between two synchronisations for a tensor
of `--elements`, made by repeating the real ones; bytes stay on the device.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from node.lab.results import commit, hardware
from scripts.bench.rival_quantizers import Method, methods
from scripts.report import RESULTS, add_boundary_data, boundary_files, one_line, version

OUT = {"cpu": RESULTS / "rivals.json", "cuda": RESULTS / "rivals_gpu.json"}
RUNS = 5
CUDA_RUNS = 25


def measure(method: Method, tensors: dict[str, list[torch.Tensor]], device: str) -> list[dict[str, Any]]:
    """By kind of tensor, the mean of the bits and the root mean square of the errors."""
    rows = []
    for kind, xs in tensors.items():
        bits, squares = 0.0, 0.0
        for x in xs:
            packed = method.encode(x.to(device))
            decoded = method.decode(packed).to("cpu").double().view(x.shape)
            bits += method.bits(packed) / x.numel() / len(xs)
            wide = x.double()
            squares += float((decoded - wide).square().sum() / wide.square().sum()) / len(xs)
        error = math.sqrt(squares)
        rows.append(
            {
                "package": method.package,
                "method": method.name,
                "kind": kind,
                "tensors": len(xs),
                "bits_per_element": round(bits, 4),
                "relative_error": float(f"{error:.4g}") if math.isfinite(error) else None,
            }
        )
    return rows


def speed(method: Method, x: torch.Tensor, device: str) -> dict[str, Any]:
    """Nanoseconds per element to encode and to decode."""
    x = x.to(device)
    packed = method.encode(x)
    method.decode(packed)
    encoding, decoding = [], []
    for _ in range(RUNS if device == "cpu" else CUDA_RUNS):
        start = _now(device)
        packed = method.encode(x)
        middle = _now(device)
        method.decode(packed)
        encoding.append(middle - start)
        decoding.append(_now(device) - middle)
    return {
        "package": method.package,
        "method": method.name,
        "elements": x.numel(),
        "encode_nanoseconds_per_element": round(1e9 * min(encoding) / x.numel(), 6),
        "decode_nanoseconds_per_element": round(1e9 * min(decoding) / x.numel(), 6),
    }


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("bitsandbytes", "torchao", "hivemind", "numpy"):
        found[package] = version(package)
    return found


def report(
    device: str,
    *,
    hardware: str,
    load: float,
    data: list[str],
    results: list[dict[str, Any]],
    speeds: list[dict[str, Any]],
    skipped: list[dict[str, str]],
) -> dict[str, Any]:
    """The report.

    Args:
        load: Load average before the measurement.
        results: Rows of `measure`.
        speeds: Results of `speed`, one row per method.
        skipped: `package`, `method` and `reason` of methods that were not measured.
    """
    return {
        "experiment": "rivals",
        "commit": commit(),
        "data": data,
        "device": device,
        "hardware": hardware,
        "load_before": load,
        "threads": 1,
        "runs": RUNS if device == "cpu" else CUDA_RUNS,
        "versions": _versions(),
        "results": results,
        "speeds": speeds,
        "skipped": skipped,
    }


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return hardware()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure installable quantizers beside the codecs.")
    add_boundary_data(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 24, help="of the tensor timed on a GPU")
    parser.add_argument("--json", type=Path, help="where the report goes, if not among the results")
    arguments = parser.parse_args()
    files = boundary_files(parser, arguments.data)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU")
    torch.set_num_threads(1)
    contents = [load_file(file) for file in files]
    tensors = {
        kind: [x.float() for content in contents for name, x in sorted(content.items()) if kind in name]
        for kind in ("activation", "gradient")
    }
    timed = tensors["activation"][0]
    if arguments.device == "cuda":
        whole = torch.cat([x.flatten() for x in tensors["activation"]])
        repeated = whole.repeat(-(-arguments.elements // whole.numel()))[: arguments.elements]
        timed = repeated.view(1, -1, 1024)

    results: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    load = os.getloadavg()[0]
    for method in methods(skipped):
        if arguments.device not in method.devices:
            if method.package == "thinwire":
                continue
            reason = f"it has no path on {arguments.device}"
            skipped.append({"package": method.package, "method": method.name, "reason": reason})
            continue
        try:
            found = measure(method, tensors, arguments.device)
            timing = speed(method, timed, arguments.device)
        except Exception as error:  # record any error of another package and go on
            skipped.append({"package": method.package, "method": method.name, "reason": one_line(error)})
            continue
        results += found
        speeds.append(timing)
        print(found, timing, flush=True)
    print("skipped:", skipped)
    made = report(
        arguments.device,
        hardware=_hardware(arguments.device),
        load=load,
        data=[file.name for file in files],
        results=results,
        speeds=speeds,
        skipped=skipped,
    )
    # One result per line.
    lines = json.dumps(made, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    (arguments.json or OUT[arguments.device]).write_text(lines + "\n")
    return 0


if __name__ == "__main__":
    # Ignore warnings of the other packages.
    warnings.simplefilter("ignore")
    sys.exit(main())
