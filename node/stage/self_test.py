"""Whether this node's device computes what a run needs as it should, before the node gets a stage.

Codecs and stored tensors must have the bits of golden vectors or of the reference on the CPU; layers,
attention and optimizers must be near it. A part whose Triton kernels fail is computed in plain torch from
then on, which gives the same bits where bits are promised. What fails that way too refuses the node: it would
spoil the run. Results are kept in a file while the device, its driver and the program stay what they are.
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
from kernels.attention.reach import EVERYTHING
from kernels.blockfloat import ops as storage
from kernels.blockfloat import reference as blockfloat
from kernels.blockfloat.layout import APART
from kernels.common import dispatch
from kernels.common import layers as reference
from kernels.common.random_bits import random_bits
from kernels.fp8 import ops as fp8
from kernels.fp8 import reference as fp8_reference
from kernels.fp8.reference import Fp8Gradient
from kernels.layers import ops as layers
from kernels.orthogonal import ops as orthogonal
from kernels.orthogonal import reference as orthogonal_reference
from node.config.schema import PLANNED, RunConfig
from node.model.storage import KINDS, PACKED, STAGE_BITS
from node.stage.machine_info import arithmetic
from node.tuning.storage_choice import allowed_storages
from wire.codecs.registry import codec
from wire.errors import RunError
from wire.spec import TensorSpec
from wire.version import VERSION

log = logging.getLogger(__name__)

Check = Callable[[torch.device], bool]

CODEC_PARTS = {"tah": "tah", "fixed": "fixed", "aqsgd": "fixed", "trellis": "trellis", "dither": "trellis"}
"""The kernels of a codec, by what its name begins with."""
GOLDEN = {
    "tah": "f4f08814c0a3c246",
    "fixed-2": "c876cf98f2291b7c",
    "fixed-3": "2900ac680954b2d3",
    "fixed-4": "23487e4e80e5c248",
    "fixed-5": "90731e261710e489",
    "fixed-6": "23d82a991100bd1b",
    "fixed-7": "d07d5e55a1533b6c",
    "fixed-8": "6790cf0ea8abaa7f",
    "fixed-9": "b618c90cd8d9b9f6",
    "fixed-10": "ff5791d93e044be2",
    "trellis-4.41": "a1229f1b9b8c91bc",
    "dither-4.41": "15063f69a20e2f60",
}
"""SHA-256, cut short, of what a codec packs `drawn(6, 200)` into and of what it decodes that to."""
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_HALF_ERROR, _SINGLE_ERROR, _ITERATED_ERROR = 2e-2, 1e-4, 6e-2
"""Of a whole tensor, relative: in half precision, in single, and after Newton-Schulz's iterations in
bfloat16, whose rounding alone is 1.5e-2."""
_CPU = torch.device("cpu")
_FORCED = os.environ.get("THINWIRE_PLAIN", "")
"""What is computed without kernels anyway, and so is not tested with them."""


def prepared(config: RunConfig, device: torch.device, kept: Path) -> tuple[str, ...]:
    """Test the device and withdraw the kernels that fail; returns their parts, one of
    `kernels.common.dispatch.PARTS` each. A CPU, which has the references themselves, is not tested.

    Args:
        kept: the file that results are kept in; one that cannot be read or written is as none.

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
    """The parts of which some check fails with kernels and none without.

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
            f"this node's device computes {name} wrong, in plain torch too: update its driver, or join with "
            "another device or with --device cpu"
        )
    return failed


def words_of(failed: Iterable[str]) -> str:
    """One line for the node's owner; empty if nothing failed."""
    if not (parts := ", ".join(failed)):
        return ""
    return f"kernels ({parts}) give wrong results on this device: plain torch does their work, slower"


