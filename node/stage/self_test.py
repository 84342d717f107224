"""Tests, before the node gets a stage, whether its device computes correctly what a run needs.

Codecs and stored tensors must have the bits of golden vectors or of the reference on the CPU. Layers,
attention and optimizers must be close to it. If a part's Triton kernels fail, plain torch computes it from
then on, with the same bits where bits are promised. If that fails too, the node is refused, because it would
spoil the run. Results are kept in a file as long as device, driver and program stay the same.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.attention import ops as attention
from kernels.attention import reference as attention_reference
from kernels.attention.reach import EVERYTHING, Reach
from kernels.blockfloat import layers as blockfloat_layers
from kernels.blockfloat import ops as storage
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import APART
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.common.random_bits import random_bits
from kernels.experts import ops as experts
from kernels.experts import reference as experts_reference
from kernels.fp8 import ops as fp8
from kernels.fp8 import products
from kernels.fp8 import reference as fp8_reference
from kernels.fp8 import rows as fp8_rows
from kernels.fp8.reference import Fp8Gradient
from kernels.layers import ops as layers
from kernels.orthogonal import ops as orthogonal
from kernels.orthogonal import reference as orthogonal_reference
from node.config.schema import PLANNED, RunConfig
from node.model.optimizers import OPTIMIZERS
from node.model.storage import KINDS, PACKED, STAGE_BITS
from node.stage.machine_info import arithmetic
from node.tuning.storage_choice import allowed_storages
from wire.codecs.formats import codec_format, known_format, planned_names
from wire.codecs.registry import codec
from wire.errors import RunError
from wire.spec import TensorSpec
from wire.version import VERSION

log = logging.getLogger(__name__)

Check = Callable[[torch.device], bool]

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_HALF_ERROR, _SINGLE_ERROR, _ITERATED_ERROR = 2e-2, 1e-4, 6e-2
"""The allowed relative errors of a tensor: in half precision, in single precision, and after Newton-Schulz
iterations in bfloat16, whose rounding alone is 1.5e-2."""
_CPU = torch.device("cpu")
_FORCED = os.environ.get("THINWIRE_PLAIN", "")
"""The parts that never use kernels, and so are not tested with them."""


def prepared(config: RunConfig, device: torch.device, kept: Path) -> tuple[str, ...]:
    """Test the device and withdraw the kernels that fail. Returns their parts, which are in
    `kernels.common.dispatch.PARTS`. A CPU, which runs the references themselves, is not tested.

    Args:
        kept: the file for results. If it cannot be read or written, it is ignored.

    Raises RunError if something fails without kernels too.
    """
    if device.type == "cpu":
        return ()
    checks = checks_of(config)
    key = _key(device, checks)
    failed = _kept(kept).get(key)
    if failed is None:
        failed = failing_parts(checks, device)
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({**_kept(kept), key: failed}), encoding="utf-8")
    for part in failed:
        dispatch.withdraw(part)
    return tuple(failed)


def failing_parts(checks: dict[str, tuple[str, Check]], device: torch.device) -> list[str]:
    """The parts for which some check fails with kernels and none fails without.

    Raises RunError.
    """
    failed: list[str] = []
    for name, (part, check) in checks.items():
        if _passes(check, device):
            continue
        if part not in failed and dispatch.has_kernels(device, part) and part in dispatch.PARTS:
            failed.append(part)
            dispatch.withdraw(part)
            if _passes(check, device):
                continue
        raise RunError(
            f"this node's device computes {name} incorrectly, even in plain torch: update its driver, or "
            "join with another device or with --device cpu"
        )
    return failed


def words_of(failed: Iterable[str]) -> str:
    """One line for the node's owner; empty if nothing failed."""
    if not (parts := ", ".join(failed)):
        return ""
    return f"kernels ({parts}) give wrong results on this device: plain torch replaces them and is slower"


def _passes(check: Check, device: torch.device) -> bool:
    try:
        return check(device)
    except Exception as error:  # compilers, drivers and codecs raise many types, and none may end the node
        log.warning("a check of the device failed: %s: %s", type(error).__name__, error)
        return False


def _key(device: torch.device, checks: Iterable[str]) -> str:
    drivers = [path.read_text(errors="replace") for path in _DRIVERS if path.exists()]
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = [name, arithmetic(device), VERSION, triton, _FORCED, *drivers, *sorted(checks)]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()


