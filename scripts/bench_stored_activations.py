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
their times are of one run; a time is the median. All but one run FlashAttention, in a fixed order of sums.
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
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernels import blockfloat, blockfloat_layers, blockfloat_ops
from kernels.blockfloat_layout import WIDTHS
from node.config.schema import ModelSection, TrainingSection
from node.lab.results import commit
from node.model.blocks import Gpt2Block, LlamaBlock, Rotary
from node.model.storage import PRESETS, Storage, stored_bytes
from node.model.tensor_rank import TensorRank

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "F = 4 H": ModelSection(layers=1, hidden=4096, heads=32, kv_heads=32, ffn=16384),
    "LLaMA2-13B": ModelSection(layers=1, hidden=5120, heads=40, kv_heads=40, ffn=13824),
    "LLaMA3-8B": ModelSection(layers=1, hidden=4096, heads=32, kv_heads=8, ffn=14336),
}
"""A block of each; the first is the shape of the paper's table 1."""
PLAN = (("F = 4 H", 8), *((name, k) for k in (8, 32, 64, 16) for name in ("LLaMA2-13B", "LLaMA3-8B")))
"""Shapes, and thousands (1024) of tokens, those first that matter most if time runs out."""
KEPT_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}
WAYS = ("bf16", "bf16, cuDNN", "selective", "full", "agoq", "compact")


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory and speed of a block's stored activations.")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--seconds", type=float, default=90.0, help="start no more measurements after this")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument(
        "--storage", action="append", default=[], help="one more way: NAME=kind:form,kind:form"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 2
    start = time.monotonic()
    torch.use_deterministic_algorithms(True, warn_only=True)
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
    rows = []
    for name, thousands in PLAN:
        if time.monotonic() - start > arguments.seconds:
            print(f"no time for {name} at {thousands}K tokens", flush=True)
            continue
        rows += measure(name, thousands * 1024, ways)
    report = {
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
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


# --- bits ------------------------------------------------------------------------------------------------


def check() -> int:
    """Print what is wrong; return how many things are."""
    failed = 0

    def that(good: bool, what: str) -> None:
        nonlocal failed
        if not good:
            failed += 1
            print("FAILED:", what, flush=True)

    for name, x in _cases():
        for bits in WIDTHS:
            packed = blockfloat.pack(x, bits)
            finite = bool(x.isfinite().all())
            if bits == 16 and not finite:
                continue
            made = blockfloat_ops.store(x.cuda(), bits)
            that(torch.equal(made.cpu(), packed), f"{name}, {bits} bits, packed")
            for dtype in (torch.float32, torch.bfloat16):
                expected = blockfloat.unpack(packed, x.shape, bits, dtype)
                back = blockfloat_ops.restore(made, list(x.shape), bits, dtype).cpu()
                same = (_bits(back) == _bits(expected)) | (back.isnan() & expected.isnan())
                that(bool(same.all()), f"{name}, {bits} bits, restored as {dtype}")
    for width in (5120, 200, 256):
        _check_layers(width, that)
    for family in ("llama", "gpt2"):
        for name in ("agoq", "compact"):
            _check_block(family, name, that)
    return failed


def _cases() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = normal(200, 512)
    x[3], x[6, 130] = 0, 300
    x[4] *= 1e-33
    x[5] *= 1e30
    yield "mixed", x
    yield "mixed bf16", x.bfloat16()
    yield "mixed fp16", normal(50, 384).half()
    yield "odd", normal(7, 33, 200) ** 3
    yield "columns", normal(300, 512)[:, 64:200]
    yield "narrow", normal(90, 1)
    yield "vector", normal(1000)
    yield "ties", torch.randint(-12, 13, (100, 128), generator=generator).float()
    yield "many", normal(3000, 1024).bfloat16()
    x = normal(60, 300)
    x[0, 3], x[1, 200] = torch.nan, torch.inf
    x[2] = 1e38
    yield "not finite", x


def _check_layers(width: int, that: Callable[[bool, str], None]) -> None:
    generator = torch.Generator().manual_seed(width)
    x, grad, residual = (torch.randn(3, 101, width, generator=generator) for _ in range(3))
    weight = 1 + 0.1 * torch.randn(width, generator=generator)
    for bias in (None, 0.1 * torch.randn(width, generator=generator)):
        on_gpu = None if bias is None else bias.cuda()
        for bits in (4, 5, 16):
            what = f"norm, width {width}, {bits} bits, {'RMS' if bias is None else 'layer'}"
            normed, packed = blockfloat_layers.norm_store(x, weight, bias, 1e-5, bits, torch.float32)
            made = blockfloat_ops.norm_store(x.cuda(), weight.cuda(), on_gpu, 1e-5, bits, torch.float32)
            that(torch.equal(made[1].cpu(), packed), what + ", packed")
            that(_near(made[0], normed), what + ", normed")
            expected = blockfloat_layers.norm_backward(grad, packed, residual, weight, bias, 1e-5, bits)
            inputs = (grad.cuda(), made[1], residual.cuda(), weight.cuda(), on_gpu, 1e-5, bits)
            got, again = blockfloat_ops.norm_backward(*inputs), blockfloat_ops.norm_backward(*inputs)
            for part, twice, want in zip(got, again, expected, strict=True):
                that(_near(part, want) and torch.equal(part, twice), what + ", backward")
    for gated in (True, False):
        for bits in (3, 4, 8):
            what = f"{'SwiGLU' if gated else 'GELU'}, width {width}, {bits} bits"
            gate, up = x, residual if gated else None
            wide = [None if part is None else part.cuda() for part in (gate, up)]
            expected_ffn = blockfloat_layers.ffn_store(gate, up, bits)
            made_ffn = blockfloat_ops.ffn_store(wide[0], wide[1], bits)
            that(_near(made_ffn[0], expected_ffn[0]), what)
            for part, want in zip(made_ffn[1:], expected_ffn[1:], strict=True):
                that(torch.equal(part.cpu(), want), what + ", packed")
            on_cpu, there = grad.clone(), grad.cuda()
            second = expected_ffn[2] if gated else None
            wanted = blockfloat_layers.ffn_backward(on_cpu, expected_ffn[1], second, bits)
            found = blockfloat_ops.ffn_backward(there, made_ffn[1], made_ffn[2] if gated else None, bits)
            for part, want in zip((*found, there), (*wanted, on_cpu), strict=True):
                that(_near(part, want), what + ", backward")


def _check_block(family: str, name: str, that: Callable[[bool, str], None]) -> None:
    """A block on the GPU: the same bits twice, and gradients near those of the plain block."""
    model = ModelSection(
        family=family,
        layers=1,
        hidden=512,
        heads=8,
        kv_heads=8 if family == "gpt2" else 2,
        ffn=1376,
        sequence=300,
    )
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(2, 300, 512, generator=generator, device="cuda")
    grad = torch.randn(2, 300, 512, generator=generator, device="cuda")
    results = [_gradients(model, storage, x, grad) for storage in (Storage(), PRESETS[name], PRESETS[name])]
    plain, stored, again = results
    what = f"{family} block, {name}"
    for part, twice in zip(stored, again, strict=True):
        that(torch.equal(part, twice), what + ": other bits the second time")
    distances = [_distance(part, want) for part, want in zip(stored, plain, strict=True)]
    that(distances[0] < 0.004 and max(distances) < 0.25, f"{what}: {[f'{d:.3f}' for d in distances]}")


def _gradients(model: ModelSection, storage: Storage, x: Tensor, grad: Tensor) -> list[Tensor]:
    block = _block(model, storage)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result = block(leaf)
    torch.autograd.backward(result, grad)
    gradients = [leaf.grad, *(parameter.grad for parameter in block.parameters())]
    return [result.detach(), *(part for part in gradients if part is not None)]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _distance(part: Tensor, wanted: Tensor) -> float:
    part, wanted = part.double().cpu(), wanted.double().cpu()
    return float((part - wanted).norm() / wanted.norm().clamp_min(1e-300)) if wanted.numel() else 0.0


def _near(part: Tensor, wanted: Tensor) -> bool:
    return part.shape == wanted.shape and part.dtype == wanted.dtype and _distance(part, wanted) < 5e-6


# --- memory and time -------------------------------------------------------------------------------------


def measure(name: str, tokens: int, ways: dict[str, Storage | None]) -> list[dict[str, Any]]:
    """Every way, in turns, at one shape and length."""
    shape = SHAPES[name]
    model = ModelSection(**{**vars(shape), "sequence": tokens})
    count, repeats = (4, 5) if tokens <= 16384 else (2, 3)
    rows = []
    runs: dict[str, Callable[[Tensor], Tensor]] = {}
    blocks = [_block(model, Storage()) for _ in range(count)]
    source = torch.randn(1, tokens, model.hidden, device="cuda")
    upstream = torch.randn_like(source)
    unit = 2 * tokens * model.hidden
    for way, storage in ways.items():
        runs[way] = functools.partial(_forward, blocks, way, storage or Storage())
    facts = {}
    for way, run in runs.items():
        try:
            facts[way] = _memory(run, blocks, source, upstream, count)
        except torch.OutOfMemoryError:
            print(f"{name} {tokens} {way}: does not fit", flush=True)
            _free(blocks)
    times: dict[str, list[float]] = {way: [] for way in facts}
    for _ in range(repeats):
        for way in times:
            times[way].append(_seconds(runs[way], source, upstream))
    for way, fact in facts.items():
        seconds = statistics.median(times[way])
        storage = ways[way]
        row = {
            "shape": name,
            "tokens": tokens,
            "way": way,
            "storage": vars(storage) if storage is not None and not storage.is_off else None,
            "blocks": count,
            "unit_bytes": unit,
            **fact,
            "counted_bytes": _counted(model, storage),
            "seconds": seconds,
            "times": times[way],
            "tokens_per_second": tokens / seconds * count,
        }
        rows.append(row)
        saved = fact["saved_bytes"]
        print(
            f"{name:11} {tokens:6} {way:12} held {fact['held_bytes'] / unit:6.2f} U"
            f"  saved {'-' if saved is None else f'{saved / unit:.3f}'} U"
            f"  peak {fact['peak_bytes'] / 2**30:7.2f} GiB  {1e3 * seconds / count:8.2f} ms a block",
            flush=True,
        )
    del runs, blocks, source, upstream
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def _block(model: ModelSection, storage: Storage) -> nn.Module:
    """A block with random weights drawn on the GPU: what is measured does not depend on them."""
    device = torch.device("cuda")
    block: nn.Module
    if model.family == "gpt2":
        with torch.device("cuda"):
            block = Gpt2Block(model, storage, TensorRank())
    else:
        rotary = Rotary(model.sequence, model.hidden // model.heads, model.rope_theta, device)
        with torch.device("cuda"):
            block = LlamaBlock(model, rotary, storage, TensorRank())
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


def _forward(blocks: list[nn.Module], way: str, storage: Storage, x: Tensor) -> Tensor:
    backend = SDPBackend.CUDNN_ATTENTION if way == "bf16, cuDNN" else SDPBackend.FLASH_ATTENTION
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(backend):
        for block in blocks:
            block.storage = storage
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
    run: Callable[[Tensor], Tensor],
    blocks: list[nn.Module],
    source: Tensor,
    upstream: Tensor,
    count: int,
) -> dict[str, Any]:
    # The first call compiles, and leaves gradients beside the weights.
    torch.autograd.backward(run(source.clone().requires_grad_()), upstream)
    torch.cuda.synchronize()
    leaf = source.detach().requires_grad_()
    before = torch.cuda.memory_allocated()
    # Not the leaf itself, so that the input is held only if the graph holds it. The result must stay: with
    # it a Python function's saved tensors go.
    result = run(leaf * 1)
    held = torch.cuda.memory_allocated() - before - result.nbytes
    del result, leaf
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.backward(run(source.clone().requires_grad_()), upstream)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    saved = _saved(run, blocks, source) if run.args[1] not in ("full", "selective") else None  # type: ignore[attr-defined]
    return {
        "held_bytes": held / count,
        "peak_bytes": peak,
        "saved_bytes": None if saved is None else saved / count,
    }


def _saved(run: Callable[[Tensor], Tensor], blocks: list[nn.Module], source: Tensor) -> int:
    """Bytes of all storages that the graph saves, weights and tables left out."""
    own = {
        tensor.untyped_storage().data_ptr()
        for block in blocks
        for tensor in (*block.parameters(), *block.buffers())
    }
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(source.clone().requires_grad_())
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    del result
    return total


def _seconds(run: Callable[[Tensor], Tensor], source: Tensor, upstream: Tensor) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    leaf = source.detach().requires_grad_()
    leaf.grad = None
    torch.cuda.synchronize()
    first.record()
    torch.autograd.backward(run(leaf), upstream)
    last.record()
    torch.cuda.synchronize()
    leaf.grad = None
    return first.elapsed_time(last) / 1e3


def _counted(model: ModelSection, storage: Storage | None) -> int | None:
    """What `thinwire config explain` says."""
    if storage is None or storage.is_off:
        return None
    return stored_bytes(model, TrainingSection(precision="bfloat16"), storage, samples=1).total


def _free(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()


def _named_storage(text: str) -> tuple[str, Storage]:
    name, _, forms = text.partition("=")
    return name, Storage(**dict(pair.split(":") for pair in forms.split(",")))


def _triton() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
