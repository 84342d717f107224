"""Other launches of the kernels: their speed, and whether their bits are the CPU's."""

import statistics
import time
import traceback
from typing import Any

import torch

from gpu_codecs.calls import calls
from gpu_codecs.tensors import sample
from gpu_codecs.timing import SHAPES, graph_seconds
from kernels.common.dispatch import Launch
from wire.codecs.registry import codec
from wire.spec import TensorSpec


def sweep(runs: int, deadline: float) -> list[dict[str, Any]]:
    """Other launches of the large size, and whether their bits are the CPU's."""
    tensors = [sample(SHAPES["large"], seed).bfloat16() for seed in range(3)]
    host = tensors[0].cpu()
    whole = {name: codec(name).encode(host) for name in ("fixed-4", "tah")}
    wanted = {name: packed[64:].cuda() for name, packed in whole.items()}
    spec = TensorSpec(host.dtype, tuple(host.shape))
    values = {name: codec(name).decode(packed, spec).cuda() for name, packed in whole.items()}
    shapes = [(16, 1), (32, 1), (32, 2), (64, 4), (128, 4)]
    plans: list[tuple[str, str, dict[str, Any]]] = []
    for plan in shapes:
        plans.append(("fixed-4", "encode", {"launch": Launch(*plan)}))
        plans.append(("fixed-4", "decode", {"launch": Launch(*plan)}))
        plans.append(("tah", "encode", {"quantize": Launch(*plan)}))
        plans.append(("tah", "decode", {"launch": Launch(*plan)}))
    for plan in ((64, 2), (64, 4), (128, 4)):
        plans.append(("tah", "encode", {"measure": Launch(*plan)}))
        plans.append(("tah", "encode", {"measure": Launch(*plan), "look_up": False}))
    for plan in ((4096, 8), (2048, 16), (4096, 32), (8192, 32)):
        plans.append(("tah", "encode", {"select": Launch(*plan)}))
    for plan in ((2048, 8), (4096, 16), (4096, 32), (8192, 32)):
        plans.append(("fixed-4", "encode", {"finish": Launch(*plan)}))
    rows = []
    for name, way, options in plans:
        if time.monotonic() > deadline:
            print(f"no time left for {name} {way} {options}", flush=True)
            continue
        row: dict[str, Any] = {"codec": name, "way": way, "options": str(options)}
        try:
            made = [calls(name, x, **{way: options}) for x in tensors]
            for steps, _, _ in made:
                steps[0]()
                steps[1]()
            right = bool(torch.equal(made[0][1], wanted[name]))
            taken = graph_seconds([steps[way == "decode"] for steps, _, _ in made], runs)
            row |= {"microseconds": statistics.median(taken) * 1e6, "bits_equal": right}
            if way == "decode":
                row["bits_equal"] = right and bool(
                    torch.equal(made[0][2].view(torch.int16), values[name].view(torch.int16))
                )
            if not row["bits_equal"]:
                print(f"FAILED: bits differ: {row}", flush=True)
        except Exception:
            row["failed"] = traceback.format_exc()[-800:]
            print(f"FAILED: {row}", flush=True)
        rows.append(row)
    return rows