def _kept(path: Path) -> dict[str, list[str]]:
    """The failed parts in the file by key; empty if thinwire did not write the file."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {
        str(key): parts
        for key, parts in known.items()
        if isinstance(parts, list) and all(part in dispatch.PARTS for part in parts)
    }


# ---- what a run needs


def checks_of(config: RunConfig) -> dict[str, tuple[str, Check]]:
    """For each check's name: the part whose kernels it uses, and the check."""
    dtype = getattr(torch, config.training.precision)
    checks: dict[str, tuple[str, Check]] = {
        "matrix products": ("", partial(_products, dtype=dtype)),
        "norms and activations": ("layers", partial(_layers, dtype=dtype)),
        "attention": ("attention", partial(_attention, dtype=dtype)),
    }
    if config.pipeline.sequence_chunks != 1 or config.model.sinks:
        checks["attention of a slice"] = ("attention", partial(_slice_attention, dtype=dtype))
    if config.model.experts:
        bits = PACKED.get(config.lora.base, 0) if config.lora.rank else 0
        checks["experts"] = ("experts", partial(_experts, dtype=dtype, bits=bits % 16))
    for name, kernels in sorted(_codecs(config).items()):
        checks[f"codec {name}"] = (kernels, partial(_codec, name=name))
    stored = _stored_bits(config)
    for bits in stored:
        apart = " with channels apart" if bits >= APART else ""
        checks[f"storage in {bits % APART} bits{apart}"] = ("storage", partial(_storage, bits=bits))
    if stored and stored[0] < 16:
        checks["layers that store"] = ("storage", partial(_storing_layers, bits=stored[0]))
    if "fp8" in (config.training.gradients, config.training.moments, config.training.compute):
        checks["gradients in FP8"] = ("fp8", _fp8)
    if config.training.compute == "fp8":
        checks["products in FP8"] = ("fp8", partial(_fp8_products, dtype=dtype))
    chosen = config.training.optimizer, config.training.adapter_optimizer
    if "orthogonal" in {OPTIMIZERS[name].KERNELS for name in chosen}:
        checks["muon"] = ("orthogonal", _orthogonal)
    return checks


def _codecs(config: RunConfig) -> dict[str, str]:
    """One codec of each arithmetic that links and sums may use, and its kernels."""
    names = {config.pipeline.forward_codec, config.pipeline.backward_codec, *config.sync_codecs}
    if PLANNED in names:
        names |= {*planned_names(), *(codec_format(name).for_gradients for name in planned_names())}
    known = [form for form in map(known_format, names) if form is not None]
    return {form.golden[0]: form.KERNELS for form in known if form.golden[0]}


def _stored_bits(config: RunConfig) -> list[int]:
    """The bits of all forms in which a stage may store activations and frozen weights, the fewest first."""
    forms = {getattr(storage, kind) for storage in allowed_storages(config) for kind in KINDS}
    forms |= {config.lora.base} if config.lora.rank else set()
    bits = {PACKED[form] for form in forms if form in PACKED}
    return sorted(bits | set(STAGE_BITS) if config.storage.bits_by_stage else bits)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """float32 numbers around 0, some of them large. They have the same bits in every version of torch."""
    count = torch.Size(shape).numel()
    whole = random_bits(count, seed, _CPU).float() - 32767.5
    return (whole * torch.where(random_bits(count, seed + 1, _CPU) % 97 == 0, 2.0**-9, 2.0**-14)).view(shape)


def digest(*parts: Tensor) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def golden(name: str, device: torch.device) -> str:
    """The digest of this codec's golden vector (`Format.golden`), as the device computes it."""
    which, x = codec(name), drawn(6, 200)
    packed = which.encode(x if dispatch.kind_of(device).main_memory else x.to(device))
    return digest(packed, which.decode(packed, TensorSpec(x.dtype, tuple(x.shape))))


def _codec(device: torch.device, name: str) -> bool:
    return golden(name, device) == codec_format(name).golden[1]


def _same(results: Iterable[Tensor], wanted: Iterable[Tensor]) -> bool:
    return all(torch.equal(part.cpu(), exact) for part, exact in zip(results, wanted, strict=True))


