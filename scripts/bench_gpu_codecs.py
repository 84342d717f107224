"""Bits and speed of the Triton kernels on this GPU: `python scripts/bench_gpu_codecs.py --out PATH`.

First every kernel's bits against the CPU's reference, in processes side by side because compiling takes most
of the time; whatever fails is printed and counted, and the rest goes on. Then times, against a copy on the
device of the same tensor timed in the same run: CUDA graphs of calls on several tensors in turn, so that none
finds its input in the cache; the median of the replays. A rate is bytes that must move (the tensor once, the
packed form once) over time, and `of copy` is that over the copy's rate (bytes read and written).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kernels import fixed, tah
from kernels.triton_launch import Launch
from wire.codecs import tah as tah_codec
from wire.codecs.fixed import FixedCodec
from wire.codecs.layout import Layout
from wire.codecs.registry import codec
from wire.errors import CodecError
from wire.spec import TensorSpec

ROOT = Path(__file__).resolve().parents[1]
GUARD = 256
POISON = 0xA5
SHAPES = {"large": (8192, 4096), "small": (2, 4096, 2048)}
TARGETS = {"fixed encode": 0.85, "fixed decode": 0.85, "tah encode": 0.60, "tah decode": 0.75}
PARTS = ("tah-bf16", "tah-fp32", "tah-fp16", "fixed-flat", "fixed-dtypes", "fixed-odd", "graph")


# --- tensors ---------------------------------------------------------------------------------------------


def sample(shape: tuple[int, ...], seed: int, spikes: float = 1e-4) -> torch.Tensor:
    """Normal, a share `spikes` 30 times larger: at 1e-4 one tile in 160 is an outlier, as in training."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    return torch.where(torch.rand(shape, generator=generator, device="cuda") < spikes, x * 30, x)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that take every path, on the CPU."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def mixed() -> torch.Tensor:
        a = normal(2, 50, 256)
        a[0, 0, :64] = 0
        a[0, 1, :64] = 1.5
        a[0, 2] *= 1e-3
        a[0, 3, 64:128] *= 1e-6
        a[1, 4:9] *= torch.logspace(-7, -1, 5)[:, None]
        a[1, ::3, 70] = 100
        a[1, 11, 255] = -300
        return a

    whole = {
        "mixed": mixed(),
        "many tiles": normal(7, 300, 128) ** 3,
        "one tile": normal(1, 64),
        "ties": torch.randint(-5, 6, (40, 192), generator=generator).float(),
        "ones": torch.ones(2, 33, 64),
        "zeros": torch.zeros(5, 64),
        "outliers": torch.eye(64).repeat(3, 1) + normal(192, 64) * 0.01,
        "massive": normal(64, 128) * torch.logspace(-4, 0, 64)[:, None],
        "negative": -normal(9, 64).abs() - 1,
    }
    odd = {
        "width 200": normal(3, 64, 200) ** 3,
        "width 1": normal(70, 1),
        "width 63": normal(2, 9, 63),
        "width 65": normal(33, 65) - 2,
        "vector": normal(1000),
        "single": torch.tensor([-3.0]),
        "columns": normal(30, 512)[:, 64:192],
        "every other row": normal(31, 128)[::2],
        "transposed": normal(128, 40).t(),
        "unaligned": normal(8 * 64 + 3)[3:].view(8, 64),
    }
    extreme = {
        "tiny": normal(6, 130) * 1e-38,
        "subnormal": normal(6, 64) * 1e-44,
        "huge": normal(40, 64).clamp(-3, 3) * 1e38,
        "wide": normal(40, 64) * torch.logspace(-38, 37, 40)[:, None],
        "one huge": torch.cat((normal(20, 64), torch.full((1, 64), 1e30))),
        "one spike": torch.cat((torch.zeros(20, 64), torch.eye(64)[:1] * 1e-30)),
    }
    for name, x in {**whole, **odd}.items():
        # A view stays a view: its layout is part of the test.
        yield name, x if dtype == torch.float32 else x.to(dtype)
    if dtype != torch.float16:
        yield from ((name, x.to(dtype)) for name, x in extreme.items())
    else:
        yield (
            "fp16's range",
            (normal(20, 128) * torch.logspace(-7, 4, 20)[:, None]).clamp(-65504, 65504).half(),
        )


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """The same values and strides on the GPU."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    store = torch.full((x.storage_offset() + span,), float("nan"), dtype=x.dtype, device="cuda")
    view = store.as_strided(x.shape, x.stride(), x.storage_offset())
    return view.copy_(x)


class Guarded:
    """A payload between guards, poisoned, on the GPU."""

    def __init__(self, nbytes: int) -> None:
        self.whole = torch.full((nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
        self.payload = self.whole[GUARD : GUARD + nbytes]

    def intact(self) -> bool:
        return bool((self.whole[:GUARD] == POISON).all() and (self.whole[-GUARD:] == POISON).all())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8).cpu()


# --- checks ----------------------------------------------------------------------------------------------


class Checks:
    def __init__(self) -> None:
        self.done = 0
        self.failed: list[str] = []

    def that(self, good: bool, what: str) -> None:
        self.done += 1
        if not good:
            self.failed.append(what)
            print("FAILED:", what, flush=True)

    def guard(self, what: str, work: Callable[[], None]) -> None:
        """Run `work`; an exception is a failure with its last lines, not the end."""
        try:
            work()
            torch.cuda.synchronize()
        except Exception as problem:  # whatever it is, the other checks are to run
            lines = traceback.format_exception(problem)
            self.that(
                False, f"{what}: {type(problem).__name__}: {str(problem)[:600]}\n{''.join(lines)[-1500:]}"
            )


def check_tah(checks: Checks, name: str, x: torch.Tensor, tau: float, variants: list[dict[str, Any]]) -> None:
    from kernels import triton_tah, triton_tah_decode

    samples, tiles = tah_codec._samples_and_tiles(tuple(x.shape))
    four_bit = tah_codec.four_bit_tiles(tiles)
    layout = tah_codec._layout(tuple(x.shape))
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    sections = tah.TahSections(*layout.views(expected))
    exponent = tah.encode(x, sections, samples=samples, four_bit=four_bit, tau=tau)
    decoded = torch.empty(x.shape, dtype=x.dtype)
    tah.decode(sections, decoded, int(exponent))
    there = on_gpu(x)
    for variant in variants:
        launch, look_up = variant["launch"], variant.get("look_up", True)
        what = f"tah {name} {x.dtype} tau {tau} {variant}"

        def work(what: str = what, launch: Launch = launch, look_up: bool = look_up) -> None:
            made = Guarded(layout.nbytes)
            layout.clear_gaps(made.payload)
            found = torch.full((1,), 77, dtype=torch.int32, device="cuda")
            parts = layout.views(made.payload)
            triton_tah.encode(
                there,
                *parts,
                found,
                samples=samples,
                four_bit=four_bit,
                tau=tau,
                measure=launch,
                again=launch,
                chunk=64 if launch.tiles == 32 else 1024,
                look_up=look_up,
            )
            wrong = [
                section
                for section, mine, good in zip(tah.TahSections._fields, parts, sections, strict=True)
                if not torch.equal(bits(mine), bits(good))
            ]
            checks.that(not wrong, f"{what}: encode differs in {wrong}")
            checks.that(int(found) == int(exponent), f"{what}: exponent {int(found)}, not {int(exponent)}")
            checks.that(made.intact(), f"{what}: encode wrote outside")
            target = Guarded(x.numel() * x.element_size())
            out = target.payload.view(x.dtype).view(x.shape)
            good_parts = layout.views(expected.cuda())
            status = triton_tah_decode.decode(
                *good_parts,
                out,
                exponent.cuda().view(1),
                samples=samples,
                four_bit=four_bit,
                launch=launch,
                turn=launch,
            )
            checks.that(int(status.max()) == 0, f"{what}: decode says {int(status.max())}")
            checks.that(torch.equal(bits(out), bits(decoded)), f"{what}: decode differs")
            checks.that(target.intact(), f"{what}: decode wrote outside")

        checks.guard(what, work)


def check_fixed(
    checks: Checks, name: str, x: torch.Tensor, width: int, constant: float, launches: list[Launch]
) -> None:
    from kernels import triton_fixed

    layout: Layout = FixedCodec(width)._layout(tuple(x.shape))
    expected = torch.zeros(layout.nbytes, dtype=torch.uint8)
    sections = fixed.FixedSections(*layout.views(expected))
    exponent = fixed.encode(x, sections, constant=constant)
    decoded = torch.empty(x.shape, dtype=x.dtype)
    if int(exponent) != 0x7FFF:
        fixed.decode(sections, decoded, int(exponent), constant=constant)
    there = on_gpu(x)
    for launch in launches:
        what = f"fixed-{width} {name} {x.dtype} c {constant} {launch}"

        def work(what: str = what, launch: Launch = launch) -> None:
            made = Guarded(layout.nbytes)
            layout.clear_gaps(made.payload)
            found = torch.full((1,), 77, dtype=torch.int32, device="cuda")
            parts = layout.views(made.payload)
            finish = Launch(launch.tiles * 4, launch.lanes, launch.warps)
            triton_fixed.encode(there, *parts, found, constant=constant, launch=launch, finish=finish)
            checks.that(int(found) == int(exponent), f"{what}: exponent {int(found)}, not {int(exponent)}")
            checks.that(made.intact(), f"{what}: encode wrote outside")
            if int(exponent) == 0x7FFF:
                return
            wrong = [
                section
                for section, mine, good in zip(fixed.FixedSections._fields, parts, sections, strict=True)
                if not torch.equal(bits(mine), bits(good))
            ]
            checks.that(not wrong, f"{what}: encode differs in {wrong}")
            target = Guarded(x.numel() * x.element_size())
            out = target.payload.view(x.dtype).view(x.shape)
            status = triton_fixed.decode(
                *layout.views(expected.cuda()), out, exponent.cuda().view(1), constant=constant, launch=launch
            )
            checks.that(int(status.max()) == 0, f"{what}: decode says {int(status.max())}")
            checks.that(torch.equal(bits(out), bits(decoded)), f"{what}: decode differs")
            checks.that(target.intact(), f"{what}: decode wrote outside")

        checks.guard(what, work)


def check_graph(checks: Checks) -> None:
    """A captured graph gives the bits of whatever its input holds at replay; what is bad is refused."""
    for name in ("tah", "fixed-8"):
        which = codec(name)
        x = sample((3, 40, 192), 1).bfloat16()
        spec = TensorSpec(x.dtype, tuple(x.shape))

        def capture(
            name: str = name, which: Any = which, x: torch.Tensor = x, spec: TensorSpec = spec
        ) -> None:
            run, packed, out = calls(name, x)
            for step in run:
                step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for step in run:
                    step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for step in run:
                    step()
            for seed in range(3):
                x.copy_(sample(tuple(x.shape), 10 + seed) * 10.0 ** (seed - 1))
                packed.fill_(POISON)
                out.fill_(float("nan"))
                graph.replay()
                if name == "tah":
                    # What lies between the sections is the caller's.
                    tah_codec._layout(tuple(x.shape)).clear_gaps(packed)
                want = which.encode(x.cpu())
                checks.that(torch.equal(packed.cpu(), want[64:]), f"graph {name} {seed}: encode differs")
                good = which.decode(want, spec)
                checks.that(torch.equal(bits(out), bits(good)), f"graph {name} {seed}: decode differs")

        checks.guard(f"graph {name}", capture)

        def refuse(
            name: str = name, which: Any = which, x: torch.Tensor = x, spec: TensorSpec = spec
        ) -> None:
            packed = which.encode(x)
            checks.that(torch.equal(packed.cpu(), which.encode(x.cpu())), f"wire {name}: encode differs")
            checks.that(
                torch.equal(bits(which.decode(packed, spec)), bits(which.decode(packed.cpu(), spec))),
                f"wire {name}: decode differs",
            )
            header = which.open(packed.cpu().numpy(), spec)
            # Scales come first; tah's bit-map behind scales and zero-points.
            tiles = x.numel() // 64
            damage = {"nan scale": (64, b"\x00\x7e"), "zero scale": (66, b"\x00\x00")}
            if name == "tah":
                damage["map"] = (64 + tiles * 4, bytes((packed[64 + tiles * 4].item() ^ 1,)))
                damage["nan zero-point"] = (64 + tiles * 2, b"\xff\x7f")
            else:
                damage["codes"] = (-1, b"\xff")
            for kind, (place, value) in damage.items():
                host = packed.cpu().clone()
                if kind == "codes":
                    host[64 + tiles * 2 :] = 255
                else:
                    host[place : place + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
                errors = []
                for made in (host, host.cuda()):
                    try:
                        which.unpack(made, spec, header)
                        errors.append("none")
                    except CodecError as problem:
                        errors.append(f"{type(problem).__name__}: {problem}")
                checks.that(errors[0] == errors[1] != "none", f"wire {name} {kind}: CPU and GPU say {errors}")
            for bad in (float("nan"), float("inf"), float("-inf")):
                broken = x.clone()
                broken[1, 7, 100] = bad
                found = which.pack(broken)[48:52].view(torch.int32).item()
                checks.that(found == 0x7FFF, f"wire {name} {bad}: exponent {found}")

        checks.guard(f"wire {name}", refuse)


def run_part(part: str) -> Checks:
    checks = Checks()
    few = [Launch(16, 8, 1), Launch(32, 4, 4)]
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    if part.startswith("tah-"):
        variants = [{"launch": few[0], "look_up": True}, {"launch": few[1], "look_up": False}]
        for name, x in cases(dtypes[part[4:]]):
            checks.guard(f"tah {name}", lambda name=name, x=x: check_tah(checks, name, x, 2.0, variants))
            if name in ("mixed", "width 200") and part == "tah-fp32":
                for tau in (0.0, 4.0, float("inf")):
                    checks.guard(
                        f"tah {name} tau {tau}",
                        lambda name=name, x=x, tau=tau: check_tah(checks, name, x, tau, variants[:1]),
                    )
    elif part == "fixed-flat":
        for width in range(2, 11):
            for name, x in cases(torch.bfloat16):
                if x.shape[-1] % 64 == 0 and x.is_contiguous():
                    launches = few if width in (4, 8) else few[:1]
                    checks.guard(
                        name, lambda n=name, x=x, w=width, s=launches: check_fixed(checks, n, x, w, 1.0, s)
                    )
    elif part in ("fixed-dtypes", "fixed-odd"):
        for dtype in dtypes.values():
            for name, x in cases(dtype):
                flat = x.shape[-1] % 64 == 0 and x.is_contiguous()
                if flat == (part == "fixed-dtypes"):
                    for width, constant in ((4, 1.0), (9, 3.0)):
                        checks.guard(
                            name,
                            lambda n=name, x=x, w=width, c=constant: check_fixed(checks, n, x, w, c, few[:1]),
                        )
    elif part == "graph":
        check_graph(checks)
    print(f"{part}: {checks.done} checks, {len(checks.failed)} failed", flush=True)
    return checks


def check_all(parts: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Every part in a process of its own, side by side."""
    started = time.monotonic()
    children = {
        part: subprocess.Popen(
            [sys.executable, __file__, "--part", part],
            env={**os.environ, "OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in parts
    }
    found = {}
    for part, child in children.items():
        try:
            output, _ = child.communicate(timeout=max(1.0, seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
            output += f"\nFAILED: {part} took more than {seconds} s"
        failures = output.count("FAILED:")
        if child.returncode not in (0, 1) and not failures:
            failures = 1
        print(f"--- {part} (exit {child.returncode})\n{output[-3500:]}", flush=True)
        found[part] = {
            "failures": failures,
            "exit": child.returncode,
            "last": output.strip().splitlines()[-1:],
        }
    print(f"checks took {time.monotonic() - started:.0f} s", flush=True)
    return found


# --- times -----------------------------------------------------------------------------------------------


def calls(
    name: str, x: torch.Tensor, **options: Any
) -> tuple[tuple[Callable[[], Any], Callable[[], Any]], torch.Tensor, torch.Tensor]:
    """Encode and decode of x, the packed payload and the decoded tensor; `options` go to the kernels."""
    from kernels import triton_fixed, triton_tah, triton_tah_decode

    exponent = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(x)
    encode_options, decode_options = options.get("encode", {}), options.get("decode", {})
    if name == "tah":
        samples, tiles = tah_codec._samples_and_tiles(tuple(x.shape))
        layout = tah_codec._layout(tuple(x.shape))
        payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
        parts = layout.views(payload)
        split = {"samples": samples, "four_bit": tah_codec.four_bit_tiles(tiles)}
        return (
            (
                lambda: triton_tah.encode(x, *parts, exponent, **split, tau=tah_codec.TAU, **encode_options),
                lambda: triton_tah_decode.decode(*parts, out, exponent, **split, **decode_options),
            ),
            payload,
            out,
        )
    layout = FixedCodec(int(name[6:]))._layout(tuple(x.shape))
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")
    parts = layout.views(payload)
    return (
        (
            lambda: triton_fixed.encode(x, *parts, exponent, constant=1.0, **encode_options),
            lambda: triton_fixed.decode(*parts, out, exponent, constant=1.0, **decode_options),
        ),
        payload,
        out,
    )


def graph_seconds(works: list[Callable[[], Any]], runs: int) -> list[float]:
    """Seconds of one of `works` in a CUDA graph of all, for each of `runs` replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works:
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    for _ in range(3):
        graph.replay()
    taken = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1e3 / len(works))
    return taken


def eager_seconds(work: Callable[[], Any], runs: int) -> float:
    """Median seconds of one call from a host that waits for each: launching included."""
    taken = []
    for _ in range(runs + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def kernel_microseconds(work: Callable[[], Any]) -> dict[str, float]:
    """Mean microseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
    return {
        event.key[:60]: round(event.self_device_time_total / 10, 2)
        for event in recorded.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total > 0
    }


def time_size(size: str, runs: int) -> list[dict[str, Any]]:
    shape = SHAPES[size]
    rotate = 6 if size == "large" else 12
    tensors = [sample(shape, seed).bfloat16() for seed in range(rotate)]
    nbytes = tensors[0].nbytes
    targets = [torch.empty_like(x) for x in tensors]
    copies = [lambda x=x, y=y: y.copy_(x) for x, y in zip(tensors, targets, strict=True)]
    rows: list[dict[str, Any]] = []
    for name in ("fixed-4", "fixed-6", "fixed-8", "tah"):
        try:
            made = [calls(name, x) for x in tensors]
            packed = made[0][1].nbytes
            for index, way in enumerate(("encode", "decode")):
                # The copy is timed around each, so that the ratio is of one moment.
                before = graph_seconds(copies, runs)
                taken = graph_seconds([steps[index] for steps, _, _ in made], runs)
                after = graph_seconds(copies, runs)
                copied = statistics.median(before + after)
                seconds = statistics.median(taken)
                share = (nbytes + packed) / seconds / (2 * nbytes / copied)
                target = TARGETS[f"{name.split('-')[0]} {way}"]
                rows.append(
                    {
                        "size": size,
                        "shape": list(shape),
                        "codec": name,
                        "way": way,
                        "seconds": seconds,
                        "spread_seconds": [min(taken), max(taken)],
                        "bytes": nbytes + packed,
                        "bytes_per_second": (nbytes + packed) / seconds,
                        "copy_bytes_per_second": 2 * nbytes / copied,
                        "of_copy": share,
                        "target": target,
                        "eager_seconds": eager_seconds(made[0][0][index], 20),
                        "kernels_microseconds": kernel_microseconds(made[0][0][index]),
                        "runs": runs,
                        "tensors": rotate,
                    }
                )
        except Exception:  # the other codecs are to be timed
            print(f"FAILED: timing {name} {size}\n{traceback.format_exc()[-2500:]}", flush=True)
            rows.append({"size": size, "codec": name, "failed": traceback.format_exc()[-1000:]})
    return rows


def sweep(runs: int, deadline: float) -> list[dict[str, Any]]:
    """Other launches of the large size, and whether their bits are the CPU's."""
    tensors = [sample(SHAPES["large"], seed).bfloat16() for seed in range(3)]
    host = tensors[0].cpu()
    whole = {name: codec(name).encode(host) for name in ("fixed-4", "tah")}
    wanted = {name: packed[64:].cuda() for name, packed in whole.items()}
    spec = TensorSpec(host.dtype, tuple(host.shape))
    values = {name: codec(name).decode(packed, spec).cuda() for name, packed in whole.items()}
    shapes = [(16, 8, 1), (16, 4, 1), (32, 8, 1), (32, 4, 1), (32, 8, 4)]
    plans: list[tuple[str, str, dict[str, Any]]] = []
    for plan in shapes:
        plans.append(("fixed-4", "encode", {"launch": Launch(*plan)}))
        plans.append(("fixed-4", "decode", {"launch": Launch(*plan)}))
        plans.append(("tah", "decode", {"launch": Launch(*plan)}))
        plans.append(("tah", "encode", {"measure": Launch(*plan), "look_up": True}))
    for plan in shapes[1:3]:
        plans.append(("tah", "encode", {"measure": Launch(*plan), "look_up": False}))
    for plan in ((16, 8, 4), (32, 4, 4)):
        plans.append(("tah", "encode", {"again": Launch(*plan)}))
    for plan in ((32, 4, 4),):
        plans.append(("tah", "decode", {"turn": Launch(*plan)}))
    rows = []
    for name, way, options in plans:
        if time.monotonic() > deadline:
            print(f"no time left for {name} {way} {options}", flush=True)
            continue
        row: dict[str, Any] = {"codec": name, "way": way, "options": str(options)}
        try:
            made = [calls(name, x, **{way: options}) for x in tensors]
            for steps, _, _ in made:
                steps[0]()
                steps[1]()
            right = bool(torch.equal(made[0][1], wanted[name]))
            taken = graph_seconds([steps[way == "decode"] for steps, _, _ in made], runs)
            row |= {"microseconds": statistics.median(taken) * 1e6, "bits_equal": right}
            if way == "decode":
                row["bits_equal"] = right and bool(
                    torch.equal(made[0][2].view(torch.int16), values[name].view(torch.int16))
                )
            if not row["bits_equal"]:
                print(f"FAILED: bits differ: {row}", flush=True)
        except Exception:
            row["failed"] = traceback.format_exc()[-800:]
            print(f"FAILED: {row}", flush=True)
        rows.append(row)
    return rows


def commit() -> str:
    if named := os.environ.get("THINWIRE_COMMIT"):
        return named
    made = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return made.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on this GPU.")
    parser.add_argument("--out", type=Path, help="where the report goes, as JSON")
    parser.add_argument("--runs", type=int, default=25, help="timed replays of each, at least 20")
    parser.add_argument("--part", choices=PARTS, help="only these checks, here (for a sanitizer, say)")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    arguments = parser.parse_args()
    if arguments.part:
        return 1 if run_part(arguments.part).failed else 0
    if arguments.out is None or arguments.runs < 20:
        parser.error("--out is needed, and --runs of at least 20")

    import triton

    report: dict[str, Any] = {
        "commit": commit(),
        "hardware": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "runs": arguments.runs,
        "dtype": "bf16",
        "graphs": True,
    }
    started = time.monotonic()
    report["checks"] = {} if arguments.no_checks else check_all(PARTS, 150.0)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report["times"] = []
    for size in SHAPES:
        report["times"] += time_size(size, arguments.runs)
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if not arguments.no_sweep:
        report["sweep"] = sweep(20, started + 225)
    report["seconds"] = time.monotonic() - started
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    for row in report.get("sweep", []):
        if "microseconds" in row:
            print(
                f"{row['codec']:8} {row['way']} {row['microseconds']:8.1f} us {row['bits_equal']!s:5} "
                f"{row['options']}"
            )
    for row in report["times"]:
        if "failed" not in row:
            print(
                f"{row['size']} {row['codec']:8} {row['way']} {row['seconds'] * 1e6:7.1f} us "
                f"({row['eager_seconds'] * 1e6:.0f} eager) {row['of_copy']:.3f} of copy at "
                f"{row['copy_bytes_per_second'] / 1e12:.2f} TB/s, target {row['target']}: "
                f"{row['kernels_microseconds']}"
            )
    failures = sum(part["failures"] for part in report["checks"].values())
    failures += sum("failed" in row or row.get("bits_equal") is False for row in report.get("sweep", []))
    failures += sum("failed" in row for row in report["times"])
    print(f"{failures} failures, {report['seconds']:.0f} s, report in {arguments.out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
