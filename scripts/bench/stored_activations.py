"""Memory and speed of a block by stored activations: `python -m scripts.bench.stored_activations --out PATH`.

Needs an NVIDIA GPU. Measures blocks of known models, weights in bfloat16, forward and backward under bfloat16
autocast, with activations stored in these ways (tests/gpu/test_gpu_storage.py compares the kernels' bits and
the blocks' gradients):

    bf16        what autograd saves in the plain block
    off         `storage.preset = "off"`: the fused halves of a block, nothing packed
    bf16, cuDNN the same with cuDNN's attention, torch's default here; its sums have no fixed order
    selective   torch's selective checkpointing: saves matrix products and attention, recomputes the rest
    full        torch.utils.checkpoint around each block
    agoq        `storage.preset = "agoq"`
    compact     `storage.preset = "compact"`

Held bytes are the growth of allocated memory during the forward pass of several blocks, per block. Saved
bytes are those of the tensors in the autograd graph, counted by hooks unless checkpointing hides them. The
peak is the allocator's, above weights, their gradients and one input. Ways take turns in one run; a time is
the median. All but `bf16, cuDNN` use FlashAttention with a fixed order of sums, as a node does. Shapes that
the time limit leaves out keep the rows and the commit of the existing report.
"""

import argparse
import functools
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from node.config.schema import ModelSection, TrainingSection
from node.lab.results import commit
from node.model.chunk import FAMILY_BLOCKS
from node.model.storage import PRESETS, Storage, stored_bytes
from node.model.tensor_rank import TensorRank
from node.stage.machine_info import fix_order