def _near(results: Iterable[Tensor], wanted: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """Whether all tensors are the wanted ones, apart from rounding in `dtype`."""
    error = _SINGLE_ERROR if dtype == torch.float32 else _HALF_ERROR
    return all(_within(part, exact, error) for part, exact in zip(results, wanted, strict=True))


def _within(result: Tensor, wanted: Tensor, error: float) -> bool:
    wanted = wanted.double()
    # A NaN is not near.
    return bool((result.cpu().double() - wanted).norm() <= error * wanted.norm())


def _products(device: torch.device, dtype: torch.dtype) -> bool:
    a, b = drawn(64, 96).to(dtype), drawn(48, 96, seed=3).to(dtype)
    return _near([a.to(device) @ b.to(device).t()], [a.double() @ b.double().t()], dtype)


def _storage(device: torch.device, bits: int) -> bool:
    x = drawn(6, 200)
    packed = storage.store(x.to(device), bits)
    back = storage.restore(packed, x.shape, bits, torch.float32)
    wanted = blockfloat.pack(x, bits)
    return _same([packed, back], [wanted, blockfloat.unpack(wanted, x.shape, bits, torch.float32)])


def _storing_layers(device: torch.device, bits: int) -> bool:
    """Norm and feed-forward that store their inputs."""
    x, weight, grad = drawn(6, 256), drawn(256, seed=3), drawn(6, 256, seed=5)
    there = [part.to(device) for part in (x, weight, grad)]
    normed, packed = storage.norm_store(there[0], there[1], None, 1e-5, bits, torch.float32)
    wanted, right = blockfloat_layers.norm_store(x, weight, None, 1e-5, bits, torch.float32)
    grads = storage.norm_backward(there[2], packed, there[0], there[1], None, 1e-5, bits)
    exact = blockfloat_layers.norm_backward(grad, right, x, weight, None, 1e-5, bits)
    inner, *stored = storage.ffn_store(there[0], there[2], bits)
    of_inner, *kept = blockfloat_layers.ffn_store(x, grad, bits)
    back = storage.ffn_backward(there[0].clone(), stored[0], stored[1], bits)
    of_back = blockfloat_layers.ffn_backward(x.clone(), kept[0], kept[1], bits)
    results, references = [normed, *grads[:2], inner, back], [wanted, *exact[:2], of_inner, of_back]
    return _same([packed, *stored], [right, *kept]) and _near(results, references, torch.float32)


def _layers(device: torch.device, dtype: torch.dtype) -> bool:
    x, weight = drawn(6, 256), drawn(256, seed=3)
    halves = [drawn(6, 256, seed=seed).to(dtype) for seed in (5, 7, 9)]
    gate, up, grad = (part.to(device) for part in halves)
    there, weight_there = x.to(device), weight.to(device)
    # Copies, because gradients of activations and losses overwrite their inputs.
    logits, labels = there.to(dtype, copy=True), torch.arange(6, device=device)
    pairs = [
        layers.norm(there, weight_there, None, 1e-5, dtype),
        *layers.norm_backward(grad, there, there, weight_there, None, 1e-5)[:2],
        layers.activation(gate, up),
        *layers.activation_backward(grad.clone(), gate, up)[1],
        layers.residual(there, gate),
        layers.cross_entropy_(logits, labels, -100, 0.5),
        logits,
    ]
    gate, up, grad = (part.float() for part in halves)
    of_x, of_weight, _ = reference.norm_gradient(grad, x, weight, None, 1e-5)
    logits, labels = x.to(dtype).float(), torch.arange(6)
    wanted = [
        reference.norm(x, weight, None, 1e-5),
        *(of_x + x, of_weight),
        reference.gated(gate, up, by_gelu=False),
        *reference.gated_gradient(grad, gate, up, by_gelu=False),
        x + gate,
        reference.cross_entropy_(logits, labels, -100, 0.5),
        logits,
    ]
    heads = drawn(1, 2, 8, 64).to(dtype)
    cos, sin = (drawn(8, 32, seed=seed).repeat(1, 2) for seed in (3, 5))
    turned = layers.rotate(heads.to(device, copy=True), cos.to(device), sin.to(device))
    return _near(pairs, wanted, dtype) and _same([turned], [reference.rotate(heads, cos, sin)])


def _attention(device: torch.device, dtype: torch.dtype) -> bool:
    query, key, value, grad = _heads(64, dtype)
    there = query.to(device), key.to(device), value.to(device)
    out, sums = attention.attention(*there)
    grads = attention.attention_backward(grad.to(device), *there, out, sums)
    exact = query.float(), key.float(), value.float()
    wanted, of_sums = attention_reference.attention(*exact, EVERYTHING, None)
    gradients = attention_reference.attention_backward(grad.float(), *exact, wanted, of_sums, EVERYTHING)
    return _near([out, *grads], [wanted, *gradients], dtype)


def _slice_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """The last queries of a sample, with sinks and a window."""
    query, key, value, grad = _heads(32, dtype)
    reach, sinks = Reach(window=40), drawn(4, seed=9)
    there = query.to(device), key.to(device), value.to(device)
    out, sums = attention.attention(*there, reach, sinks.to(device))
    onto = [torch.zeros(part.shape, device=device) for part in (key, value)]
    of_query = attention.chunk_backward(
        grad.to(device), *there, out, sums, onto[0], onto[1], reach, sinks.to(device)
    )
    exact = query.float(), key.float(), value.float()
    wanted, of_sums = attention_reference.attention(*exact, reach, sinks)
    gradients = attention_reference.attention_backward(grad.float(), *exact, wanted, of_sums, reach)
    return _near([out, of_query, *onto], [wanted, *gradients], dtype)


def _heads(queries: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    # Without outliers: if one key has all the weight, gradients are differences of equal numbers.
    shapes = (4, queries), (2, 64), (2, 64), (4, queries)
    return [
        drawn(1, heads, length, 64, seed=seed).clamp(-2, 2).to(dtype)
        for seed, (heads, length) in enumerate(shapes, start=1)
    ]


def _experts(device: torch.device, dtype: torch.dtype, bits: int) -> bool:
    """Test a router and products by expert, with weights packed in this many bits, or 0."""
    logits, grad = drawn(24, 8), drawn(48, 128, seed=5).to(dtype)
    x, weights = drawn(24, 128, seed=3).to(dtype), drawn(8, 128, 128, seed=7).to(dtype)
    _, chosen = experts.route(logits.to(device), 2, True)
    shares, right = experts_reference.route(logits, 2, True)
    order, wanted_order = experts.group(chosen, 8), experts_reference.group(right, 8)
    used, exact = _both_weights(weights, bits, device)
    rows = experts.matmul(x.to(device), used, order, None, gathers=True)
    pairs = [
        rows,
        experts.input_gradient(grad.to(device), used, order),
        experts.combine(rows, shares.to(device), order),
    ]
    rows = experts_reference.matmul(x.float(), exact, wanted_order, None, gathers=True)
    wanted = [
        rows,
        experts_reference.input_gradient(grad.float(), exact, wanted_order),
        experts_reference.combine(rows, shares, wanted_order),
    ]
    if not bits:
        args = order, torch.float32
        pairs.append(experts.weight_gradient(grad.to(device), x.to(device), *args, gathers=True))
        of_weights = experts_reference.weight_gradient(
            grad.float(), x.float(), wanted_order, torch.float32, gathers=True
        )
        wanted.append(of_weights)
    indices = [chosen, order.slots, order.offsets], [right, wanted_order.slots, wanted_order.offsets]
    return _same(*indices) and _near(pairs, wanted, dtype)


def _both_weights(
    weights: Tensor, bits: int, device: torch.device
) -> tuple[experts.Weights, experts.Weights]:
    """The weights as the device uses them, and in float32 on the CPU."""
    if not bits:
        return weights.to(device), weights.float()
    packed = torch.stack([blockfloat.pack(weight.float(), bits) for weight in weights])
    there, own = (
        experts.PackedExperts(packed=part, outputs=weights.shape[1], inputs=weights.shape[2], bits=bits)
        for part in (packed.to(device), packed)
    )
    return there, own


def _fp8(device: torch.device) -> bool:
    addend = drawn(1000)
    result, wanted = Fp8Gradient.zeros(1000, device), Fp8Gradient.zeros(1000, _CPU)
    fp8.accumulate_gradient(result, addend.to(device))
    fp8_reference.accumulate_gradient(wanted, addend)
    return _same([result.codes, result.exponents], [wanted.codes, wanted.exponents])


def _fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    x, weight = drawn(32, 64).to(dtype), drawn(48, 64, seed=3).to(dtype)
    coded = [products.code_rows(part.to(device)) for part in (x, weight)]
    wanted = [fp8_rows.Coded.empty(len(part), part.shape[1], _CPU) for part in (x, weight)]
    for part, into in zip((x, weight), wanted, strict=True):
        fp8_rows.code_rows(part, into)
    bits = [
        [part_tensor for part in parts for part_tensor in (part.codes.view(torch.uint8), part.scales)]
        for parts in (coded, wanted)
    ]
    result = products.product(coded[0], coded[1], dtype)
    return _same(*bits) and _near([result], [fp8_rows.product(wanted[0], wanted[1], torch.float32)], dtype)


def _orthogonal(device: torch.device) -> bool:
    matrix = drawn(32, 64)
    result = orthogonal.orthogonal([matrix.to(device)])
    return _within(result, orthogonal_reference.orthogonal([matrix]), _ITERATED_ERROR)
