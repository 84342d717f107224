"""A stage of Qwen3-30B-A3B's shape with frozen experts, on one GPU: `python -m scripts.bench.mixture_stage`.

Random weights. Reports the seconds of a microbatch forward and backward, with adapters of rank 8 on all
projections, and the most memory that tensors took.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from node.config.schema import LoraSection
from node.lab.results import commit
from node.model.chunk import build_chunk, compute_precision
from node.model.storage import PRESETS
from node.model.units import block_name
from node.stage.machine_info import fix_order
from scripts.experiments.capped_run import QWEN3_30B_A3B
from scripts.report import RESULTS, write

OUT = RESULTS / "mixture_stage.json"
WARM, ROUNDS = 2, 5


class Stage:
    """One stage of `blocks` blocks."""

    def __init__(self, blocks: int, base: str, storage: str, device: torch.device) -> None:
        self._device = device
        units = [block_name(index) for index in range(blocks)]
        lora = LoraSection(rank=8, base=base)
        began = time.perf_counter()
        self._chunk = build_chunk(
            QWEN3_30B_A3B, units, 0, device, weights_in=torch.float32, storage=PRESETS[storage], lora=lora
        )
        torch.cuda.synchronize(device)
        self._facts = {
            "blocks": blocks,
            "base": base,
            "storage": storage,
            "build_seconds": time.perf_counter() - began,
            "held_bytes": torch.cuda.memory_allocated(device),
            "peak_built_bytes": torch.cuda.max_memory_allocated(device),
        }

    def measured(self, samples: int) -> dict[str, Any]:
        """A microbatch of so many samples."""
        device = self._device
        torch.cuda.reset_peak_memory_stats(device)
        generator = torch.Generator(device).manual_seed(1)
        shape = samples, QWEN3_30B_A3B.sequence, QWEN3_30B_A3B.hidden
        x = torch.randn(shape, device=device, generator=generator).requires_grad_()
        above = torch.randn(shape, device=device, generator=generator) / QWEN3_30B_A3B.sequence
        seconds: list[tuple[float, float]] = []
        for _ in range(WARM + ROUNDS):
            torch.cuda.synchronize(device)
            first = time.perf_counter()
            with compute_precision("bfloat16", device):
                made = self._chunk(x)
            torch.cuda.synchronize(device)
            second = time.perf_counter()
            torch.autograd.backward(made, above)
            torch.cuda.synchronize(device)
            seconds.append((second - first, time.perf_counter() - second))
        forward, backward = (sorted(kind)[ROUNDS // 2] for kind in zip(*seconds[WARM:], strict=True))
        tokens = samples * QWEN3_30B_A3B.sequence
        return self._facts | {
            "tokens": tokens,
            "peak_bytes": torch.cuda.max_memory_allocated(device),
            "forward_seconds": forward,
            "backward_seconds": backward,
            "tokens_per_second": tokens / (forward + backward),
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--base", nargs="+", default=["4"])
    parser.add_argument("--storage", default="agoq")
    parser.add_argument("--samples", nargs="+", type=int, default=[1], help="of a microbatch")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    fix_order(device)
    rows = []
    for base in args.base:
        stage = Stage(args.blocks, base, args.storage, device)
        for samples in args.samples:
            rows.append(stage.measured(samples))
            print(json.dumps(rows[-1]), flush=True)
        del stage
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    write(
        args.out,
        {
            "commit": commit(),
            "hardware": torch.cuda.get_device_name(device),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "runs": ROUNDS,
            "rows": rows,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
