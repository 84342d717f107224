"""Compile every Triton kernel for every kind of GPU in the table, without a GPU.

    python -m scripts.checks.targets [--targets sm_75,gfx942] [--cases NAME,NAME] [--workers N] [--out FILE]
                                     [--assembly FOLDER]

The program's own functions run on tensors in main memory, with kernels that are compiled and assembled by
Triton's bundled tools instead of launched. So the variants are those that the program would use on that kind
of device, with its launch shapes. Each is held against the device: shared memory, warps, registers; and it
says whether multiplications and additions are fused: bits depend on that, and Triton's default will change.
Kernels that no case compiles fail the check. The report on record is scripts/results/targets.json; --out adds
targets to a report of the same commit, as all of them take hours of a processor.

With --assembly, what each variant is compiled to goes to files whose names are the target, the kernel and a
digest: two commits whose folders list the same files compute the same bits on the same GPU.
"""

import argparse
import ast
import hashlib
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import kernels
from kernels.attention.reach import Documents, Reach
from kernels.blockfloat import ops as storage
from kernels.blockfloat.layout import APART, packed_bytes
from kernels.common import devices, dispatch
from kernels.common.devices import Kind
from kernels.experts import ops as experts
from kernels.experts import reference as experts_reference
from kernels.fixed import triton as fixed
from kernels.fp8 import ops as fp8
from kernels.fp8 import products
from kernels.fp8.reference import AdamWStep, Draw, Fp8Gradient, Moment
from kernels.layers import ops as layers
from kernels.orthogonal import ops as orthogonal
from kernels.tah.triton import decode as tah_decode
from kernels.tah.triton import encode as tah_encode
from kernels.trellis import ops as trellis
from kernels.trellis.factors import Factors
from kernels.trellis.grid import grid
from kernels.trellis.tables import DITHERED
from node.lab.results import commit, hardware
from wire.codecs import tah as tah_codec
from wire.codecs import trellis as trellis_codec
from wire.codecs.base import Codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import DitherFormat, FixedFormat, four_bit_tiles, samples_and_tiles
from wire.codecs.header import HEADER_BYTES, Header
from wire.codecs.registry import codec
from wire.codecs.trellis import DitherCodec
from wire.codecs.trellis_payload import Plain
from wire.spec import TensorSpec

TARGETS = tuple(name for name in devices.TABLE if devices.TABLE[name].kernels)
REGISTERS = 65536
"""Of a multiprocessor; a program's threads share them."""
OUT = Path(__file__).parents[1] / "results" / "targets.json"
HALF = (torch.bfloat16, torch.float16)
ALL = (*HALF, torch.float32)
WIDTH = 1024
SALT = 77


@dataclass(frozen=True)
class Compiled:
    """One variant of a kernel for one target."""

    kernel: str
    """Its module and name."""
    variant: str
    """Types of its arguments and its constants."""
    warps: int
    shared_bytes: int
    registers: int
    """Of a thread; vector registers on AMD GPUs."""
    faults: tuple[str, ...]


# ---- the variants: what the program calls


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def payload_of(which: Codec, x: Tensor) -> Tensor:
    size = which.packed_bytes(TensorSpec(x.dtype, tuple(x.shape)))
    return torch.zeros(size - HEADER_BYTES, dtype=torch.uint8)


def tah_case(dtype: torch.dtype, width: int) -> None:
    x = drawn(2, 4, width, dtype=dtype)
    shape, exponent = tuple(x.shape), torch.zeros(1, dtype=torch.int32)
    payload = payload_of(codec("tah"), x)
    sections = tah_codec._layout(shape).views(payload)
    samples, tiles = samples_and_tiles(shape)
    four = four_bit_tiles(tiles)
    tah_encode.encode(x, *sections, exponent, samples=samples, four_bit=four)
    tah_decode.decode(*sections, x, exponent, samples=samples, four_bit=four)


