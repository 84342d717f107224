"""The kernels' bits against the reference on the CPU, between poisoned guards."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from wording import one_line

from gpu_codecs.tensors import Guarded, bits, on_gpu
from kernels.common.dispatch import Launch
from kernels.fixed import reference as fixed
from kernels.tah import reference as tah
from wire.codecs import tah as tah_codec
from wire.codecs.base import Layout
from wire.codecs.fixed import FixedCodec


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
        """Run `work`; an exception is a failure with its last lines, not the end."""
        self.cases += 1
        try:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as problem:  # whatever it is, the other checks are to run
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
