"""The quantizers that scripts/bench/rivals.py measures: thinwire's codecs and those of other packages.

Each package is imported when its methods are made, so the others are measured without it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from scripts.report import one_line
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.spec import TensorSpec

OURS = ("fixed-4", "fixed-8", "tah", "trellis-4.41", "trellis-8")
BLOCK = 64


@dataclass(frozen=True)
class Method:
    """One way to pack a tensor; `decode` and `bits` take what `encode` returns."""

    package: str
    name: str
    encode: Callable[[torch.Tensor], Any]
    decode: Callable[[Any], torch.Tensor]
    bits: Callable[[Any], int]
    """Bits of the whole packed tensor."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def ours_on_a_gpu() -> Iterator[Method]:
    """thinwire's codecs on a GPU. As with the other packages, bytes stay there and have no checksum."""
    for name in OURS:
        which = codec(name)

        def decode(packed: tuple[torch.Tensor, TensorSpec], which: Any = which) -> torch.Tensor:
            bytes_, spec = packed
            # A receiver reads the exponent from a header in host memory; here this costs one more wait.
            exponent = int(bytes_[EXPONENT].view(torch.int32).item())
            decoded: torch.Tensor = which.unpack(
                bytes_, spec, replace(which._header(spec), exponent=exponent)
            )
            return decoded

        def encode(x: torch.Tensor, which: Any = which) -> tuple[torch.Tensor, TensorSpec]:
            return which.pack(x), TensorSpec(x.dtype, tuple(x.shape))

        yield Method("thinwire", name, encode, decode, lambda packed: 8 * packed[0].numel(), ("cuda",))


def ours() -> Iterator[Method]:
    for name in OURS:
        which = codec(name)

        def decode(packed: tuple[torch.Tensor, TensorSpec], which: Any = which) -> torch.Tensor:
            decoded: torch.Tensor = which.decode(*packed)
            return decoded

        def encode(x: torch.Tensor, which: Any = which) -> tuple[torch.Tensor, TensorSpec]:
            return which.encode(x), TensorSpec(x.dtype, tuple(x.shape))

        yield Method("thinwire", name, encode, decode, lambda packed: 8 * packed[0].numel(), ("cpu",))


def bitsandbytes_methods() -> Iterator[Method]:
    from bitsandbytes import functional

    def four_bits(packed: tuple[torch.Tensor, Any]) -> int:
        codes, state = packed
        bits = _bits(codes) + _bits(state.absmax)
        if state.nested:
            # Add the scales of the scales, and their mean.
            bits += _bits(state.state2.absmax) + 32
        return bits

    for kind in ("nf4", "fp4"):
        for nested in (False, True):

            def encode(x: torch.Tensor, kind: str = kind, nested: bool = nested) -> Any:
                return functional.quantize_4bit(
                    x, blocksize=BLOCK, quant_type=kind, compress_statistics=nested
                )

            name = f"{kind}, blocks of {BLOCK}{', scales in 8 bits' if nested else ''}"
            yield Method(
                "bitsandbytes", name, encode, lambda packed: functional.dequantize_4bit(*packed), four_bits
            )
    for size in (64, 4096):

        def encode_8bit(x: torch.Tensor, size: int = size) -> Any:
            return functional.quantize_blockwise(x, blocksize=size)

        yield Method(
            "bitsandbytes",
            f"8 bits, blocks of {size}",
            encode_8bit,
            lambda packed: functional.dequantize_blockwise(*packed),
            lambda packed: _bits(packed[0]) + _bits(packed[1].absmax),
        )


def torchao_methods() -> Iterator[Method]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        dequantize_affine,
        quantize_affine,
    )

    for bits, kind, low, high, stored in (
        (4, MappingType.ASYMMETRIC, 0, 15, torch.uint8),
        (8, MappingType.SYMMETRIC, -127, 127, torch.int8),
    ):

        def encode(
            x: torch.Tensor,
            kind: Any = kind,
            low: int = low,
            high: int = high,
            stored: torch.dtype = stored,
        ) -> Any:
            block = (1,) * (x.dim() - 1) + (BLOCK,)
            scale, zero = choose_qparams_affine(
                x, kind, block, stored, low, high, scale_dtype=torch.bfloat16, zero_point_dtype=torch.int8
            )
            codes = quantize_affine(x, block, scale, zero, stored, low, high)
            return codes, block, scale, zero

        def decode(
            packed: Any, low: int = low, high: int = high, stored: torch.dtype = stored
        ) -> torch.Tensor:
            codes, block, scale, zero = packed
            decoded: torch.Tensor = dequantize_affine(codes, block, scale, zero, stored, low, high)
            return decoded

        def size(packed: Any, bits: int = bits) -> int:
            codes, _, scale, zero = packed
            return bits * codes.numel() + _bits(scale) + (_bits(zero) if bits == 4 else 0)

        name = "int4, asymmetric" if bits == 4 else "int8, symmetric"
        yield Method("torchao", f"{name}, blocks of {BLOCK}", encode, decode, size)

    def floats(packed: Any) -> int:
        return _bits(packed.qdata) + _bits(packed.scale)

    def back(packed: Any) -> torch.Tensor:
        decoded: torch.Tensor = packed.dequantize(torch.float32)
        return decoded

    yield Method(
        "torchao",
        "mxfp4, blocks of 32",
        lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32),
        back,
        floats,
    )
    yield Method("torchao", "nvfp4, blocks of 16", NVFP4Tensor.to_nvfp4, back, floats)
    yield Method(
        "torchao",
        "nvfp4, blocks of 16, a scale for the tensor",
        lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
        back,
        lambda packed: floats(packed) + 32,
    )


def hivemind_methods() -> Iterator[Method]:
    from hivemind.compression import (
        BlockwiseQuantization,
        Quantile8BitQuantization,
        Uniform8BitQuantization,
    )
    from hivemind.compression.base import CompressionInfo

    for name, which in (
        ("8 bits, uniform", Uniform8BitQuantization()),
        ("8 bits, quantiles", Quantile8BitQuantization()),
        ("8 bits, blockwise", BlockwiseQuantization()),
    ):

        def encode(x: torch.Tensor, which: Any = which) -> Any:
            info = CompressionInfo.from_tensor(x, key=None, descriptor=None)
            # The wire form: a message in bytes.
            return which.compress(x, info).SerializeToString()

        def decode(packed: bytes, which: Any = which) -> torch.Tensor:
            from hivemind.proto import runtime_pb2

            decoded: torch.Tensor = which.extract(runtime_pb2.Tensor.FromString(packed))
            return decoded

        yield Method("hivemind", name, encode, decode, lambda packed: 8 * len(packed), ("cpu",))


RIVALS: dict[str, Callable[[], Iterator[Method]]] = {
    "thinwire": ours,
    "thinwire, on a GPU": ours_on_a_gpu,
    "bitsandbytes": bitsandbytes_methods,
    "torchao": torchao_methods,
    "hivemind": hivemind_methods,
}


def methods(skipped: list[dict[str, str]]) -> Iterator[Method]:
    """All methods whose package can be imported; the others are recorded with the reason."""
    for package, make in RIVALS.items():
        try:
            yield from list(make())
        except (ImportError, OSError, AttributeError) as error:
            skipped.append({"package": package, "method": "all", "reason": one_line(error)})


def _bits(tensor: torch.Tensor) -> int:
    return 8 * tensor.numel() * tensor.element_size()