def fixed_case(dtype: torch.dtype, bits: int, width: int) -> None:
    which, x = FixedCodec(FixedFormat(bits)), drawn(4, width, dtype=dtype)
    payload = payload_of(which, x)
    sections, exponent = which._layout(tuple(x.shape)).views(payload), torch.zeros(1, dtype=torch.int32)
    fixed.encode(x, *sections, exponent)
    fixed.decode(*sections, x, exponent)
    if dtype == torch.float32:
        records = torch.zeros(4, -(-(len(payload) + HEADER_BYTES) // 128) * 128, dtype=torch.uint8)
        size = which.packed_bytes(TensorSpec(dtype, (width,)))
        exponents = which._pack_rows(x, records, size)
        rows = which._layout((width,)).views(records[0, HEADER_BYTES:size])
        fixed.decode(*rows, x, exponents, record=records.shape[1])


def trellis_case(name: str) -> None:
    from kernels.trellis.triton import encode

    which, x = codec(name).salted(SALT), drawn(40, 48)
    salt = SALT if which.draws else None
    payload = payload_of(which, x)
    encode.encode(x, payload, trellis_codec.settings(40, 48, len(payload), salt), salt)


def trellis_rows_case() -> None:
    from kernels.trellis.triton import encode

    which, x, salt = DitherCodec(DitherFormat(4.41), SALT), drawn(4, 96), SALT
    spec, where = TensorSpec(x.dtype, (96,)), grid(96)
    size = which.packed_bytes(spec)
    records = torch.zeros(4, -(-size // 128) * 128, dtype=torch.uint8)
    encode.encode_many(
        x,
        trellis_codec.settings(1, 96, size - HEADER_BYTES, salt),
        salt,
        payload=records[0, HEADER_BYTES:size],
        record=records.shape[1],
    )
    plain = Plain(0, 0, 0, np.zeros(where.groups, dtype=np.int64))
    which._decode_rows(
        records, x, [Header(which.parameters, spec, size - HEADER_BYTES)] * 4, [plain] * 4, where
    )


def trellis_restore_case(dtype: torch.dtype) -> None:
    rows, columns, rank = 33, 70, 7
    where, family = grid(rows * columns), DITHERED
    numbers = trellis.classes(torch.zeros(rows, dtype=torch.int32), torch.zeros(columns, dtype=torch.int32))
    for first, salt in ((0, None), (family, SALT)):
        states = torch.zeros(where.groups, where.lanes, dtype=torch.int32)
        counts, words = torch.zeros(where.groups, dtype=torch.int64), torch.empty(64, dtype=torch.int16)
        trellis.decode(states, counts, words, numbers, where, first)
        factors = Factors(
            6,
            torch.ones(rows, rank, dtype=torch.int8),
            torch.ones(columns, rank, dtype=torch.int8),
            torch.ones(rank, dtype=torch.int32),
            torch.ones(rows, dtype=torch.int32),
            torch.ones(columns, dtype=torch.int32),
            -19,
        )
        for by in (None, factors):
            n = torch.zeros(rows * columns, dtype=torch.int32)
            trellis.restore(n, 20 * 1024, by, 0, torch.empty(rows, columns, dtype=dtype), salt)


def storage_case(dtype: torch.dtype, bits: int) -> None:
    x = drawn(3, WIDTH, dtype=dtype)
    storage.restore(storage.store(x, bits), x.shape, bits, dtype)


def norm_case(dtype: torch.dtype, bits: int, width: int, biased: bool) -> None:
    x, grad = drawn(3, width), drawn(3, width, dtype=dtype)
    weight, bias = drawn(width), drawn(width) if biased else None
    if not bits:
        layers.norm(x, weight, bias, 1e-5, dtype)
        layers.norm_backward(grad, x, x, weight, bias, 1e-5)
        layers.norm_backward(grad, x.to(dtype), None, weight, bias, 1e-5)
        return
    _, packed = storage.norm_store(x, weight, bias, 1e-5, bits, dtype)
    storage.norm_from_stored(packed, x.shape, weight, bias, 1e-5, bits, dtype)
    storage.norm_backward(grad, packed, x, weight, bias, 1e-5, bits)


def activation_case(dtype: torch.dtype, bits: int, way: str) -> None:
    gate, up, grad = (drawn(3, WIDTH, dtype=dtype) for _ in range(3))
    second, gelu = None if way == "gelu" else up, way == "gated gelu"
    if bits:
        _, packed, packed_up = storage.ffn_store(gate, second, bits, gelu)
        storage.ffn_backward(grad, packed, None if second is None else packed_up, bits, gelu)
    else:
        layers.activation(gate, second, gelu)
        layers.activation_backward(grad, gate, second, gelu)


def coded_case(dtype: torch.dtype) -> None:
    """What runs that multiply in FP8 use."""
    products.code_rows(drawn(3, WIDTH, dtype=dtype))
    products.code_columns(drawn(3, WIDTH, dtype=dtype))


def layers_case(dtype: torch.dtype) -> None:
    logits = drawn(4, 5000, dtype=dtype)
    for scale in (None, 0.5):
        layers.cross_entropy_(logits, torch.zeros(4, dtype=torch.int64), -100, scale)
    layers.residual(drawn(4, WIDTH), drawn(4, WIDTH, dtype=dtype))
    heads, table = drawn(1, 8, 8, 128, dtype=dtype), drawn(8, 128)
    layers.rotate(heads, table, table)
    layers.rotate(heads[..., :64].contiguous(), table[:, :64], table[:, :64], back=True)
    salt = torch.zeros(1, dtype=torch.int32)
    if dtype != torch.float16:
        layers.drop(drawn(4, WIDTH, dtype=dtype), salt, 0.1, first=0, stride=WIDTH)


def attention_case(dtype: torch.dtype, width: int, way: str) -> None:
    from kernels.attention import triton as attention

    query, key, value = (drawn(1, count, 64, width, dtype=dtype) for count in (4, 2, 2))
    reach, sinks, onto = Reach(), None, None
    if way != "whole":
        starts = torch.zeros(1, 64, dtype=torch.bool)
        starts[0, 5] = True
        reach, sinks = Reach(window=9, documents=Documents.of(starts, query.device)), drawn(4)
        onto = torch.zeros(1, 2, 64, width), torch.zeros(1, 2, 64, width)
    out, sums = attention.forward(query, key, value, reach, sinks)
    attention.backward(query, query, key, value, out, sums, reach, onto)


def experts_case(dtype: torch.dtype, bits: int) -> None:
    x, logits = drawn(16, WIDTH, dtype=dtype), drawn(16, 8)
    # What the kernels would give: which expert decides no variant.
    order = experts_reference.group(torch.zeros(16, 2, dtype=torch.int64), 8)
    weights: experts.Weights = drawn(8, 256, WIDTH, dtype=dtype)
    if bits:
        size = packed_bytes((256, WIDTH), bits)
        packed = torch.zeros(8, size, dtype=torch.uint8)
        weights = experts.PackedExperts(packed=packed, outputs=256, inputs=WIDTH, bits=bits)
    rows = drawn(32, 256, dtype=dtype)
    for normalize in (False, True):
        shares, chosen = experts.route(logits, 2, normalize)
        experts.route_backward(shares, logits, shares, chosen, normalize)
    experts.group(chosen.zero_(), 8)
    for bias in (None, drawn(8, 256, dtype=dtype)):
        experts.matmul(x, weights, order, bias, gathers=True)
    experts.matmul(drawn(32, WIDTH, dtype=dtype), weights, order, None)
    experts.input_gradient(rows, weights, order)
    low, up, down = drawn(32, 8, dtype=dtype), drawn(8, 256, 8, dtype=dtype), drawn(8, 8, WIDTH, dtype=dtype)
    experts.matmul(x, weights, order, None, gathers=True, adapter=(low, up))
    onto = experts.input_gradient(rows, weights, order, adapter=(low, down))
    experts.input_gradient(rows, weights, order, adapter=(low, down), onto=onto)
    if bits:  # of so many rows that they are unpacked before the product
        many = experts_reference.group(torch.zeros(256, 2, dtype=torch.int64), 8)
        experts.matmul(drawn(256, WIDTH, dtype=dtype), weights, many, None, gathers=True)
    if not bits:
        experts.weight_gradient(rows, x, order, dtype, gathers=True)
        experts.weight_gradient(rows, drawn(32, WIDTH, dtype=dtype), order, dtype)
        experts.bias_gradient(rows, order, dtype)
    for own in (shares, None):
        experts.combine(rows, own, order)


def fp8_case(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    gradient, addend = Fp8Gradient.zeros(1000, cpu), drawn(1000, dtype=dtype)
    for draw in (None, Draw(torch.zeros(1, dtype=torch.int64), 5)):
        fp8.accumulate_gradient(gradient, addend, draw)
    several = torch.zeros(2, 1000, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.int8)
    fp8.sum_gradients(*several, gradient)
    parameter = drawn(1000)
    step = AdamWStep(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, clip_coefficient=1.0, salt=SALT
    )
    for given in (gradient, drawn(1000)):
        fp8.momentum_step(given, Moment.zeros(1000, cpu), 0.95, 1.0)
        fp8.adamw_step(parameter, given, Moment.zeros(1000, cpu), Moment.zeros(1000, cpu), step)


def orthogonal_case(rows: int, columns: int) -> None:
    orthogonal.orthogonal([drawn(rows, columns), drawn(rows, columns)])


Cases = dict[str, Callable[[], None]]


def _cases() -> Cases:
    made: Cases = {}

    def add(name: str, case: Callable[..., None], *ways: Iterable[Any]) -> None:
        for way in product(*ways):
            words = " ".join(str(part).removeprefix("torch.") for part in way)
            made[f"{name} {words}"] = partial(case, *way)

    add("tah", tah_case, ALL, (WIDTH, 200))
    add("fixed", fixed_case, HALF[:1], (2, 4, 8, 10), (WIDTH,))
    add("fixed", fixed_case, ALL[1:], (8,), (WIDTH, 200))
    add("trellis", trellis_case, ("trellis-4.41", "dither-4.41"))
    add("trellis rows", trellis_rows_case)
    add("trellis restore", trellis_restore_case, ALL)
    add("storage", storage_case, ALL, (4, 8))
    add("storage", storage_case, HALF[:1], (3, 5, 6, 16, APART + 4))
    add("norm", norm_case, ALL, (0, 4, 8), (WIDTH,), (False,))
    add("norm", norm_case, HALF[:1], (0, 4), (8192, 768), (False, True))
    add("activation", activation_case, ALL, (0, 4, 8), ("gated",))
    add("activation", activation_case, HALF[:1], (0, 4), ("gelu", "gated gelu"))
    add("coded", coded_case, HALF)
    add("layers", layers_case, ALL)
    add("attention", attention_case, ALL, (64, 128), ("whole", "chunk"))
    add("attention", attention_case, HALF, (256,), ("whole", "chunk"))
    add("experts", experts_case, ALL, (0, 4))
    add("experts", experts_case, HALF[:1], (3, 8))
    add("fp8", fp8_case, ALL)
    add("orthogonal", orthogonal_case, (256,), (256, 512))
    add("orthogonal", orthogonal_case, (48,), (16,))
    return made


CASES = _cases()


# ---- compiling


class _Driver:
    """A GPU driver's place, for Triton: there is a device, and nothing runs on it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return str(self._target)

    def get_current_stream(self, _device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def target_of(kind: Kind) -> GPUTarget:
    if kind.name.startswith("sm_"):
        return GPUTarget("cuda", int(kind.name[3:]), kind.lanes)
    return GPUTarget("hip", kind.name, kind.lanes)


Run = Callable[..., Any]


@contextmanager
def instead_of_launching(
    kind: Kind, take: Callable[[Run, JITFunction, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Let the program take main memory for a device of this kind, and hand every launch to `take`, with
    Triton's own way to run it."""
    # As `Any`, since functions are put in the place of others.
    owner: Any = dispatch
    launch, kind_of, has_kernels = JITFunction.run, dispatch.kind_of, dispatch._has_kernels
    chosen: tuple[Any, ...] = (
        dispatch.room,
        dispatch.limits_registers,
        dispatch.most_warps,
    )

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        take(launch, self, args, named)

    owner.kind_of, owner._has_kernels = lambda device: kind, lambda device: True
    for choice in chosen:
        choice.cache_clear()
    JITFunction.run = run
    driver.set_active(_Driver(target_of(kind)))
    try:
        yield
    finally:
        driver._active = None
        JITFunction.run = launch
        owner.kind_of, owner._has_kernels = kind_of, has_kernels
        for choice in chosen:
            choice.cache_clear()


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.fn.__module__.removeprefix('kernels.')}.{kernel.fn.__name__}"


def compiled(target: str, case: str, assembly: Path | None = None) -> list[Compiled]:
    """The variants that a case needs on a target; their assembly goes to files of the folder `assembly`."""
    kind = devices.TABLE[target]
    made: dict[str, Compiled] = {}
    if assembly is not None:
        # Else moved lines change it, too.
        triton.knobs.compilation.disable_line_info = True

    def take(launch: Run, kernel: JITFunction, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        faults = [] if "enable_fp_fusion" in named else ["does not say whether it fuses"]
        shown = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
        types = [str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, Tensor)]
        variant = " ".join([*types, *(f"{name}={value}" for name, value in shown.items())])
        if f"{name_of(kernel)} {variant}" in made:
            return
        shared = registers = 0
        try:
            result = launch(kernel, *args, grid=None, warmup=True, **named)
            shared, registers = result.metadata.shared, registers_of(result.asm)
            if assembly is not None:
                text = result.asm.get("ptx") or result.asm["amdgcn"]
                digest = hashlib.sha256(text.encode()).hexdigest()[:16]
                (assembly / f"{target} {name_of(kernel)} {digest}").write_text(text, encoding="utf-8")
        except Exception as raised:  # whatever Triton and its tools raise is what this looks for
            error: BaseException = raised
            while error.__cause__ is not None:
                error = error.__cause__
            lines = str(error).strip().splitlines() or [""]
            faults.append(f"{type(error).__name__}: {lines[-1]}")
        warps = named.get("num_warps", 4)
        if shared > kind.shared_bytes:
            faults.append(f"{shared} bytes of shared memory, {kind.shared_bytes} there")
        if warps > kind.warps:
            faults.append(f"{warps} warps, {kind.warps} at most")
        if registers * warps * kind.lanes > REGISTERS * (kind.lanes // 32):
            faults.append(f"{registers} registers for each of {warps * kind.lanes} threads")
        made[f"{name_of(kernel)} {variant}"] = Compiled(
            name_of(kernel), variant, warps, shared, registers, tuple(faults)
        )

    with instead_of_launching(kind, take):
        CASES[case]()
    return list(made.values())


def registers_of(asm: dict[str, Any]) -> int:
    """Of a thread, from what was assembled."""
    if (text := asm.get("amdgcn")) is not None:
        return int(re.findall(r"\.vgpr_count:\s+(\d+)", text)[-1])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60, check=True
        )
    return int(re.findall(r"REG:(\d+)", shown.stdout)[-1])


# ---- which kernels there are


def launched_kernels() -> set[str]:
    """Every kernel that the program launches somewhere, by its source."""
    found = set()
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if "triton" not in module.name:
            continue
        loaded = importlib.import_module(module.name)
        if loaded.__file__ is None or module.ispkg:
            continue
        for node in ast.walk(ast.parse(Path(loaded.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                called = node.func.value
                owner = (
                    getattr(loaded, called.value.id)
                    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)
                    else loaded
                )
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                kernel = getattr(owner, name, None)
                if isinstance(kernel, JITFunction):
                    found.add(name_of(kernel))
    return found


def check(
    targets: Sequence[str], names: Sequence[str], workers: int, assembly: Path | None = None
) -> dict[str, Any]:
    """The report: of each target its variants, and the kernels that no case compiles."""
    # Cases of a target one after the other, so that those that take long are spread over the workers.
    asked = [(target, name) for name in names for target in targets]
    results: dict[str, dict[str, Compiled]] = {target: {} for target in targets}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        compiling = pool.map(partial(compiled, assembly=assembly), *zip(*asked, strict=True))
        for (target, name), found in zip(asked, compiling, strict=True):
            for one in found:
                results[target][f"{one.kernel} {one.variant}"] = one
            for fault in (
                f"{target}: {one.kernel} ({one.variant}): {fault}" for one in found for fault in one.faults
            ):
                print(f"{name}: {fault}", file=sys.stderr, flush=True)
    seen = {one.kernel for variants in results.values() for one in variants.values()}
    return {
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "runs": 1,
        "cases": list(names),
        "not_compiled": sorted(launched_kernels() - seen) if len(names) == len(CASES) else [],
        "targets": {
            target: {
                "limits": {"shared_bytes": kind.shared_bytes, "warps": kind.warps},
                "kernels": _by_kernel(results[target].values()),
            }
            for target, kind in devices.TABLE.items()
            if target in results
        },
    }


def _by_kernel(variants: Iterable[Compiled]) -> dict[str, dict[str, Any]]:
    """What the variants of each kernel take at most."""
    kernels: dict[str, list[Compiled]] = {}
    for one in variants:
        kernels.setdefault(one.kernel, []).append(one)
    return {
        name: {
            "variants": len(found),
            "registers": max(one.registers for one in found),
            "shared_bytes": max(one.shared_bytes for one in found),
            "warps": max(one.warps for one in found),
            "faulty": sum(bool(one.faults) for one in found),
            "faults": [f"{one.variant}: {fault}" for one in found for fault in one.faults],
        }
        for name, found in sorted(kernels.items())
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(TARGETS), help="of the table of devices")
    parser.add_argument("--cases", default="", help="only those whose names begin with one of these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--assembly", type=Path, help="a folder for what the variants are compiled to")
    given = parser.parse_args(argv)
    begins = tuple(given.cases.split(","))
    names = [name for name in CASES if name.startswith(begins)]
    if given.assembly is not None:
        given.assembly.mkdir(parents=True, exist_ok=True)
    report = check(given.targets.split(","), names, given.workers, given.assembly)
    kernels = [one for target in report["targets"].values() for one in target["kernels"].items()]
    count, failed = (sum(one[part] for _, one in kernels) for part in ("variants", "faulty"))
    for name in report["not_compiled"]:
        print(f"no case compiles {name}", file=sys.stderr)
    print(f"{count} variants of {len(dict(kernels))} kernels, {failed} with faults")
    if given.out is not None:
        if given.out.exists():
            before = json.loads(given.out.read_text(encoding="utf-8"))
            if before["commit"] == report["commit"] and before["cases"] == report["cases"]:
                report["targets"] = before["targets"] | report["targets"]
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if failed or report["not_compiled"] else 0


if __name__ == "__main__":
    sys.exit(main())
