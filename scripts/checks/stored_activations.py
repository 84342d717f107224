"""Compare the packing kernels with the CPU's reference bit for bit, and gradients with plain blocks."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import ops as blockfloat_ops
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import WIDTHS
from node.config.schema import ModelSection
from node.model.chunk import FAMILY_BLOCKS
from node.model.storage import PRESETS, Storage
from node.model.tensor_rank import TensorRank


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


def check() -> int:
    """Print the failures; return their number."""
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
            for part, want in zip((found, there), (wanted, on_cpu), strict=True):
                that(_near(part, want), what + ", backward")


def _check_block(family: str, name: str, that: Callable[[bool, str], None]) -> None:
    """Check that a block on the GPU repeats its bits, with gradients near those of the plain block."""
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
    for part, tensor in stored.items():
        count, distance = int((tensor != again[part]).sum()), _distance(again[part], tensor)
        off = f"{count} of {tensor.numel()} elements of {part}, by {distance:.1e}"
        that(torch.equal(tensor, again[part]), f"{what}: other bits the second time: {off}")
    distances = {part: _distance(tensor, plain[part]) for part, tensor in stored.items()}
    far = {part: f"{distance:.3f}" for part, distance in distances.items()}
    that(distances["result"] < 0.004 and max(distances.values()) < 0.25, f"{what}: {far}")


def _gradients(model: ModelSection, storage: Storage, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """The block's result and all gradients, by name."""
    block = random_block(model, storage)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result = block(leaf)
    torch.autograd.backward(result, grad)
    gradients = {"x": leaf.grad, **{name: parameter.grad for name, parameter in block.named_parameters()}}
    return {
        "result": result.detach(),
        **{name: part for name, part in gradients.items() if part is not None},
    }


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def _distance(part: Tensor, wanted: Tensor) -> float:
    part, wanted = part.double().cpu(), wanted.double().cpu()
    return float((part - wanted).norm() / wanted.norm().clamp_min(1e-300)) if wanted.numel() else 0.0


def _near(part: Tensor, wanted: Tensor) -> bool:
    return part.shape == wanted.shape and part.dtype == wanted.dtype and _distance(part, wanted) < 5e-6
