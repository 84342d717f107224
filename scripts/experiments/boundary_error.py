"""Bits and error of every codec on real boundary tensors.

    OMP_NUM_THREADS=1 python -m scripts.experiments.boundary_error

Reads boundaries-step*.safetensors (`activation.*`, `gradient.*`) from `--data`, THINWIRE_DATA or
../shared/data. Bits per element count the whole packed tensor with its header. Error is the norm of the
difference over the norm of the tensor, in fp64. CPU time is the least of three runs.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from node.lab.results import commit
from scripts.report import RESULTS, add_boundary_data, boundary_files
from wire.codecs.registry import codec, codec_names
from wire.spec import TensorSpec

OUT = RESULTS / "boundary_error.json"
RATES = ("2", "2.5", "3", "3.25", "3.45", "4.25", "4.41", "6.25", "8.25", "10")
RUNS = 3


def measure(name: str, x: torch.Tensor) -> dict[str, Any]:
    which, spec = codec(name), TensorSpec(x.dtype, tuple(x.shape))
    packed = which.encode(x)
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        which.encode(x)
        middle = time.process_time()
        decoded = which.decode(packed, spec)
        times.append((middle - start, time.process_time() - middle))
    wide = x.double()
    error = (decoded.double() - wide).norm() / wide.norm()
    encode, decode = (min(column) / x.numel() * 1e9 for column in zip(*times, strict=True))
    return {
        "codec": name,
        "bits_per_element": round(8 * packed.numel() / x.numel(), 5),
        "relative_error": float(f"{error.item():.4g}"),
        "encode_cpu_nanoseconds_per_element": round(encode, 1),
        "decode_cpu_nanoseconds_per_element": round(decode, 1),
    }


def summary(row: dict[str, Any]) -> str:
    return f"{row['codec']} {row['bits_per_element']:.3f} bits {row['relative_error']:.4f};"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every codec on real boundary tensors.")
    add_boundary_data(parser)
    parser.add_argument("--json", type=Path, default=OUT)
    arguments = parser.parse_args()
    files = boundary_files(parser, arguments.data)
    torch.set_num_threads(1)

    fixed = [name for name in codec_names() if not name.startswith("trellis")]
    names = [*fixed, *(f"trellis-{rate}" for rate in RATES)]
    rows = []
    load = os.getloadavg()[0]
    for file in files:
        for key, x in sorted(load_file(file).items()):
            if not key.startswith(("activation", "gradient")):
                continue
            step = file.stem.removeprefix("boundaries-")
            for name in names:
                rows.append({"tensor": f"{step} {key}", **measure(name, x)})
            by_name = {row["codec"]: row for row in rows[-len(names) :]}
            shown = ("tah", "fixed-4", "trellis-3.45", "trellis-4.25", "trellis-4.41")
            print(f"{step} {key}:", *(summary(by_name[name]) for name in shown), flush=True)
    report = {
        "experiment": "boundary_error",
        "commit": commit(),
        "cores": os.cpu_count(),
        "load_before": load,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "runs": RUNS,
        "threads": os.environ.get("OMP_NUM_THREADS", "any"),
        "results": rows,
    }
    # One result per line.
    lines = json.dumps(report, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    arguments.json.write_text(lines + "\n")


if __name__ == "__main__":
    main()
