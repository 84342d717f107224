"""Quantizers that a user could install, beside this project's codecs: true bits, error and speed.

    python -m pip install --target RIVALS --no-deps bitsandbytes torchao hivemind ...
    OMP_NUM_THREADS=1 PYTHONPATH=RIVALS python scripts/bench_rivals.py

hivemind 1.1.12 unpacks nothing with numpy 2.4: give it numpy 2.2. The product needs none of these
packages; what is not installed, or fails, is recorded with its reason. Reads boundaries-step*.safetensors
(`activation.*`, `gradient.*`) from `--data`, THINWIRE_DATA or ../shared/data. All get the tensor in fp32, as
a stage hands it to a link.

Bits count every byte without which the tensor could not be decoded and that depends on it: codes packed as
their width allows, scales, zero-points, code books that are made for the tensor; of ours, the header and the
checksum too. Error is the norm of the difference over the norm of the tensor, in fp64. Speed on a CPU is
processor time of one thread, the least of the runs; with `--device cuda` it is wall time between two
synchronisations, of a tensor of `--elements` made by repeating the real ones; bytes stay on the device.
"""

import argparse
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from node.lab.results import commit, hardware
from wire.codecs.header import EXPONENT
from wire.codecs.registry import codec
from wire.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "scripts" / "results" / "rivals.json"
OURS = ("fixed-4", "fixed-8", "tah", "trellis-4.41", "trellis-8")
BLOCK = 64
RUNS = 5
CUDA_RUNS = 25


@dataclass(frozen=True)
class Method:
    """One way to pack a tensor; `encode` gives whatever `decode` and `bits` take."""

    package: str
    name: str
    encode: Callable[[torch.Tensor], Any]
    decode: Callable[[Any], torch.Tensor]
    bits: Callable[[Any], int]
    """Of the whole tensor."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def ours_on_a_gpu() -> Iterator[Method]:
    """As the others there: bytes stay on the device, without the checksum that the host computes of them."""
    for name in OURS:
        which = codec(name)

        def decode(packed: tuple[torch.Tensor, TensorSpec], which: Any = which) -> torch.Tensor:
            bytes_, spec = packed
            # A receiver reads the exponent from the header, in host memory; here that is one more wait.
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
            # The scales' own scales, and their mean.
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
            # As it goes on the wire: a message in bytes.
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
    """All that can be imported; what cannot is written down with its reason."""
    for package, make in RIVALS.items():
        try:
            yield from list(make())
        except (ImportError, OSError, AttributeError) as error:
            skipped.append({"package": package, "method": "all", "reason": _reason(error)})


def measure(method: Method, tensors: dict[str, list[torch.Tensor]], device: str) -> list[dict[str, Any]]:
    """Bits and error of every kind of tensor: mean and root mean square over the tensors."""
    rows = []
    for kind, xs in tensors.items():
        bits, squares = 0.0, 0.0
        for x in xs:
            packed = method.encode(x.to(device))
            decoded = method.decode(packed).to("cpu").double().view(x.shape)
            bits += method.bits(packed) / x.numel() / len(xs)
            wide = x.double()
            squares += float((decoded - wide).square().sum() / wide.square().sum()) / len(xs)
        error = math.sqrt(squares)
        rows.append(
            {
                "package": method.package,
                "method": method.name,
                "kind": kind,
                "tensors": len(xs),
                "bits_per_element": round(bits, 4),
                "relative_error": float(f"{error:.4g}") if math.isfinite(error) else None,
            }
        )
    return rows


def speed(method: Method, x: torch.Tensor, device: str) -> dict[str, Any]:
    """Nanoseconds an element, encoding and decoding."""
    x = x.to(device)
    packed = method.encode(x)
    method.decode(packed)
    encoding, decoding = [], []
    for _ in range(RUNS if device == "cpu" else CUDA_RUNS):
        start = _now(device)
        packed = method.encode(x)
        middle = _now(device)
        method.decode(packed)
        encoding.append(middle - start)
        decoding.append(_now(device) - middle)
    return {
        "package": method.package,
        "method": method.name,
        "elements": x.numel(),
        "encode_nanoseconds_per_element": round(1e9 * min(encoding) / x.numel(), 4),
        "decode_nanoseconds_per_element": round(1e9 * min(decoding) / x.numel(), 4),
    }


def _now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _bits(tensor: torch.Tensor) -> int:
    return 8 * tensor.numel() * tensor.element_size()


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("bitsandbytes", "torchao", "hivemind", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _hardware(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return hardware()


def main() -> int:
    beside = ROOT.parent / "shared" / "data"
    parser = argparse.ArgumentParser(description="Measure installable quantizers beside the codecs.")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("THINWIRE_DATA", beside)))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 24, help="of the tensor timed on a GPU")
    parser.add_argument("--json", type=Path, default=OUT)
    arguments = parser.parse_args()
    files = sorted(arguments.data.glob("boundaries-step*.safetensors"))
    if not files:
        parser.error(f"no boundaries-step*.safetensors in {arguments.data}")
    torch.set_num_threads(1)
    contents = [load_file(file) for file in files]
    tensors = {
        kind: [x.float() for content in contents for name, x in sorted(content.items()) if kind in name]
        for kind in ("activation", "gradient")
    }
    timed = tensors["activation"][0]
    if arguments.device == "cuda":
        whole = torch.cat([x.flatten() for x in tensors["activation"]])
        repeated = whole.repeat(-(-arguments.elements // whole.numel()))[: arguments.elements]
        timed = repeated.view(1, -1, 1024)

    results: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    load = os.getloadavg()[0]
    for method in methods(skipped):
        if arguments.device not in method.devices:
            if method.package == "thinwire":
                continue
            reason = f"it has no path on {arguments.device}"
            skipped.append({"package": method.package, "method": method.name, "reason": reason})
            continue
        try:
            found = measure(method, tensors, arguments.device)
            timing = speed(method, timed, arguments.device)
        except Exception as error:  # whatever a rival raises is its result
            skipped.append({"package": method.package, "method": method.name, "reason": _reason(error)})
            continue
        results += found
        speeds.append(timing)
        print(found, timing, flush=True)
    print("skipped:", skipped)
    report = {
        "experiment": "rivals",
        "commit": commit(),
        "data": [file.name for file in files],
        "device": arguments.device,
        "hardware": _hardware(arguments.device),
        "load_before": load,
        "threads": 1,
        "runs": RUNS if arguments.device == "cpu" else CUDA_RUNS,
        "versions": _versions(),
        "results": results,
        "speeds": speeds,
        "skipped": skipped,
    }
    # One line a result.
    lines = json.dumps(report, indent=1).replace("\n   ", " ").replace("\n  }", " }")
    arguments.json.write_text(lines + "\n")
    return 0


if __name__ == "__main__":
    # Rivals warn of what is theirs to mend.
    warnings.simplefilter("ignore")
    sys.exit(main())
