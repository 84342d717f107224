"""Memory and speed of a block's stored activations: `python -m scripts.bench_stored_activations --out PATH`.

Needs an NVIDIA GPU. First the kernels' bits against the CPU's reference, and gradients against plain blocks;
then blocks of known models, weights in bfloat16, forward and backward under bfloat16 autocast, activations
kept in these ways:

    bf16        what autograd keeps of the plain block
    bf16, cuDNN the same with cuDNN's attention, which torch prefers here, and whose sums have no fixed order
    selective   torch's selective checkpointing: matrix products and attention kept, the rest computed again
    full        torch.utils.checkpoint around each block
    agoq        `storage.preset = "agoq"`
    compact     `storage.preset = "compact"`

Held bytes are what the allocator has given out after the forward pass of several blocks and not before, a
block; saved bytes are those of the tensors in the autograd graph, by hooks, where checkpointing does not hide
them. The peak is the allocator's, above weights, their gradients and one input. Ways take turns, so that
their times are of one run; a time is the median. All but one run FlashAttention, in a fixed order of sums,
as a node does. Shapes for which there was no time keep the rows of the report that was there, and its commit.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from node.lab.results import commit
from node.model.storage import PRESETS, Storage
from node.stage.machine_info import fix_order

# Run with `-m`, or by its path: its parts are found either way.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from stored_activations.check import check
from stored_activations.measure import measure

PLAN = (("F = 4 H", 8), *((name, k) for k in (8, 32, 64, 16) for name in ("LLaMA2-13B", "LLaMA3-8B")))
"""Shapes, and thousands (1024) of tokens, those first that matter most if time runs out."""
WAYS = ("bf16", "bf16, cuDNN", "selective", "full", "agoq", "compact")


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and speed of a block's stored activations.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no more measurements after this")
    parser.add_argument(
        "--thousands", type=int, nargs="+", default=[8, 32, 64, 16], help="of tokens; default all of these"
    )
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument(
        "--storage", action="append", default=[], help="one more way: NAME=kind:form,kind:form"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    start = time.monotonic()
    fix_order(torch.device("cuda"))
    # Checkpointing computes again outside the forward pass's context.
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = True
    failed = check()
    settings.fill_uninitialized_memory = False
    print(f"checks: {failed} failed, {time.monotonic() - start:.1f} s", flush=True)
    if arguments.check_only:
        return 1 if failed else 0
    ways: dict[str, Storage | None] = {way: PRESETS.get(way) for way in WAYS}
    ways |= dict(map(_named_storage, arguments.storage))
    earlier = earlier_rows(arguments.out)
    rows = []
    for name, thousands in (part for part in PLAN if part[1] in arguments.thousands):
        if time.monotonic() - start > arguments.seconds:
            print(f"no time for {name} at {thousands}K tokens", flush=True)
        else:
            rows += measure(name, thousands * 1024, ways)
        _write(arguments.out, rows + left(earlier, rows), failed)
    return 1 if failed else 0


def left(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of shapes and lengths that were not measured again."""
    again = {(row["shape"], row["tokens"]) for row in rows}
    return [row for row in earlier if (row["shape"], row["tokens"]) not in again]


def earlier_rows(out: Path | None) -> list[dict[str, Any]]:
    """Rows of the report that is there, each with the commit that it was measured at."""
    if out is None or not out.exists():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    return [{"commit": report["commit"], **row} for row in report["rows"]]


def _write(out: Path | None, rows: list[dict[str, Any]], failed: int) -> None:
    """The report so far: its process may be ended before the last shape."""
    if out is None:
        return
    report = {
        "experiment": "stored_activations",
        "rows": rows,
        "failed_checks": failed,
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": _triton(),
            "python": platform.python_version(),
        },
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _named_storage(text: str) -> tuple[str, Storage]:
    name, _, forms = text.partition("=")
    return name, Storage(**dict(pair.split(":") for pair in forms.split(",")))


def _triton() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
