"""CUDA graphs of the kernels, host synchronisation, and what the wire's codecs refuse on a GPU."""

from typing import Any

import torch

from gpu_codecs.calls import calls
from gpu_codecs.check import Checks
from gpu_codecs.tensors import POISON, bits, sample
from wire.codecs import tah as tah_codec
from wire.codecs.registry import codec
from wire.errors import CodecError
from wire.spec import TensorSpec


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