PLAN = (("F = 4 H", 8), *((name, k) for k in (8, 32, 64, 16) for name in ("LLaMA2-13B", "LLaMA3-8B")))
"""Shapes, and tokens in units of 1024, the most important first in case time runs out."""
WAYS = ("bf16", "off", "bf16, cuDNN", "selective", "full", "agoq", "compact")


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and speed of a block's stored activations.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no more measurements after this")
    parser.add_argument(
        "--thousands", type=int, nargs="+", default=[8, 32, 64, 16], help="of tokens; default all of these"
    )
    parser.add_argument(
        "--storage", action="append", default=[], help="one more way: NAME=kind:form,kind:form"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    start = time.monotonic()
    fix_order(torch.device("cuda"))
    # Checkpointing recomputes outside the forward pass's context.
    torch.backends.cuda.enable_cudnn_sdp(False)
    ways: dict[str, Storage | None] = {way: PRESETS.get(way) for way in WAYS}
    ways |= dict(map(_named_storage, arguments.storage))
    earlier = earlier_rows(arguments.out)
    rows = []
    for name, thousands in (part for part in PLAN if part[1] in arguments.thousands):
        if time.monotonic() - start > arguments.seconds:
            print(f"no time for {name} at {thousands}K tokens", flush=True)
        else:
            rows += measure(name, thousands * 1024, ways)
        _write(arguments.out, rows + left(earlier, rows))
    return 0


def random_block(model: ModelSection, storage: Storage) -> nn.Module:
    """A block with random weights drawn on the GPU; no measurement depends on their values."""
    device = torch.device("cuda")
    made = FAMILY_BLOCKS[model.family]
    tables = made.tables(model, device)
    with torch.device("cuda"):
        block = made(model, 0, tables, storage, TensorRank())
    generator = torch.Generator(device="cuda").manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim > 1:
                parameter.data = (
                    0.02 * torch.randn(parameter.shape, generator=generator, device="cuda")
                ).bfloat16()
            else:
                parameter.fill_(1.0)
            parameter.grad = None
    return block


def left(earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of shapes and lengths that this run did not measure."""
    again = {(row["shape"], row["tokens"]) for row in rows}
    return [row for row in earlier if (row["shape"], row["tokens"]) not in again]


def earlier_rows(out: Path | None) -> list[dict[str, Any]]:
    """Rows of the existing report, each with the commit it was measured at."""
    if out is None or not out.exists():
        return []
    report = json.loads(out.read_text(encoding="utf-8"))
    return [{"commit": report["commit"], **row} for row in report["rows"]]


def _write(out: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the report so far: the process may be killed before the last shape."""
    if out is None:
        return
    report = {
        "experiment": "stored_activations",
        "rows": rows,
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


SHAPES = {
    "F = 4 H": ModelSection(layers=1, hidden=4096, heads=32, kv_heads=32, ffn=16384),
    "LLaMA2-13B": ModelSection(layers=1, hidden=5120, heads=40, kv_heads=40, ffn=13824),
    "LLaMA3-8B": ModelSection(layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336),
}
"""One block of each shape; the first is that of the paper's table 1."""
UNORDERED = "bf16, cuDNN"
"""The way whose backward has no fixed order of sums."""
BLOCKS = 4
KEPT_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


def measure(name: str, tokens: int, ways: dict[str, Storage | None]) -> list[dict[str, Any]]:
    """Measure all ways in turns, at one shape and length."""
    shape = SHAPES[name]
    model = ModelSection(**{**vars(shape), "sequence": tokens})
    repeats = 5 if tokens <= 16384 else 3
    rows = []
    runs: dict[str, functools.partial[Tensor]] = {}
    blocks = [random_block(model, Storage()) for _ in range(BLOCKS)]
    source = torch.randn(1, tokens, model.hidden, device="cuda")
    upstream = torch.randn_like(source)
    unit = 2 * tokens * model.hidden
    for way, storage in ways.items():
        runs[way] = functools.partial(_forward, blocks, way, storage or Storage())
    facts = {}
    for way, run in runs.items():
        gc.collect()
        try:
            with _order_of(way):
                facts[way] = _memory(run, blocks, source, upstream)
        except torch.OutOfMemoryError:
            print(f"{name} {tokens} {way}: does not fit", flush=True)
            _free(blocks)
    times: dict[str, list[float]] = {way: [] for way in facts}
    for _ in range(repeats):
        for way in times:
            with _order_of(way):
                times[way].append(_seconds(runs[way], source, upstream))
    for way, fact in facts.items():
        seconds = statistics.median(times[way])
        storage = ways[way]
        row = {
            "shape": name,
            "tokens": tokens,
            "way": way,
            "storage": None if storage is None else vars(storage),
            "blocks": BLOCKS,
            "unit_bytes": unit,
            **fact,
            "counted_bytes": _counted(model, storage),
            "seconds": seconds,
            "times": times[way],
            "tokens_per_second": tokens / seconds * BLOCKS,
        }
        rows.append(row)
        saved = fact["saved_bytes"]
        print(
            f"{name:11} {tokens:6} {way:12} held {fact['held_bytes'] / unit:6.2f} U"
            f"  saved {'-' if saved is None else f'{saved / unit:.3f}'} U"
            f"  peak {fact['peak_bytes'] / 2**30:7.2f} GiB  {1e3 * seconds / BLOCKS:8.2f} ms a block",
            flush=True,
        )
    del runs, blocks, source, upstream
    gc.collect()
    torch.cuda.empty_cache()
    return rows


@contextmanager
def _order_of(way: str) -> Iterator[None]:
    """Whether torch refuses operations without a fixed order of sums."""
    torch.use_deterministic_algorithms(way != UNORDERED)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def _forward(blocks: list[nn.Module], way: str, storage: Storage, x: Tensor) -> Tensor:
    backend = SDPBackend.CUDNN_ATTENTION if way == UNORDERED else SDPBackend.FLASH_ATTENTION
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(backend):
        for block in blocks:
            block.storage, block.fuses = storage, way == "off"
            if way == "full":
                x = checkpoint(block, x, use_reentrant=False)
            elif way == "selective":
                contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
    return x


def _policy(_: object, operator: object, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def _memory(
    run: functools.partial[Tensor],
    blocks: list[nn.Module],
    source: Tensor,
    upstream: Tensor,
) -> dict[str, Any]:
    # The first call compiles and allocates the weights' gradients.
    torch.autograd.backward(run(source.clone().requires_grad_()), upstream)
    torch.cuda.synchronize()
    leaf = source.detach().requires_grad_()
    before = torch.cuda.memory_allocated()
    # Pass a copy of the leaf, so that the input is held only if the graph holds it. Keep the result: saved
    # tensors of Python functions are freed with it.
    result = run(leaf * 1)
    held = torch.cuda.memory_allocated() - before - result.nbytes
    del result, leaf
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.backward(run(source.clone().requires_grad_()), upstream)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    saved = _saved(run, blocks, source) if run.args[1] not in ("full", "selective") else None
    return {
        "held_bytes": held / len(blocks),
        "peak_bytes": peak,
        "saved_bytes": None if saved is None else saved / len(blocks),
    }


def _saved(run: Callable[[Tensor], Tensor], blocks: list[nn.Module], source: Tensor) -> int:
    """Bytes of all storages that the graph saves, without weights and tables."""
    own = {
        tensor.untyped_storage().data_ptr()
        for block in blocks
        for tensor in (*block.parameters(), *block.buffers())
    }
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        # A graph that saves its own result directly is a cycle and never freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(source.clone().requires_grad_())
    # All of them are alive until here, so no two share an address.
    del result
    return sum(size for place, size in kept.items() if place not in own)


def _seconds(run: Callable[[Tensor], Tensor], source: Tensor, upstream: Tensor) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    leaf = source.detach().requires_grad_()
    # Checkpointing leaves cycles, which hold what selective checkpointing saved.
    gc.collect()
    torch.cuda.synchronize()
    first.record()
    torch.autograd.backward(run(leaf), upstream)
    last.record()
    torch.cuda.synchronize()
    leaf.grad = None
    return first.elapsed_time(last) / 1e3


def _counted(model: ModelSection, storage: Storage | None) -> int | None:
    """The estimate of `thinwire config explain`."""
    if storage is None:
        return None
    return stored_bytes(model, TrainingSection(precision="bfloat16"), storage, samples=1).total


def _free(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
