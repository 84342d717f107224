"""What attention within documents and windows costs: `python -m scripts.bench.documents [--out PATH]`.

On a GPU: forward and backward of attention alone at a Llama 8B's shape, for samples of one document, of
documents of so many tokens, and with sliding windows, beside attention without limits and torch's with a
mask. Median of the runs.
"""

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention.ops import attention, attention_backward
from kernels.attention.reach import EVERYTHING, Documents, Reach
from node.lab.results import commit
from scripts.report import RESULTS, version, write

OUT = RESULTS / "documents.json"
BATCH, HEADS, KEYS, WIDTH = 2, 32, 8, 128


def main() -> int:
    parser = argparse.ArgumentParser(description="Time attention within documents and windows.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU")
    device, length = torch.device("cuda"), arguments.length
    whole = torch.zeros(BATCH, length, dtype=torch.bool)
    ways: dict[str, Reach] = {
        "no limit": EVERYTHING,
        "one document a sample": Reach(documents=Documents.of(whole, device)),
        **{
            f"documents of {size} tokens": Reach(documents=Documents.of(every(whole, size), device))
            for size in (2048, 512, 128)
        },
        **{f"window of {size}": Reach(window=size) for size in (1024, 512)},
    }
    found = {}
    for name, reach in ways.items():
        found[name] = timed(length, reach, arguments.runs)
        print(name, found[name], flush=True)
    seen = ways["documents of 512 tokens"]
    found["documents of 512 tokens, torch with a mask"] = masked(length, seen, arguments.runs)
    report: dict[str, Any] = {
        "experiment": "documents",
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
        "runs": arguments.runs,
        "shape": {"batch": BATCH, "heads": HEADS, "kv_heads": KEYS, "width": WIDTH, "length": length},
        "milliseconds": found,
    }
    write(arguments.out, report)
    print(json.dumps(found, indent=1))
    return 0


def every(whole: torch.Tensor, size: int) -> torch.Tensor:
    """Documents that begin at every `size`-th token."""
    starts = whole.clone()
    starts[:, ::size] = True
    return starts


def heads(length: int) -> list[torch.Tensor]:
    """Queries, keys, values and a gradient of the result."""
    made = torch.Generator("cuda").manual_seed(1)
    return [
        torch.randn(BATCH, length, count, WIDTH, generator=made, device="cuda").bfloat16().transpose(1, 2)
        for count in (HEADS, KEYS, KEYS, HEADS)
    ]


def timed(length: int, reach: Reach, runs: int) -> dict[str, float]:
    """Milliseconds of forward and of backward."""
    query, key, value, grad = heads(length)
    out, sums = attention(query, key, value, reach)
    return {
        "forward": median(lambda: attention(query, key, value, reach), runs),
        "backward": median(lambda: attention_backward(grad, query, key, value, out, sums, reach), runs),
    }


def masked(length: int, reach: Reach, runs: int) -> dict[str, float]:
    """The same by torch's attention with a mask of all pairs."""
    query, key, value, grad = heads(length)
    leaves = [
        query.requires_grad_(),
        *(part.repeat_interleave(HEADS // KEYS, 1).requires_grad_() for part in (key, value)),
    ]
    seen = reach.allowed(length, query.device)
    out = F.scaled_dot_product_attention(*leaves, attn_mask=seen)
    return {
        "forward": median(lambda: F.scaled_dot_product_attention(*leaves, attn_mask=seen), runs),
        "backward": median(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True), runs),
    }


def median(work: Any, runs: int) -> float:
    """Milliseconds of a call."""
    taken = []
    for _ in range(runs + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[3:])


if __name__ == "__main__":
    sys.exit(main())
