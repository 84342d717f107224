"""Compare the Triton kernels with the CPU's reference, bit for bit, called directly and from CUDA graphs."""

import traceback
from collections.abc import Callable
from typing import Any

import torch

from kernels.common.dispatch import Launch
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from scripts.checks.gpu_kernels import POISON, Guarded, bits, calls, on_gpu, sample
from scripts.report import one_line
from wire.codecs import tah as tah_codec
from wire.codecs.base import Layout
from wire.codecs.fixed import FixedCodec
from wire.codecs.formats import FixedFormat
from wire.codecs.registry import codec
from wire.errors import CodecError
from wire.spec import TensorSpec


class Checks:
    def __init__(self) -> None:
        self.done = 0
        self.cases = 0
        self.failed: list[str] = []

    def that(self, good: bool, what: str) -> None:
        self.done += 1
        if not good:
            self.failed.append(what)
            print("FAILED:", what, flush=True)

    def guard(self, what: str, work: Callable[[], None]) -> None:
        """Run `work`; count an exception as a failure, show its last lines and go on."""
        self.cases += 1
        try:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as problem:  # the other checks still run
            lines = traceback.format_exception(problem)
            self.that(False, f"{what}: {one_line(problem, 600)}\n{''.join(lines)[-1500:]}")


def check_tah(checks: Checks, name: str, x: torch.Tensor, tau: float, variants: list[dict[str, Any]]) -> None:
    from kernels.tah.triton import decode as triton_tah_decode
    from kernels.tah.triton import encode as triton_tah

    samples, tiles = tah_codec.samples_and_tiles(tuple(x.shape))
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
                quantize=launch,
                select=Launch(64, 4) if launch.tiles == 32 else Launch(1024, 4),
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
            )
            checks.that(int(status.max()) == 0, f"{what}: decode says {int(status.max())}")
            checks.that(torch.equal(bits(out), bits(decoded)), f"{what}: decode differs")
            checks.that(target.intact(), f"{what}: decode wrote outside")

        checks.guard(what, work)


def check_fixed(
    checks: Checks, name: str, x: torch.Tensor, width: int, constant: float, launches: list[Launch]
) -> None:
    from kernels.fixed import triton as triton_fixed

    layout: Layout = FixedCodec(FixedFormat(width))._layout(tuple(x.shape))
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
            finish = Launch(launch.tiles * 4, launch.warps)
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
    """Replays of a captured graph encode the input's new values; non-finite input and damage are refused."""
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
                    # The bytes between the sections belong to the caller.
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
            # Scales come first; the bit-map of `tah` follows scales and zero-points.
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