def _passes(check: Check, device: torch.device) -> bool:
    try:
        return check(device)
    except Exception as error:  # a compiler's, a driver's or a codec's, of many kinds: none may end the node
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
    """What the file says of each key; nothing of a file that is not ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        str(key): parts
        for key, parts in found.items()
        if isinstance(parts, list) and all(part in dispatch.PARTS for part in parts)
    }


# ---- what a run needs


def checks_of(config: RunConfig) -> dict[str, tuple[str, Check]]:
    """By what is checked: the part whose kernels compute it, and the check."""
    dtype = getattr(torch, config.training.precision)
    made: dict[str, tuple[str, Check]] = {
        "matrix products": ("", partial(_products, dtype=dtype)),
        "norms and activations": ("layers", partial(_layers, dtype=dtype)),
        "attention": ("attention", partial(_attention, dtype=dtype)),
    }
    for name in _codecs(config):
        part = CODEC_PARTS[name.partition("-")[0]]
        made[f"codec {name}"] = (part, partial(_codec, name=name))
    for bits in _stored_bits(config):
        apart = " with channels apart" if bits >= APART else ""
        made[f"storage in {bits % APART} bits{apart}"] = ("storage", partial(_storage, bits=bits))
    if "fp8" in (config.training.gradients, config.training.moments, config.training.compute):
        made["gradients in FP8"] = ("fp8", _fp8)
    if "muon" in (config.training.optimizer, config.training.adapter_optimizer):
        made["muon"] = ("orthogonal", _orthogonal)
    return made


def _codecs(config: RunConfig) -> list[str]:
    """One of each kind of codec that links and sums may have, by a name that has golden bits."""
    names = {config.pipeline.forward_codec, config.pipeline.backward_codec, *config.sync_codecs}
    if PLANNED in names:
        names |= {"tah", "fixed-4", "fixed-8", "trellis-4.41", "dither-4.41"}
    found = set()
    for name in names:
        kind, _, bits = name.partition("-")
        if kind in ("trellis", "dither"):
            found.add(f"{kind}-4.41")
        elif kind in CODEC_PARTS:
            found.add(f"fixed-{bits}" if CODEC_PARTS[kind] == "fixed" else kind)
    return sorted(found)


def _stored_bits(config: RunConfig) -> list[int]:
    """Bits of all forms in which a stage may store activations."""
    forms = {getattr(storage, kind) for storage in allowed_storages(config) for kind in KINDS}
    bits = {PACKED[form] for form in forms if form in PACKED}
    return sorted(bits | set(STAGE_BITS) if config.storage.bits_by_stage else bits)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """float32 numbers around 0, some of them large, with the same bits in every version of torch."""
    count = torch.Size(shape).numel()
    whole = random_bits(count, seed, _CPU).float() - 32767.5
    return (whole * torch.where(random_bits(count, seed + 1, _CPU) % 97 == 0, 2.0**-9, 2.0**-14)).view(shape)


def digest(*parts: Tensor) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def golden(name: str, device: torch.device) -> str:
    """The digest that `GOLDEN` has of a codec, as this device computes it."""
    which, x = codec(name), drawn(6, 200)
    packed = which.encode(x if dispatch.kind_of(device).main_memory else x.to(device))
    return digest(packed, which.decode(packed, TensorSpec(x.dtype, tuple(x.shape))))


def _codec(device: torch.device, name: str) -> bool:
    return golden(name, device) == GOLDEN[name]


def _near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    return _within(found, wanted, _SINGLE_ERROR if dtype == torch.float32 else _HALF_ERROR)


def _within(found: Tensor, wanted: Tensor, error: float) -> bool:
    wanted = wanted.double()
    # A NaN is not near.
    return bool((found.cpu().double() - wanted).norm() <= error * wanted.norm())


def _products(device: torch.device, dtype: torch.dtype) -> bool:
    a, b = drawn(64, 96).to(dtype), drawn(48, 96, seed=3).to(dtype)
    return _near(a.to(device) @ b.to(device).t(), a.double() @ b.double().t(), dtype)


def _storage(device: torch.device, bits: int) -> bool:
    x = drawn(6, 200)
    packed = storage.store(x.to(device), bits)
    found = storage.restore(packed, x.shape, bits, torch.float32)
    wanted = blockfloat.pack(x, bits)
    restored = blockfloat.unpack(wanted, x.shape, bits, torch.float32)
    return torch.equal(packed.cpu(), wanted) and torch.equal(found.cpu(), restored)


def _layers(device: torch.device, dtype: torch.dtype) -> bool:
    x, weight = drawn(6, 256), drawn(256, seed=3)
    gate, up = drawn(6, 256, seed=5).to(dtype), drawn(6, 256, seed=7).to(dtype)
    there = [part.to(device) for part in (x, weight, gate, up)]
    normed = layers.norm(there[0], there[1], None, 1e-5, dtype)
    inner = layers.activation(there[2], there[3])
    logits, labels = x.clone().to(dtype), torch.arange(6)
    losses = layers.cross_entropy_(logits.to(device), labels.to(device), -100, None)
    return (
        _near(normed, reference.norm(x, weight, None, 1e-5), dtype)
        and _near(inner, reference.gated(gate.float(), up.float(), by_gelu=False), dtype)
        and _near(losses, reference.cross_entropy_(logits.float(), labels, -100, None), dtype)
    )


def _attention(device: torch.device, dtype: torch.dtype) -> bool:
    # Without outliers: where one key has all the weight, gradients are differences of equal numbers.
    parts = [drawn(1, count, 64, 64, seed=count).clamp(-2, 2).to(dtype) for count in (4, 2, 2, 4)]
    query, key, value, grad = (part.to(device) for part in parts)
    out, sums = attention.attention(query, key, value)
    found = attention.attention_backward(grad, query, key, value, out, sums)
    query, key, value, grad = (part.float() for part in parts)
    wanted, of_sums = attention_reference.attention(query, key, value, EVERYTHING, None)
    gradients = attention_reference.attention_backward(grad, query, key, value, wanted, of_sums, EVERYTHING)
    return _near(out, wanted, dtype) and all(map(_near, found, gradients, [dtype] * 3))


def _fp8(device: torch.device) -> bool:
    addend = drawn(1000)
    found, wanted = Fp8Gradient.zeros(1000, device), Fp8Gradient.zeros(1000, _CPU)
    fp8.accumulate_gradient(found, addend.to(device))
    fp8_reference.accumulate_gradient(wanted, addend)
    return torch.equal(found.codes.cpu(), wanted.codes) and torch.equal(
        found.exponents.cpu(), wanted.exponents
    )


def _orthogonal(device: torch.device) -> bool:
    matrix = drawn(32, 64)
    found = orthogonal.orthogonal([matrix.to(device)])
    return _within(found, orthogonal_reference.orthogonal([matrix]), _ITERATED_ERROR)
